"""Write pictures of recorded runs to docs/pictures, for light and dark pages.

Usage: python scripts/pictures.py. Needs the `html` extra, no GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vl_convert
from claims import ENV
from records import OURS, Book, Row

ROOT = Path(__file__).parent.parent
BOOK = Book(ROOT / "results" / "h200")
SPEEDS = Book(ROOT / "results" / "h100-80gb-hbm3")  # FlashAttention-3 was timed there
PICTURES = ROOT / "docs" / "pictures"
# Text and lines, gridlines, and series in order: told apart by their lightness too.
THEMES = {
    "light": ("#24292f", "#d8dee4", ("#0a58ca", "#bc4c00", "#7d8590", "#9a6fb8", "#1a7f37")),
    "dark": ("#e6edf3", "#30363d", ("#58a6ff", "#ffa657", "#8b949e", "#d2a8ff", "#56d364")),
}
BASELINES = {
    "torch_cudnn": "SDPA cuDNN",
    "torch_flash": "SDPA flash",
    "triton_flash": "Triton",
    "flash_attn_3": "FlashAttention-3",
}


def where(book: Book, run: str) -> str:
    """The GPU and the day of a run."""
    return f"{book.card(run).gpu}, {book.card(run).date[:10]}"


def best_of(book: Book, run: str, provider: str) -> list[Row]:
    """The best row of ours or of a baseline on each problem of a run; a noisy one is left out."""
    found = (
        book.find(run, problem=problem, provider=provider, take="winner")
        for problem in book.problems(run)
    )
    return [row for row in found if row is not None]


def filled(template: str, **figures: Any) -> dict[str, Any]:
    """A Vega-Lite picture of scripts/pages with its figures."""
    spec: dict[str, Any] = json.loads(ENV.get_template(template).render(figures))
    return spec


def speed(theme: str) -> dict[str, Any]:
    """TFLOP/s of the fused kernel and its baselines, one row a problem."""
    names = {OURS: "flash_fwd_wgmma (ours)", **BASELINES}
    values = [
        {"problem": row.problem.label, "of": name, "tflops": row.tflops}
        for provider, name in names.items()
        for row in best_of(SPEEDS, "flash_training", provider)
    ]
    there = {value["of"] for value in values}
    series = [name for name in names.values() if name in there]
    order = [problem.label for problem in SPEEDS.problems("flash_training")]
    facts = {"where": where(SPEEDS, "flash_training"), "colors": THEMES[theme][2]}
    return filled("speed.vl.json", values=values, order=order, series=series, **facts)


def ladder(theme: str) -> dict[str, Any]:
    """Microseconds of each rung's best on one problem, slowest first, and the best baseline's."""
    problem = BOOK.problems("ladder")[0]
    best: dict[str, Row] = {}
    for row in BOOK.find("ladder", problem=problem, take="all"):
        best.setdefault(row.kernel, row)
    rungs = sorted(best.values(), key=lambda row: -row.us)
    baselines = [
        row for row in BOOK.rows("ladder") if row.problem == problem and row.provider != OURS
    ]
    baseline = min((row for row in baselines if row.status == "ok"), key=lambda row: row.us)
    name = BASELINES.get(baseline.provider, baseline.provider)
    return filled(
        "ladder.vl.json",
        values=[{"kernel": r.kernel, "us": r.us, "said": f"{r.us:.4g} µs"} for r in rungs],
        baseline={"us": baseline.us, "said": f"best baseline, {name}: {baseline.us:.4g} µs"},
        problem=problem.label,
        where=where(BOOK, "ladder"),
        ink=THEMES[theme][0],
        colors=THEMES[theme][2],
    )


SEARCHES = {
    "gp": "gp",
    "gp, no history": "gp without history",
    "tpe": "tpe",
    "random": "random",
    "kernel_tuner bayes_opt": "Kernel Tuner, bayes_opt",
    "kernel_tuner genetic_algorithm": "Kernel Tuner, genetic_algorithm",
}


def search(theme: str) -> dict[str, Any]:
    """The best time so far over the best, by trials, of strategies on two recorded spaces."""
    rows = [row for row in BOOK.file("../search_replay.json")["spaces"] if "curve" in row]
    values = [
        {
            "space": f"{row['kernel']} {row['problem']}, {row['candidates']}",
            "of": SEARCHES[row["strategy"]],
            "trial": trial,
            "slower": round(100 * (ratio - 1), 2),
        }
        for row in rows
        if row["strategy"] in SEARCHES
        for trial, ratio in enumerate(row["curve"], 1)
        if ratio is not None
    ]
    there = {value["of"] for value in values}
    series = [name for name in SEARCHES.values() if name in there]
    ink, _, colors = THEMES[theme]
    return filled(
        "search.vl.json",
        values=values,
        spaces=list(dict.fromkeys(value["space"] for value in values)),
        series=series,
        colors=[*colors, ink][: len(series)],
        dashes=[[1, 0], [6, 3], [1, 0], [2, 2], [1, 0], [6, 3]][: len(series)],
        ink=ink,
    )


def svg(spec: dict[str, Any], theme: str) -> str:
    """The picture, on no background of its own."""
    ink, line, _ = THEMES[theme]
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    axis = {"gridColor": line, "domainColor": line, "tickColor": line, "titleFontWeight": "normal"}
    config = {
        "background": None,
        "font": "sans-serif",
        "view": {"stroke": None},
        "axis": text | axis | {"labelLimit": 260},
        "legend": text | {"labelLimit": 260, "columnPadding": 24},
        "text": {"fontSize": 12},
    }
    # Some readers' sans-serif is a sixth wider than the one that was measured for the labels.
    padding = {"left": 36, "top": 8, "right": 32, "bottom": 8}
    return str(vl_convert.vegalite_to_svg(spec | {"config": config, "padding": padding})) + "\n"


def main() -> None:
    """Write them all."""
    PICTURES.mkdir(exist_ok=True)
    for theme in THEMES:
        drawn = {"speed": speed(theme), "ladder": ladder(theme), "search": search(theme)}
        for name, spec in drawn.items():
            path = PICTURES / f"{name}-{theme}.svg"
            path.write_text(svg(spec, theme), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
