"""What a program gains: calls × (fastest baseline − winner), and where that is nothing."""

import io
import json

import pytest
from rich.console import Console
from samples import H200, PROBLEM, baseline, candidate, rounds_of

from attnsweep.core.trial import Status
from attnsweep.reports import html, tables
from attnsweep.reports.gains import gains, sentences, table
from attnsweep.reports.sections import Sections
from attnsweep.store.run import Run

OTHER = type(PROBLEM)(1, 8, 2, 512, 512, 128, "bf16", causal=True)


def entry(problem, calls=None):
    fields = problem.facts
    return fields | ({} if calls is None else {"calls": calls})


def spec(*entries, unserved=()):
    return json.dumps({"problems": [*entries], "unserved": [*unserved]})


def run_of(tmp_path, trials, text):
    return Run(tmp_path, [*trials], H200, text, [])


def found(trials, text):
    return gains(Sections(trials, H200), text)


def pair(ours, theirs, problem=PROBLEM, **changes):
    return [
        candidate("flash", ours, BLOCK_M=64).with_(problem=problem),
        baseline("torch_cudnn", theirs).with_(problem=problem, **changes),
    ]


def test_the_gain_is_calls_times_the_difference():
    got = found(pair(10.0, 12.5), spec(entry(PROBLEM, 400)))
    assert got["gain_us"] == pytest.approx(400 * 2.5)
    assert got["baseline_us"] == pytest.approx(400 * 12.5)
    assert got["problems"][0]["why"] is None
    assert sentences(got) == [
        "The program's 400 calls take 5.000\u00a0ms with the fastest baselines and 4.000\u00a0ms "
        "where a winner replaces a slower baseline: 1.00\u00a0ms less (20.0\u00a0%)."
    ]


def test_a_faster_baseline_stays_and_takes_nothing_from_the_total():
    trials = pair(10.0, 12.0) + pair(30.0, 20.0, OTHER)
    got = found(trials, spec(entry(PROBLEM, 10), entry(OTHER, 1000)))
    assert got["gain_us"] == pytest.approx(20.0)
    assert [each["gain_us"] for each in got["problems"]] == [pytest.approx(20.0), 0.0]
    assert got["problems"][1]["why"] == "the baseline is as fast, and stays"
    assert table(got)[-1][:5] == ["in all", "1,010", "", "", "0.0200"]


def test_no_gain_is_claimed_where_no_difference_was_shown():
    wide = rounds_of(10.05, wobble=1.0)
    trials = [*pair(10.0, 10.0)]
    trials[1] = trials[1].with_(time_us=wide)
    got = found(trials, spec(entry(PROBLEM, 10)))
    assert got["problems"][0]["baseline_us"] > got["problems"][0]["winner_us"]
    assert (got["gain_us"], got["problems"][0]["why"]) == (0.0, "no difference was shown")


def test_what_has_no_time_is_named_and_not_in_the_total():
    trials = [*pair(10.0, 12.0), candidate("flash", 5.0, BLOCK_M=64).with_(problem=OTHER)]
    third = type(PROBLEM)(1, 1, 1, 64, 64, 64)
    lost = {"call": "(1,8,77,64) fp16 full", "calls": 30, "reason": "dropout"}
    text = spec(entry(PROBLEM, 1), entry(OTHER, 7), entry(third, 5), unserved=[lost])
    got = found(trials, text)
    why = {each["label"]: each["why"] for each in got["problems"]}
    assert why[OTHER.label] == "no baseline was timed"
    assert why[third.label] == "not measured"
    assert (got["calls"], got["unserved_calls"]) == (1, 7 + 5 + 30)
    assert sentences(got)[1:] == [
        "Not in this: 42 calls that nothing serves, or that have no time.",
        "  30 × (1,8,77,64) fp16 full: dropout",
    ]
    assert got["unserved"] == [lost]


def test_a_noisy_baseline_counts_with_its_fastest_round():
    trials = pair(10.0, 12.0, status=Status.NOISY, detail="noisy")
    got = found(trials, spec(entry(PROBLEM, 10)))
    assert got["problems"][0]["baseline_us"] == pytest.approx(min(rounds_of(12.0).rounds))
    assert got["problems"][0]["why"] == "at least: the baseline was noisy"


@pytest.mark.parametrize("text", [None, "", "[1", "problems: 3", spec(entry(PROBLEM))])
def test_a_run_without_calls_says_nothing(tmp_path, text):
    run = run_of(tmp_path, pair(10.0, 12.5), text)
    assert "gains" not in tables.to_json(run)
    assert "ain of the program" not in tables.files(run)["ranking.md"]


def test_it_is_in_every_form_of_the_report(tmp_path):
    run = run_of(tmp_path, pair(10.0, 12.5), spec(entry(PROBLEM, 400)))
    assert tables.to_json(run)["gains"]["gain_us"] == pytest.approx(1000.0)
    assert "| in all | 400 |  |  | 1.00 |  |  |" in tables.files(run)["ranking.md"]
    console = Console(width=100, record=True, file=io.StringIO())
    tables.print_run(run, console)
    printed = console.export_text()
    assert "1.00 ms less (20.0 %)" in printed
    assert max(map(len, printed.splitlines())) <= 100
    page = html.render(run)
    assert 'id="gains"' in page
    assert "1.00 ms less (20.0 %)" in page
