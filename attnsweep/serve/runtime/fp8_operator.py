"""Attention of FP8 tensors by a package's kernels. What no kernel serves is an error.

PyTorch has no attention of FP8 tensors that could stand in for a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnsweep.core.errors import ProblemError
from attnsweep.core.problem import SCALE_BLOCK, Problem

from . import families
from .call import NAMES, Call, Scales
from .dispatch import Explanation
from .driver import DriverError, StridedTensor
from .fp8_dispatch import choose_fp8
from .launcher import Launcher
from .planner import Planner
from .serving_plan import ServingPlan
from .table import GpuKey, PackageError, TunedFp8Gpu
from .torch_ops import define

_MOST_SCALE = 1e38  # of the scores: a kernel gets it as a 32-bit number, times the logarithm of e
# The least and the largest number above 0 of 32 bits.
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-149, (2 - 2.0**-23) * 2.0**127
_NAMES = ("query", "key", "value")
_SCALES = ("q_scale", "k_scale", "v_scale")


@dataclass(slots=True, eq=False, kw_only=True)
class Fp8Plan(ServingPlan):
    """The plan of a call in FP8, with its problem. What cannot be launched raises PackageError."""

    launcher: Launcher
    problem: Problem

    def run(self, call: Call) -> tuple[torch.Tensor]:
        """The output, bfloat16 and contiguous."""
        launcher, index = self.launcher, self.index
        if index >= 0 and index != launcher.current_device():
            with torch.cuda.device(index):
                return self.run(call)
        query, key, value, *_ = call
        _check_alignment((query, key, value))
        scales = _spread(call.extra, self.problem)
        out = query.new_empty(query.shape, dtype=torch.bfloat16)
        addresses = tuple(each.data_ptr() for each in (query, key, value, out, *scales))
        try:
            launches: Any = self.launches or launcher.bound(self)
            launches.issue(addresses, launcher.stream(index))
        except DriverError as error:
            raise PackageError(f"{self.problem.label}: {error}") from error
        return (out,)


class Fp8Operator:
    """The operator `forward_fp8` of a package, if its table has FP8 kernels, and what calls it.

    operator: whose library, planner and launcher these are.
    """

    def __init__(self, operator: Any) -> None:
        self._table, self._launcher = operator.table, operator.launcher
        self._planner: Planner = operator.planner
        self._planner.kinds[Scales] = self._planned
        self._calls = 0
        self.gpus: dict[int, TunedFp8Gpu | None] = {}
        self._forward: Any = None
        if self._table.fp8:
            # Also where nothing is served, so that it is said why.
            every = sorted({*operator.device_types, "cpu"})
            made = (operator.library, every, "forward_fp8", self._impl, self._fake)
            self._forward = define(*made)

    # ---- one call ----
    def attention(self, *given: Any, **options: Any) -> torch.Tensor:
        """softmax(Q Kᵀ · scale) V of what the bytes and scales stand for; bfloat16, contiguous.

        See package.attention_fp8. Raises TypeError, ValueError or PackageError.
        """
        call = self._call(*given, **options)
        out: torch.Tensor = self._forward(*call[:3], *call.extra, call.is_causal, call.scale)
        return out

    def explain(self, *given: Any, **options: Any) -> Explanation:
        """Which kernel `attention` would call, and why; raises what it would raise."""
        call = self._call(*given, **options)
        plan = self._plan(call)
        _check_alignment(call[:3])
        choice, gpu = plan.choice, self._known(plan.index)
        config = choice.kernel.config if choice.kernel is not None else None
        return Explanation(config, choice.code, choice.reason, 0.0, gpu.key.label)

    def counters(self) -> dict[str, int]:
        """Calls so far: `kernel_fp8`, absent before the first one."""
        return {"kernel_fp8": self._calls} if self._calls else {}

    def _call(
        self,
        query: Any,
        key: Any,
        value: Any,
        q_scale: Any,
        k_scale: Any,
        v_scale: Any,
        *,
        causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Call:
        """The call that these arguments mean."""
        if self._forward is None:
            raise PackageError(
                "this package has no FP8 kernels; export a run of FP8 problems, such as "
                "dtype: e4m3_tensor"
            )
        for name, tensor in zip(_NAMES, (query, key, value), strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
                raise TypeError(f"{name} is no (batch, heads, seqlen, head_dim) tensor")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{query.shape[1]} heads of queries and {key.shape[1]} of keys: give "
                "enable_gqa=True if they share keys"
            )
        named = zip(_SCALES, (q_scale, k_scale, v_scale), strict=True)
        tensors = (query, key, value, *(_scale_tensor(*each, query) for each in named))
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            raise ValueError(
                "FP8 attention has no gradients: detach what requires_grad, or call it under "
                "torch.no_grad()"
            )
        by = query.shape[3] ** -0.5 if scale is None else float(scale)
        return _call_of(*tensors, bool(causal), by)

    # ---- the operator ----
    def _fake(self, query: torch.Tensor, key: Any, value: Any, *given: Any) -> torch.Tensor:
        self._checked(_call_of(query, key, value, *given))
        return query.new_empty(query.shape, dtype=torch.bfloat16)

    def _impl(self, *given: Any) -> torch.Tensor:
        call = _call_of(*given)
        (out,) = self._plan(call).run(call)
        self._calls += 1
        made: torch.Tensor = out
        return made

    def _plan(self, call: Call) -> ServingPlan:
        """The plan of a call. Raises PackageError if it has no launches."""
        plan = self._planner.looked_up(call)
        if not plan.calls:
            raise PackageError(plan.choice.reason)
        return plan

    def _planned(self, call: Call) -> ServingPlan:
        sizes = self._checked(call)
        try:
            problem = Problem(*sizes, causal=call.is_causal)
        except ProblemError as error:
            raise PackageError(error.what) from error
        for name, tensor in zip(_NAMES, call, strict=False):
            if tensor.numel() >= 2**31:
                raise ValueError(f"{name} has 2^31 elements or more; cut the batch")
        index = call.query.get_device()
        choice = choose_fp8(self._known(index), problem)
        if choice.kernel is None:
            why = f"{choice.reason}; to add it: attnsweep run, then attnsweep export"
            raise PackageError(why)
        calls = families.launches(families.FP8, choice.kernel.values, problem, call.scale)
        if not calls.keys() <= choice.kernel.stages.keys():
            why = f"{problem.label}: the kernel has no code of a stage; export again"
            raise PackageError(why)
        return Fp8Plan(
            choice=choice,
            launcher=self._launcher,
            calls=calls,
            stages=choice.kernel.stages,
            tensors=tensors_of(problem),
            index=index,
            names=(*NAMES, *_SCALES),
            problem=problem,
        )

    def _known(self, index: int) -> TunedFp8Gpu:
        """The table's FP8 entries for a device. Raises PackageError."""
        index = max(index, 0)
        if index not in self.gpus:
            key = GpuKey.of(torch.cuda.get_device_properties(index))
            self.gpus[index] = self._table.fp8.get(key)
        gpu = self.gpus[index]
        if gpu is None:
            known = "; ".join(key.label for key in self._table.fp8)
            raise PackageError(
                f"this GPU was not tuned in FP8; the package knows {known}. To tune it: "
                "attnsweep run SPEC, then attnsweep export"
            )
        return gpu

    def _checked(self, call: Call) -> tuple[Any, ...]:
        """Sizes and dtype of a call, as a compiler knows them too. Raises TypeError, ValueError."""
        query, key, value, _, causal, scale, *_ = call
        scales: Any = call.extra
        tensors = (query, key, value, *scales)
        for name, tensor in zip((*_NAMES, *_SCALES), tensors, strict=True):
            if (
                tensor.device != query.device
                or tensor.device.type not in self._launcher.device_types
            ):
                raise ValueError(f"{name} is on {tensor.device}: FP8 kernels run on one GPU")
        for name, tensor in zip(_NAMES, tensors, strict=False):
            if tensor.dtype != torch.float8_e4m3fn:
                raise TypeError(
                    f"{name} is {tensor.dtype}: FP8 attention takes torch.float8_e4m3fn, such as "
                    "(x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)"
                )
            if tensor.dim() != 4 or 0 in tensor.shape:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}, not (batch, heads, seqlen, head_dim) of at "
                    "least 1"
                )
        batch, heads, seqlen_q, head_dim = query.shape
        _, heads_kv, seqlen_k, _ = key.shape
        if (
            key.shape != value.shape
            or (key.shape[0], key.shape[3]) != (batch, head_dim)
            or heads % heads_kv
        ):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise ValueError(f"shapes do not agree: {shapes}")
        for name, tensor in zip(_NAMES, tensors, strict=False):
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{name} has strides {tuple(tensor.stride())}: FP8 attention takes contiguous "
                    "(batch, heads, seqlen, head_dim); call .contiguous() where it is quantised"
                )
        if causal and seqlen_q != seqlen_k:
            raise ValueError(
                f"causal with {seqlen_q} queries and {seqlen_k} keys: libraries differ in how they "
                "align the mask; one query that sees all keys needs no mask"
            )
        if not 0.0 < scale < _MOST_SCALE:
            raise ValueError(f"scale is {scale}, not a positive number of 32 bits")
        kind = _kind_of(scales, batch, heads_kv, seqlen_k)
        sizes = (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim)
        return *sizes, kind


