"""Commands about this machine: `cache`, `doctor` and `schema`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from attnsweep.cli import options
from attnsweep.cli.app import MACHINE, app, command, examples, print_result, refuse_idle
from attnsweep.cli.options import option
from attnsweep.core.errors import SpecError
from attnsweep.reports import terminal
from attnsweep.reports.terminal import console, counted

cache = typer.Typer(
    cls=terminal.Group,
    invoke_without_command=True,
    epilog=examples("attnsweep cache", "attnsweep cache prune --days 7"),
)
app.add_typer(cache, name="cache", rich_help_panel=MACHINE)

_DAY_S = 86400


@cache.callback()
def show(ctx: typer.Context, json_: options.Json = False) -> None:
    """Show where compiled code is kept and how much; `prune` removes what is old."""
    if ctx.invoked_subcommand is not None:
        refuse_idle(ctx, ("json_",), "before a subcommand", "attnsweep cache prune --json")
        return
    from attnsweep.compile.cache import entries, fault
    from attnsweep.compile.nvrtc import default_cache_dir

    directory = default_cache_dir()
    found = entries(directory)
    size = sum(entry.size_bytes for entry in found)
    archs = sorted({entry.arch for entry in found})
    lines = [f"{directory}: {counted(len(found), 'cubin')}, {size / 2**20:.1f} MiB"]
    for arch in archs:
        of = [entry.size_bytes for entry in found if entry.arch == arch]
        lines.append(f"  {arch}: {counted(len(of), 'cubin')}, {sum(of) / 2**20:.1f} MiB")
    why = fault(directory)
    if why is not None:
        lines.append(f"it cannot be written ({why})")
    data = {
        "directory": str(directory),
        "cubins": len(found),
        "bytes": size,
        "by_arch": {arch: sum(entry.arch == arch for entry in found) for arch in archs},
        "writable": why is None,
    }
    print_result(lines, data, json_)


@cache.command(epilog=examples("attnsweep cache prune", "attnsweep cache prune --all"))
def prune(
    days: Annotated[
        float | None, option("Remove code that has not been used for this many days.", min=0.0)
    ] = None,
    every: Annotated[bool, option("Remove all of it.", "--all")] = False,
    json_: options.Json = False,
) -> None:
    """Remove compiled code that was not used for a month, or as long as --days says.

    Code that is needed again is compiled again. Do not prune while a sweep runs: it may be about
    to load what is removed.
    """
    from attnsweep.compile.cache import entries
    from attnsweep.compile.cache import prune as remove
    from attnsweep.compile.nvrtc import default_cache_dir

    if every and days is not None:
        raise SpecError("--all and --days exclude each other", hint="give one of them")
    directory = default_cache_dir()
    age_s = 0.0 if every else _DAY_S * (30.0 if days is None else days)
    gone = remove(directory, age_s)
    left = entries(directory)
    size, rest = (sum(entry.size_bytes for entry in some) for some in (gone, left))
    text = (
        f"{directory}: removed {counted(len(gone), 'cubin')}, {size / 2**20:.1f} MiB; "
        f"{len(left)} {'is' if len(left) == 1 else 'are'} left, {rest / 2**20:.1f} MiB"
    )
    data = {"directory": str(directory), "removed": len(gone), "bytes": size, "left": len(left)}
    print_result([text], data, json_)


@command(MACHINE)
def doctor(json_: options.Json = False) -> None:
    """Show what this machine can do, what is missing, and how to fix it.

    Exit code 3 if it cannot run a sweep on a GPU.

    $ attnsweep doctor
    $ attnsweep doctor --json
    """
    from attnsweep.tools.doctor import examine, lines_of, verdict

    findings = examine()
    ready = all(finding.ok for finding in findings if finding.needed)
    data = [asdict(finding) for finding in findings]
    lines: list[Text | str] = [*lines_of(findings, console.width), verdict(findings)]
    print_result(lines, {"ready": ready, "findings": data}, json_)
    raise typer.Exit(0 if ready else 3)


@command(MACHINE)
def schema() -> None:
    """Print the JSON Schema of a spec, with which editors complete and check it.

    An editor with a YAML language server reads the first line of a spec:
    `# yaml-language-server: $schema=spec.schema.json`.

    $ attnsweep schema > spec.schema.json
    """
    from attnsweep.specs.load import schema_text

    console.file.write(schema_text())
