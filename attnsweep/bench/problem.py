"""The problem that is open on this process's GPU, and launches bound to its memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from attnsweep.baselines.registry import backend_of
from attnsweep.bench.process_state import ProcessState
from attnsweep.compile.launches import LaunchPlan, Plan
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy
from attnsweep.device.bound_call import BoundCall
from attnsweep.device.buffers import Buffer
from attnsweep.device.cuda import CudaSession
from attnsweep.verify.verifier import Verifier


class OpenProblem:
    """A problem on the card: inputs that depend on `seed` alone, and what proves calls right."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        then: Problem | None = None,
        baselines: Sequence[str] = (),
        rounds_scores: Collection[int] = (),
        shown: Collection[str] = (),
        cache_dir: Path | None = None,
        state: ProcessState | None = None,
    ) -> None:
        """See Gpu.open. state: of the process, which outlasts the problem."""
        self.problem, self.shown = problem, shown
        self.state = state = state or ProcessState()
        state.triton.begin(baselines, problem)
        self.session = CudaSession()
        rounded = {*rounds_scores, *(backend_of(name).rounds_scores for name in baselines)}
        own = problem, seed, self.session, cache_dir, then, rounded
        self.proof = Verifier(*own, state.references)
        self.timed = self.proof.timed.buffers
        self.workspaces = Workspaces(self.session)

    def shows(self, name: str, accuracy: Accuracy) -> bool:
        """Whether errors of a checked callable are shown: not if it is within every limit.

        It is judged as any other then, so that it is not confirmed by less.
        """
        return name in self.shown and max(accuracy.shares.values(), default=0.0) > 1


class Workspaces(dict[tuple[str, int], Buffer]):
    """Memory that launches need beside a problem's tensors, by name and exact size.

    So the guard begins where a workspace ends, and an entry that needs another size does not free
    that of an earlier entry.
    """

    def __init__(self, session: CudaSession) -> None:
        super().__init__()
        self._session = session
        self.entries: dict[str, LaunchPlan] = {}
        """Launches whose workspaces are kept."""

    def bind(self, launches: LaunchPlan, copies: Sequence[Mapping[str, Buffer]]) -> BoundCall:
        """Bind launches to workspaces and to each copy of a problem's tensors."""
        for item in launches.workspaces.items():
            if item not in self:
                self[item] = Buffer(item[1])
        own = {item[0]: self[item] for item in launches.workspaces.items()}
        return BoundCall(self._session, launches, [{**copy, **own} for copy in copies])

    def free_others(self, *needed: Plan) -> None:
        """Free those that neither these launches nor an entry's need."""
        every = (*needed, *self.entries.values())
        for item in self.keys() - {one for plan in every for one in plan.workspaces.items()}:
            del self[item]
