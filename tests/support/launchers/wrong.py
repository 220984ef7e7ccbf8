"""Attention in Triton and PyTorch, right unless `fault` says what is wrong with it."""

import os
import sys
import time

import torch
import triton
import triton.language as tl


@triton.jit
def shrunk(total, fault: tl.constexpr):
    if fault == "shape":
        total += tl.zeros([7], tl.float32)  # the line that raises
    return total


@triton.jit
def attend(
    q,
    k,
    v,
    o,
    scale,
    group,
    rows,
    keys,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    fault: tl.constexpr,
):
    head, d, every = tl.program_id(1).to(tl.int64), tl.arange(0, D), tl.arange(0, BLOCK)
    row = tl.program_id(0) * BLOCK + every
    mine = head * rows * D + row[:, None] * D + d[None, :]
    x = tl.load(q + mine, mask=row[:, None] < rows, other=0.0)
    top, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for first in range(0, keys, BLOCK):
        key = first + every
        theirs = head // group * keys * D + key[:, None] * D + d[None, :]
        there = key[:, None] < (keys + 8 if fault == "beyond the keys" else keys)
        seen = key[None, :] < keys
        if CAUSAL:
            last = row[:, None] + keys - rows
            seen = seen & (key[None, :] < last if fault == "diagonal" else key[None, :] <= last)
        y = tl.load(k + theirs, mask=there, other=0.0)
        s = tl.where(seen, tl.dot(x, tl.trans(y)) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p, fade = tl.exp(s - new[:, None]), tl.exp(top - new)
        z = tl.load(v + theirs, mask=there, other=0.0)
        acc = tl.dot(p.to(z.dtype), z, acc * fade[:, None])
        total, top = shrunk(total * fade + tl.sum(p, 1), fault), new
    last = rows - 1 if fault == "last row" else rows
    o += 100_000_000_000 if fault == "far away" else 0
    tl.store(o + mine, (acc / total[:, None]).to(o.dtype.element_ty), mask=row[:, None] < last)
    if fault == "input":
        tl.store(q + mine, x * 2, mask=row[:, None] < rows)


def attention(q, k, v, is_causal, sm_scale, *, fault="", BLOCK=32):
    out, (b, h, n, d) = torch.empty_like(q), q.shape
    if fault == "hangs":
        time.sleep(1000)
    if fault == "exits":
        sys.exit(os.getpid() and 3)
    if fault == "dtype":
        return out.float()
    if fault == "nothing":
        return None
    if fault == "returns an input":
        return q.view_as(q)
    grid, sizes = (triton.cdiv(n, BLOCK), b * h), (h // k.shape[1], n, k.shape[2])
    attend[grid](q, k, v, out, sm_scale, *sizes, D=d, CAUSAL=is_causal, BLOCK=BLOCK, fault=fault)
    return out


def gradients(q, k, v, o, lse, do, *, causal, scale, fault=""):
    def wide(x):
        return x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) if x.shape[1] < q.shape[1] else x.double()

    def narrow(x):
        return x.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype)

    s = wide(q) @ wide(k).mT * scale
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(s.shape[-1] - s.shape[-2] + 1)
        s = s.masked_fill(hidden, float("-inf"))
    p = torch.exp(s - lse.double()[..., None])
    ds = p * (wide(do) @ wide(v).mT - (wide(do) * wide(o)).sum(-1, keepdim=True)) * scale
    dv = p.mT @ wide(do) * (2 if fault == "dv" else 1)
    return (ds @ wide(k)).to(q.dtype), narrow(ds.mT @ wide(q)), narrow(dv)
