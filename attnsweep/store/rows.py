"""Rows as lines of JSON: how they are written, and what is read of any line."""

from __future__ import annotations

import marshal
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from attnsweep.core.errors import AttnsweepError
from attnsweep.core.files import utf8
from attnsweep.core.trial import OURS, Status, Trial, odd_time, unsound

# Without a limit, a foreign file would give one warning per line.
MAX_WARNINGS = 20


def parse_trials(
    lines: Iterable[bytes], path: Path
) -> tuple[dict[tuple[object, ...], Trial], list[str], int]:
    """Trials by key, warnings, and the number of whole rows, including replaced ones."""
    trials: dict[tuple[object, ...], Trial] = {}
    warnings: list[str] = []
    odd: dict[object, str] = {}
    rows, known = 0, dict[object, Any]()
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        parsed = _parse_row(line)
        if isinstance(parsed, Trial):
            share(parsed, known)
            config = parsed.config  # one that rows share is put in order once
            if (settings := known.get(id(config))) is None:
                settings = known[id(config)] = parsed.key[-1]
            key = (parsed.problem, parsed.provider, parsed.kernel, settings)
            trials[key] = parsed
            rows += 1
            if (why := _odd(parsed)) is not None:
                odd[key] = f"{path}:{number}: {why}"
            elif odd:
                odd.pop(key, None)
        elif not line.endswith(b"\n"):
            warnings.append(
                f"{path}:{number}: dropped the incomplete last line "
                "(its run was killed, or is still writing)"
            )
        else:
            warnings.append(f"{path}:{number}: skipped, not a trial: {parsed}")
    warnings += odd.values()
    if len(warnings) > MAX_WARNINGS:
        rest = len(warnings) - MAX_WARNINGS
        warnings = [*warnings[:MAX_WARNINGS], f"{path}: and {rest} more lines like these"]
    return trials, warnings, rows


def _odd(trial: Trial) -> str | None:
    """The impossible fact of a row, for which nothing is compared with it; or None."""
    found = unsound(trial)
    why = None if found is None else found[1]
    if trial.status is Status.NOISY and (said := odd_time(trial)) is not None:
        why = f"says noisy, but {said}"
    name = trial.kernel if trial.provider == OURS else trial.provider
    return why and f"not ranked: {name} on {trial.problem.label} {why}"


# In recorded runs, only 0.1 to 27 % of the values of these fields are distinct.
_SHARED = ("config", "variant", "schedule", "conditions", "machine", "stages_us", "once_us", "race")
_OWN = _SHARED[-3:]  # which are of one row, unless they are empty


def share(trial: Trial, known: dict[object, Any]) -> None:
    """Give the row the values that a row before it had: so it takes a fourth of the memory.

    known: these values, by their bytes. Rows are frozen, and nobody changes what they hold.
    """
    row, accuracy, used = trial.__dict__, trial.accuracy, trial.resources
    empty, set_in_frozen = known.setdefault(dict, {}), object.__setattr__
    for name in _SHARED:
        if not (value := row[name]):
            row[name] = empty
        elif name not in _OWN:  # version 2 writes equal values as equal bytes
            row[name] = known.setdefault(marshal.dumps(value, 2), value)
    if used is not None and not used.model_extra:
        row["resources"] = known.setdefault(marshal.dumps([used.__dict__], 2), used)
    if accuracy is not None:
        shares, case = accuracy.shares, accuracy.case
        accuracy.__dict__["shares"] = known.setdefault(marshal.dumps(shares, 2), shares)
        accuracy.__dict__["case"] = known.setdefault(case, case)
    if (time := trial.time_us) is not None and not (time.rounds or time.discarded):
        time.__dict__.update(rounds=known.setdefault(list, []), discarded=known[list])
    for part in (trial, trial.time_us, accuracy):
        if part is not None:  # nobody asks which fields a line had, whose names take 2 kB
            names = known.setdefault(type(part), part.__pydantic_fields_set__)
            set_in_frozen(part, "__pydantic_fields_set__", names)
            if not part.__pydantic_extra__:
                set_in_frozen(part, "__pydantic_extra__", empty)


_CONTROL = re.compile(rb"\\u00(?:0[1-8b-f]|1[0-9a-f]|7f|[89][0-9a-f])|\x7f|\xc2[\x80-\x9f]", re.I)


def _printable(data: bytes) -> bytes:
    """JSON whose texts have no control characters, which a terminal would obey."""
    odd = b"\\u00" in data or not data.isascii() or b"\x7f" in data
    return _CONTROL.sub(rb"\\ufffd", data) if odd else data


def _parse_row(line: bytes) -> Trial | str:
    """The Trial in one line, or the reason why there is none."""
    try:
        return Trial.model_validate_json(_printable(line))
    except ValidationError as error:
        return _first(error)
    except AttnsweepError as error:
        return error.what


def row_bytes(trial: Trial) -> bytes:
    """One line of strict JSON with its newline; NaN and infinity are strings, which read back."""
    if trial.detail is not None:
        # Compiler logs may hold bytes that are not UTF-8 and arrive as lone surrogates.
        trial = trial.with_(detail=utf8(trial.detail).decode())
    return to_json(trial.model_dump(mode="json"), inf_nan_mode="strings") + b"\n"


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]
