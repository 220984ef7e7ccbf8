import csv
import io
import json
import re

import pytest
from pages import visible
from rich.cells import cell_len
from rich.console import Console
from samples import H200, PROBLEM, baseline, candidate, failed, full_run, rounds_of, unrecorded

from attnsweep.core.long_problems import slower_on
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Measurement, Status, Trial
from attnsweep.family.discover import discover
from attnsweep.reports import html, tables
from attnsweep.reports.explain import explain, lines
from attnsweep.reports.sections import Sections
from attnsweep.reports.text import judged_line
from attnsweep.store.run import Run


def printed(run: Run, width: int = 100, *, top: int = 10, terminal: bool = False) -> str:
    out = io.StringIO()
    colours = "truecolor" if terminal else "auto"
    console = Console(file=out, width=width, force_terminal=terminal or None, color_system=colours)
    tables.print_run(run, console, top=top)
    return out.getvalue()


def table(text: str) -> list[list[str]]:
    """Header and rows of the first ranked table, split at two or more spaces."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if re.match(r" *#  kernel", line))
    end = next(i for i in range(begin, len(lines)) if lines[i].startswith(("* winner", "no cand")))
    return [re.split(r"  +", line.strip()) for line in lines[begin:end]]


# -- terminal -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 250])
def test_no_line_is_wider_than_the_terminal_and_numbers_are_whole(width: int) -> None:
    text = printed(full_run(), width)
    assert max(map(cell_len, text.splitlines())) <= width
    header, *rows = table(text)
    assert header[:4] == ["#", "kernel", "config", "µs"]
    times = [row[3] for row in rows]
    assert times[0] == "28.10"
    assert times[-2:] == ["57.40", "280.60"]
    assert len(times) == 10 + 2
    assert all(re.fullmatch(r"\d+\.\d\d", time) for time in times)
    assert all(len(row) == len(header) for row in rows)
    assert "\x1b" not in text


def test_a_row_says_the_figures_of_its_trial() -> None:
    header, best, *_, last = table(printed(full_run(), 160))
    row = dict(zip(header, best, strict=True))
    flops = 4 * 4 * 16 * 1024 * 1024 * 64
    assert row["#"] == "*1"
    assert row["kernel"] == "three_kernel_wgmma"
    assert row["±"] == "0.010"
    assert row["× base"] == f"{57.4 / 28.1:.2f}"
    assert row["µs/head"] == f"{28.1 / 64:.3f}"
    assert float(row["TFLOP/s"]) == pytest.approx(flops / 28.1 / 1e6, abs=0.05)
    assert row["% light"] == f"{100 * flops / (4096 * 132 * 1.98e9) * 1e6 / 28.1:.0f}"
    assert (row["error"], row["regs"], row["smem"]) == ("2.7e-04", "168", "96K")
    assert row["cold µs"] == "29.10"
    assert last[:3] == ["25", "unfused", "baseline"]


def test_how_a_call_is_issued_is_told_with_the_stages() -> None:
    schedule = {"chunks": 4, "heads": 2, "rows": 512, "streams": 2, "workspace_bytes": 3 << 20}
    row = candidate("three", 9.0).with_(stages_us={"qk": 4.0, "pv": 4.0}, launch_us=1.25, schedule=schedule)
    text = " ".join(printed(full_run(trials=[row]), 120).split())
    assert "qk 4.0 · pv 4.0 · rest 1.0 µs · launches alone 1.2 µs · 4 chunks of 2" in text
    assert "4 chunks of 2 heads × 512 queries, 3 MiB of workspace" in text


def test_a_family_that_was_not_searched_whole_says_how_much_was() -> None:
    run = full_run()
    label = run.trials[0].problem.label
    tried = len({t.key for t in run.trials if t.kernel == "flash_fwd_wgmma"})
    planned = [
        {"problem": label, "kernel": "flash_fwd_wgmma", "candidates": tried + 70},
        {"problem": label, "kernel": "naive", "candidates": 3},
        {"problem": "another", "kernel": "naive", "candidates": 300},
    ]
    for text in (printed(full_run(spaces=planned)), tables.to_markdown(Sections(run.trials, H200, planned))):
        assert f"flash_fwd_wgmma: {tried} of {tried + 70} candidates tried, 70 left out" in text
        assert "naive: 3 of" not in text
        assert "300 candidates" not in text


def chained_run() -> Run:
    """The winner's calls can be chained, and so can those of one more, which is faster then."""
    times = {28.1: 27.0, 31.16: 10.4}
    ok = [row for row in full_run().trials if row.status is Status.OK]
    return full_run(trials=[row.with_(chained_us=times.get(round(row.time_us.median, 2))) for row in ok])


