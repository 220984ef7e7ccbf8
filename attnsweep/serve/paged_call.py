"""What a call of `flash_attn_with_kvcache` means: its tensors in the form of a paged cache."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attnsweep.serve.runtime.call import DTYPES as DTYPES
from attnsweep.serve.runtime.intervals import sides_of_flash_attn
from attnsweep.serve.runtime.launcher import is_capturing

FP8 = torch.float8_e4m3fn
STORED = {FP8: "e4m3"}
"""The cache_dtype of a problem whose cache is not as its queries."""
UNMASKED = (-1, -1)  # a window of all keys
PAGE_OF_DENSE = 16  # slots that a dense cache is cut into


class Arguments(NamedTuple):
    """A call whose arguments fit together; the cache is paged.

    q: (batch, seqlen_q, heads, head_dim), or with `begins` (tokens, heads, head_dim): int32
    (batch + 1,), where the tokens of each request begin, of which it has at most `most_rows`.
    k, v: (pages, page_size, heads_kv, head_dim). table: int32 (batch, blocks). sides: keys before
    and after a query's own, -1 for all of them. qv: as q with the columns of v, which are keys of
    it: its products with them are added to those of q and k.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    sinks: torch.Tensor | None
    scale: float
    softcap: float
    sides: tuple[int, int]
    lse: bool
    begins: torch.Tensor | None = None
    most_rows: int = 0
    qv: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.lengths)

    @property
    def rows(self) -> int:
        """Queries of a request, at most."""
        return self.q.shape[1] if self.begins is None else self.most_rows

    @property
    def of_out(self) -> tuple[int, ...]:
        """The shape of the output."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def of_lse(self) -> tuple[int, ...]:
        """The shape of the log-sum-exps."""
        *first, heads, _ = self.q.shape
        return (first[0], heads, first[1]) if self.begins is None else (heads, *first)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a plan depends on: all but addresses."""
        q, k, table, scales = self.q, self.k, self.table, (self.k_scale, self.v_scale)
        numbers = (self.scale, self.softcap, self.sides, self.sinks is None, self.lse)
        of_tables = (table.shape, table.stride(0), self.rows)
        sizes = (q.shape, q.stride(), k.shape, k.stride(), self.v.stride(), *of_tables)
        of_scales = [None if scale is None else scale.stride() for scale in scales]
        return (*sizes, q.dtype, k.dtype, *of_scales, *numbers, q.device.index)


def understood(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    table: Any,
    k_scale: Any,
    v_scale: Any,
    sinks: Any,
    scale: float | None,
    softcap: float,
    causal: bool,
    window: Sequence[int],
    lse: bool,
    begins: Any = None,
    most_rows: int | None = None,
    qv: Any = None,
) -> Arguments:
    """The call that these arguments mean. Raises TypeError or ValueError."""
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    for name, tensor in (named if qv is None else named | {"qv": qv}).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, not a tensor")
        packed = name in ("q", "qv") and begins is not None
        if tensor.dim() != 4 - packed:
            many = "three dimensions beside cu_seqlens_q" if packed else "four dimensions"
            raise ValueError(f"{name} is {tuple(tensor.shape)}: it has {many}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, and q on {q.device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: head_dim is not contiguous")
    if q.dtype not in DTYPES:
        raise TypeError(f"q is {q.dtype}: it is float16 or bfloat16")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, FP8):
        raise TypeError(
            f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}: both are as q, {q.dtype}, or "
            "float8_e4m3fn"
        )
    if qv is not None:
        _check_latent(q, k_cache, v_cache, qv)
    elif k_cache.shape != v_cache.shape:
        sizes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache have the shapes {sizes}, not the same")
    *_, heads, head_dim = q.shape
    batch = q.shape[0] if begins is None else _requests(q, begins, most_rows)
    pages, page_size, heads_kv, columns = k_cache.shape
    if columns != head_dim:
        raise ValueError(f"k_cache has rows of {columns} elements, and q of {head_dim}")
    if not heads_kv or heads % heads_kv:
        raise ValueError(f"{heads} heads of q are no multiple of {heads_kv} of k_cache")
    if not page_size or not pages:
        raise ValueError(f"k_cache is {tuple(k_cache.shape)}: it has no slots")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        own = sorted(zip(tensor.stride(), tensor.shape, strict=True))
        own = [(stride, size) for stride, size in own if size > 1]
        overlaps = any(a[0] * a[1] > b[0] for a, b in itertools.pairwise(own))
        if overlaps or any(stride <= 0 for stride, _ in own):
            raise ValueError(f"{name} has strides {tensor.stride()}: its slots overlap")
    if table is None:
        if pages != batch:
            raise ValueError(f"a cache without a table has {batch} requests as q, not {pages}")
        k_cache, v_cache = _in_pages(k_cache, v_cache)
        table = _rows(k_cache, batch)
    elif page_size not in (1, 2, 4) and page_size % 8:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)}, with pages of {page_size} slots, which no kernel "
            "reads: make pages of 1, 2, 4 or a multiple of 8 slots"
        )
    check_whole("page_table", table, 2)
    if table.shape[0] != batch or table.device != q.device or table.stride(1) != 1:
        what = f"{tuple(table.shape)} on {table.device} with strides {table.stride()}"
        raise ValueError(f"page_table is {what}: it has a contiguous row of each of {batch}")
    if lengths is None:
        lengths = torch.full((batch,), table.shape[1] * k_cache.shape[1], device=q.device)
        lengths = lengths.int()
    elif isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    check_whole("cache_seqlens", lengths, 1)
    if lengths.shape != (batch,) or lengths.device != q.device or not lengths.is_contiguous():
        raise ValueError(
            f"cache_seqlens is {tuple(lengths.shape)} on {lengths.device}: it has {batch} numbers "
            f"on {q.device}"
        )
    k_scale, v_scale = _scales(batch, k_cache, (k_scale, v_scale))
    if sinks is not None:
        if not isinstance(sinks, torch.Tensor) or sinks.shape != (heads,):
            raise ValueError(f"sinks are a tensor of {heads} numbers, one of each head of q")
        sinks = sinks.float().contiguous()
    for name, number in (("softmax_scale", scale), ("softcap", softcap)):
        if isinstance(number, torch.Tensor):
            raise TypeError(
                f"{name} is a tensor, which may change between calls that share a plan: give a "
                "number, as its item() is"
            )
    if not softcap >= 0 or math.isinf(softcap):
        raise ValueError(f"softcap is 0 or above, and finite, not {softcap}")
    left, right = sides_of(window)
    columns += 0 if qv is None else qv.shape[-1]
    by = columns**-0.5 if scale is None else float(scale)
    if not math.isfinite(by):
        raise ValueError(f"softmax_scale is a finite number, not {scale}")
    sides = (left, 0 if causal else right)
    rest = (k_scale, v_scale, sinks, by, float(softcap), sides, lse, begins, most_rows or 0)
    return Arguments(q, k_cache, v_cache, lengths, table, *rest, qv)


