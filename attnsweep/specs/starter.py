"""A spec for a card: the shipped one of its kind, for problems of the user's.

`attnsweep tune` runs such a spec, and `attnsweep init` writes one. The text keeps the shipped
spec's comments, which say why its spaces are as they are.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnsweep.core.errors import KernelError, SpaceError
from attnsweep.core.hardware import Arch
from attnsweep.core.ops import FORWARD
from attnsweep.core.problem import SIZES, Problem
from attnsweep.family.family import Family
from attnsweep.family.space import Space
from attnsweep.specs.load import SweepSpec, load_spec
from attnsweep.specs.model import FLEX, OF_PAGED, VARLEN, UnservedCalls
from attnsweep.specs.shipped import shipped_specs
from attnsweep.specs.yaml_file import Flow, dump, nearest

# The spec of each kind of card. Blackwell has none of its own: the families without wgmma run
# there, in the space of the card whose shared memory is nearest.
_OF_ARCH = {
    "sm_80": "a100",
    "sm_86": "l4",
    "sm_89": "l4",
    "sm_90a": "h100",
    "sm_100a": "a100",
    "sm_103a": "a100",
    "sm_120a": "l4",
}
_CARDS = {"a100": "sm_80", "l4": "sm_89", "h100": "sm_90a", "h200": "sm_90a"}
"""Each card with a spec of its own, and the architecture that it must have: a name is no proof."""
# The shipped specs whose spaces problems in 16 bits get on a Hopper card: see _by_shape. On an
# H100, (1,32/8,1x32768,128) bf16 took 100 µs with the best of h100.yaml, and 46 with the best of
# few_queries.yaml.
_FEW_QUERIES, _SHORT, _LONG = "few_queries", "flash_short", "flash_training"
_DIMS, _OTHER_DIMS, _VALUE_DIMS = "flash_dims", "head_dims", "value_dims"
# Queries of a head that are few: they fill no tile of 64.
_MOST_FEW = 64
# Tiles of 64 queries of an SM where a problem is short: blocks of a tile then leave SMs idle.
_TILES_OF_SHORT = 2
_LEAST_LONG = 4096
# Head dims, dtypes, ops and layouts that no card's own spec has, on every card that can.
_MORE_SPECS = ("fp32", "wide_head", "wide_heads", "fp8_h100", "backward", "paged")


@dataclass(frozen=True, slots=True)
class Target:
    """The card that a spec is for. gpu: its name, or empty if only its architecture is known."""

    arch: Arch
    gpu: str = ""
    recording: Path | None = None
    """A run to replay in place of measuring."""

    @property
    def spec(self) -> str:
        """Name of the shipped spec of this kind of card."""
        words = re.findall(r"[a-z0-9]+", self.gpu.lower())
        own = (card for card, arch in _CARDS.items() if card in words and arch == self.arch.name)
        return next(own, _OF_ARCH[self.arch.name])

    @property
    def untried(self) -> str | None:
        """A warning, if no shipped spec was made on such a card."""
        if self.arch.name in _CARDS.values():
            return None
        return (
            f"no shipped spec was made on {self.arch.name}; the space of {self.spec} runs there, "
            "but was chosen on another card"
        )


# Baselines that take any mask, beside those of a shipped spec.
_OF_MASKS = ("torch_efficient", FLEX)


@dataclass(frozen=True, slots=True)
class Request:
    """A spec that somebody asks for: its problems, and how they are searched."""

    problems: Sequence[Problem]
    name: str
    kernels: Sequence[str] = ()
    """Families to sweep in place of the shipped spec's choice."""
    kernel_dir: Path | None = None
    """Where families of the user's own are."""
    search: Mapping[str, Any] = field(default_factory=dict)
    calls: Mapping[Problem, int] = field(default_factory=dict)
    """How often a program calls each problem."""
    notes: Mapping[Problem, str] = field(default_factory=dict)
    """What its line says behind it."""
    unserved: Sequence[UnservedCalls] = ()
    """The program's other calls."""


