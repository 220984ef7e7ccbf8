"""Callables on a card: right ones are confirmed, and wrong ones are not."""

from __future__ import annotations

import pytest

import attnsweep
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status

pytestmark = pytest.mark.gpu

SOURCE = """
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

kept, other = {}, []


def by(backend):
    def call(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)
    return call


flash = by(SDPBackend.FLASH_ATTENTION)
cudnn = by(SDPBackend.CUDNN_ATTENTION)
math = by(SDPBackend.MATH)


def naive(q, k, v):
    return ((q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1) @ v.float()).to(q.dtype)


compiled = torch.compile(naive)


def synchronizes(q, k, v):
    torch.cuda.synchronize()
    return flash(q, k, v)


def computes_once(q, k, v):
    # In every eighth call of a graph; the first one always computes.
    other.append(0)
    if not torch.cuda.is_current_stream_capturing():
        return flash(q, k, v)
    if kept.get("graph") is None or len(other) % 8 == 0:
        kept["graph"] = flash(q, k, v)
    return kept["graph"].clone()


def keeps(q, k, v):
    if q.data_ptr() not in kept:
        kept[q.data_ptr()] = flash(q, k, v)
    return kept[q.data_ptr()].clone()


def other_stream(q, k, v):
    other.append(torch.cuda.Stream())
    with torch.cuda.stream(other[-1]):
        torch.cuda._sleep(50_000_000)
        return flash(q, k, v)


def one_buffer(q, k, v):
    return kept.setdefault("out", torch.empty_like(q)).copy_(flash(q, k, v))
"""
PROBLEM = Problem(2, 16, 16, 1024, 1024, 64, "bf16")
SLOWER = ("torch_flash", "torch_cudnn")


@pytest.fixture
def judged(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "callables.py").write_text(SOURCE)

    def of(name, problem=PROBLEM):
        return attnsweep.judge(f"{tmp_path}/callables.py:{name}", problem, against=SLOWER)

    return of


@pytest.mark.parametrize("name", ["flash", "cudnn", "math", "naive", "compiled"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_right_callable_is_confirmed(name, dtype, judged):
    verdict = judged(name, Problem(2, 16, 16, 1024, 1024, 64, dtype))
    assert verdict.verdict == "confirmed", verdict.reason
    assert verdict.form == "graph"
    assert 0 < verdict.sol_share < 1
    assert verdict.x_base > 0


def test_what_waits_is_labelled(judged):
    verdict = judged("synchronizes")
    assert (verdict.verdict, verdict.form, verdict.x_base) == ("confirmed", "issued", None)


@pytest.mark.parametrize("name", ["keeps", "computes_once", "other_stream", "one_buffer"])
def test_what_is_no_answer_is_not_confirmed(name, judged):
    verdict = judged(name)
    assert verdict.verdict in ("wrong", "refused"), verdict
    assert verdict.reason


@pytest.mark.parametrize("name", ["torch_flash", "torch_cudnn", "cudnn", "flash_attn_3", "unfused"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_replay_of_a_library_is_refused(name, dtype, causal, worker):
    """On inputs drawn anew a library may be twice as far off as when it was checked."""
    worker.open(Problem(2, 8, 8, 1024, 1024, 128, dtype, causal=causal), replay_us=300, seed=7)
    try:
        worker.add_baseline(name)
    except attnsweep.WorkerError as error:
        if error.status is not Status.SKIPPED:
            raise
        pytest.skip(error.detail)
    for kind in ("warm", "cold"):
        for _ in range(50):
            worker.replay(name, kind)
