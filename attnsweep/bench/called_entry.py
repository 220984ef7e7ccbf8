"""A call of the user's with a config as an entry: proved as a candidate, timed as a callable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnsweep.baselines import prepare
from attnsweep.baselines.backend import Failed, OtherCode, Unavailable
from attnsweep.baselines.called import bound_call
from attnsweep.bench.entries import CallableEntry
from attnsweep.bench.timer import Timer
from attnsweep.compile.launches import CallPlan, Candidate
from attnsweep.core.problem import DTYPE_BYTES
from attnsweep.core.trial import Accuracy
from attnsweep.device.buffers import Buffer
from attnsweep.verify.expected import PLAIN


class Landed:
    """A call whose outputs are copied to where a launch would have written them."""

    def __init__(
        self, call: prepare.BoundBaseline, plan: CallPlan, buffers: Mapping[str, Buffer]
    ) -> None:
        self.call, self._plan, self._buffers = call, plan, buffers

    def enqueue(self, copy: int = 0) -> None:
        """Issue one call and the copies; does not wait."""
        self.call.enqueue(copy)
        self.collect(copy, self._buffers)

    def collect(self, copy: int, at: Mapping[str, Buffer], *, which: int | None = None) -> int:
        """See verify.calls.Collect."""
        problem = self._plan.problem
        bits = prepare.STORAGE[DTYPE_BYTES[problem.out_dtype]]
        into = [at[name].view(problem.shape_of(name), bits) for name in problem.outputs]
        lse = (
            self._buffers["lse"].view(problem.shape_of("lse"), np.int32) if self._plan.lse else None
        )
        return self.call.collect(copy, into, lse, which)


def called_entry(
    timer: Timer, candidate: Candidate, *, small: bool, cold: bool = False
) -> tuple[CallableEntry, Accuracy]:
    """Prove a candidate that is a Python call right, and make it an entry that can be timed.

    small: on its small cases too. cold: with copies for cold times. Raises WrongResult, OtherCode,
    or Failed with what it raised.
    """
    opened, session, proof = timer.opened, timer.session, timer.proof
    copies = [opened.timed, *(timer.cold.copies if cold else [])]
    session.release()
    with session.stream:  # its first call is on the inputs as they were made
        proof.timed.go_to(PLAIN)
    session.synchronize()
    try:
        plan = candidate.timed
        assert isinstance(plan, CallPlan)
        inputs = [prepare.arrays_of(plan.problem, copy) for copy in copies]
        call = bound_call(plan, inputs, session, opened.state.callables)
        if call.issued is not None:
            raise Failed(call.issued)
        call.keep(sum(map(plan.problem.bytes_of, plan.problem.outputs)), session)
        checks = tuple(replace(check, lse=call.gives_lse) for check in candidate.checks)
        plan = replace(plan, lse=call.gives_lse)
        workspaces = {
            item: Buffer(item[1]) for each in (plan, *checks) for item in each.workspaces.items()
        }

        def bind(check: Any, buffers: Sequence[Mapping[str, Buffer]]) -> Any:
            """A small case, whose output lies between guards if the function takes `out`."""
            problem, every, memory = check.problem, _with(buffers[0], check, workspaces), {}
            if problem.op.name == "forward":
                (name,) = problem.outputs
                bits = prepare.STORAGE[DTYPE_BYTES[problem.out_dtype]]
                memory["out"] = every[name].view(problem.shape_of(name), bits)
            inputs = [prepare.arrays_of(problem, buffers[0])]
            own = session, opened.state.callables
            call = bound_call(check, inputs, *own, memory=memory, timed=False)
            return Landed(call, check, every)

        landed = Landed(call, plan, _with(opened.timed, plan, workspaces))
        known = replace(candidate, timed=plan, checks=checks)
        accuracy, proven = proof.of_candidate(known, landed, bind, workspaces, small=small)
        proof.hard(candidate.rounds_scores)  # for `confirm`, which has less time
    except Unavailable as error:
        session.synchronize()  # raises what a fault left behind, and the process ends
        proof.mend(copies[1:])
        raise error if isinstance(error, (Failed, OtherCode)) else Failed(str(error)) from error
    none = np.empty(0, np.uint64)
    lse = _with({}, plan, workspaces).get("lse")
    how: dict[str, Any] = {"collect": landed.collect, "kept": call.kept, "lse": lse}
    proven = replace(proven, call=call, digests=none, lse_digests=None, **how)
    return CallableEntry(timer, call, proven, shown=False), accuracy


def _with(
    buffers: Mapping[str, Buffer], plan: CallPlan, workspaces: Mapping[tuple[str, int], Buffer]
) -> dict[str, Buffer]:
    """The problem's buffers with the call's workspaces."""
    return {**buffers, **{item[0]: workspaces[item] for item in plan.workspaces.items()}}