def starter(request: Request, target: Target, families: Mapping[str, Family]) -> str:
    """The text of a spec for these problems on this card.

    Each problem gets the families that the card's shipped spec sweeps on all of its problems, in
    the shipped space for its shape: few queries, short, long, or the card's own. A family that gets
    several has a name for each but the first. Raises KernelError for an unknown family, SpaceError
    if no family can run a problem.
    """
    sources = _sources(target)
    spaces: dict[tuple[str, str], str] = {}  # family and spec to the name of the space
    chosen: dict[Problem, list[str]] = {}
    for problem in request.problems:
        chosen[problem] = []
        for family in _families_for(problem, request.kernels, sources, target, families):
            space = family, _source_of(family, problem, sources, target, families)
            taken = any(name == family for name in spaces.values())
            spaces.setdefault(space, f"{family}_{space[1]}" if taken else family)
            chosen[problem].append(spaces[space])
    used = list(dict.fromkeys(family for family, _ in spaces))
    usual = [name for name in spaces.values() if name in used]
    base = next((s for s in sources if any(name in s.kernels for name in used)), sources[0])
    origins = ", ".join(dict.fromkeys(f"{name}.yaml" for _, name in spaces if name))
    what = "its space is that of" if len(spaces) == 1 else "its spaces are those of"
    lines = [_head(request.name, target, f"{what} {origins or f'{base.name}.yaml'}")]
    if request.kernel_dir is not None:
        lines.append(_line("kernel_dir", str(request.kernel_dir.resolve())))
    lines.append("problems:")
    for problem, names in chosen.items():
        entry = _entry(problem) | ({} if names == usual else {"kernels": names})
        entry |= {"calls": request.calls[problem]} if problem in request.calls else {}
        note = request.notes.get(problem)
        lines.append(f"  - {_flow(entry)}{f' # {note}' if note else ''}")
    lines.append("kernels:")
    for (family, source), name in spaces.items():
        own = families[family]
        call: dict[str, Any] = {"call": own.call}
        call |= {param.name: [*param.values] for param in own.params}
        call |= {"widen": True} if getattr(own, "widen", False) else {}
        lines += [f"  {name}: {_flow(call)}"] if own.call else _block(family, name, source)
    variants = {problem.variant for problem in request.problems if problem.op == FORWARD}
    kinds = {problem.layout.kind for problem in request.problems}
    of_masks = {each for each in variants if not each.startswith("paged")} - {"full", "causal"}
    asked = [*_OF_MASKS] if of_masks else []
    asked += [VARLEN] if "packed" in kinds else []
    asked += OF_PAGED if "paged" in kinds else []
    baselines = dict.fromkeys((*base.baselines, *asked))
    lines.append(f"baselines: [{', '.join(baselines)}]")
    if request.search:
        lines.append(f"search: {_flow(dict(request.search))}")
    lines.append(f"measure: {_flow({'replay_us': base.measure.replay_us})}")
    if request.unserved:
        lines.append("unserved: # calls of the program that are none of the problems")
        lines += [f"  - {_flow(each.model_dump())}" for each in request.unserved]
    return "\n".join(lines) + "\n"


def refusal(problem: Problem, target: Target, families: Mapping[str, Family]) -> str | None:
    """Why no family that `starter` would choose can run a problem, or None if one can."""
    reasons = {}
    for spec in _sources(target):
        for name in _on_every_problem(spec):
            reason = families[name].refusal(problem, target.arch)
            if reason is None:
                return None
            reasons[reason] = name
    return "; ".join(f"{name}: {reason}" for reason, name in reasons.items())


def _sources(target: Target) -> list[SweepSpec]:
    """The shipped specs whose families a problem may get, in this order."""
    return [_shipped(name) for name in (target.spec, *_MORE_SPECS)]


@functools.cache
def _shipped(name: str) -> SweepSpec:
    return load_spec(shipped_specs()[name])


def example(target: Target, name: str) -> str:
    """The text of the card's shipped spec under another name, with what else a spec can say."""
    path = shipped_specs()[target.spec]
    text = path.read_text(encoding="utf-8")
    body = text[text.index("\nproblems:") + 1 :]
    head = _head(name, target, f"after {target.spec}.yaml")
    return with_more(f"{head}\n{body.rstrip()}\n")


