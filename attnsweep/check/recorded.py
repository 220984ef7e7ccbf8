"""Did the best candidate of a problem get slower between two recorded runs?

Both runs were measured earlier, at different times. Each verdict says how much that can prove:
baselines timed in both runs show how far the sessions themselves drifted apart, and a difference
counts only beyond that. Needs no GPU. Times are microseconds of one call.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from attnsweep.check.verdicts import Comparison, Finding, Verdict, differences, other_card
from attnsweep.choose.evidence import ratio_interval
from attnsweep.choose.ranking import rank
from attnsweep.show.sentences import Row, Section, by_problem
from attnsweep.store.run import Run

CAN = (
    "This compares recorded runs. It can show that a problem's best candidate is slower or faster "
    "by more than the scatter of the rounds and the drift of the baselines timed in both."
)
CANNOT = (
    "It cannot show why, or see changes that affect only our kernels (other clocks under load, "
    "another card of the same name). Only timing both codes in turns on one GPU can."
)


def compare(old: Run, new: Run, *, slower: float) -> Comparison:
    """The verdict on every problem of `old`, in its order; problems only in `new` are named.

    slower: the share by which a best candidate may be slower; beyond it, it is a regression.
    """
    before = {s.problem: s for s in by_problem(rank(old.trials, old.environment), old.environment)}
    after = {s.problem: s for s in by_problem(rank(new.trials, new.environment), new.environment)}
    control = other_card(old.environment, new.environment)
    findings = [
        _judge(section, after.get(problem), slower, control) for problem, section in before.items()
    ]
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
    added = [problem.label for problem in after if problem not in before]
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


def _judge(old: Section, new: Section | None, slower: float, control: str | None) -> Finding:
    label, won = old.problem.label, old.winner
    if new is None:
        why = "the new run does not contain this problem"
        return Finding(label, Verdict.INCONCLUSIVE, why, won)
    now = new.winner
    if won is None and now is None:
        return Finding(label, Verdict.INCONCLUSIVE, "no candidate is ok in either run")
    if won is None:
        return Finding(label, Verdict.IMPROVEMENT, "no candidate was ok, now one is", None, now)
    if now is None:
        counts = Counter(row["status"] for row in new.rows if not row["baseline"])
        ends = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in counts.most_common())
        why = f"no candidate is ok now: {ends or 'none was tried'}"
        return Finding(label, Verdict.REGRESSION, why, won)
    ratio = now["time_us"] / won["time_us"]
    if control is not None:
        return Finding(label, Verdict.INCONCLUSIVE, control, won, now, ratio)
    for which, row in (("old", won), ("new", now)):
        if not row["trial"].time_us.rounds:
            why = f"the {which} run timed its best candidate without rounds"
            return Finding(label, Verdict.INCONCLUSIVE, why, won, now, ratio)
    drift = _drift(old, new)
    if drift is None:
        why = "no baseline has rounds in both runs, so the drift is unknown"
        return Finding(label, Verdict.INCONCLUSIVE, why, won, now, ratio)
    low, high = _ratio(won, now)
    low, high = low / max(1.0, drift[1]), high / min(1.0, drift[0])
    facts = (won, now, ratio, low, high, drift)
    change = _changed(won, now)
    if low > 1 + slower:
        why = f"slower by at least {100 * (low - 1):.1f} %{change}"
        return Finding(label, Verdict.REGRESSION, why, *facts)
    if high < 1 / (1 + slower):
        why = f"faster by at least {100 * (1 / high - 1):.1f} %{change}"
        return Finding(label, Verdict.IMPROVEMENT, why, *facts)
    if high <= 1 + slower:
        return Finding(label, Verdict.PASS, "", *facts)
    why = f"between {100 * (1 - low):.1f} % faster and {100 * (high - 1):.1f} % slower"
    if low > 1:
        why = f"between {100 * (low - 1):.1f} and {100 * (high - 1):.1f} % slower"
    return Finding(label, Verdict.INCONCLUSIVE, f"{why}{change}", *facts)


def _median_interval(row: Row) -> tuple[float, float]:
    """95 % sign interval of the median of a row's rounds."""
    rounds = row["trial"].time_us.rounds
    return ratio_interval(rounds, [1.0] * len(rounds))


def _ratio(old: Row, new: Row) -> tuple[float, float]:
    """95 % limits of the ratio new to old, from the intervals of both medians.

    Rounds of two sessions cannot be paired, so the distances from both medians to their limits, in
    logarithms, are added as squares (MOVER: Zou and Donner, Statist. Med. 27, 2008).
    """
    (old_low, old_high), (new_low, new_high) = _median_interval(old), _median_interval(new)
    before, after = float(old["time_us"]), float(new["time_us"])
    down = math.hypot(math.log(after / new_low), math.log(old_high / before))
    up = math.hypot(math.log(new_high / after), math.log(before / old_low))
    return after / before * math.exp(-down), after / before * math.exp(up)


def _drift(old: Section, new: Section) -> tuple[float, float] | None:
    """Least and largest ratio new to old of the baselines with rounds in both, or None."""
    before, after = (
        {
            row["provider"]: float(row["time_us"])
            for row in section.rows
            if row["baseline"] and row["rank"] and row["rounds"]
        }
        for section in (old, new)
    )
    ratios = [after[name] / before[name] for name in before if name in after]
    return (min(ratios), max(ratios)) if ratios else None


def _changed(old: Row, new: Row) -> str:
    """A clause that another candidate wins now, or nothing."""
    if (old["kernel"], old["config"]) == (new["kernel"], new["config"]):
        return ""
    names = [f"{row['kernel']} {row['config']}".strip() for row in (old, new)]
    return f"; the best was {names[0]}, is {names[1]}"
