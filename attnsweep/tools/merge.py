"""Runs of parts of one spec, as one run: rows, machine code and counters of all of them."""

from __future__ import annotations

import itertools
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attnsweep.core.errors import SpecError, StoreError
from attnsweep.core.files import ARCHIVE, packed_code
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Status, cards_of
from attnsweep.reports import tables
from attnsweep.specs.load import SweepSpec, load_spec
from attnsweep.store.outputs import FILE as COUNTERS
from attnsweep.store.outputs import others_in, read
from attnsweep.store.rows import rows_of
from attnsweep.store.run import CUBINS, SPEC, Run, environment_of, trials_of
from attnsweep.store.store import Store

# What the runs must have in common, besides their spec and the versions of the baselines. Cards and
# hosts may differ: every row says its own.
_ALIKE = (
    *("gpu", "arch", "sm_count", "l2_bytes", "power_limit_w", "protocol"),
    *("driver", "cuda", "nvrtc", "attnsweep"),
)
_OF_ONE_CARD = ("uuid", "sku", "host")
_MOST_NAMED = 5


def merge(runs: Sequence[Run], out: Path, note: Callable[[str], None]) -> Run:
    """Write the runs to `out` as one run, and return it. note: told what the run still lacks.

    Raises StoreError if they do not belong together: other specs, GPUs, protocols or versions, or a
    problem that two runs or two cards have measured; if rows of one are damaged; if `out` has rows
    already, or other files.
    """
    hint = "choose another place with --out, or remove it"
    if trials_of(out).is_file():
        raise StoreError("a run is there already", where=str(out), hint=hint)
    if out.is_dir() and (others := others_in(out)):
        what = f"it holds other files: {', '.join(others[:_MOST_NAMED])}"
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise StoreError(what + more, where=str(out), hint=hint)
    for run in runs:
        environment_of(run)
        if run.warnings:  # the whole run would look sound without the rows that are lost
            raise StoreError(
                f"rows of it are damaged: {run.warnings[0]}",
                where=str(run.directory),
                hint="run the same command again there: it measures what is lost",
            )
    spec = _one_spec(runs)
    environment = _one_environment(runs)
    measured: dict[Problem, Run] = {}
    for run in runs:
        for problem in dict.fromkeys(trial.problem for trial in run.trials):
            other = measured.setdefault(problem, run)
            if other is not run:
                raise StoreError(
                    f"{problem.label} is in two of the runs, and candidates of one problem are "
                    "compared on one card only",
                    where=f"{other.directory}, {run.directory}",
                    hint="leave one of them out, or sweep each part once: --shard i/n",
                )
            cards = cards_of(rows_of(run.trials, problem))
            if len(cards) > 1:
                raise StoreError(
                    f"{problem.label} has rows of {len(cards)} cards ({', '.join(cards)}), and "
                    "candidates of one problem are compared on one card only",
                    where=str(run.directory),
                    hint="run the same command again there: it begins that problem anew",
                )
    missing = [entry.problem for entry in spec.problems if entry.problem not in measured]
    if missing:
        labels = ", ".join(problem.label for problem in missing)
        note(f"not measured in any of them: {labels}")
    for problem, run in measured.items():
        right = [t for t in rows_of(run.trials, problem) if t.status is Status.OK]
        if right and not any(t.time_us and t.time_us.rounds for t in right):
            note(
                f"begun and not finished in {run.directory}: {problem.label}; what swept it goes "
                "on there if it is run again"
            )
    with _opened(out) as store:
        try:
            return _filled(store, spec, environment, measured, runs)
        except BaseException as error:  # Ctrl-C, too: a part of the rows would look like all
            store.path.unlink(missing_ok=True)
            if isinstance(error, StoreError) and error.where == str(store.path):
                hint = "once this is fixed, run the same command again"
                raise StoreError(error.what, where=error.where, hint=hint) from error
            raise


def _filled(
    store: Store,
    spec: SweepSpec,
    environment: Environment,
    measured: Mapping[Problem, Run],
    runs: Sequence[Run],
) -> Run:
    """The run of a directory that gets the rows of these runs. measured: who has each problem."""
    wanted = [entry.problem.label for entry in spec.problems]
    spaces = list(itertools.chain.from_iterable(run.spaces for run in runs))
    spaces.sort(key=lambda facts: _place(wanted, facts.get("problem")))
    store.describe(spec.resolved(store.directory), environment, spaces)
    for problem in (entry.problem for entry in spec.problems):
        if problem in measured:
            for trial in rows_of(measured[problem].trials, problem):
                store.append(trial)
    for run in runs:
        for name, data in _cubins(run):
            store.keep(name, data)
    counters = [each for run in runs for each in read(run.directory)]
    if counters:
        (store.directory / COUNTERS).write_text(json.dumps(counters) + "\n", encoding="utf-8")
    return store.finish(tables.files)


def _opened(out: Path) -> Store:
    try:
        return Store.open(out)
    except StoreError as error:  # which speaks of `run`
        hint = error.hint and error.hint.replace("--results", "--out")
        raise StoreError(error.what, where=error.where, hint=hint) from error


def _cubins(run: Run) -> Iterator[tuple[str, bytes]]:
    """The files of machine code. Raises OSError if they may not be read, where glob finds none."""
    folder = run.directory / CUBINS
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name == ARCHIVE:
            for name, code in packed_code(folder).items():
                yield f"{name}.xz", lzma.compress(code)
        else:
            yield path.name, path.read_bytes()


def _place(labels: Sequence[str], label: object) -> int:
    return labels.index(label) if label in labels else len(labels)


def _one_spec(runs: Sequence[Run]) -> SweepSpec:
    specs = []
    for run in runs:
        try:
            specs.append(load_spec(run.directory / SPEC))
        except SpecError as error:
            what = f"its spec cannot be read ({error.what})"
            hint = "copy the part whole, or sweep it again"
            raise StoreError(what, where=str(run.directory), hint=hint) from error
    texts = [spec.resolved() for spec in specs]
    for run, text in zip(runs, texts, strict=True):
        if text != texts[0]:
            lines = zip(texts[0].splitlines(), text.splitlines(), strict=False)
            one, other = next((p for p in lines if p[0] != p[1]), ("its end", "its end"))
            raise StoreError(
                f"its spec is another: {other.strip()!r}, not {one.strip()!r}",
                where=f"{run.directory / SPEC}",
                hint=f"the first run is {runs[0].directory}",
            )
    return specs[0]


def _one_environment(runs: Sequence[Run]) -> Environment:
    environments = [environment_of(run) for run in runs]
    first = environments[0]
    for run, here in zip(runs, environments, strict=True):
        facts = {name: (getattr(here, name), getattr(first, name)) for name in _ALIKE}
        names = dict.fromkeys((*first.packages, *here.packages))
        facts |= {name: (here.packages.get(name), first.packages.get(name)) for name in names}
        for name, (this, that) in facts.items():
            if this != that:
                raise StoreError(
                    f"measured with another {name}: {this}, not {that}",
                    where=str(run.directory),
                    hint=f"the first run is {runs[0].directory}; attnsweep compare sets runs side "
                    "by side that cannot be one",
                )
    differing = [n for n in _OF_ONE_CARD if len({getattr(e, n) for e in environments}) > 1]
    return first.model_copy(update=dict.fromkeys(differing))