def spec_of_kernel(name: str, problems: Sequence[Problem], arch: str | None) -> str:
    """The text of a spec for a family of the user's own, next to its declaration."""
    entries = [_entry(problem) for problem in problems or [Problem(1, 16, 16, 1024, 1024, 64)]]
    lines = [f"# A sweep of {name}, written by attnsweep.", f"name: {name.lower()}"]
    lines += [f"arch: {arch}"] * (arch is not None)
    lines += ["kernel_dir: .", "problems:", *(f"  - {_flow(entry)}" for entry in entries)]
    lines += [f"kernels: {{{name}: {{}}}}", "baselines: [torch_flash, torch_cudnn]"]
    return with_more("\n".join(lines) + "\n")


def with_more(text: str) -> str:
    """A spec, and as comments the sections that it leaves out."""
    there = {line.partition(":")[0] for line in text.splitlines()}
    more = [
        line
        for line in _MORE.splitlines(keepends=True)
        if line.removeprefix("# ").partition(":")[0] not in there
    ]
    return text + "".join(more)


_MORE = """\
# A spec can say more; `attnsweep schema` describes every key:
# search: {strategy: exhaustive} # or {strategy: random, candidates: 50}, or {budget_s: 60}
# limits: {workspace_bytes: 2 GiB, spill_bytes: 0} # candidates above are pruned
# require: {spill_bytes: 0} # of the compiled code
# check: {slower: 0.02} # when `attnsweep check` calls a kernel slower
# kernel_dir: kernels # families of your own, next to this file
"""


def run_name(problems: Sequence[Problem], kernels: Sequence[str] = ()) -> str:
    """The name of the run that tunes these: of its shape, or of all of them together.

    kernels: the families asked for; their run is apart, so that no other family wins it. The same
    problems and families in another order have the same name.
    """
    labels = sorted(problem.label for problem in problems)
    if len(labels) == 1:
        label = re.sub(r"/(?=\d+\))", "v", labels[0]).replace("/", "kv")  # of head_dim, of heads
        name = re.sub("[^a-z0-9]+", "-", label).strip("-")
    else:
        digest = hashlib.sha256("\n".join(labels).encode()).hexdigest()[:8]
        name = f"{len(labels)}-shapes-{digest}"
    families = (re.sub("[^a-z0-9_]+", "-", kernel.lower()) for kernel in sorted({*kernels}))
    return "-".join(["tune", name, *families])


def what_runs(families: Mapping[str, Family]) -> str:
    """Which families and specs there are for which architecture."""
    by_arch: dict[str, list[str]] = {}
    for kernel in families.values():
        by_arch.setdefault(kernel.archs_text, []).append(kernel.name)
    specs: dict[str, list[str]] = {}
    for arch, name in _OF_ARCH.items():
        specs.setdefault(name, []).append(arch)
    lines = [f"families of {archs}: {', '.join(names)}" for archs, names in by_arch.items()]
    of = ", ".join(f"{name} ({', '.join(archs)})" for name, archs in specs.items())
    return "\n  ".join([*lines, f"specs: {of}"])


def _head(name: str, target: Target, after: str) -> str:
    where = target.gpu or target.arch.name
    lines = [f"# A sweep for {where}, written by attnsweep; {after}."]
    if target.recording is not None:
        lines += [f"name: {name}", "device: replay", _line("recording", str(target.recording))]
    else:
        lines += [f"name: {name}", f"arch: {target.arch.name}"]
    return "\n".join(lines)


def _line(key: str, value: Any) -> str:
    return dump({key: value}).strip()


def _flow(value: Mapping[str, Any]) -> str:
    """A mapping on one line."""
    return _line("_", Flow(value)).removeprefix("_: ")


def _entry(problem: Problem) -> dict[str, Any]:
    """A problem as briefly as a spec can say it."""
    p = problem
    entry: dict[str, Any] = {"batch": p.batch, "heads": p.heads}
    entry |= {} if p.heads == p.heads_kv else {"heads_kv": p.heads_kv}
    same = p.seqlen_q == p.seqlen_k
    entry |= {"seqlen": p.seqlen_q} if same else {"seqlen_q": p.seqlen_q, "seqlen_k": p.seqlen_k}
    entry["head_dim"] = p.head_dim
    entry |= {} if p.head_dim_v is None else {"head_dim_v": p.head_dim_v}
    entry |= {} if p.dtype == "fp16" else {"dtype": p.dtype}
    rest = {name: value for name, value in p.facts.items() if name not in (*SIZES, "dtype")}
    return entry | {name: value for name, value in rest.items() if value is not False}


