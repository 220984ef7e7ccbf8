"""Chooses the kernels of a package from recorded runs: winners and runners-up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from attnsweep.core.hardware import Arch, arch_named
from attnsweep.core.ops import Op
from attnsweep.core.problem import FULL, Problem
from attnsweep.core.trial import Status, Trial
from attnsweep.family.family import Config, Family
from attnsweep.reports.sections import baselines_of
from attnsweep.serve.export_code import Families, why_unpacked
from attnsweep.serve.portfolio import Portfolio, portfolios
from attnsweep.serve.runtime.cost_model import FEW_QUERIES, tiling_of
from attnsweep.serve.runtime.families import DECLARED, family_of, has_rival, kind_of_code
from attnsweep.serve.runtime.table import GpuKey
from attnsweep.store.run import Run

# How many configs are looked at for a tuned shape and the shapes near it. The first number is of
# every shape, the winner included. Where few shapes of a kind were tuned, they share the second,
# the next fastest of all configs that won anywhere; the third is that number for other masks, for
# v's own head_dim and for gradients. If several configs cut a call alike (`cost_model.Tiling`), a
# package holds one of them, since a prediction nearly always takes the fastest.
#
# On 710 shapes, what held-out shapes lose on average, of an H100 and an H200, of other head_dims
# and of few queries:
#   all that is looked at, 2, 20, 6    1012 kernels   1.1 %   1.6 %   11.9 %   23.4 %
#   one of those alike, 2, 20, 6        738           1.1 %   1.6 %   11.9 %   15.4 %
# and with kernels that are 2 % slower in the winners' place (`shared`), as comes with attnsweep:
#   2, 20, 6                            638           1.0 %   1.6 %   11.9 %   15.5 %
#   1, 20, 6                            606           1.0 %   1.5 %   11.9 %   15.5 %
#   2, 10, 4                            594           1.0 %   1.8 %   11.9 %   24.8 %
_HELD, _HELD_OF_A_KIND, _HELD_OF_OTHERS = 1, 20, 6
# Gradients that only winners compute, on the very shapes: see `dispatch.exactly`.
_WINNERS_ALONE = ("window backward", "padded backward")

_SDPA = "torch_"  # how names of PyTorch's own attention begin
_BEFORE_MATH = {"torch_flash", "torch_efficient"}

Kind = tuple[int, str]
"""head_dim and kind of mask: kernels of one kind are compared on a shape."""


@dataclass(frozen=True)
class Chosen:
    """The kernel that a package takes for one recorded problem.

    gain: of `trial` over PyTorch's attention. config: of `trial`. sdpa_us and gains are 0 in FP8,
    which PyTorch's attention cannot do. times_us: of each config of the family that was timed
    there, by its label. memory_bytes_per_us: peak rate of the GPU's memory. slower: share by which
    the winner took less time than `trial`, by the rounds of both. rivals: what may stand in the
    winner's place.
    """

    trial: Trial
    config: Config
    gpu: GpuKey
    sdpa_us: float
    gain: float
    gain_low: float
    times_us: Mapping[str, float]
    memory_bytes_per_us: float
    slower: float = 0.0
    rivals: Sequence[Chosen] = ()

    @property
    def problem(self) -> Problem:
        """The recorded problem, which stands for calls of any scale."""
        return self.trial.problem.at_any_scale

    @property
    def candidates(self) -> dict[str, Chosen]:
        """The kernels that may serve the problem, by family and config: this one and its rivals."""
        return {f"{c.trial.kernel} {c.config.label}": c for c in (*self.rivals, self)}

    def by(self, key: str | None) -> Chosen:
        """A candidate in this one's place; of None, this one."""
        return replace(self.candidates[key], times_us=self.times_us) if key else self


def is_sdpa(trial: Trial) -> bool:
    """Whether a row is of PyTorch's own attention."""
    return trial.provider.startswith(_SDPA)


