"""Candidates that are calls of the user's: each call has its config, and launches its own code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import OtherCode, Way
from attnsweep.baselines.callable import flags_of, prepare_for
from attnsweep.baselines.prepare import BoundBaseline, first_call, tensors_of, type_of
from attnsweep.baselines.torch_sdpa import import_torch
from attnsweep.compile.launches import CallPlan
from attnsweep.core.callables import Asked
from attnsweep.core.problem import Problem
from attnsweep.core.user_code import BoundFunction, imported, split, user_modules

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


class Callables:
    """The callables that a process has imported, as kernels are compiled: once."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Any, Callable[..., Any]]] = {}
        self._places: set[Path] = set()
        self._prepared: set[tuple[str, Problem]] = set()

    def loaded(self, call: str) -> tuple[Any, Callable[..., Any]]:
        """The module and the function. Raises Unavailable.

        Modules beside another callable's file are forgotten first: two versions of a file import
        helpers of one name, each its own.
        """
        if call not in self._loaded:
            place = Path(call.rpartition(":")[0]).resolve().parent
            for name, file in user_modules().items():
                if any(Path(file).is_relative_to(other) for other in self._places - {place}):
                    del sys.modules[name]
            self._places.add(place)
            self._loaded[call] = imported(call)
        return self._loaded[call]

    def prepare(self, name: str, problem: Problem) -> None:
        """See prepare_for: once a problem."""
        if (name, problem) not in self._prepared:
            prepare_for(name, *self.loaded(Asked.of(name).call), problem)
            self._prepared.add((name, problem))


def bound_call(
    plan: CallPlan,
    copies: Sequence[Mapping[str, Any]],
    session: CudaSession,
    callables: Callables,
    *,
    memory: Mapping[str, Any] | None = None,
    timed: bool = True,
) -> BoundBaseline:
    """A call with its config on copies of a problem's inputs, after one run.

    copies: CuPy arrays, as `arrays_of` gives them. memory: arrays for outputs that the function
    writes to. timed: whether it is looked at as `first_call` says. Raises Unavailable.
    """
    torch, problem, asked = import_torch(), plan.problem, Asked.of(plan.call)
    _, function = callables.loaded(asked.call)
    callables.prepare(plan.call, problem)
    own, tuned = split(function, plan.config)
    out, nbytes = type_of(torch, problem.out_dtype), sum(map(problem.bytes_of, problem.outputs))
    into = {name: torch.from_dlpack(array).view(out) for name, array in (memory or {}).items()}
    call = BoundFunction(torch, problem, plan.call, function, values=own, memory=into)
    forward = _Configured(call, tuned, plan)
    how: dict[str, Any] = {"rounds_scores": 0, "dtype": out, "held": True}
    made = BoundBaseline(
        Way(forward), tensors_of(torch, problem, copies), session, flags=flags_of(torch), **how
    )
    first_call(made, torch, session, asked if timed else None, nbytes)
    if timed and (missing := plan.expects - forward.launched):
        raise OtherCode(f"{_OTHER}: {len(missing)} of its kernels were not launched")
    return made


_OTHER = "launched other code than its config compiled to"


class _Configured:
    """Calls a function with a config for the autotuner that it launches."""

    def __init__(self, call: BoundFunction, tuned: Mapping[str, Any], plan: CallPlan) -> None:
        self._call, self._plan = call, plan
        self.launched: set[str] = set()
        """Hashes of the kernels of Triton that were launched."""
        self._watch = _watch_of(tuned, plan.cache, self.launched)

    def __call__(self, *inputs: Any) -> Any:
        """One call. Raises OtherCode if it launches what was not compiled for its config."""
        with self._watch():
            out = self._call(*inputs)
        expects = self._plan.expects
        if expects and (others := self.launched - expects):
            raise OtherCode(f"{_OTHER}: {len(others)} kernels are none of {len(expects)}")
        return out


def _watch_of(tuned: Mapping[str, Any], cache: str, launched: set[str]) -> Any:
    """A context in which launches of Triton's are taken down; of nothing without Triton."""
    try:
        from attnsweep.compile.traced.triton import Watch
    except ImportError:
        return _nothing
    return Watch(tuned, cache, launched).watching


@contextmanager
def _nothing() -> Iterator[None]:
    yield
