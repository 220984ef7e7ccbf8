"""The commands. `main` runs them, for `attnsweep/__main__.py`.

A file has the commands of one purpose; `app` has what all share.
"""

# Importing a file adds its commands to the app; this is the order of `attnsweep --help`.
from attnsweep.cli import sweep, read, guard, program, correctness, code, machine  # noqa: F401, I001
from attnsweep.cli.app import app, main

__all__ = ["app", "main"]
