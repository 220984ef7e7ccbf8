"""Progress without a terminal: lines for a log, JSON for a program."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from samples import PROBLEM, baseline, candidate, failed, full_run

from attnsweep.core.trial import Status
from attnsweep.reports import eta, progress, terminal
from attnsweep.reports.terminal import ProgressForm, Talk


@pytest.fixture
def clock(timed_by):
    made = SimpleNamespace(now=50.0)
    timed_by(lambda: made.now, progress, eta)
    return made


@pytest.fixture
def talk(constants):
    """Sets how much is said."""
    return lambda how: constants(terminal, talk=how)


def half_a_problem(clock, observer) -> None:
    """20 of its 40 candidates, one a second, each faster than those before."""
    observer.opening(PROBLEM, 40, 0)
    for number in range(20):
        clock.now += 1.0
        observer.compiled(number + 1, 40)
        observer.tried(candidate("flash", 30.0 - number, N=number))


def watched(clock, form: ProgressForm) -> str:
    out = io.StringIO()
    with progress.watch(Console(file=out, width=100), form) as observer:
        observer.planned([40])
        half_a_problem(clock, observer)
        observer.tried(failed("flash", Status.WRONG, "no", N=99))
        observer.tried(baseline("torch_flash", 3.0))
        observer.note("a [note]")
        observer.racing(5, 10)
        observer.timing(1, 30)
    return out.getvalue()


def three_problems(clock, observer) -> None:
    """Two problems of 60 s that are over, and half of a third."""
    observer.planned([1, 1, 40])
    for number in range(2):
        observer.opening(PROBLEM, 1, 0)
        clock.now += 1.0
        observer.tried(candidate("flash", 50.0, N=100 + number))
        observer.timing(1, 30)
        clock.now += 59.0
    half_a_problem(clock, observer)


def test_a_log_has_only_counts_while_too_little_of_the_run_is_seen(clock) -> None:
    lines = watched(clock, ProgressForm.PLAIN).splitlines()
    assert lines[0].endswith("40 candidates")
    said = [line for line in lines if "compiled" in line]
    assert said == [
        "  compiled 10, checked 9 of 40  best 22.00 µs flash",
        "  compiled 20, checked 19 of 40  best 12.00 µs flash",
    ]
    assert "a [note]" in lines
    assert not [line for line in lines if " left" in line.replace("5 of 10 left", "")]


def test_json_is_an_object_a_line_with_documented_fields(clock) -> None:
    events = [json.loads(line) for line in watched(clock, ProgressForm.JSON).splitlines()]
    names = [event["event"] for event in events]
    assert names[:2] == ["planned", "problem"]
    assert names[-1] == "end"
    assert events[0] == {"event": "planned", "elapsed_s": 0.0, "problems": 1, "candidates": 40}
    assert events[1]["problem"] == PROBLEM.label
    told = [event for event in events if event["event"] == "progress"]
    assert [event["phase"] for event in told[-2:]] == ["race", "finals"]
    search = [event for event in told if event["phase"] == "search"]
    assert 15 <= len(search) <= 21  # one a second
    last = search[-1]
    assert set(last) == {
        *("event", "elapsed_s", "problem", "phase", "done", "total", "compiled", "failed"),
        *("best_us", "best_kernel", "best_config", "left_s"),
    }
    assert last["left_s"] is None
    assert (last["total"], last["best_kernel"]) == (40, "flash")
    assert told[-1]["failed"] == 1
    assert {"event": "note", "elapsed_s": 20.0, "text": "a [note]"} in events


def test_json_tells_the_last_candidate_within_a_second_of_another(clock) -> None:
    out = io.StringIO()
    with progress.watch(Console(file=out), ProgressForm.JSON) as observer:
        observer.opening(PROBLEM, 3, 0)
        for number in range(3):
            observer.tried(candidate("flash", 30.0, N=number))
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    told = [(e["done"], e["total"]) for e in events if e["event"] == "progress"]
    assert told == [(1, 3), (3, 3)]


def test_json_ends_with_its_end_although_the_run_fails(clock) -> None:
    out = io.StringIO()

    def fails() -> None:
        with progress.watch(Console(file=out), ProgressForm.JSON) as observer:
            observer.planned([1])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert json.loads(out.getvalue().splitlines()[-1])["event"] == "end"


def test_bars_show_the_time_left_of_the_whole_run(clock) -> None:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True, color_system=None)
    with progress.watch(console) as observer:
        three_problems(clock, observer)
    shown = out.getvalue()
    assert "about 40 s left" in shown
    assert "best 11.00 µs flash" in shown
    bars = [line for line in shown.splitlines() if "compile" in line]
    assert bars
    assert not [line for line in bars if "left" in line]


@pytest.mark.parametrize("form", [ProgressForm.PLAIN, ProgressForm.JSON])
def test_a_problem_that_is_over_shows_its_best_at_once(form):
    run = full_run()
    problem = run.trials[0].problem
    rows = [trial for trial in run.trials if trial.problem == problem]
    console = Console(file=io.StringIO(), width=110)
    with progress.watch(console, form) as observer:
        observer.ranked(rows, run.environment)
    text = console.file.getvalue()
    if form is ProgressForm.JSON:
        told = json.loads(text.splitlines()[0])
        assert (told["event"], told["problem"]) == ("ranked", problem.label)
        assert told["rows"][0]["rank"] == 1
    else:
        assert "× base" in text.splitlines()[0]
        assert text.splitlines()[1].split()[0].strip("*=") == "1"
        assert max(map(len, text.splitlines())) <= 110


STEPS = {"first calls": 1.234, "judge": 0.004}


def preparing(form: ProgressForm, console: Console) -> None:
    with progress.watch(console, form) as observer:
        observer.planned([40])
        observer.opening(PROBLEM, 40, 0)
        observer.prepared("problem", 2.0, {"start CUDA": 1.5})
        for done, baseline in enumerate(("torch_cudnn", "triton_flash")):
            observer.preparing(baseline, done, 2)
            observer.prepared(baseline, 1.5, STEPS)
        observer.timing(1, 30)


def test_json_tells_each_baseline_that_is_prepared_and_how_long_it_took(clock):
    out = io.StringIO()
    preparing(ProgressForm.JSON, Console(file=out))
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    told = [e for e in events if e["event"] == "progress"]
    assert [(e["phase"], e.get("baseline"), e["done"], e["total"]) for e in told] == [
        ("baselines", "torch_cudnn", 0, 2),
        ("baselines", "triton_flash", 1, 2),
        ("finals", None, 1, 30),
    ]
    prepared = [e for e in events if e["event"] == "prepared"]
    assert [e["what"] for e in prepared] == ["problem", "torch_cudnn", "triton_flash"]
    assert prepared[1] == {
        "event": "prepared", "elapsed_s": 0.0, "problem": PROBLEM.label, "what": "torch_cudnn",
        "took_s": 1.5, "steps_s": STEPS,
    }  # fmt: skip


def test_with_verbose_a_line_says_what_took_so_long(clock, talk):
    out = io.StringIO()
    preparing(ProgressForm.PLAIN, Console(file=out, width=100))
    assert "prepared" not in out.getvalue()
    talk(Talk.VERBOSE)
    preparing(ProgressForm.PLAIN, Console(file=out, width=100))
    assert "  prepared torch_cudnn in 1.5 s (first calls 1.2 s)\n" in out.getvalue()


def counted(form: ProgressForm, clock, *, on_terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=on_terminal, color_system=None)
    with progress.watch(console, form) as observer:
        for done in range(4):
            observer.exporting(done, 3)
            clock.now += 6
    return out.getvalue()


def test_a_count_is_a_bar_on_a_terminal_and_lines_elsewhere(clock, talk):
    bar = counted(ProgressForm.AUTO, clock, on_terminal=True)
    assert "compile" in bar
    assert "3/3" in bar
    lines = "compile 3 kernels\ncompile 2 of 3 kernels\n"
    assert counted(ProgressForm.AUTO, clock) == lines
    assert counted(ProgressForm.PLAIN, clock, on_terminal=True) == lines
    talk(Talk.QUIET)
    assert counted(ProgressForm.AUTO, clock) == counted(ProgressForm.AUTO, clock, on_terminal=True) == ""
