"""The strict judge on a card: right callables are confirmed, and attacks on the judge are not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_judge import SOURCE, TRITON

import attnsweep
from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.core.problem import BACKWARD, Problem

pytestmark = pytest.mark.gpu

ATTACKS = """
import gc, os
import torch
from callables import flash, kept

def says_less(q, k, v):
    if not kept:
        kept["patched"] = True
        for kind in {type(one) for one in gc.get_objects() if hasattr(type(one), "time_us")}:
            real = kind.time_us
            kind.time_us = lambda *args, real=real, **how: real(*args, **how) / 2
    return flash(q, k, v)

def refuses_nothing(q, k, v):
    from attnsweep.verify.device_case import DeviceCase
    DeviceCase._refuse = lambda *args: None
    return torch.zeros_like(q)

def says_it_ran(q, k, v):
    from attnsweep.bench.caller_process import Callables
    Callables.run = lambda self, name, calls: 100.0
    return flash(q, k, v)

def goes_on(q, k, v):
    # After each timed chain, a kernel of a second runs on another stream.
    from attnsweep.bench.caller_process import Callables
    if "run" not in kept:
        real = kept["run"] = Callables.run
        kept["other"] = torch.cuda.Stream()
        def run(self, name, calls):
            us = real(self, name, calls)
            with torch.cuda.stream(kept["other"]):
                torch.cuda._sleep(2_000_000_000)
            return us
        Callables.run = run
    return flash(q, k, v)

def aside(q, k, v):
    # Work on another stream, which nothing waits for.
    if torch.cuda.is_current_stream_capturing():
        return flash(q, k, v)
    out = torch.empty_like(q)
    side = kept.setdefault("side", torch.cuda.Stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        out.copy_(flash(q, k, v))
    return out

def backward(q, k, v, o, lse, do):
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, False, seed, seed
    )

def kept_backward(q, k, v, o, lse, do):
    if "made" not in kept:
        kept["made"] = backward(q, k, v, o, lse, do)
    return tuple(x.clone() for x in kept["made"])

def swapped_backward(q, k, v, o, lse, do):
    dq, dk, dv = backward(q, k, v, o, lse, do)
    return (dq, dv, dk) if torch.cuda.is_current_stream_capturing() else (dq, dk, dv)

def exits(q, k, v):
    os._exit(3)

def faults(q, k, v):
    q.flatten()[torch.full((1,), 1 << 45, device=q.device)]
    return flash(q, k, v)
