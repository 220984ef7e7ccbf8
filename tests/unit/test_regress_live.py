"""Old code against new with a stand-in for the GPU: every verdict, and every bad baseline."""

import errno
import json
import lzma
import os
import shutil
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fake_comparison import FAMILIES, Card, recorded_run, use_card
from fake_compiler import REGISTERS, FakeCompiler
from samples import TEST_GPU

from attnsweep.bench.gpu import WorkerError
from attnsweep.core.errors import CompileError, NoGpuError
from attnsweep.core.files import read_code
from attnsweep.core.trial import Status
from attnsweep.store.run import open_run

SPEC = """
problems:
  - {batch: 1, heads: 2, seqlen: 64, head_dim: 64}
  - {batch: 1, heads: 2, seqlen: 128, head_dim: 64}
kernels: {burns: {}}
baselines: []
check: {slower: 0.02, budget_s: 0.5}
"""
LABELS = ["(1,2,64,64) fp16 full", "(1,2,128,64) fp16 full"]


@pytest.fixture(autouse=True)
def card(monkeypatch):
    return use_card(monkeypatch, Card())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of SPEC as a sweep leaves it, measured on TEST_GPU."""
    return recorded_run(tmp_path_factory.mktemp("recorded"), SPEC)


@pytest.fixture
def baseline(recorded, tmp_path):
    return Path(shutil.copytree(recorded, tmp_path / "baseline"))


@pytest.fixture
def families(tmp_path):
    """Today's kernels, which a test may change."""
    return Path(shutil.copytree(FAMILIES, tmp_path / "families"))


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def changed(families):
    """Other machine code that computes the same."""
    edit(families / "burns.cu", "EXTRA_CYCLES 0", "EXTRA_CYCLES 8000")
    return families


@pytest.fixture
def check(tmp_path, baseline, families, attnsweep):
    """Run the command; returns its exit code, findings by problem, and stderr."""
    (tmp_path / "ci.yaml").write_text(SPEC)

    def run(*options, spec="ci.yaml"):
        asked = ("--against", baseline, "--json", "--kernels", families, *options)
        done = attnsweep("check", tmp_path / spec, *asked)
        data = json.loads(done.stdout) if done.stdout else None
        return done.returncode, data, " ".join(done.stderr.split())

    return run


def verdicts(data):
    return [each["verdict"] for each in data["problems"]]


def undecided(found, *said):
    """No problem could be compared, and the first says why."""
    code, data, _ = found
    assert (code, verdicts(data)) == (4, ["inconclusive"] * 2)
    for why in said:
        assert why in data["problems"][0]["why"]


def without_launches(run):
    for path in (run / "cubins").glob("*.json"):
        path.unlink()


# -- verdicts ---------------------------------------------------------------------------------


def test_code_that_did_not_change_passes_by_construction_once_it_is_right(check, card):
    card.ratios = (1.5,) * 20  # would be called slower if it were timed
    code, data, _ = check()
    assert (code, verdicts(data)) == (0, ["pass", "pass"])
    assert all("same machine code" in each["why"] for each in data["problems"])
    assert len(card.names("trial")) == 2
    assert not card.names("replay")
    card.faults["trial", "any"] = WorkerError(Status.WRONG, "relative error 1e-01 over the limit")
    code, data, _ = check()
    assert (code, verdicts(data)) == (1, ["wrong", "wrong"])
    assert data["problems"][0]["why"] == "wrong: relative error 1e-01 over the limit"


