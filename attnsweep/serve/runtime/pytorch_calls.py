"""Every attention call that PyTorch computes for a package, and how callers are kept from faults.

PyTorch's backends are wrong for some calls that they accept, most of them cuDNN's. `by_pytorch`
of a call, `attend` of PyTorch's own arguments, and `aligned`, `settled` and `nan_prone` for its
operators, are the only ways to them, and know these:

- cuDNN's backward is planned by the layout of q, k and v alone: a gradient of another layout than
  the one that the plan was made for gives wrong gradients or an illegal access.
- cuDNN misreads tensors that do not begin, or whose rows are not, at multiples of 16 bytes.
- cuDNN's dq is NaN at seqlen_k % 128 == 64 where scores are below -88, unless causal alone.
- A query that sees no key has a mixture of v from cuDNN, where other backends have 0.
- cuDNN reads a float32 mask beside half precision as if it were of that, and the memory-efficient
  backend, which PyTorch chooses for some such calls, ends them in an error.
- Flash attention of packed sequences takes each for one of a query if the longest has one; a
  window's side for open if it is no shorter than the longest keys; and an open one for that long.
- Backward passes refuse more than 65,535 items or heads, and a mask that alone has a gradient.

docs/explanation/pytorch.md says which version was tried on which card; what was not is taken to
have the faults. benchmarks/pytorch_faults.py tries them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from .call import Call, CuSeqlens
from .changed_scores import composed
from .intervals import dense, dense_of_packed
from .sdpa_patch import is_traced, sdpa

CUDNN = 3  # torch.nn.attention.SDPBackend.CUDNN_ATTENTION, whose import takes a second
_EFFICIENT = 2  # EFFICIENT_ATTENTION
_OF_CUDNN = "ScaledDotProductCudnnAttentionBackward0"
_HALVES = (torch.float16, torch.bfloat16)
_TENSOR, _PLAIN = torch.Tensor, (torch.Tensor, torch.nn.Parameter)
# Blocks of a launch in its second and third dimension, which backward passes have items and heads
# in.
MOST_IN_GRID = 65535
# Where a row that adds -inf to every score is 0 whichever backend computes it, gradients too: tried
# on an H100. Elsewhere such rows are filled.
_ADDED_ROWS_RIGHT = torch.__version__.startswith("2.11.")
_MOST_LAYOUTS = 65536
# Strides of 16-bit tensors whose rows lie at multiples of 16 bytes, none of them on top of another.
_in_steps: set[tuple[int, ...]] = set()
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
_transform, _is_tracing = torch._C._functorch.peek_interpreter_stack, torch._C._is_tracing


def by_pytorch(call: Call) -> torch.Tensor:
    """The output of any call, by PyTorch's own attention or else its operators.

    With limits a query that sees no key has 0.
    """
    query, key, value, mask, is_causal, scale, enable_gqa, limits, *_ = call
    if isinstance(mask, CuSeqlens):
        return _packed(call)
    fill = call.fill
    if limits is not None:
        (low, high), lengths = limits, mask
        if lengths is not None or low is not None or high is not None:
            mask = dense(limits, query, key, lengths)
        # A window's left side begins no later than the last query's own key, which is the last one.
        sees = high is None or high >= max(0, 0 if low is None else low)
        fill = lengths is not None or not sees
    given = (query, key, value, mask, call.dropout_p)
    if call.changes_scores:
        return composed(*given, scale, enable_gqa, call.softcap, call.sinks)
    out: torch.Tensor = attend(*given, is_causal, scale=scale, enable_gqa=enable_gqa, fill=fill)
    return out


def _packed(call: Call) -> torch.Tensor:
    """Packed sequences, by flash attention, or else with a mask of all pairs of tokens."""
    query, key, value, mask, _, scale, _, window, softcap, sinks, dropout_p, *_ = call
    head_dim, plain = query.shape[3], not call.changes_scores
    flash = query.is_cuda and query.dtype in _HALVES and head_dim % 8 == 0 and head_dim <= 256
    if plain and flash and key.shape == value.shape and query.shape[2] and key.shape[2]:
        most = [n or each.shape[2] for n, each in zip(mask.longest, (query, key), strict=True)]
        begins = [each.to(torch.int32).contiguous() for each in mask[:2]]
        q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
        out = flash_varlen(q, k, v, begins, most, window or (None, None), dropout_p, scale)
        return out.transpose(0, 1).unsqueeze(0)
    pairs = dense_of_packed(call)
    if plain:
        how: Any = (pairs, dropout_p, False)
        out = attend(query, key, value, *how, scale=scale, enable_gqa=True, fill=True)
    else:
        out = composed(query, key, value, pairs, dropout_p, scale, True, softcap, sinks)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    fill: bool = False,
    steps: Steps | None = None,
) -> Any:
    """PyTorch's own scaled_dot_product_attention, by a backend that computes the call rightly.

    fill: whether a query that sees no key has output 0 and gradients of 0, whatever the backend
    makes of it. steps: counts the gradients of a call without a mask that have the layout of the
    ones before.
    """
    if attn_mask is None and not _is_compiling() and _is_right(query, key, value):
        if scale is None and enable_gqa is False:
            return sdpa(query, key, value, None, dropout_p, is_causal)
        masks = (None, dropout_p, is_causal)
        return sdpa(query, key, value, *masks, scale=scale, enable_gqa=enable_gqa)
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    how: Any = {"scale": scale, "enable_gqa": enable_gqa}
    # The class recognises a call by what stands in torch.nn.functional, and otherwise hands over
    # the tensor that it is, which is empty.
    bias = None if attn_mask is None else sys.modules.get("torch.nn.attention.bias")
    if bias is not None and isinstance(attn_mask, bias.CausalBias):
        return bias.CausalBias._dispatch(*given, scale, enable_gqa)
    if fill and attn_mask is not None:
        return _filled(*given, **how)
    traced = is_traced(query)
    plain = all(type(each) in _PLAIN and not each.is_nested for each in (query, key, value))
    if not (plain or traced) or _is_compiling() or _is_transformed() or query.dim() != 4:
        return _in_float32(*given, **how) if _misread(*given, **how) else sdpa(*given, **how)
    grad = records(query, key, value, attn_mask)
    if grad and not traced and max(query.shape[:2]) > MOST_IN_GRID:
        return _in_parts(*given, **how)
    if grad and not (query.requires_grad or key.requires_grad or value.requires_grad):
        query = query.detach().requires_grad_()  # or no log-sum-exp is kept for the mask's own
    if type(attn_mask) is torch.Tensor and not traced and attn_mask.dim() > 1:
        attn_mask = _of_rows(attn_mask, key.shape[-2])
    own = query, key, value
    if query.dtype in _HALVES:
        query, key, value = aligned(query), aligned(key), aligned(value)
        # cuDNN's output has the order of query's strides, head_dim behind those of 0: an error the
        # first time, and the end of the process the second.
        if query.shape[-1] != value.shape[-1] and _is_expanded(query):
            query = query.contiguous()
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if _misread(*given, **how):  # as it lies now: cuDNN refuses some that were copied
        return _in_float32(*given, **how)
    if not grad or query.dtype not in _HALVES:
        out = sdpa(query, key, value, attn_mask, dropout_p, is_causal, **how)
        return connected(out, query, key, value) if grad else out
    # The bytes of -0.0 find plans that calls outside this module neither made nor meet.
    masks = (attn_mask, dropout_p if traced or dropout_p != 0.0 else -0.0, is_causal)
    apart = nan_prone(key, is_causal and attn_mask is None)
    with _without_cudnn() if apart else nullcontext():
        out = sdpa(query, key, value, *masks, **how)
    if traced:
        return out
    # Steps that nobody watches any more are PyTorch's as they are given.
    if apart or query is not own[0] or key is not own[1] or value is not own[2]:
        steps = None
    return watched(out, query, key, value, steps)


def _is_transformed() -> bool:
    """Whether torch.func or torch.jit.trace looks at the call, to which tensors are no memory."""
    return _transform() is not None or _is_tracing()


def _is_right(query: Any, key: Any, value: Any) -> bool:
    """Whether each backend computes a call without a mask rightly: most calls, and soon known."""
    if not (type(query) is type(key) is type(value) is _TENSOR) or _is_transformed():
        return False
    if _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if query.is_nested or key.is_nested or value.is_nested:
        return False  # they have no strides: to ask about these would end the process
    if query.dtype not in _HALVES:
        return True
    try:
        off = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
    except RuntimeError:  # what a transform has left behind
        return False
    return (
        not off
        and query.stride() in _in_steps
        and key.stride() in _in_steps
        and value.stride() in _in_steps
    )


def flash_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: Sequence[torch.Tensor],
    longest: Sequence[int],
    window: tuple[int | None, int | None],
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """Packed sequences by PyTorch's flash attention: (tokens, heads, head_dim) on a card.

    cu_seqlens, longest: of queries and of keys. window: the keys before and after a query's own,
    None: all on that side.
    """
    (of_q, of_k), (most_q, most_k), (left, right) = cu_seqlens, longest, window
    # If none has more than one query, it takes each for one of a query, and an idle one for another
    # that is there.
    if most_q < 2 and query.shape[0] != of_q.shape[0] - 1:
        most_q = 2
    of_window: dict[str, int] = {}
    if left is not None or right not in (None, 0):
        # A side that is no shorter than the longest keys counts as open there, and an open one as
        # that long, which it is not where queries are more than keys.
        all_keys = most_q + most_k
        of_window["window_size_left"] = all_keys if left is None else left
        of_window["window_size_right"] = all_keys if right is None else right
        most_k = max(*of_window.values(), most_k) + 1
    given = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)]
    how: Any = (of_q, of_k, most_q, most_k, dropout_p, right == 0 and not of_window, False)
    flash = torch.ops.aten._flash_attention_forward
    out, *_ = flash(*map(aligned, given), *how, scale=scale, **of_window)
    return _of_aligned(connected(out, query, key, value))


def connected(out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """The output, with gradients of 0 to tensors whose gradients PyTorch does not record for it."""
    if out.requires_grad or not records(*tensors):
        return out
    for each in tensors:
        out = out + each[..., :0].sum()
    return out


def records(*tensors: Any) -> bool:
    """Whether gradients of any of these, or None, are recorded."""
    return _is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _in_float32(query: Any, key: Any, value: Any, *masks: Any, **how: Any) -> Any:
    """The call with float32 tensors, and its output in query's dtype."""
    return sdpa(query.float(), key.float(), value.float(), *masks, **how).to(query.dtype)


