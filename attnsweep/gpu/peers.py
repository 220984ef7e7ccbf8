"""Peers timed in the same rounds: PyTorch's attention, unfused, cuDNN, Triton, FlashAttention.

Each peer is called as its users call it, on the same inputs, at its best: where there are several
ways (layouts, packages, tiles), the fastest on this very problem, from graphs with a warm L2, is
taken. A peer that cannot run here gives the reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from attnsweep.build.length import has_shorter, shorter
from attnsweep.files import install_command
from attnsweep.gpu import fp8_peers
from attnsweep.gpu.ahead import Ahead
from attnsweep.gpu.capturing import lasting, uncollected
from attnsweep.gpu.steps import step
from attnsweep.gpu.way import Builder as Builder
from attnsweep.gpu.way import Unavailable as Unavailable
from attnsweep.gpu.way import Way as Way
from attnsweep.gpu.way import why_not as why_not
from attnsweep.problem import DTYPE_BYTES, Problem
from attnsweep.spec.model import OWN_BF16

if TYPE_CHECKING:
    from attnsweep.gpu.device import Session

# The ways to call a peer are compared in graphs of about this length, with at most this many calls.
_SCREEN_US, _SCREEN_CALLS = 1_500.0, 50
# The fastest few are timed again, because the first time is of three replays only.
_FINALISTS = 3


class Baseline:
    """A peer bound to inputs; it is timed exactly as a candidate is."""

    stage_names: tuple[str, ...] = ()

    def __init__(
        self,
        way: Way,
        copies: Sequence[tuple[Any, ...]],
        session: Session,
        *,
        rounds_scores: int,
        dtype: Any = None,
    ) -> None:
        """dtype: the problem's output's (default: q's)."""
        self._torch = _import_torch()
        self._dtype = copies[0][0].dtype if dtype is None else dtype
        self._way, self._copies = way, copies
        self._stream = self._torch.cuda.ExternalStream(session.stream.ptr)
        self._inputs: list[tuple[Any, ...]] = [*copies]
        self.rounds_scores = rounds_scores
        self.refresh()

    def refresh(self, copies: int | None = None) -> None:
        """Convert q, k, v anew, in place; call it when the contents of the first copies change."""
        if self._way.convert is None:
            return
        with self._torch.cuda.stream(self._stream):
            fresh = [self._way.convert(*copy) for copy in self._copies[:copies]]
            if self._inputs[0] is self._copies[0]:
                self._inputs = fresh
            for kept, new in zip(self._inputs, fresh, strict=False):  # graphs hold their addresses
                for into, tensor in zip(kept, new, strict=True):
                    if into is not tensor:
                        into.copy_(tensor)

    def enqueue(self, copy: int = 0, stage: str | None = None) -> None:  # noqa: ARG002
        """Issue one call eagerly; does not wait. A baseline has no stages."""
        with self._torch.cuda.stream(self._stream):
            self._way.forward(*self._inputs[copy % len(self._inputs)])

    def capture(
        self, calls: int, *, rotate: bool = False, stage: str | None = None
    ) -> Callable[[], None]:
        """A function that replays a graph of back-to-back calls; a peer has no stages."""
        if stage is not None:
            raise ValueError(f"a baseline has no stage {stage!r}")
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream), uncollected():
            for call in range(calls):
                self._way.forward(*self._inputs[call % len(self._inputs) if rotate else 0])

        def replay() -> None:
            with self._torch.cuda.stream(self._stream):
                graph.replay()

        return replay

    def output(self, into: Any) -> None:
        """Write the output on copy 0 to a CuPy array of its shape, of int16, or int32 for fp32.

        A peer whose output has another type, as FP8's may have, is converted to the problem's.
        Raises ValueError if it has another shape.
        """
        given = self._inputs[0]
        with self._torch.cuda.stream(self._stream):
            out = self._way.forward(*given)
            if self._way.finish is not None:
                out = self._way.finish(out, *given)
            kept = self._torch.from_dlpack(into).view(self._dtype)
            if tuple(out.shape) != tuple(kept.shape):
                raise ValueError(f"its output has the shape {tuple(out.shape)}")
            kept.copy_(out)  # which converts it
            self._stream.synchronize()


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"PyTorch is not installed: {_TORCH.fix}") from error
    if not torch.cuda.is_available():
        raise Unavailable("this PyTorch sees no CUDA GPU")
    return torch


