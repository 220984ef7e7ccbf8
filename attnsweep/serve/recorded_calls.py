"""From a program's attention calls to a spec: which shapes it has, and how often it calls each."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnsweep.choose.search import DEFAULT_STRATEGY
from attnsweep.core.errors import NoGpuError, ProblemError, SpecError
from attnsweep.core.hardware import arch_named, arch_of
from attnsweep.core.masks import mask_of_facts
from attnsweep.core.ops import BACKWARD, FORWARD
from attnsweep.core.problem import DTYPE_BYTES, Dtype, Problem, Scores
from attnsweep.family.discover import discover
from attnsweep.family.family import Family
from attnsweep.reports.terminal import counted
from attnsweep.serve.recorder.log import COMPILED, COUNTS, ERRORS, EVERY_CALL, KINDS, TORCH, Log
from attnsweep.specs.model import UnservedCalls
from attnsweep.specs.starter import Request, Target, refusal, starter
from attnsweep.store.outputs import check_output, refuse_recorded, write_output

NAME = "torch.nn.functional.scaled_dot_product_attention"
TOP = 50
"""Most problems of a spec that is made from a program."""
_DTYPES: dict[str, Dtype] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_MOST_UNSERVED = 50
# FlashAttention on the GPU, whose causal mask is aligned so.
_BOTTOM_RIGHT = "_scaled_dot_product_flash_attention"
_NOTES = TORCH, EVERY_CALL, COMPILED
_UNSEEN = ": no process imported PyTorch, or only under python -I, -E or -S, which hide it from us"
_MASKS = {
    "causal": "an explicit mask; the first one was causal: is_causal=True can be served",
    "full": "an explicit mask; the first one masked nothing: attn_mask=None can be served",
    "bias": "a float mask of another dtype than q's",
    "mask": "a float mask of another dtype than q's; a boolean one can be served",
}
_BOOLEAN = {
    "causal": "the first mask was causal: is_causal=True needs no scan of it",
    "full": "the first mask hid nothing: attn_mask=None needs no scan of it",
    "mask": "the first mask may hide more",
}
# A rough cost, only to choose and order shapes: an H100's rates, and a launch.
_FLOPS_PER_US, _BYTES_PER_US, _LAUNCH_US = 5e8, 3e6, 5.0


@dataclass(frozen=True)
class Recorded:
    """The recorded calls of a program's processes. calls: each kind, with how often it ran."""

    calls: Sequence[tuple[Mapping[str, Any], int]]
    processes: int = 0
    torch: bool = False
    """Whether any process imported PyTorch."""
    errors: tuple[str, ...] = ()
    every_call: bool = False
    """Whether PyTorch's dispatcher counted them, in any process."""
    compiled: bool = False
    """Whether a call was seen that torch.compile compiled, where the dispatcher did not count."""

    @property
    def way(self) -> str:
        """A sentence: which calls were counted, and which were not."""
        if self.every_call:
            return "every call of PyTorch's attention operators was counted, also from C++"
        missed = "those of C++ and torch._C._nn are not"
        if self.compiled:
            missed = "torch.compile compiled attention, whose calls are not; nor are those of C++"
        return f"calls of {NAME} from Python were counted; {missed} (--every-call counts all)"


@dataclass
class Served:
    """The calls of one problem, and notes about them."""

    calls: int = 0
    notes: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Sorted:
    """Recorded calls as problems of a spec, the costliest first, and those that have none."""

    problems: Mapping[Problem, Served]
    unserved: tuple[UnservedCalls, ...]

    @property
    def calls(self) -> int:
        """Calls of the spec's problems; a call and its backward are one."""
        return sum(served.calls for of, served in self.problems.items() if of.op == FORWARD)


def read(folder: Path) -> Recorded:
    """Merge the files that the recorders of all processes left in a folder."""
    calls: Counter[str] = Counter()
    files = sorted(folder.glob(f"*{KINDS}"))
    for path in files:
        counts = memoryview(path.with_suffix(COUNTS).read_bytes()).cast("Q")
        # A process that was killed may leave half a line; its calls were not counted yet.
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        for line, count in zip(lines, counts, strict=False):
            calls[line] += count
        if counts[-1]:
            calls['{"beyond": true}'] += counts[-1]
    errors = {path.read_text(encoding="utf-8").strip() for path in folder.glob(f"*{ERRORS}")}
    kinds = [(json.loads(line), count) for line, count in calls.items() if count]
    torch, every_call, compiled = ((folder / name).exists() for name in _NOTES)
    return Recorded(kinds, len(files), torch, tuple(sorted(errors)), every_call, compiled)


