"""Which parameters mattered: the effect of each, by the rows of one family on one problem.

Two figures for each parameter, both from the first times of candidates (`Trial.screened_us`), which
every candidate got in the same way; later rounds time only the best again.

- Pairs: candidates that differ in this parameter only. Nothing else can explain the ratio of their
  times, but the values of the others are those that rules and the search left.
- Share of variance: how much of the variance of the logarithm of all times lies between the groups
  of equal value. Rules tie parameters together, so each has what is left of it once the groups of
  those with a larger share are levelled: shares and the rest of combinations and noise sum to 1.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations, count
from operator import add, sub
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnsweep.core.problem import Value
from attnsweep.core.trial import OURS, Status, Trial

# Statuses whose first time is that of a right candidate.
_TIMED = (Status.OK, Status.NOISY)


@dataclass(frozen=True, slots=True)
class ValueEffect:
    """One value of a parameter next to the reference value.

    ratio: median over the pairs of this value's time over the reference's, None without pairs.
    faster: the pairs in which this value was faster.
    """

    value: Value
    candidates: int
    pairs: int
    ratio: float | None
    faster: int


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one parameter. reference: the winner's value.

    share: share of the variance of log time between the groups of equal value, beyond what larger
    shares explain, adjusted for their number (0 if chance alone would explain as much); None if no
    group has two candidates. pairs: all pairs that differ in this parameter only. spread: median
    over these pairs of the slower time over the faster, None without pairs.
    """

    name: str
    reference: Value
    candidates: int
    share: float | None
    pairs: int
    spread: float | None
    values: tuple[ValueEffect, ...]
    sets: tuple[str, ...] = ()
    """The parameters that it sets together, if it is an axis of the spec's variants."""

    def to_json(self) -> dict[str, Any]:
        """The effect as plain data; unknown values are None."""
        return {
            "parameter": self.name,
            "sets": list(self.sets),
            "reference": self.reference,
            "candidates": self.candidates,
            "share_of_variance": self.share,
            "pairs": self.pairs,
            "median_ratio_of_pairs": self.spread,
            "values": [asdict(each) for each in self.values],
        }


def timed(trials: Iterable[Trial], kernel: str) -> list[Trial]:
    """The candidates of a family with a usable first time, of trials of one problem."""
    ours = (t for t in trials if t.provider == OURS and t.kernel == kernel and t.status in _TIMED)
    return [t for t in ours if t.screened_us is not None and 0 < t.screened_us < math.inf]


def effects(
    trials: Sequence[Trial], reference: Trial, axes: Mapping[str, Sequence[str]] | None = None
) -> list[Effect]:
    """The effect of each parameter, the largest share of variance first.

    trials: those of one problem. reference: the winner, whose family is described. axes: each axis
    of the spec's variants with the parameters that it alone sets; such an axis has an effect as a
    parameter has, with the names of its variants as values. A parameter with one value in all timed
    candidates is left out: the run says nothing about it.
    """
    rows = timed(trials, reference.kernel)
    us = [t.screened_us or math.nan for t in rows]
    configs = [t.config for t in rows]
    columns = {
        name: _Setting([config.get(name) for config in configs])
        for name in dict.fromkeys(chain.from_iterable(configs))
    }
    varied = {name: column for name, column in columns.items() if column.varies}
    # All settings of a row as one number, since they are compared a million times.
    weight, whole, parts = 1, [0] * len(rows), dict[str, list[int]]()
    for name, column in varied.items():
        parts[name] = [digit * weight for digit in column.digits]
        whole = [*map(add, whole, parts[name])]
        weight *= len(column.values) + 1
    found: list[Effect] = []
    for name, value in reference.config.items():
        if name in varied:
            others = [*map(sub, whole, parts[name])]
            found += _effect(varied[name], others, us, name, value)
    for axis, names in (axes or {}).items():
        if axis in reference.variant and len(names) > 1:
            others = whole
            for name in names:
                others = [*map(sub, others, parts[name])] if name in parts else others
            column = _Setting([t.variant.get(axis) for t in rows])
            if len(column.values) == len(rows):  # as an autotuner's own configs have
                continue
            of_axis = _effect(column, others, us, axis, reference.variant[axis], names)
            # A parameter that changes with its axis only has no pairs: the axis stands for it.
            told = set(names) if any(e.pairs for e in of_axis) else set()
            found = [e for e in found if e.pairs or e.name not in told] + of_axis
            varied[axis] = column
    logs = [math.log(each / us[0]) for each in us]  # small: their squares lose no digits
    shares = _shares({e.name: varied[e.name].digits for e in found}, logs)
    found = [replace(e, share=shares[e.name]) for e in found]
    return sorted(found, key=lambda e: (-(e.share or 0.0), -(e.spread or 1.0), e.name))


class _Setting:
    """One setting of all rows: each value as a digit from 1 on, and 0 where a row has none.

    varies: whether rows differ in it.
    """

    def __init__(self, values: Sequence[Value | None]) -> None:
        typed = [*zip(map(type, values), values, strict=True)]  # True is not 1
        distinct, none = dict.fromkeys(typed), (type(None), None)
        self.varies = len(distinct) > 1
        distinct.pop(none, None)
        self.values = [value for _, value in distinct]
        digit = dict(zip((none, *distinct), count()))
        self.digits = [*map(digit.__getitem__, typed)]