def prepare(
    name: str, problem: Problem, copies: Sequence[Mapping[str, Any]], session: Session
) -> Baseline:
    """The baseline called `name`, after one run. copies: CuPy arrays of each input, as storage.

    Raises Unavailable with the reason if anything goes wrong inside the peer.
    """
    with step("PyTorch"):
        torch = _import_torch()
    if problem.dtype == "fp32" and name not in _FP32:
        raise Unavailable(f"no {name} baseline for {problem.dtype}")
    if (name not in _FP8) if problem.scaled else (name == OWN_BF16):
        raise Unavailable(f"{name} is no baseline for {problem.dtype}: {_NOT_FP8[problem.scaled]}")
    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    own, out = (
        getattr(torch, names.get(dtype, "float8_e4m3fn"))
        for dtype in (problem.dtype, problem.out_dtype)
    )
    # Types that DLPack knows on both sides.
    bits = {1: "uint8", 2: "int16", 4: "int32"}[DTYPE_BYTES[problem.dtype]]
    tensors = [
        (
            *(torch.from_dlpack(copy[t].view(bits)).view(own) for t in "qkv"),
            *(torch.from_dlpack(copy[t]) for t in problem.inputs[3:]),
        )
        for copy in copies
    ]
    torch.set_float32_matmul_precision("highest")  # fp32 baselines must not use TF32
    made: list[Baseline] = []
    failed: list[Unavailable] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with step("set up"):
                ways = WAYS[name](torch, problem, session)
        except Unavailable:
            raise
        except Exception as error:
            raise Unavailable(why_not(name, error, [])) from error
        if has_shorter(problem) and len(ways) > 1 and not problem.scaled:
            ways = _best_on_shorter(name, torch, problem, ways, own, session)
        for way in ways:
            if way.spare and made:
                continue
            try:
                how = {"rounds_scores": rounds_scores_of(name), "dtype": out}
                with step("first calls"):
                    baseline = Baseline(way, tensors, session, **how)
                    baseline.enqueue()
                    session.synchronize()
                made.append(baseline)
            except Exception as error:  # a peer may raise anything; the reason becomes a row
                said = [str(warning.message) for warning in caught]
                reason = str(error) if isinstance(error, Unavailable) else ""
                failed.append(Unavailable(reason or why_not(name, error, said)))
    if not made:
        raise failed[0]
    if len(made) == 1:
        return made[0]
    with step(f"choose of {len(made)} ways"):
        return _fastest(made, session)


def _best_on_shorter(
    name: str, torch: Any, problem: Problem, ways: list[Way], dtype: Any, session: Session
) -> list[Way]:
    """The fastest way on a shorter problem, and spare ones; or all ways: Triton alone has 30."""
    short = shorter(problem)
    tensors = tuple(torch.randn(short.shape_of(t), device="cuda").to(dtype) for t in "qkv")
    alike = WAYS[name](torch, short, session)
    made: dict[int, Baseline] = {}
    for number, way in enumerate(alike if len(alike) == len(ways) else ()):
        with contextlib.suppress(Exception):  # the problem itself tells why
            if not way.spare:
                made[number] = Baseline(way, [tensors], session, rounds_scores=0)
                made[number].enqueue()
                session.synchronize()
    try:
        best = _fastest([*made.values()], session)
    except Unavailable:
        return ways
    first = next(number for number, baseline in made.items() if baseline is best)
    return [ways[first], *(way for way in ways if way.spare)]


def _fastest(baselines: Sequence[Baseline], session: Session) -> Baseline:
    """The fastest of several ways to call one peer. Raises Unavailable if none can be captured."""
    times: dict[int, float] = {}
    reason: Exception = Unavailable("no way to call it was timed")
    for number, baseline in enumerate(baselines):
        try:
            times[number] = _screen_us(baseline, session, replays=3)
        except Exception as error:  # as above: one that cannot be captured is no way
            reason = error
    if not times:
        raise Unavailable(f"cannot be captured: {why_not('', reason, [])}") from reason
    finalists = sorted(times, key=lambda number: times[number])[:_FINALISTS]
    again = {n: _screen_us(baselines[n], session, replays=12) for n in finalists}
    return baselines[min(again, key=lambda number: again[number])]


def _screen_us(baseline: Baseline, session: Session, *, replays: int) -> float:
    """Microseconds of a call from a graph, with a warm L2: the least of some replays."""

    def time_us(replay: Callable[[], None]) -> float:
        replay()
        return session.time_us(replay)

    with session.stream:
        baseline.enqueue()
        once = session.time_us(baseline.enqueue)
        replay, calls, _ = lasting(baseline.capture, time_us, once, _SCREEN_US, _SCREEN_CALLS)
        return min(session.time_us(replay) for _ in range(replays)) / calls


