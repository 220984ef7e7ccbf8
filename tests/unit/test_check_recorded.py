"""Two recorded runs compared: the verdicts, what they rest on, and how they are written."""

from __future__ import annotations

import gzip
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from samples import H200, baseline, candidate, failed, full_run

from attnsweep import cli
from attnsweep.check import recorded as regress
from attnsweep.check.verdicts import Comparison, Finding, Verdict
from attnsweep.problem import Problem
from attnsweep.trial import Measurement, Status

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "results" / "h200" / "mma_h200"


def run(*trials, directory="old", **changes):
    return full_run(Path(directory), trials=list(trials), **changes)


def judged(old, new, slower=0.03):
    (finding,) = regress.compare(old, new, slower=slower).findings
    return finding


def wide(row, share):
    """The same row with rounds that scatter by this share."""
    middle = row.time_us.median
    rounds = [middle * (1 + share * (i % 5 - 2) / 2) for i in range(15)]
    return row.with_(
        time_us=Measurement(
            median=middle, low=min(rounds), high=max(rounds), samples=15, rounds=rounds
        )
    )


BEFORE = run(candidate("flash", 20.0, M=64), baseline("torch_cudnn", 30.0))


@pytest.mark.parametrize(
    ("us", "peer_us", "verdict"),
    [
        (20.0, 30.0, Verdict.PASS),
        (20.4, 30.0, Verdict.PASS),
        (21.0, 30.0, Verdict.REGRESSION),
        (19.0, 30.0, Verdict.IMPROVEMENT),
        (20.6, 30.0, Verdict.INCONCLUSIVE),  # about the limit
        (21.0, 31.5, Verdict.INCONCLUSIVE),  # the baseline is 5 % slower too
        (19.0, 28.5, Verdict.PASS),  # no improvement, but at worst as fast
        (20.0, 28.5, Verdict.INCONCLUSIVE),
        (21.0, 28.5, Verdict.REGRESSION),
        (23.0, 31.5, Verdict.REGRESSION),  # by more than the drift
    ],
)
def test_a_difference_counts_beyond_scatter_and_drift(us, peer_us, verdict):
    after = run(candidate("flash", us, M=64), baseline("torch_cudnn", peer_us))
    found = judged(BEFORE, after)
    assert found.verdict is verdict, found
    assert found.ratio == pytest.approx(us / 20)
    assert found.low <= found.ratio <= found.high
    assert found.drift == pytest.approx((peer_us / 30, peer_us / 30))


def test_scatter_hides_what_it_is_larger_than():
    after = run(candidate("flash", 21.0, M=64), baseline("torch_cudnn", 30.0))
    noisy = run(wide(candidate("flash", 21.0, M=64), 0.1), baseline("torch_cudnn", 30.0))
    assert judged(BEFORE, after).verdict is Verdict.REGRESSION
    assert judged(BEFORE, noisy).verdict is Verdict.INCONCLUSIVE


def test_the_limit_is_the_reader_s():
    after = run(candidate("flash", 21.0, M=64), baseline("torch_cudnn", 30.0))
    assert judged(BEFORE, after, slower=0.1).verdict is Verdict.PASS
    assert judged(BEFORE, after, slower=0.0).verdict is Verdict.REGRESSION


@pytest.mark.parametrize(
    ("after", "verdict", "why"),
    [
        (
            run(failed("flash", Status.WRONG, "err", M=64), baseline("torch_cudnn", 30.0)),
            Verdict.REGRESSION,
            "no candidate is ok now: 1 wrong",
        ),
        (run(candidate("flash", 40.0, M=64)), Verdict.INCONCLUSIVE, "no baseline has rounds in"),
        (
            run(
                candidate("flash", 40.0, M=64),
                baseline("torch_cudnn", 30.0),
                environment=H200.model_copy(update={"gpu": "NVIDIA H100"}),
            ),
            Verdict.INCONCLUSIVE,
            "measured on another GPU: NVIDIA H200, then NVIDIA H100",
        ),
        (
            run(candidate("flash", 40.0, M=64), baseline("torch_cudnn", 30.0), environment=None),
            Verdict.INCONCLUSIVE,
            "no environment.json",
        ),
        (
            run(
                candidate("flash", 40.0, M=64).with_(
                    time_us=Measurement(median=40.0, low=40.0, high=40.0, samples=1)
                ),
                baseline("torch_cudnn", 30.0),
            ),
            Verdict.INCONCLUSIVE,
            "the new run timed its best candidate without rounds",
        ),
        (
            run(candidate("flash", 40.0).with_(problem=Problem(1, 1, 1, 8, 8, 64))),
            Verdict.INCONCLUSIVE,
            "the new run does not contain this problem",
        ),
    ],
    ids=["wrong", "no-baseline", "other-gpu", "unknown", "timed-once", "other-problem"],
)
def test_what_cannot_be_told_is_inconclusive_and_says_why(after, verdict, why):
    found = judged(BEFORE, after)
    assert found.verdict is verdict
    assert why in found.why