def test_chained_calls_are_named_so_and_never_ranked() -> None:
    run, plain = chained_run(), full_run()
    text = " ".join(printed(run, 160).split())
    assert re.search(r"\* winner three_kernel_wgmma .*?, chained 27\.0 µs", text)
    first = [[row["kernel"], row["config"], row["rank"]] for row in tables.to_json(run)["problems"][0]["ranking"]]
    ranked = [row for row in tables.to_json(plain)["problems"][0]["ranking"] if row["rank"]]
    assert first == [[row["kernel"], row["config"], row["rank"]] for row in ranked]
    rows = list(csv.DictReader(io.StringIO(tables.files(run)["ranking.csv"])))
    assert list(rows[0])[list(rows[0]).index("eager_us") + 1] == "chained_us"
    assert sorted(row["chained_us"] for row in rows)[-2:] == ["10.4", "27.0"]
    told = [row["chained_us"] for row in tables.to_json(run)["problems"][0]["ranking"]]
    assert {10.4, 27.0, None} == set(told)


def test_a_winner_without_rounds_says_so() -> None:
    once = Measurement(median=20.69, low=20.69, high=20.69, samples=1)
    rows = [candidate("naive", 5556.0), candidate("flash", 1.0).with_(time_us=once)]
    assert "* winner flash: 20.69 µs, timed once, " in printed(full_run(trials=rows), 160)
    assert "- winner flash: 20.69 µs, timed once, " in tables.files(full_run(trials=rows))["ranking.md"]
    earlier = rounds_of(20.69).model_copy(update={"rounds": []})
    text = printed(full_run(trials=[rows[0], rows[1].with_(time_us=earlier)]), 160)
    assert "20.69 µs, timed in an earlier session, " in text
    assert "timed once, " not in printed(full_run(), 160)


def test_the_clock_of_the_rounds_is_told_beside_the_bound() -> None:
    capped = {"sm_mhz": 1680, "memory_mhz": 3201, "throttle": ["power_cap"]}
    free = {"sm_mhz": 1980, "throttle": []}
    first, second = candidate("flash", 7.0, A=1), candidate("flash", 8.0, A=2)
    stale = candidate("flash", 9.0, A=3).with_(conditions={"sm_mhz": 900})
    alone = stale.with_(time_us=rounds_of(9).model_copy(update={"rounds": []}))

    def third(*rows: Trial, **changes: object) -> str:
        return printed(full_run(trials=list(rows), **changes), 120).splitlines()[3]

    both = [first.with_(conditions=capped), second.with_(conditions=free), alone]
    said = "clock 1680–1980 MHz in the rounds, power_cap; the speed of light above assumes 1980 MHz"
    assert third(*both) == said
    assert said in tables.files(full_run(trials=both))["ranking.md"]
    assert third(first.with_(conditions=free)) == "clock 1980 MHz in the rounds"
    assert third(first).lstrip().startswith("#")
    text = printed(full_run(trials=both, environment=None), 120)
    assert "\nclock 1680–1980 MHz in the rounds, power_cap\n" in text


def test_what_is_not_in_the_table_is_counted_and_reasons_are_grouped() -> None:
    lines = printed(full_run(), 160).splitlines()
    (rest,) = [line for line in lines if " more: " in line]
    assert rest.startswith("27 more: 13 ok, 4 wrong, 1 launch error, 1 timeout, 1 compile error, ")
    assert "7 pruned (spills 6, same machine code 1)" in rest
    assert "--top shows more" in rest
    (wrong,) = [line for line in lines if line.startswith("4 wrong: ")]
    assert "relative error 10e-01 over the limit (first: BLOCK_M=10)" in wrong
    assert "1 compile error: naive: naive.cu(3): error: no [bold] luck" in lines
    assert "1 timeout: naive: no answer in 20 s (N=2)" in lines
    assert "1 launch error: naive: invalid argument (N=3)" in lines
    assert "baseline flash_attn_3 skipped: FlashAttention-3 is not installed" in lines
    assert not any("lots more" in line for line in lines)