def check_whole(name: str, tensor: Any, dims: int) -> None:
    """Raise TypeError or ValueError unless this is an int32 tensor of `dims` dimensions."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}, not an int32 tensor")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} is {tensor.dtype}, not torch.int32: give {name}.int()")
    if tensor.dim() != dims:
        what = "has one dimension" if dims == 1 else "is (batch, blocks)"
        raise ValueError(f"{name} is {tuple(tensor.shape)}: it {what}")


def sides_of(window: Any) -> tuple[int, int]:
    """How many keys a window shows to the left and the right; -1 is all. Raises TypeError."""
    left, right = sides_of_flash_attn(window)
    left, right = (-1 if side is None or side < 0 else int(side) for side in (left, right))
    return left, right


def _check_latent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor) -> None:
    """Raise TypeError or ValueError for queries of values that do not fit."""
    if qv.dtype != q.dtype:
        raise TypeError(f"qv is {qv.dtype}, and q {q.dtype}: they have one dtype")
    if k.shape[:3] != v.shape[:3]:
        sizes = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(f"k_cache and v_cache have the shapes {sizes}, not the same slots")
    if k.shape[2] != 1:
        raise ValueError(f"k_cache has {k.shape[2]} heads: beside qv it has one, of latent keys")
    if qv.shape != (own := (*q.shape[:-1], v.shape[-1])):
        raise ValueError(f"qv is {tuple(qv.shape)}, not {own}: q's rows with v_cache's columns")


def _requests(q: torch.Tensor, begins: Any, most_rows: Any) -> int:
    """How many requests a packed call has."""
    check_whole("cu_seqlens_q", begins, 1)
    if not len(begins) or begins.device != q.device or not begins.is_contiguous():
        what = f"{tuple(begins.shape)} on {begins.device}"
        raise ValueError(f"cu_seqlens_q is {what}: it has where each request begins, on {q.device}")
    if not isinstance(most_rows, int) or most_rows < 0:
        raise TypeError(f"max_seqlen_q is the most tokens of a request, not {most_rows!r}")
    return len(begins) - 1


def _scales(batch: int, k: torch.Tensor, given: Sequence[Any]) -> list[Any]:
    """The scales of an FP8 cache, float32 (batch, heads_kv); without, 1."""
    if k.dtype != FP8:
        if any(scale is not None for scale in given):
            raise ValueError(f"k_descale and v_descale are of an FP8 cache, not of {k.dtype}")
        return [None, None]
    shape, made = (batch, k.shape[2]), []
    for name, scale in zip(("k_descale", "v_descale"), given, strict=True):
        if scale is None:
            scale = torch.ones((), dtype=torch.float32, device=k.device)
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
            raise TypeError(f"{name} is a float32 tensor {shape}, (batch, heads_kv)")
        if scale.numel() != 1 and scale.shape != shape:
            raise ValueError(f"{name} is {tuple(scale.shape)}, not {shape}, (batch, heads_kv)")
        if scale.device != k.device:
            raise ValueError(f"{name} is on {scale.device}, and k_cache on {k.device}")
        made.append(scale if scale.shape == shape else scale.reshape(1, 1).expand(shape))
    return made


def _in_pages(*caches: torch.Tensor) -> list[torch.Tensor]:
    """Dense caches (batch, seqlen_k, heads_kv, head_dim) as pages: of each request one, or more
    where requests are a whole number of them apart in K and in V.
    """
    page, made = PAGE_OF_DENSE, []
    for cache in caches:
        batch, seqlen, heads, columns = cache.shape
        of_item, of_slot, of_head, one = cache.stride()
        if seqlen % page or (batch > 1 and of_item != seqlen * of_slot):
            return [*caches]
        shape = (batch * seqlen // page, page, heads, columns)
        made.append(cache.as_strided(shape, (page * of_slot, of_slot, of_head, one)))
    return made


@functools.lru_cache(maxsize=64)
def _table_of(batch: int, blocks: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)


def _rows(cache: torch.Tensor, batch: int) -> torch.Tensor:
    """The table of a dense cache in pages."""
    blocks = len(cache) // batch
    # What is made in the capture of a graph has values when that is replayed, and not before.
    once = torch.compiler.is_compiling() or (cache.is_cuda and is_capturing())
    return (_table_of.__wrapped__ if once else _table_of)(batch, blocks, cache.device)


def check_output(call: Arguments, out: Any) -> None:
    """Raise TypeError or ValueError for an output that is given and is not as the call's.

    Nor may it lie where the call reads: other blocks may read a row when one has written it.
    """
    own = (call.of_out, call.q.dtype, call.q.device)
    if not isinstance(out, torch.Tensor | None):
        raise TypeError(f"out is {type(out).__name__}, not a tensor")
    if out is not None and (tuple(out.shape), out.dtype, out.device) != own:
        what = f"{tuple(out.shape)}, {out.dtype} on {out.device}"
        raise ValueError(f"out is {what}, and the output {own[0]}, {own[1]} on {own[2]}")
    if out is None or torch.compiler.is_compiling():  # compiled code copies its output
        return
    for name, tensor in (("q", call.q), ("k_cache", call.k), ("v_cache", call.v), ("qv", call.qv)):
        if tensor is not None and _share(out, tensor):
            raise ValueError(
                f"out and {name} share memory, and kernels read {name} while they write out: give "
                "another tensor, or none"
            )


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return int(tensor.element_size() * (last + 1))


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have an element's memory in common; asks the host alone."""
    if not -extent(b) < b.data_ptr() - a.data_ptr() < extent(a):
        return False
    (of_a, wide_a), (of_b, wide_b) = _runs(a), _runs(b)
    before = torch.searchsorted(of_b, of_a + wide_a) - 1  # of b, the last begun by then
    return bool(((before >= 0) & (of_b[before.clamp(min=0)] + wide_b > of_a)).any())


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where the contiguous rows of a tensor begin, in order, and their bytes."""
    size = tensor.element_size()
    whole = tensor.shape[-1] if tensor.stride(-1) == 1 else 1
    begins = torch.zeros(1, dtype=torch.int64)
    rows = tensor[..., :1] if whole > 1 else tensor
    for count, stride in zip(rows.shape, rows.stride(), strict=True):
        begins = (begins[:, None] + torch.arange(count) * stride).flatten()
    return begins.sort().values * size + tensor.data_ptr(), whole * size


def check_values(call: Arguments) -> None:
    """Raise ValueError for impossible lengths, tables and scales on the device; waits for it."""
    capacity = call.table.shape[1] * call.k.shape[1]
    lengths, table = call.lengths.cpu(), call.table.cpu()
    if bool((lengths < 0).any()) or bool((lengths > capacity).any()):
        at = int(((lengths < 0) | (lengths > capacity)).nonzero()[0])
        what = f"cache_seqlens[{at}] is {int(lengths[at])}"
        raise ValueError(f"{what}: page_table has room for 0 to {capacity}")
    blocks = (lengths + call.k.shape[1] - 1) // call.k.shape[1]
    inside = torch.arange(table.shape[1]) < blocks[:, None]
    wrong = (inside & ((table < 0) | (table >= call.k.shape[0]))).nonzero()
    if len(wrong):
        row, column = map(int, wrong[0])
        what = f"page_table[{row}, {column}] is {int(table[row, column])}"
        raise ValueError(f"{what}: the cache has pages 0 to {call.k.shape[0] - 1}")
    if call.begins is not None:
        counts = call.begins.cpu().diff()
        last, tokens = int(call.begins[-1]), call.q.shape[0]
        if int(call.begins[0]) or last != tokens or bool((counts < 0).any()):
            raise ValueError(f"cu_seqlens_q does not rise from 0 to the {tokens} tokens of q")
        if len(counts) and int(counts.max()) > call.most_rows:
            most = f"max_seqlen_q is {call.most_rows}"
            raise ValueError(f"{most}, and a request has {int(counts.max())} tokens")
    for name, scale in (("k_descale", call.k_scale), ("v_descale", call.v_scale)):
        if scale is not None and not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise ValueError(f"{name} has numbers that are not finite or not above 0")