@pytest.mark.parametrize(
    ("ratios", "verdict", "code"),
    [
        ((1.0,), "pass", 0),
        ((1.008,), "pass", 0),
        ((1.02, 1.02), "regression", 1),
        ((1.05, 1.05), "regression", 1),
        ((1.05, 1.0), "inconclusive", 4),  # where code came to lie in one process
        ((1.0, 1.05, 1.0), "inconclusive", 4),  # a pass is confirmed in another process, too
        ((1.015,), "inconclusive", 4),  # processes may hide 0.5 %
        ((1.004, 1.012, 1.006, 1.009), "pass", 0),
        ((1.018, 1.026, 1.021, 1.02), "regression", 1),
        ((0.95,), "improvement", 0),
    ],
)
def test_changed_code_is_timed(check, changed, card, ratios, verdict, code):
    card.ratios = (*ratios, *ratios[-1:] * 20)
    found, data, _ = check()
    assert verdicts(data) == [verdict] * 2  # both have a turn in each process
    assert found == code
    first = data["problems"][0]
    assert first["rounds"] >= 20
    low, high = first["interval"]
    assert low <= first["ratio"] <= high
    assert min(ratios) - 0.003 < first["ratio"] < max(ratios) + 0.003
    of_medians = first["new"]["time_us"] / first["old"]["time_us"]
    assert min(ratios) - 0.01 < of_medians < max(ratios) + 0.01


def test_noise_beyond_the_budget_is_inconclusive(check, changed, card):
    card.noise, card.replay_s = 0.3, 0.02
    code, data, _ = check("--budget-s", "10")
    assert (code, verdicts(data)) == (4, ["inconclusive"] * 2)
    for each in data["problems"]:
        assert "when the budget of 10 s ended: raise --budget-s, or use a quiet" in each["why"]


def test_each_problem_has_its_own_threshold(check, changed, card, tmp_path):
    card.ratios = (1.05,) * 20
    text = SPEC.replace("seqlen: 128, head_dim: 64", "seqlen: 128, head_dim: 64, slower: 0.2")
    (tmp_path / "own.yaml").write_text(text)
    code, data, _ = check(spec="own.yaml")
    assert (code, verdicts(data)) == (1, ["regression", "pass"])
    assert [each["slower"] for each in data["problems"]] == [None, 0.2]
    code, data, _ = check("--slower", "0.2", spec="own.yaml")
    assert (code, verdicts(data)) == (0, ["pass", "pass"])


@pytest.mark.parametrize(
    ("call", "status", "verdict", "why"),
    [
        (("trial", "any"), Status.WRONG, "wrong", "wrong: no good"),
        (("trial", "any"), Status.LAUNCH_ERROR, "wrong", "launch error: no good"),
        (("trial", "any"), Status.TIMEOUT, "wrong", "timeout: no good"),
        (("replay", "new"), Status.LAUNCH_ERROR, "wrong", "while timing: no good"),
        (("confirm", "new"), Status.LAUNCH_ERROR, "wrong", "while timing: no good"),
        # No verdict on the new code.
        (("add", "old"), Status.LAUNCH_ERROR, "inconclusive", "the baseline's code does not run"),
        (("open", "any"), Status.LAUNCH_ERROR, "inconclusive", "cannot open the problem: no good"),
    ],
    ids=str,
)
def test_code_that_fails(check, changed, card, call, status, verdict, why):
    card.faults[call] = WorkerError(status, "no good\nand more")
    code, data, _ = check()
    assert (code, verdicts(data)) == ({"wrong": 1, "inconclusive": 4}[verdict], [verdict] * 2)
    said = data["problems"][0]["why"]
    assert why in said
    assert verdict == "inconclusive" or "and more" not in said


NO_TYPE = "burns.cu(12): error: invalid combination of type specifiers"


@pytest.mark.parametrize(
    ("asked", "log", "why"),
    [
        (f"require: {{registers: '< {REGISTERS}'}}", None, f"the spec requires < {REGISTERS}"),
        ("", NO_TYPE, f"compile error: {NO_TYPE}"),
    ],
)
def test_code_that_does_not_compile_or_is_not_as_the_spec_asks_is_wrong(check, changed, tmp_path, asked, log, why):
    (tmp_path / "ci.yaml").write_text(f"{SPEC}{asked}\n")
    if log is not None:
        FakeCompiler.errors["burns.cu"] = CompileError(log, log=log)
    code, data, _ = check()
    assert (code, verdicts(data)) == (1, ["wrong", "wrong"])
    assert data["problems"][0]["why"].endswith(why)


