"""The data of a page's plots, which assets/page.js draws. Times are microseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Any

from attnsweep.choose.columns import named, value_text
from attnsweep.choose.effects import axes_of, effects
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import OURS, Trial
from attnsweep.reports.frontier import frontier_points
from attnsweep.reports.text import Row, Section, first_line, kernels_of, who

# Most bars of the stage breakdown; most characters of a reason.
_MAX_STAGES = 10
_REASON_LENGTH = 200


def reason_of(row: Row) -> str:
    """The first line of a row's detail, cut."""
    return first_line(row["detail"])[:_REASON_LENGTH]


def data_of(
    sections: Sequence[Section], spec_text: str | None = None, in_order: Sequence[Trial] = ()
) -> dict[str, Any]:
    """The run for the page's script: every candidate as one short array.

    in_order: the rows as they were tried. The axes of a spec's variants are parameters too, with
    the name of the variant as value. trials:
    [problem, kernel, status, µs or null, index of its reason or null, [value of each parameter]];
    the first three are indices too.
    """
    families = kernels_of(spec_text)
    kernels: dict[str, dict[str, None]] = {}
    last: dict[str, tuple[str, ...]] = {}
    statuses: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for section in sections:
        for row in section.candidates:
            trial = row["trial"]
            if (names := (*trial.variant, *trial.config)) != last.get(row["kernel"]):
                kernels.setdefault(row["kernel"], {}).update(dict.fromkeys(names))
                last[row["kernel"]] = names
    number = {kernel: index for index, kernel in enumerate(kernels)}
    trials = []
    known: dict[tuple[str, int, int], list[Value | None]] = {}  # rows share equal configs
    for index, section in enumerate(sections):
        for row in section.candidates:
            trial, kernel, reason = row["trial"], row["kernel"], reason_of(row)
            key = (kernel, id(trial.variant), id(trial.config))
            if (values := known.get(key)) is None:
                own = {**trial.variant, **trial.config}
                values = known[key] = [
                    value_text(value) if (value := own.get(name)).__class__ is bool else value
                    for name in kernels[kernel]
                ]
            trials.append(
                [
                    index,
                    number[kernel],
                    statuses.setdefault(row["status"], len(statuses)),
                    short(row["time_us"]) if row["rank"] else None,
                    reasons.setdefault(reason, len(reasons)) if reason else None,
                    values,
                ]
            )
    of_problem: dict[Problem, list[Trial]] = defaultdict(list)
    for problem, alike in groupby(in_order, attrgetter("problem")):
        of_problem[problem] += alike
    return {
        "problems": [
            _drawn(section, families) | {"search": best_so_far(of_problem[section.problem])}
            for section in sections
        ],
        "kernels": [{"name": name, "params": [*params]} for name, params in kernels.items()],
        "statuses": [*statuses],
        "reasons": [*reasons],
        "trials": trials,
    }


def _drawn(section: Section, families: Mapping[str, Any]) -> dict[str, Any]:
    """One problem: size, bounds, baselines, the stages of its best pipelines, and effects."""
    problem: Problem = section.problem
    bests = {id(row) for row in section.best_of_families}
    in_stages = [row for row in section.ranked if row["trial"].stages_us]
    first = [row for row in in_stages if id(row) in bests]
    others = [row for row in in_stages if id(row) not in bests]
    staged = sorted([*first, *others][:_MAX_STAGES], key=lambda row: float(row["time_us"]))
    binds = next((row["bound"] for row in section.rows if row["bound"]), None)
    return {
        "label": problem.label,
        "axes": problem.facts,
        "flops": problem.flops,
        "bytes": problem.min_bytes,
        "bounds": {unit: short(us) for unit, us in section.bounds_us.items()},
        "binds": binds,
        "baselines": [
            _baseline(row) for row in section.ranked if row["baseline"] or id(row) in bests
        ],
        "effects": _effects(section, families),
        "frontier": frontier_points(section),
        "staged": [
            {
                "who": who(row),
                "config": named(own_settings(section, row)) or row["config"],
                "us": short(row["time_us"]),
                "launches": short(row["launch_us"]),
                "stages": {n: short(us) for n, us in row["trial"].stages_us.items()},
            }
            for row in staged
        ],
    }


def _effects(section: Section, families: Mapping[str, Any]) -> dict[str, Any] | None:
    """Which parameters of the best family mattered: see choose.effects. None without a winner."""
    won = section.winner
    if won is None:
        return None
    trials = [row["trial"] for row in section.candidates if row["kernel"] == won["kernel"]]
    found = effects(
        trials, won["trial"], axes_of((families.get(won["kernel"]) or {}).get("variants"))
    )
    return {"kernel": won["kernel"], "parameters": [asdict(effect) for effect in found]}


def own_settings(section: Section, row: Row) -> Mapping[str, object]:
    """The part of a config that differs within its family."""
    config = row["trial"].config
    names = section.differing.get(row["kernel"], [])
    return {name: config[name] for name in names if name in config}


def _baseline(row: Row) -> dict[str, Any]:
    time = row["trial"].time_us
    return {
        "who": who(row),
        "kind": "winner" if row["winner"] else "baseline" if row["baseline"] else "kernel",
        "us": short(row["time_us"]),
        "low": short(time.low),
        "high": short(time.high),
        "cold": short(row["cold_us"]),
        "eager": short(row["eager_us"]),
        "chained": short(row["trial"].chained_us),
        "config": row["config"],
    }


def short(value: float | None) -> float | None:
    """Five significant digits, more than any plot shows."""
    return None if value is None else float(f"{value:.5g}")


def best_so_far(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The points where the least first time of a family falls, and one at its last candidate.

    trials: rows of one problem, in the order of the file, which is the order of first appearance.
    Times are first times in microseconds: those of rounds come after the search. `s`: the seconds
    of the search, unless the row is of before they were kept.
    """
    best: dict[str, float] = {}
    number: dict[str, int] = {}
    points, ends = [], {}
    for trial in trials:
        if trial.provider != OURS:
            continue
        number[trial.kernel] = number.get(trial.kernel, 0) + 1
        us = trial.screened_us
        if us is not None and us < best.get(trial.kernel, float("inf")):
            best[trial.kernel] = us
            points.append(_point(trial, number[trial.kernel], us))
        if trial.kernel in best:
            ends[trial.kernel] = _point(trial, number[trial.kernel], best[trial.kernel])
    return points + [end for end in ends.values() if end not in points]


def _point(trial: Trial, number: int, us: float) -> dict[str, Any]:
    seconds = {} if trial.tried_s is None else {"s": trial.tried_s}
    return {"kernel": trial.kernel, "trial": number, "us": us, **seconds}
