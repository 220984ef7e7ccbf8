"""Attention as a compiler sees it: the operators in torch.ops, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import backward_operator, gradients
from .backward_operator import IntervalGradients, key_ranges
from .call import Call, plain, records_gradients, sized
from .call_cache import transformed
from .gradients import like
from .planner import choice_of, why_unserved
from .pytorch_calls import attend, by_pytorch
from .sdpa_patch import exports
from .torch_ops import OPERATORS, define, differentiate, library_of


class CompiledCalls:
    """The operators of a package, by which an Operator serves compiled code.

    The methods with names of OPERATORS are what these compute. ops: the operators themselves.
    """

    def __init__(self, operator: Any, namespace: str, devices: Sequence[str]) -> None:
        self._operator, self._planner = operator, operator.planner
        self._intervals = IntervalGradients(operator.planner, operator.backward)
        self.forward_intervals_lse = self._intervals.forward_lse
        self.backward_intervals = self._intervals.backward
        library = self.library = library_of(namespace)
        made = {name: define(library, devices, name, getattr(self, name)) for name in OPERATORS}
        self.ops: Any = SimpleNamespace(**made)
        own = gradients.of_operator(operator, self.ops.backward)
        differentiate(library, "forward_lse", gradients.save_for_backward, own)
        own = backward_operator.of_operator(self.ops.backward_intervals)
        saves = backward_operator.save_for_backward
        differentiate(library, "forward_intervals_lse", saves, own)

    # ---- calls ----
    def call(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        fill: bool = False,
    ) -> torch.Tensor:
        """`Operator.attention` with PyTorch's arguments, as one operator, if none is of a subclass.

        What a compiler sees asked is asked again before each call of what it compiled: with the
        questions of `attention_sdpa` outside it, compiled steps of short calls took 6 % longer than
        PyTorch's own, and take 3 % with them inside (H100, medians of benchmarks/training.py).
        """
        # Numbers are looked at: one that the device alone knows ends a graph, as at PyTorch's own.
        if (
            not exports._is_exporting_flag
            and plain(query, key, value)
            and query.dim() == 4  # others are PyTorch's, and `torch.vmap` knows that operator
            and (attn_mask is None or type(attn_mask) is torch.Tensor)
            and (scale is None or (isinstance(scale, (int, float)) and abs(scale) < 1e30))
            and isinstance(dropout_p, (int, float))
            and 0.0 <= dropout_p <= 1.0
            and type(is_causal) is type(enable_gqa) is bool
        ):
            # No bool(), which would stay in the graph.
            is_causal = True if is_causal else False  # noqa: SIM210
            enable_gqa = True if enable_gqa else False  # noqa: SIM210
            how = (dropout_p, is_causal, scale, enable_gqa, fill)
            out: torch.Tensor = self.ops.attention_sdpa(query, key, value, attn_mask, *how)
            return out
        masks = (attn_mask, dropout_p, is_causal)
        return attend(query, key, value, *masks, scale=scale, enable_gqa=enable_gqa, fill=fill)

    def attention_sdpa(
        self, query: Any, key: Any, value: Any, *asked: Any, fill: bool = False
    ) -> torch.Tensor:
        """Route a call of PyTorch's function to one of the other operators, or to PyTorch.

        PyTorch where torch.func transforms it: it has rules for its own operator alone. And where a
        policy says which operators' outputs are kept for the backward, or sizes are known on the
        device alone, so that nothing can be asked of them.
        """
        given = self._operator.cast(query, key, value)
        attn_mask, dropout_p, is_causal, scale, enable_gqa, *filled = asked
        how: Any = (attn_mask, is_causal, scale, enable_gqa, None, 0.0, None, dropout_p)
        call, out = Call(*given, *how, *(filled or [fill])), None
        if not transformed() and not _saves_selected():
            try:
                out = self._served(call)
            except RuntimeError as error:  # to import its class takes as long as a compiler
                if type(error).__name__ != "GuardOnDataDependentSymNode":
                    raise
        return by_pytorch(call) if out is None else out

    def _served(self, call: Call) -> Any:
        if call.mask is not None:
            return self._masked(call, repeats=False)
        query, key, value, _, is_causal, scale, *_ = call
        how = (is_causal, scale, call.enable_gqa)
        unserved = call.dropout_p or self._planner.unserved(query, key, value, *how)
        if unserved or not self._planner.is_known(query.device.index or 0):
            return None
        return self.ops.attention(query, key, value, is_causal, default_scale(query, scale))

    def masked(self, call: Call, repeats: bool = False) -> Any:
        """One operator for a call with a mask or limits, or None if no kernel can serve it.

        repeats: PyTorch's own gets k and v repeated for the query heads, as transformers does it.
        """
        return self._masked(call, repeats) if plain(call.query, call.key, call.value) else None

    def _masked(self, call: Call, repeats: bool) -> Any:
        query, key, value, mask, _, scale, enable_gqa, limits, softcap, sinks, *_ = call
        if call.dropout_p:
            return None
        if self._planner.unserved(query, key, value, False, scale, enable_gqa):
            return None
        grad = records_gradients(call)
        if limits is not None and self._operator.backward.serves and not softcap and sinks is None:
            grad = False  # `attention_masked` knows more of the sizes
        if why_unserved(call, grad) or not self._planner.is_known(query.device.index or 0):
            return None
        diagonals = (limits is not None, *(limits or (None, None)))
        how = (*diagonals, default_scale(query, scale), softcap, sinks, repeats, call.fill)
        return self.ops.attention_masked(query, key, value, mask, *how)

    # ---- what the operators compute ----
    def attention(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float
    ) -> torch.Tensor:
        """Attention of a compiled call: PyTorch's if sizes alone say so, or else `forward`."""
        call = _plain(query, key, value, causal, scale)
        grad = records_gradients(call)
        gpu = self._planner.gpu(query.device.index or 0)
        if gpu is not None and sized(query, key, value):
            choice, _ = choice_of(gpu, call, grad)
            if choice.kernel is None:
                return by_pytorch(call)
        if grad:
            with_lse: tuple[torch.Tensor, ...] = self.ops.forward_lse(
                query, key, value, causal, scale
            )
            return with_lse[0]
        out: torch.Tensor = self.ops.forward(query, key, value, causal, scale)
        return out

    def forward(self, query: Any, key: Any, value: Any, causal: bool, scale: float) -> torch.Tensor:
        """Run by a kernel or by PyTorch, as sizes and strides decide at run time."""
        how = (None, causal, scale, query.shape[1] != key.shape[1])
        done = self._operator.served_soon(query, key, value, *how, lse=False)
        if done is not None:
            own: torch.Tensor = done[0]
            return own
        return like(by_pytorch(_plain(query, key, value, causal, scale)), query, value)

    def forward_lse(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` with the log-sum-exp."""
        how = (None, causal, scale, query.shape[1] != key.shape[1])
        done = self._operator.served_soon(query, key, value, *how, lse=True)
        if done is not None:
            return done[0], done[1]
        return gradients.with_lse(query, key, value, causal, scale)

    def backward(self, grad: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        """The gradients of `forward_lse`; cudnn: of the two that PyTorch has, whose it calls."""
        *saved, causal, scale, cudnn = given
        call = gradients.call_of(grad, saved, None, causal, scale)
        made: Any = self._operator.backward.gradients(call)
        if made is None:
            made = gradients.gradients_by_pytorch(grad, tuple(saved), causal, scale, cudnn)
        return tuple(map(like, made, saved[:3], saved[:3]))

    def attention_masked(self, query: Any, key: Any, value: Any, mask: Any, *how: Any) -> Any:
        """As `attention`, with a mask or diagonals and lengths, and changed scores."""
        gpu = self._planner.gpu(query.device.index or 0)
        call, limits = _masked_call(query, key, value, mask, *how), how[1:3]
        if records_gradients(call):
            plain_scores = call.limits is not None and not call.changes_scores
            if plain_scores and self._intervals.may_serve(call):
                ranges = None if mask is None else key_ranges(query, key, mask)
                given = (query, key, value, ranges, *limits, call.scale)
                return self.ops.forward_intervals_lse(*given)[0]
            return _masked_by_pytorch(call, *how)
        known = all(n is None or type(n) is int for n in limits) and sized(query, key, value)
        if gpu is not None and known:
            choice, _ = choice_of(gpu, call)
            if choice.kernel is None:
                return _masked_by_pytorch(call, *how)
        return self.ops.forward_masked(query, key, value, mask, *how)

    def forward_masked(self, query: Any, key: Any, value: Any, mask: Any, *how: Any) -> Any:
        """A compiler's call, which may use the mask's memory for other tensors: no list stays."""
        diagonals, _, _, scale, softcap, sinks, *_ = how
        if diagonals or softcap or sinks is not None:
            done = self._operator.served(_masked_call(query, key, value, mask, *how))
        else:
            given = (query, key, value, mask, False, scale, True)
            done = self._operator.served_soon(*given, keep=False)
        if done is not None:
            return done[0]
        call = _masked_call(query, key, value, mask, *how)
        return like(_masked_by_pytorch(call, *how), query, value)


def _saves_selected() -> bool:
    """Whether a policy of a selective checkpoint looks at operators: it names PyTorch's own."""
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__name__ == "_CachingTorchDispatchMode" for mode in modes)


def default_scale(query: Any, scale: float | None) -> float:
    """The scale of a call, for an operator."""
    return scale if scale is not None else query.shape[3] ** -0.5


def _plain(query: Any, key: Any, value: Any, causal: bool, scale: float) -> Call:
    """A call without a mask, as these operators have it."""
    grouped = query.shape[1] != key.shape[1]  # a compiler's, and no bool()
    return Call(query, key, value, None, causal, scale, grouped)


def _masked_call(query: Any, key: Any, value: Any, mask: Any, *how: Any) -> Call:
    diagonals, low, high, scale, softcap, sinks, _, fill = how
    limits = (low, high) if diagonals else None
    given = (query, key, value, mask, False, scale, True, limits, softcap, sinks)
    return Call(*given, fill=fill, keep=False)


def _masked_by_pytorch(call: Call, *how: Any) -> torch.Tensor:
    *_, repeats, _ = how
    query, key, value, *_ = call
    grouped = bool(query.shape[1] != key.shape[1])
    if grouped and repeats:
        groups, grouped = query.shape[1] // key.shape[1], False
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    return by_pytorch(call._replace(key=key, value=value, enable_gqa=grouped))
