"""Explanations of recorded runs and of made-up ones."""

import json
from pathlib import Path

import pytest
from samples import baseline, failed, full_run
from typer.testing import CliRunner

from attnsweep.cli import app
from attnsweep.core.errors import AttnsweepError, SpecError
from attnsweep.core.trial import Status
from attnsweep.family.discover import discover
from attnsweep.reports.explain import ConfigExplanation, explain, lines, verdict
from attnsweep.store.run import Run, open_run

RESULTS = Path(__file__).parents[2] / "results"
SHORT = "1,16,1024,64"


@pytest.fixture(scope="module")
def short() -> Run:
    return open_run(RESULTS / "h200" / "flash_short")


@pytest.fixture(scope="module")
def families():
    return discover()


def text(found: ConfigExplanation, width: int = 120) -> str:
    return "\n".join(line.plain for line in lines(found, width))


def flat(found: ConfigExplanation, width: int = 120) -> str:
    return " ".join(text(found, width).split())


def test_the_winner_of_a_recorded_run_is_explained_by_default(short, families) -> None:
    (found,) = explain(short, [], SHORT, families)
    assert found.won
    assert found.ratio == 1.0
    assert verdict(found)[0] == "It won: 10.55\u00a0µs, the first of 86 ranked candidates."
    parts = [part for part, _ in found.beside]
    assert parts == ["next", "next", "next", "fastest baseline"]
    assert found.effects[0].name == "KEY_GROUPS"
    said = flat(found)
    for words in (
        "one parameter away",
        "by 86 timed of 86 tried",
        "NVIDIA H200, driver 580.159.04, 2026-11-24",
        "wait 2.2, long_scoreboard 1.7",
        "64 ×1.081",
    ):
        assert words in said


def test_how_to_record_counters_is_said_where_a_run_has_none(families) -> None:
    found, *_ = explain(open_run(RESULTS / "h200" / "flash_long"), [], None, families)
    assert found.won
    assert "no hardware counters are recorded of it; on its GPU" in flat(found)


def test_rules_of_a_call_are_in_its_own_file(families) -> None:
    found, *_ = explain(open_run(RESULTS / "h200" / "triton_kernels"), [], None, families)
    assert found.won
    assert ".py:attention are its own file's, which explain does not run" in flat(found)
    assert "not here" not in flat(found)


def test_every_problem_is_explained_unless_one_is_asked_for(short, families) -> None:
    assert len([*explain(short, [], None, families)]) == 5
    with pytest.raises(SpecError, match="has no problem") as caught:
        [*explain(short, [], "1,16,1024,65", families)]
    assert caught.value.where.endswith("flash_short")
    assert "did you mean '(1,16,1024,64) fp16 full'" in caught.value.render()
    with pytest.raises(SpecError, match="not a problem"):
        [*explain(short, [], "nonsense", families)]


def test_a_loser_differs_from_the_winner_in_parameters_and_resources(short, families) -> None:
    (found,) = explain(short, ["BLOCK_N=64"], SHORT, families)
    assert found.fit == 59
    assert found.row is not None
    assert found.row["rank"] == 9
    said = flat(found)
    assert "It lost: 11.34 µs is 1.08 times the winner's 10.55 µs (rank 9" in said
    assert "BLOCK_N 64 instead of 128: ×1.081 in the median of 24 pairs" in said
    assert "faster in 1" in said
    assert "59 candidates fit" in said