# -- baselines that cannot be compared with ---------------------------------------------------


def test_another_gpu_is_refused_and_another_driver_unless_it_is_asked_for(check, changed, card):
    card.environment = TEST_GPU.model_copy(update={"gpu": "NVIDIA Test 2"})
    undecided(check(), "another GPU: NVIDIA Test 1, then NVIDIA Test 2", "attnsweep run SPEC")
    card.environment = TEST_GPU.model_copy(update={"driver": "590.1"})
    undecided(check(), f"driver {TEST_GPU.driver}, this machine has 590.1")
    code, data, _ = check("--other-driver")
    assert (code, verdicts(data)) == (0, ["pass", "pass"])
    assert data["differences"] == [f"driver {TEST_GPU.driver} → 590.1"]


def test_another_problem_set(check, tmp_path):
    other = SPEC.replace("seqlen: 128", "seqlen: 256")
    (tmp_path / "other.yaml").write_text(other)
    code, data, _ = check(spec="other.yaml")
    assert code == 4
    assert verdicts(data) == ["pass", "inconclusive", "inconclusive"]
    assert "the baseline lacks this problem" in data["problems"][1]["why"]
    assert "only the baseline has it" in data["problems"][2]["why"]


def launches(edited):
    """Has a test edit what is kept of the winners' launches."""

    def spoil(baseline, *_):
        for path in (baseline / "cubins").glob("*.json"):
            code = json.loads(path.read_bytes())
            edited(code)
            path.write_text(json.dumps(code))

    return spoil


def renamed(_, families):
    edit(families / "burns.py", '"CYCLES", (400_000,)', '"TICKS", (400_000,)')
    edit(families / "burns.cu", "CYCLES +", "TICKS +")


def ruled_out(_, families):
    with (families / "burns.py").open("a") as file:
        file.write('\n\n@kernel.rule("short")\ndef short(config, problem, arch):\n    return config.CYCLES < 9\n')


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda run, _: without_launches(run), "the run lacks the winner's launches; record again"),
        (lambda run, _: shutil.rmtree(run / "cubins"), "the run lacks the winner's machine code"),
        (lambda run, _: (run / "environment.json").unlink(), "no usable environment.json"),
        (launches(lambda code: code["config"].update(CYCLES=7)), "the stored code is not the winner's"),
        (launches(lambda code: code["digests"].clear()), "invalid cubin name"),
        (launches(lambda code: code["plan"]["stages"][0].update(cubin="../../x.cubin")), "invalid cubin name"),
        (launches(lambda code: code.pop("plan")), "not the launches of a winner: plan"),
        (renamed, "burns lost parameter 'CYCLES', gained parameter 'TICKS'"),
        (ruled_out, "the rule short refuses CYCLES=400000"),
    ],
)
def test_what_cannot_be_compared_with_is_inconclusive_and_says_why(check, baseline, families, spoil, why):
    spoil(baseline, families)
    undecided(check(), why)


def test_a_kernel_that_is_not_there_any_more(check, families, tmp_path):
    for name in ("burns.py", "burns.cu"):
        (families / name).unlink()
    (tmp_path / "left.yaml").write_text(SPEC.replace("burns: {}", "naive: {}"))
    undecided(check(spec="left.yaml"), "the baseline's winner, kernel 'burns', no longer exists")
    code, data, err = check()  # the spec still names it
    assert (code, data) == (2, None)
    assert "unknown kernel 'burns'" in err


