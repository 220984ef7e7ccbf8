"""New keys and values of a step, stored behind those that requests have in their pages."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnsweep.core.files import shipped
from attnsweep.core.problem import ceil_div
from attnsweep.family.family import Launch
from attnsweep.serve.paged_call import Arguments
from attnsweep.serve.paged_launch import Kernel, bound
from attnsweep.serve.runtime.driver import BoundLaunches
from attnsweep.serve.runtime.launcher import raw_stream

_SOURCE = "common/store_in_pages.cu"
_NAMES = ("new_k", "new_v", "k", "v", "seqused_k", "block_table", "lengths")
_THREADS, _MOST_BLOCKS = 256, 4096


def with_new_keys(call: Arguments, k: Any, v: Any) -> Arguments:
    """The call behind k and v, (batch, new, heads_kv, head_dim), which are stored in its cache.

    Its lengths then count them. Raises TypeError or ValueError.
    """
    if k is None or v is None:
        raise TypeError("k and v are appended together: give both")
    batch, (heads_kv, columns) = call.batch, call.k.shape[2:]
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != call.k.dtype:
            raise TypeError(f"{name} is a tensor of the cache's dtype, {call.k.dtype}")
        own = tensor.shape
        fits = len(own) == 4 and (own[0], *own[2:]) == (batch, heads_kv, columns)
        if not fits or own != k.shape or tensor.device != call.k.device:
            what = f"{tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name} is {what}, not ({batch}, new, {heads_kv}, {columns})")
        if tensor.stride(3) != 1 and columns > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: head_dim is not contiguous")
    if not k.numel():
        return call
    return call._replace(lengths=_stored(call.k, call.v, k, v, call.lengths, call.table))


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "attnsweep::store_in_pages",
    mutates_args=("cache_k", "cache_v"),
    schema="(Tensor(a!) cache_k, Tensor(b!) cache_v, Tensor k, Tensor v, Tensor lengths, "
    "Tensor table) -> Tensor",
)
def _stored(cache_k: torch.Tensor, cache_v: torch.Tensor, *behind: torch.Tensor) -> torch.Tensor:
    """The lengths with the new keys, which are stored."""
    k, v, lengths, table = behind
    if not k.is_cuda:
        return _on_the_host(cache_k, cache_v, *behind)
    if cache_k.stride() != cache_v.stride():  # the kernel has one set of them
        _on_the_card(cache_k, cache_k, k, k, lengths, table)
        return _on_the_card(cache_v, cache_v, v, v, lengths, table)
    return _on_the_card(cache_k, cache_v, *behind)


def _on_the_card(*tensors: torch.Tensor) -> torch.Tensor:
    cache_k, cache_v, k, v, lengths, table = tensors
    made, size = torch.empty_like(lengths), k.element_size()
    given = (k, v, cache_k, cache_v, lengths, table, made)
    addresses = tuple(tensor.data_ptr() for tensor in given)
    steps = [k.shape[3] * size, *addresses[:4]]
    for tensor in given[:4]:
        steps += [stride * size for stride in tensor.stride()[:3]]
    width = next(width for width in (16, 8, 4, 2, 1) if all(step % width == 0 for step in steps))
    index = k.device.index or 0
    of_call = tuple((tensor.shape, tensor.stride()) for tensor in (k, v, cache_k, cache_v, table))
    with torch.cuda.device(index):
        _launches(of_call, size, width, index).issue(addresses, raw_stream(index))
    return made


@_stored.register_fake  # type: ignore[untyped-decorator]
def _(*given: Any) -> torch.Tensor:
    return torch.empty_like(given[4])


@functools.lru_cache(maxsize=256)
def _launches(of_call: Any, size: int, width: int, index: int) -> BoundLaunches:
    (shape, of_k), (_, of_v), (of_pages, of_cache), _, (of_table, table_strides) = of_call
    batch, rows, heads, columns = shape
    pieces = columns * size // width
    numbers = [batch, rows, heads, of_pages[0], of_table[1], table_strides[0]]
    numbers += [stride * size // width for stride in (*of_k[:3], *of_v[:3], *of_cache[:3])]
    blocks = min(ceil_div(batch * rows * heads * pieces, _THREADS), _MOST_BLOCKS)
    launch = Launch("store_in_pages", (blocks, 1, 1), _THREADS, (*_NAMES, *numbers))
    defines = {"BYTES": width, "PIECES": pieces, "PAGE_SIZE": of_pages[1]}
    source = shipped("kernels") / _SOURCE
    texts = {name: str(value) for name, value in defines.items()}
    return bound([Kernel(launch, source, texts)], index, _NAMES)


def _on_the_host(*tensors: torch.Tensor) -> torch.Tensor:
    cache_k, cache_v, k, v, lengths, table = tensors
    pages, page_size = cache_k.shape[:2]
    keys = lengths.long()[:, None] + torch.arange(k.shape[1])
    blocks = keys.div(page_size, rounding_mode="floor")
    inside = (keys >= 0) & (blocks < table.shape[1])
    of_key = table.long().gather(1, blocks.clamp(0, table.shape[1] - 1))
    inside &= (of_key >= 0) & (of_key < pages)
    for cache, new in ((cache_k, k), (cache_v, v)):
        bits = torch.uint8 if new.element_size() == 1 else torch.int16
        cache.view(bits)[of_key[inside], (keys % page_size)[inside]] = new.view(bits)[inside]
    return (lengths.long() + k.shape[1]).clamp(0, 2**31 - 1).int()
