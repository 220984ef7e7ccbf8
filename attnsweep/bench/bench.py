"""Check and time candidates and baselines of one problem on one GPU, inside the worker process."""

from __future__ import annotations

from typing import Any

from attnsweep.bench.called_entry import called_entry
from attnsweep.bench.entries import CandidateEntry, Entry, baseline_entry
from attnsweep.bench.problem import OpenProblem
from attnsweep.bench.timer import Timer
from attnsweep.compile.launches import CallPlan, Candidate, FirstTimes, LaunchPlan
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy
from attnsweep.device.energy import Stretch
from attnsweep.verify.verifier import Digests

# Calls of a trial that are made one by one and compared, half of them on each set of inputs, and
# their time.
_TRIAL_REPEATS, _TRIAL_REPEATS_US = 8, 1_000.0


class Bench:
    """One problem on this process's GPU, and its entries by name; answers as `Gpu` says."""

    def __init__(self, problem: Problem, *, replay_us: float, **options: Any) -> None:
        """options: of OpenProblem."""
        self._opened = opened = OpenProblem(problem, **options)
        self.session, self._proof = opened.session, opened.proof
        self._timer = Timer(opened, replay_us)
        self._right: dict[str, Digests] = {}
        self._entries: dict[str, Entry] = {}
        self._launch_times: dict[str, float] = {}

    def trial(self, candidate: Candidate) -> tuple[Accuracy, FirstTimes]:
        """Check a candidate on every case, then briefly time it, its stages and its empty launches.

        Returns its worst Accuracy and its first times. The output of each timed replay, and of
        calls one by one, must equal the checked one bit for bit: that reveals races that one call
        does not, and some races whose error stays within the limit. Raises WrongResult, or a CUDA
        error if the candidate cannot launch or faults.
        """
        timer, workspaces = self._timer, self._opened.workspaces
        if isinstance(candidate.timed, CallPlan):
            self._opened.state.imports.end()
            entry, accuracy = called_entry(timer, candidate, small=True)
            first_us = timer.first_us(entry.call, proven=entry.proven)
            return accuracy, FirstTimes(first_us, {}, None, self.session.sm_mhz())
        workspaces.free_others(*candidate.checks, candidate.timed)
        call = workspaces.bind(candidate.timed, [self._opened.timed])
        own = call, workspaces.bind, workspaces
        accuracy, proven = self._proof.of_candidate(candidate, *own, small=True)
        self._right[repr(candidate.timed)] = proven.digests, proven.lse_digests
        names = call.stage_names if len(call.stage_names) > 1 else ()
        time_us = timer.first_us(call, proven=proven)
        sm_mhz, calls = self.session.sm_mhz(), 1  # the timed one
        if timer.effort.thorough:
            calls = self._proof.repeat(proven, _TRIAL_REPEATS, _TRIAL_REPEATS_US, time_us)
        first = FirstTimes(
            time_us,
            {name: timer.first_us(call, name) for name in names},
            None if candidate.empty is None else self._launch_us(candidate.empty),
            sm_mhz,
            {name: timer.first_us(call, name) for name in call.once_names},
        )
        return accuracy.model_copy(update={"calls": calls}), first

    def _launch_us(self, launches: LaunchPlan) -> float:
        """Time of launches with an empty kernel, measured once for all equal launches."""
        alike = repr((launches.stages, launches.streams, launches.eager))
        if alike not in self._launch_times:
            call = self._opened.workspaces.bind(launches, [{}])
            self._launch_times[alike] = self._timer.first_us(call)
        return self._launch_times[alike]

    def add(self, name: str, candidate: Candidate, cold: bool) -> bool:
        """Make a candidate that passed `trial` an entry. cold: with copies for cold times.

        Returns whether its calls can be chained.
        """
        self._opened.state.imports.end()  # rounds follow
        if isinstance(candidate.timed, CallPlan):
            self._entries[name], _ = called_entry(self._timer, candidate, small=False, cold=cold)
            return False
        copies = [self._opened.timed, *(self._timer.cold.copies if cold else [])]
        workspaces = self._opened.workspaces
        call = workspaces.bind(candidate.timed, copies)
        right = self._right.get(repr(candidate.timed))
        if right is None:  # tried in an earlier process or run
            own = call, workspaces.bind, workspaces
            _, proven = self._proof.of_candidate(candidate, *own, small=False)
        else:
            proven = self._proof.proved_before(candidate, call, workspaces, right)
        self._proof.prepare_hard(candidate.rounds_scores)  # for `confirm`, which has less time
        workspaces.entries[name] = candidate.timed
        self._entries[name] = CandidateEntry(self._timer, call, proven, candidate)
        return candidate.timed.chains

    def add_baseline(self, name: str) -> tuple[Accuracy, str | None]:
        """See baseline_entry."""
        self._opened.state.imports.end()
        self._entries[name], accuracy, issued = baseline_entry(self._timer, name)
        return accuracy, issued

    def drop(self, name: str) -> None:
        """Remove an entry, its graphs, and the workspaces that no other entry uses."""
        for of in (self._entries, self._opened.workspaces.entries):
            of.pop(name, None)
        self._opened.workspaces.free_others()

    def race(self, name: str, replay_us: float, kind: str) -> tuple[float, int]:
        """See Entry."""
        return self._entries[name].race(replay_us, kind)

    def replay(self, name: str, kind: str) -> float:
        """See Entry."""
        return self._entries[name].replay(kind)

    def pair(self, first: str, second: str) -> tuple[float, float]:
        """See Entry."""
        return self._entries[first].pair(self._entries[second])

    def energy(self, name: str) -> Stretch | None:
        """See Entry."""
        return self._entries[name].energy()

    def settle(self) -> None:
        """Wait until helper processes are idle, so that host times can be measured.

        It takes as long as NumPy needs for the next problem.
        """
        self._proof.settle()

    def eager_us(self, name: str) -> float:
        """See Entry; call `settle` first."""
        return self._entries[name].eager_us()

    def confirm(self, name: str, longest_us: float) -> int:
        """See Entry."""
        return self._entries[name].confirm(longest_us)

    def blocks_per_sm(self, candidate: Candidate) -> dict[str, int]:
        """Resident blocks of each stage, as the driver counts them."""
        return {s.name: self.session.blocks_per_sm(s) for s in candidate.timed.stages}

    def conditions(self) -> dict[str, Any]:
        """Clocks, power, temperature, throttle reasons and other processes, during a replay."""
        for entry in [*self._entries.values()][:1]:
            entry.occupy()
        return self.session.conditions()