# Peers that take fp32, that take FP8, and that store scores before and after scaling them.
_FP32 = ("torch_efficient", "torch_math", "unfused")
_FP8 = ("flash_attn_3_fp8", "cudnn", OWN_BF16)
_NOT_FP8 = {True: "it takes no FP8 inputs", False: "it stands beside FP8 alone"}
_STORES_SCORES = ("torch_math", "unfused")


def rounds_scores_of(name: str) -> int:
    """How often a baseline rounds its scores: one that stores them, before and after scaling."""
    return 2 if name in _STORES_SCORES else 0


def _sdpa(backend: str) -> Builder:
    def build(torch: Any, problem: Problem, session: Session) -> list[Way]:
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

        return [Way(forward)]

    return build


def _unfused(torch: Any, problem: Problem, session: Session) -> list[Way]:
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

    return [Way(forward)]


def _triton(torch: Any, problem: Problem, session: Session) -> list[Way]:
    try:
        from attnsweep.gpu import triton_flash
    except ImportError as error:
        raise Unavailable(f"Triton is not installed: {PACKAGES['triton_flash'].fix}") from error

    def way(config: Any) -> Way:
        def forward(q: Any, k: Any, v: Any) -> Any:
            out = torch.empty_like(q)
            causal = problem.causal
            return triton_flash.forward(q, k, v, out, problem.scale, causal=causal, config=config)

        return Way(forward)

    with step("wait for Triton's process"):
        _ahead.wait(problem)
    with step("take up Triton's code"):
        _compile_triton(torch, problem)
    return [way(config) for config in triton_flash.CONFIGS]


def _compile_triton(torch: Any, problem: Problem) -> None:
    from attnsweep.gpu import triton_flash

    dtype = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[problem.dtype])
    shapes = problem.shape_of("q"), problem.shape_of("k")
    triton_flash.compile_all(dtype, *shapes, causal=problem.causal)


def compile_triton(problem: Problem) -> None:
    """Compile all configs of `triton_flash` for a problem, or read them from Triton's cache."""
    _compile_triton(_import_torch(), problem)


_ahead = Ahead()


def compile_ahead(names: Collection[str], problem: Problem) -> None:
    """Begin to compile what these peers will need; `prepare` waits for it."""
    if "triton_flash" in names and problem.dtype in ("fp16", "bf16") and importable("triton"):
        _ahead.begin(problem)


def compiled_ahead(problem: Problem) -> bool:
    """Whether `prepare` would not have to wait for what `compile_ahead` has begun."""
    return _ahead.done(problem)


def _cudnn(torch: Any, problem: Problem, session: Session) -> list[Way]:
    from attnsweep.gpu import cudnn_graph

    try:
        cudnn = importlib.import_module("cudnn")
    except ImportError as error:
        raise Unavailable(f"cuDNN's frontend is not installed: {PACKAGES['cudnn'].fix}") from error
    ours, theirs = cudnn.backend_version(), torch.backends.cudnn.version()
    if ours != theirs:
        raise Unavailable(f"its frontend loads cuDNN {ours}, but PyTorch has {theirs}")
    if problem.scaled:
        return fp8_peers.cudnn(torch, cudnn, problem, session.stream.ptr)
    ways, failed = [], []
    for layout in cudnn_graph.LAYOUTS:
        try:
            ways.append(Way(*cudnn_graph.build(torch, cudnn, problem, session.stream.ptr, layout)))
        except Exception as error:  # cuDNN says here that no engine does this problem
            failed.append(error)
    if not ways:
        raise failed[0]
    return ways


def _flash_attention(name: str, *modules: str) -> Builder:
    """FlashAttention's own packages: (batch, seqlen, heads, head_dim), causal bottom-right.

    modules: where different builds of the package keep the function; the first that is installed
    and does the problem's dtype is used. Two of them in one process may clash, so that the next is
    loaded only if the one before fails.
    """

    def build(torch: Any, problem: Problem, session: Session) -> list[Way]:
        there = [module for module in modules if importable(module)]
        if not there:
            raise Unavailable(f"{name} is not installed: {PACKAGES[name].fix}")
        able = [m for m in there if problem.dtype != "fp16" or m not in _NO_FP16]
        if name == "flash_attn_3_fp8":
            calls = [(_attention_of(m), m != there[0]) for m in there]
            return [fp8_peers.flash_3(torch, call, problem, spare=spare) for call, spare in calls]
        if not able:
            raise Unavailable(f"{_NO_FP16[there[0]]} does not do fp16: {_FP16_FIX}")
        ways = [_in_own(module, problem, spare=module != able[0]) for module in able]
        if name == "flash_attn_3" and problem.seqlen_q < problem.seqlen_k:
            # Few queries: 0 lets it choose how many splits of the keys fill the SMs.
            ways.insert(1, _in_own(able[0], problem, num_splits=0))
        return ways

    return build