def lost_sdpa(run: Run, timed: Mapping[Problem, Collection[str]]) -> dict[Problem, str]:
    """Problems with a baseline of PyTorch's that was neither timed nor skipped, and which.

    What users would get there is not known: next to torch_flash alone a gain of 1.26 stood as 1.76.
    So one that the run's spec names counts without any row; but for torch_math, which PyTorch calls
    where nothing of _BEFORE_MATH takes a call. timed: the baselines of PyTorch's with a time, by
    problem.
    """
    rows = [trial for trial in run.trials if is_sdpa(trial)]
    every = dict.fromkeys((*_asked_for(run.spec_text), *(trial.provider for trial in rows)))
    spared = {(t.problem, t.provider) for t in rows if t.status is Status.SKIPPED}
    return {
        problem: name
        for problem, names in timed.items()
        for name in every
        if name not in names
        and (problem, name) not in spared
        and not (name == "torch_math" and _BEFORE_MATH.intersection(names))
    }


def _asked_for(spec_text: str | None) -> list[str]:
    """Baselines of PyTorch's that a run's spec names; none if it cannot be read."""
    return [name for name in baselines_of(spec_text) if name.startswith(_SDPA)]


def kind_of(problem: Problem) -> Kind:
    """The kind of the kernels that serve a problem."""
    return (problem.head_dim, problem.variant)


def asked_of(problem: Problem) -> tuple[int, str, bool]:
    """The kind of a problem, and whether it has few queries: predictions know only such times."""
    return (*kind_of(problem), problem.seqlen_q < FEW_QUERIES)


def cut_of(config: Config, problem: Problem) -> Hashable:
    """How a config cuts calls, which with its times is all that a prediction knows of it."""
    return tiling_of(DECLARED[family_of(problem)], config)


def shared(winners: Sequence[Chosen]) -> list[Chosen]:
    """The winners, or rivals in their place, so that fewer kernels serve all shapes of a kind.

    A rival cuts calls as the winner does, so that other shapes lose nothing.
    """
    kinds: dict[tuple[Hashable, Hashable], list[int]] = defaultdict(list)
    for at, chosen in enumerate(winners):
        cut = cut_of(chosen.config, chosen.problem)
        kinds[asked_of(chosen.problem), cut].append(at)
    out = list(winners)
    for (_, cut), places in kinds.items():
        may = [_times_as_long(winners[at], [cut]) for at in places]
        fewest = next(found for found in portfolios(may) if None not in found.own)
        for at, key in zip(places, fewest.own, strict=True):
            out[at] = winners[at].by(key)
    return out


def portfolios_of(winners: Sequence[Chosen]) -> list[Portfolio]:
    """The best configs for all shapes, one, two and so on, next to PyTorch's own attention."""
    gains = [max(1, each.gain) if has_rival(each.problem) else None for each in winners]
    return portfolios([_times_as_long(each) for each in winners], gains)


def _times_as_long(winner: Chosen, cuts: Collection[Hashable] = ()) -> dict[str, float]:
    """Time over the winner's of each candidate for a shape. cuts: of those that cut calls so."""
    return {
        key: 1 + each.slower
        for key, each in winner.candidates.items()
        if not cuts or cut_of(each.config, each.problem) in cuts
    }


def served(
    winners: Sequence[Chosen], won: Sequence[Chosen], families: Families
) -> dict[GpuKey, dict[Kind, dict[str, Config]]]:
    """The configs that serve on a GPU, by kind and label: winners, and runners-up.

    won: the winners themselves, if others stand in for them: runners-up are of their configs.
    """
    found: dict[GpuKey, dict[Kind, dict[str, Config]]] = {}
    here: dict[Kind, dict[str, Config]] = defaultdict(dict)  # on any GPU
    pools: dict[tuple[GpuKey, Op], dict[str, Config]] = defaultdict(dict)
    for chosen in (*winners, *won):
        pools[chosen.gpu, chosen.problem.op][chosen.config.label] = chosen.config
    for chosen in winners:
        here[kind_of(chosen.problem)][chosen.config.label] = chosen.config
        of_gpu = found.setdefault(chosen.gpu, {}).setdefault(kind_of(chosen.problem), {})
        of_gpu[chosen.config.label] = chosen.config
    shapes = Counter((chosen.gpu, asked_of(chosen.problem)) for chosen in winners)
    for chosen in winners:
        problem, kind = chosen.problem, kind_of(chosen.problem)
        pool = pools[chosen.gpu, problem.op]
        known = pool | here[kind]
        own, family = chosen.config.label, families[family_of(problem)]
        # The shape's own was run: on a card of fewer SMs, rules may allow what they refuse here.
        times_us = {
            label: us
            for label, us in chosen.times_us.items()
            if label in known and (label == own or _runs(family, known[label], problem))
        }
        cuts = {label: cut_of(known[label], problem) for label in times_us}
        count = shapes[chosen.gpu, asked_of(problem)]
        held = held_for(times_us, own, pool, count, problem.variant, cuts=cuts, here=here[kind])
        new = {label: known[label] for label in held}
        here[kind] |= new
        found[chosen.gpu][kind] |= new
    return found


