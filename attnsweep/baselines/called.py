"""Candidates that are calls of the user's: each call has its config, and launches its own code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import OtherCode, Way
from attnsweep.baselines.callable import flags_of, prepare_for
from attnsweep.baselines.prepare import BoundBaseline, first_call, tensors_of
from attnsweep.baselines.torch_sdpa import import_torch
from attnsweep.compile.launches import CallPlan
from attnsweep.compile.traced import others
from attnsweep.core.callables import Asked
from attnsweep.core.problem import Problem
from attnsweep.core.user_code import BoundFunction, built, imported, split, type_of, user_modules

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


class Callables:
    """The callables of this process, each imported once."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Any, Callable[..., Any]]] = {}
        self._places: set[Path] = set()
        self._prepared: set[tuple[str, Problem]] = set()
        self._built: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._kept: Any = None

    def ready(self, arch: str) -> None:
        """Before any is imported: what it may compile is kept, so that it can be told."""
        if self._kept is None:
            self._kept = TemporaryDirectory(prefix="attnsweep-", ignore_cleanup_errors=True)
            others.ready(arch, self._kept.name)

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

    def built(self, plan: CallPlan) -> Callable[..., Any]:
        """The function that a factory builds for a problem and a config, built once.

        Raises Unavailable.
        """
        key = plan.call, plan.problem, *plan.config.items()
        if key not in self._built:
            _, factory = self.loaded(Asked.of(plan.call).call)
            self._built[key] = built(plan.call, factory, plan.problem, plan.config)
        return self._built[key]

    def prepare(self, name: str, problem: Problem) -> None:
        """Call a callable's `prepare` for a problem, once."""
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
    callables.ready(session.gpu.arch)
    _, function = callables.loaded(asked.call)
    callables.prepare(plan.call, problem)
    own, tuned = split(function, plan.config)
    launched: set[str] = set()
    watch = _watch_of({} if asked.factory else tuned, plan.cache, launched)
    if asked.factory:
        with watch():
            own, function = {}, callables.built(plan)
    out, nbytes = type_of(torch, problem.out_dtype), sum(map(problem.bytes_of, problem.outputs))
    into = {name: torch.from_dlpack(array).view(out) for name, array in (memory or {}).items()}
    call = BoundFunction(torch, problem, plan.call, function, values=own, memory=into)
    forward = _Configured(call, watch, launched, plan)
    how: dict[str, Any] = {"rounds_scores": 0, "dtype": out, "held": True}
    made = BoundBaseline(
        Way(forward), tensors_of(torch, problem, copies), session, flags=flags_of(torch), **how
    )
    first_call(made, torch, session, asked if timed else None, nbytes)
    if timed and others.UNKNOWN not in launched and (missing := plan.expects - launched):
        raise OtherCode(f"{_OTHER}: {len(missing)} of its kernels were not launched")
    return made


_OTHER = "launched other code than its config compiled to"


class _Configured:
    """Calls a function with a config for the autotuner that it launches.

    launched: where `watch` notes the code that is launched.
    """

    def __init__(self, call: BoundFunction, watch: Any, launched: set[str], plan: CallPlan) -> None:
        self._call, self._watch, self._launched, self._plan = call, watch, launched, plan

    def __call__(self, *inputs: Any) -> Any:
        """One call. Raises OtherCode if it launches what was not compiled for its config."""
        with self._watch():
            out = self._call(*inputs)
        expects = self._plan.expects
        if expects and (none_of := self._launched - expects - {others.UNKNOWN}):
            raise OtherCode(f"{_OTHER}: {len(none_of)} kernels are none of {len(expects)}")
        return out


def _watch_of(tuned: Mapping[str, Any], cache: str, launched: set[str]) -> Any:
    """A context in which launches of Triton's are taken down; of nothing without Triton."""
    try:
        from attnsweep.compile.traced.triton import Watch
    except ImportError:
        return nullcontext
    return Watch(tuned, cache, launched).watching
