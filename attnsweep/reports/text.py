"""The sentences and numbers that describe a problem of a run.

The terminal and the Markdown report use the same sentences; only their tables differ.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from attnsweep.choose.baseline_ratio import below_ranking, fastest_round
from attnsweep.choose.columns import Row, frontier, light_text, named
from attnsweep.core.errors import errors_of
from attnsweep.core.long_problems import shorter_of
from attnsweep.core.trial import OURS, Accuracy, Status
from attnsweep.reports.sections import Section, is_below
from attnsweep.reports.terminal import GLUE
from attnsweep.specs.model import PLAIN_READ, in_other_format

# Each reason takes one line; a problem lists at most this many.
MAX_REASONS = 6
FAILED = ("damaged", "noisy", "wrong", "launch_error", "timeout", "compile_error")


def marks(row: Row) -> list[str]:
    """Marks of a row: base, noisy, in another format, over the limit."""
    said = ["base"] if row["baseline"] and row["provider"] == row["best_baseline"] else []
    said += ["noisy"] if row["status"] == Status.NOISY else []
    if below_ranking(row.facts) is not None:
        other = in_other_format(row["provider"], row.facts.problem)
        kind = "bound" if row["provider"] == PLAIN_READ else "other format" if other else ""
        return [*said, kind or "not ranked"]
    return said + (["over the limit"] if row["over_limit"] else [])


def ratio_text(row: Row, *, name: bool = True, interval: bool = True) -> str:
    """`1.10× (1.09 to 1.11) flash_attn_3`; a ratio to a noisy baseline is `at least` so much."""
    value, of = row["ratio_to_best_baseline"], row["ratio_of"]
    if value is None:
        return "–"
    text = f"{'at least ' * (of == 'bound')}{value:.2f}×"
    if interval and row["ratio_low"] is not None:
        text += f" ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    return f"{text} {row['best_baseline']}" if name else text


def is_recorded(row: Row) -> bool:
    """Whether a recording holds this row; a replay also has rows that its recording lacks."""
    return bool(row["recorded"]) and row["status"] != Status.NO_RECORD


def all_recorded(section: Section) -> bool:
    """Whether a recording holds all rows: then the heading says so, and no row needs a mark."""
    return all(row["recorded"] for row in section.rows if row["status"] != Status.NO_RECORD)


def who(row: Row) -> str:
    """A candidate's family or a baseline's name, marked if its row is recorded."""
    name = row["provider"] if row["baseline"] else row["kernel"]
    return f"{name}†" if is_recorded(row) else str(name)


def origins(section: Section) -> list[str]:
    """GPU and date of the recorded rows."""
    recorded = [row for row in section.rows if is_recorded(row)]
    return sorted({str(row["recorded_on"] or "an unknown GPU") for row in recorded})


def place_of(row: Row) -> str:
    """The rank, with `=` if it is shared, – if it has none."""
    return f"={row['rank']}" if row["tied"] else str(row["rank"] or "–")


def heading(section: Section) -> list[str]:
    """The label, then where, with what and when it was measured or recorded."""
    where = section.environment
    label = section.problem.label
    if all(row["status"] == Status.NO_RECORD for row in section.rows):
        return [label, "the recording has no row of this problem"]
    if all_recorded(section):
        driver = [f"driver {where.driver}"] if where else []
        return [label, f"recorded on {' and '.join(origins(section))}", *driver]
    if where is None:
        return [label, "no usable environment.json: GPU and date unknown"]
    return [label, f"measured on {where.gpu}", f"driver {where.driver}", where.date[:10]]


def bound_line(section: Section) -> str | None:
    """The least time of the problem on this card, the speed of light, and the unit that sets it."""
    limits = section.bounds_us
    if not limits:
        return None
    where = section.environment
    in_l2 = where is not None and section.problem.min_bytes <= where.l2_bytes
    binds = next((row for row in section.rows if row["bound"]), None)
    first, others = "no speed of light known", []
    if binds is not None:
        first = f"speed of light {figure(binds['bound_us'], 3)}{GLUE}µs by {binds['bound']}"
    for unit, us in limits.items():
        if binds is None or unit != binds["bound"]:
            unless = " if not all in L2" if unit == "memory" and in_l2 else ""
            others.append(f"{unit} {figure(us, 3)}{GLUE}µs{unless}")
    return f"{first} ({', '.join(others)})" if others else first


def conditions_line(section: Section) -> str | None:
    """The clock in the rounds, the reasons for throttling, and the clock of the line above."""
    conditions = [row.facts.conditions for row in section.rows if row["rounds"]]
    clocks = [c["sm_mhz"] for c in conditions if isinstance(c.get("sm_mhz"), int | float)]
    throttle = [name for c in conditions for name in c.get("throttle") or ()]
    said = []
    if clocks:
        low, high = f"{min(clocks):.0f}", f"{max(clocks):.0f}"
        span = low if low == high else f"{low}–{high}"
        said.append(f"clock {span}{GLUE}MHz in the rounds")
    said += dict.fromkeys(throttle)
    if not said:
        return None
    line = ", ".join(said)
    if section.environment is not None and section.bounds_us:
        assumed = f"{section.environment.clock_hz / 1e6:.0f}"
        if clocks and {low, high} != {assumed} and assumed != "0":
            line += f"; the speed of light above assumes {assumed}{GLUE}MHz"
    return line


def _timed_alone(row: Row) -> list[str]:
    """A note on a time that was not measured in the same rounds as the others."""
    if row.facts.time_us.samples <= 1:
        return ["timed once"]
    if row["rounds"]:
        return []
    return ["timed only in the race" if row.facts.race else "timed in an earlier session"]


def apart(row: Row) -> bool:
    """Whether its time comes from other rounds than the finals'; tables mark it."""
    return not row["rounds"]


