"""Write what the code says of itself: docs/, the README's sample and tables, recorded rankings.

`--check` compares instead, and returns 1 if a page is stale.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import claims
import claims_cd
import claims_e
import measured
import performance

from attnsweep.choose.ranking import rank
from attnsweep.family.chunks import CHUNKS, CHUNKS_RULE, MODES
from attnsweep.family.declare import BLOCK_LIMITS, discover
from attnsweep.show import tables as report
from attnsweep.spec.schema import schema_text
from attnsweep.store.run import find_runs, open_run
from attnsweep.trial import Trial

ROOT = Path(__file__).parent.parent
SYSTEMS = """\
| system, and what its authors claim | here ({where}) |
|---|---|
| **A** three kernels, QKᵀ → softmax → PV, on Hopper: 1.65 µs/head at (1,16,1024,64), \
SDPA 1.62, unfused about 50 (H100) | `three_kernel_wgmma`: {table_head} µs/head in its \
configuration, {sweep_head} the best of its sweep, {tuned_head} tuned; with the softmax moved into \
the two products {fused_head} ({fused} µs a call); SDPA flash {sdpa_head}, cuDNN {cudnn_head}, \
unfused {unfused_head} in the same runs. Its claims, one by one: [docs/claims.md](docs/claims.md). \
On mma.sync, `three_kernel_mma`: {three_head} |
| **B** one fused, autotuned kernel, 23.7 µs against SDPA's 24.8, then batched under 5 µs a \
sequence (H100) | `flash_fwd_wgmma`: {wgmma} µs at (1,16,1024,64), {wgmma_to_flash}× SDPA flash \
and {wgmma_to_cudnn}× SDPA cuDNN in speed; its nine batched cells take {cells} µs a sequence, \
{cells_ratio}× the fastest peer: [docs/performance.md](docs/performance.md). On mma.sync, \
`flash_fwd_mma`: {flash} µs |
| **C** fp32 attention with head_dim 512 to 8192: 62 to 214 µs for 16 to 64 rows, 4 heads (A100) | \
`flash_fwd_fp32_wide` and `flash_fwd_fp32_wgmma`, 4 heads, rows × head_dim (of the larger bound): \
{wide}; the best peer \
within the error limit takes {wide_ratio}× as long |
| **D** a ladder of kernels with machine-code checks; the first, naive, 40,541 µs; target under 5 \
(H100) | `configs/ladder.yaml` at (1,8,512,64): {rungs} |
| **E** WMMA with a cp.async pipeline: 1162 µs at (1,8,512,64) (L4) | `wmma_pipeline`: \
{wmma_own} µs in its settings, {wmma_best} the best of the sweep ({wmma_ratio}×), SDPA flash \
{wmma_flash}. {wmma_hypotheses}; rows of Q, K and V in different banks, alone, are \
{wmma_banks}× as fast: [docs/claims.md](docs/claims.md) |
"""
NOTE = "<!-- Written by scripts/docs.py from the code; change that instead. -->\n\n"


def cli() -> str:
    """docs/cli.md, by Typer's own generator."""
    command = [sys.executable, "-m", "typer", "attnsweep.cli", "utils", "docs"]
    command += ["--name", "attnsweep"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return NOTE + done.stdout.strip() + "\n"


def kernels() -> str:
    """docs/kernels.md: every shipped family with its parameters and rules."""
    out = [NOTE + "# Kernel families\n"]
    out.append(
        "What `attnsweep list` prints, as a page. A sweep spec may give a parameter other values.\n"
        f"Every family also has the rule `{BLOCK_LIMITS}`: threads, shared memory and grid are\n"
        "what the architecture can launch.\n"
    )
    for kernel in discover().values():
        out.append(f"## {kernel.name}\n\n{kernel.summary}\n")
        out.append(
            f"{kernel.archs_text} · {', '.join(kernel.dtypes)} · "
            f"head_dim {kernel.head_dims_text} · stages: {', '.join(kernel.stages)} · "
            f"[template](../kernels/{kernel.name}.cu), [declaration](../kernels/{kernel.name}.py)\n"
        )
        out.append("| parameter | values | |\n|---|---|---|")
        out += [
            f"| `{p.name}` | {', '.join(map(str, p.values))} | {p.help} |" for p in kernel.params
        ]
        if kernel.rules:
            out.append("\n| rule | a config is kept if |\n|---|---|")
            out += [f"| `{name}` | {text} |" for name, (text, _) in kernel.rules.items()]
        out.append("")
    out.append(
        "## Modes\n\nParameters of every family, where a spec names them: how a call is issued. "
        f"The rule `{CHUNKS}`\nkeeps a config if {CHUNKS_RULE}.\n\n"
        "| parameter | values | |\n|---|---|---|"
    )
    out += [f"| `{p.name}` | {', '.join(map(str, p.values))} | {p.help} |" for p in MODES]
    return "\n".join(out).rstrip() + "\n"


def readme() -> str:
    """README.md with what the quickstart really prints between its marks."""
    text = (ROOT / "README.md").read_text()
    command = [sys.executable, "-m", "attnsweep", "run", "configs/quickstart.yaml", "--top", "3"]
    width = {**os.environ, "COLUMNS": "118"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=width)
    shown = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    block = f"```\n$ attnsweep run configs/quickstart.yaml --top 3\n{shown}\n```\n"
    begin, end = "<!-- quickstart: written by scripts/docs.py -->\n", "<!-- /quickstart -->"
    before, rest = text.split(begin)
    text = before + begin + block + end + rest.split(end, 1)[1]
    begin, end = "<!-- systems: written by scripts/docs.py -->\n", "<!-- /systems -->"
    before, rest = text.split(begin)
    return before + begin + systems() + end + rest.split(end, 1)[1]


def systems() -> str:
    """The table of the systems, its figures taken from the recorded run."""
    run = open_run(ROOT / "results" / "h200" / "mma_h200")
    best: dict[str, Trial] = {}
    for row in rank(run.trials, run.environment).to_dict("records"):
        if row["problem"] == "(1,16,1024,64) fp16 full" and row["rank"] == row["rank"]:
            best.setdefault(str(row["kernel"]), row["trial"])

    def us(kernel: str) -> float:
        time = best[kernel].time_us
        assert time is not None
        return time.median

    assert run.environment is not None
    figures = {
        "three_head": f"{us('three_kernel_mma') / 16:.2f}",
        **claims.figures(ROOT / "results" / "h200"),
        "flash": f"{us('flash_fwd_mma'):.1f}",
        **performance.figures(ROOT / "results" / "h200"),
        **others(ROOT / "results" / "h200"),
        **claims_e.figures(ROOT / "results" / "h200"),
        "where": f"{run.environment.gpu}, driver {run.environment.driver}, "
        f"{run.environment.date[:10]}",
    }
    return SYSTEMS.format(**figures)


def others(results: Path) -> dict[str, str]:
    """Systems C and D: problems of the first in full, the rungs of the second in order."""

    def ranked(name: str) -> list[dict[Any, Any]]:
        run = open_run(results / name)
        rows = rank(run.trials, run.environment).to_dict("records")
        return [row for row in rows if row["rank"] == row["rank"] and row["time_us"] > 0]

    limits = json.loads((results / "limits.json").read_text(encoding="utf-8"))["rates"]
    rows = claims_cd.wide_rows(open_run(results / claims_cd.WIDE), limits)
    wide = [f"{row.label} {claims_cd.us(row.best):.1f} µs ({row.share:.0f} %)" for row in rows]
    ratios = [
        min(map(claims_cd.us, row.peers)) / claims_cd.us(row.best) for row in rows if row.peers
    ]
    rungs: dict[str, float] = {}
    for row in ranked("ladder"):
        if row["trial"].provider == "attnsweep" and not row["trial"].problem.causal:
            rungs.setdefault(str(row["kernel"]), row["time_us"])
    return {
        "wide": ", ".join(wide),
        "wide_ratio": f"{min(ratios):.1f} to {max(ratios):.1f}",
        "rungs": ", ".join(f"`{n}` {t:.4g}" for n, t in reversed(rungs.items())) + " µs",
    }


def main() -> int:
    """Write the pages, or with --check say which are stale and return 1."""
    if set(sys.argv[1:]) - {"--check"}:
        print(__doc__)
        return 2
    pages = {
        "docs/cli.md": cli(),
        "docs/kernels.md": kernels(),
        "docs/spec.schema.json": schema_text(),
        "README.md": readme(),
    }
    tested = claims.page(ROOT / "results" / "h200")
    if tested is not None:
        pages["docs/claims.md"] = tested
    pages["docs/benchmarks.md"] = measured.page(ROOT / "results" / "h200")
    told = performance.page(ROOT / "results" / "h200")
    if told is not None:
        pages["docs/performance.md"] = told
    for directory in find_runs(ROOT / "results"):
        if directory.parent.name != "replay":
            tables = report.files(open_run(directory))
            pages |= {f"{directory.relative_to(ROOT)}/{name}": tables[name] for name in tables}
    stale = []
    for name, text in pages.items():
        path = ROOT / name
        if not path.is_file() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale:
        print(("stale: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
