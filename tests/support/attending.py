"""The forward kernel in PyTorch, for the fake driver: what a launch computes on the CPU."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch


def tensor_of(tensor_map: dict[str, Any]) -> Any:
    """The tensor that a map describes: (batch, heads, seqlen, head_dim), in bf16."""
    sizes, strides = tensor_map["dims"][::-1], (*tensor_map["strides"][::-1], 2)
    extent = 2 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory = (ctypes.c_uint8 * extent).from_address(tensor_map["pointer"])
    view: Any = np.ndarray(sizes, np.int16, memory, strides=strides)
    return torch.from_numpy(view).view(torch.bfloat16)


class Kernel:
    """What the launches of a call compute: of one with a mask, a scan's bits or bounds, which fwd reads.

    What is hidden is what the machine code is for. Scans are counted. The list of tiles is taken as
    made: it holds its mask's number of tiles.
    """

    def __init__(self) -> None:
        self.scans = 0
        self._intervals: set[int] = set()  # addresses of bounds

    def __call__(self, launch: dict[str, Any]) -> None:
        """Write the bits, the list, or the output and its log-sum-exp."""
        name, values = launch["function"][1], launch["values"]
        if b"ITEM_KEYS=1" in launch["code"] and name.endswith("_mask"):
            self.scans += 1
            by_mask = b" boolean " in launch["code"]
            (self._see_items if by_mask else self._see_ranges)(launch["config"].gridDimX, *values)
        elif name.endswith("_mask"):
            self.scans += 1
            config = launch["config"]
            of_rows = config.blockDimX == 64  # a thread a row: MASK 1
            scan, masks = (self._bound, config.gridDimY) if of_rows else (self._scan, config.gridDimZ)
            scan(masks, *values)
            (self._intervals.add if of_rows else self._intervals.discard)(values[5])
        elif name.endswith("_order"):
            _ints(values[-5], 1)[:] = 77
            _ints(values[-4], 2)[:] = 0
        elif name == "flash_fwd_wide_wgmma":
            self._attend_wide(launch)
        elif name != "flash_fwd_wide_wgmma_combine":  # the parts were joined at once
            self._attend(launch)

    def _scan(self, masks: int, mask: int, *rest: int) -> None:
        _, _, _, _, bits, _, rows, keys, _, _, words, _, of_item, *steps = rest
        for number in range(masks):
            at = mask + number // of_item * steps[0] + number % of_item * steps[1]
            extent = (rows - 1) * steps[2] + (keys - 1) * steps[3] + 1
            memory: Any = (ctypes.c_uint8 * extent).from_address(at)
            seen: Any = np.ndarray((rows, keys), np.uint8, memory, strides=steps[2:])
            padded = np.zeros((rows, 32 * words), bool)
            padded[:, :keys] = seen != 0
            to = _ints(bits + 4 * number * rows * words, rows * words).view(np.uint8)
            to[:] = np.packbits(padded, axis=1, bitorder="little").ravel()

    @staticmethod
    def _see_items(items: int, mask: int, bits: int, to: int, keys: int, words: int, *steps: int) -> None:
        of_item, _, _, of_key = steps
        for item in range(items):
            memory: Any = (ctypes.c_uint8 * ((keys - 1) * of_key + 1)).from_address(mask + item * of_item)
            padded = np.zeros(32 * words, bool)
            padded[:keys] = np.ndarray((keys,), np.uint8, memory, strides=(of_key,)) != 0
            own = _ints(bits + 4 * item * words, words).view(np.uint8)
            own[:] = np.packbits(padded, bitorder="little")
            at = np.flatnonzero(padded)
            first, end = (at[0] // 128 * 128, at[-1] + 1) if len(at) else (0, 0)
            hidden = np.flatnonzero(~padded[first:end])
            _ints(to + 16 * item, 4)[:] = first, end - first, hidden[-1] + 1 if len(hidden) else 0, 0

    @staticmethod
    def _see_ranges(items: int, key_range: int, _: int, to: int, *_rest: int) -> None:
        told = np.array(_ints(key_range, 2 * items)).reshape(items, 2)
        keys = _ints(to, 4 * items).reshape(items, 4)
        keys[:, 0], keys[:, 1] = told[:, 0], np.maximum(told[:, 1] - told[:, 0], 0)
        keys[:, 2:] = 0

    @staticmethod
    def _bound(masks: int, _: int, key_range: int, cu_seqlens_q: int, cu_seqlens_k: int, *rest: int) -> None:
        bounds, _, _, rows, keys, low, high, _, sequences, *_other = rest
        first, end = np.zeros((masks, 1), int), np.full((masks, 1), keys)
        i = at = np.arange(rows)
        if key_range != bounds:
            first, end = np.array(_ints(key_range, 2 * masks)).reshape(masks, 2, 1).swapaxes(0, 1)
        if cu_seqlens_q != bounds:
            of_q, of_k = (_ints(each, sequences + 1) for each in (cu_seqlens_q, cu_seqlens_k))
            own = np.searchsorted(of_q[1:], at, side="right")
            inside = (own < sequences) & (at >= of_q[0])
            own = own.clip(max=sequences - 1)
            first, end = of_k[own], np.where(inside, of_k[own + 1], 0)
            i = at + of_k[own + 1] - of_q[own + 1]
        to = _ints(bounds, 2 * masks * rows).reshape(masks, rows, 2)
        to[..., 0] = np.maximum(np.maximum(first, 0), i + low)
        to[..., 1] = np.minimum(np.minimum(end, keys), i + high + 1)

    def _attend(self, launch: dict[str, Any]) -> None:
        q, k, v, o = map(tensor_of, launch["values"][:4])
        lse, _, heads, group, _, rows, keys, factor, *rest = launch["values"][4:-4]
        assert (heads, rows, keys) == (q.shape[0] * q.shape[1], q.shape[2], k.shape[2])
        k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
        scores = q.float() @ k.mT * (factor / math.log2(math.e))
        compiled = set(launch["code"].decode().split())
        of_items = rest[:4] if "ITEM_KEYS=1" in compiled else []
        masked = compiled & {"boolean", "window", "padded", "packed"} and not of_items
        if listed := rest[:7] if masked else []:
            rest = rest[7:]
        if compiled & {"softcap", "sinks", "bias"}:
            bias, softcap, sinks, of_item, *apart = rest
        if "softcap" in compiled:
            scores = softcap * torch.tanh(scores / softcap)
        if "bias" in compiled:
            bias = tensor_of(bias)
            sizes = zip(bias.shape, q.shape[:3], strict=False)
            assert all(own == int(n > 1) for own, (n, m) in zip(apart, sizes, strict=True) if m > 1)
            scores = scores + bias.float()
        if of_items:
            own = self._seen_of_items(of_items, heads, keys, by_bits="boolean" in compiled)
            scores = scores.masked_fill(~own.view(*q.shape[:2], 1, keys), -math.inf)
        elif listed:
            assert _ints(listed[0], 1)[0] == 77, "a list that was made"
            seen = self._seen(listed, heads, rows, keys).view_as(scores)
            scores = scores.masked_fill(~seen, -math.inf)
        elif "causal" in compiled:
            seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
            scores = scores.masked_fill(~seen, -math.inf)
        if lse:
            _floats(lse, heads * rows)[:] = scores.logsumexp(-1).ravel()
        if "sinks" in compiled:
            assert of_item == q.shape[1]
            sink = _floats(sinks, of_item).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
            scores = torch.cat((scores, sink), 3)
        unseen = (scores[..., :keys] == -math.inf).all(2)[..., None]
        weights = torch.softmax(scores, -1).nan_to_num(0)
        o.copy_(weights[..., :keys] @ v.masked_fill(unseen, 0))

    @staticmethod
    def _attend_wide(launch: dict[str, Any]) -> None:
        *maps, o = launch["values"][:5]
        q, k, v, again = map(tensor_of, maps)
        lse, _, _, ranges, heads, group, rows, seqlen_q, keys, low, high, factor = launch["values"][5:]
        assert (heads, rows, keys) == (q.shape[1], q.shape[2], k.shape[2])
        assert (again.data_ptr(), again.stride()) == (v.data_ptr(), v.stride())
        assert group == heads // k.shape[1]
        compiled = set(launch["code"].decode().split())
        i, j = torch.arange(rows)[:, None] % seqlen_q, torch.arange(keys)
        if "causal" in compiled:
            low, high = -keys, keys - seqlen_q
        elif compiled.isdisjoint({"window", "padded"}):
            low, high = -seqlen_q - keys, seqlen_q + keys
        seen = ((j >= i + low) & (j <= i + high)).expand(*q.shape[:2], rows, keys)
        if "padded" in compiled:
            own = torch.from_numpy(_ints(ranges, 2 * len(q))).view(-1, 2, 1, 1, 1)
            seen = seen & (j >= own[:, 0]) & (j < own[:, 1])
        k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
        scores = (q.float() @ k.mT * (factor / math.log2(math.e))).masked_fill(~seen, -math.inf)
        if lse:
            _floats(lse, q.shape[0] * heads * rows)[:] = scores.logsumexp(-1).ravel()
        v = v.masked_fill(~seen.any(2)[..., None], 0)
        tensor_of(o).copy_(torch.softmax(scores, -1).nan_to_num(0) @ v)

    @staticmethod
    def _seen_of_items(given: list[int], heads: int, keys: int, *, by_bits: bool) -> Any:
        items, bits, of_item, words = given
        told = _ints(items, 4 * (heads // of_item)).reshape(-1, 4)
        at = np.arange(keys)
        own = (told[:, :1] <= at) & (at < told[:, :1] + told[:, 1:2])
        if by_bits:
            packed = _ints(bits, len(told) * words).view(np.uint8)
            unpacked = np.unpackbits(packed, bitorder="little").reshape(len(told), 32 * words)
            own &= unpacked[:, :keys].astype(bool) | (at >= told[:, :1] + told[:, 2:3])
        return torch.from_numpy(own.repeat(of_item, 0))

    def _seen(self, listed: list[int], heads: int, rows: int, keys: int) -> Any:
        _, _, bits, _, _, of_mask, words = listed
        masks = heads // of_mask
        if bits in self._intervals:
            bounds = _ints(bits, 2 * masks * rows).reshape(masks, rows, 2, 1)
            own = (bounds[:, :, 0] <= np.arange(keys)) & (np.arange(keys) < bounds[:, :, 1])
        else:
            packed = _ints(bits, masks * rows * words).view(np.uint8)
            unpacked = np.unpackbits(packed, bitorder="little")
            own = unpacked.reshape(-1, rows, 32 * words)[..., :keys].astype(bool)
        return torch.from_numpy(own.repeat(of_mask, 0))


def _ints(address: int, count: int) -> Any:
    memory: Any = (ctypes.c_int32 * count).from_address(address)
    return np.ndarray((count,), np.int32, memory)


class BackwardKernel(Kernel):
    """What the launches of a forward and of its backward compute, in the stages' workspaces.

    Each launch reads what those ahead of it wrote. gone: a factor of dK, for a kernel that is wrong.
    statistics: the setting of that name.
    """

    def __init__(self, gone: float = 1.0, statistics: int = 0) -> None:
        super().__init__()
        self.gone, self.statistics = gone, statistics
        self._seen_keys: tuple[float, float, int] = (0, 0, 0)

    def __call__(self, launch: dict[str, Any]) -> None:
        """Write the outputs of a stage."""
        stage = launch["function"][1].removeprefix("flash_bwd_wgmma_")
        own, values = getattr(self, f"_{stage}", None), launch["values"]
        if begin := {"queries": 18, "keys": 17}.get(stage):
            compiled = set(launch["code"].decode().split())
            end = begin + (4 if "padded" in compiled else 2 if "window" in compiled else 0)
            limits, values = values[begin:end], [*values[:begin], *values[end:]]
            low, high, *ranges = limits or (-math.inf, 0 if "causal" in compiled else math.inf)
            assert ranges[1:] in ([], [values[begin]]), "of as many heads of an item as the stage has"
            self._seen_keys = (low, high, ranges[0] if ranges else 0)
        with torch.autocast("cpu", enabled=False):
            if own is None:
                super().__call__(launch)
            else:
                own(launch["config"].gridDimY, *values)

    def _delta(self, heads: int, o: int, do: int, lse: int, *rest: int) -> None:
        neg_lse, delta, sums, rows, pitch, lse_by, of_batch, *apart = rest
        sizes = (heads // of_batch, of_batch, rows, 64)
        out, d_out = (_raw(each, sizes, apart[i : i + 3]) for i, each in ((0, o), (3, do)))
        self._statistics(heads, rows, pitch, out, d_out, lse, neg_lse, delta, lse_by)
        _floats(sums, heads * pitch * 64)[:] = 0

    @staticmethod
    def _statistics(heads: int, rows: int, pitch: int, *given: Any) -> None:
        out, d_out, lse, neg_lse, delta, lse_by = given
        own, of_row = (_floats(each, heads * pitch).view(heads, pitch) for each in (neg_lse, delta))
        own[:], of_row[:] = -math.inf, 0
        own[:, :rows] = _floats(lse, heads * rows).view(heads, rows) * -lse_by
        own[own == math.inf] = -math.inf  # of a query that sees no key
        of_row[:, :rows] = (out.float() * d_out.float()).sum(-1).view(heads, rows)

    def _weights(self, q: Any, k: Any, neg_lse: int, pitch: int, factor: float) -> Any:
        batch, heads, rows, _ = q.shape
        own = _floats(neg_lse, batch * heads * pitch).view(batch, heads, pitch)[..., :rows, None]
        by = factor if self.statistics > 1 else 1.0  # of what `own` is added to
        scores = q.float() @ k.mT * (factor / by)
        return torch.exp2((self._hidden(scores) + own) * by)

    def _hidden(self, scores: Any) -> Any:
        low, high, ranges = self._seen_keys
        batch, _, rows, keys = scores.shape
        at = torch.arange(keys)
        after = at - torch.arange(rows)[:, None]
        gone = ((after < low) | (after > high)).expand(batch, 1, rows, keys)
        if ranges:
            own = torch.from_numpy(_ints(ranges, 2 * batch)).view(batch, 2, 1, 1, 1)
            gone = gone | (at < own[:, 0]) | (at >= own[:, 1])
        return scores.masked_fill(gone, -math.inf)

    def _products(self, given: Any, neg_lse: int, delta: int, *numbers: Any) -> Any:
        """P, dS, and q, k, dO in float32, keys repeated for each query head."""
        q, k, v, d_out = map(tensor_of, given)
        pitch, group, factor = numbers
        k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
        p = self._weights(q, k, neg_lse, pitch, factor)
        unseen = ~(p > 0).any(2)[..., None]
        k, v = (each.masked_fill(unseen, 0) for each in (k, v))
        batch, heads, rows, _ = q.shape
        own = _floats(delta, batch * heads * pitch).view(batch, heads, pitch)[..., :rows, None]
        return p, p * (d_out.float() @ v.mT - own), q.float(), k, d_out.float()

    def _queries(self, _: int, *values: Any) -> None:
        *maps, o, do, lse, neg_lse, delta, rows, _keys, pitch, heads, group = values[:15]
        _together, factor, scale, of_batch, *apart = values[15:]
        sizes = (heads // of_batch, of_batch, rows, 64)
        out, d_out = (_raw(each, sizes, apart[i : i + 3]) for i, each in ((0, o), (3, do)))
        lse_by = 1 / scale if self.statistics > 1 else math.log2(math.e)
        self._statistics(heads, rows, pitch, out, d_out, lse, neg_lse, delta, lse_by)
        _, ds, _, k, _ = self._products(maps[:4], neg_lse, delta, pitch, group, factor)
        tensor_of(maps[4]).copy_(ds @ k * scale)

    def _keys(self, _: int, *values: Any) -> None:
        *maps, neg_lse, delta, sums, rows, keys, pitch, heads_kv, group = values[:14]
        _together, factor, scale, of_batch = values[14:]
        p, ds, q, k, d_out = self._products(maps[:4], neg_lse, delta, pitch, group, factor)
        dk, dv = map(tensor_of, maps[4:])
        batch, heads = dk.shape[0], q.shape[1]
        assert (heads_kv, of_batch, rows) == (batch * dk.shape[1], dk.shape[1], q.shape[2])

        def of_keys(each: Any) -> Any:
            return each.view(batch, dk.shape[1], group, keys, 64).sum(2)

        dv.copy_(of_keys(p.mT @ d_out))
        dk.copy_(of_keys(ds.mT @ q) * scale * self.gone)
        if sums != delta:  # otherwise dQ is there
            to = _floats(sums, batch * heads * pitch * 64).view(batch, heads, pitch, 64)
            to[:, :, :rows] += ds @ k

    @staticmethod
    def _convert(heads: int, sums: int, dq: int, *rest: Any) -> None:
        rows, pitch, scale, of_batch, *apart = rest
        sizes = (heads // of_batch, of_batch, rows, 64)
        made = _floats(sums, heads * pitch * 64).view(heads, pitch, 64)[:, :rows] * scale
        _raw(dq, sizes, apart).copy_(made.view(sizes))


def _raw(address: int, sizes: tuple[int, ...], apart: Any) -> Any:
    """A bf16 tensor by its address and strides in elements."""
    strides = [2 * each for each in (*apart, 1)]
    extent = 2 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory: Any = (ctypes.c_uint8 * extent).from_address(address)
    view: Any = np.ndarray(sizes, np.int16, memory, strides=strides)
    return torch.from_numpy(view).view(torch.bfloat16)


class Fp8Kernel:
    """What a launch of flash_fwd_fp8_wgmma computes, on contiguous tensors.

    causal, scale_block: which machine code was compiled.
    """

    def __init__(self, causal: bool = False, scale_block: int = 0) -> None:
        self.causal, self.scale_block = causal, scale_block

    def __call__(self, launch: dict[str, Any]) -> None:
        """Write the output."""
        q, k, v, o = (_contiguous(each) for each in launch["values"][:4])
        *scales, lse, heads, group, _, seqlen_q, seqlen_k, factor = launch["values"][4:]
        assert (lse, heads, heads // group) == (0, len(q), len(k))
        assert (seqlen_q, seqlen_k) == (q.shape[1], k.shape[1])
        blocks = -(-seqlen_k // self.scale_block) if self.scale_block else 1
        q_scale, k_scale, v_scale = (
            _floats(each, len(k) * count) for each, count in zip(scales, (1, blocks, blocks), strict=True)
        )

        def values(tensor: Any, scale: Any) -> Any:
            of_rows = scale.view(len(k), -1).repeat_interleave(self.scale_block or seqlen_k, 1)
            return _e4m3(tensor) * of_rows[:, :seqlen_k, None]

        keys, of_keys = (each.repeat_interleave(group, 0) for each in (values(k, k_scale), values(v, v_scale)))
        queries = _e4m3(q) * q_scale.repeat_interleave(group)[:, None, None]
        scores = queries @ keys.mT * (factor / math.log2(math.e))
        if self.causal:
            hidden = ~torch.ones_like(scores, dtype=torch.bool).tril()
            scores = scores.masked_fill(hidden, -math.inf)
        o.view(torch.bfloat16).copy_(torch.softmax(scores, -1) @ of_keys)


def _contiguous(tensor_map: dict[str, Any]) -> Any:
    """The numbers of 16 bits that a map of a contiguous (heads, rows, columns) tensor describes."""
    columns, rows, heads = tensor_map["dims"]
    assert tensor_map["strides"][0] == 2 * columns
    assert tensor_map["strides"][1] == 2 * columns * rows or heads == 1
    assert tensor_map["swizzle"] == {32: 2, 64: 3}[tensor_map["box"][0]]
    memory: Any = (ctypes.c_int16 * (columns * rows * heads)).from_address(tensor_map["pointer"])
    view: Any = np.ndarray((heads, rows, columns), np.int16, memory)
    return torch.from_numpy(view)


def _e4m3(tensor: Any) -> Any:
    return tensor.view(torch.float8_e4m3fn).float()


def _floats(address: int, count: int) -> Any:
    memory: Any = (ctypes.c_float * count).from_address(address)
    view: Any = np.ndarray((count,), np.float32, memory)
    return torch.from_numpy(view)


def seen(
    q: Any,
    k: Any,
    window: Any = None,
    causal_offset: int | None = None,
    key_lengths: Any = None,
    is_causal: bool = False,
) -> Any:
    """(batch, 1, seqlen_q, seqlen_k), by what the documentation says of each argument."""
    rows, keys = q.shape[2], k.shape[2]
    i, j = torch.arange(rows, device=q.device)[:, None], torch.arange(keys, device=q.device)
    mask = torch.ones(q.shape[0], 1, rows, keys, dtype=torch.bool, device=q.device)
    left, right = window or (None, None)
    if left not in (None, -1):
        mask &= j >= i + keys - rows - left
    if right not in (None, -1):
        mask &= j <= i + keys - rows + right
    if causal_offset is not None:
        mask &= j <= i + causal_offset
    elif is_causal:
        mask &= j <= i
    for item, lengths in enumerate([] if key_lengths is None else key_lengths.tolist()):
        first, end = lengths if isinstance(lengths, list) else (0, lengths)
        mask[item] &= (j >= first) & (j < end)
    return mask