def faster_baseline(section: Section) -> str | None:
    """`torch_cudnn is faster (1.12×)`, if the fastest baseline ranks before the best of ours.

    `torch_cudnn takes less energy (1.12×)`, if energy ranks.
    """
    won, best = section.winner, section.best_baseline
    if won is not None and won["ranked_as"] == "energy":
        before = [r for r in section.rows if r["rank"] and r["rank"] < won["rank"]]
        before = [r for r in before if r["baseline"]]
        least = min(before, key=lambda r: float(r["energy_uj"]), default=None)
        if least is None:
            return None
        return f"{who(least)} takes less energy ({won['energy_uj'] / least['energy_uj']:.2f}×)"
    if won is None or best is None or not best["rank"] or best["rank"] >= won["rank"]:
        return None
    ratio = won["ratio_to_best_baseline"]
    if ratio is None or ratio >= 1:
        return None
    return f"{who(best)} is faster ({1 / ratio:.2f}×)"


def served_lines(section: Section) -> list[str]:
    """The limits of each family that ran and does not serve all problems of its kind."""
    ran = {row["kernel"] for row in section.candidates}
    found = {f["kernel"]: f["serves"] for f in section.spaces if f.get("serves")}
    return [f"{name} serves only {'; '.join(s)}" for name, s in found.items() if name in ran]


