"""Attention and its gradients in Triton, on any lengths, with windows, masks and groups of heads; and in PyTorch."""

from functools import cache

import torch
import triton
import triton.language as tl

from attnsweep.core import boolean_masks

LOG2E = tl.constexpr(1.4426950408889634)


def supports(problem):
    plain = problem.layout.kind == "dense" and not problem.scores.kinds and problem.dtype in ("fp16", "bf16")
    return plain and (problem.op.name == "forward" or not problem.mask.as_tensor)


@cache
def mask_of(problem, device):
    """The boolean mask as bytes, and its strides: a callable gets no tensor of it."""
    mask = torch.from_numpy(boolean_masks.tensor(problem)).to(device).view(torch.uint8)
    return mask, mask.stride(0) * (mask.shape[0] > 1), mask.stride(1) * (mask.shape[1] > 1)


@triton.jit
def loaded(of, head, at, seqlen, D: tl.constexpr):
    """Rows of a head of a tensor, and zeros beyond the last."""
    each = at[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(of + head * seqlen * D + each, mask=at[:, None] < seqlen, other=0.0)


@triton.jit
def stored(to, head, at, seqlen, made, D: tl.constexpr):
    each = at[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to + head * seqlen * D + each, made.to(to.dtype.element_ty), mask=at[:, None] < seqlen)


@triton.jit
def seen_by(row, key, seqlen_q, seqlen_k, low, high):
    """Pairs on the diagonals low … high."""
    off = key[None, :] - row[:, None]
    return (off >= low) & (off <= high) & (key[None, :] < seqlen_k) & (row[:, None] < seqlen_q)


@triton.autotune(
    [triton.Config({"BLOCK_M": m, "BLOCK_N": n}) for m in (32, 64) for n in (32, 64)], key=["seqlen_q", "seqlen_k"]
)
@triton.jit(do_not_specialize=["low", "high"])
def attend(
    q,
    k,
    v,
    o,
    mask,
    mask_item,
    mask_head,
    scale,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    low,
    high,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask += head // heads * mask_item + head % heads * mask_head
    x = loaded(q, head, row, seqlen_q, D)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for first in range(0, seqlen_k, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        seen = seen_by(row, key, seqlen_q, seqlen_k, low, high)
        if MASKED:
            seen = seen & (tl.load(mask + row[:, None] * seqlen_k + key[None, :], mask=seen, other=0) != 0)
        y = loaded(k, head // group, key, seqlen_k, D)
        s = tl.where(seen, tl.dot(x, tl.trans(y)) * (scale * LOG2E), float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        off = tl.where(new == float("-inf"), 0.0, new)  # of a row that sees no key yet
        p, fade = tl.exp2(s - off[:, None]), tl.exp2(top - off)
        z = loaded(v, head // group, key, seqlen_k, D)
        acc = tl.dot(p.to(z.dtype), z, acc * fade[:, None])
        total, top = total * fade + tl.sum(p, 1), new
    stored(o, head, row, seqlen_q, acc / tl.where(total == 0.0, 1.0, total)[:, None], D)


def attention(q, k, v, *, problem, out):
    p = problem
    mask, item, head = mask_of(p, q.device) if p.mask.as_tensor else (q, 0, 0)
    low, high = p.diagonals
    attend[lambda c: (triton.cdiv(p.seqlen_q, c["BLOCK_M"]), p.batch * p.heads)](
        *(q, k, v, out, mask, item, head, p.scale, p.heads, p.heads // p.heads_kv, p.seqlen_q, p.seqlen_k, low, high),
        D=p.head_dim,
        MASKED=p.mask.as_tensor,
    )


@triton.jit
def step(x, y, z, of_o, of_lse, of_do, seen, scale):
    """Probabilities of a tile, and gradients of its scores."""
    p = tl.where(seen, tl.exp2((tl.dot(x, tl.trans(y)) * scale - of_lse[:, None]) * LOG2E), 0.0)
    own = tl.sum(of_o.to(tl.float32) * of_do.to(tl.float32), 1)
    return p, p * (tl.dot(of_do, tl.trans(z)) - own[:, None]) * scale


@triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64)], key=["seqlen_q", "seqlen_k"])
@triton.jit(do_not_specialize=["low", "high"])
def grad_q(q, k, v, o, lse, do, dq, scale, group, seqlen_q, seqlen_k, low, high, D: tl.constexpr, BLOCK: tl.constexpr):
    head, row = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, of_o, of_do = (
        loaded(q, head, row, seqlen_q, D),
        loaded(o, head, row, seqlen_q, D),
        loaded(do, head, row, seqlen_q, D),
    )
    of_lse = tl.load(lse + head * seqlen_q + row, mask=row < seqlen_q, other=0.0)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for first in range(0, seqlen_k, 32):
        key = first + tl.arange(0, 32)
        y, z = loaded(k, head // group, key, seqlen_k, D), loaded(v, head // group, key, seqlen_k, D)
        seen = seen_by(row, key, seqlen_q, seqlen_k, low, high)
        _, ds = step(x, y, z, of_o, of_lse, of_do, seen, scale)
        acc = tl.dot(ds.to(y.dtype), y, acc)
    stored(dq, head, row, seqlen_q, acc, D)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64)], key=["seqlen_q", "seqlen_k"])
@triton.jit(do_not_specialize=["low", "high"])
def grad_kv(
    q, k, v, o, lse, do, dk, dv, scale, group, seqlen_q, seqlen_k, low, high, D: tl.constexpr, BLOCK: tl.constexpr
):
    head_kv, key = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, z = loaded(k, head_kv, key, seqlen_k, D), loaded(v, head_kv, key, seqlen_k, D)
    of_k, of_v = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
    for head in range(head_kv * group, (head_kv + 1) * group):
        for first in range(0, seqlen_q, 32):
            row = first + tl.arange(0, 32)
            x, of_o, of_do = (
                loaded(q, head, row, seqlen_q, D),
                loaded(o, head, row, seqlen_q, D),
                loaded(do, head, row, seqlen_q, D),
            )
            of_lse = tl.load(lse + head * seqlen_q + row, mask=row < seqlen_q, other=0.0)
            seen = seen_by(row, key, seqlen_q, seqlen_k, low, high)
            p, ds = step(x, y, z, of_o, of_lse, of_do, seen, scale)
            of_v = tl.dot(tl.trans(p.to(x.dtype)), of_do, of_v)
            of_k = tl.dot(tl.trans(ds.to(x.dtype)), x, of_k)
    stored(dk, head_kv, key, seqlen_k, of_k, D)
    stored(dv, head_kv, key, seqlen_k, of_v, D)


def gradients(q, k, v, o, lse, do, *, problem):
    p, (dq, dk, dv) = problem, (torch.empty_like(x) for x in (q, k, v))
    sizes = p.scale, p.heads // p.heads_kv, p.seqlen_q, p.seqlen_k, *p.diagonals
    grad_q[lambda c: (triton.cdiv(p.seqlen_q, c["BLOCK"]), p.batch * p.heads)](
        q, k, v, o, lse, do, dq, *sizes, D=p.head_dim
    )
    grad_kv[lambda c: (triton.cdiv(p.seqlen_k, c["BLOCK"]), p.batch * p.heads_kv)](
        q, k, v, o, lse, do, dk, dv, *sizes, D=p.head_dim
    )
    return dq, dk, dv


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


def copied(x, y, BLOCK):
    copy[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), y, x.numel(), BLOCK=BLOCK)
    return y


def in_steps(q, k, v, problem):
    """Attention in PyTorch, in float32."""
    p, (low, high) = problem, problem.diagonals
    k, v = (x.float().repeat_interleave(p.heads // p.heads_kv, 1) for x in (k, v))
    row, key = (torch.arange(n, device=q.device) for n in (p.seqlen_q, p.seqlen_k))
    off = key[None] - row[:, None]
    hidden = (off < low) | (off > high)
    if p.mask.as_tensor:
        hidden = hidden | (mask_of(p, q.device)[0] == 0)
    s = (q.float() @ k.mT * p.scale).masked_fill(hidden, float("-inf"))
    return torch.softmax(s, -1).nan_to_num(0.0) @ v


def composed(q, k, v, *, problem, out, BLOCK=1024):
    copied(in_steps(q, k, v, problem).to(q.dtype), out, BLOCK)


def by_autograd(q, k, v, o, lse, do, *, problem, BLOCK=1024):
    """Gradients of scores from the output that was given, and of q and k by autograd."""
    p, group = problem, problem.heads // problem.heads_kv
    with torch.enable_grad():
        x, y = (each.detach().requires_grad_() for each in (q, k))
        s = x.float() @ y.float().repeat_interleave(group, 1).mT * p.scale
        row, key = (torch.arange(n, device=q.device) for n in (p.seqlen_q, p.seqlen_k))
        low, high = p.diagonals
        off = key[None] - row[:, None]
        hidden = (off < low) | (off > high)
        weights = torch.exp((s.detach() - lse[..., None]).masked_fill(hidden, float("-inf")))
        of_p = do.float() @ v.float().repeat_interleave(group, 1).mT
        of_s = weights * (of_p - (do.float() * o.float()).sum(-1, keepdim=True))
        dq, dk = torch.autograd.grad(s, (x, y), of_s)
    dv = (weights.mT @ do.float()).unflatten(1, (p.heads_kv, group)).sum(2).to(v.dtype)
    return tuple(copied(one, torch.empty_like(one), BLOCK) for one in (dq, dk, dv))
