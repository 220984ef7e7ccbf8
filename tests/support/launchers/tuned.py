"""Launchers of Triton kernels as users write them; nothing here computes attention."""

import os
import time

import torch
import triton
import triton.language as tl


def fits(configs, args, **_):
    return [c for c in configs if c.kwargs["BLOCK"] <= args["rows"]]


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=w) for block in (32, 128) for w in (1, 4)]


@triton.autotune(CONFIGS, key=["rows"], prune_configs_by={"early_config_prune": fits})
@triton.jit
def copied(q, o, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(1) * rows + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = at < (tl.program_id(1) + 1) * rows
    for d in range(D):
        tl.store(o + at * D + d, tl.load(q + at * D + d, mask=seen), mask=seen)


def attention(q, k, v, causal):
    out, (b, h, n, d) = torch.empty_like(q), q.shape
    copied[lambda c: (triton.cdiv(n, c["BLOCK"]), b * h)](q, out, n, D=d)
    return out


def keep(config, problem):
    return config.get("BLOCK", 0) != 96 or "a block is a power of two"


def plain(q, k, v, *, problem, out, BLOCK=32, **launch):
    grid = (triton.cdiv(problem.seqlen_q, BLOCK), problem.batch * problem.heads)
    copied.fn[grid](q, out, problem.seqlen_q, D=problem.head_dim, BLOCK=BLOCK, **launch)


def gradients(q, k, v, o, lse, do, *, problem, BLOCK=32):
    plain(q, k, v, problem=problem, out=(dq := torch.empty_like(q)), BLOCK=BLOCK)
    return dq, torch.empty_like(k), torch.empty_like(v)


def faulty(q, k, v, *, how):
    """Everything that a launcher may do wrong."""
    if how == "aborts":
        os.abort()
    if how == "hangs":
        time.sleep(1000)
    if how == "forks":
        while os.fork():
            time.sleep(0.2)
        time.sleep(1000)
    if how == "leaves a process" and not os.fork():
        time.sleep(1000)
    if how == "raises":
        raise RuntimeError("no such tile")
    if how == "reads":
        return q.sum().item()
    if how == "prints":
        print("x" * 100_000, flush=True)
        os.write(1, b"y" * 100_000)
    if how == "differentiates":
        with torch.enable_grad():
            leaf = q.detach().requires_grad_()
            return torch.autograd.grad((leaf * leaf).sum(), leaf)[0]
    if how == "makes a stream":
        torch.cuda.Stream()
    if how == "waits":
        torch.cuda.current_stream().synchronize()
    if how == "asks for the cache":
        return q[:, : torch.cuda.get_device_properties(q.device).L2_cache_size]
    if how == "slices":
        with torch.cuda.device(q.device):
            copied.fn[(1, 1)](q[:, :1], q[:, 1:], 8, D=16, BLOCK=32)
    if how == "mistypes":
        return q.shap
    if how == "does not compile":
        copied.fn[(1, 1)](q, torch.empty_like(q), 8, D=16, BLOCK=33)
    return torch.empty_like(q)