def _misread(query: Any, key: Any, value: Any, attn_mask: Any, *masks: Any, **how: Any) -> bool:
    """Whether PyTorch would give a backend a mask of another dtype than query's, which none takes.

    Autocast would cast the mask too. A compiler cannot ask, nor can `torch.vmap`.
    """
    if getattr(attn_mask, "dtype", None) is not torch.float32:
        return False
    if not getattr(query, "is_cuda", False):
        return False
    if query.dtype not in _HALVES or torch.is_autocast_enabled("cuda"):
        return False
    if _is_compiling() or is_traced(query):
        return True
    try:
        choice = torch._fused_sdp_choice(query, key, value, attn_mask, *masks, **how)
    except RuntimeError:
        return True
    return choice in (CUDNN, _EFFICIENT)


def _filled(query: Any, key: Any, value: Any, attn_mask: Any, *how: Any, **options: Any) -> Any:
    """`attend`, where queries that see no key see all, and their output is 0 afterwards.

    That keeps gradients finite too.
    """
    if attn_mask.dtype is torch.bool:
        empty = ~attn_mask.any(-1, keepdim=True)
        attn_mask = attn_mask | empty
    elif _ADDED_ROWS_RIGHT:
        return attend(query, key, value, attn_mask, *how, **options)
    else:
        empty = (attn_mask == -torch.inf).all(-1, keepdim=True)
        attn_mask = attn_mask.masked_fill(empty, 0.0)
    return attend(query, key, value, attn_mask, *how, **options).masked_fill(empty, 0.0)


