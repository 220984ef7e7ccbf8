"""Attention as a compiler sees it: the operators in torch.ops, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attnsweep.core.layouts import DENSE
from attnsweep.core.problem import CAUSAL, FULL

from . import backward_operator, gradients
from .backward_operator import IntervalGradients, key_ranges
from .call import Call, plain, records_gradients, sized
from .call_cache import transformed
from .gradients import like
from .intervals import by_pytorch
from .planner import choice_of, forms_of, why_unserved
from .pytorch_calls import attend
from .sdpa_patch import exports
from .torch_ops import OPERATORS, define, differentiate, library_of


class Traced:
    """The operators of a package, by which an Operator serves compiled code.

    The methods with names of OPERATORS are what these compute. ops: the operators themselves.
    """

    def __init__(self, operator: Any, namespace: str, devices: Sequence[str]) -> None:
        self._operator, self._planner = operator, operator.planner
        self._intervals = IntervalGradients(operator)
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
        """What serves a call of PyTorch's function: one of the other operators, or PyTorch.

        PyTorch where torch.func transforms it: it has rules for its own operator alone. And where a
        policy says which operators' outputs are kept for the backward, or sizes are known on the
        device alone, so that nothing can be asked of them.
        """
        given = self._operator.cast(query, key, value)
        if len(asked) == 6:
            *asked, fill = asked  # type: ignore[assignment]
        *masks, scale, enable_gqa = asked
        out: Any = None
        if not transformed() and not _saves_selected():
            try:
                out = self._served(*given, *asked, fill)
            except RuntimeError as error:  # to import its class takes as long as a compiler
                if type(error).__name__ != "GuardOnDataDependentSymNode":
                    raise
        if out is None:
            out = attend(*given, *masks, scale=scale, enable_gqa=enable_gqa, fill=fill)
        return out

    def _served(self, query: Any, key: Any, value: Any, *asked: Any) -> Any:
        attn_mask, dropout_p, is_causal, scale, enable_gqa, fill = asked
        if attn_mask is not None:
            scores: Any = (None, 0.0, None)
            how = (attn_mask, is_causal, scale, enable_gqa, *scores, dropout_p, fill)
            return self._masked(Call(query, key, value, *how), repeats=False)
        how = (is_causal, scale, enable_gqa)
        unserved = dropout_p or self._planner.unserved(query, key, value, *how)
        if unserved or not self._planner.is_known(query.device.index or 0):
            return None
        return self.ops.attention(query, key, value, is_causal, default_scale(query, scale))

    def masked(self, call: Call, repeats: bool = False) -> Any:
        """One operator for a call with a mask or limits, or None if no kernel can serve it.

        repeats: PyTorch's own gets k and v repeated for the query heads, as transformers does it.
        """
        return self._masked(call, repeats) if plain(call.query, call.key, call.value) else None

    def _masked(self, call: Call, repeats: bool) -> Any:
        query, key, value, mask, _, scale, enable_gqa, limits, *others = call
        softcap, sinks, dropout_p, fill = others
        if dropout_p:
            return None
        if self._planner.unserved(query, key, value, False, scale, enable_gqa):
            return None
        grad = records_gradients(call)
        if limits is not None and self._operator.backward.serves and not softcap and sinks is None:
            grad = False  # `attention_masked` knows more of the sizes
        if why_unserved(call, grad) or not self._planner.is_known(query.device.index or 0):
            return None
        diagonals = (limits is not None, *(limits or (None, None)))
        how = (*diagonals, default_scale(query, scale), softcap, sinks, repeats, fill)
        return self.ops.attention_masked(query, key, value, mask, *how)

    # ---- what the operators compute ----
    def attention(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float
    ) -> torch.Tensor:
        """PyTorch's own attention where the sizes say already that it is."""
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        gpu = self._planner.gpu(query.device.index or 0)
        if gpu is not None and sized(query, key, value):
            found = [(CAUSAL if causal else FULL, DENSE)]
            choice, _ = choice_of(gpu, query, key, value, found, grad)
            if choice.kernel is None:
                return _by_pytorch(query, key, value, causal, scale)
        if grad:
            with_lse: tuple[torch.Tensor, ...] = self.ops.forward_lse(
                query, key, value, causal, scale
            )
            return with_lse[0]
        out: torch.Tensor = self.ops.forward(query, key, value, causal, scale)
        return out

    def forward(self, query: Any, key: Any, value: Any, causal: bool, scale: float) -> torch.Tensor:
        """By a kernel or by PyTorch, which sizes and strides decide at run time."""
        done = self._operator.served(query, key, value, causal, scale, False)
        if done is not None:
            own: torch.Tensor = done[0]
            return own
        return like(_by_pytorch(query, key, value, causal, scale), query, value)

    def forward_lse(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the log-sum-exp."""
        done = self._operator.served(query, key, value, causal, scale, True)
        if done is not None:
            return done[0], done[1]
        return gradients.with_lse(query, key, value, causal, scale)

    def backward(self, grad: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        """The gradients of `forward_lse`; cudnn: of the two that PyTorch has, whose it calls."""
        *saved, causal, scale, cudnn = given
        made: Any = self._operator.backward.gradients(grad, tuple(saved), causal, scale)
        if made is None:
            made = gradients.gradients_by_pytorch(grad, tuple(saved), causal, scale, cudnn)
        return tuple(map(like, made, saved[:3], saved[:3]))

    def attention_masked(self, query: Any, key: Any, value: Any, mask: Any, *how: Any) -> Any:
        """As `attention`, with a mask or diagonals and lengths, and changed scores."""
        diagonals, low, high, scale, softcap, sinks, *_ = how
        gpu, limits = self._planner.gpu(query.device.index or 0), (low, high)
        call, padded = _call(query, key, value, mask, *how), mask is not None
        if records_gradients(call):
            plain_scores = diagonals and not softcap and sinks is None
            if plain_scores and self._intervals.may_serve(query, key, value, limits, padded):
                ranges = key_ranges(query, key, mask) if padded else None
                return self.ops.forward_intervals_lse(query, key, value, ranges, *limits, scale)[0]
            return _masked_by_pytorch(query, key, value, mask, *how)
        known = all(n is None or type(n) is int for n in limits) and sized(query, key, value)
        if gpu is not None and known:
            choice, _ = choice_of(gpu, query, key, value, forms_of(call))
            if choice.kernel is None:
                return _masked_by_pytorch(query, key, value, mask, *how)
        return self.ops.forward_masked(query, key, value, mask, *how)

    def forward_masked(self, query: Any, key: Any, value: Any, mask: Any, *how: Any) -> Any:
        """A compiler's call, which may use the mask's memory for other tensors: no list stays."""
        diagonals, _, _, scale, softcap, sinks, *_ = how
        if diagonals or softcap or sinks is not None:
            done = self._operator.masked(_call(query, key, value, mask, *how), keep=False)
        else:  # found by one question if it was met before: a short call waits for the host
            done = self._operator.by_mask(query, key, value, mask, (False, scale, True), False)
        if done is not None:
            return done
        return like(_masked_by_pytorch(query, key, value, mask, *how), query, value)


def _saves_selected() -> bool:
    """Whether a policy of a selective checkpoint looks at operators: it names PyTorch's own."""
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__name__ == "_CachingTorchDispatchMode" for mode in modes)


def default_scale(query: Any, scale: float | None) -> float:
    """The scale of a call, for an operator."""
    return scale if scale is not None else query.shape[3] ** -0.5


def _by_pytorch(query: Any, key: Any, value: Any, causal: bool, scale: float) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    how: Any = (None, 0.0, causal)
    out: torch.Tensor = attend(query, key, value, *how, scale=scale, enable_gqa=grouped)
    return out


def _call(query: Any, key: Any, value: Any, mask: Any, *how: Any) -> Call:
    diagonals, low, high, scale, softcap, sinks, _, fill = how
    limits = (low, high) if diagonals else None
    given = (query, key, value, mask, False, scale, True, limits, softcap, sinks)
    return Call(*given, fill=fill)


def _masked_by_pytorch(query: Any, key: Any, value: Any, *how: Any) -> torch.Tensor:
    *_, repeats, _ = how
    grouped = bool(query.shape[1] != key.shape[1])
    if grouped and repeats:
        groups, grouped = query.shape[1] // key.shape[1], False
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    return by_pytorch(_call(query, key, value, *how)._replace(enable_gqa=grouped))
