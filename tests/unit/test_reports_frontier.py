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


def test_its_data_has_every_right_row() -> None:
    points = report.to_json(fp8_run())["problems"][0]["frontier"]
    assert {(point["us"], point["kind"], point["on"]) for point in points} == {
        *((us, "kernel", True) for us in (100.0, 104.0, 120.0)),
        (101.0, "baseline", False),
        (109.0, "kernel", False),
    }


def test_other_formats_have_no_frontier() -> None:
    assert "none is both faster" not in printed(full_run(), 200)
    assert "frontier" not in report.to_json(full_run())["problems"][0]
