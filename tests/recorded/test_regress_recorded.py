"""Two recorded runs compared: the verdicts, what they rest on, and how they are written."""

import json
import lzma
import math
import random
import shutil
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from samples import H200, baseline, candidate, failed, full_run

from attnsweep.choose.ranking import rank, winners
from attnsweep.core.problem import Problem
from attnsweep.core.trial import PROTOCOL, Accuracy, Measurement, Status
from attnsweep.regress import recorded as regress
from attnsweep.regress.verdicts import Comparison, Finding, Verdict, other_machine
from attnsweep.store.run import open_run

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "results" / "h200" / "mma_h200"


def run(*trials, directory="old", **changes):
    return full_run(Path(directory), trials=list(trials), **changes)


def judged(old, new, slower=0.03):
    (finding,) = regress.compare(old, new, slower=slower).findings
    return finding


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (candidate("flash", 22.0, M=128, N=64, K=1), "M 64 → 128"),
        (candidate("tiles", 22.0, M=64), "flash → tiles M=64"),
        (candidate("flash", 22.0, M=64, N=64, K=1), ""),
    ],
)
def test_another_winner_is_told_by_what_changed(now, says):
    """Both configs stood there whole, of 20 parameters each."""
    before = run(candidate("flash", 20.0, M=64, N=64, K=1), baseline("torch_cudnn", 30.0))
    finding = judged(before, run(now, baseline("torch_cudnn", 30.0)))
    assert finding.verdict is Verdict.REGRESSION
    assert finding.why.partition("; the best candidate changed: ")[2] == says


def wide(row, share):
    """The same row with rounds that scatter by this share."""
    middle = row.time_us.median
    rounds = [middle * (1 + share * (i % 5 - 2) / 2) for i in range(15)]
    return row.with_(time_us=Measurement(median=middle, low=min(rounds), high=max(rounds), samples=15, rounds=rounds))


BEFORE = run(candidate("flash", 20.0, M=64), baseline("torch_cudnn", 30.0))


@pytest.mark.parametrize(
    ("us", "their_us", "verdict"),
    [
        (20.01, 30.0, Verdict.PASS),
        (20.2, 30.0, Verdict.PASS),
        (20.4, 30.0, Verdict.INCONCLUSIVE),  # sessions may hide 1.5 %: it may be 3.5 % slower
        (20.6, 30.0, Verdict.INCONCLUSIVE),  # about the limit
        (21.0, 30.0, Verdict.REGRESSION),
        (19.0, 30.0, Verdict.IMPROVEMENT),
        (21.0, 31.5, Verdict.PASS),  # the baseline is 5 % slower too
        (19.0, 28.5, Verdict.PASS),
        (20.01, 28.5, Verdict.REGRESSION),  # as fast, in a session that is faster
        (21.0, 28.5, Verdict.REGRESSION),
        (20.01, 31.5, Verdict.IMPROVEMENT),
    ],
)
def test_a_time_is_compared_by_its_ratio_to_the_baseline(us, their_us, verdict):
    after = run(candidate("flash", us, M=64), baseline("torch_cudnn", their_us))
    found = judged(BEFORE, after)
    assert found.verdict is verdict, found
    assert found.ratio == pytest.approx(us / 20 / (their_us / 30), rel=1e-3)
    assert found.low < found.ratio < found.high
    assert found.drift == pytest.approx((their_us / 30, their_us / 30))


def rounds(row, values):
    """The same row with these rounds."""
    time = row.time_us.model_copy(update={"median": median(values), "rounds": list(values), "samples": len(values)})
    return row.with_(time_us=time)


def test_drift_within_a_run_cancels_round_by_round():
    """Clocks move the rounds of both by 10 %: raw medians say nothing, paired ones nearly all."""
    pace = [1 + 0.1 * math.sin(n) for n in range(15)]
    runs = []
    for us, first in ((20.0, 0), (20.1, 4)):
        turned = pace[first:] + pace[:first]
        ours = rounds(candidate("flash", us, M=64), [us * p for p in turned])
        other = rounds(baseline("torch_cudnn", 30.0), [30.0 * p for p in turned])
        runs.append(run(ours, other))
    found = judged(*runs)
    assert found.verdict is Verdict.PASS
    assert found.high - found.low < 0.04