def test_what_was_never_ok_and_now_is_improved():
    before = run(failed("flash", Status.WRONG, "err", M=64), baseline("torch_cudnn", 30.0))
    assert judged(before, BEFORE).verdict is Verdict.IMPROVEMENT
    assert judged(before, before).verdict is Verdict.INCONCLUSIVE


def test_another_winner_is_named():
    after = run(candidate("flash", 25.0, M=128), baseline("torch_cudnn", 30.0))
    assert judged(BEFORE, after).why.endswith("; the best was flash M=64, is flash M=128")


def test_in_what_the_runs_differ_is_listed():
    other = H200.model_copy(update={"driver": "590.1", "packages": {"torch": "2.9"}})
    after = run(*BEFORE.trials, environment=other)
    found = regress.compare(BEFORE, after, slower=0.03)
    assert found.differences == ("driver 580.95.05 → 590.1", "torch absent → 2.9")


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 4),
        ([Verdict.PASS, Verdict.IMPROVEMENT], 0),
        ([Verdict.PASS, Verdict.INCONCLUSIVE], 4),
        ([Verdict.INCONCLUSIVE, Verdict.REGRESSION, Verdict.PASS], 1),
    ],
)
def test_the_exit_code_is_of_the_worst(verdicts, code):
    findings = tuple(Finding("p", verdict, "") for verdict in verdicts)
    assert Comparison(Path("a"), Path("b"), 0.03, findings, ()).exit_code == code
    damaged = Comparison(Path("a"), Path("b"), 0.03, findings, (), damage=("torn",))
    assert damaged.exit_code == (code or 4)  # a measured regression is none the less one


def test_what_is_left_of_a_damaged_recording_proves_nothing():
    rows = [candidate("flash", 25.0, M=64), baseline("torch_cudnn", 30.0)]
    slower = run(*rows)
    damaged = run(*rows, warnings=["trials.jsonl:3: skipped, not a trial"])
    assert regress.compare(BEFORE, slower, slower=0.03).exit_code == 1
    found = regress.compare(BEFORE, damaged, slower=0.03)
    assert found.exit_code == 4
    assert {finding.verdict for finding in found.findings} == {Verdict.INCONCLUSIVE}
    assert all("a run is damaged; its remaining rows say " in f.why for f in found.findings)


# -- the command ------------------------------------------------------------------------------


@pytest.fixture
def main(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["attnsweep", "check", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def slower(tmp_path):
    """The recorded run with our kernels 10 % slower on its second problem."""
    shutil.copytree(RECORDED, tmp_path / "slower")
    path = tmp_path / "slower" / "trials.jsonl"
    with gzip.open(RECORDED / "trials.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        problem, time = row["problem"], row["time_us"]
        second = problem["causal"] and problem["seqlen_q"] == 1024
        if second and time and row["provider"] == "attnsweep":
            time["rounds"] = [1.1 * us for us in time["rounds"]]
            row["time_us"] = time | {k: 1.1 * time[k] for k in ("median", "low", "high")}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def test_a_run_is_no_regression_of_itself(main):
    code, out, _ = main("--recorded", RECORDED, RECORDED)
    assert code == 0
    assert "5 pass; slower means more than 3 %" in out
    assert "It cannot show why" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 120


def test_a_regression_ends_in_1_and_in_every_format(main, slower, tmp_path):
    pytest.importorskip("junitparser", reason="needs the ci extra: junitparser")
    files = ["--junit", tmp_path / "j.xml", "--markdown", tmp_path / "c.md"]
    code, out, _ = main("--recorded", RECORDED, slower, "--json", *files)
    assert code == 1
    data = json.loads(out)
    verdicts = {each["problem"]: each["verdict"] for each in data["problems"]}
    assert verdicts.pop("(1,16,1024,64) fp16 causal") == "regression"
    assert set(verdicts.values()) == {"pass"}
    assert data["exit_code"] == 1
    suite = ElementTree.parse(tmp_path / "j.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "0")
    (failure,) = suite.iter("failure")
    assert failure.get("message").startswith("slower by at least 9.")
    table = (tmp_path / "c.md").read_text()
    assert table.count("| regression |") == 1
    assert table.count("| pass |") == 4


def test_without_recorded_it_says_that_it_does_not_measure(main):
    code, out, err = main(RECORDED, RECORDED)
    assert (code, out) == (2, "")
    assert "--recorded" in err


def test_no_such_run_is_a_usage_error(main, tmp_path):
    code, _, err = main("--recorded", RECORDED, tmp_path / "none")
    assert code == 2
    assert "no such run" in err


def test_a_report_that_cannot_be_written_says_where(main, tmp_path):
    code, _, err = main("--recorded", RECORDED, RECORDED, "--markdown", tmp_path / "no/c.md")
    assert code == 2
    assert "no/c.md: cannot write" in " ".join(err.split())