def winner_lines(section: Section) -> list[str]:
    """The winner in full, then the stages of the best pipeline of each family."""
    row = section.winner
    if row is None:
        if any(other["rank"] and other["provider"] == OURS for other in section.rows):
            return ["no winner: all candidates were noisy in the rounds; run it again to time them"]
        return ["no candidate is ok: see why below"]
    figures = [
        f"{figure(row[name], digits)}{GLUE}{unit}"
        for name, digits, unit in (
            ("time_us", 4, "µs"),
            ("us_per_head", 3, "µs/head"),
            ("us_per_sequence", 3, "µs/sequence"),
            ("tflops", 3, "TFLOP/s"),
        )
        if name != "us_per_sequence" or section.problem.batch > 1
    ]
    kind = row["timed_as"]
    others = [
        f"{name}{GLUE}{figure(row[f'{name}_us'], 3)}{GLUE}µs"
        for name in ("warm", "cold", "eager")
        if name != kind and row[f"{name}_us"] is not None
    ]
    first = figures[0] if kind == "warm" else f"{kind}{GLUE}{figures[0]}"
    said = [first, *_timed_alone(row), *figures[1:]]
    if row["light"] is not None:
        said.append(light_text(row).replace(" % ", f"{GLUE}% "))
    best = section.best_baseline
    if best is None or row["ratio_of"] is None:
        said.append("no baseline was timed with it")
    else:
        by = " by medians of different rounds" if row["ratio_of"] == "medians" else ""
        fastest = "" if section.lost else ", the fastest baseline"
        said.append(f"{ratio_text(row, name=False)} {who(best)}{fastest}{by}")
    said += others
    chained = row.facts.chained_us
    said += [] if chained is None else [f"chained{GLUE}{figure(chained, 3)}{GLUE}µs"]
    if row["energy_uj"] is not None:
        rank = ", which ranks" if row["ranked_as"] == "energy" else ""
        said.append(f"{row['energy_uj'] / 1e3:.4g}{GLUE}mJ at {row['power_w']:.0f}{GLUE}W{rank}")
    config = f" {row['config']}" if row["config"] else ""
    baseline = faster_baseline(section)
    title = f"* best of ours; {baseline}:" if baseline else "* winner"
    lines = [f"{title} {who(row)}{config}: {', '.join(said)}"]
    for row in section.best_of_families:
        stages = row.facts.stages_us
        if stages:
            rest = row["time_us"] - sum(stages.values())
            each = [f"{name}{GLUE}{us:.1f}" for name, us in stages.items()]
            # Stages timed alone can add up to more than a call of all of them.
            together = f"together{GLUE}{sum(stages.values()):.1f}{GLUE}µs when timed alone"
            each.append(f"rest{GLUE}{rest:.1f}{GLUE}µs" if rest >= 0 else together)
            each += _issued(row)
            lines.append(f"  stages of the best {who(row)}: {' · '.join(each)}")
        if once := row.facts.once_us:
            each = [f"{name}{GLUE}{us:.1f}{GLUE}µs" for name, us in once.items()]
            lines.append(f"  once for all calls, of the best {who(row)}: {' · '.join(each)}")
    return lines


def _issued(row: Row) -> list[str]:
    """The cost of launching alone, and the chunks of a call if there are several."""
    trial = row.facts
    said = []
    if trial.launch_us is not None:
        said.append(f"launches alone{GLUE}{trial.launch_us:.1f}{GLUE}µs")
    schedule = trial.schedule
    if schedule.get("chunks", 1) > 1:
        said.append(
            f"{schedule['chunks']} chunks of {schedule['heads']} heads × {schedule['rows']} "
            f"queries, {schedule['workspace_bytes'] / 2**20:.0f}{GLUE}MiB of workspace"
        )
    return said


def tie_line(section: Section, shown: Sequence[Row]) -> str | None:
    """The line that says what a shared first rank means."""
    tied = [row for row in section.rows if row["tied"]]
    if not tied:
        return None
    visible = {id(row) for row in shown}
    beyond = [f"{who(row)} {row['config']}".strip() for row in tied if id(row) not in visible]
    line = "= tied: no difference above 0.4 % was shown"
    if sum(not row["baseline"] for row in tied) > 1:
        line += "; least shared memory, then fewest registers, breaks the tie"
    return line + (f". Not in the table: {'; '.join(beyond)}" if beyond else "")


def first_line(detail: str | None) -> str:
    """First line of a detail."""
    return next((line.strip() for line in (detail or "").splitlines() if line.strip()), "")


