"""Time against error of candidates that differ in accuracy, in a report's text and data."""

import io

from fp8_rows import fp8_run
from rich.console import Console
from samples import full_run

from attnsweep.reports import tables as report
from attnsweep.store.run import Run


def printed(run: Run, width: int) -> str:
    out = io.StringIO()
    report.print_run(run, Console(file=out, width=width))
    return out.getvalue()


def test_fp8_shows_what_the_format_costs_and_which_candidates_none_surpasses() -> None:
    text = " ".join(printed(fp8_run(), 200).split())
    assert (
        "errors, of the worst row: the format costs 7.0e-02, flash_fwd_fp8_wgmma adds 5.0e-02; "
        "against the inputs before rounding it errs by 7.5e-02" in text
    )
    for us, error, interval in ((100.0, "5.0e-02", 0), (104.0, "2.6e-02", 4), (120.0, "2.0e-02", 1)):
        assert f"{us:.1f} µs, error {error}: flash_fwd_fp8_wgmma INTERVAL={interval}" in text
    assert "109.0 µs, error" not in text  # another is faster and more accurate
    assert "max_error" not in text


def test_a_bound_on_the_error_is_said_with_what_it_left_out() -> None:
    run = fp8_run(0.03)
    text = " ".join(printed(run, 200).split())
    assert "* best of ours; flash_attn_3_fp8 is faster (1.03×): flash_fwd_fp8_wgmma" in text
    assert (
        "max_error 3.0e-02: candidates with a larger error are not ranked (1 are not); baselines "
        "with a larger one: flash_attn_3_fp8 (6.0e-02)" in text
    )
    assert "100.0 µs, error 5.0e-02, over max_error: flash_fwd_fp8_wgmma INTERVAL=0" in text
    points = report.to_json(run)["problems"][0]["frontier"]
    on = {point["us"]: point["kind"] for point in points if point["on"]}
    assert on == {100.0: "inaccurate", 104.0: "kernel", 120.0: "kernel"}
    assert {point["kind"] for point in points} == {"inaccurate", "kernel", "baseline"}


def test_other_formats_have_no_frontier() -> None:
    assert "none is both faster" not in printed(full_run(), 200)
    assert "frontier" not in report.to_json(full_run())["problems"][0]
