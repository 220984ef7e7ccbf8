"""The configs that won a recorded sweep."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnsweep.choose.ranking import rank
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS
from attnsweep.family.family import Config, Family
from attnsweep.store.run import open_run

RESULTS = Path(__file__).parent.parent.parent / "results"


@dataclass(frozen=True)
class Winner:
    """The fastest config of a family on a recorded problem."""

    run: str
    kernel: str
    config: Config
    problem: Problem
    arch: str

    def __str__(self) -> str:
        return f"{self.run} {self.problem.label} {self.kernel} {self.config.label}"


def winners_of(directory: Path, families: Mapping[str, Family]) -> Iterator[Winner]:
    """The first of each family in the ranking of each problem of a recorded run.

    Those of families that are gone, or whose parameters mean something else since, are left out.
    """
    run = open_run(directory)
    arch = run.environment.arch if run.environment else "sm_90a"
    seen = set()
    for trial in rank(run.trials, run.environment)["trial"]:
        what = (trial.kernel, trial.problem)
        if trial.provider != OURS or trial.time_us is None or what in seen:
            continue
        seen.add(what)
        kernel = families.get(trial.kernel)
        if kernel is None or kernel.changed_since(trial.config):
            continue
        config = kernel.of_today(trial.config)
        yield Winner(directory.name, kernel.name, config, trial.problem, arch)
