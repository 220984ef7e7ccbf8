"""Times that recorded runs hold of other problems: where a model-based search begins.

`history.json.xz` comes with the package; scripts/history.py writes it from results/.
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import OURS, Trial
from attnsweep.family.chunks import row_of_today
from attnsweep.family.family import Family

FILE = Path(__file__).with_name("history.json.xz")
# Rows kept of each problem: the ROWS fastest, and at most ROWS of the others.
ROWS = 24
# SMs of every card in the shipped history.
_RECORDED_SMS = 132


@dataclass(frozen=True, slots=True)
class History:
    """Configs of one family that one run timed on one problem, and their first times."""

    kernel: str
    problem: Problem
    run: str
    """`h200/flash_short_h200`: the card and the name of the run."""
    configs: tuple[Mapping[str, Value], ...]
    times_us: tuple[float, ...]

    @staticmethod
    def pack(histories: Iterable[History]) -> bytes:
        """JSON in xz. What all configs of a history share stands once; times have 5 digits."""
        lines = ",\n".join(json.dumps(_facts(history)) for history in histories)
        return lzma.compress(f"[\n{lines}\n]\n".encode(), preset=9 | lzma.PRESET_EXTREME)

    @staticmethod
    def unpack(data: bytes) -> list[History]:
        """The histories that `pack` packed."""
        return [_history(facts) for facts in json.loads(lzma.decompress(data))]


def shipped_history(kernel: str) -> tuple[History, ...]:
    """What the package knows of a family; empty if it knows nothing."""
    return _shipped().get(kernel, ())


def history_on(kernel: Family, sm_count: int) -> tuple[History, ...]:
    """The shipped history of a family for a card: what counts SMs there counts this card's."""
    histories = shipped_history(kernel.name)
    names = {param.name for param in kernel.params if param.counts_sms}
    if sm_count == _RECORDED_SMS or not names:
        return histories

    def counted(config: Mapping[str, Value]) -> dict[str, Value]:
        same = {name for name in names if config.get(name) == _RECORDED_SMS}
        return {**config, **dict.fromkeys(same, sm_count)}

    return tuple(replace(h, configs=tuple(map(counted, h.configs))) for h in histories)


@functools.cache
def _shipped() -> dict[str, tuple[History, ...]]:
    found: dict[str, list[History]] = {}
    for history in History.unpack(FILE.read_bytes()):
        found.setdefault(history.kernel, []).append(history)
    return {kernel: tuple(histories) for kernel, histories in found.items()}


def recorded_history(
    trials: Sequence[Trial], run: str, kernels: Mapping[str, Family]
) -> list[History]:
    """The history of each family and problem of a run: ROWS of the fastest and ROWS others.

    Rows whose config lacks a parameter that their family has today are left out (unless
    Param.absent says its value), and so are rows that were replayed.
    """
    params = {name: {param.name for param in kernel.params} for name, kernel in kernels.items()}
    groups: dict[tuple[str, Problem], list[tuple[float, str, Trial]]] = {}
    for trial in (row_of_today(kernels, trial) for trial in trials):
        today = trial.kernel in params and params[trial.kernel] <= set(trial.config)
        if trial.provider == OURS and today and trial.screened_us and not trial.recorded:
            timed = (trial.screened_us, repr(trial.key), trial)
            groups.setdefault((trial.kernel, trial.problem), []).append(timed)
    found = []
    for (kernel, problem), rows in groups.items():
        rows.sort(key=lambda row: row[:2])
        others = rows[ROWS:]
        kept = rows[:ROWS] + others[:: max(1, -(-len(others) // ROWS))]
        if len(kept) > 1:
            configs = tuple(trial.config for _, _, trial in kept)
            found.append(History(kernel, problem, run, configs, tuple(us for us, _, _ in kept)))
    return found


def _facts(history: History) -> dict[str, Any]:
    first = history.configs[0]
    fixed = {n: v for n, v in first.items() if all(c[n] == v for c in history.configs)}
    params = [name for name in first if name not in fixed]
    rows = [
        [*(config[name] for name in params), float(f"{us:.5g}")]
        for config, us in zip(history.configs, history.times_us, strict=True)
    ]
    named = {"kernel": history.kernel, "run": history.run, "problem": history.problem.label}
    return {**named, "fixed": fixed, "params": params, "rows": rows}


def _history(facts: Mapping[str, Any]) -> History:
    return History(
        facts["kernel"],
        Problem.parse(facts["problem"]),
        facts["run"],
        tuple(
            facts["fixed"] | dict(zip(facts["params"], row, strict=False)) for row in facts["rows"]
        ),
        tuple(row[-1] for row in facts["rows"]),
    )