def test_a_config_that_a_rule_removed_is_no_candidate(short, families) -> None:
    given = ["WARPGROUPS=2", "BLOCKS_PER_SM=2", "NUM_STAGES=4", "BLOCK_N=128"]
    (found,) = explain(short, given, SHORT, families)
    assert found.row is None
    assert found.rule is not None
    assert found.rule[0] == "registers"
    assert "It was no candidate: rule registers removes it: scores, P and" in flat(found)
    assert found.to_json()["status"] == "removed"


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ("BLOCK_N=65", "has BLOCK_N=65", "there are: 64, 96, 128"),
        ("64/1", "is named '64/1'", "BLOCK_N / WARPGROUPS / KEY_GROUPS"),
        ("flash_fwd_wgma", "is named 'flash_fwd_wgma'", "did you mean 'flash_fwd_wgmma'"),
        ("torch_cudnn", "'torch_cudnn' is a baseline", "ours: flash_fwd_wgmma"),
        ("=", "is named '='", "or write NAME=VALUE"),
        ("BLOCK_N=64 BLOCK_N=96", "BLOCK_N is given twice: 64, then 96", "drop one of the two"),
    ],
)
def test_an_unknown_config_is_refused_with_the_nearest_name(short, families, given, what, hint) -> None:
    with pytest.raises(AttnsweepError) as caught:
        [*explain(short, [given], SHORT, families)]
    assert what in caught.value.render()
    assert hint in caught.value.render()


def test_values_as_the_tables_print_them_name_the_same_row() -> None:
    run = full_run()
    (found,) = explain(run, ["64/32"], None, {})
    assert found.row is not None
    assert dict(found.config) == {"BLOCK_M": 64, "BLOCK_N": 32, "NUM_WARPS": 8}
    (same,) = explain(run, ["BLOCK_M=64", "BLOCK_N=32"], None, {})
    assert same.config == found.config


def test_pruned_failed_and_untried_configs_say_so() -> None:
    run = full_run()
    (pruned,) = explain(run, ["flash_fwd_wgmma", "BLOCK_M=3"], None, {})
    assert verdict(pruned) == ["It has no rank, pruned: spills 3 bytes, the spec allows 0"]
    (wrong,) = explain(run, ["BLOCK_M=11"], None, {})
    assert verdict(wrong)[0].startswith("It has no rank, wrong: relative error 11e-01")
    (untried,) = explain(run, ["BLOCK_M=64", "BLOCK_N=16", "NUM_WARPS=8"], None, {})
    assert untried.row is not None
    (absent,) = explain(run, ["BLOCK_M=9", "BLOCK_N=16"], None, {})
    assert verdict(absent)[0].startswith("The run did not try it: no row has this config")


def test_a_faster_baseline_is_not_hidden() -> None:
    run = full_run()
    (found,) = explain(run, [], None, {})
    assert verdict(found)[0].startswith("It won: 28.10")
    slower = full_run(trials=[*run.trials, baseline("flash_attn_3", 20.0)])
    (found,) = explain(slower, [], None, {})
    assert verdict(found)[0] == ("It is the best of ours, 28.10\u00a0µs; flash_attn_3 is faster (1.41×).")


def test_a_run_without_candidates_or_files_is_refused_or_said() -> None:
    only = full_run(trials=[baseline("torch_cudnn", 5.0)])
    with pytest.raises(SpecError, match="no candidate"):
        [*explain(only, [], None, {})]
    lost = failed("flash", Status.WRONG, "no", A=1)
    (found,) = explain(full_run(trials=[lost], environment=None), [], None, {})
    assert "It has no rank, wrong: no" in text(found)


def test_the_command_prints_text_and_json(tmp_path: Path) -> None:
    run = str(RESULTS / "h200" / "ladder")
    shown = CliRunner().invoke(app, ["explain", run])
    assert shown.exit_code == 0, shown.output
    assert "mattered" in shown.output
    printed = CliRunner().invoke(app, ["explain", run, "--json"])
    data = json.loads(printed.stdout)
    assert data[0]["won"] is True
    assert {"problem", "config", "beside", "neighbours", "parameters", "counters"} <= set(data[0])
    for effect in data[0]["parameters"]:
        assert len(effect["values"]) > 1
    latest = CliRunner().invoke(app, ["explain", "--results", run])
    assert latest.stdout == shown.stdout
    assert latest.stderr == f"the latest run: {run}\n"