def test_every_tie_is_named_even_beyond_the_table() -> None:
    same = [candidate("flash", 7.0, ID=n) for n in range(5)]
    text = printed(full_run(trials=[*same, candidate("flash", 8.0, ID=9)]), 220, top=2)
    assert [row[0] for row in table(text)[1:]] == ["*=1", "=1"]
    (tie,) = [line for line in text.splitlines() if line.startswith("= tied")]
    assert "least shared memory" in tie
    assert tie.endswith("Not in the table: flash ID=2; flash ID=3; flash ID=4")
    assert "= tied" not in printed(full_run(), 160)


def test_a_run_without_an_ok_candidate_says_so() -> None:
    rows = [failed("naive", Status.TIMEOUT, "no answer in 20 s"), baseline("unfused", 71.4)]
    text = printed(full_run(trials=rows))
    assert "no candidate is ok" in text
    assert "eager: host time" in text
    assert "71.40" in text
    alone = printed(full_run(trials=rows[:1]))
    assert "no candidate is ok" in alone
    assert "eager: host time" not in alone  # a legend of no table
    disturbed = candidate("a", 3.0, ID=1).with_(status=Status.NOISY, detail="quartiles 3 to 9")
    searched = candidate("a", 4.0, ID=2)
    searched = searched.with_(time_us=searched.time_us.model_copy(update={"rounds": []}))
    text = printed(full_run(trials=[disturbed, searched]))
    assert "no winner: all candidates were noisy in the rounds; run it again" in text
    assert "no baseline was timed" in printed(full_run(trials=[candidate("a", 3.0)]), 160)


def test_recorded_rows_are_marked_everywhere() -> None:
    where = "NVIDIA L4, 2026-01-02"
    run = full_run()
    all_recorded = full_run(trials=[row.with_(recorded=True, recorded_on=where) for row in run.trials])
    text = printed(all_recorded, 120)
    assert f"recorded on {where}" in text.splitlines()[1]
    assert "measured on" not in text
    assert "bound" not in text.splitlines()[2]  # the environment is another GPU's
    assert all(row[1].endswith("†") for row in table(text)[1:])
    assert f"† recorded on {where}" in text
    mixed = full_run(trials=[*run.trials, baseline("fa4", 40).with_(recorded=True, recorded_on=where)])
    text = printed(mixed, 120)
    assert "measured on NVIDIA H200" in text.splitlines()[1]
    assert [row[1] for row in table(text) if row[1].endswith("†")] == ["fa4†"]
    assert f"† recorded on {where}" in text
    markdown = tables.files(mixed)["ranking.md"]
    assert "| fa4† |" in markdown
    assert f"recorded on {where}" in markdown
    rows = list(csv.DictReader(io.StringIO(tables.files(mixed)["ranking.csv"])))
    assert [row["recorded_on"] for row in rows if row["recorded"] == "True"] == [where]


def test_what_a_recording_does_not_hold_is_not_called_recorded() -> None:
    where = "NVIDIA H200, 2026-07-26"
    nothing = [unrecorded("flash", A=1), unrecorded("flash", A=2)]
    fa4 = unrecorded("fa4").with_(provider="fa4")
    text = printed(full_run(trials=[*nothing, fa4]), 120)
    label = "(4,16,1024,64) fp16 full"
    assert text.splitlines()[1] == f"{label} · the recording has no row of this problem"
    assert "†" not in text
    assert "recorded on" not in text
    assert "\n2 no record; " in text
    assert "baseline fa4 no record: not in results/h200" in text
    held = candidate("flash", 7.0, A=3).with_(recorded=True, recorded_on=where)
    text = printed(full_run(trials=[*nothing, held, fa4]), 120)
    assert text.splitlines()[1] == f"{label} · recorded on {where} · driver 580.95.05"
    assert [row[1] for row in table(text)[1:]] == ["flash†"]
    assert "baseline fa4 no record" in text
    assert "\n2 no record; " in text


