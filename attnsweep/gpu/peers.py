"""Peers timed in the same rounds: PyTorch's attention, unfused, Triton, FlashAttention.

Each peer is called as its users call it, on the same inputs. A peer that cannot run here gives the
reason.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnsweep.problem import DTYPE_BYTES, Problem

if TYPE_CHECKING:
    from attnsweep.gpu.device import Session

Forward = Callable[[Any, Any, Any], Any]


class Unavailable(Exception):
    """A baseline that cannot run this problem here; the message is the reason."""


class Baseline:
    """A peer bound to inputs; it is timed exactly as a candidate is."""

    stage_names: tuple[str, ...] = ()

    def __init__(
        self,
        forward: Forward,
        copies: Sequence[tuple[Any, Any, Any]],
        session: Session,
        *,
        rounds_scores: int,
    ) -> None:
        self._torch = _import_torch()
        self._forward, self._copies = forward, copies
        self._stream = self._torch.cuda.ExternalStream(session.stream.ptr)
        self.rounds_scores = rounds_scores

    def enqueue(self, copy: int = 0, stage: str | None = None) -> None:  # noqa: ARG002
        """Issue one call eagerly; does not wait. A baseline has no stages."""
        with self._torch.cuda.stream(self._stream):
            self._forward(*self._copies[copy % len(self._copies)])

    def capture(
        self, calls: int, *, rotate: bool = False, stage: str | None = None
    ) -> Callable[[], None]:
        """A function that replays a graph of back-to-back calls; a peer has no stages."""
        if stage is not None:
            raise ValueError(f"a baseline has no stage {stage!r}")
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            for call in range(calls):
                self._forward(*self._copies[call % len(self._copies) if rotate else 0])

        def replay() -> None:
            with self._torch.cuda.stream(self._stream):
                graph.replay()

        return replay

    def output(self) -> Any:
        """The output on copy 0: its storage as a NumPy array of uint16, or uint32 for fp32."""
        with self._torch.cuda.stream(self._stream):
            out = self._forward(*self._copies[0]).contiguous()
            self._stream.synchronize()
        bits = self._torch.int32 if out.element_size() == 4 else self._torch.int16
        numbers = out.view(bits).cpu().numpy()
        return numbers.view(numbers.dtype.str.replace("i", "u"))


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Unavailable("PyTorch is not installed: pip install 'attnsweep[torch]'") from error
    if not torch.cuda.is_available():
        raise Unavailable("this PyTorch sees no CUDA GPU")
    return torch


def prepare(
    name: str, problem: Problem, copies: Sequence[Mapping[str, Any]], session: Session
) -> Baseline:
    """The baseline called `name`, after one run. copies: CuPy arrays q, k, v of each, as storage.

    Raises Unavailable with the reason if anything goes wrong inside the peer.
    """
    torch = _import_torch()
    if problem.dtype == "fp32" and name not in _FP32:
        raise Unavailable(f"no {name} baseline for {problem.dtype}")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[problem.dtype]
    bits = "int32" if problem.dtype == "fp32" else "int16"  # types that DLPack knows on both sides
    tensors = [
        tuple(torch.from_dlpack(copy[t].view(bits)).view(dtype) for t in "qkv") for copy in copies
    ]
    torch.set_float32_matmul_precision("highest")  # fp32 baselines must not use TF32
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            forward = FORWARDS[name](torch, problem, session)
            baseline = Baseline(
                forward, tensors, session, rounds_scores=2 if name in _STORES_SCORES else 0
            )
            baseline.enqueue()
            session.synchronize()
        except Unavailable:
            raise
        except Exception as error:  # a peer may raise anything; the reason becomes a row
            raise Unavailable(why_not(name, error, [str(w.message) for w in caught])) from error
    return baseline


# Peers that take fp32, and peers that store scores before and after scaling them.
_FP32 = ("torch_efficient", "torch_math", "unfused")
_STORES_SCORES = ("torch_math", "unfused")

# By baseline, the first words of PyTorch's `… kernel not used because:`.
_TORCH_NAMES = {
    "torch_flash": "flash attention",
    "torch_cudnn": "cudnn attention",
    "torch_efficient": "memory efficient",
}


def why_not(name: str, error: Exception, warned: Sequence[str]) -> str:
    """PyTorch's warnings about this backend, or the first line of the error.

    PyTorch warns about every backend in turn, whichever was asked for. Before the lines with the
    reasons there is a line such as `Flash attention kernel not used because:`.
    """
    reasons: dict[str, None] = {}
    ours = False
    for line in (part for text in warned for part in text.split(" (Triggered")[0].splitlines()):
        head, found, rest = line.partition("not used because:")
        if found:
            label = _TORCH_NAMES.get(name)
            ours = label is not None and head.strip().lower().startswith(label)
        said = (rest if found else line).strip().rstrip(".")
        if ours and said:
            reasons[said] = None
    first = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ("; ".join(reasons) or (first or [type(error).__name__])[0])[:400]


def _sdpa(backend: str) -> Callable[[Any, Problem, Session], Forward]:
    def build(torch: Any, problem: Problem, session: Session) -> Forward:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)
        attention = torch.nn.functional.scaled_dot_product_attention
        options: dict[str, Any] = {"is_causal": problem.causal}
        if problem.heads != problem.heads_kv:
            options["enable_gqa"] = True
        if problem.causal and problem.seqlen_q != problem.seqlen_k:
            if backend == "CUDNN_ATTENTION":
                raise Unavailable("PyTorch reaches cuDNN only with a causal mask aligned top-left")
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(problem.seqlen_q, problem.seqlen_k)
            options |= {"is_causal": False, "attn_mask": mask}

        def forward(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel([chosen]):
                return attention(q, k, v, **options)

        return forward

    return build


def _unfused(torch: Any, problem: Problem, session: Session) -> Forward:
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    item = DTYPE_BYTES[problem.dtype]
    if scores * item * 4 > session.free_bytes:
        raise Unavailable(f"its scores need four times {scores * item / 2**30:.0f} GiB")
    mask = None
    if problem.causal:
        rows = torch.arange(problem.seqlen_q, device="cuda")[:, None]
        keys = torch.arange(problem.seqlen_k, device="cuda")
        mask = keys > rows + problem.seqlen_k - problem.seqlen_q
    group = problem.heads // problem.heads_kv

    def forward(q: Any, k: Any, v: Any) -> Any:
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) * problem.scale
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1), v)

    return forward


def _triton(torch: Any, problem: Problem, session: Session) -> Forward:
    try:
        from attnsweep.gpu import triton_flash
    except ImportError as error:
        raise Unavailable("Triton is not installed; PyTorch's wheels for Linux bring it") from error

    def forward(q: Any, k: Any, v: Any) -> Any:
        out = torch.empty_like(q)
        return triton_flash.forward(q, k, v, out, problem.scale, causal=problem.causal)

    return forward


def _flash_attention(package: str, *modules: str) -> Callable[[Any, Problem, Session], Forward]:
    """FlashAttention's own packages: (batch, seqlen, heads, head_dim), causal bottom-right.

    modules: where different builds of the package keep the function; the first installed one is
    used.
    """

    def build(torch: Any, problem: Problem, session: Session) -> Forward:
        for module in modules:
            with contextlib.suppress(ImportError):
                attention = importlib.import_module(module).flash_attn_func
                break
        else:
            raise Unavailable(f"{package} is not installed")

        def forward(q: Any, k: Any, v: Any) -> Any:
            out = attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=problem.causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return forward

    return build


FORWARDS: dict[str, Callable[[Any, Problem, Session], Forward]] = {
    "torch_flash": _sdpa("FLASH_ATTENTION"),
    "torch_cudnn": _sdpa("CUDNN_ATTENTION"),
    "torch_efficient": _sdpa("EFFICIENT_ATTENTION"),
    "torch_math": _sdpa("MATH"),
    "unfused": _unfused,
    "triton_flash": _triton,
    "flash_attn_2": _flash_attention("flash-attn (FlashAttention-2)", "flash_attn"),
    "flash_attn_3": _flash_attention(
        "FlashAttention-3", "flash_attn_interface", "fa3_fwd_interface"
    ),
    "flash_attn_4": _flash_attention("flash-attn-4", "flash_attn.cute"),
}
