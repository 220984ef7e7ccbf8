"""`attnsweep doctor`: the state of this machine."""

from __future__ import annotations

from typing import Any

import typer
from rich.text import Text

from attnsweep.cli import options
from attnsweep.cli.app import MACHINE, app, examples, print_result
from attnsweep.reports.terminal import console


@app.command(
    rich_help_panel=MACHINE, epilog=examples("attnsweep doctor", "attnsweep doctor --json")
)
def doctor(json_: options.Json = False) -> None:
    """Show what this machine can do, what is missing, and how to fix it.

    Exit code 3 if it cannot run a sweep on a GPU.
    """
    from attnsweep.tools.doctor import examine, lines_of, verdict

    findings = examine()
    ready = all(finding.ok for finding in findings if finding.needed)
    data: list[dict[str, Any]] = [
        {name: getattr(f, name) for name in ("name", "ok", "detail", "fix", "needed")}
        for f in findings
    ]
    shown = [*lines_of(findings, console.width), Text(verdict(findings))]
    print_result(shown, {"ready": ready, "findings": data}, json_)
    raise typer.Exit(0 if ready else 3)