def sort(
    recorded: Recorded, target: Target, families: Mapping[str, Family], top: int = TOP
) -> Sorted:
    """The problems of recorded calls on a card, and the calls that no family can serve.

    top: most problems; calls of the others are among the unserved, with that reason. Calls on the
    CPU are problems only if the program made none on a GPU: it then stands for one that will.
    """
    on_gpu = any(kind.get("device") == "cuda" for kind, _ in recorded.calls)
    found: dict[Problem, Served] = {}
    both: dict[Problem, tuple[Problem, ...]] = {}  # a forward, and its backward
    others: Counter[tuple[str, str]] = Counter()
    for kind, calls in recorded.calls:
        problem = _problem(kind, on_gpu)
        if isinstance(problem, Problem):
            reason = refusal(problem, target, families)
            if reason is None:
                backward = _gradients(kind, problem, target, families)
                for each in (problem, *backward):
                    served = found.setdefault(each, Served())
                    served.calls += calls
                    served.notes.update(dict.fromkeys(_notes(kind, each)))
                both[problem] = (problem, *backward) if backward else both.get(problem, (problem,))
                continue
            others[problem.label, reason] += calls
        else:
            others[_label(kind), problem] += 0 if kind.get("traced") else calls

    def cost_of(forward: Problem) -> float:
        return sum(cost_us(each) * found[each].calls for each in both[forward])

    costly = sorted(both, key=lambda p: (-cost_of(p), p.label))
    for problem in costly[top:]:
        reason = f"left out: not one of the {top} costliest shapes"
        others[problem.label, reason] += found[problem].calls
    chosen = [each for forward in costly[:top] for each in both[forward]]
    return Sorted({problem: found[problem] for problem in chosen}, _unserved(others))


def spec_text(
    found: Sorted, name: str, target: Target, families: Mapping[str, Family], way: str = ""
) -> str:
    """The text of the spec; `attnsweep run` reads it. There must be a problem.

    way: which calls were counted, for a comment.
    """
    request = Request(
        [*found.problems],
        name,
        search={"strategy": DEFAULT_STRATEGY},
        calls={problem: served.calls for problem, served in found.problems.items()},
        notes={problem: ", ".join(served.notes) for problem, served in found.problems.items()},
        unserved=found.unserved,
    )
    head, rest = starter(request, target, families).split("\n", 1)
    return f"{head}\n# {way}\n{rest}" if way else f"{head}\n{rest}"


def lines_of(found: Sorted, recorded: Recorded) -> list[str]:
    """The record in sentences: the totals, then each kind of call without a problem."""
    shapes = counted(len(found.problems), "problem")
    rest = sum(each.calls for each in found.unserved)
    of = f" of {recorded.processes} processes" if recorded.processes > 1 else ""
    all_ = found.calls + rest
    out = [f"{all_:,} attention call{'s' * (all_ != 1)}{of}: {found.calls:,} in {shapes}"]
    if not recorded.calls:
        out = ["no attention call was recorded" + (_UNSEEN * (not recorded.torch))]
    if found.unserved:
        out[0] += f"; {rest:,} have none:"
    for each in found.unserved:
        often = f"{each.calls:,}" if each.calls else "?"
        out.append(f"  {often} × {each.call}: {each.reason}")
    if recorded.torch:
        out.append(recorded.way)
    return out + [f"recording failed in a process: {error}" for error in recorded.errors]


def write(path: Path, recorded: Recorded, target: Target, top: int = TOP) -> Sorted:
    """Write a spec of the recorded calls that can be swept, if there are any; return all by kind.

    Raises StoreError if the file cannot be written.
    """
    families = discover()
    found = sort(recorded, target, families, top)
    if found.problems:
        write_output(path, spec_text(found, run_name_of(path), target, families, recorded.way))
    return found


def refuse(path: Path, force: bool) -> None:
    """Raise, before the program runs, what would keep its spec from being written."""
    refuse_recorded(path)
    if path.is_file() and path.suffix not in (".yaml", ".yml"):  # such as the program's interpreter
        hint = "the spec's name comes first: attnsweep shapes OUT.yaml -- COMMAND"
        raise SpecError("is there, and no .yaml file", where=str(path), hint=hint)
    check_output(path, force=force)


def run_name_of(path: Path) -> str:
    """The name of the spec's run: the file's stem, of the letters that a name may have."""
    return re.sub("[^a-z0-9_-]+", "-", path.stem.lower()).strip("-") or "shapes"