def tensors_of(problem: Problem) -> dict[str, StridedTensor]:
    """q, k, v and o, contiguous, as tensor maps see them: bytes in pairs, batches of heads as one.

    q, k and v are (batch · heads, seqlen, head_dim / 2), o (batch · heads, seqlen_q, head_dim).
    """

    def of(heads: int, rows: int, columns: int) -> StridedTensor:
        return StridedTensor((problem.batch * heads, rows, columns), (rows * columns, columns, 1))

    queries = (problem.heads, problem.seqlen_q)
    keys = of(problem.heads_kv, problem.seqlen_k, problem.head_dim // 2)
    made = (of(*queries, problem.head_dim // 2), keys, keys, of(*queries, problem.head_dim))
    return dict(zip(NAMES, made, strict=True))


def _call_of(query: Any, key: Any, value: Any, *given: Any) -> Call:
    """A call of the operator."""
    *scales, causal, scale = given
    return Call(query, key, value, None, causal, scale, extra=Scales(*scales))


def _kind_of(scales: Scales, batch: int, heads_kv: int, seqlen_k: int) -> Any:
    """The dtype of a Problem. Raises TypeError or ValueError for scales that are none."""
    blocks = (seqlen_k + SCALE_BLOCK - 1) // SCALE_BLOCK
    of_heads, of_blocks = (batch, heads_kv), (batch, heads_kv, blocks)
    kinds = set()
    for name, scale in zip(_SCALES, scales, strict=True):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} is {scale.dtype}: a scale is torch.float32")
        shape = tuple(scale.shape)
        if shape in ((), (1,)):
            kinds.add("e4m3_tensor")
        elif shape == of_heads:
            kinds.add("e4m3")
        elif shape == of_blocks and name != "q_scale":
            kinds.add("e4m3_block")
        else:
            wanted = f"of one element or {of_heads}, (batch, heads_kv)"
            if name != "q_scale":
                wanted += f", or {of_blocks}, one of each 128 keys"
            raise ValueError(f"{name} is {shape}, and takes float32 {wanted}")
    return next(kind for kind in ("e4m3_block", "e4m3", "e4m3_tensor") if kind in kinds)


def _scale_tensor(name: str, scale: Any, query: torch.Tensor) -> torch.Tensor:
    """A scale as a tensor. Values of tensors are not looked at: that would wait for the GPU."""
    if isinstance(scale, torch.Tensor):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{name} is {scale!r}: a scale is a number, or a float32 tensor")
    if not _LEAST_FLOAT <= scale <= _MOST_FLOAT:
        raise ValueError(f"{name} is {scale}: a scale is finite and above 0, as float32 too")
    return torch.full((), float(scale), dtype=torch.float32, device=query.device)


def _spread(scales: Any, problem: Problem) -> tuple[torch.Tensor, ...]:
    """Scales as a kernel reads them; of those that lie so already nothing is copied."""
    wanted = [problem.shape_of(name) for name in _SCALES]
    if problem.dtype == "e4m3_tensor":  # one launch for the three
        return tuple(torch.stack([each.reshape(()).expand(wanted[0]) for each in scales]))
    made = []
    for scale, sizes in zip(scales, wanted, strict=True):
        if scale.dim() == 2 and len(sizes) == 3:
            scale = scale[..., None]
        made.append(scale.expand(sizes).contiguous())
    return tuple(made)


def _check_alignment(tensors: tuple[torch.Tensor, ...]) -> None:
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor.data_ptr() & 15:
            raise ValueError(f"{name} does not begin at a multiple of 16 bytes; call .clone()")