def test_several_problems_end_in_a_summary() -> None:
    other = Problem(1, 8, 8, 512, 512, 64, "bf16", causal=True)
    run = full_run()
    both = full_run(trials=[*run.trials, candidate("naive", 12345.0).with_(problem=other)])
    for width in (60, 80, 120):
        text = printed(both, width)
        assert max(map(cell_len, text.splitlines())) <= width
    summary = text[text.index("problem  ") :].splitlines()
    assert re.split(r"  +", summary[1]) == [
        *(PROBLEM.label, "28.10", "0.439"),
        *("2.04× (2.04 to 2.04)", "torch_cudnn", "three_kernel_wgmma"),
    ]  # fmt: skip
    assert re.split(r"  +", summary[2]) == [other.label, "12345", "1543", "–", "–", "naive"]
    assert "problem  " not in printed(run)


def test_a_run_without_an_environment_is_still_shown() -> None:
    text = printed(full_run(environment=None), 120)
    assert "GPU and date unknown" in text
    assert "28.10" in text
    assert "% light" not in " ".join(table(text)[0])


def test_the_best_of_ours_is_no_winner_where_a_baseline_is_faster() -> None:
    run = full_run()
    ahead = full_run(trials=[*run.trials, baseline("flash_attn_3", 25.0)])
    text = " ".join(printed(ahead, 120).split())
    assert "* best of ours; flash_attn_3 is faster (1.12×): three_kernel_wgmma QK_BLOCK_M" in text
    assert "* winner" not in text
    styled = printed(ahead, 120, terminal=True)
    assert "\x1b[1;32m" not in styled  # green is a winner's
    assert "\x1b[1;32m" in printed(run, 120, terminal=True)
    markdown = tables.to_markdown(Sections(ahead.trials, ahead.environment))
    assert "- best of ours; flash_attn_3 is faster (1.12×): three_kernel" in markdown


def test_a_ratio_that_is_a_bound_or_of_medians_is_marked() -> None:
    ours, other = candidate("flash", 20.0), baseline("torch_cudnn", 30.0)
    once = other.with_(time_us=other.time_us.model_copy(update={"rounds": []}))
    for marked, mark in ((other.with_(status=Status.NOISY), "≥1.5"), (once, "~1.5"), (other, "1.5")):
        header, first, *_ = table(printed(full_run(trials=[ours, marked])))
        assert first[header.index("× base")].startswith(mark)


def test_a_tie_with_a_baseline_or_a_baseline_of_another_format_is_still_won() -> None:
    run = full_run()
    for other in (baseline("torch_flash", 28.1), baseline("flash_attn_3_fp8", 20.0)):
        assert "* winner three_kernel" in printed(full_run(trials=[*run.trials, other]), 120)


# ---- the files of a run: Markdown, CSV and JSON hold what the terminal shows, and all of it ----
def test_markdown_holds_the_same_table() -> None:
    text = tables.files(full_run())["ranking.md"]
    lines = text.splitlines()
    assert "## (4,16,1024,64) fp16 full" in lines
    rows = [line for line in lines if line.startswith("| ")]
    columns = {row.replace("\\|", "").count("|") for row in rows}
    assert len(columns) == 1
    assert rows[2].startswith("| 1 | **three_kernel_wgmma** | QK_BLOCK_M=128 | 28.10 | 0.010 | 2.04 |")
    assert sum("| baseline |" in row or "| base |" in row for row in rows) == 2
    assert "- winner three_kernel_wgmma" in text
    assert "FlashAttention-3 is not installed" in text


def test_a_pipe_does_not_break_the_markdown_table() -> None:
    row = baseline("a|b", 5.0)
    text = tables.to_markdown(Sections([candidate("flash", 3.0), row], H200))
    assert "a\\|b" in text
    assert "a|b" not in text.replace("a\\|b", "")


