"""Write what shows the recorded runs: their HTML pages, and the README's pictures.

Usage: python scripts/pictures.py. Needs the `html` extra, no GPU. Pages lie in the runs as
report.html; pictures in docs/pictures, each for a light and a dark page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert
from api import write_page
from records import OURS, Book, Row

ROOT = Path(__file__).parent.parent
BOOK = Book(ROOT / "results" / "h200")
PICTURES = ROOT / "docs" / "pictures"
# A page is 1 MB, nearly all of it Vega-Lite; the other runs' are one command away.
PAGES = ("flash_h200", "ladder", "three_kernel_h200")
# Text and lines, gridlines, and series in order: told apart by their lightness too.
THEMES = {
    "light": ("#24292f", "#d8dee4", ("#0a58ca", "#bc4c00", "#7d8590", "#9a6fb8")),
    "dark": ("#e6edf3", "#30363d", ("#58a6ff", "#ffa657", "#8b949e", "#d2a8ff")),
}
PEERS = {"torch_cudnn": "SDPA cuDNN", "torch_flash": "SDPA flash", "triton_flash": "Triton"}


def where(run: str) -> str:
    """The GPU and the day of a run."""
    return f"{BOOK.card(run).gpu}, {BOOK.card(run).date[:10]}"


def best_of(run: str, provider: str) -> list[Row]:
    """The best row of ours or of a peer on each problem of a run; a noisy one is left out."""
    found = (
        BOOK.find(run, problem=problem, provider=provider, take="winner")
        for problem in BOOK.problems(run)
    )
    return [row for row in found if row is not None]


def speed(theme: str) -> dict[str, Any]:
    """Vega-Lite: TFLOP/s of the fused kernel and its peers, one row a problem."""
    names = {OURS: "flash_fwd_wgmma (ours)", **PEERS}
    values = [
        {"problem": row.problem.label, "of": name, "tflops": row.tflops}
        for provider, name in names.items()
        for row in best_of("flash_h200", provider)
    ]
    order = [problem.label for problem in BOOK.problems("flash_h200")]
    series = list(names.values())
    colors = {"domain": series, "range": list(THEMES[theme][2])}
    shapes = {"domain": series, "range": ["circle", "square", "triangle-up", "diamond"]}
    y = {"field": "problem", "type": "nominal", "sort": order, "title": None}
    x = {"field": "tflops", "type": "quantitative", "title": f"TFLOP/s · {where('flash_h200')}"}
    legend = {"title": None, "orient": "top", "symbolStrokeWidth": 0}
    return {
        "data": {"values": values},
        "width": 560,
        "height": {"step": 24},
        "mark": {"type": "point", "filled": True, "size": 95, "opacity": 1},
        "encoding": {
            "y": y | {"axis": {"grid": True}},
            "x": x | {"scale": {"zero": True}, "axis": {"tickCount": 8}},
            "color": {"field": "of", "scale": colors, "legend": legend},
            "shape": {"field": "of", "scale": shapes, "legend": legend},
        },
    }


def ladder(theme: str) -> dict[str, Any]:
    """Vega-Lite: microseconds of each rung's best on one problem, and the best peer's."""
    problem = BOOK.problems("ladder")[0]
    ranked = [row for row in BOOK.rows("ladder") if row.problem == problem and row.status == "ok"]
    rows: dict[str, float] = {}
    for row in ranked:
        if row.provider == OURS:
            rows.setdefault(row.kernel, row.us)
    rungs = sorted(rows, key=lambda kernel: -rows[kernel])
    values = [{"kernel": k, "us": rows[k], "said": f"{rows[k]:.4g} µs"} for k in rungs]
    peer = min((row for row in ranked if row.provider != OURS), key=lambda row: row.us)
    ink, _, colors = THEMES[theme]
    y = {"field": "kernel", "type": "nominal", "sort": rungs, "title": None}
    title = f"µs, logarithmic · {problem.label} · {where('ladder')}"
    x = {"field": "us", "type": "quantitative", "title": title}
    scale = {"type": "log", "domain": [1, 4 * max(rows.values())], "nice": False}
    said = f"best peer, {PEERS.get(peer.provider, peer.provider)}: {peer.us:.4g} µs"
    rule = {"values": [{"us": peer.us, "said": said}]}
    return {
        "width": 560,
        "height": {"step": 26},
        "encoding": {"y": y, "x": x | {"scale": scale, "axis": {"values": [1, 10, 100, 1000]}}},
        "layer": [
            {
                "data": {"values": values},
                "mark": {"type": "bar", "height": 15, "color": colors[0]},
                "encoding": {"x2": {"datum": 1}},  # where the axis begins: a logarithm has no 0
            },
            {
                "data": {"values": values},
                "mark": {"type": "text", "align": "right", "color": ink},
                "encoding": {"x": {"value": 560}, "text": {"field": "said"}},
            },
            {
                "data": rule,
                "mark": {"type": "rule", "color": colors[1], "strokeDash": [5, 3], "size": 1.5},
                "encoding": {"y": None},
            },
            {
                "data": rule,
                "mark": {"type": "text", "align": "left", "dx": 5, "dy": -6, "color": colors[1]},
                "encoding": {"y": {"value": 0}, "text": {"field": "said"}},
            },
        ],
    }


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
        "legend": text | {"labelLimit": 260},
        "text": {"fontSize": 12},
    }
    return str(vl_convert.vegalite_to_svg(spec | {"config": config, "padding": 8})) + "\n"


def main() -> None:
    """Write them all."""
    for name in PAGES:
        run = BOOK.run(name)
        size = write_page(run, run.directory / "report.html")
        print(f"{run.directory / 'report.html'}: {size / 1e6:.1f} MB")
    PICTURES.mkdir(exist_ok=True)
    for theme in THEMES:
        for name, spec in (("speed", speed(theme)), ("ladder", ladder(theme))):
            path = PICTURES / f"{name}-{theme}.svg"
            path.write_text(svg(spec, theme), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
