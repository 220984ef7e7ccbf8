"""Write what shows the recorded runs: their HTML pages, and the README's pictures.

Usage: python scripts/pictures.py. Needs the `html` extra, no GPU. Pages lie in the runs as
report.html; pictures in docs/pictures, each for a light and a dark page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert

from attnsweep.choose.ranking import rank
from attnsweep.show import html as page
from attnsweep.store.run import open_run

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "h200"
PICTURES = ROOT / "docs" / "pictures"
# A page is 1 MB, nearly all of it Vega-Lite; the other runs' are one command away.
PAGES = ("flash_h200", "ladder", "three_kernel_h200")
# Text and lines, gridlines, and series in order: told apart by their lightness too.
THEMES = {
    "light": ("#24292f", "#d8dee4", ("#0a58ca", "#bc4c00", "#7d8590", "#9a6fb8")),
    "dark": ("#e6edf3", "#30363d", ("#58a6ff", "#ffa657", "#8b949e", "#d2a8ff")),
}
OURS = "attnsweep"
PEERS = {"torch_cudnn": "SDPA cuDNN", "torch_flash": "SDPA flash", "triton_flash": "Triton"}


def best(name: str) -> tuple[list[dict[str, Any]], str]:
    """Of each problem of a run, the best of ours and each peer: ranked rows, and where."""
    run = open_run(RESULTS / name)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rank(run.trials, run.environment).to_dict("records"):
        if row["rank"] == row["rank"]:  # a rank that is NaN is none
            rows.setdefault((row["problem"], row["provider"]), {str(k): v for k, v in row.items()})
    assert run.environment is not None
    return list(rows.values()), f"{run.environment.gpu}, {run.environment.date[:10]}"


def speed(theme: str) -> dict[str, Any]:
    """Vega-Lite: TFLOP/s of the fused kernel and its peers, one row a problem."""
    rows, where = best("flash_h200")
    names = {OURS: "flash_fwd_wgmma (ours)", **PEERS}
    values = [
        {"problem": row["problem"], "of": names[row["provider"]], "tflops": row["tflops"]}
        for row in rows
        if row["provider"] in names
    ]
    order = list(dict.fromkeys(row["problem"] for row in rows))
    series = list(names.values())
    colors = {"domain": series, "range": list(THEMES[theme][2])}
    shapes = {"domain": series, "range": ["circle", "square", "triangle-up", "diamond"]}
    y = {"field": "problem", "type": "nominal", "sort": order, "title": None}
    x = {"field": "tflops", "type": "quantitative", "title": f"TFLOP/s · {where}"}
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
    run = open_run(RESULTS / "ladder")
    ranked = rank(run.trials, run.environment).to_dict("records")
    first = ranked[0]["problem"]
    rows: dict[str, float] = {}
    peers: dict[str, float] = {}
    for row in ranked:
        if row["problem"] == first and row["rank"] == row["rank"]:
            of = peers if row["baseline"] else rows
            of.setdefault(str(row["kernel"]), float(row["time_us"]))
    rungs = sorted(rows, key=lambda kernel: -rows[kernel])
    values = [{"kernel": k, "us": rows[k], "said": f"{rows[k]:.4g} µs"} for k in rungs]
    peer = min(peers, key=lambda name: peers[name])
    assert run.environment is not None
    ink, _, colors = THEMES[theme]
    y = {"field": "kernel", "type": "nominal", "sort": rungs, "title": None}
    title = f"µs, logarithmic · {first} · {run.environment.gpu}, {run.environment.date[:10]}"
    x = {"field": "us", "type": "quantitative", "title": title}
    scale = {"type": "log", "domain": [1, 4 * max(rows.values())], "nice": False}
    said = f"best peer, {PEERS.get(peer, peer)}: {peers[peer]:.4g} µs"
    rule = {"values": [{"us": peers[peer], "said": said}]}
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
        run = open_run(RESULTS / name)
        size = page.write(run, run.directory / "report.html")
        print(f"{run.directory / 'report.html'}: {size / 1e6:.1f} MB")
    PICTURES.mkdir(exist_ok=True)
    for theme in THEMES:
        for name, spec in (("speed", speed(theme)), ("ladder", ladder(theme))):
            path = PICTURES / f"{name}-{theme}.svg"
            path.write_text(svg(spec, theme), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
