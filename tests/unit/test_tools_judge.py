"""A verdict about a callable: what rows mean, exit codes, and what ends early."""

import hashlib
import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import typer
from fake_gpu import FakeGpu
from samples import H200
from sweeping import use

from attnsweep import cli
from attnsweep.bench.gpu import WorkerError
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.hardware import arch_named, bounds
from attnsweep.core.problem import BACKWARD, Problem
from attnsweep.core.trial import Accuracy, Status
from attnsweep.tools.judge import KernelVerdict, judge, name_of

PROBLEM = Problem(4, 32, 32, 4096, 4096, 128, "bf16")
BOUND_US = bounds(PROBLEM, arch_named(H200.arch), H200)["matrix"]
AGAINST = ("torch_flash", "torch_cudnn", "flash_attn_3")
WHERE = {"batch": 0, "head": 3, "row": 511}
OUT_OF_MEMORY = (  # as PyTorch says it, which names CUDA behind it too
    "CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (prepare.py:1)"
)
OVER = Accuracy(
    rel_err=0.5, limit=0.01, case="timed", shares={"row": 50.0}, where=WHERE, hints=["it is what no mask gives"]
)


@pytest.fixture
def card(monkeypatch):
    """A GPU on which the callable takes twice the bound, and is faster than both baselines."""
    us = {"mine:f": 2.0, "torch_flash": 3.0, "torch_cudnn": 2.5}
    card = FakeGpu({name: times * BOUND_US for name, times in us.items()}, environment=H200)
    return use(monkeypatch, card)


def of(card, **how):
    return judge("mine:f", PROBLEM, against=AGAINST, **how)


def test_a_right_callable_is_confirmed_with_its_time_beside_the_fastest_baseline(card):
    verdict = of(card)
    assert (verdict.verdict, verdict.exit_code, verdict.form) == ("confirmed", 0, "graph")
    assert verdict.time_us == pytest.approx(2 * BOUND_US)
    assert (verdict.base, verdict.x_base) == ("torch_cudnn", pytest.approx(1.25))
    assert verdict.ci95 == pytest.approx((verdict.time_us,) * 2)
    assert verdict.calls_judged == 100
    assert (verdict.unit, verdict.sm_mhz) == ("matrix", 1980.0)
    assert verdict.sol_share == pytest.approx(0.5 * H200.clock_hz / 1.98e9)
    assert "1.25× torch_cudnn, the fastest baseline, 50 % of the speed of light (matrix" in verdict.sentence
    assert json.loads(json.dumps(asdict(verdict)))["verdict"] == "confirmed"


@pytest.mark.parametrize(
    ("name", "verdict", "command"),
    [
        ("mine:f", "confirmed", "attnsweep check '4,32,4096,128 bf16' --old mine:f --new mine:f"),
        ("a.py:f", "confirmed", "attnsweep check '4,32,4096,128 bf16' --old a.py@HEAD:f --new a.py:f"),
        ("x=a.py:f?layout=bshd", "wrong", "attnsweep verify 'a.py:f?layout=bshd'"),
        (
            "a.py:f?graph=true&workspace=9&factory=true",
            "confirmed",
            "attnsweep check '4,32,4096,128 bf16' --old 'a.py@HEAD:f?factory=true' --new 'a.py:f?factory=true'",
        ),
        ("a.py:f?factory=true", "wrong", "attnsweep judge 'a.py:f?factory=true' '4,32,4096,128 bf16' --json"),
        ("mine:f", "refused", "attnsweep judge mine:f '4,32,4096,128 bf16' --json"),
        ("mine:f", "unconfirmed", "attnsweep judge mine:f '4,32,4096,128 bf16' --rounds 45"),
    ],
)
def test_a_verdict_ends_in_the_command_of_the_next_step(name, verdict, command):
    of = KernelVerdict(verdict, name, "4,32,4096,128 bf16", "a reason")
    assert of.next.split(": ", 1)[1] == command
    words = shlex.split(command)[1:]
    group = typer.main.get_command(cli.app)
    own = group.get_command(group.make_context("attnsweep", words[:1]), words[0])
    own.make_context(words[0], words[1:])  # raises UsageError


def test_a_callable_that_no_graph_holds_has_a_time_and_no_ratio(card):
    card.issued["mine:f"] = "no CUDA graph holds its calls: it waits"
    verdict = of(card)
    assert (verdict.verdict, verdict.form, verdict.x_base) == ("confirmed", "issued", None)
    assert verdict.reason.endswith("no CUDA graph holds its calls: it waits")


def failing(card, method, status, detail, payload=None):
    card.faults[method, "mine:f"] = WorkerError(status, detail, payload)
    return of(card)


