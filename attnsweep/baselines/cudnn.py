"""The baseline `cudnn`: attention as a graph of cuDNN's own frontend (nvidia-cudnn-frontend).

The plan is built once, and its workspace allocated, before any call; a call only executes it, so
that it can be captured. Its FP8 takes the same bytes and scales as our kernels.
`cudnn_deterministic` is its backward by the algorithm that gives the same bits in each call.

A padded problem's lengths are its sequence lengths of keys, beside all queries, and packed
sequences are ragged tensors. A query without a key has output 0 here as everywhere, and cuDNN is
judged by that: whether its versions write it is not known beforehand.
"""

from __future__ import annotations

import importlib
import importlib.util
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Builder, NotInstalled, Unavailable, Way
from attnsweep.baselines.torch_sdpa import packed_inputs, rows_of_heads
from attnsweep.core.layouts import Padded
from attnsweep.core.problem import Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

LAYOUTS = ("bhsd", "bshd")
"""Order of batch, heads, sequence and head_dim in memory: ours, and the one of most models."""
_Q, _K, _V, _O = 1, 2, 3, 4
# In a backward: the log-sum-exp, dO, and the gradients by their names.
_STATS, _DO = 13, 14
_GRADIENTS = {"dq": 15, "dk": 16, "dv": 17}
_LENGTHS = {"seq_len_q": 18, "seq_len_kv": 19}
_OFFSETS = dict(zip("qkvo", range(20, 24), strict=True))


def cannot(problem: Problem) -> str | None:
    """Why cuDNN's graphs cannot compute a problem; None if they can."""
    if not isinstance(problem.layout, Padded):
        return None
    if problem.layout.side == "left":
        return "has no padding on the left: its lengths count from the first key"
    if problem.mask.kind != "full" and _aligned_last(problem):
        return "aligns a mask to the last key of each item, not of the whole"
    return None