@contextlib.contextmanager
def shapes(
    path: str | Path,
    *,
    arch: str | None = None,
    force: bool = False,
    top: int = TOP,
    every_call: bool = False,
) -> Iterator[None]:
    """Record the attention calls of this process, and write them to `path` as a spec.

    Python's calls of PyTorch's `scaled_dot_product_attention` become problems with the number of
    their calls. arch: architecture of the spec (default: this machine's GPU). force: replace the
    file. top: most problems. every_call: count calls of compiled code and C++ too, which costs
    more. The file is written when the block ends, also by an error. Raises SpecError if the file
    is there, NoGpuError without a GPU and `arch`, RuntimeError if PyTorch is too old.
    """
    from attnsweep.serve.recorder.recorder import Recording

    path = Path(path)
    refuse(path, force)
    target = _target_here() if arch is None else Target(arch_named(arch))
    with tempfile.TemporaryDirectory(prefix="attnsweep-shapes-") as folder:
        recording = Recording(Log(Path(folder)), every_call)
        try:
            yield
        finally:
            recording.stop()
            recorded = read(Path(folder))
            found = write(path, recorded, target, top)
            for line in lines_of(found, recorded):
                print(f"attnsweep: {line}", file=sys.stderr)  # noqa: T201


def _target_here() -> Target:
    """The GPU that PyTorch uses in this process."""
    import torch

    if not torch.cuda.is_available():
        hint = "say for which: attnsweep.shapes(path, arch='sm_90a')"
        raise NoGpuError("PyTorch sees no GPU, so the spec's architecture is unknown", hint=hint)
    facts = torch.cuda.get_device_properties()
    arch = arch_of((facts.major, facts.minor))
    if arch is None:
        raise NoGpuError(f"no family runs on compute capability {facts.major}.{facts.minor}")
    return Target(replace(arch, sm_count=facts.multi_processor_count), facts.name)


# -- a call as a problem --------------------------------------------------------------------


def _problem(kind: Mapping[str, Any], on_gpu: bool) -> Problem | str:
    """The problem of a call, or why it has none."""
    if kind.get("beyond"):
        return "left out: one process made more kinds of calls than the recorder tells apart"
    if kind.get("traced"):
        return "compiled into plain operations; how often they ran is unknown"
    if kind.get("nested"):
        return "nested tensors"
    if "class" in kind:
        return f"tensors of class {kind['class']}; --every-call counts what they compute"
    q, k, v, device, dtype = (kind[name] for name in ("q", "k", "v", "device", "dtype"))
    dtype = _DTYPES.get(dtype, dtype)
    reason = None
    if device != "cuda" and (on_gpu or device != "cpu"):
        reason = f"on device {device}"
    elif not len(q) == len(k) == len(v) == 4:
        reason = f"{len(q)} dimensions; (batch, heads, seqlen, head_dim) is served"
    elif dtype not in DTYPE_BYTES:
        reason = f"dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}"
    elif kind["dropout"]:
        reason = "dropout"
    elif kind.get("mask") and kind["causal"]:
        reason = "a mask beside is_causal"
    elif kind.get("mask") and not {"boolean", "bias"} & kind.keys():
        reason = _MASKS.get(kind["mask"], "an arbitrary mask")
    elif k[0] != q[0] or k[:-1] != v[:-1] or q[3] != k[3]:
        reason = "batch, heads or head_dim that are broadcast"
    elif 0 in (*q, *k, *v):
        reason = "nothing to compute: a size is 0"
    elif q[1] % k[1]:
        reason = f"{q[1]} heads are no multiple of {k[1]}"
    elif kind["causal"] and q[2] != k[2] and kind["op"] != _BOTTOM_RIGHT:
        reason = f"a causal mask that is aligned top-left, with seqlen {q[2]} and {k[2]}"
    elif kind["causal"] and q[2] > k[2]:
        reason = f"causal with seqlen_q {q[2]} > seqlen_k {k[2]}"
    if reason is not None:
        return reason
    try:
        sizes = q[0], q[1], k[1], q[2], k[2], _own_scale(kind)[0]
        of_v = None if v[3] == q[3] else v[3]  # a padded head_dim is also v's
        scores = Scores.of({**kind, "scale": None})  # an argument of every kernel: a note says it
        options: Any = {"scores": scores, "head_dim_v": of_v}
        return Problem(*sizes, dtype, mask_of_facts(kind), **options)
    except ProblemError as error:  # such as more than a card holds, on a host that holds it
        return error.what


def _gradients(
    kind: Mapping[str, Any], problem: Problem, target: Target, families: Mapping[str, Family]
) -> tuple[Problem, ...]:
    """The backward of a call that recorded gradients, if a family computes it."""
    if not kind["grad"] or problem.variant not in ("full", "causal"):
        return ()
    backward = replace(problem, op=BACKWARD)
    return () if refusal(backward, target, families) else (backward,)