@pytest.mark.parametrize("method", ["add_baseline", "replay", "confirm"])
@pytest.mark.parametrize(
    ("status", "detail", "verdict", "code"),
    [
        (Status.WRONG, "relative error 5.00e-01 over the limit", "wrong", 1),
        (Status.SKIPPED, "mine:f raised ValueError: no (mine.py:3)", "refused", 1),
        (Status.TIMEOUT, "no answer within 30 s; its process was killed", "refused", 1),
        (Status.LAUNCH_ERROR, "the GPU process died (signal SIGSEGV)", "refused", 1),
        (Status.LAUNCH_ERROR, "CUDARuntimeError: an illegal memory access", "refused", 1),
        (Status.LAUNCH_ERROR, "KeyError: 'o' (verifier.py:3)", "unconfirmed", 4),
        (Status.LAUNCH_ERROR, "OutOfMemoryError: CUDA out of memory. (prepare.py:1)", "unconfirmed", 4),
        (Status.LAUNCH_ERROR, "CUDARuntimeError: cudaErrorMemoryAllocation: out", "unconfirmed", 4),
        (Status.LAUNCH_ERROR, f"OutOfMemoryError: {OUT_OF_MEMORY}", "unconfirmed", 4),
        (Status.LAUNCH_ERROR, "ModuleNotFoundError: No module named 'cuda'", "unconfirmed", 4),
        (Status.DAMAGED, "its events say 50 µs a call", "unconfirmed", 4),
    ],
)
def test_a_failure_is_a_verdict_only_if_it_is_the_callables(method, status, detail, verdict, code, card):
    found = failing(card, method, status, detail, OVER if status is Status.WRONG else None)
    assert (found.verdict, found.exit_code) == (verdict, code)
    assert detail in found.reason
    assert found.time_us is None
    if status is Status.WRONG:
        assert (found.where, found.got, found.limit) == (WHERE, 0.5, 0.01)
        assert found.hints == ["it is what no mask gives"]
        assert found.sentence.endswith("over the limit; it is what no mask gives")
    if method == "add_baseline":  # nothing else is prepared
        assert card.names("add_baseline") == ["mine:f"]


def test_what_cannot_be_imported_is_an_error_and_no_verdict(card):
    with pytest.raises(SpecError, match="cannot import mine:f"):
        failing(card, "add_baseline", Status.SKIPPED, "cannot import mine:f: ImportError: x")
    with pytest.raises(SpecError, match="MODULE:FUNCTION"):
        judge("mine f", PROBLEM)
    with pytest.raises(SpecError, match="there is no such file") as missing:
        judge("nowhere/mine.py:f", PROBLEM)
    assert missing.value.where == "nowhere/mine.py"


def test_noise_and_a_problem_that_cannot_be_opened_confirm_nothing(card):
    times, steady = iter([2.0, 3.0] * 100), card.sample

    def sample(name, kind):
        return next(times) * BOUND_US if name == "mine:f" else steady(name, kind)

    card.sample = sample
    noisy = of(card)
    assert (noisy.verdict, noisy.exit_code) == ("unconfirmed", 4)
    card.faults["open", PROBLEM.label] = WorkerError(Status.LAUNCH_ERROR, "out of memory")
    unopened = of(card)
    assert (unopened.verdict, unopened.reason) == ("unconfirmed", "out of memory")


def test_a_time_below_the_speed_of_light_is_refused(card):
    card.times["mine:f"] = 0.9 * BOUND_US
    verdict = of(card)
    assert verdict.verdict == "refused"
    assert "faster than light" in verdict.reason


def test_the_callable_is_no_base_of_its_own(card):
    card.times["mine:f"] = 9 * BOUND_US
    assert of(card).x_base == pytest.approx(2.5 / 9)
    verdict = judge("mine:f", PROBLEM, against=("mine:f",))
    assert (verdict.base, verdict.x_base) == (None, None)


def test_without_a_gpu_there_is_no_verdict(card):
    card.environment = NoGpuError("no CUDA GPU found")
    with pytest.raises(NoGpuError):
        of(card)


def test_a_function_has_the_name_by_which_another_process_imports_it():
    assert name_of(test_without_a_gpu_there_is_no_verdict).endswith(
        "test_tools_judge:test_without_a_gpu_there_is_no_verdict"
    )
    with pytest.raises(SpecError, match="top level of a file"):
        name_of(lambda q, k, v: q)


@pytest.mark.parametrize(("faults", "code"), [((), 0), ((Status.WRONG,), 1), ((Status.DAMAGED,), 4)])
def test_the_command_prints_json_and_ends_in_the_verdicts_code(faults, code, card, attnsweep):
    for status in faults:
        card.faults["add_baseline", "mine:f"] = WorkerError(status, "so it is")
    done = attnsweep("judge", "mine:f", "4,32,4096,128", "--dtype", "bf16", "--json")
    assert done.returncode == code
    assert json.loads(done.stdout)["problem"] == PROBLEM.label


