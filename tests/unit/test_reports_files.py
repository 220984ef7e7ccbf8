"""The files of a run: Markdown, CSV and JSON hold what the terminal shows, and all of it."""

from __future__ import annotations

import csv
import io
import json

from samples import (
    H200,
    baseline,
    candidate,
    full_run,
)

from attnsweep.choose.ranking import rank
from attnsweep.core.trial import Accuracy
from attnsweep.reports import tables as report


def test_markdown_holds_the_same_table() -> None:
    text = report.files(full_run())["ranking.md"]
    lines = text.splitlines()
    assert "## (4,16,1024,64) fp16 full" in lines
    rows = [line for line in lines if line.startswith("| ")]
    columns = {row.replace("\\|", "").count("|") for row in rows}
    assert len(columns) == 1
    assert rows[2].startswith(
        "| 1 | **three_kernel_wgmma** | QK_BLOCK_M=128 | 28.10 | 0.010 | 2.04 |"
    )
    assert sum("| baseline |" in row or "| base |" in row for row in rows) == 2
    assert "- winner three_kernel_wgmma" in text
    assert "FlashAttention-3 is not installed" in text


def test_a_pipe_does_not_break_the_markdown_table() -> None:
    row = baseline("a|b", 5.0)
    text = report.to_markdown(rank([candidate("flash", 3.0), row], H200), H200)
    assert "a\\|b" in text
    assert "a|b" not in text.replace("a\\|b", "")


def test_csv_holds_every_row_in_full_precision() -> None:
    run = full_run()
    rows = list(csv.DictReader(io.StringIO(report.files(run)["ranking.csv"])))
    assert len(rows) == len(run.trials)
    assert rows[0]["winner"] == "True"
    assert float(rows[0]["us_per_head"]) == 28.1 / 64
    assert rows[0]["registers"] == "168"
    assert [row["rank"] for row in rows].count("") == 15
    assert "trial" not in rows[0]


def test_json_is_strict_stable_and_complete() -> None:
    run = full_run()
    data = json.loads(json.dumps(report.to_json(run), allow_nan=False))
    assert set(data) == {"run", "environment", "problems", "warnings"}
    assert data["warnings"] == []
    assert data["run"] == "results/h200/h100"
    assert data["environment"]["gpu"] == "NVIDIA H200"
    (problem,) = data["problems"]
    assert set(problem) == {"problem", "label", "bounds_us", "winner", "ranking", "counts"}
    assert problem["problem"] == {
        "batch": 4, "heads": 16, "heads_kv": 16, "seqlen_q": 1024, "seqlen_k": 1024,
        "head_dim": 64, "dtype": "fp16", "causal": False,
    }  # fmt: skip
    assert set(problem["bounds_us"]) == {"matrix", "exp2", "memory"}
    assert problem["counts"] == {
        "ok": 25, "wrong": 4, "launch_error": 1, "timeout": 1, "compile_error": 1, "pruned": 7,
        "skipped": 1,
    }  # fmt: skip
    assert len(problem["ranking"]) == len(run.trials)
    winner = problem["winner"]
    assert winner == problem["ranking"][0]
    assert winner["config"] == {"QK_BLOCK_M": 128, "PV_BLOCK_M": 64, "SOFTMAX_THREADS": 128}
    assert winner["stages_us"] == {"qk": 10.1, "softmax": 9.0, "pv": 8.2}
    assert (winner["rank"], winner["time_us"]) == (1, 28.1)
    skipped = problem["ranking"][-1]
    assert (skipped["rank"], skipped["time_us"], skipped["registers"]) == (None, None, None)


def test_nan_is_null_in_json_and_never_a_winner() -> None:
    nan = candidate("flash", 3.0, ID=1).with_(accuracy=Accuracy(rel_err=float("nan"), limit=1.0))
    (problem,) = report.to_json(full_run(trials=[nan], environment=None))["problems"]
    assert problem["winner"] is None
    assert problem["bounds_us"] == {}
    assert problem["ranking"][0]["rel_err"] is None
    assert problem["counts"] == {"wrong": 1}
