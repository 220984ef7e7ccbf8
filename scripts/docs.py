"""Write docs/cli.md, docs/kernels.md and docs/spec.schema.json from the code; --check compares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from attnsweep.kernel import BLOCK_LIMITS, discover
from attnsweep.spec import schema_text

DOCS = Path(__file__).parent.parent / "docs"
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
        f"Every family also has the rule `{BLOCK_LIMITS}`: threads, shared memory and grid are what\n"
        "the architecture can launch.\n"
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
        out += [f"| `{p.name}` | {', '.join(map(str, p.values))} | {p.help} |" for p in kernel.params]
        if kernel.rules:
            out.append("\n| rule | a config is kept if |\n|---|---|")
            out += [f"| `{name}` | {text} |" for name, (text, _) in kernel.rules.items()]
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def main() -> int:
    """Write the pages, or with --check say which are stale and return 1."""
    pages = {"cli.md": cli(), "kernels.md": kernels(), "spec.schema.json": schema_text()}
    stale = []
    for name, text in pages.items():
        path = DOCS / name
        if not path.is_file() or path.read_text() != text:
            stale.append(f"docs/{name}")
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale:
        print(("stale: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
