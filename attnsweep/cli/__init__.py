"""The commands: each parses, calls one function of a lower layer and prints.

A file is named after its command; `app` has what they share.
"""

# In the order of `attnsweep --help`.
from attnsweep.cli import tune, init, run, report, check, compile, profile, inspect, doctor  # noqa: I001
from attnsweep.cli.app import app, main

__all__ = [
    "app",
    "check",
    "compile",
    "doctor",
    "init",
    "inspect",
    "main",
    "profile",
    "report",
    "run",
    "tune",
]
