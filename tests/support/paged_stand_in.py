"""Kernels of paged caches in PyTorch, which stand in for a card's: they read addresses and numbers. Needs PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import ANY, patch

import torch

from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import LOG2E
from attnsweep.serve import mla, paged_attention, paged_call, paged_launch, paged_others, paged_plans, paged_store
from attnsweep.serve.known_calls import KnownCalls
from attnsweep.serve.paged_call import FP8, Arguments

MODULES = (mla, paged_attention, paged_call, paged_launch, paged_plans, paged_store)
FAR = 2**30


def memory(address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that lies at an address."""
    if 0 in shape:
        return torch.empty(*shape, dtype=dtype)
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    owned = (ctypes.c_uint8 * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(owned, dtype=dtype).as_strided(tuple(shape), tuple(strides))


def ints(address: int, count: int) -> torch.Tensor:
    return memory(address, (count,), (1,), torch.int32)


class Launches:
    """Launches as `bound` makes them, that compute when they are issued."""

    def __init__(self, kernels: Sequence[Any], index: int, names: Sequence[str], tensors: Any = None) -> None:
        self.kernels, self.names, self.tensors = kernels, names, tensors or {}

    def issue(self, addresses: Sequence[int], stream: int) -> None:
        assert len(addresses) == len(self.names)
        at = dict(zip(self.names, addresses, strict=True))
        for kernel in self.kernels:
            args = [at[arg] if isinstance(arg, str) else arg for arg in kernel.launch.args]
            COMPUTE[kernel.launch.function](args, kernel.defines, self.tensors, at)


def _sides(defines: Mapping[str, str], left: int, right: int) -> tuple[int, int]:
    """The sides of a mask as the machine code has them."""
    if int(defines["WINDOW"]):
        return (left if left < FAR else -1, right if right < FAR else -1)
    return (-1, 0 if int(defines["CAUSAL"]) else -1)


def _sixteen(defines: Mapping[str, str]) -> torch.dtype:
    return torch.bfloat16 if int(defines["IS_BF16"]) else torch.float16


def _compute(
    to: torch.Tensor,
    lse: int,
    defines: Mapping[str, str],
    *,
    q: Any,
    caches: Sequence[Any],
    lengths: Any,
    table: Any,
    numbers: tuple[Any, ...],
    scales: Sequence[Any] = (None, None),
    sinks: Any = None,
    begins: Any = None,
    qv: Any = None,
) -> None:
    """Put the output of a call there, and its log-sum-exps at an address."""
    (k, v), (k_scale, v_scale), (by, softcap, sides) = caches, scales, numbers
    assert all(each.data_ptr() % 16 == 0 for each in (to, q, k, v)), "a kernel copies 16 bytes at a time"
    call = Arguments(q, k, v, lengths, table, k_scale, v_scale, sinks, by / LOG2E, softcap, sides, True, qv=qv)
    if begins is not None:
        call = call._replace(begins=begins, most_rows=max(0, int(begins.diff().max())))
    gathered = paged_others.by_gather
    out, sums = gathered(call) if begins is None else paged_others._unpacked(call, gathered)
    to.copy_(out)
    if int(defines["LSE"]):
        memory(lse, (sums.numel(),), (1,), torch.float32).copy_(sums.flatten())


def _decode(args: list[Any], defines: Mapping[str, str], _: Any, at: Mapping[str, int]) -> None:
    q, k, v, o, table, lengths, k_scale, v_scale, sinks, lse, _, _, _, runs, *numbers = args
    batch, heads_kv, group, rows, pages, blocks, left, right, scale, softcap, *strides = numbers
    of_q, of_o, of_cache, (of_table, *of_scales) = strides[:3], strides[3:6], strides[6:9], strides[9:]
    page, columns, dtype = int(defines["PAGE_SIZE"]), int(defines["HEAD_DIM"]), _sixteen(defines)
    stored = FP8 if int(defines["CACHE_E4M3"]) else dtype

    def of_rows(address: int, steps: Sequence[int]) -> torch.Tensor:
        return memory(address, (batch, heads_kv * group, rows, columns), (*steps, 1), dtype).transpose(1, 2)

    caches = [memory(each, (pages, page, heads_kv, columns), (*of_cache, 1), stored) for each in (k, v)]
    # Blocks have the runs of the lengths that the schedule was made for.
    _compute(
        of_rows(o, of_o),
        lse,
        defines,
        q=of_rows(q, of_q),
        caches=caches,
        lengths=ints(runs if int(defines["SCHEDULE"]) else lengths, batch),
        table=memory(table, (batch, blocks), (of_table, 1), torch.int32),
        scales=_scales(defines, (k_scale, v_scale), (batch, heads_kv), of_scales),
        sinks=memory(sinks, (heads_kv * group,), (1,), torch.float32) if "SINKS" in defines else None,
        numbers=(scale, softcap if "SOFTCAP" in defines else 0.0, _sides(defines, left, right)),
    )


def _scales(defines: Mapping[str, str], at: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> list[Any]:
    if not int(defines.get("CACHE_E4M3", 0)):
        return [None, None]
    return [memory(each, shape, strides, torch.float32) for each in at]


def _append(args: list[Any], defines: Mapping[str, str], tensors: Any, at: Mapping[str, int]) -> None:
    _, _, _, o, table, lengths, begin, end, sinks, lse, _, _, *numbers = args
    batch, heads_kv, group, _, _, blocks, left, right, scale, softcap, *rest = numbers
    of_o, of_table, of_rows = rest[:3], rest[3], rest[4:]
    page, dtype, packed = int(defines["PAGE_SIZE"]), _sixteen(defines), int(defines["QUERIES"])
    stored = FP8 if int(defines.get("CACHE_E4M3", 0)) else dtype
    q = memory(at["q"], tensors["q"].sizes, tensors["q"].strides, dtype)
    sizes, steps = tensors["k"]
    if of_rows:  # copied by rows, and not by a map
        k_scale, v_scale, pages, *own = of_rows
        assert (pages, *own[:3]) == (sizes[0], steps[0], steps[2], steps[1])
    else:
        k_scale, v_scale, own = 0, 0, [0] * 5
    caches = [memory(at[name], sizes, steps, stored).transpose(1, 2) for name in "kv"]
    assert caches[0].shape[1] == page
    out = memory(o, q.shape, (of_o[0], of_o[2], of_o[1], 1), dtype)
    begins = None
    if packed:
        assert end == begin + 4
        begins, q, out = ints(begin, batch + 1), q[0], out[0]
    _compute(
        out,
        lse,
        defines,
        q=q,
        caches=caches,
        lengths=ints(lengths, batch),
        table=memory(table, (batch, blocks), (of_table, 1), torch.int32),
        scales=_scales(defines, (k_scale, v_scale), (batch, heads_kv), own[3:]),
        sinks=memory(sinks, (heads_kv * group,), (1,), torch.float32) if "SINKS" in defines else None,
        numbers=(scale, softcap if "SOFTCAP" in defines else 0.0, _sides(defines, left, right)),
        begins=begins,
    )


def _latent(args: list[Any], defines: Mapping[str, str], tensors: Any, at: Mapping[str, int]) -> None:
    _, _, _, lengths, table, _, o, lse, *_, rows, heads, queries, _, blocks, of_table, scale = args
    (batch, *_, columns), (of_item, *_) = tensors["q"]
    (pages, _, page, _), (of_page, _, of_slot, _) = tensors["k"]
    dtype, value = _sixteen(defines), mla.HEAD_DIM_V
    q = memory(at["q"], (batch, queries, heads, columns), (of_item, heads * columns, columns, 1), dtype)
    cache = memory(at["k"], (pages, page, 1, columns), (of_page, of_slot, columns, 1), dtype)
    assert rows == heads * queries
    if int(defines["PLANNED"]):  # of as many requests, whatever their lengths were
        assert ints(at["first_slot"], batch + 1).tolist() == [*range(batch + 1)]
    shape = (batch, queries, heads, value)
    _compute(
        memory(o, (batch * queries * heads * value,), (1,), dtype).view(shape),
        lse,
        defines,
        q=q[..., value:],
        caches=(cache[..., value:], cache[..., :value]),
        lengths=ints(lengths, batch),
        table=memory(table, (batch, blocks), (of_table, 1), torch.int32),
        numbers=(scale, 0.0, (-1, 0 if int(defines["CAUSAL"]) else -1)),
        qv=q[..., :value],
    )


def _plan(args: list[Any], *_: Any) -> None:
    first_slot, batch = args[2], args[4]
    ints(first_slot, batch + 1).copy_(torch.arange(batch + 1))


def _schedule(args: list[Any], *_: Any) -> None:
    lengths, runs, batch = args[:3]
    ints(runs, batch).copy_(ints(lengths, batch))


def _store(args: list[Any], defines: Mapping[str, str], *_: Any) -> None:
    new_k, new_v, k, v, lengths, table, made, batch, rows, heads, pages, blocks, of_table, *steps = args
    width = int(defines["BYTES"])
    row, page = int(defines["PIECES"]) * width, int(defines["PAGE_SIZE"])
    of = [width * step for step in steps]

    def rows_of(address: int, first: int, second: int, strides: Sequence[int]) -> torch.Tensor:
        return memory(address, (first, second, heads, row), (*strides, 1), torch.uint8)

    before = ints(lengths, batch)
    given = rows_of(new_k, batch, rows, of[:3]), rows_of(new_v, batch, rows, of[3:6])
    to_k, to_v = (rows_of(each, pages, page, of[6:]) for each in (k, v))
    behind = memory(table, (batch, blocks), (of_table, 1), torch.int32)
    ints(made, batch).copy_(paged_store._on_the_host(to_k, to_v, *given, before, behind))


COMPUTE: dict[str, Callable[..., None]] = {
    "decode_paged_mma": _decode,
    "decode_paged_schedule": _schedule,
    "append_paged_wgmma": _append,
    "flash_mla_wgmma": _latent,
    "flash_mla_wgmma_combine": lambda *_: None,  # parts are joined at once
    "flash_mla_wgmma_plan": _plan,
    "store_in_pages": _store,
}


def _off_the_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with tensors that are the CPU's again: PyTorch computes what it computes."""

    def called(*given: Any) -> Any:
        with patch.object(torch.Tensor, "is_cuda", property(lambda _: False)):
            return function(*given)

    return called


@contextmanager
def paged_stand_in() -> Iterator[None]:
    """Have tensors of the CPU served as those of an H200, by kernels in PyTorch."""
    facts = {
        "bound": Launches,
        "arch_of": lambda _: arch_named("sm_90a"),
        "name_of": lambda _: "H200",
        "current_device": lambda: ANY,  # that of these tensors
        "raw_stream": lambda _: 7,
        "is_capturing": lambda: False,
        "by_others": _off_the_card(paged_others.by_others),
        "_plans": {},
        "_served": {},
        "_known": KnownCalls(),
        "_known_in_parts": KnownCalls(),
        "known_calls": KnownCalls(),
    }
    patches: list[Any] = [
        patch.object(module, name, fact) for module in MODULES for name, fact in facts.items() if hasattr(module, name)
    ]
    patches.append(patch.object(paged_launch.Kept, "at", lambda self, *_: self._none))
    patches.append(patch.object(torch.cuda, "device", lambda _: nullcontext()))
    patches.append(patch.object(torch.Tensor, "is_cuda", property(lambda _: True)))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches[::-1]:
            each.stop()
        for cache in (paged_plans._choice, paged_plans.schedule_of, paged_store._launches, mla._of_plan):
            cache.cache_clear()
