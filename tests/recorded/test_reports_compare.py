"""Two runs side by side, recorded and made up."""

from dataclasses import replace
from pathlib import Path

import pytest
from samples import baseline, candidate, full_run

from attnsweep.core.errors import SpecError
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.reports.compare import compare, config_changes, lines
from attnsweep.reports.sections import sections_of
from attnsweep.store.run import open_run

RESULTS = Path(__file__).parents[2] / "results"
OTHER = Problem.parse("1,2,128,64 fp16 full")


def run(*trials, **changes):
    return full_run(trials=list(trials), **changes)


def text(found, width=110):
    return "\n".join(line.plain for line in lines(found, width))


def test_winners_that_differ_say_what_each_costs_in_the_other_run():
    found = compare(
        run(candidate("a", 10.0, N=1), candidate("a", 12.0, N=2), baseline("cudnn", 20.0)),
        run(candidate("a", 9.0, N=1), candidate("a", 8.0, N=2), baseline("cudnn", 20.0)),
    )
    (pair,) = found["problems"]
    assert not pair["same_winner"]
    assert not pair["agree"]
    assert pair["first"]["others_winner_ratio"] == pytest.approx(1.2)
    assert pair["second"]["others_winner_ratio"] == pytest.approx(9 / 8)
    assert pair["over_baselines"] == {"cudnn": pytest.approx([2.0, 2.5])}
    assert config_changes(pair) == ["N 1 → 2"]
    said = text(found)
    assert "+12.5 %, +20.0 %" in said
    assert "2.00 → 2.50" in said
    assert "the other's winner costs up to 20.0 %" in said


def test_a_winner_that_the_other_run_never_ranked_costs_an_unknown_share():
    found = compare(run(candidate("a", 10.0, N=1)), run(candidate("b", 8.0, N=1)))
    (pair,) = found["problems"]
    assert pair["first"]["others_winner_ratio"] is pair["second"]["others_winner_ratio"] is None
    assert config_changes(pair) == ["a → b N=1"]
    assert "–, –" in text(found)
    assert "costs up to" not in text(found)


def test_a_parameter_that_a_family_got_later_is_no_difference():
    family = discover()["flash_fwd_wgmma"]
    config = {param.name: param.values[0] for param in family.params}
    assert next(param for param in family.params if param.name == "PACK_GQA").absent == 0
    now = run(candidate(family.name, 10.0, **config | {"PACK_GQA": 0}))
    del config["PACK_GQA"]
    before = run(candidate(family.name, 10.0, **config))
    assert not compare(before, now)["problems"][0]["same_winner"]
    (pair,) = compare(before, now, {family.name: family})["problems"]
    assert pair["same_winner"]
    assert pair["first"]["others_winner_ratio"] == 1.0
    assert config_changes(pair) == []


def test_a_baseline_that_computes_in_another_format_is_no_base():
    in_bf16 = {"problem": replace(OTHER, dtype="bf16")}
    trials = (
        candidate("a", 10.0, N=1).with_(**in_bf16),
        baseline("flash_attn_3", 12.0).with_(**in_bf16),
        baseline("flash_attn_3_fp8", 8.0).with_(**in_bf16),
    )
    found = compare(run(*trials), run(*trials))
    assert found["problems"][0]["over_baselines"] == {"flash_attn_3": pytest.approx([1.2, 1.2])}
    assert "1.20 → 1.20  flash_attn_3  same" in text(found)
    cards = (open_run(RESULTS / card) for card in ("h100-80gb-hbm3/h100", "h200/h200"))
    assert "flash_attn_3_fp8" not in text(compare(*cards))


def test_what_differs_around_the_runs_is_told():
    one = run(candidate("a", 10.0, N=1))
    card = one.environment.model_copy(update={"gpu": "NVIDIA X", "packages": {"torch": "9.9"}})
    found = compare(one, replace(one, environment=card))
    assert found["differences"]["gpu"] == [one.environment.gpu, "NVIDIA X"]
    assert found["differences"]["torch"][1] == "9.9"
    assert f"gpu: {one.environment.gpu} → NVIDIA X" in text(found)
    assert compare(one, replace(one, environment=None))["differences"]["gpu"][1] is None


def test_problems_of_one_run_alone_are_named():
    both = candidate("a", 10.0, N=1)
    found = compare(run(both, both.with_(problem=OTHER)), run(both))
    assert (found["only_first"], found["only_second"]) == ([OTHER.label], [])
    assert f"only in the first run: {OTHER.label}" in text(found)
    with pytest.raises(SpecError, match="no timed problem in common") as caught:
        compare(run(both), run(both.with_(problem=OTHER)))
    assert OTHER.label in caught.value.render()


def test_as_data_it_names_configs_and_ratios():
    runs = [open_run(RESULTS / card / "batched") for card in ("h100-80gb-hbm3", "h200")]
    data = compare(*runs)
    assert data["differences"]["gpu"] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert len(data["problems"]) == 9
    first = data["problems"][0]
    assert first["first"]["config"]["BLOCK_N"] > 0
    assert set(first["over_baselines"]) <= set(first["first"]["baselines_us"])


@pytest.mark.parametrize("spec", ["flash_short", "flash_training", "masks"])
def test_a_ratio_is_the_one_that_report_prints(spec):
    """Both take the median of the ratios of the rounds; medians of times gave another second decimal."""
    runs = [open_run(RESULTS / card / spec) for card in ("h100-80gb-hbm3", "h200")]
    pairs = {pair["problem"]: pair for pair in compare(*runs)["problems"]}
    told = 0
    for side, recorded in enumerate(runs):
        for section in sections_of(recorded):
            won = section.winner
            if won is None or (pair := pairs.get(section.problem.label)) is None:
                continue
            if (both := pair["over_baselines"].get(won["best_baseline"])) is not None:
                assert both[side] == won["ratio_to_best_baseline"]
                told += 1
    assert told > 8
