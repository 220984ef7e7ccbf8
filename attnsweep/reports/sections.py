"""One problem of a run: its ranked rows, and what follows from them."""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnsweep.choose.baseline_ratio import common_rounds
from attnsweep.choose.columns import Row, bounds_of
from attnsweep.choose.ranking import members_of, rank_problem
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Status, Trial
from attnsweep.specs.model import PLAIN_READ
from attnsweep.specs.yaml_file import recorded
from attnsweep.store.run import Run


@dataclass(frozen=True)
class Section:
    """One problem's part of the ranking; None stands for an unknown value."""

    problem: Problem
    rows: list[Row]
    environment: Environment | None
    spaces: Sequence[Mapping[str, Any]] = ()
    """Facts of the families' candidates, tried or not: the entries of its Run."""
    asked: Sequence[str] = ()
    """Baselines that the spec of its Run names."""

    @functools.cached_property
    def winner(self) -> Row | None:
        """The candidate that the fixed rule picks, or None."""
        return next((row for row in self.rows if row["winner"]), None)

    @functools.cached_property
    def best_baseline(self) -> Row | None:
        """The fastest baseline known, which × base compares with, or None. It may be noisy."""
        name = self.rows[0]["best_baseline"]
        return next((row for row in self.baselines if row["provider"] == name), None)

    @functools.cached_property
    def lost(self) -> str | None:
        """Which baselines of the spec have no row, or one that is damaged; None if none has.

        Each but a bound may have been the fastest: next to the others a gain of 1.12 stood as 1.24.
        """
        sound = {row["provider"] for row in self.baselines if row["status"] != Status.DAMAGED}
        names = [name for name in self.asked if name not in {*sound, PLAIN_READ}]
        if not names:
            return None
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        have = "has no sound row" if len(names) == 1 else "have no sound rows"
        return f"{some} {have}, so the fastest baseline is not known"

    @functools.cached_property
    def plain_read(self) -> Row | None:
        """The row of a kernel that only reads K and V, if it was timed."""
        found = (row for row in self.baselines if row["provider"] == PLAIN_READ)
        return next(filter(is_below, found), None)

    @property
    def share_of_read(self) -> float | None:
        """The time of a plain read of the cache over the winner's, if both were timed alike."""
        read, own = self.plain_read, self.winner
        if read is None or own is None or read["timed_as"] != own["timed_as"]:
            return None
        theirs, ours = common_rounds(read.facts, own.facts)
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        return statistics.median(ratios) if ratios else float(read["time_us"] / own["time_us"])

    @property
    def bounds_us(self) -> dict[str, float]:
        """Unit to its bound; empty if the rows come from another GPU than the environment's."""
        return bounds_of(self.rows[0].facts, self.environment)

    @functools.cached_property
    def candidates(self) -> list[Row]:
        """The rows of candidates."""
        return [row for row in self.rows if not row["baseline"]]

    @functools.cached_property
    def baselines(self) -> list[Row]:
        """The rows of baselines."""
        return [row for row in self.rows if row["baseline"]]

    @functools.cached_property
    def ranked(self) -> list[Row]:
        """The rows with a rank, best first."""
        return [row for row in self.rows if row["rank"]]

    @functools.cached_property
    def contenders(self) -> list[Row]:
        """The candidates with a rank, best first."""
        return [row for row in self.ranked if not row["baseline"]]

    @property
    def in_order(self) -> list[Row]:
        """The rows in the order of the run."""
        return sorted(self.rows, key=lambda row: row.number)

    def shown(self, top: int) -> list[Row]:
        """The table's rows: the best `top`, each family's best, baselines; those below it last."""
        keep = {id(row) for row in (*self.contenders[:top], *self.best_of_families)}
        shown = [row for row in self.ranked if row["baseline"] or id(row) in keep]
        timed = [row for row in self.baselines if row["time_us"]]
        below = [row for row in timed if row["status"] == Status.NOISY or is_below(row)]
        return shown + below if shown else []

    @functools.cached_property
    def best_of_families(self) -> list[Row]:
        """The first ranked candidate of each kernel family."""
        first: dict[str, Row] = {}
        for row in self.contenders:
            first.setdefault(row["kernel"], row)
        return list(first.values())

    @functools.cached_property
    def differing(self) -> dict[str, list[str]]:
        """Family to the parameters in which its candidates differ, shown or not."""
        configs: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.candidates:
            configs.setdefault(row["kernel"], []).append(row.facts.config)
        varied: dict[str, list[str]] = {}
        for kernel, those in configs.items():
            names = dict.fromkeys(name for config in those for name in config)
            values = {name: {str(c[name]) for c in those if name in c} for name in names}
            varied[kernel] = [name for name in names if len(values[name]) > 1]
        return varied


class Sections(Sequence[Section]):
    """The problems of some rows, in order of first appearance. Each is ranked when it is asked for.

    So a large run's rows, which are read when they are asked for, need not be read twice.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        environment: Environment | None,
        spaces: Sequence[Mapping[str, Any]] = (),
        *,
        distinct: bool = False,
        asked: Sequence[str] = (),
    ) -> None:
        """spaces: those of their Run. distinct: see `ranked`. asked: the baselines of its spec."""
        self._members = members_of(trials, distinct=distinct)
        self._problems, self._made = [*self._members], dict[Problem, Section]()
        self._environment, self._asked = environment, asked
        self._spaces: dict[object, list[Mapping[str, Any]]] = {}
        for facts in spaces:
            self._spaces.setdefault(facts.get("problem"), []).append(facts)

    def of(self, problem: Problem) -> Section | None:
        """The section of a problem; None if no row is of it."""
        if problem in self._made or problem not in self._members:
            return self._made.get(problem)
        rows = rank_problem(problem, self._members[problem], self._environment)
        spaces = self._spaces.get(problem.label, ())
        section = Section(problem, rows, self._environment, spaces, self._asked)
        return self._made.setdefault(problem, section)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, number: Any) -> Any:
        """The section of this number; nobody takes a slice."""
        return self.of(self._problems[number])


def sections_of(run: Run) -> Sections:
    """The ranked problems of a run."""
    asked = baselines_of(run.spec_text)
    return Sections(run.trials, run.environment, run.spaces, distinct=True, asked=asked)


def baselines_of(spec_text: str | None) -> tuple[str, ...]:
    """The baselines that a run's resolved spec names; none if it cannot be read."""
    # The whole of a large spec takes 0.2 s to read.
    found = re.search(r"^baselines:.*(?:\n[ -].*)*", spec_text or "", re.MULTILINE)
    named = recorded(found[0]).get("baselines") if found else ()
    return tuple(map(str, named)) if isinstance(named, list) else ()


def kernels_of(spec_text: str | None) -> dict[str, Any]:
    """The families of a run's resolved spec with what it says of each; empty if unreadable."""
    kernels = recorded(spec_text).get("kernels")
    named = kernels.items() if isinstance(kernels, dict) else ()
    return {str(name): of if isinstance(of, dict) else {} for name, of in named}


def is_below(row: Row) -> bool:
    """Whether a timed baseline is listed below the ranking: see baseline_ratio.below_ranking."""
    return row["status"] == Status.OK and not row["rank"]
