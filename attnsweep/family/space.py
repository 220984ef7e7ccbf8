"""The candidates of one family on one problem: values that a spec selects and rules keep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from attnsweep.core.errors import SpaceError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, Value
from attnsweep.family import time_limit
from attnsweep.family.family import BLOCK_LIMITS, Config, Family
from attnsweep.family.rules import refused

# Enumerating takes about 4 us a combination, so this limit takes four seconds.
MAX_COMBINATIONS = 1_000_000

# Each choice of variants is a table of all parameters.
MAX_CHOICES = 10_000

Values = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class Selection:
    """The values of one family's parameters that a spec selects; other parameters keep their own.

    variants: axis to name to values. The space has every combination of one variant of each axis,
    and a variant's values replace those of `values`. Parameters that belong together thus change
    together. family: empty if the spec names the space as the family. call, widen: of a family that
    is a callable.
    """

    values: Values = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    family: str = ""
    call: str = ""
    widen: bool = False

    def __post_init__(self) -> None:
        """Raise SpaceError for axes that have too many choices."""
        choices = math.prod(map(len, self.variants.values()))
        if choices > MAX_CHOICES:
            what = f"{len(self.variants)} axes of variants have {choices} choices, more than"
            raise SpaceError(f"{what} {MAX_CHOICES}", hint="use fewer axes, or fewer variants")

    def groups(self) -> Iterator[tuple[dict[str, str], dict[str, tuple[Value, ...]]]]:
        """The variant's name on each axis, with the values that these and `values` select."""
        for names in itertools.product(*self.variants.values()):
            chosen = dict(zip(self.variants, names, strict=True))
            merged = dict(self.values)
            for axis, name in chosen.items():
                merged.update(self.variants[axis][name])
            yield chosen, merged

    def on(self, kernel: Family, arch: Arch) -> Selection:
        """The selection on a card: `sms` is the number of its SMs."""
        params = {param.name: param for param in kernel.params}

        def expanded(values: Values) -> dict[str, tuple[Value, ...]]:
            return {n: params[n].on(arch, own) if n in params else own for n, own in values.items()}

        axes = self.variants.items()
        of_axes = {axis: {n: expanded(v) for n, v in variants.items()} for axis, variants in axes}
        return Selection(expanded(self.values), of_axes)

    @property
    def names(self) -> set[str]:
        """Every parameter that the selection names."""
        of_variants = (values for axis in self.variants.values() for values in axis.values())
        return {name for values in (self.values, *of_variants) for name in values}


@dataclass(frozen=True, slots=True)
class Space:
    """The candidates of one family on one problem, and how many configs each rule removed."""

    kernel: Family
    problem: Problem
    configs: tuple[Config, ...]
    total: int
    removed: dict[str, int]
    """Rule name to the number of configs that it removed first, in rule order."""
    variants: Mapping[Config, Mapping[str, str]] = field(default_factory=dict)
    """Each config to axis to variant name; no axes if the spec has no variants."""
    excess: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Each limit that BLOCK_LIMITS found exceeded: the least and most value, and the maximum."""
    sm_count: int = 0
    """SMs of the card that it is planned for."""

    @property
    def excess_text(self) -> str:
        """`bytes of shared memory of stage fwd 262,144 to 327,680, at most 232,448`, or nothing."""
        said = []
        for what, (low, high, most) in self.excess.items():
            values = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            said.append(f"{what} {values}, at most {most:,}")
        return "; ".join(said)

    @classmethod
    def build(
        cls, kernel: Family, problem: Problem, arch: Arch, selection: Selection | None = None
    ) -> Space:
        """Every combination of selected values that all rules keep, each config once."""
        selection = selection or Selection()
        groups = list(selected(kernel, selection, arch))
        _refuse_too_many(kernel, groups)
        removed = dict.fromkeys(kernel.rules_for(selection.names), 0)
        kept: dict[Config, dict[str, str]] = {}
        seen: set[tuple[Value, ...]] = set()
        over: dict[str, tuple[int, int, int]] = {}
        with time_limit.limited():
            for chosen, values in groups:
                refusals = refused(kernel, problem, arch, values)
                combinations = itertools.product(*values.values())
                for combination, by in zip(combinations, refusals, strict=True):
                    if combination in seen:
                        continue
                    seen.add(combination)
                    if by is not None:
                        removed[by] += 1
                    if by in (None, BLOCK_LIMITS):
                        config = Config(dict(zip(values, combination, strict=True)))
                    if by is None:
                        kept[config] = chosen
                    elif by == BLOCK_LIMITS and (excess := kernel.excess(config, problem, arch)):
                        what, value, most = excess
                        low, high, _ = over.get(what, (value, value, most))
                        over[what] = (min(low, value), max(high, value), most)
        made = (tuple(kept), len(seen), removed, kept, over)
        return cls(kernel, problem, *made, sm_count=arch.sm_count)


def selected(
    kernel: Family, selection: Selection, arch: Arch
) -> Iterator[tuple[dict[str, str], dict[str, tuple[Value, ...]]]]:
    """Each choice of variants with the values of every parameter, `sms` as the card's SMs.

    If one variant names a mode, every config contains it, so that all have the same parameters.
    """
    own = {param.name: param.on(arch) for param in kernel.params}
    modes = {
        param.name: param.values[:1] for param in kernel.modes if param.name in selection.names
    }
    for chosen, values in selection.on(kernel, arch).groups():
        yield chosen, {name: values.get(name, default) for name, default in (own | modes).items()}


def _refuse_too_many(
    kernel: Family, groups: list[tuple[dict[str, str], dict[str, tuple[Value, ...]]]]
) -> None:
    combinations = sum(math.prod(map(len, values.values())) for _, values in groups)
    if combinations > MAX_COMBINATIONS:
        longest = {name: max(len(v[name]) for _, v in groups) for name in groups[0][1]}
        names = sorted(longest, key=lambda name: -longest[name])[:3]
        raise SpaceError(
            f"{kernel.name} has {combinations} combinations of values, more than "
            f"{MAX_COMBINATIONS}",
            hint=f"name fewer in the spec; the longest lists are {', '.join(names)}",
        )
