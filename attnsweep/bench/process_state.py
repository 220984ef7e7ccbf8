"""State of the process that owns the GPU, kept from one problem to the next."""

from __future__ import annotations

from collections.abc import Sequence

from attnsweep.baselines.called import Callables
from attnsweep.baselines.import_ahead import ImportAhead
from attnsweep.baselines.triton_precompile import TritonPrecompile
from attnsweep.core.problem import Problem
from attnsweep.verify.reference_pool import ReferencePool


class ProcessState:
    """Helper processes, and what was proved on short sequences; none starts before it is needed."""

    def __init__(self) -> None:
        self.references = ReferencePool()
        self.triton = TritonPrecompile()
        self.imports = ImportAhead(self.triton)
        self.callables = Callables()
        self.right_on_short: set[str] = set()
        """Launches that made as many right calls on short sequences as are ever made."""

    def begin(self, baselines: Sequence[str], first: tuple[Problem, int] | None) -> None:
        """Import what baselines need, and compile what they need for the first problem."""
        problem = None if first is None else first[0]
        if problem is not None:
            self.triton.begin(baselines, problem)
        self.imports.begin(baselines, problem)