def causes(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Candidates by status, family and reason; reasons that differ in numbers only are one."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if not row["baseline"]:
            reason = re.sub(r"\d[\d.e+-]*", "#", first_line(row["detail"]))
            groups.setdefault((row["status"], row["kernel"], reason), []).append(row)
    return groups


def failures(section: Section) -> list[tuple[str, list[str]]]:
    """One line per cause, with its first candidate as the example.

    With each, every error of the compiler with its source line and caret.
    """
    out = []
    groups = causes([row for row in section.rows if row["status"] in FAILED])
    for (status, kernel, _), rows in groups.items():
        config = f" ({'first: ' * (len(rows) > 1)}{rows[0]['config']})" if rows[0]["config"] else ""
        what = f"{len(rows)} {status.replace('_', ' ')}"
        line = f"{what}: {kernel}: {first_line(rows[0]['detail'])}{config}"
        compiler = status == Status.COMPILE_ERROR
        out.append((line, errors_of(row["detail"] for row in rows) if compiler else []))
    hidden = len(out) - MAX_REASONS
    return out[:MAX_REASONS] + ([(f"and {hidden} more causes", [])] if hidden > 0 else [])


def baseline_lines(section: Section) -> list[str]:
    """Warnings about the baselines that × base compares with, or leaves out."""
    best = section.best_baseline
    lines = [] if section.lost is None else [f"{section.lost}: the same sweep again times it"]
    if best is not None and best["status"] == Status.NOISY:
        us = figure(fastest_round(best.facts), 4)
        lines.append(
            f"{who(best)} stayed noisy: × base takes its fastest round, {us}{GLUE}µs, so that each "
            "ratio is a lower bound"
        )
    for row in section.rows:
        if row["status"] not in (Status.OK, Status.NOISY):
            continue
        why = below_ranking(row.facts)
        said = [f"neither ranked nor taken as base: {why}"] if why is not None else []
        if row is section.plain_read and (share := section.share_of_read) is not None:
            best_has = f"{100 * share:.0f}{GLUE}% of a plain read of K and V"
            said.insert(0, f"the best of ours has {best_has}")  # what a narrow line keeps
        elif row["over_limit"] and row["provider"] != PLAIN_READ:
            said.append(f"error {row['rel_err']:.1e}, over the limit {row['limit']:.1e}")
        if said:
            lines.append(f"{who(row)}: {'; '.join(said)}")
    return lines


def absent_baselines(section: Section) -> list[str]:
    """The baselines that are neither ranked nor listed below the ranking, and why."""

    def reason(row: Row) -> str:
        said = first_line(row["detail"]) or "no reason given"
        if is_recorded(row) and " is not installed" in said:  # there, whatever is installed here
            return f"{said.partition(' is not installed')[0]} was not installed there"
        return said

    return [
        f"baseline {who(row)} {row['status'].replace('_', ' ')}: {reason(row)}"
        for row in section.baselines
        if not row["rank"] and not is_below(row)
    ]


def recorded_lines(section: Section) -> list[str]:
    """Where and when recorded rows were measured."""
    return [f"† recorded on {origin}, not measured in this run" for origin in origins(section)]


_TITLES = {
    "torch_flash": "PyTorch's flash attention",
    "torch_cudnn": "PyTorch's cuDNN attention",
    "torch_efficient": "PyTorch's memory-efficient attention",
    "torch_math": "PyTorch's plain attention",
    "torch_varlen": "PyTorch's varlen_attn",
    "unfused": "unfused attention",
    "flex": "FlexAttention",
    "cudnn": "cuDNN",
    "cudnn_deterministic": "cuDNN's deterministic algorithm",
    "triton_flash": "Triton's fused attention",
    "flash_attn_2": "FlashAttention-2",
    "flash_attn_3": "FlashAttention-3",
    "flash_attn_3_fp8": "FlashAttention-3 in FP8",
    "flash_attn_4": "FlashAttention-4",
    "attnsweep_bf16": "attnsweep's own attention in bf16",
    "flash_attn_3_ready": "FlashAttention-3 with its metadata made before",
    "flash_attn_3_fp8_ready": "FlashAttention-3 in FP8 with its metadata made before",
    "torch_dense": "PyTorch's attention on a dense cache",
    "torch_gathered": "PyTorch's attention behind a gather",
    "flashinfer": "FlashInfer",
    "xqa": "XQA",
}
"""The name that a reader has for each baseline."""


def sentence(section: Section) -> str:
    """`flash_fwd_wgmma is 1.10 ± 0.01 times as fast as FlashAttention-3 (398 against 438 µs) on …`.

    The figure after ± reaches to the farther end of the 95 % interval. A baseline that is faster is
    named first, and no difference is claimed where the interval holds 1. Where a baseline of the
    spec has no row, ours is not said to be faster than any.
    """
    label, row, best = section.problem.label, section.winner, section.best_baseline
    if row is None:
        return f"No candidate is right and timed on {label}."
    ours, us = str(row["kernel"]), figure(row["time_us"], 3)
    unit = "µs" if row["timed_as"] == "warm" else f"µs {row['timed_as']}"
    on, ratio = f" on {label}", row["ratio_to_best_baseline"]
    if is_recorded(row):
        on += f", recorded on {row['recorded_on'] or 'an unknown GPU'}"
    on += "".join(f"; {line}" for line in served_lines(section) if line.startswith(f"{ours} "))
    if best is None or ratio is None:
        return f"{ours} takes {us} {unit}{on}; no baseline was timed with it."
    if section.lost is not None:
        if ratio > 1:
            return f"{ours} takes {us} {unit}{on}; {section.lost}."
        on += f"; {section.lost}"
    baseline = _TITLES.get(best["provider"], best["provider"])
    noisy = row["ratio_of"] == "bound"
    baseline_us = figure(fastest_round(best.facts) if noisy else best["time_us"], 3)
    times, swapped = f"({us} against {baseline_us} {unit}", f"({baseline_us} against {us} {unit}"
    low, high = row["ratio_low"], row["ratio_high"]
    if best["over_limit"]:
        on += f"; the error of {baseline} is over the limit"
    if noisy and ratio <= 1:
        said = f"{baseline} was too noisy to compare with {ours} {times} in its fastest round)"
    elif noisy:
        said = (
            f"{ours} is at least {math.floor(100 * ratio) / 100:.2f} times as fast as {baseline}, "
            f"which was noisy {times} in its fastest round)"
        )
    elif low is None or high is None:
        said = f"{ours} is about {ratio:.2f} times as fast as {baseline} {times}"
        if ratio < 1:
            said = f"{baseline} is about {1 / ratio:.2f} times as fast as {ours} {swapped}"
        said += ", not in the same rounds)"
    elif low <= 1 <= high:
        said = (
            f"No difference between {ours} and {baseline} was shown {times}, a ratio of "
            f"{plus_minus(ratio, low, high)})"
        )
    elif ratio > 1:
        said = f"{ours} is {plus_minus(ratio, low, high)} times as fast as {baseline} {times})"
    else:
        by = plus_minus(1 / ratio, 1 / high, 1 / low)
        said = f"{baseline} is {by} times as fast as {ours}, the best of ours {swapped})"
    return f"{said}{on}."


def winning_config(section: Section) -> str:
    """What tells the winner from others of its family, or its whole config if none were tried."""
    if (row := section.winner) is None:
        return ""
    names = section.differing[row["kernel"]]
    return named({n: v for n, v in row.facts.config.items() if n in names or not names})


def plus_minus(ratio: float, low: float, high: float) -> str:
    """`1.10 ± 0.01`: as many decimals as the half-width has, two or three; it is rounded up."""
    half = max(ratio - low, high - ratio, 0.0)
    decimals = 2 if half >= 0.005 else 3
    # The interval of the printed figure holds the one that was found.
    half += abs(round(ratio, decimals) - ratio)
    up = math.ceil(round(half * 10**decimals, 6)) / 10**decimals
    return f"{ratio:.{decimals}f} ± {up:.{decimals}f}"


def figure(value: float, digits: int) -> str:
    """At least this many significant digits, never in powers of ten."""
    return f"{value:.{decimals_for(value, digits)}f}"


def decimals_for(value: float | None, digits: int, most: int = 5) -> int:
    """Decimals that give the value this many significant digits; at most `most`."""
    return min(most, max(0, digits - 1 - math.floor(math.log10(value or 1.0))))


# Most candidates named on the frontier.
_MOST = 8


def frontier_lines(section: Section) -> list[str]:
    """The error of FP8 itself, and the candidates that none surpasses in time and error."""
    return [*_of_format(section), *_best(section)] if section.problem.format.lossy else []


def frontier_points(section: Section) -> list[dict[str, Any]]:
    """Right candidates and baselines with a time and an error; `on` if on the frontier."""
    if not section.problem.format.lossy:
        return []
    best = {trial.key for trial in frontier([row.facts for row in section.rows])}
    return [
        {
            "who": who(row),
            "kind": "baseline" if row["baseline"] else "kernel",
            "us": float(f"{row['time_us']:.5g}"),
            "error": float(f"{accuracy.error:.4g}"),
            "on": row.facts.key in best,
            "config": row["config"],
        }
        for row in section.rows
        if row["status"] == Status.OK and row["time_us"] is not None
        if (accuracy := row.facts.accuracy) is not None and accuracy.error is not None
    ]


def _of_format(section: Section) -> list[str]:
    row = section.winner or next((row for row in section.rows if row["rank"]), None)
    accuracy: Accuracy | None = row.facts.accuracy if row else None
    if row is None or accuracy is None or accuracy.format_err is None or accuracy.error is None:
        return []
    line = (
        f"errors, of the worst row: the format costs {accuracy.format_err:.1e}, {who(row)} adds "
        f"{accuracy.error:.1e}"
    )
    if accuracy.total_err is not None:
        line += f"; against the inputs before rounding it errs by {accuracy.total_err:.1e}"
    return [line]


def _best(section: Section) -> list[str]:
    by_key = {row.facts.key: row for row in section.rows}
    rows = [by_key[t.key] for t in frontier([row.facts for row in section.rows])]
    if len(rows) < 2:
        return []
    shown = rows[:_MOST]
    more = f" (the fastest {_MOST} of {len(rows)})" if len(rows) > _MOST else ""
    lines = [f"none is both faster and more accurate{more}; ~ not timed in the rounds:"]
    for row in shown:
        config = row.facts.config
        own = {name: config[name] for name in section.differing.get(row["kernel"], ())}
        us = f"{'~' * apart(row)}{figure(row['time_us'], 4)}"
        error = row.facts.accuracy.error
        said = f"  {us}{GLUE}µs, error {error:.1e}: {who(row)} {named(own)}"
        lines.append(said.rstrip())
    return lines


_NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e[+-]?\d+)?(?!\w)")
_LAST_NUMBER = re.compile(r"\s*#(\s*(bytes|[KMG]iB))?(\s*of)?$")