def test_a_slow_baseline_is_paired_in_its_five_rounds():
    slow = baseline("unfused", 90.0)
    slow = rounds(slow, slow.time_us.rounds[:5])
    before = run(candidate("flash", 20.0, M=64), slow)
    assert judged(before, run(candidate("flash", 22.0, M=64), slow)).verdict is Verdict.REGRESSION
    four = rounds(slow, slow.time_us.rounds[:4])
    found = judged(before, run(candidate("flash", 22.0, M=64), four))
    assert found.why == "no baseline has rounds in both runs, so the drift is unknown"


def test_a_baseline_that_was_timed_again_is_paired_in_its_own_rounds():
    """Its last series is of rounds 15 to 29, in which the clock was lower than before."""
    pace = [1.0] * 15 + [1.2] * 15
    ours = rounds(candidate("flash", 20.0, M=64), [20 * p for p in pace])
    other = rounds(baseline("torch_cudnn", 30.0), [30 * p for p in pace[15:]])
    late = other.with_(time_us=other.time_us.model_copy(update={"first_round": 15}))
    found = judged(run(ours, late), BEFORE)
    assert found.verdict is Verdict.PASS
    assert found.ratio == pytest.approx(1, rel=1e-3)
    # Without a round in common there is no ratio, whatever the positions say.
    apart = late.with_(time_us=late.time_us.model_copy(update={"first_round": 30}))
    found = judged(run(ours, apart), BEFORE)
    assert found.why == "no baseline has rounds in both runs, so the drift is unknown"


def compared(*changes):
    return [regress.BaselineChange(math.log(c), 0.0, 0.0, 1.0) for c in changes]


def test_baselines_that_disagree_widen_the_interval_and_one_stranger_does_not():
    alone = regress.combined(compared(1.0))
    assert alone == pytest.approx((1.0, math.exp(-0.0147), math.exp(0.0147)), abs=1e-4)
    together = regress.combined(compared(1.001, 1.0, 0.999))
    assert together == pytest.approx(alone)  # never surer than sessions let one be
    apart = regress.combined(compared(1.04, 1.0, 0.96))
    assert apart[2] > 1.08
    stranger = regress.combined(compared(1.001, 1.0, 0.999, 1.0, 1.3))  # another version of one
    assert stranger == pytest.approx(together, abs=1e-3)


def test_sessions_that_differ_seldom_pass_a_slowdown():
    """Same code, and 3 % slower code, while every kernel moves by 0.5 % between sessions."""
    rng, passed = random.Random(5), Counter()
    for true in (1.0, 1.03):
        for _ in range(400):
            ours = true * rng.gauss(1, 0.005)
            said = [ours / rng.gauss(1, 0.005) for _ in range(3)]
            passed[true] += regress.combined(compared(*said))[2] <= 1.03
    assert passed[1.0] >= 380
    assert passed[1.03] <= 8  # 2 %