def _families_for(
    problem: Problem,
    asked: Sequence[str],
    sources: Sequence[SweepSpec],
    target: Target,
    families: Mapping[str, Family],
) -> tuple[str, ...]:
    """The families for one problem: those asked for, or of the first spec that has one for it."""
    for name in asked:
        if name not in families:
            call = f"name its function, {name}:FUNCTION" if name.endswith(".py") else None
            raise KernelError(f"unknown kernel {name!r}", hint=call or nearest(name, families))
    groups = [asked] if asked else [_on_every_problem(spec) for spec in sources]
    refused: dict[str, str] = {}
    for names in groups:
        reasons = {name: families[name].refusal(problem, target.arch) for name in names}
        able = tuple(name for name, reason in reasons.items() if reason is None)
        if able:
            return able
        refused |= {name: reason for name, reason in reasons.items() if reason is not None}
    others = [
        name
        for name, kernel in families.items()
        if name not in refused and kernel.refusal(problem, target.arch) is None
    ]
    hints = [f"{name}: {reason}" for name, reason in refused.items()]
    if others:
        hints.append(f"{', '.join(others)} can run it: add --kernel {others[0]}")
    who = "no kernel of --kernel" if asked else f"no family of {target.spec}.yaml"
    raise SpaceError(
        f"{who} runs {problem.label} on {target.arch.name}",
        hint="\n  ".join(hints),
    )


def _source_of(
    family: str,
    problem: Problem,
    sources: Sequence[SweepSpec],
    target: Target,
    families: Mapping[str, Family],
) -> str:
    """Name of the first shipped spec that has candidates of the family for a problem, or ''."""
    shape = _by_shape(problem, target)
    specs = [*([_shipped(shape)] if shape else []), *sources]
    for spec in specs:
        space = spec.kernels.get(family)
        if space and Space.build(families[family], problem, target.arch, space).configs:
            return spec.name
    return ""


def _by_shape(problem: Problem, target: Target) -> str | None:
    """The shipped spec that was made for problems of such a shape, besides the card's own."""
    if target.spec not in ("h100", "h200") or problem.dtype not in ("fp16", "bf16"):
        return None
    if target.recording is not None:  # it has candidates of the card's own spec
        return None
    if problem.head_dim_v:
        return _VALUE_DIMS
    if problem.seqlen_q <= _MOST_FEW and problem.seqlen_k > _MOST_FEW * 8:
        return _FEW_QUERIES
    if problem.query_tiles(64) <= _TILES_OF_SHORT * target.arch.sm_count:
        return _SHORT
    if problem.head_dim not in (64, 128):
        return _DIMS if problem.head_dim in (96, 192, 256) else _OTHER_DIMS
    return _LONG if problem.seqlen_k >= _LEAST_LONG else None


def _on_every_problem(spec: SweepSpec) -> list[str]:
    """The families that a spec sweeps on each of its problems; others are there to compare."""
    return [name for name in spec.kernels if all(name in entry.kernels for entry in spec.problems)]


def _block(family: str, name: str, source: str) -> list[str]:
    """The lines of a family's space under `kernels:`, by this name, with their comments.

    Without a source it is the family's whole space.
    """
    if not source:
        return [f"  {name}: {{}}" if name == family else f"  {name}: {{family: {family}}}"]
    document = _shipped(source).document
    lines = document.path.read_text(encoding="utf-8").splitlines()
    starts = {loc: int(mark[0]) for loc, mark in document.keys.items() if len(loc) <= 2}
    first = starts["kernels", family]
    after = [n for loc, n in starts.items() if n > first and loc[0] in (loc[-1], "kernels")]
    last = min(after, default=len(lines) + 1)
    block = lines[first - 1 : last - 1]
    while block and (not block[-1].strip() or block[-1].startswith("#")):
        block.pop()
    if name != family:
        indent, _, rest = block[0].partition(f"{family}:")
        if rest.lstrip().startswith("{"):
            block[0] = f"{indent}{name}: {{family: {family}, {rest.lstrip()[1:]}"
        else:
            block[:1] = [f"{indent}{name}:{rest}", f"{indent}  family: {family}"]
    return block
