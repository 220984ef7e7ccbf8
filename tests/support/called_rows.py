"""A run of calls, written row by row: nothing is traced, and nothing timed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from samples import TEST_GPU, candidate

from attnsweep.core.problem import Problem
from attnsweep.core.trial import Trial
from attnsweep.store.store import Store

CALL = {"closure": "c105", "triton": "3.9.0", "torch": "2.13.0", "covers": "any length"}
SHORT, LONG = Problem.parse("(1,2,256,16) bf16 causal"), Problem.parse("(1,2,4096,16) bf16 causal")
FAST, SLOW = {"M": 64, "num_warps": 4, "maxnreg": None}, {"M": 128, "num_warps": 8, "maxnreg": 128}


def called(problem: Problem, config: dict[str, Any], time_us: float, kernel: str = "attend", **call: str) -> Trial:
    """A right row of a call; rows of one time are ties."""
    said = CALL | {"function": f"{kernel}.py:attention"} | call
    return candidate(kernel, time_us).with_(problem=problem, config=config, call=said)


ROWS = [called(problem, config, us) for problem in (SHORT, LONG) for config, us in ((FAST, 20.0), (SLOW, 30.0))]


def written(directory: Path, rows: Iterable[Trial] = ROWS, **environment: Any) -> Path:
    """The directory of a run of these rows."""
    with Store.open(directory) as store:
        store.describe("name: calls\n", TEST_GPU.model_copy(update=environment))
        for row in rows:
            store.append(row)
    return directory