def _runs(family: Family, config: Config, problem: Problem) -> bool:
    refused = family.refused_by(config, problem, arch_named(family.min_arch))
    return refused is None and why_unpacked(config, problem) is None


def held_for(
    times_us: Mapping[str, float],
    own: str,
    won: Collection[str],
    shapes: int,
    variant: str = "full",
    *,
    cuts: Mapping[str, Hashable],
    here: Collection[str] = (),
) -> list[str]:
    """Labels of the configs that a package holds for a shape: its own, and runners-up.

    times_us: on the shape. won: configs that won anywhere. shapes: number of tuned shapes of its
    head_dim and variant, with few queries or with more. cuts: how each config cuts a call. here:
    configs that the package holds of this kind; one of them takes the place of one that cuts calls
    alike.
    """
    if variant in _WINNERS_ALONE:
        return [own]
    of_kind = _HELD_OF_A_KIND if variant in ("full", "causal") else _HELD_OF_OTHERS
    count = max(_HELD, -(-of_kind // shapes)) - 1
    fastest = sorted((us, label) for label, us in times_us.items() if label in won and label != own)
    held = {cuts[own]: own}
    for us, label in fastest[:count]:
        there = [(times_us[one], one) for one in here if cuts.get(one) == cuts[label]]
        held.setdefault(cuts[label], min(there, default=(us, label))[1])
    return list(held.values())


# ---- FP8 ----
def spare_kernels(
    winners: Sequence[Chosen], families: Families
) -> Iterator[tuple[Config, Problem]]:
    """Kernels for shapes where the rules allow no FP8 winner of their kind to run."""
    kinds: dict[object, Chosen] = {}
    for chosen in winners:
        kinds.setdefault(kind_of_code(chosen.problem), chosen)
    for chosen in kinds.values():
        family = families[family_of(chosen.problem)]
        yield from spares(chosen.config, chosen.problem, family, arch_named(family.min_arch))


def spares(
    config: Config, problem: Problem, family: Family, arch: Arch
) -> list[tuple[Config, Problem]]:
    """Configs that the rules allow on nearly any shape, which round as `config` does if they can.

    Each with a problem where they hold: without a mask one config; with one, a config for calls of
    one block of queries, and one for longer ones. They have blocks of 64 queries, or where those
    do not fit (head_dim 256) of 128, which no rule allows for 64 queries or fewer.
    """
    for warpgroups in (1, 2):
        block_m = 64 * warpgroups
        lengths = [(block_m - 63, 0)] + ([(block_m + 1, 1)] if problem.mask != FULL else [])
        found = []
        for seqlen, order in lengths:
            small = replace(problem, seqlen_q=seqlen, seqlen_k=seqlen)
            small = replace(small, batch=1, heads=1, heads_kv=1)
            fixed = {"WARPGROUPS": warpgroups, "BLOCKS_PER_SM": 2 // warpgroups, "ORDER": order}
            fixed |= {"PINGPONG": 0, "PERSISTENT": 0, "PDL": 0, "NUM_STAGES": 2}
            for interval, block_n, v_stages in product(
                (config.INTERVAL, 64, 0), (96, 64), (config.V_STAGES, 1)
            ):
                tile = {"INTERVAL": interval, "BLOCK_N": block_n, "V_STAGES": v_stages}
                made = Config({**config, **fixed, **tile})
                if family.refused_by(made, small, arch) is None:
                    found.append((made, small))
                    break
        if len(found) == len(lengths):
            return found
    return []
