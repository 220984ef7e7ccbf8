"""Two recorded runs side by side: the same problems, their winners, and what changed around them.

Needs no GPU. Times are microseconds of one call. Nothing here is a verdict on a regression: times
of two cards differ for many reasons, so only ratios to baselines of the same rounds are comparable;
`attnsweep check` judges.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from attnsweep.choose.baseline_ratio import Base
from attnsweep.choose.columns import Row, named
from attnsweep.core.errors import SpecError
from attnsweep.core.trial import Environment
from attnsweep.family.discover import rows_of_today
from attnsweep.family.family import Family
from attnsweep.reports.sections import Section, Sections, baselines_of
from attnsweep.reports.terminal import aligned, counted, wrap
from attnsweep.reports.text import figure
from attnsweep.store.rows import changed
from attnsweep.store.run import Run

# Facts of an environment that are reported if they differ, in this order.
_FACTS = (
    *("gpu", "uuid", "driver", "cuda", "nvrtc", "attnsweep", "protocol", "power_limit_w", "host"),
    "date",
)


def compare(
    first: Run, second: Run, families: Mapping[str, Family] | None = None
) -> dict[str, Any]:
    """Set two runs side by side, as plain data. Raises SpecError if both have timed no problem.

    families: what says how configs recorded before a parameter read today; see Param.absent.
    """
    one, other = (_sections(run, families or {}) for run in (first, second))
    pairs, only_first, shared = [], [], set()
    for section in _won(one):
        there = other.of(section.problem)
        if there is None or there.winner is None:
            only_first.append(section.problem.label)
        else:
            pairs.append(_pair(section, there))
            shared.add(section.problem)
    if not shared:
        raise SpecError(
            "the runs have no timed problem in common",
            where=f"{first.directory}, {second.directory}",
            hint=f"the first has {_some(one)}; the second has {_some(other)}",
        )
    both = _facts(first.environment), _facts(second.environment)
    names = dict.fromkeys((*_FACTS, *both[0], *both[1]))
    differing = {name: [facts.get(name) for facts in both] for name in names}
    return {
        "first": str(first.directory),
        "second": str(second.directory),
        "differences": {name: [old, new] for name, (old, new) in differing.items() if old != new},
        "problems": pairs,
        "only_first": only_first,
        "only_second": [s.problem.label for s in _won(other) if s.problem not in shared],
    }


def _sections(run: Run, families: Mapping[str, Family]) -> Sections:
    trials = changed(run.trials, rows_of_today(families))
    return Sections(trials, run.environment, run.spaces, asked=baselines_of(run.spec_text))


def _won(sections: Sections) -> Iterator[Section]:
    """The problems that have a winner."""
    return (section for section in sections if section.winner is not None)


def _pair(one: Section, other: Section) -> dict[str, Any]:
    """One problem in both runs. agree: each winner is in the other's tie for the first place."""
    first, second = _side(one, other.winner), _side(other, one.winner)
    same = _same(one.winner, other.winner)
    shared = [name for name in first["baselines_us"] if name in second["baselines_us"]]
    return {
        "problem": one.problem.label,
        "same_winner": same,
        "agree": same or (first["others_winner_tied"] and second["others_winner_tied"]),
        "first": first,
        "second": second,
        "lost": [section.lost for section in (one, other)],
        "over_baselines": {name: [_over(name, one), _over(name, other)] for name in shared},
    }


def _over(baseline: str, section: Section) -> float:
    """A baseline's time over the winner's, by the estimator that `report` has."""
    winner = section.winner
    assert winner is not None
    if baseline == winner["best_baseline"] and winner["ratio_to_best_baseline"] is not None:
        return float(winner["ratio_to_best_baseline"])
    base = next(row for row in section.ranked if row["provider"] == baseline)
    ratio = Base(base.facts, noisy=False, us=base["time_us"]).ratio(winner.facts)
    return ratio.value if ratio.of else float(base["time_us"] / winner["time_us"])


def _side(section: Section, others: Row | None) -> dict[str, Any]:
    """One run's rows of a problem: the best candidate, and baselines in the problem's format.

    others_winner_ratio: how many times as long as the winner the other run's winner takes here;
    None if it has no ranked row.
    """
    winner = section.winner
    assert winner is not None
    there = next((row for row in section.ranked if _same(row, others)), None)
    us = float(winner["time_us"])
    return {
        "kernel": winner["kernel"],
        "config": dict(winner.facts.config),
        "time_us": us,
        "baselines_us": {
            str(row["provider"]): float(row["time_us"]) for row in section.ranked if row["baseline"]
        },
        "others_winner_ratio": None if there is None else float(there["time_us"]) / us,
        "others_winner_tied": there is not None and there["rank"] == winner["rank"],
    }


