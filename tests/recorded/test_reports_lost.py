"""A run that lacks a baseline of its spec says nothing of the fastest: it may have been that one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from attnsweep.cli.read import only
from attnsweep.regress.accept import accept
from attnsweep.reports import compare, gains, html, tables
from attnsweep.reports.explain import explain
from attnsweep.reports.sections import baselines_of, sections_of
from attnsweep.reports.text import faster_baseline, sentence, winner_lines
from attnsweep.store.run import Run, open_run

ROOT = Path(__file__).parent.parent.parent / "results"
RUN = ROOT / "h100-80gb-hbm3" / "h100"
LABEL = "(4,32,4096,64) bf16 full"
LOST = "flash_attn_3 has no sound row, so the fastest baseline is not known"
WHOLE = open_run(RUN)


def without(name: str, label: str = LABEL) -> Run:
    """The run without this baseline's row."""
    return replace(WHOLE, trials=[t for t in WHOLE.trials if (t.provider, t.problem.label) != (name, label)])


def damaged() -> Run:
    """The run with a time of FlashAttention-3's that is none."""
    rows = []
    for trial in WHOLE.trials:
        if (trial.provider, trial.problem.label) == ("flash_attn_3", LABEL):
            trial = trial.with_(time_us=trial.time_us.model_copy(update={"median": float("nan")}))
        rows.append(trial)
    return replace(WHOLE, trials=rows)


def section(run: Run, label: str = LABEL):
    (found,) = [each for each in sections_of(run) if each.problem.label == label]
    return found


@pytest.mark.parametrize("run", [without("flash_attn_3"), damaged()], ids=["no row", "damaged"])
def test_no_view_claims_to_beat_the_fastest(run, tmp_path):
    """1.12 times FlashAttention-3 became 1.24 times cuDNN, and nothing but a line on stderr said why."""
    assert "1.12 ± 0.02 times as fast as FlashAttention-3" in sentence(section(WHOLE))
    assert sentence(section(run)) == f"flash_fwd_wgmma takes 924 µs on {LABEL}; {LOST}."
    winner, *_ = winner_lines(section(run))
    assert "1.24×" in winner
    assert "fastest" not in winner
    assert f"{LOST}: the same sweep again times it" in tables.to_markdown(sections_of(run))
    mean = tables.overall(sections_of(run))
    assert mean.endswith(f" 1 problem is left out: {LOST}.")
    assert "geometric mean of 8 problems" in mean
    (cells,) = [cells for cells in tables.summary(sections_of(run), intervals=True) if cells[0] == LABEL]
    assert cells[3:5] == ["–", "–"]
    assert f"{LABEL}: {LOST}" in tables.to_json(run)["warnings"]
    html.write(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "not known: see its notes" in page
    assert page.count("the speed of cudnn") == html_of(WHOLE, tmp_path).count("the speed of cudnn")
    pair = next(p for p in compare.compare(WHOLE, run)["problems"] if p["problem"] == LABEL)
    assert pair["lost"] == [None, LOST]
    assert compare._row(pair)[4:6] == ["–", "–"]
    (explained,) = explain(run, [], LABEL, {})
    assert {"baseline", "fastest baseline"} & {part for part, _ in explained.beside} == {"baseline"}


def html_of(run: Run, place: Path) -> str:
    html.write(run, place / "whole.html")
    return (place / "whole.html").read_text(encoding="utf-8")


def test_a_baseline_that_is_known_to_be_faster_is_told_all_the_same():
    trials = []
    for trial in without("triton_flash").trials:
        if trial.provider == "flash_attn_3" and trial.problem.label == LABEL:
            faster = [us / 2 for us in trial.time_us.rounds]
            time = {name: getattr(trial.time_us, name) / 2 for name in ("median", "low", "high")}
            trial = trial.with_(time_us=trial.time_us.model_copy(update=time | {"rounds": faster}))
        trials.append(trial)
    found = section(replace(WHOLE, trials=trials))
    said = sentence(found)
    assert said.startswith("FlashAttention-3 is ")
    assert said.endswith("; triton_flash has no sound row, so the fastest baseline is not known.")
    assert faster_baseline(found).startswith("flash_attn_3 is faster")


def test_nor_does_a_report_of_one_problem():
    for problem in ("4,32,4096,64 bf16 full", LABEL):
        (found,) = sections_of(only(without("flash_attn_3"), [problem]))
        assert found.lost == LOST
    assert gains.gains(sections_of(only(WHOLE, [LABEL])), only(WHOLE, [LABEL]).spec_text) is None


def test_its_calls_gain_nothing():
    spec = WHOLE.spec_text.replace("dtype: bf16", "dtype: bf16, calls: 10")
    before, after = (gains.gains(sections_of(replace(run, spec_text=spec)), spec) for run in (WHOLE, without("cudnn")))
    one, other = (next(p for p in found["problems"] if p["label"] == LABEL) for found in (before, after))
    assert one["gain_us"] > 0
    assert (other["gain_us"], other["baseline_us"]) == (0, None)
    assert other["why"] == LOST.replace("flash_attn_3", "cudnn")


def test_it_is_no_baseline_to_accept(tmp_path):
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    rows = [json.loads(trial.model_dump_json()) for trial in without("flash_attn_3").trials]
    (run / "trials.jsonl.xz").unlink()
    (run / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    against = accept(open_run(run), tmp_path / "base", force=True)
    assert against == [f"{LABEL}: {LOST}"]


@pytest.mark.parametrize("text", [None, "", "name: x\n", "baselines: []\n", "baselines: [\n", "baselines: 3\n"])
def test_a_spec_that_names_none_asks_for_none(text):
    assert baselines_of(text) == ()


def test_baselines_are_read_as_the_resolved_spec_has_them():
    text = "name: x\nbaselines:\n- torch_flash\n- 'own=a.py:f'\nsearch: {strategy: gp}\n"
    assert baselines_of(text) == ("torch_flash", "own=a.py:f")
    assert len(baselines_of(WHOLE.spec_text)) == len(
        [t for t in WHOLE.trials if t.problem.label == LABEL and t.provider != "attnsweep"]
    )