def notes(
    section: Section, shown: Sequence[Row], more: str, legend: Sequence[str] = ()
) -> list[tuple[str, str, list[str] | None]]:
    """Lines with their styles, those of the winner first. legend: of the table's configs.

    more: where all candidates are. A cause of failures has the compiler's errors with it.
    """
    winner = "bold" if section.winner else "bold red"
    lines: list[tuple[str | None, str]] = [
        *((line, winner) for line in winner_lines(section)),
        (tie_line(section, shown), ""),
        *((line, "dim") for line in legend),
        *((line, "") for line in frontier_lines(section)),
        (rest_line(section, shown, more), ""),
        *((line, "yellow") for line in served_lines(section)),
        *((line, "") for line in searched_lines(section)),
        (judged_line(section.candidates), ""),
    ]
    after = [
        *((line, "") for line in baseline_lines(section)),
        *((line, "dim") for line in [*absent_baselines(section), *recorded_lines(section)]),
    ]
    return [
        *((line, style, None) for line, style in lines if line),
        *((line, "yellow", errors) for line, errors in failures(section)),
        *((line, style, None) for line, style in after),
    ]


def _short_reasons(details: Iterable[str | None]) -> Counter[str]:
    """The part of each detail that rows of one cause share, and the number of such rows.

    `spills` of `spills 24 bytes, the spec allows 0`. A figure that does not end the part is a range
    over these rows: `takes at least 31.2–55 us by its stages`.
    """
    groups: dict[str, list[list[str]]] = {}
    for detail in details:
        part = re.split(r"[,:;(]| as ", first_line(detail))[0].strip()
        key = _LAST_NUMBER.sub("", _NUMBER.sub("#", part))
        groups.setdefault(key, []).append(_NUMBER.findall(part))
    said: Counter[str] = Counter()
    for key, figures in groups.items():
        text = key
        for column in range(key.count("#")):
            values = sorted((row[column] for row in figures), key=float)
            span = "–".join(dict.fromkeys([values[0], values[-1]]))
            text = text.replace("#", span, 1)
        said[text] += len(figures)
    return said