AGAIN = (candidate("flash", 20.0, M=64), baseline("torch_cudnn", 30.0))
CARD = H200.model_copy(update={"power_limit_w": 700.0})
UNLIKE = {
    "sm_count": (114, "132 SMs, then 114"),
    "l2_bytes": (25 << 20, "5.24288e+07 bytes of L2, then 2.62144e+07"),
    "power_limit_w": (350.0, "700 W of power limit, then 350"),
    "driver": ("590.1", "driver 580.95.05, then 590.1; --other-driver compares them"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_cards_of_one_name_that_differ_are_not_compared(name):
    """They passed without a word: half of a card, or a capped one, has the name of the whole."""
    value, why = UNLIKE[name]
    other = CARD.model_copy(update={name: value})
    old, new = run(*AGAIN, environment=CARD), run(*AGAIN, environment=other)
    found = judged(old, new)
    assert (found.verdict, found.why) == (Verdict.INCONCLUSIVE, f"measured with {why}")
    assert any(each.startswith(f"{name} ") for each in regress.compare(old, new, slower=0.03).differences)
    # Rows say their own, as in runs of several cards, of which environment.json has one.
    of_rows = run(*(row.with_(machine=other.machine) for row in AGAIN), environment=CARD)
    assert judged(old, of_rows).why == f"measured with {why}"
    unknown = run(*AGAIN, environment=CARD.model_copy(update={"power_limit_w": None}))
    assert judged(old, unknown).verdict is Verdict.PASS  # what nothing says is not held against it
    taken = regress.compare(old, new, slower=0.03, other_driver=True).findings[0].verdict
    assert taken is (Verdict.PASS if name == "driver" else Verdict.INCONCLUSIVE)


def test_the_recorded_runs_of_a_card_can_be_compared():
    """What differs between them, such as the host and the board's part number, is no reason."""
    runs = [open_run(path.parent).environment for path in (ROOT / "results").glob("*/*/environment.json")]
    for one in runs:
        for other in runs:
            if one.gpu == other.gpu:
                assert other_machine(one.machine, other.machine) is None


@pytest.mark.parametrize(
    ("after", "verdict", "why"),
    [
        (run(failed("flash", Status.WRONG, "err", M=64), baseline("torch_cudnn", 30.0)), Verdict.REGRESSION,
         "no candidate is ok now: 1 wrong"),
        (run(candidate("flash", 40.0, M=64)), Verdict.INCONCLUSIVE, "no baseline has rounds in"),
        (run(candidate("flash", 40.0, M=64), baseline("torch_cudnn", 30.0),
         environment=H200.model_copy(update={"gpu": "NVIDIA H100"})), Verdict.INCONCLUSIVE,
         "measured on another GPU: NVIDIA H200, then NVIDIA H100"),
        (run(candidate("flash", 40.0, M=64), baseline("torch_cudnn", 30.0), environment=None), Verdict.INCONCLUSIVE,
         "no usable environment.json"),
        (run(candidate("flash", 40.0, M=64).with_(time_us=Measurement(median=40.0, low=40.0, high=40.0, samples=1)),
         baseline("torch_cudnn", 30.0)), Verdict.INCONCLUSIVE, "the new run timed its best candidate without rounds"),
        (run(candidate("flash", 40.0).with_(problem=Problem(1, 1, 1, 8, 8, 64))), Verdict.INCONCLUSIVE,
         "the new run does not contain this problem"),
    ],
    ids=["wrong", "no-baseline", "other-gpu", "unknown", "timed-once", "other-problem"],
)  # fmt: skip
def test_what_cannot_be_told_is_inconclusive_and_says_why(after, verdict, why):
    found = judged(BEFORE, after)
    assert found.verdict is verdict
    assert why in found.why


NAN, INFINITY = float("nan"), float("inf")


def with_time(row, field, value):
    """The row with a time that cannot be: the median, a quartile, or the fourth round."""
    if field == "rounds":
        changed = [*row.time_us.rounds[:3], value, *row.time_us.rounds[4:]]
        return row.with_(time_us=row.time_us.model_copy(update={"rounds": changed}))
    return row.with_(time_us=row.time_us.model_copy(update={field: value}))


@pytest.mark.parametrize("value", [NAN, INFINITY, 0.0, -20.0], ids=str)
@pytest.mark.parametrize("field", ["median", "low", "rounds"])
@pytest.mark.parametrize("which", ["old", "new"])
@pytest.mark.parametrize("who", ["winner", "baseline"])
def test_a_time_that_cannot_be_is_damage_and_is_named(which, who, field, value):
    """Without its best row an old run would let a slower one pass, and a new one be blamed."""
    ours, other = candidate("flash", 20.0, M=64), baseline("torch_cudnn", 30.0)
    second = candidate("flash", 22.0, M=128)
    bad = {"winner": ours, "baseline": other}[who]
    rows = [with_time(row, field, value) if row is bad else row for row in (ours, second, other)]
    slower = candidate("flash", 21.0, M=64)
    old, new = (run(*rows), run(slower, other)) if which == "old" else (BEFORE, run(*rows))
    compared = regress.compare(old, new, slower=0.03)
    (found,) = compared.findings
    assert (found.verdict, compared.exit_code) == (Verdict.INCONCLUSIVE, 4)
    name = "flash M=64" if who == "winner" else "torch_cudnn"
    place = "time_us.rounds[3]" if field == "rounds" else f"time_us.{field}"
    said = f"the {which} run is damaged: {name} says ok, but {place} is {value}"
    assert found.why == f"{said}; record it anew"


def test_a_row_that_says_ok_over_its_limit_is_damage_too():
    wrong = candidate("flash", 20.0, M=64).with_(accuracy=Accuracy(rel_err=NAN, limit=1e-3))
    old = run(wrong, candidate("flash", 22.0, M=128), baseline("torch_cudnn", 30.0))
    found = judged(old, run(candidate("flash", 22.0, M=128), baseline("torch_cudnn", 30.0)))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "the old run is damaged: flash M=64 says ok, but its error nan" in found.why


@pytest.mark.parametrize("kinds", [("warm", "cold"), ("cold", "warm"), ("eager", "warm")])
def test_another_kind_of_time_is_not_compared(kinds):
    def timed(kind, us):
        rows = [candidate("flash", us, M=64), baseline("torch_cudnn", 30.0)]
        return run(*(r.with_(time_us=r.time_us.model_copy(update={"l2": kind})) for r in rows))

    found = judged(timed(kinds[0], 20.0), timed(kinds[1], 20.01))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.why == f"timed {kinds[0]}, then {kinds[1]}"


def test_the_same_row_passes_whatever_it_was_timed_with():
    once = Measurement(median=20.0, low=20.0, high=20.0, samples=1)
    for rows in (
        [wide(candidate("flash", 21.0, M=64), 0.3), baseline("torch_cudnn", 30.0)],
        [candidate("flash", 21.0, M=64)],
        [candidate("flash", 21.0, M=64).with_(time_us=once), baseline("torch_cudnn", 30.0)],
    ):
        found = judged(run(*rows), run(*rows))
        assert (found.verdict, found.why) == (Verdict.PASS, "both runs hold the same row")
        assert (found.low, found.ratio, found.high) == (1, 1, 1)


def test_sentences_of_one_table_agree_on_a_percent():
    faster = run(candidate("flash", 10.0, M=64), baseline("torch_cudnn", 30.0))
    found = judged(BEFORE, faster)
    assert found.verdict is Verdict.IMPROVEMENT
    assert found.why == f"faster by at least {100 * (1 - found.high):.1f} %"
    noisy = run(wide(candidate("flash", 20.0, M=64), 0.2), baseline("torch_cudnn", 30.0))
    found = judged(BEFORE, noisy)
    limits = f"{100 * (1 - found.low):.1f} % faster and {100 * (found.high - 1):.1f} % slower"
    assert found.why == f"between {limits}"


def test_what_was_never_ok_and_now_is_improved():
    before = run(failed("flash", Status.WRONG, "err", M=64), baseline("torch_cudnn", 30.0))
    assert judged(before, BEFORE).verdict is Verdict.IMPROVEMENT
    assert judged(before, before).verdict is Verdict.INCONCLUSIVE


def test_in_what_the_runs_differ_is_listed():
    other = H200.model_copy(update={"driver": "590.1", "packages": {"torch": "2.9"}})
    after = run(*BEFORE.trials, environment=other)
    found = regress.compare(BEFORE, after, slower=0.03)
    assert found.differences == ("driver 580.95.05 → 590.1", "torch absent → 2.9")


def test_times_of_another_protocol_are_not_compared():
    """Under protocol 3 a call could begin before the one ahead of it had ended."""
    runs = [run(*BEFORE.trials, environment=H200.model_copy(update={"protocol": p})) for p in (3, 4)]
    slower = run(candidate("flash", 25.0, M=64), baseline("torch_cudnn", 30.0))
    for before, after in (runs, (slower, runs[1])):
        found = judged(before, after)
        assert found.verdict is Verdict.INCONCLUSIVE
        assert found.why.startswith("timed by another protocol: ")
        assert found.why.endswith(", then protocol 4; record the older run anew")


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
def main(attnsweep):
    def run(*arguments):
        done = attnsweep("check", *arguments)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def slower(tmp_path):
    """The recorded run with our kernels 10 % slower on its second problem."""
    shutil.copytree(RECORDED, tmp_path / "slower")
    path = tmp_path / "slower" / "trials.jsonl"
    with lzma.open(RECORDED / "trials.jsonl.xz", "rt") as file:
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


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("recorded", sorted(ROOT.glob("results/*/*/cubins")), ids=str)
def test_every_recorded_run_equals_itself(recorded):
    recorded = open_run(recorded.parent)
    compared = regress.compare(recorded, recorded, slower=0.03)
    assert {finding.verdict for finding in compared.findings} == {Verdict.PASS}
    assert compared.exit_code == 0


def test_damage_ends_in_4_and_the_report_calls_it_so(main, tmp_path, attnsweep):
    damaged = tmp_path / "damaged"
    shutil.copytree(RECORDED, damaged)
    best = next(iter(winners(rank(open_run(RECORDED).trials, None))))
    with lzma.open(RECORDED / "trials.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        if (row["kernel"], row["config"]) == (best.kernel, best.config) and row["time_us"]:
            row["time_us"]["median"] = "NaN"
    (damaged / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for pair in ((damaged, RECORDED), (RECORDED, damaged)):
        code, out, _ = main("--recorded", *pair)
        assert code == 4
        which = "old" if pair[0] is damaged else "new"
        assert f"the {which} run is damaged: {best.kernel}" in " ".join(out.split())
        assert "time_us.median is nan" in " ".join(out.split())
    assert "2 damaged\n" in attnsweep("report", damaged).stdout
    shown = attnsweep("report", damaged, "--full", width=200).stdout
    assert "1 damaged: " in shown
    assert "says ok, but time_us.median is nan" in shown
    assert "noisy:" not in shown


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
    assert failure.get("message").startswith("slower by at least 8.")
    table = (tmp_path / "c.md").read_text()
    assert table.count("| regression |") == 1
    assert table.count("| pass |") == 4


# ---- every recorded run as the next baseline of `check`: accepted, or why not ----
RESULTS = Path(__file__).parent.parent.parent / "results"
RUNS = sorted(path.parent for path in RESULTS.glob("*/*/trials.jsonl.xz"))
with_code = pytest.mark.skipif((ROOT / "PKG-INFO").is_file(), reason="a source distribution has no code of winners")


@with_code
@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("directory", RUNS, ids=lambda path: path.name)
def test_a_recorded_run_is_accepted_or_is_an_older_version_s(accept, directory, tmp_path):
    """Those of an older protocol lack what launches their code, and say how to go on."""
    code, out, err = accept(directory, tmp_path / "baseline")
    if code == 0:
        assert err == ""
        assert "is now" in out
    else:
        assert open_run(directory).environment.protocol != PROTOCOL
        assert code == 2
        assert "not accepted: " in err
        assert "with --fresh if its machine code is lost" in err
        assert not (tmp_path / "baseline").exists()


@with_code
def test_a_place_that_cannot_be_written_is_named_with_the_remedy(accept, tmp_path):
    (tmp_path / "taken").touch()
    code, _, err = accept(RESULTS / "h200" / "flash_short", tmp_path / "taken" / "baseline")
    assert code == 2
    assert "Errno" not in err
    assert f"{tmp_path}/taken must be a writable directory with room for a copy" in err
