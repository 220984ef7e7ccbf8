"""A run in at most a screen, with the answer last."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from samples import NVRTC_LOG, PROBLEM, baseline, candidate, failed, full_run

from attnsweep.core.trial import Status
from attnsweep.reports.sections import sections_of
from attnsweep.reports.tables import print_brief, print_run
from attnsweep.serve.export import use_of
from attnsweep.store.run import open_run

RESULTS = Path(__file__).parents[2] / "results"


def printed(run, width=80, **how):
    out = io.StringIO()
    print_brief(run, Console(file=out, width=width), **how)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def of_problems(count):
    """A run of so many problems: ours is 1.01, 1.02, … times as fast."""
    trials = []
    for number in range(1, count + 1):
        problem = replace(PROBLEM, batch=number)
        ours, theirs = candidate("k", 100.0, BLOCK_M=64), baseline("torch_cudnn", 100.0 + number)
        trials += [ours.with_(problem=problem), theirs.with_(problem=problem)]
    return full_run(trials=trials)


def test_a_run_of_many_problems_names_the_baselines_that_failed():
    """× base is next to those that are left."""
    run = of_problems(9)
    lost = [t.with_(status=Status.LAUNCH_ERROR, time_us=None) for t in run.trials if t.provider == "torch_cudnn"]
    label = lost[0].problem.label
    assert [line for line in printed(run) if "torch_cudnn on" in line] == []
    kept = [t for t in run.trials if t.problem.label != label or t.provider != "torch_cudnn"]
    assert f"torch_cudnn on {label}: launch error" in printed(replace(run, trials=[*kept, lost[0]]))
    ours = [t for t in run.trials if t.provider != "torch_cudnn"]
    lines = printed(replace(run, trials=[*ours, *lost]))
    assert sum("torch_cudnn on" in line for line in lines) == 3
    assert "6 more" in lines


@pytest.mark.parametrize("count", [1, 9])
def test_what_a_family_serves_only_stands_in_its_results(count):
    run = of_problems(count)
    facts = [{"kernel": "k", "candidates": 1, "serves": ["one length", "no groups"]}]
    spaces = [{"problem": t.problem.label, **f} for t in run.trials for f in facts]
    run = replace(run, spaces=spaces)
    assert "k serves only one length; no groups" in printed(run)
    assert ("k serves only one length; no groups" in printed(run, quiet=True)[0]) == (count == 1)
    out = io.StringIO()
    print_run(run, Console(file=out, width=100))
    assert out.getvalue().count("k serves only one length; no groups") == count


def test_the_end_is_a_sentence_and_the_rows_are_counted_by_kind():
    *before, count, last, config = printed(full_run())
    assert count.startswith("37 candidates, 3 baselines: results/h200/h100 (--full")
    assert last.startswith("three_kernel_wgmma is 2.043 ± 0.001 times as fast as")
    assert config.startswith("config: QK_BLOCK_M=")
    assert printed(full_run(), quiet=True) == [last, config]
    assert not any("BLOCK_M /" in line or line.startswith("bound") for line in before)


def test_what_failed_and_what_was_not_timed_is_named():
    text = "\n".join(printed(full_run()))
    assert "4 wrong: flash_fwd_wgmma: relative error" in text
    assert "1 compile error: naive: naive.cu(3): error: no [bold] luck" in text
    assert "not timed: flash_attn_3" in text
    noisy = baseline("torch_cudnn", 20.0).with_(status=Status.NOISY, detail="noisy")
    run = full_run(trials=[candidate("k", 10.0), noisy])
    assert "torch_cudnn stayed noisy: × base takes its fastest round" in "\n".join(printed(run, 120))


def test_without_a_winner_all_reasons_are_printed():
    wrong = candidate("k", None).with_(status=Status.WRONG, detail="off")
    broken = failed("j", Status.COMPILE_ERROR, NVRTC_LOG)
    pruned = failed("k", Status.PRUNED, "spills 8 bytes, the spec allows 0", M=1)
    lines = printed(full_run(trials=[wrong, broken, pruned]))
    assert lines[-1].startswith("No candidate is right and timed on")
    text = "\n".join(lines)
    assert "      o[0] = foo(x);" in text
    assert "1 pruned (spills 1)" in text


def test_a_run_of_many_problems_has_a_line_for_each():
    lines = printed(of_problems(12))
    assert [line.split("×")[0].split()[-1] for line in lines[1:13]] == [f"{1 + n / 100:.2f}" for n in range(1, 13)]
    assert lines[-1] == (
        "The best candidates are 1.06 times as fast as the fastest baselines, a geometric mean of "
        "12 problems: from 1.01 on (1,16,1024,64) fp16 full to 1.12 on (12,16,1024,64) fp16 full."
    )


def test_a_run_of_fifty_problems_fits_a_screen():
    lines = printed(of_problems(50))
    assert len(lines) <= 24
    assert "… 34 more, between these" in lines
    assert any(line.startswith("(1,16,") for line in lines)
    assert any(line.startswith("(50,16,") for line in lines)
    assert printed(of_problems(50), quiet=True) == lines[-1:]
    assert len(printed(of_problems(50), every=True, quiet=True)) == 100
    assert sum("kernel" in line for line in printed(of_problems(50), top=1)) == 50


def test_a_problem_without_a_winner_is_listed_first_and_counted():
    run = of_problems(5)
    wrong = run.trials[4].with_(status=Status.WRONG, time_us=None, detail="off")
    lines = printed(full_run(trials=[*run.trials[:4], wrong, *run.trials[5:]]))
    assert lines[1].startswith("(3,16,")
    assert lines[-1].endswith("No candidate is right and timed on 1 of 5.")
    assert "1 wrong" in lines


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_command_that_uses_the_winners_is_the_last_line(count):
    """Of one problem it stands behind the config; of many there is no config."""
    lines = printed(of_problems(count), quiet=True, use=lambda run, sections: f"attnsweep export of {len(sections)}")
    how = "use it" if count == 1 else "use them"
    assert lines[-1].endswith(f"to {how}: attnsweep export of {count}")
    assert sum("config: BLOCK_M=64" in line for line in lines) == (count if count < 4 else 0)
    assert len(lines) == {1: 2, 2: 5, 9: 2}[count]


@pytest.mark.parametrize(
    ("directory", "command"),
    [
        ("h200/h200", "export {} --out my_attention"),
        ("h200/triton_kernels", "export {} --out my_configs.py"),
        ("h200/three_kernel", "explain {}"),
        ("h200/append", "explain {}"),
    ],
)
def test_the_command_that_uses_a_recorded_run_is_one_that_takes_it(directory, command):
    run = open_run(RESULTS / directory)
    assert use_of(run, sections_of(run)) == f"attnsweep {command.format(run.directory)}"
    assert use_of(run, []) is None


def test_what_is_recorded_is_marked_where_not_all_is_and_the_mark_is_explained():
    """A replay says it in its heading alone."""
    ours, theirs = candidate("k", 100.0, BLOCK_M=64), baseline("torch_cudnn", 110.0)
    lost = baseline("cudnn", 90.0).with_(status=Status.SKIPPED, time_us=None, detail="not installed")
    rows = [row.with_(recorded=True, recorded_on="NVIDIA H100, 2026-01-02") for row in (ours, theirs, lost)]
    whole = "\n".join(printed(full_run(trials=rows)))
    assert "†" not in whole
    assert "recorded on NVIDIA H100, 2026-01-02" in whole
    mixed = printed(full_run(trials=[ours, *rows[1:]]))
    assert any("torch_cudnn†" in line for line in mixed)
    assert "† recorded on NVIDIA H100, 2026-01-02, not measured in this run" in mixed


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_summary_leaves_columns_out_and_cuts_no_name(width):
    head, *rows = [line for line in printed(of_problems(6), width) if line.startswith(("problem", "("))]
    assert all(len(line) <= width for line in rows)
    assert ("best of ours" in head) == (width == 80)
    assert all(("torch_cudnn" in line) == ("base" in head.split()[-1]) or "k" in line for line in rows)