def _in_parts(query: Any, key: Any, value: Any, attn_mask: Any, *how: Any, **options: Any) -> Any:
    """`attend`, by as many items or heads at a time as a backward takes."""
    dim = 0 if query.shape[0] > MOST_IN_GRID else 1
    group = max(1, query.shape[dim] // max(1, key.shape[dim]))
    most = max(1, MOST_IN_GRID // group)
    parts = []
    for at in range(0, -(-query.shape[dim] // group), most):

        def part(tensor: Any, of: int, at: int = at) -> Any:
            axis = dim - 4
            if tensor is None or tensor.dim() < -axis or tensor.shape[axis] == 1:
                return tensor
            return tensor.narrow(axis, at * of, min(most * of, tensor.shape[axis] - at * of))

        own = part(query, group), part(key, 1), part(value, 1), part(attn_mask, group)
        parts.append(attend(*own, *how, **options))
    return torch.cat(parts, dim)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one whose rows do not begin at multiples of 16 bytes.

    cuDNN takes heads of multiples of 16 bytes alone, so that others need no copy.
    """
    step = 16 // tensor.element_size()
    if is_traced(tensor):  # which has no address, and may have numbers that are not known yet
        off = tensor.storage_offset()
        off = type(off) is int and off % step
    else:
        try:
            off = tensor.data_ptr() & 15
        except RuntimeError:  # a batch of tensors, which has no memory of its own
            return tensor
        if not off and tensor.stride() in _in_steps:
            return tensor
    *steps, last = tensor.stride()
    if tensor.shape[-1] % step or last != 1:
        return tensor
    if off or any(type(each) is int and each % step for each in steps):
        return tensor.clone(memory_format=torch.contiguous_format)
    if (
        len(_in_steps) < _MOST_LAYOUTS
        and step == 8
        and not (is_traced(tensor) or _is_expanded(tensor))
    ):
        _in_steps.add(tensor.stride())
    return tensor


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(type(each) is int and not each for each in tensor.stride())


def _of_rows(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """A mask, or a copy of one whose rows backends read slowly, or wrongly.

    With keys 16 elements apart, as T5 makes its bias, a call took PyTorch 20 times as long.
    """
    if mask.shape[-1] == 1 < keys:  # or a bias is made of it whose keys are 0 elements apart
        mask = mask.expand(*mask.shape[:-1], keys)
    if mask.dtype is torch.bool or (mask.stride(-1) == 1 and not mask.data_ptr() & 15):
        return mask
    pairs = zip(mask.shape[:-1], mask.stride()[:-1], strict=True)
    own = mask[tuple(slice(1) if n > 1 and step == 0 else slice(None) for n, step in pairs)]
    return own.clone(memory_format=torch.contiguous_format).expand(mask.shape)


def nan_prone(key: torch.Tensor, causal_alone: bool) -> bool:
    """Whether cuDNN's backward may make NaN of scores far below zero: see this module.

    A compiler's numbers that vary are not asked.
    """
    keys = key.shape[-2]
    return not causal_alone and type(keys) is int and keys % 128 == 64


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Have PyTorch choose another backend, as torch.nn.attention.sdpa_kernel does."""
    before = torch._C._get_cudnn_sdp_enabled()
    torch._C._set_sdp_use_cudnn(False)
    try:
        yield
    finally:
        torch._C._set_sdp_use_cudnn(before)


# ---- one layout of gradients for each layout of an output ----
class Layout:
    """The layout of the gradients of outputs of one shape and layout, for which plans are made.

    It is the first one's, since nearly all programs have one, unless cuDNN cannot take that.
    """

    def __init__(self, of_output: tuple[int, ...]) -> None:
        self._of_output = of_output
        self._strides: tuple[int, ...] | None = None

    def watch(self, out: torch.Tensor) -> None:
        """Copy the gradient of an output, when one comes, into this layout."""
        out.register_hook(self.copied)

    def copied(self, grad: torch.Tensor) -> torch.Tensor | None:
        """A copy of a gradient in this layout; None if it has it already."""
        strides = self._strides
        if strides is None:
            strides = self._of_output
            if grad.stride(-1) == 1 and _is_dense(grad):
                strides = grad.stride()
            self._strides = strides
        try:
            if not grad.data_ptr() & 15 and _alike(grad, strides):
                return None
        except RuntimeError:  # a batch of them, which has no memory of its own
            return None
        how: Any = {"dtype": grad.dtype, "device": grad.device}
        return torch.empty_strided(grad.shape, strides, **how).copy_(grad)


def _alike(grad: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has these strides, where it has more than one element."""
    own = grad.stride()
    return own == strides or all(
        n == 1 or a == b for n, a, b in zip(grad.shape, own, strides, strict=True)
    )


def _aligned_gradient(grad: torch.Tensor) -> torch.Tensor | None:
    """A copy of an output's gradient that backends would misread; None if it is none."""
    made = aligned(grad)
    return None if made is grad else made


def _of_aligned(out: torch.Tensor) -> torch.Tensor:
    """The output, whose gradient a backend other than cuDNN's gets where it can read it."""
    if out.requires_grad:
        out.register_hook(_aligned_gradient)
    return out


def watched(out: Any, query: Any, key: Any, value: Any, steps: Steps | None = None) -> Any:
    """The output of a call, whose gradient has the layout that its backend reads rightly."""
    if type(out.grad_fn).__name__ == _OF_CUDNN:
        copied = _layout_of(out).copied
    else:
        copied, out = _aligned_gradient, connected(out, query, key, value)
    if steps is not None:
        steps.watch(out, copied)
    elif out.requires_grad:
        out.register_hook(copied)
    return out


_layouts: dict[Any, Layout] = {}


def _layout_of(out: torch.Tensor) -> Layout:
    """The layout of the gradients of outputs like this one: the same for ever, as plans are."""
    sizes = out.shape
    what = (sizes, *[step if n > 1 else 0 for n, step in zip(sizes, out.stride(), strict=True)])
    found = _layouts.get(what)
    if found is None:
        found = Layout(out.stride())
        if len(_layouts) < _MOST_LAYOUTS:
            found = _layouts.setdefault(what, found)
        else:  # as any other beyond that many would be
            found._strides = out.stride()
    return found


def settled(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The gradient of an output, in the layout that cuDNN's plan is made for."""
    copied = _layout_of(out).copied(grad)
    return grad if copied is None else copied


_Copied = Callable[[torch.Tensor], torch.Tensor | None]


class Steps:
    """Short steps of one kind that one place of a program makes: are their gradients all alike?

    left: how many more must be, before no hook watches them, 0 when that many were. A hook takes
    the host from 15 to 50 us, of 230 to 370 that a short step takes it.
    Gradients of another layout, once they were seen, are watched for ever.
    """

    WATCHED = 32

    def __init__(self) -> None:
        self.left = self.WATCHED
        self.backend: type | None = None
        """The class of the outputs' grad_fn."""

    @property
    def asked(self) -> type | None:
        """The backend that outputs of a settled step must have; None if it is cuDNN.

        Others read rightly whatever cuDNN does, and asking costs the host of each step.
        """
        by_cudnn = self.backend is not None and self.backend.__name__ == _OF_CUDNN
        return None if by_cudnn else self.backend

    def watch(self, out: torch.Tensor, copied: _Copied) -> None:
        """Count the gradient of an output, when there is one, while they are not settled.

        copied: gives the copy of a gradient that the backend needs, or None. Another backend than
        before begins anew.
        """
        if type(out.grad_fn) is not self.backend:
            self.backend = type(out.grad_fn)
            self.left = max(self.left, self.WATCHED)
        if self.left:
            out.register_hook(partial(self._count, copied))

    def _count(self, copy: _Copied, grad: torch.Tensor) -> torch.Tensor | None:
        copied = copy(grad)
        if copied is not None:
            self.left = sys.maxsize
        elif self.left:
            self.left -= 1
        return copied