"""
PROBLEM = Problem(2, 16, 16, 1024, 1024, 64, "bf16")


@pytest.fixture
def judged(tmp_path):
    pytest.importorskip("torch")
    for name, text in (("callables", SOURCE), ("of_triton", TRITON), ("strangers", ATTACKS)):
        (tmp_path / f"{name}.py").write_text(text)

    def of(name, problem=PROBLEM, **how):
        how = {"against": ("torch_flash",), "strict": True, "rounds": 5, **how}
        return attnsweep.judge(f"{tmp_path}/{name}", problem, **how)

    return of


@pytest.mark.parametrize("name", ["flash", "cudnn", "naive", "with_lse", "writes", "one_buffer", "turned?layout=bshd"])
def test_a_right_callable_is_confirmed(name, judged):
    verdict = judged(f"callables.py:{name}")
    assert verdict.verdict == "confirmed", verdict.reason
    assert verdict.form == "chain"
    assert verdict.x_base > 0
    assert verdict.calls_judged > 100
    # The judge's clock was 3 to 16 µs behind the events: see docs/explanation/threats.md.
    assert 0.95 * verdict.time_us < verdict.trusted_us < 1.06 * verdict.time_us + 4


@pytest.mark.parametrize(
    ("name", "said"), [("backward", ""), ("kept_backward", "relative error"), ("swapped_backward", "(d")]
)
def test_gradients_are_judged_strictly(name, said, judged):
    against = ("torch_flash", "torch_cudnn", "cudnn")
    verdict = judged(f"strangers.py:{name}", replace(PROBLEM, op=BACKWARD), against=against)
    assert verdict.verdict == ("wrong" if said else "confirmed"), verdict.reason
    assert said in verdict.reason
    assert said or (verdict.form, verdict.x_base > 0) == ("chain", True)


def test_the_tutorials_kernel_keeps_what_it_says_that_it_supports(tmp_path, judged):
    tutorial = Path(__file__).parent.parent.parent / "docs" / "tutorials" / "judge.md"
    (block, *_) = re.findall(r"```python\n(.+?)```", tutorial.read_text(), re.DOTALL)
    (tmp_path / "my_kernel.py").write_text(block)
    problem = Problem(2, 8, 8, 1024, 1024, 64, "bf16", causal=True)
    verdict = judged("my_kernel.py:forward", problem)
    assert verdict.verdict == "confirmed", verdict.reason
    of_any_size = block.replace("(scores - grown[:, None])", "(scores - 0 * grown[:, None])")
    of_any_size = of_any_size.replace("tl.exp(largest - grown)", "tl.exp(0 * grown)")
    assert of_any_size.count("0 * grown") == 2
    (tmp_path / "my_kernel.py").write_text(of_any_size)
    assert judged("my_kernel.py:forward", problem, strict=False).verdict == "wrong"
    assert judged("my_kernel.py:forward", problem).verdict == "wrong"


def test_a_ratio_is_that_of_the_friendly_judge(judged):
    problem = Problem(4, 16, 16, 2048, 2048, 128, "bf16")
    strict = judged("callables.py:cudnn", problem, rounds=9)
    friendly = judged("callables.py:cudnn", problem, strict=False, rounds=9)
    assert strict.verdict == friendly.verdict == "confirmed", (strict.reason, friendly.reason)
    assert strict.x_base == pytest.approx(friendly.x_base, rel=0.05)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("strangers.py:says_less", "and the judge's clock|faster than light"),
        ("strangers.py:refuses_nothing", "relative error"),
        ("strangers.py:says_it_ran", "NaN or were never written"),
        ("strangers.py:goes_on", "the card is busy"),
        ("strangers.py:aside", "relative error|NaN"),
        ("strangers.py:exits", "its process died"),
        ("strangers.py:faults", "CUDA|cuda|its process died"),
        ("callables.py:keeps", "relative error|NaN"),
        ("callables.py:stale", "relative error|NaN"),
        ("callables.py:with_log2", "log-sum-exp off by"),
        ("of_triton.py:fewer_blocks", "relative error|NaN"),
        ("of_triton.py:beside_its_inputs", "wrote to its inputs, or next to them"),
    ],
)
def test_what_attacks_it_is_not_confirmed(name, said, judged):
    verdict = judged(name, against=(), rounds=3)
    ours = "card is busy" in said or "judge's clock" in said  # what another program may cause, too
    assert verdict.verdict in ("wrong", "refused", *(["unconfirmed"] if ours else [])), verdict
    assert any(part in verdict.reason for part in said.split("|")), verdict.reason


def test_a_friendly_callable_of_a_spec_changes_nothing_for_a_strict_one(tmp_path, judged):
    name = f"{tmp_path}/strangers.py:refuses_nothing"
    with Worker(timeout_s=60.0) as worker:
        worker.open(PROBLEM, replay_us=300, seed=7)
        worker.add_baseline(name)  # zeros, which its process now calls right
        worker.open(PROBLEM, replay_us=300, seed=7, baselines=[name], strict=str(tmp_path))
        with pytest.raises(WorkerError, match="relative error"):
            worker.add_baseline(name)


def test_as_a_baseline_what_is_over_a_limit_is_timed(judged):
    for strict in (False, True):
        verdict = judged("callables.py:off", strict=strict, role="baseline")
        assert (verdict.verdict, verdict.time_us > 0, verdict.x_base > 0) == ("wrong", True, True), verdict
        assert judged("callables.py:off", strict=strict).time_us is None


def test_a_common_mistake_is_a_hint(judged):
    verdict = judged("callables.py:unscaled", strict=False)
    assert verdict.hints[0] == "it is what no scale gives", verdict


def test_events_that_say_less_pass_the_friendly_judge(judged):
    honest, lying = (judged(name, strict=False) for name in ("callables.py:flash", "strangers.py:says_less"))
    assert lying.verdict == "confirmed", lying.reason
    assert lying.time_us < 0.7 * honest.time_us