def axes_of(variants: object) -> dict[str, list[str]]:
    """Axis to the parameters that have one value in each of its variants, and not always the same.

    variants: those of a family in a resolved spec. Empty for anything else.
    """
    found: dict[str, list[str]] = {}
    if not isinstance(variants, Mapping):
        return found
    for axis, choices in variants.items():
        if not isinstance(choices, Mapping) or not all(
            isinstance(values, Mapping) for values in choices.values()
        ):
            continue
        names = dict.fromkeys(name for values in choices.values() for name in values)
        for name in names:
            lists = [values.get(name) for values in choices.values()]
            single = all(isinstance(each, list) and len(each) == 1 for each in lists)
            if single and len({str(each) for each in lists}) > 1:
                found.setdefault(str(axis), []).append(str(name))
    return found


def _effect(
    column: _Setting,
    others: Sequence[int],
    times: Sequence[float],
    name: str,
    reference: Value,
    sets: Sequence[str] = (),
) -> list[Effect]:
    """The effect of one setting, none if it has one value.

    others: all other settings of each row, as one number. times: first times.
    """
    values = dict(enumerate(column.values, 1))
    if len(values) < 2:
        return []
    groups: dict[int, dict[int, float]] = defaultdict(dict)
    often = Counter(others)
    for digit, rest, us in zip(column.digits, others, times, strict=True):
        if digit and often[rest] > 1:
            groups[rest][digit] = us
    sizes = Counter(column.digits)
    own = next((d for d, v in values.items() if v == reference and type(v) is type(reference)), 0)
    spreads: list[float] = []
    ratios: dict[int, list[float]] = defaultdict(list)
    for alike in groups.values():
        spreads += [a / b if a > b else b / a for a, b in combinations(alike.values(), 2)]
        if own in alike:
            for digit, us in alike.items():
                if digit != own:
                    ratios[digit].append(us / alike[own])
    shown = tuple(
        ValueEffect(
            values[digit],
            sizes[digit],
            len(ratios[digit]),
            statistics.median(ratios[digit]) if ratios[digit] else None,
            sum(ratio < 1 for ratio in ratios[digit]),
        )
        for digit in sorted(values, key=lambda digit: in_order(values[digit]))
    )
    spread = statistics.median(spreads) if spreads else None
    known = len(others) - sizes[0]
    return [Effect(name, reference, known, None, len(spreads), spread, shown, tuple(sets))]


def _shares(columns: Mapping[str, Sequence[int]], logs: Sequence[float]) -> dict[str, float | None]:
    """Each setting's share of the variance of the logarithms, the largest taken first.

    Between groups as epsilon squared has it, which, unlike eta squared, does not grow with their
    number alone. The groups of a setting are levelled before the next is looked at.
    """
    left = np.array(logs)
    left -= left.mean()
    total = float(left @ left)
    level = total <= 1e-12 * sum(log * log for log in logs)
    shares: dict[str, float | None] = {}
    rest: dict[str, _Groups] = {}
    for name, digits in columns.items():
        groups = _Groups(digits)
        if groups.known <= groups.number or level:
            shares[name] = None
        else:
            rest[name] = groups
    while rest:
        found = {name: groups.explain(left) for name, groups in rest.items()}
        name = max(found, key=lambda name: found[name][0])
        explained, means = found[name]
        shares[name] = max(0.0, min(1.0, explained / total))
        if explained > 0:
            left -= means[rest[name].settings]
        del rest[name]
    return shares


class _Groups:
    """The rows in groups of one setting's equal values; those without a value are in none."""

    def __init__(self, digits: Sequence[int]) -> None:
        self.settings = np.array(digits, np.intp)  # 0 where a row has none
        sizes = np.bincount(self.settings)
        self.number, self.known = int((sizes[1:] > 0).sum()), int(sizes[1:].sum())
        self._sizes = np.maximum(sizes, 1)
        self._own: Any = slice(None) if self.known == len(digits) else self.settings > 0

    def explain(self, values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """The squares between groups beyond those of chance, and the mean of each group."""
        sums = np.bincount(self.settings, values)
        sums[0] = 0.0
        means, own = sums / self._sizes, values[self._own]
        squares = float(sums @ means)
        between = squares - float(own.sum()) ** 2 / max(1, self.known)
        within = float(own @ own) - squares
        return between - (self.number - 1) * within / (self.known - self.number), means


def percents(effects: Sequence[Effect]) -> list[int]:
    """The share of each effect in whole percent, and last the rest: together 100."""
    exact = [100 * (effect.share or 0.0) for effect in effects]
    exact.append(max(0.0, 100 - sum(exact)))
    whole = [int(each) for each in exact]
    short = sorted(range(len(exact)), key=lambda at: whole[at] - exact[at])
    for at in short[: max(0, 100 - sum(whole))]:
        whole[at] += 1
    return whole


def in_order(value: Value) -> tuple[int, int, str]:
    """Sort key of values: None, numbers, then words."""
    if value is None:
        return (-1, 0, "")
    return (1, 0, value) if isinstance(value, str) else (0, int(value), "")