def layout_of(shape: Sequence[int], stride: Sequence[int]) -> str:
    """How a (batch, heads, seqlen, head_dim) tensor lies in memory.

    bhsd or bshd if it is whole in that order; `packed` if it is a part of rows of (seqlen, …), as
    a slice of one q, k, v tensor is; otherwise `strided`.
    """
    _, heads, seqlen, head_dim = shape
    row = heads * head_dim

    def lies(*steps: int) -> bool:
        return all(n == 1 or a == b for n, a, b in zip(shape, stride, steps, strict=True))

    if lies(seqlen * row, seqlen * head_dim, head_dim, 1):
        return "bhsd"
    if lies(seqlen * row, head_dim, row, 1):
        return "bshd"
    packed = seqlen > 1 and stride[2] > row and lies(seqlen * stride[2], head_dim, stride[2], 1)
    return "packed" if packed else "strided"


def _own_scale(kind: Mapping[str, Any]) -> tuple[int, bool]:
    """The head_dim of the model, and whether a call has a scale of its own.

    PyTorch's FlashAttention gets a head_dim that is padded to a multiple of 8, and the scale of the
    model's.
    """
    head_dim, scale = kind["q"][-1], kind.get("scale")
    if scale is None:
        return head_dim, False
    own = round(scale**-2) if scale > 0 else 0
    usual = abs(own * scale**2 - 1) < 1e-6
    if usual and kind["op"].endswith("flash_attention") and head_dim - 8 < own < head_dim:
        return own, False
    return head_dim, not usual or own != head_dim


def _notes(kind: Mapping[str, Any], problem: Problem) -> Iterator[str]:
    q, k = map(layout_of, (kind["q"], kind["k"]), kind["strides"])
    yield q if q == k else f"q {q}, k {k}"
    if kind.get("repeats", 1) > 1:
        groups = problem.heads_kv // kind["repeats"]
        yield f"k holds each of {groups} heads {kind['repeats']} times: enable_gqa avoids that"
    if "boolean" in kind:
        yield _BOOLEAN.get(kind["mask"], "its mask was not looked at, and may hide more")
    elif "bias" in kind and kind["mask"] in ("causal", "full"):
        yield _MASKS[kind["mask"]]
    if _own_scale(kind)[1]:
        yield "a scale of its own"
    if kind.get("captured"):
        yield "captured in a CUDA graph once: its replays are not counted"
    if kind["grad"]:
        yield "with gradients"
    if kind["device"] != "cuda":
        yield f"recorded on the {kind['device'].upper()}"


def _label(kind: Mapping[str, Any]) -> str:
    """A call that is no problem, as nearly in the form of a problem's label as it can be."""
    if kind.get("beyond"):
        return "other calls"
    q, k, v = (["?" if size is None else f"{size}" for size in kind[name]] for name in "qkv")
    dtype = _DTYPES.get(kind["dtype"], kind["dtype"])
    if not len(q) == len(k) == 4:
        return f"({','.join(q)}) {dtype}"
    batch, heads, rows, head_dim = (
        a if a == b else f"{a}{sign}{b}" for a, b, sign in zip(q, k, "//x/", strict=True)
    )
    head_dim += "" if v[-1] == k[-1] else f"/{v[-1]}"
    mask = "" if kind.get("mask") or "causal" not in kind else " full"
    return f"({batch},{heads},{rows},{head_dim}) {dtype}{' causal' if kind.get('causal') else mask}"


def _unserved(others: Mapping[tuple[str, str], int]) -> tuple[UnservedCalls, ...]:
    """Each kind of call, the most frequent first; beyond 50, those of one reason together."""
    ordered = sorted(others.items(), key=lambda item: (-item[1], item[0]))
    out = [
        UnservedCalls(call=label, calls=calls, reason=reason)
        for (label, reason), calls in ordered[:_MOST_UNSERVED]
    ]
    rest: dict[str, list[int]] = {}
    for (_, reason), calls in ordered[_MOST_UNSERVED:]:
        rest.setdefault(reason, []).append(calls)
    return (
        *out,
        *(
            UnservedCalls(call=f"{len(calls)} more shapes", calls=sum(calls), reason=reason)
            for reason, calls in rest.items()
        ),
    )


def cost_us(problem: Problem) -> float:
    """About what a call takes, to compare problems."""
    return max(problem.flops / _FLOPS_PER_US, problem.min_bytes / _BYTES_PER_US) + _LAUNCH_US
