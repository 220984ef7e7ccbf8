"""The commands. `main` runs them, for `attnsweep/__main__.py`.

A file is named after its command; `app` has what they share.
"""

# Importing a command adds it to the app; this is the order of `attnsweep --help`.
from attnsweep.cli import tune, shapes, init, run, report, explain, compare  # noqa: F401, I001
from attnsweep.cli import judge, check, verify, compile, export, speedup, profile, inspect, merge  # noqa: F401
from attnsweep.cli import cache, doctor, schema  # noqa: F401
from attnsweep.cli.app import app, main

__all__ = ["app", "main"]
