"""A called process that a nursery forks, which has imported what the first call of an operator does."""

import os
import sys

import torch._dynamo  # noqa: F401

from attacks import host
from attnsweep.bench import caller_process


def main() -> None:
    """Serve the strict judge as a program would: see strict.Caller."""
    sys.argv = ["-c", str(os.getppid()), f"{host.__name__}:Card"]
    caller_process.main()