@pytest.mark.parametrize(
    ("spoil", "exit_code", "said"),
    [
        (lambda baseline, _, __: shutil.rmtree(baseline), 2, ["no such run"]),
        (lambda baseline, spec, _: edit(spec, "check:", f"device: replay\nrecording: {baseline}\ncheck:"), 2,
         ["replays a recording"]),
        (lambda _, __, card: setattr(card, "environment", NoGpuError("no CUDA GPU found")), 3,
         ["Nothing was compared", "--mode compile", "--recorded OLD NEW"]),
    ],
    ids=["no run", "a spec that replays", "no GPU"],
)  # fmt: skip
def test_where_nothing_is_measured_there_is_an_error_and_no_verdict(
    check, baseline, card, tmp_path, spoil, exit_code, said
):
    spoil(baseline, tmp_path / "ci.yaml", card)
    code, data, err = check()
    assert (code, data) == (exit_code, None)
    assert all(words in err for words in said)


def test_a_damaged_or_missing_cubin(check, baseline):
    one, two = sorted((baseline / "cubins").glob("*.cubin.xz"))
    whole = lzma.decompress(one.read_bytes())
    for damage, why in (
        (one.read_bytes()[:-1], "the cubin cannot be read: damaged"),
        (lzma.compress(whole[:-1]), "the cubin is damaged: wrong SHA-256"),
    ):
        one.write_bytes(damage)
        two.unlink(missing_ok=True)
        code, data, _ = check()
        assert (code, verdicts(data)) == (4, ["inconclusive"] * 2)
        reasons = " ".join(each["why"] for each in data["problems"])
        assert why in reasons
        assert "the cubin cannot be read: No such file" in reasons


def test_a_corrupt_run_never_passes(check, baseline):
    path = baseline / "trials.jsonl"
    path.write_text(path.read_text() + '{"kernel": 3}\n')
    code, data, _ = check()
    assert (code, verdicts(data)) == (4, ["pass", "pass"])
    assert "trials.jsonl:5: skipped, not a trial" in data["damage"][0]
    path.write_text("no json\n")
    code, data, err = check()
    assert (code, data) == (2, None)
    assert "none of its rows can be read" in err
    assert "skipped, not a trial" in err


def test_a_run_whose_winner_s_row_is_lost_is_not_compared_with_another(check, baseline):
    path = baseline / "trials.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join("x" + row if '"seqlen_q":64' in row else row for row in rows))
    code, data, _ = check()
    assert code == 4
    assert verdicts(data) == ["inconclusive", "pass"]


# -- how it is written ------------------------------------------------------------------------