def test_csv_holds_every_row_in_full_precision() -> None:
    run = full_run()
    rows = list(csv.DictReader(io.StringIO(tables.files(run)["ranking.csv"])))
    assert len(rows) == len(run.trials)
    assert rows[0]["winner"] == "True"
    assert float(rows[0]["us_per_head"]) == 28.1 / 64
    assert rows[0]["registers"] == "168"
    assert [row["rank"] for row in rows].count("") == 15
    assert "trial" not in rows[0]


def test_json_is_strict_stable_and_complete() -> None:
    run = full_run()
    data = json.loads(json.dumps(tables.to_json(run), allow_nan=False))
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
    (problem,) = tables.to_json(full_run(trials=[nan], environment=None))["problems"]
    assert problem["winner"] is None
    assert problem["bounds_us"] == {}
    assert problem["ranking"][0]["rel_err"] is None
    assert problem["counts"] == {"wrong": 1}


# ---- what a table leaves out is said beside it: candidates never tried, and rows not judged ----
SHORT = "(1,32,16384,128) bf16 causal"
RIGHT = Accuracy(rel_err=1e-4, limit=1e-3)


def judged(row, share):
    return row.with_(accuracy=RIGHT.model_copy(update={"judged": share}))


def long_run(*shares):
    """A run whose candidates were judged in these shares, with others that were not tried."""
    rows = [judged(candidate("naive", 30.0 + n, THREADS=32 * (n + 1)), share) for n, share in enumerate(shares)]
    rows += [
        failed("naive", Status.PRUNED, slower_on(SHORT, 3000.0 + n, 2800.0), THREADS=n).with_(accuracy=RIGHT)
        for n in (33, 34, 35)
    ]
    rows += [failed("naive", Status.PRUNED, "spills 8 bytes, the spec allows 0", THREADS=999)]
    return full_run(trials=[*rows, judged(baseline("torch_flash", 40.0), 0.01)])


def said(*shares):
    (section,) = Sections(long_run(*shares).trials, None)
    return judged_line(section.rows)


@pytest.mark.parametrize(
    ("shares", "span"), [((0.1301,), "13"), ((0.13, 0.13), "13"), ((0.14, 0.125), "12–14"), ((0.0021,), "0.21")]
)
def test_the_share_of_rows_that_float64_judged_is_said(shares, span):
    assert said(*shares) == (
        f"float64 judged {span}\u00a0% of the rows of every head; of the others it is only known "
        "that they are numbers, the same in all calls"
    )


def flat(text):
    return " ".join(text.replace("\u00a0", " ").split())


TEXT = "float64 judged 13 % of the rows of every head; of the others it is only known that they"


def test_every_form_says_the_share_that_float64_judged():
    pytest.importorskip("vl_convert", reason="needs the html extra: vl-convert-python")
    pytest.importorskip("jinja2", reason="needs the html extra: Jinja2")
    for run, told in ((long_run(0.13, None), True), (long_run(None), False)):
        (first,) = explain(run, ["THREADS=32"], None, discover())
        forms = {
            "terminal": printed(run),
            "ranking.md": tables.files(run)["ranking.md"],
            "page": visible(html.render(run)),
            "explain": " ".join(line.plain for line in lines(first, 120)),
        }
        for form, text in forms.items():
            assert (TEXT[1:] in flat(text)) is told, form
        assert first.to_json()["candidate"]["judged"] == (0.13 if told else None)
    assert f"- {TEXT}" in flat(tables.files(long_run(0.13))["ranking.md"])
    (problem,) = tables.to_json(long_run(0.13, None))["problems"]
    of = {(r["kernel"], r["config"].get("THREADS")): r["judged"] for r in problem["ranking"]}
    assert (of["naive", 32], of["naive", 64], of["torch_flash", None]) == (0.13, None, 0.01)


def test_candidates_that_were_slower_on_a_shorter_problem_are_counted_apart():
    out = io.StringIO()
    tables.print_run(long_run(0.13), Console(file=out, width=160), top=1)
    text = flat(out.getvalue())
    assert f"4 more: 3 not tried: slower on {SHORT}, 1 pruned (spills 1); " in text
    (not_tried,) = explain(long_run(0.13), ["THREADS=33"], None, discover())
    text = flat(" ".join(line.plain for line in lines(not_tried, 160)))
    assert f"slower on {SHORT}: 3033 µs, where the best takes 2800" in text