def test_the_command_refuses_what_it_does_not_know(card, attnsweep):
    done = attnsweep("judge", "mine:f", "4,32,4096,128", "--against", "torch_flsh")
    assert (done.returncode, "did you mean 'torch_flash'" in done.stderr) == (2, True)
    two = attnsweep("judge", "mine:f", "4,32,4096,128 bf16", "2,32,4096,128 bf16", "--json")
    assert len(json.loads(two.stdout)) == 2
    backward = attnsweep("judge", "mine:f", "4,32,4096,128 bf16", "--backward")
    assert "backward" in backward.stdout


def test_a_verdict_says_of_which_file_it_is(card, tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0")
    name = f"{tmp_path}/mine.py:f"
    card.times[name] = 2 * BOUND_US
    verdict = judge(name, PROBLEM, against=AGAINST)
    assert verdict.sha256 == hashlib.sha256(b"1 / 0").hexdigest()
    assert of(card).sha256 is None


@pytest.mark.parametrize("strict", [False, True])
def test_as_a_baseline_what_is_over_a_limit_is_timed_and_stays_wrong(strict, card):
    assert (of(card, role="baseline", strict=strict).verdict, card.shown) == ("confirmed", ["mine:f"])
    card.over["mine:f"] = OVER.model_copy(update={"shares": {"row": 7.3, "rms": 0.2}})
    assert of(card, strict=strict).time_us is None
    verdict = of(card, role="baseline", strict=strict)
    assert (verdict.verdict, verdict.exit_code) == ("wrong", 1)
    assert (verdict.time_us, verdict.base) == (pytest.approx(2 * BOUND_US), "torch_cudnn")
    assert "1.25× torch_cudnn" in verdict.sentence
    assert verdict.reason == "its largest share of a limit is 730 %; it is timed as a baseline"


def test_the_command_takes_what_it_is_judged_as(card, attnsweep):
    card.over["mine:f"] = OVER
    command = ["judge", "mine:f", "4,32,4096,128", "--against", "torch_flash", "--json"]
    done = [attnsweep(*command, "--as", role) for role in ("candidate", "baseline")]
    assert [each.returncode for each in done] == [1, 1]
    assert [json.loads(each.stdout)["time_us"] is None for each in done] == [True, False]


def test_a_library_that_its_file_names_is_a_hint_and_no_verdict(card, tmp_path):
    (tmp_path / "mine.py").write_text("from flash_attn import flash_attn_func as f")
    name = f"{tmp_path}/mine.py:f"
    card.times[name] = 2 * BOUND_US
    verdict = judge(name, PROBLEM, against=AGAINST)
    assert verdict.hints == ["its file names flash_attn, flash_attn_func, which may do its work"]
    assert verdict.verdict == "confirmed"
    assert "flash_attn_func" not in verdict.sentence


def test_the_strict_judge_says_its_own_time_and_leaves_no_directory(card):
    verdict = of(card, strict=True)
    assert (verdict.verdict, verdict.form) == ("confirmed", "chain")
    assert verdict.trusted_us == pytest.approx(1.01 * verdict.time_us)
    assert "by the judge's clock" in verdict.sentence
    assert card.opened[0]["strict"]
    assert not Path(card.opened[0]["strict"]).exists()
    of(card)
    assert "strict" not in card.opened[1]


def test_the_strict_judge_names_what_it_cannot_confirm(card):
    said = "its events say 50 µs a call, and the judge's clock 100: they may be 2 apart"
    card.faults["confirm", "mine:f"] = WorkerError(Status.DAMAGED, said)
    verdict = of(card, strict=True)
    assert (verdict.verdict, verdict.time_us, verdict.trusted_us) == ("unconfirmed", None, None)
    assert said in verdict.reason


def test_a_fault_in_the_strict_judges_process_is_none_of_the_callables(card):
    fault = WorkerError(Status.LAUNCH_ERROR, "CUDARuntimeError: an illegal memory access")
    card.faults["replay", "mine:f"] = fault
    verdict = of(card, strict=True)
    assert (verdict.verdict, verdict.exit_code) == ("unconfirmed", 4)
    assert "the judge failed: while timing: CUDARuntimeError" in verdict.reason
    assert of(card).verdict == "refused"


def test_a_stranger_is_prepared_when_the_libraries_are(card):
    of(card, strict=True)
    assert card.names("add_baseline") == [*AGAINST, "mine:f"]


def test_the_strict_judge_takes_gradients_and_no_rows_that_are_too_wide(card):
    backward = replace(PROBLEM, op=BACKWARD)
    card.times = {name: 9 * us for name, us in card.times.items()}
    assert judge("mine:f", backward, strict=True).form == "chain"
    with pytest.raises(SpecError, match="no inputs that can be drawn anew"):
        judge("mine:f", replace(PROBLEM, head_dim=2048), strict=True)


def test_the_command_is_strict_and_tells_no_seed(card, attnsweep):
    done = attnsweep("judge", "mine:f", "4,32,4096,128", "--dtype", "bf16", "--strict", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["form"]) == (0, "chain")
    assert str(card.opened[0]["seed"]) not in done.stdout
    assert not {"seed", "inputs", "contents"} & {*found}