def test_junit_markdown_and_the_job_s_summary(check, changed, card, tmp_path, monkeypatch):
    pytest.importorskip("junitparser", reason="needs the ci extra: junitparser")
    card.ratios = (1.05,) * 20
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "summary.md").write_text("before\n")
    check("--junit", tmp_path / "check.xml")
    suite = ElementTree.parse(tmp_path / "check.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "2", "0")
    assert [case.get("name") for case in suite.iter("testcase")] == LABELS
    assert suite.find(".//failure").get("type") == "regression"
    assert {case.get("classname") for case in suite.iter("testcase")} == {"attnsweep.check.ci"}
    assert (datetime.now(UTC) - datetime.fromisoformat(suite.get("timestamp"))).total_seconds() < 60
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("before\n")
    assert summary.count("| regression |") == 2
    check("--markdown", tmp_path / "own.md")
    assert (tmp_path / "own.md").read_text().count("| regression |") == 2
    assert (tmp_path / "summary.md").read_text() == summary
    assert all(each["took_s"] > 0 for each in check()[1]["problems"])


def test_junit_shows_damage_as_an_error_of_its_own(check, baseline, tmp_path):
    pytest.importorskip("junitparser", reason="needs the ci extra: junitparser")
    path = baseline / "trials.jsonl"
    path.write_text(path.read_text() + '{"kernel": "\x01"}\n')
    check("--junit", tmp_path / "check.xml")
    suite = ElementTree.parse(tmp_path / "check.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "1")


@pytest.mark.parametrize("options", [[], ["--recorded", "--against", "x"], ["--recorded"]])
def test_one_way_of_checking_must_be_chosen(options, attnsweep, baseline):
    done = attnsweep("check", baseline, *options)
    assert done.returncode == 2
    assert "--against RUN" in done.stderr


def files(directory):
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_an_accepted_run_is_the_baseline_from_then_on(accept, recorded, tmp_path):
    target = tmp_path / "base" / "line"
    code, out, _ = accept(recorded, target)
    assert code == 0
    assert "2 trials" in out
    packed = files(target)
    kept = {name: data for name, data in files(recorded).items() if name in packed}
    assert {path.name for path in set(packed) - set(kept)} == {"trials.jsonl.xz", "cubins.tar.xz"}
    code = sorted((recorded / "cubins").glob("*.cubin.xz"))
    assert {path.name for path in set(files(recorded)) - set(kept)} == {
        *(".lock", "trials.jsonl", "ranking.csv", "ranking.md"),
        *(path.name for path in code),
    }
    for path in code:
        assert read_code(target / "cubins" / path.name) == read_code(path)
    assert [t.with_(fingerprint=None) for t in open_run(recorded).trials] == open_run(target).trials
    (target / "cubins" / "stale.cubin").write_text("of the last one")
    assert accept(recorded, target)[0] == 0
    assert files(target) == packed
    assert [path.name for path in target.parent.iterdir()] == ["line"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda run: shutil.rmtree(run / "cubins"), "lacks the winner's machine code"),
        (without_launches, "lacks the winner's launches"),
        (lambda run: (run / "environment.json").unlink(), "no environment.json"),
        (lambda run: edit(run / "trials.jsonl", '"ok"', '"noisy"'), "has no winner"),
        (lambda run: edit(run / "spec.yaml", "name: spec", "name: other"), "its spec is 'other'"),
        (lambda run: edit(run / "environment.json", "Test 1", "Test 9"), "NVIDIA Test 9"),
        (lambda run: edit(run / "environment.json", '"sm_count": 132', '"sm_count": 66'), "132 SMs, then 66"),
    ],
)
def test_what_is_no_next_baseline_is_refused_and_nothing_changes(accept, recorded, baseline, tmp_path, spoil, why):
    candidate = Path(shutil.copytree(recorded, tmp_path / "candidate"))
    spoil(candidate)
    before = files(baseline)
    code, _, err = accept(candidate, baseline)
    assert code == 2
    assert "not accepted" in err
    assert why in err
    assert files(baseline) == before
    code, _, err = accept(candidate, baseline, "--force")
    assert code == 0
    assert "accepted although" in err


def test_a_full_disk_is_one_line_and_the_baseline_stays(accept, recorded, baseline, monkeypatch):
    """It was the list that shutil raises, of Python tuples."""
    before = files(baseline.parent)

    def full(source, to, **_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(source), None, os.fspath(to))

    monkeypatch.setattr(shutil, "copyfile", full)
    code, _, err = accept(recorded, baseline)
    why = "cannot be replaced: No space left on device"
    hint = f"{baseline.parent.resolve()} must be a writable directory with room for a copy"
    assert (code, " ".join(err.split())) == (2, f"error: {baseline}: {why} {hint}")
    assert files(baseline.parent) == before


def test_accept_spares_what_is_no_run(accept, recorded, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    code, _, err = accept(recorded, tmp_path / "mine")
    assert code == 2
    assert "exists, and is not a run" in err
    assert accept(recorded, recorded)[0] == 2
    assert accept(recorded, recorded.parent)[0] == 2


def test_accept_spares_a_run_and_notes_within_the_baseline(accept, recorded, tmp_path):
    accept(recorded, tmp_path / "base")
    accept(recorded, tmp_path / "base" / "another")
    (tmp_path / "base" / "notes.txt").write_text("why")
    before = files(tmp_path)
    code, _, err = accept(recorded, tmp_path / "base", "--force")
    assert code == 2
    assert "more than a run: another, notes.txt" in err
    assert files(tmp_path) == before