def rest_line(section: Section, shown: Sequence[Row], more: str) -> str | None:
    """The number of candidates that are not shown, by status."""
    visible = {id(row) for row in shown}
    rest = [row for row in section.candidates if id(row) not in visible]
    if not rest:
        return None
    counted = []
    for fate, count in Counter(map(_fate, rest)).items():
        words = f"{count}{GLUE}{fate.replace('_', ' ')}"
        if fate == Status.PRUNED:
            why = _short_reasons(row["detail"] for row in rest if _fate(row) == fate)
            named_ones = [f"{reason} {n}" for reason, n in why.most_common(3) if reason]
            named_ones += ["…"] if len(why) > 3 else []
            words += f" ({', '.join(named_ones)})" if named_ones else ""
        counted.append(words)
    if any(not row["baseline"] for row in shown):
        if {row["status"] for row in rest} == {Status.OK}:
            counted = [f"{len(rest)}{GLUE}more{GLUE}ok"]
        elif len(counted) > 1:
            counted[0] = f"{len(rest)}{GLUE}more: {counted[0]}"
    return f"{', '.join(counted)}; {more}"


def _fate(row: Row) -> str:
    """The status of a row, or why a candidate of a long problem is not tried on it."""
    label = shorter_of(row["detail"]) if row["status"] == Status.PRUNED else None
    return str(row["status"]) if label is None else f"not tried: slower on {label}"


def searched_lines(section: Section) -> list[str]:
    """For each family that was searched in part: how many of its candidates were tried, and why."""
    tried = Counter(row["kernel"] for row in section.candidates)
    out = []
    for facts in section.spaces:
        kernel, there, why = facts.get("kernel"), facts.get("candidates"), facts.get("ended")
        if isinstance(there, int) and 0 < tried[kernel] < there:
            left = f"{kernel}: {tried[kernel]} of {there} candidates tried, {there - tried[kernel]}"
            out.append(f"{left} left out" + (f": {why}" if isinstance(why, str) else ""))
    return out


def judged_line(rows: Sequence[Row]) -> str | None:
    """The share of these rows' outputs that was compared with float64, if not all."""
    found = [row.facts.accuracy for row in rows if row["time_us"] and not row["baseline"]]
    shares = sorted(a.judged for a in found if a is not None and a.judged is not None)
    if not shares:
        return None
    span = "–".join(dict.fromkeys(f"{100 * share:.2g}" for share in (shares[0], shares[-1])))
    return (
        f"float64 judged {span}{GLUE}% of the rows of every head; of the others it is only known "
        "that they are numbers, the same in all calls"
    )