def _same(row: Row | None, other: Row | None) -> bool:
    """Whether two rows are of one config of one family."""
    if row is None or other is None:
        return row is other
    alike = row["kernel"] == other["kernel"]
    return alike and bool(row.facts.config == other.facts.config)


def _some(sections: Sections) -> str:
    labels = [section.problem.label for section in _won(sections)]
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return (", ".join(labels[:3]) + more) or "none"


def _facts(environment: Environment | None) -> dict[str, Any]:
    if environment is None:
        return {}
    facts = {name: getattr(environment, name) for name in _FACTS}
    facts["date"] = environment.date[:10]
    return facts | dict(environment.packages)


def config_changes(pair: Mapping[str, Any]) -> Sequence[str]:
    """`BLOCK_N 64 → 128`: parameters in which the second winner differs from the first."""
    one, other = pair["first"], pair["second"]
    if one["kernel"] != other["kernel"]:
        return [f"{one['kernel']} → {other['kernel']} {named(other['config'])}"]
    each = {
        n: [s["config"].get(n, "–") for s in (one, other)] for n in one["config"] | other["config"]
    }
    return [f"{name} {mine} → {its}" for name, (mine, its) in each.items() if mine != its]


LEGEND = (
    "first, second: µs of each run's best candidate · second/first: above 1, the second run is "
    "slower; on two cards that is the card as much as the kernel · × baseline: time of the fastest "
    "baseline of both runs over the best candidate's, paired by rounds, in each run · "
    "winner: same, tied (each is in the other's tie for the first place), or how much slower the "
    "first run's winner is in the second run, and the second's in the first (– if not ranked there)"
)


def lines(found: Mapping[str, Any], width: int) -> list[Text]:
    """The comparison, no line wider than `width` unless names need it."""
    out: list[Text] = []
    pairs = found["problems"]

    def say(text: str, style: str = "") -> None:
        out.extend(Text(line, style) for line in wrap(text, width))

    say(f"first:  {found['first']}")
    say(f"second: {found['second']}")
    for name, both in found["differences"].items():
        say(f"{name}: {' → '.join('unknown' if v is None else str(v) for v in both)}", "dim")
    out.append(Text())
    header = ["problem", "first", "second", "second/first", "× baseline", "baseline", "winner"]
    table = aligned([header, *map(_row, pairs)], "lrrrrll", width, shrink=(0, 5, 6))
    out += [Text(line, "" if number else "bold") for number, line in enumerate(table)]
    changed = [pair for pair in pairs if not pair["same_winner"]]
    out += [Text()] * bool(changed)
    for pair in changed:
        say(f"{pair['problem']}: {', '.join(config_changes(pair))}")
    out.append(Text())
    say(verdict(pairs), "bold")
    for pair in pairs:
        for which, lost in zip(("first", "second"), pair["lost"], strict=True):
            if lost is not None:
                say(f"{pair['problem']}, in the {which} run: {lost}", "yellow")
    for which in ("first", "second"):
        if labels := found[f"only_{which}"]:
            say(f"only in the {which} run: {', '.join(labels)}", "dim")
    say(LEGEND, "dim")
    return out


def verdict(pairs: Sequence[Mapping[str, Any]]) -> str:
    """`4 problems: the winners agree on 3; the second run's times are 1.02 times the first's …`."""
    agree = sum(pair["agree"] for pair in pairs)
    ratios = [pair["second"]["time_us"] / pair["first"]["time_us"] for pair in pairs]
    said = f"{counted(len(pairs), 'problem')}: the winners agree on {agree}"
    lost = [pair[side]["others_winner_ratio"] for pair in pairs for side in ("first", "second")]
    known = [ratio for ratio in lost if ratio is not None]
    if agree < len(pairs) and known:
        said += f" (elsewhere, the other's winner costs up to {100 * (max(known) - 1):.1f} %)"
    mean = statistics.geometric_mean(ratios)
    return (
        f"{said}; the second run's times are {mean:.3f} times the first's in the geometric mean"
        f" ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def _row(pair: Mapping[str, Any]) -> list[str]:
    one, other, ratios = pair["first"], pair["second"], pair["over_baselines"]
    fastest = min(ratios, key=one["baselines_us"].get, default=None)
    name = None if any(pair["lost"]) else fastest  # it may be one without a row
    lost = (
        "–" if r is None else f"{100 * (r - 1):+.1f} %"
        for r in (side["others_winner_ratio"] for side in (other, one))
    )
    return [
        pair["problem"],
        figure(one["time_us"], 4),
        figure(other["time_us"], 4),
        f"{other['time_us'] / one['time_us']:.3f}",
        "–" if name is None else " → ".join(f"{ratio:.2f}" for ratio in ratios[name]),
        name or "–",
        "same" if pair["same_winner"] else "tied" if pair["agree"] else ", ".join(lost),
    ]
