"""Did the best candidate of a problem get slower between two recorded runs?

Both runs were measured at different times, so their times cannot be paired. But each run timed our
best candidate and its baselines in the same rounds. Their ratio in the new run, over their
ratio in the old one, is free of what met both alike. Baselines that disagree about it show how far
such ratios move between sessions without any change of code. Needs no GPU. Times are microseconds
of one call.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from attnsweep.choose.baseline_ratio import common_rounds
from attnsweep.choose.columns import Row
from attnsweep.choose.stats import ratio_interval
from attnsweep.core.trial import Status
from attnsweep.regress.verdicts import (
    Comparison,
    Finding,
    Verdict,
    at_least,
    change,
    differences,
    other_card,
    other_machine,
    other_protocol,
)
from attnsweep.reports.compare import config_changes
from attnsweep.reports.sections import Section, sections_of
from attnsweep.store.run import Run

CAN = (
    "This compares recorded runs. Each time is divided by those of the baselines in the same "
    "rounds. A problem's best candidate is called slower or faster if these ratios changed by more "
    "than the scatter of the rounds and the disagreement of the baselines explain."
)
CANNOT = (
    "It cannot show why, or tell a change of our code from one that affects only our kernels "
    "(other clocks under load, another card of the same name). Only timing both codes in turns on "
    "one GPU can."
)
# Standard deviation by which the ratio of two kernels moves from one session to the next while
# neither kernel changes, if the baselines do not show a larger one: see docs/measuring.md.
SESSION_SD = 0.0075
# Standard errors in a two-sided 95 % interval, and those of a median deviation in a standard one.
_NORMAL, _MAD = 1.96, 1.4826
# Slow baselines take part in the first five rounds only.
_FEWEST_ROUNDS = 5


def compare(old: Run, new: Run, *, slower: float, other_driver: bool = False) -> Comparison:
    """The verdict on every problem of `old`, in its order; problems only in `new` are named.

    slower: the share by which a best candidate may be slower; beyond it, it is a regression.
    other_driver: also compare runs that were measured with different drivers.
    """
    before, after = sections_of(old), sections_of(new)
    both = old.environment, new.environment
    known = [environment.machine if environment else {} for environment in both]

    def apart(*winners: Row) -> str | None:
        """Why two rows are not comparable, or None; rows of several cards name their own card."""
        facts = [each | row.facts.machine for each, row in zip(known, winners, strict=True)]
        control = other_card(*both) or other_protocol(*both)
        return control or other_machine(*facts, other_driver=other_driver)

    findings = []
    for section in before:
        begin_s = time.monotonic()
        finding = _judge(section, after.of(section.problem), slower, apart)
        findings.append(replace(finding, took_s=time.monotonic() - begin_s))
    damage = tuple(dict.fromkeys((*old.warnings, *new.warnings)))
    if damage:  # a damaged run proves nothing: its best row may be lost
        findings = [
            replace(
                finding,
                verdict=Verdict.INCONCLUSIVE,
                why=f"a run is damaged; its remaining rows say {finding.verdict}"
                + (f": {finding.why}" if finding.why else ""),
            )
            for finding in findings
        ]
    differing = differences(old.environment, new.environment)
    added = [section.problem.label for section in after if before.of(section.problem) is None]
    if added:
        differing.append(f"only the new run has {', '.join(added)}")
    return Comparison(
        old.directory,
        new.directory,
        slower,
        tuple(findings),
        tuple(differing),
        interval="95 % interval",
        proves=CAN,
        does_not_prove=CANNOT,
        damage=damage,
    )


def _judge(
    old: Section, new: Section | None, slower: float, apart: Callable[[Row, Row], str | None]
) -> Finding:
    label, won = old.problem.label, old.winner
    now = None if new is None else new.winner

    def unsure(why: str) -> Finding:
        return Finding(label, Verdict.INCONCLUSIVE, why, won, now)

    if new is None:
        return unsure("the new run does not contain this problem")
    for which, section in (("old", old), ("new", new)):
        damaged = _damage(which, section)
        if damaged is not None:
            return unsure(f"{damaged}; record it anew")
    if won is None and now is None:
        return unsure("no candidate is ok in either run")
    if won is None:
        return Finding(label, Verdict.IMPROVEMENT, "no candidate was ok, now one is", None, now)
    if now is None:
        counts = Counter(row["status"] for row in new.rows if not row["baseline"])
        ends = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in counts.most_common())
        why = f"no candidate is ok now: {ends or 'none was tried'}"
        return Finding(label, Verdict.REGRESSION, why, won)
    if (other := apart(won, now)) is not None:
        return unsure(other)
    if won["trial"] == now["trial"]:
        why = "both runs hold the same row"
        return Finding(label, Verdict.PASS, why, won, now, 1.0, 1.0, 1.0)
    if "energy" in (won["ranked_as"], now["ranked_as"]):
        ranked = f"ranked by {won['ranked_as']}, then by {now['ranked_as']}"
        return unsure(f"{ranked}: only times are compared")
    if won["timed_as"] != now["timed_as"]:
        return unsure(f"timed {won['timed_as']}, then {now['timed_as']}")
    for which, row in (("old", won), ("new", now)):
        if not row.facts.time_us.rounds:
            return unsure(f"the {which} run timed its best candidate without rounds")
    baselines = [*_compared(old, new)]
    if not baselines:
        return unsure("no baseline has rounds in both runs, so the drift is unknown")
    ratio, low, high = combined(baselines)
    drifts = [baseline.drift for baseline in baselines]
    facts = (won, now, ratio, low, high, (min(drifts), max(drifts)))
    winners = _changed(won, now)
    if low > 1 + slower:
        return Finding(label, Verdict.REGRESSION, f"{at_least(low)}{winners}", *facts)
    if high < 1 / (1 + slower):
        return Finding(label, Verdict.IMPROVEMENT, f"{at_least(high)}{winners}", *facts)
    if high <= 1 + slower:
        return Finding(label, Verdict.PASS, "", *facts)
    why = f"between {change(low)} and {change(high)}{winners}"
    return Finding(label, Verdict.INCONCLUSIVE, why, *facts)


def _damage(which: str, section: Section) -> str | None:
    """The first row of a problem that says ok and cannot be, or None.

    It may have been the best one, or its baseline: without it nothing can be compared.
    """
    for row in section.rows:
        trial = row.facts
        if trial.status is Status.OK and row["status"] != Status.OK:
            name = row["provider"] if row["baseline"] else f"{row['kernel']} {row['config']}"
            return f"the {which} run is damaged: {name.strip()} {row['detail']}"
    return None


@dataclass(frozen=True, slots=True)
class BaselineChange:
    """What one baseline says of the best candidates: logarithms of (ours / it), new over old.

    down, up: from the median to its 95 % limits. drift: its own time, new over old.
    """

    change: float
    down: float
    up: float
    drift: float


def combined(baselines: Sequence[BaselineChange]) -> tuple[float, float, float]:
    """Ratio new to old by all baselines, and its limits.

    The ratio is the median of what the baselines say. Their scatter about it estimates how far the
    ratio of two kernels moves between sessions (at least SESSION_SD); ours moves too, however many
    baselines there are. Scatter of the rounds comes from the same rounds of ours for all, so more
    baselines do not lessen it.
    """
    middle = median(baseline.change for baseline in baselines)
    scatter = _MAD * median(abs(baseline.change - middle) for baseline in baselines)
    session = _NORMAL * max(SESSION_SD, scatter * math.sqrt(1 + 1 / len(baselines)))
    down = math.hypot(session, median(baseline.down for baseline in baselines))
    up = math.hypot(session, median(baseline.up for baseline in baselines))
    return math.exp(middle), math.exp(middle - down), math.exp(middle + up)


def _compared(old: Section, new: Section) -> Iterator[BaselineChange]:
    """Every baseline that shares rounds with the best candidate in both runs."""
    before, after = _beside_winner(old), _beside_winner(new)
    for name in before:
        if name not in after:
            continue
        # Distances of both medians from their limits, in logarithms, are added as squares (MOVER:
        # Zou and Donner, Statist. Med. 27, 2008).
        (was, was_low, was_high), (now, low, high) = map(_log_ratio, (before[name], after[name]))
        drift = median(after[name][1]) / median(before[name][1])
        yield BaselineChange(
            now - was, math.hypot(now - low, was_high - was), math.hypot(high - now, was - was_low),
            drift,
        )  # fmt: skip


def _beside_winner(section: Section) -> dict[str, tuple[list[float], list[float]]]:
    """Provider to the times of the winner and its own in the rounds that both ran."""
    won = section.winner
    if won is None:
        return {}
    found = {}
    for row in section.rows:
        if row["baseline"] and row["rank"]:
            ours, its = common_rounds(won.facts, row.facts)
            if len(its) >= _FEWEST_ROUNDS:
                found[row["provider"]] = ours, its
    return found


def _log_ratio(rounds: tuple[list[float], list[float]]) -> tuple[float, float, float]:
    """Median of the logarithm of (ours / the baseline's), and its 95 % sign interval."""
    ours, baselines = rounds
    low, high = ratio_interval(ours, baselines)
    middle = median(a / b for a, b in zip(ours, baselines, strict=True))
    return math.log(middle), math.log(low), math.log(high)


def _changed(old: Row, new: Row) -> str:
    """A clause that another candidate wins now, or nothing."""
    if (old["kernel"], old["config"]) == (new["kernel"], new["config"]):
        return ""
    first, second = ({"kernel": row["kernel"], "config": row.facts.config} for row in (old, new))
    changes = config_changes({"first": first, "second": second})
    return f"; the best candidate changed: {', '.join(changes)}"
