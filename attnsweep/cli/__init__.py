"""The commands: each parses, calls one function of a lower layer and prints.

A file is named after its command; `app` has what they share.
"""

# Importing a command adds it to the app; this is the order of `attnsweep --help`.
from attnsweep.cli import tune, init, run, report, check, compile, profile, inspect  # noqa: F401, I001
from attnsweep.cli import cache, doctor, schema  # noqa: F401
from attnsweep.cli.app import app, main

__all__ = ["app", "main"]