def importable(module: str) -> bool:
    """Whether a module is there, without loading it (but its parent, of a dotted name)."""
    with contextlib.suppress(ImportError, ValueError):
        return module in sys.modules or importlib.util.find_spec(module) is not None
    return False


def _attention_of(module: str) -> Callable[[], Any]:
    return functools.cache(lambda: loaded(module).flash_attn_func)


def loaded(module: str) -> Any:
    """A peer's package. FlashAttention-3 then calls its forward as the function that it is.

    It declares that as an operator, whose first call imports torch._dynamo and with it 890 modules:
    5 to 8 s on H100 hosts. Either way the same kernels are launched.
    """
    package = importlib.import_module(module)
    if module in FLASH_3 and (plain := getattr(getattr(package, FORWARD_3, 0), "_init_fn", None)):
        setattr(package, FORWARD_3, plain)
    return package


def _in_own(module: str, problem: Problem, *, spare: bool = False, **how: int) -> Way:
    attention = _attention_of(module)

    def forward(q: Any, k: Any, v: Any) -> Any:
        given = (x.transpose(1, 2) for x in (q, k, v))
        out = attention()(*given, causal=problem.causal, **how)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Way(forward, spare=spare)


FLASH_3 = ("flash_attn_interface", "fa3_fwd_interface")
"""Where builds of FlashAttention-3 keep its function."""
FORWARD_3 = "_flash_attn_forward"

_NO_FP16 = {"fa3_fwd_interface": "fa3-fwd"}
_FP16_FIX = "pip install tokenspeed-fa3, or build FlashAttention's hopper/ directory"

WAYS: dict[str, Builder] = {
    "torch_flash": _sdpa("FLASH_ATTENTION"),
    "torch_cudnn": _sdpa("CUDNN_ATTENTION"),
    "torch_efficient": _sdpa("EFFICIENT_ATTENTION"),
    "torch_math": _sdpa("MATH"),
    "unfused": _unfused,
    "cudnn": _cudnn,
    "triton_flash": _triton,
    "flash_attn_2": _flash_attention("flash_attn_2", "flash_attn"),
    "flash_attn_3": _flash_attention("flash_attn_3", *FLASH_3),
    "flash_attn_3_fp8": _flash_attention("flash_attn_3_fp8", *FLASH_3),
    "flash_attn_4": _flash_attention("flash_attn_4", "flash_attn.cute"),
    OWN_BF16: fp8_peers.own_bf16,
}


# -- how to get each ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Package:
    """The distributions of which one brings a peer, and how to get it."""

    names: tuple[str, ...]
    fix: str

    def installed(self) -> list[str]:
        """`name version` of each that is installed."""
        found = []
        for name in self.names:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found.append(f"{name} {metadata.version(name)}")
        return found


_TORCH = Package(("torch",), install_command("torch"))
_FLASH_ATTN_3 = Package(
    ("flash-attn-3", "tokenspeed-fa3", "fa3-fwd"),
    "pip install tokenspeed-fa3 (fp16, bf16, FP8) or fa3-fwd (bf16, FP8), or build "
    "FlashAttention's hopper/ directory",
)
PACKAGES: dict[str, Package] = {
    **dict.fromkeys(("torch_flash", "torch_cudnn", "torch_efficient", "torch_math"), _TORCH),
    "unfused": _TORCH,
    "cudnn": Package(("nvidia-cudnn-frontend",), "pip install nvidia-cudnn-frontend"),
    "triton_flash": Package(
        ("triton", "pytorch-triton"), f"{install_command('torch')} (on Linux it brings Triton)"
    ),
    "flash_attn_2": Package(("flash-attn",), "pip install flash-attn"),
    "flash_attn_3": _FLASH_ATTN_3,
    "flash_attn_3_fp8": _FLASH_ATTN_3,
    "flash_attn_4": Package(("flash-attn-4",), "pip install flash-attn-4"),
    OWN_BF16: _TORCH,
}
"""By baseline: all of `KNOWN_BASELINES`."""
