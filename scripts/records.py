"""The recorded runs, and the one way to ask them for rows: `Book.find`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from attnsweep import Problem, Run, open_run, rank
from attnsweep.core.trial import Environment
from attnsweep.store import outputs

OURS = "attnsweep"


class QueryError(Exception):
    """A query, a claim or an expression that cannot be understood, and where it stands."""


class Row:
    """One trial of a run. Fields of the trial and columns of the ranking, all by their names."""

    def __init__(self, run: str, ranked: Mapping[str, Any], card: Environment) -> None:
        self.run, self.ranked, self.trial, self.card = run, ranked, ranked["trial"], card
        self.us: float = ranked["time_us"]
        """Microseconds of one call; NaN if it was not timed."""
        self.status: str = ranked["status"]
        """As the ranking judges it: an `ok` row has a time and an error within its limit."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of a copy that has no fields yet
            raise AttributeError(name)
        if hasattr(self.trial, name):
            return getattr(self.trial, name)
        if name in self.ranked:
            return self.ranked[name]
        raise AttributeError(f"a row has no {name!r}")

    @property
    def head(self) -> float:
        """Microseconds of a call over its batches and heads."""
        return self.us / float(self.problem.batch * self.problem.heads)

    @property
    def sequence(self) -> float:
        """Microseconds of a call over its batches."""
        return self.us / float(self.problem.batch)

    @property
    def name(self) -> str:
        """The names of its variants, otherwise its kernel."""
        return " / ".join(self.variant.values()) or str(self.kernel)

    @property
    def timed_once(self) -> bool:
        """Whether its time is a single sample: no race and no final repeated it."""
        return bool(self.trial.time_us.samples == 1)


def among(value: object, wanted: object) -> bool:
    """Whether a value is the wanted one, or one of several."""
    return value in wanted if isinstance(wanted, list | tuple) else value == wanted


class Book:
    """The runs and files below a directory of results. Each is read and ranked once.

    A run is asked for by the name of its spec. `renamed.json` beside the directory says under which
    name a spec was recorded before, which counts until it is recorded anew. `earlier.json` there
    names runs whose spec has other candidates or more problems today, and rows that a later run
    contradicts.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self._before = self._beside("renamed.json")
        self._earlier = self._beside("earlier.json")
        self._runs: dict[str, Run] = {}
        self._rows: dict[str, list[Row]] = {}
        self._files: dict[str, Any] = {}

    def _beside(self, name: str) -> Any:
        path = self.results.parent / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def has_earlier_candidates(self, name: str) -> bool:
        """Whether a run has the candidates of an earlier version of its spec."""
        return f"{self.results.name}/{name}" in self._earlier.get("candidates", ())

    def contradicted(self, name: str) -> list[str]:
        """The labels of problems on which a later run contradicts the time of a baseline."""
        found: list[str] = self._earlier.get("contradicted", {}).get(
            f"{self.results.name}/{name}", []
        )
        return found

    def place(self, name: str) -> str:
        """The name under which a run or a file lies, today's if there is such a one."""
        return name if (self.results / name).exists() else str(self._before.get(name, name))

    def has(self, name: str) -> bool:
        """Whether a run or a file of that name is recorded."""
        return (self.results / self.place(name)).exists()

    def run(self, name: str) -> Run:
        """A recorded run."""
        if name not in self._runs:
            self._runs[name] = open_run(self.results / self.place(name))
        return self._runs[name]

    def card(self, name: str) -> Environment:
        """The GPU, software and date of a run."""
        card = self.run(name).environment
        if card is None:
            raise QueryError(f"run {name!r} has no environment.json")
        return card

    def protocol(self, name: str) -> int:
        """The protocol of timing that a run was recorded by; see docs/measuring.md.

        Runs before protocol 4 do not say. Protocol 3 came with `rank_by` in the spec, and protocol
        2 with the way in which each row's call is issued.
        """
        run = self.run(name)
        said = getattr(run.environment, "protocol", None)
        if said is not None:
            return int(said)
        if "rank_by" in yaml.safe_load(run.spec_text or "").get("measure", {}):
            return 3
        return 2 if any(trial.schedule for trial in run.trials) else 1

    def rows(self, name: str) -> list[Row]:
        """All rows of a run, ranked within each problem; nothing if it is not recorded."""
        if name not in self._rows:
            if not self.has(name):
                return []
            card = self.card(name)
            ranked = rank(self.run(name).trials, card).to_dict("records")
            self._rows[name] = [Row(name, {str(k): v for k, v in r.items()}, card) for r in ranked]
        return self._rows[name]

    def file(self, name: str) -> Any:
        """A recorded JSON file."""
        if name not in self._files:
            self._files[name] = json.loads((self.results / name).read_text(encoding="utf-8"))
        return self._files[name]

    def counters(self, run: str) -> list[dict[str, Any]]:
        """Hardware counters of a run's candidates, if `attnsweep profile` read any."""
        return outputs.read(self.run(run).directory)

    def problems(self, run: str) -> list[Problem]:
        """Problems of a run on which one of our candidates is ranked, in the run's order."""
        found = (r.problem for r in self.rows(run) if r.provider == OURS and r.status == "ok")
        return list(dict.fromkeys(found))

    def against(self, name: str, baseline: str) -> dict[tuple[object, ...], dict[str, Any]]:
        """Key of each of our trials to its ratio to one baseline: ratio, low, high, of."""
        trials = [trial for trial in self.run(name).trials if trial.provider in (OURS, baseline)]
        ranked = rank(trials, self.card(name)).to_dict("records")
        return {
            row["trial"].key: {
                "ratio": row["ratio_to_best_baseline"],
                "low": row["ratio_low"],
                "high": row["ratio_high"],
                "of": row["ratio_of"],
            }
            for row in ranked
            if row["provider"] == OURS and row["ratio_of"] is not None
        }

    def find(
        self,
        run: str,
        *,
        problem: str | Problem | None = None,
        kernel: str | list[str] | None = None,
        provider: str | list[str] = OURS,
        status: str | list[str] | None = "ok",
        config: Mapping[str, Any] | None = None,
        variant: Mapping[str, Any] | None = None,
        changed: str | None = None,
        take: str = "fastest",
    ) -> Any:
        """Rows of a run that pass every test.

        A value may be a list, of which one must fit. status: as the ranking judges it; None for
        any. changed: the name in config whose value must differ from the one given there. take:
        `fastest`, `winner` (the best ranked), or `all` in ranked order. Returns None or no rows if
        nothing passes.
        """
        shape = Problem.parse(problem) if isinstance(problem, str) else problem
        found = [
            row
            for row in self.rows(run)
            if (shape is None or row.problem == shape)
            and (kernel is None or among(row.kernel, kernel))
            and among(row.provider, provider)
            and (status is None or among(row.status, status))
            and all(among(row.variant.get(n), want) for n, want in (variant or {}).items())
            and all(
                among(row.config.get(n), want) != (n == changed)
                for n, want in (config or {}).items()
            )
        ]
        if take == "all":
            return found
        if take == "winner":
            return found[0] if found else None
        if take == "fastest":
            return min(found, key=lambda row: row.us, default=None)
        raise QueryError(f"take must be fastest, winner or all, not {take!r}")
