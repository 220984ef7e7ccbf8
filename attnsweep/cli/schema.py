"""`attnsweep schema`: the JSON Schema of a spec."""

from __future__ import annotations

from attnsweep.cli.app import MACHINE, app, examples
from attnsweep.reports.terminal import console


@app.command(rich_help_panel=MACHINE, epilog=examples("attnsweep schema > spec.schema.json"))
def schema() -> None:
    """Print the JSON Schema of a spec, with which editors complete and check it.

    An editor with a YAML language server reads the first line of a spec:
    `# yaml-language-server: $schema=spec.schema.json`.
    """
    from attnsweep.specs.load import schema_text

    console.file.write(schema_text())
