"""Runs a callable's Triton kernels on the CPU, in Triton's interpreter, and judges its outputs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from attnsweep.compile.calls import configs_with
from attnsweep.compile.trace import Tracer
from attnsweep.core.cases import Case
from attnsweep.core.errors import CompileError, SpecError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.family.called import CalledFamily
from attnsweep.family.family import Config, Family
from attnsweep.family.params import config_in
from attnsweep.tools.simulator import Result, SimtError, error_of_lse, judged
from attnsweep.verify.limits import HALF_ULP
from attnsweep.verify.measures import row_error
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.rounded import log_sum_exp

_DTYPES = ("fp16", "fp32")
"""What the interpreter computes in: of bf16 it multiplies bits."""


class Interpreter:
    """Runs one callable; it must not be closed before its last check."""

    def __init__(self, call: str, arch: Arch) -> None:
        self._tracer = Tracer(call, arch, interpreted=True)
        self._tracer.closure  # noqa: B018 - a file that cannot be imported is refused here
        self._place = TemporaryDirectory(prefix="attnsweep-interpret-")
        self.refusal = cache(lambda p: self._tracer.refusals([p], unless_said=False).get(p))
        """Why no small case of a problem is called, or None."""
        served = (("its supports says so", lambda problem: self.refusal(problem) is None),)
        own: dict[str, Any] = {"supports": served, "dtypes": ("fp16",), "head_dims": (64,)}
        own |= {"head_dims_v": (), "empty_rows": False}
        name = call.rpartition(":")[2]
        self.family = CalledFamily(name, "", (), call=call, **own)

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self._tracer.close()
        self._place.cleanup()

    def configs(self, _family: Family, words: str, problem: Problem) -> tuple[Config, ...]:
        """The configs that its file keeps on a problem and that have these values.

        Without such a one, its first with these values in place of its own; without an autotuner,
        these values alone. Raises SpecError for a problem that it takes no call of.
        """
        if why := self._tracer.refusals([problem]).get(problem):
            raise SpecError(f"{self._tracer.call} cannot run {problem.label}: {why}")
        return tuple(configs_with(config_in(words), self._tracer, problem)[1])

    def check(self, _: object, config: Config, case: Case, **__: object) -> Result:
        """Call it on a case. Raises SimtError if it has no outputs."""
        problem, oracle = case.problem, oracle_of(case.problem)
        if problem.dtype not in _DTYPES:
            what = f"Triton's interpreter does not compute in {problem.dtype}"
            raise SpecError(what, hint=f"verify it in {' or '.join(_DTYPES)}")
        inputs = oracle.make_inputs(case, 1)
        with TemporaryDirectory(dir=self._place.name) as place:
            for name in problem.values:
                np.save(Path(place, f"{name}.npy"), np.asarray(inputs[name]))
            folder = Path(place, "made")
            folder.mkdir()
            try:
                self._tracer.interpret(problem, config, Path(place), folder).result()
            except CompileError as error:
                raise SimtError(error.what) from error
            made = {path.stem: np.load(path).astype(np.float64) for path in folder.glob("*.npy")}
        expected, least = oracle.exact(inputs, problem)
        errors = {
            name: row_error(made[name], exact, least[name]) for name, exact in expected.items()
        }
        name, off, limit = judged(
            errors, HALF_ULP[problem.out_dtype], case, self.family.rounds_scores
        )
        of_lse = 0.0
        if "lse" in made and "lse" not in problem.inputs:
            lse = log_sum_exp(inputs, problem, np.arange(problem.seqlen_q))
            of_lse = error_of_lse(made["lse"], lse)
        return Result(case, off, limit, name, of_lse)