def strides(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Strides of a tensor of shape (batch, heads, seqlen, head_dim) that lies in a layout."""
    _, heads, seqlen, head_dim = shape
    batch = heads * seqlen * head_dim
    if layout == "bhsd":
        return (batch, seqlen * head_dim, head_dim, 1)
    return (batch, head_dim, heads * head_dim, 1)


def build(torch: Any, cudnn: Any, problem: Problem, stream: int, layout: str) -> Way:
    """A call of a forward problem of 16 bits on `stream`, its address.

    Packed sequences are ragged tensors of a batch of them: (tokens, heads, head_dim), and bshd.
    Raises what cuDNN raises if none of its engines does the problem.
    """
    made = _Graph(torch, cudnn, problem, stream, layout)
    out, _ = made.graph.sdpa(
        **made.options(),
        generate_stats=False,
        diagonal_band_right_bound=problem.mask.interval.right,
        **_left_bound(problem),
    )
    made.write(out, problem.outputs[0], _O, made.io)
    made.plan()
    shape, own, execute = made.shape, made.strides, made.execute
    convert = None if layout == "bhsd" else rows_of_heads
    if packed := problem.layout.kind == "packed":
        _, heads, tokens, columns = shape
        shape, convert = (tokens, heads, columns), packed_inputs

    def forward(q: Any, k: Any, v: Any) -> Any:
        how = {"dtype": q.dtype, "device": q.device}
        out = torch.empty(shape, **how) if packed else torch.empty_strided(shape, own, **how)
        execute({_Q: q, _K: k, _V: v, _O: out})
        return out.transpose(0, 1)[None] if packed else out

    weakref.finalize(forward, cudnn.destroy_handle, made.handle)
    return Way(forward, convert)


def build_backward(
    torch: Any, cudnn: Any, problem: Problem, stream: int, layout: str, *, deterministic: bool
) -> Way:
    """A call of a backward problem: dq, dk and dv from q, k, v, o, lse and do.

    All that they take is in the call. Raises what cuDNN raises if none of its engines does the
    problem.
    """
    made = _Graph(torch, cudnn, problem, stream, layout)
    batch, heads, rows = problem.shape_of("lse")
    outs = made.graph.sdpa_backward(
        **made.options(),
        o=made.tensor("o", _O),
        dO=made.tensor("do", _DO),
        stats=made.graph.tensor(
            name="stats",
            dim=[batch, heads, rows, 1],
            stride=[heads * rows, rows, 1, 1],
            data_type=cudnn.data_type.FLOAT,
            uid=_STATS,
        ),
        diagonal_band_right_bound=problem.mask.interval.right,
        **_left_bound(problem),
        use_deterministic_algorithm=deterministic,
    )
    for out, (name, uid) in zip(outs, _GRADIENTS.items(), strict=True):
        made.write(out, name, uid, made.io)
    made.plan()
    shapes = [problem.shape_of(name) for name in _GRADIENTS]
    own, execute = [(shape, strides(shape, layout)) for shape in shapes], made.execute

    def backward(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> Any:
        grads = tuple(torch.empty_strided(*of, dtype=q.dtype, device=q.device) for of in own)
        given = {_Q: q, _K: k, _V: v, _O: o, _STATS: lse.unsqueeze(-1), _DO: do}
        execute(given | dict(zip(_GRADIENTS.values(), grads, strict=True)))
        return grads

    weakref.finalize(backward, cudnn.destroy_handle, made.handle)
    return Way(backward, None if layout == "bhsd" else rows_of_heads)


def _left_bound(problem: Problem) -> dict[str, int]:
    """cuDNN's option of a window, which counts the key on the diagonal too."""
    left = problem.mask.interval.left
    return {} if left is None else {"diagonal_band_left_bound": left + 1}


def _aligned_last(problem: Problem) -> bool:
    """Whether the last query sees the last key, which is not the query's own by its number."""
    if problem.layout.kind == "packed":
        same = all(q[1] - q[0] == k[1] - k[0] for q, k in problem.sequence_ranges)
    else:
        same = problem.seqlen_q == problem.seqlen_k
    return not (same or problem.mask.interval.top_left)


class _Graph:
    """A graph with the inputs q, k and v, and how it is planned and executed."""

    def __init__(self, torch: Any, cudnn: Any, problem: Problem, stream: int, layout: str) -> None:
        self._torch, self._cudnn, self._problem, self._layout = torch, cudnn, problem, layout
        kind = {"fp16": "HALF", "bf16": "BFLOAT16"}.get(problem.dtype, "FP8_E4M3")
        self.io = io = getattr(cudnn.data_type, kind)
        self.shape = problem.shape_of(problem.outputs[0])
        self.strides = strides(self.shape, layout)
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=stream)
        fp32 = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            handle=self.handle, io_data_type=io, intermediate_data_type=fp32, compute_data_type=fp32
        )
        self._own: dict[int, Any] = {}  # tensors of every call, by their uid
        # Where packed sequences begin in each tensor, and where the last one ends: in tokens.
        self._begins: dict[str, list[int]] = {}
        if problem.layout.kind == "packed":
            of_q, of_k = (
                [0, *(e for _, e in each)] for each in zip(*problem.sequence_ranges, strict=True)
            )
            self._begins = dict(zip("qkvo", (of_q, of_k, of_k, of_q), strict=True))

    def _integers(self, name: str, uid: int, numbers: list[int]) -> Any:
        """An input of whole numbers, one of each item."""
        torch, kinds, wide = self._torch, self._cudnn.data_type, max(numbers) >= 2**31
        dtype = torch.int64 if wide else torch.int32
        self._own[uid] = torch.tensor(numbers, dtype=dtype, device="cuda").reshape(-1, 1, 1, 1)
        return self.graph.tensor(
            name=name,
            dim=[len(numbers), 1, 1, 1],
            stride=[1, 1, 1, 1],
            data_type=kinds.INT64 if wide else kinds.INT32,
            uid=uid,
        )

    def _lengths(self) -> dict[str, Any]:
        """Arguments that say how many queries and keys each item has."""
        problem = self._problem
        if problem.layout.kind == "dense":
            return {}
        if self._begins:
            ranges = [pairwise(self._begins[name]) for name in "qk"]
            lengths = [[end - first for first, end in each] for each in ranges]
        else:
            lengths = [[problem.seqlen_q] * problem.batch, [end for _, end in problem.key_ranges]]
        said = zip(_LENGTHS.items(), lengths, strict=True)
        return {"use_padding_mask": True} | {
            name: self._integers(name, uid, numbers) for (name, uid), numbers in said
        }

    def options(self) -> dict[str, Any]:
        """Arguments of sdpa, of sdpa_fp8 and of sdpa_backward."""
        problem, alignment = self._problem, self._cudnn.diagonal_alignment
        last = _aligned_last(problem)
        return {
            "name": "sdpa",
            **{name: self.tensor(name, uid) for name, uid in zip("qkv", (_Q, _K, _V), strict=True)},
            "attn_scale": problem.scale,
            "diagonal_alignment": alignment.BOTTOM_RIGHT if last else alignment.TOP_LEFT,
            "compute_data_type": self._cudnn.data_type.FLOAT,
            **self._lengths(),
        }

    def _shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape: of packed sequences a batch, each as long as the longest."""
        shape = self._problem.shape_of(name)
        if not self._begins:
            return shape
        longest = max(end - first for first, end in pairwise(self._begins[name]))
        return (len(self._begins[name]) - 1, shape[1], longest, shape[3])

    def _ragged(self, tensor: Any, name: str) -> Any:
        """The tensor, with where each packed sequence begins in it, in elements."""
        if self._begins:
            _, heads, _, columns = self._problem.shape_of(name)
            elements = [begin * heads * columns for begin in self._begins[name]]
            tensor.set_ragged_offset(self._integers(f"of_{name}", _OFFSETS[name], elements))
        return tensor

    def tensor(self, name: str, uid: int) -> Any:
        """A tensor of the problem as an input, in the layout."""
        shape = self._shape(name)
        made = self.graph.tensor(
            name=name,
            dim=list(shape),
            stride=list(strides(shape, self._layout)),
            data_type=self.io,
            uid=uid,
        )
        return self._ragged(made, name)

    def write(self, out: Any, name: str, uid: int, kind: Any) -> None:
        """Let `out` be a tensor of the problem, in the layout and in this type."""
        shape = self._shape(name)
        out.set_uid(uid).set_output(True).set_dim(list(shape))
        out.set_stride(list(strides(shape, self._layout))).set_data_type(kind)
        self._ragged(out, name)

    def plan(self) -> None:
        """Choose a plan for the graph."""
        graph, modes = self.graph, self._cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = max(1, graph.get_workspace_size())
        self._workspace = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")

    def execute(self, buffers: dict[int, Any]) -> None:
        """Enqueue one call on the stream. buffers: tensors by their uid."""
        self.graph.execute(buffers | self._own, self._workspace, handle=self.handle)


def frontend(torch: Any) -> Any:
    """Import cuDNN's Python frontend. Raises Unavailable."""
    try:
        cudnn = importlib.import_module("cudnn")
    except ImportError as error:
        raise NotInstalled("cuDNN's frontend is not installed") from error
    ours, theirs = cudnn.backend_version(), torch.backends.cudnn.version()
    if ours != theirs:
        raise Unavailable(f"its frontend loads cuDNN {ours}, but PyTorch has {theirs}")
    return cudnn


def gradients(*, deterministic: bool = False) -> Builder:
    """Builder of calls of cuDNN's backward; deterministic: with the same bits in each call."""
    return partial(forward, build=partial(build_backward, deterministic=deterministic))


def forward(
    torch: Any, problem: Problem, session: CudaSession, build: Callable[..., Way] = build
) -> list[Way]:
    """cuDNN's attention. build: makes a call in a layout."""
    cudnn, ways, failed = frontend(torch), [], []
    for layout in LAYOUTS if problem.layout.kind != "packed" else ("bshd",):
        try:
            ways.append(build(torch, cudnn, problem, session.stream.ptr, layout))
        except Exception as error:  # cuDNN says here that no engine does this problem
            failed.append(error)
    if not ways:
        raise failed[0]
    return ways
