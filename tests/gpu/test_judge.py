"""Callables on a card: right ones are confirmed, and wrong ones are not."""

from __future__ import annotations

import pytest

import attnsweep
from attnsweep.bench.gpu import WorkerError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status

pytestmark = pytest.mark.gpu

SOURCE = """
import ctypes
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


def off(q, k, v):
    return flash(q, k, v) * 1.05


def unscaled(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)


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


def two_buffers(q, k, v):
    other.append(0)
    out = kept.setdefault(len(other) % 2, torch.empty_like(q))
    return out.copy_(flash(q, k, v))


def stale(q, k, v):
    # Memory that an output of an earlier call may have had.
    other.append(0)
    in_graph = torch.cuda.is_current_stream_capturing()
    return torch.empty_like(q) if in_graph and len(other) % 2 else flash(q, k, v)


def host_node(q, k, v):
    # The host computes, in a graph or not: copies to it wait for nothing that a graph may wait for.
    return naive(*(x.cpu() for x in (q, k, v))).to(q.device)


driver = ctypes.CDLL("libcuda.so.1")


def host_function(q, k, v):
    # free(NULL), on the host, as part of each call.
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    out = flash(q, k, v)
    assert driver.cuLaunchHostFunc(stream, free, None) == 0
    return out


def event_of_elsewhere(q, k, v):
    # cudaEventRecordExternal, which anybody may wait for.
    if "event" not in kept:
        kept["event"] = ctypes.c_void_p()
        assert driver.cuEventCreate(ctypes.byref(kept["event"]), 2) == 0
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    out = flash(q, k, v)
    in_graph = torch.cuda.is_current_stream_capturing()
    assert driver.cuEventRecordWithFlags(kept["event"], stream, int(in_graph)) == 0
    return out


def side_streams(q, k, v):
    # Two streams that the call waits for.
    now, out = torch.cuda.current_stream(), torch.empty_like(q)
    if not other:
        other.extend(torch.cuda.Stream() for _ in range(2))
    for stream, item in zip(other, range(q.shape[0])):
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            out[item : item + 1] = flash(*(x[item : item + 1] for x in (q, k, v)))
        now.wait_stream(stream)
    return out


def with_lse(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]


def with_log2(q, k, v):
    out, lse = with_lse(q, k, v)
    return out, lse * 1.4426950408889634


def writes(q, k, v, *, out, lse):
    made = with_lse(q, k, v)
    out.copy_(made[0])
    lse.copy_(made[1])


def turned(q, k, v):
    return flash(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
"""
TRITON = """
import torch
import triton
import triton.language as tl
from callables import flash

calls = {}


@triton.jit
def most(source, to, counter, n, B: tl.constexpr):
    # Of every eighth call, counted on the device, no block writes anything.
    if tl.load(counter) % 8 != 7:
        at = tl.program_id(0) * B + tl.arange(0, B)
        tl.store(to + at, tl.load(source + at, mask=at < n), mask=at < n)


def fewer_blocks(q, k, v):
    if not calls:
        calls["counter"] = torch.zeros(1, dtype=torch.int32, device=q.device)
    source, to = flash(q, k, v), torch.empty_like(q)
    most[(triton.cdiv(to.numel(), 1024),)](source, to, calls["counter"], to.numel(), B=1024)
    calls["counter"].add_(1)
    return to


@triton.jit
def past(to, n):
    tl.store(to + n, 0.0)


def beside_its_inputs(q, k, v):
    past[(1,)](v, v.numel())
    return flash(q, k, v)
"""
PROBLEM = Problem(2, 16, 16, 1024, 1024, 64, "bf16")
SLOWER = ("torch_flash", "torch_cudnn")


@pytest.fixture
def judged(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "callables.py").write_text(SOURCE)
    (tmp_path / "of_triton.py").write_text(TRITON)

    def of(name, problem=PROBLEM, **how):
        name = name if ".py:" in name else f"callables.py:{name}"
        return attnsweep.judge(f"{tmp_path}/{name}", problem, against=SLOWER, **how)

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


@pytest.mark.parametrize("name", ["with_lse", "writes", "turned?layout=bshd", "flash?graph=true&workspace=2147483648"])
def test_a_right_callable_is_called_as_it_asks(name, judged):
    verdict = judged(name)
    assert verdict.verdict == "confirmed", verdict.reason
    assert verdict.calls_judged > 1000 / verdict.time_us  # as many as the shortest replay has


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("with_log2", "log-sum-exp off by"),
        ("synchronizes?graph=true", "no CUDA graph holds its calls"),
        ("naive?workspace=1048576", "bytes beside its outputs, over its workspace of 1048576"),
    ],
)
def test_what_was_asked_for_is_refused_with_the_reason(name, says, judged):
    verdict = judged(name)
    assert verdict.verdict in ("wrong", "refused")
    assert says in verdict.reason


def test_a_host_that_computes_is_in_the_time_and_labelled(judged):
    verdict = judged("host_node", Problem(1, 2, 2, 256, 256, 64, "bf16"))
    assert verdict.verdict == "refused" or verdict.form == "issued"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("name", "said"), [("host_function", "a host function"), ("event_of_elsewhere", "a record of an event")]
)
def test_a_graph_that_holds_more_than_work_of_the_device_is_refused(name, said, strict, judged):
    verdict = judged(name, strict=strict)
    assert (verdict.verdict, verdict.reason) == ("refused", f"its graph holds {said}")


def test_streams_that_a_call_waits_for_are_no_fault(judged):
    verdict = judged("side_streams")
    assert (verdict.verdict, verdict.form) == ("confirmed", "graph"), verdict.reason


@pytest.mark.parametrize(
    "name",
    [
        *("keeps", "computes_once", "other_stream", "one_buffer", "two_buffers", "stale"),
        *("of_triton.py:beside_its_inputs", "of_triton.py:fewer_blocks"),
    ],
)
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
    except WorkerError as error:
        if error.status is not Status.SKIPPED:
            raise
        pytest.skip(error.detail)
    for kind in ("warm", "cold"):
        for _ in range(50):
            worker.replay(name, kind)
