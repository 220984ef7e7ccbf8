"""What `attnsweep verify` runs of a family: configs and cases, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from attnsweep.core.cases import Case, served_cases, small_cases
from attnsweep.core.errors import ProblemError, SpaceError
from attnsweep.core.hardware import Arch
from attnsweep.core.layouts import EXAMPLES, Layout
from attnsweep.core.problem import Paged, Problem
from attnsweep.family.family import Config, Family
from attnsweep.family.space import Selection, Space
from attnsweep.tools.simulator import config_of

# Parts of the labels of problems: one of each kind that a declaration may have.
_MASKS = {
    "full": "full",
    "causal": "causal",
    "window": "window(256,128)",
    "boolean": "boolean(causal,item)",
}
_SCORES = {"softcap": " softcap(50)", "sinks": " sinks", "bias": " bias(item,head)"}
# More values than these are told by the first and the last.
_MOST_TOLD = 4


def forms(
    family: Family, dtypes: Sequence[str], masks: Sequence[str], head_dim: int
) -> Iterator[Problem]:
    """A problem of each op, dtype, layout and mask together, and of each change of the scores.

    A paged one has few queries, and one more for each format that its cache may have.

    A family with `empty_rows` has one more for each mask that makes rows without a key.
    """
    for op, dtype in product(family.ops, dtypes):
        end = "" if op == "forward" else f" {op}"
        examples = [EXAMPLES[layout] for layout in family.layouts]
        paged = [each for each in examples if isinstance(each, Paged)]
        examples += [replace(e, cache_dtype=c) for e, c in product(paged, family.cache_dtypes)]
        for example, mask in product(examples, masks):
            batch = 1 if example.one_item else 2
            said = f"{head_dim}) {dtype} {_MASKS[mask]}{example.label}{end}"
            with suppress(ProblemError):  # packed sequences have no boolean mask
                yield as_served(family, Problem.parse(f"({batch},8,{_size(example)},{said}"))
                if family.empty_rows and example.kind == "dense":
                    more = Problem.parse(f"({batch},8,1024x512,{said}")
                    yield from [more] * more.has_empty_rows
        for kind in family.scores:
            mask = "causal" if "causal" in masks and kind != "bias" else "full"  # it has no mask
            first = examples[0]
            said = f"{head_dim}) {dtype} {mask}{first.label}{_SCORES[kind]}{end}"
            with suppress(ProblemError):  # gradients have none
                yield Problem.parse(f"(2,8,{_size(first)},{said}")


def as_served(family: Family, problem: Problem) -> Problem:
    """The problem, and if the family reads no v, one of MLA with pages as large as those have."""
    if not family.value_in_key:
        return problem
    of_v, layout = family.head_dims_v[0], Paged(64)
    return replace(problem, heads_kv=1, head_dim_v=of_v, value_in_key=True, layout=layout)


def _size(layout: Layout) -> str:
    """Queries and keys of a label."""
    return "4x1024" if isinstance(layout, Paged) else "1024"


def cases_of(family: Family, whole: Problem) -> tuple[Case, ...]:
    """The small cases of a problem that the family serves."""
    return served_cases(small_cases(whole), whole, family.serves)


def configs_of(family: Family, words: str, problem: Problem, arch: Arch) -> tuple[Config, ...]:
    """The config with these values and else the first ones, then all others that the rules keep.

    If a rule refuses that config, those that all keep are alone, unless there is none.
    """
    first = config_of(family, words)
    given = {part.partition("=")[0] for part in words.split()}
    try:
        selection = Selection({name: (first[name],) for name in given})
        kept = Space.build(family, problem, arch, selection).configs
    except SpaceError:  # too many to enumerate
        kept = ()
    return tuple(dict.fromkeys((first, *kept))) if first in kept or not kept else kept


def facts(cases: Iterable[Case]) -> dict[str, list[Any]]:
    """The dtypes, masks and so on of cases, each once, by the names that a declaration has."""
    of = [case.problem for case in cases]
    found: dict[str, list[Any]] = {
        "dtypes": [p.dtype for p in of],
        "masks": [p.mask.kind for p in of],
        "layouts": [p.layout.kind for p in of],
        "cache_dtypes": [p.layout.cache_dtype for p in of if p.layout.cache_dtype],
        "scores": [kind for p in of for kind in p.scores.kinds],
        "ops": [p.op.name for p in of],
        "head_dims": [p.head_dim for p in of],
        "head_dims_v": [p.head_dim_v for p in of if p.head_dim_v],
    }
    return {name: [*dict.fromkeys(values)] for name, values in found.items()}


def form(case: Case) -> str:
    """`fp16 · causal · paged`: what a case has in common with others of its form."""
    return in_words({name: v for name, v in facts([case]).items() if "head_dim" not in name})


def left_out(family: Family, ran: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Values that a declaration promises and `verify` did not run, by name."""
    promised = {name: [v for v in getattr(family, name) if v not in ran[name]] for name in ran}
    return {name: values for name, values in promised.items() if values}


def in_words(found: dict[str, list[Any]]) -> str:
    """`fp16, bf16 · full, causal · head_dim 64`: the usual layout and op are not told."""
    said = []
    for name, values in found.items():
        if values and values not in (["dense"], ["forward"]):
            some = values if len(values) <= _MOST_TOLD else [*values[:2], "…", values[-1]]
            text = ", ".join(map(str, some))
            said.append(f"{name.replace('dims', 'dim')} {text}" if "dim" in name else text)
    return " · ".join(said)
