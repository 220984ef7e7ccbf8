"""Write docs/cli.md, docs/kernels.md, docs/spec.schema.json and the README's sample from the code.

`--check` compares instead, and returns 1 if a page is stale.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from attnsweep.kernel import BLOCK_LIMITS, discover
from attnsweep.spec import schema_text

ROOT = Path(__file__).parent.parent
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
        sizes = ", ".join(map(str, kernel.head_dims))
        out.append(f"## {kernel.name}\n\n{kernel.summary}\n")
        out.append(
            f"{kernel.min_arch} and later · {', '.join(kernel.dtypes)} · head_dim {sizes} · "
            f"stages: {', '.join(kernel.stages)} · "
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
    return "\n".join(out).rstrip() + "\n"


def readme() -> str:
    """README.md with what the quickstart really prints between its marks."""
    text = (ROOT / "README.md").read_text()
    command = [sys.executable, "-m", "attnsweep", "run", "configs/quickstart.yaml", "--top", "6"]
    width = {**os.environ, "COLUMNS": "118"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=width)
    shown = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    block = f"```\n$ attnsweep run configs/quickstart.yaml --top 6\n{shown}\n```\n"
    begin, end = "<!-- quickstart: written by scripts/docs.py -->\n", "<!-- /quickstart -->"
    before, rest = text.split(begin)
    return before + begin + block + end + rest.split(end, 1)[1]


def main() -> int:
    """Write the pages, or with --check say which are stale and return 1."""
    pages = {
        "docs/cli.md": cli(),
        "docs/kernels.md": kernels(),
        "docs/spec.schema.json": schema_text(),
        "README.md": readme(),
    }
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
