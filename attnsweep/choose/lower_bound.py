"""Skip candidates whose measured stages already exceed the best time.

A stage is the same code, launched alike, in many configs of a family. Once each stage of a
candidate has been timed in another config, the sum of these times is nearly the candidate's time.
The hardware's peaks say far less: docs/measuring.md gives numbers for both.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

from attnsweep.compile.candidate import Build
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status, Trial

# A pipeline takes at least this share of its stages' times alone: in sequence, one stage leaves in
# L2 what the next reads, and a programmatic launch begins early. Two of 3498 recorded pipelines in
# sequence took less, at least 0.79 (tests/recorded/test_choose_lower_bound.py). The best one would
# be lost only if it took less than 0.8 / 1.25 = 0.64 of its stages.
SHARE = 0.8
# A skipped row is tried again only if its bound falls below this share of the limit: stages timed
# since may have lowered the bound a little, and rounds may have changed the times.
_STILL = 0.8


class Skips:
    """Times of stages from measured rows, and the candidates that they exclude.

    One object serves all problems of a sweep. A candidate is skipped if it could neither enter the
    race nor be a finalist by first times: its bound exceeds both `entry` times the best time of its
    family so far and the `finalists`-th best.
    """

    def __init__(self, *, finalists: int, entry: float) -> None:
        self._finalists, self._entry = finalists, entry
        self._stages: dict[tuple[object, ...], float] = {}
        self._times: dict[tuple[Problem, str], list[float]] = defaultdict(list)
        self._learned: set[tuple[object, ...]] = set()

    def learn(self, build: Build, trial: Trial) -> None:
        """Learn from a timed row; the same candidate again changes nothing."""
        time_us = trial.screened_us
        if trial.status is not Status.OK or time_us is None or trial.key in self._learned:
            return
        self._learned.add(trial.key)
        bisect.insort(self._times[trial.problem, trial.kernel], time_us)
        for name, code in stage_codes(build).items():
            if name in trial.stages_us:
                known = self._stages.get(code, math.inf)
                self._stages[code] = min(known, trial.stages_us[name])

    def verdict(self, build: Build, *, skipped_before: bool = False) -> dict[str, Any] | None:
        """Why a candidate need not be run; None if it must be, or a stage is untimed."""
        times = self._times.get((build.problem, build.kernel.name), [])
        codes = stage_codes(build)
        if len(codes) < 2 or len(times) < self._finalists:
            return None
        stages_us = {name: self._stages.get(code, 0.0) for name, code in codes.items()}
        if not all(stages_us.values()):
            return None
        # Launches on several streams may run at the same time.
        together = max if build.schedule.streams > 1 else sum
        at_least_us = SHARE * together(stages_us.values())
        limit = max(self._entry * times[0], times[self._finalists - 1])
        if at_least_us <= limit * (_STILL if skipped_before else 1.0):
            return None
        shown = ", ".join(f"{name} {us:.1f}" for name, us in stages_us.items())
        detail = (
            f"stages too slow in other configs: at least {at_least_us:.1f} us ({shown}); "
            f"the best of {build.kernel.name} takes {times[0]:.1f}"
        )
        return {"status": Status.PRUNED, "detail": detail, "at_least_us": at_least_us}


def stage_codes(build: Build) -> dict[str, tuple[object, ...]]:
    """Stage name to all that its time depends on: problem, code, launch, way of issue."""
    issued = "" if build.schedule.whole else repr(build.schedule)
    return {
        name: (build.problem, key, repr(replace(launch, defines={})), issued)
        for (name, launch), key in zip(build.launches.items(), build.keys, strict=False)
    }
