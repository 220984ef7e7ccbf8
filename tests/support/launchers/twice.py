"""Launchers whose autotuners are two, or have a hook; nothing here computes attention."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


def described(nargs):
    nargs["rows"].block_shape = [nargs["BLOCK"], nargs["D"]]


def short(configs, args, **_):
    return [c for c in configs if c.kwargs["BLOCK"] <= 32]


@triton.autotune(
    [triton.Config({"BLOCK": 32}, pre_hook=described, num_warps=w) for w in (4, 8)],
    key=["D"],
    prune_configs_by={"early_config_prune": short},
)
@triton.jit
def first(rows, o, D: tl.constexpr, BLOCK: tl.constexpr):
    x = rows.load([tl.program_id(0) * BLOCK, 0])
    tl.static_assert(x.shape[0] == BLOCK, "the hook was not called")
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(o + at, x)


@triton.autotune([triton.Config({"BLOCK": b, "TIMES": 2}) for b in (64, 128)], key=["n"])
@triton.jit
def second(o, n, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + at, tl.load(o + at, mask=at < n) * TIMES, mask=at < n)


def hooked(q, k, v):
    out, rows = torch.empty_like(q), q.numel() // q.shape[3]
    described = TensorDescriptor.from_tensor(q.view(-1, q.shape[3]), [1, q.shape[3]])
    first[lambda c: (triton.cdiv(rows, c["BLOCK"]),)](described, out, D=q.shape[3])
    return out


def both(q, k, v):
    out = hooked(q, k, v)
    second[lambda c: (triton.cdiv(out.numel(), c["BLOCK"]),)](out, out.numel())
    return out
