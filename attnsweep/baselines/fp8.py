"""Baselines in FP8: cuDNN, FlashAttention-3, and our own attention in bf16."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Unavailable, Way
from attnsweep.baselines.cudnn import _K, _O, _Q, _V, LAYOUTS, _Graph, frontend
from attnsweep.baselines.flash import FLASH_3, attention_of, changes, installed, window
from attnsweep.baselines.torch_sdpa import rows_of_heads
from attnsweep.core.formats import SCALE_BLOCK
from attnsweep.core.problem import Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

# In FP8: the scales of the inputs, of P and of the output; and its two largest values.
_SCALES = {"descale_q": 5, "descale_k": 6, "descale_v": 7}
_SCALES |= {"descale_s": 8, "scale_s": 9, "scale_o": 10}
_AMAX = (11, 12)
# Probabilities times this are rounded to e4m3, whose largest number is 448.
_P_SCALE = 256.0
_E4M3_MAX = 448.0
_FLASH_SCALES = ("q_descale", "k_descale", "v_descale")


def cudnn_fp8(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """cuDNN in FP8 through its own API, in either layout, with its output in bf16 if it has that.

    Otherwise, also if such a call fails, the output is e4m3 with the scale of v, which no output
    exceeds. Raises Unavailable, or what cuDNN raises if none of its engines does the problem.
    """
    module = frontend(torch)
    if not problem.format.equal_scales:
        raise Unavailable("cuDNN has one scale of each tensor: dtype e4m3_tensor")
    ways: list[Way] = []
    failed: list[Exception] = []
    for kind in ("BFLOAT16", "FP8_E4M3"):
        spare = bool(ways)
        for layout in LAYOUTS:
            try:
                way = build_fp8(torch, module, problem, session.stream.ptr, layout, kind)
                ways.append(replace(way, spare=spare))
            except Exception as error:  # cuDNN says here that no engine does this problem
                failed.append(error)
    if not ways:
        raise failed[-1]
    return ways


def build_fp8(
    torch: Any, cudnn: Any, problem: Problem, stream: int, layout: str, output: str
) -> Way:
    """A call of a problem in e4m3_tensor. output: name of the type that o is stored in.

    Its inputs are q, k, v, and the six scales. o in FP8_E4M3 is stored with the scale of v. Raises
    what cuDNN raises if none of its engines does the problem, or writes o so.
    """
    fp32 = cudnn.data_type.FLOAT
    made = _Graph(torch, cudnn, problem, stream, layout)
    scales = {
        name: made.graph.tensor(
            name=name, dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=fp32, uid=uid
        )
        for name, uid in _SCALES.items()
    }
    out, _, *largest = made.graph.sdpa_fp8(
        **made.options(), **scales, generate_stats=False, right_bound=problem.mask.interval.right
    )
    for tensor, uid in zip(largest, _AMAX, strict=True):
        tensor.set_uid(uid).set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
        tensor.set_data_type(fp32)
    made.write(out, problem.outputs[0], _O, getattr(cudnn.data_type, output))
    made.plan()
    shape, own, execute = made.shape, made.strides, made.execute
    narrow = output == "FP8_E4M3"
    dtype = torch.float8_e4m3fn if narrow else torch.bfloat16

    def scalar(value: float) -> Any:
        return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device="cuda")

    amax = {uid: scalar(0.0) for uid in _AMAX}

    def convert(q: Any, k: Any, v: Any, *given: Any) -> tuple[Any, ...]:
        # One scale of each tensor: those of all heads are equal.
        descales = [scale.reshape(-1)[:1].reshape(1, 1, 1, 1).contiguous() for scale in given]
        of_out = 1.0 / descales[2] if narrow else scalar(1.0)
        tensors = (q, k, v) if layout == "bhsd" else rows_of_heads(q, k, v)
        return (*tensors, *descales, scalar(1 / _P_SCALE), scalar(_P_SCALE), of_out)

    def forward(q: Any, k: Any, v: Any, *scales: Any) -> Any:
        out = torch.empty_strided(shape, own, dtype=dtype, device=q.device)
        named = dict(zip(_SCALES.values(), scales, strict=True))
        execute({_Q: q, _K: k, _V: v, _O: out, **named, **amax})
        return out

    def finish(out: Any, *inputs: Any) -> Any:
        return out.float() / inputs[-1]  # by scale_o

    weakref.finalize(forward, cudnn.destroy_handle, made.handle)
    return Way(forward, convert, finish=finish if narrow else None)


def flash_3_fp8(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """The ways to call FlashAttention-3 in FP8."""
    there = installed("flash_attn_3_fp8", FLASH_3)
    return [flash_3(torch, attention_of(m), problem, spare=m != there[0]) for m in there]


def flash_3(torch: Any, attention: Callable[[], Any], problem: Problem, *, spare: bool) -> Way:
    """FlashAttention-3 in FP8, with scales (batch, heads_kv); (batch, seqlen, heads, head_dim).

    attention: imports and returns its function. A problem that is not in FP8 is converted to it,
    and a problem that is has its bytes laid out anew, before any call is timed.
    """
    if (keys := problem.format.scale_block) is not None:
        raise Unavailable(
            f"FlashAttention-3 has one scale of each head of keys, not of each {keys} keys"
        )
    options = window(problem) | changes(problem)

    def quantise(*inputs: Any) -> tuple[Any, ...]:
        tensors, descales = [], []
        for x in inputs:
            stored, descale = quantised(torch, x.transpose(1, 2), problem.heads_kv)
            tensors.append(stored.contiguous())
            descales.append(descale)
        return (*tensors, *descales)

    def lay_out(*inputs: Any) -> tuple[Any, ...]:
        return (*(x.transpose(1, 2).contiguous() for x in inputs[:3]), *inputs[3:])

    def forward(q: Any, k: Any, v: Any, *descales: Any) -> Any:
        scales = dict(zip(_FLASH_SCALES, descales, strict=True))
        out = attention()(q, k, v, causal=problem.causal, **options, **scales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Way(forward, lay_out if problem.scales else quantise, spare)


def quantised(torch: Any, x: Any, heads_kv: int) -> tuple[Any, Any]:
    """(batch, seqlen, heads, head_dim) in e4m3, and its scales (batch, heads_kv), contiguous."""
    batch, _, heads, _ = x.shape
    largest = x.abs().float().amax(dim=(1, 3)).view(batch, heads_kv, -1)
    descale = (largest.amax(dim=2) / _E4M3_MAX).clamp(min=1e-12)
    each = descale.repeat_interleave(heads // heads_kv, dim=1)
    stored = (x.float() / each[:, None, :, None]).to(torch.float8_e4m3fn)
    return stored, descale.contiguous()


def own_bf16(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """Our attention in bf16, as it comes with attnsweep, on the values that FP8 inputs stand for.

    Raises Unavailable if PyTorch's own attention would answer instead.
    """
    from attnsweep import attention, explain_attention

    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise Unavailable("attention has a causal mask aligned top-left alone")
    bf16 = torch.bfloat16
    options: dict[str, Any] = {"is_causal": problem.causal}
    options |= {"enable_gqa": problem.heads != problem.heads_kv}
    options |= {} if problem.scores.scale is None else {"scale": problem.scale}

    def convert(*inputs: Any) -> tuple[Any, ...]:
        return tuple(
            (x.float() * _spread(scale, x, problem)).to(bf16).contiguous()
            for x, scale in zip(inputs[:3], inputs[3:], strict=True)
        )

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, **options)

    alike = [torch.empty(problem.shape_of(t), dtype=bf16, device="cuda") for t in "qkv"]
    why = explain_attention(*alike, **options)
    if why.kernel is None:
        raise Unavailable(f"no kernel of ours in bf16 serves it: {why.reason}")
    return [Way(forward, convert)]


def _spread(scale: Any, x: Any, problem: Problem) -> Any:
    """Scales as a tensor that broadcasts with x, (batch, heads, seqlen, head_dim)."""
    if len(scale.shape) == 3:
        return scale.repeat_interleave(SCALE_BLOCK, dim=2)[:, :, : problem.seqlen_k, None]
    each = scale.repeat_interleave(x.shape[1] // problem.heads_kv, dim=1)
    return each[:, :, None, None]
