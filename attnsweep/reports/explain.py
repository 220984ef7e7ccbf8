"""Why a candidate won or lost, and which parameters mattered, by the rows of its run.

Needs no GPU and no CUDA. Times are microseconds of one call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnsweep.choose.columns import chosen_by, named, value_text
from attnsweep.choose.effects import Effect, axes_of, effects, in_order, timed
from attnsweep.core.errors import AttnsweepError, ProblemError, SpecError
from attnsweep.core.hardware import arch_on
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import Trial
from attnsweep.family.chunks import CHUNKS_RULE, MODES, changed_since, of_today
from attnsweep.family.family import CHUNKS, SMS, Config, Family
from attnsweep.reports.text import Row, Section, first_line, kernels_of, sections_of
from attnsweep.specs.yaml_file import nearest
from attnsweep.store import outputs
from attnsweep.store.run import Run

# Candidates listed after the explained one in the ranking.
NEXT = 3


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A config that differs from the explained one in one parameter.

    first_us, ratio: its first time, and that over the explained one's; None if it has none. fate:
    `ok`, another status of its row, `removed` by a rule, or `not tried`. why: rule or detail.
    """

    parameter: str
    value: Value
    first_us: float | None
    ratio: float | None
    fate: str
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One candidate of one problem, next to others.

    row: its ranked row, None if no row of the run has it. config: its config. rule: name and
    description of the rule that removes it, if it has no row. beside: rows to compare with, each
    with its part: `winner`, `next`, `best NAME` of another family, `fastest baseline`. counters:
    what `profile` recorded of it and of the winner. effects: of each parameter of its family.
    """

    section: Section
    kernel: str
    config: Mapping[str, Value]
    row: Row | None
    rule: tuple[str, str] | None
    beside: tuple[tuple[str, Row], ...]
    neighbours: tuple[Neighbour, ...]
    removed: Mapping[str, int]
    effects: tuple[Effect, ...]
    timed: int
    tried: int
    counters: tuple[Mapping[str, Any], ...]
    unknown: str | None = None
    """Why today's rules cannot be asked, or None."""
    fit: int = 1
    """Rows that fit the given CONFIG; the explained one is the first of them in the ranking."""

    @property
    def winner(self) -> Row | None:
        """The winner of the problem."""
        return self.section.winner

    @property
    def won(self) -> bool:
        """Whether the explained candidate is the winner."""
        return self.row is not None and bool(self.row["winner"])

    @property
    def ratio(self) -> float | None:
        """Its time, or energy if that ranks, over the winner's; None without one of them."""
        if self.row is None or self.winner is None or not self.row["rank"]:
            return None
        if "energy" == self.row["ranked_as"] == self.winner["ranked_as"]:
            return float(self.row["energy_uj"] / self.winner["energy_uj"])
        return float(self.row["time_us"] / self.winner["time_us"])

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain data: stable keys, None for unknown values."""
        return {
            "problem": self.section.problem.label,
            "kernel": self.kernel,
            "config": dict(self.config),
            "status": self.row["status"] if self.row else "removed" if self.rule else "not tried",
            "detail": self.row["detail"] if self.row else None,
            "removed_by": self.rule[0] if self.rule else None,
            "won": self.won,
            "ratio_to_winner": self.ratio,
            "candidate": _json_row(self.row),
            "beside": [{"part": part, **_json_row(row)} for part, row in self.beside],
            "neighbours": [asdict(neighbour) for neighbour in self.neighbours],
            "removed_by_rules": dict(self.removed),
            "candidates": {"tried": self.tried, "timed": self.timed},
            "parameters": [effect.to_json() for effect in self.effects],
            "counters": [dict(facts) for facts in self.counters],
            "rules_unknown": self.unknown,
        }


_FACTS = (
    *("rank", "tied", "provider", "kernel", "config", "status", "time_us", "spread_us"),
    *("cold_us", "eager_us", "launch_us", "bound_share", "ratio_to_best_baseline"),
    *("registers", "spill_bytes", "smem_bytes", "occupancy"),
)


def _json_row(row: Row | None) -> dict[str, Any]:
    if row is None:
        return {}
    trial: Trial = row["trial"]
    used = trial.resources
    return {name: row[name] for name in _FACTS} | {
        "config": dict(trial.config),
        "stages_us": dict(trial.stages_us),
        "judged": trial.accuracy.judged if trial.accuracy else None,
        "limited_by": dict(used.limiters) if used is not None else {},
    }


def explain(
    run: Run,
    given: Sequence[str],
    problem: str | None,
    kernels: Mapping[str, Family],
) -> list[Explanation]:
    """One explanation for each problem of the run, or only for `problem`.

    given: words that name a candidate: `NAME=value` (a parameter, an axis of variants, or
    `kernel`), a family, or the values that tables print, `128/1/2`; without any, the winner. Of
    several rows that fit, the first in the ranking is explained. kernels: today's families, whose
    rules say why a config was no candidate. Raises SpecError for an unknown name, value or problem.
    """
    sections = sections_of(run)
    if problem is not None:
        sections = [_of_problem(sections, problem)]
    recorded = outputs.read(run.directory)
    spec = kernels_of(run.spec_text)
    found, error = [], None
    for section in sections:
        try:
            found.append(_explain(section, _words(given, section), kernels, spec, recorded))
        except SpecError as wrong:
            error = error or wrong
    if not found and error is not None:
        raise error
    return found


def _of_problem(sections: Sequence[Section], text: str) -> Section:
    labels = {section.problem.label: section for section in sections}
    try:
        asked = Problem.parse(text).label
    except ProblemError as error:
        raise SpecError(error.what, hint=error.hint) from error
    if asked not in labels:
        raise SpecError(f"the run has no problem {asked}", hint=nearest(asked, labels))
    return labels[asked]


# -- the candidate that is meant --------------------------------------------------------------


def _words(given: Sequence[str], section: Section) -> dict[str, str]:
    """The given words as names and values."""
    wanted: dict[str, str] = {}
    families = list(dict.fromkeys(row["kernel"] for row in section.candidates))
    for word in " ".join(given).split():
        name, equals, value = word.partition("=")
        if equals and value:
            wanted[name] = value_text(_on_card(value, section))
        elif word in families:
            wanted["kernel"] = word
        else:
            wanted |= _by_place(word, section, wanted.get("kernel"))
    return wanted


def _by_place(word: str, section: Section, kernel: str | None) -> dict[str, str]:
    """`128/1/2`: the values of a family's differing parameters, in the order of its tables."""
    values = word.split("/")
    families = {k: n for k, n in section.differing.items() if kernel in (None, k)}
    fitting = {k: names for k, names in families.items() if len(names) == len(values)}
    for row in section.candidates:
        names = fitting.get(row["kernel"], [])
        said = chosen_by(row["trial"])
        if names and [said[name] for name in names if name in said] == values:
            return {"kernel": row["kernel"]} | dict(zip(names, values, strict=True))
    order = [f"{k}: {' / '.join(names)}" for k, names in families.items() if names]
    if fitting:
        family, names = next(iter(fitting.items()))
        return {"kernel": family} | dict(zip(names, values, strict=True))
    if word in {row["trial"].provider for row in section.rows if row["baseline"]}:
        what = f"{word!r} is a baseline, and a candidate of ours is explained"
        raise SpecError(what, hint=f"attnsweep report has its times; ours: {', '.join(families)}")
    shown = "; ".join(order) or "none, because no parameter differs in this run"
    close = "" if "/" in word else f"{nearest(word, families)}\n  "
    raise SpecError(
        f"no candidate of {section.problem.label} is named {word!r}",
        hint=f"{close}values as the tables print them: {shown}\n  or write NAME=VALUE, like "
        "BLOCK_N=64",
    )


def _checked(
    section: Section, wanted: Mapping[str, str], spec: Mapping[str, Any], kernel: Family | None
) -> None:
    """Raise SpecError if a name, or a value that neither run nor spec nor family has, is wanted."""
    said = [chosen_by(row["trial"]) for row in section.candidates]
    names = dict.fromkeys(name for facts in said for name in facts)
    for name, value in wanted.items():
        if name not in names:
            what = f"no candidate of {section.problem.label} has a parameter {name!r}"
            raise SpecError(what, hint=nearest(name, names))
        values = dict.fromkeys(facts[name] for facts in said if name in facts)
        if name != "kernel":
            family = wanted.get("kernel") or (kernel.name if kernel else "")
            values |= dict.fromkeys(
                map(value_text, _spec_values(spec, family, section).get(name, ()))
            )
            declared = {param.name: param.values for param in kernel.params} if kernel else {}
            own = [_on_card(value, section) for value in declared.get(name, ())]
            values |= dict.fromkeys(map(value_text, own))
        if value not in values:
            what = f"no candidate of {section.problem.label} has {name}={value}"
            ordered = sorted(values, key=lambda text: text.zfill(9))
            raise SpecError(what, hint=nearest(value, ordered))


def _on_card(value: Value, section: Section) -> Value:
    """A value as the run's card has it: `sms` is its number of SMs."""
    return section.environment.sm_count if value == SMS and section.environment else value


def _spec_values(spec: Mapping[str, Any], kernel: str, section: Section) -> dict[str, list[Value]]:
    """Each parameter's values that the spec names for a family, in its variants too."""
    family = spec.get(kernel)
    if not isinstance(family, Mapping):
        return {}
    found: dict[str, list[Value]] = {}
    variants = family.get("variants")
    sets: list[Mapping[str, Any]] = [{n: v for n, v in family.items() if n != "variants"}]
    for choices in variants.values() if isinstance(variants, Mapping) else ():
        sets += [values for values in choices.values() if isinstance(values, Mapping)]
    for values in sets:
        for name, each in values.items():
            own = [_on_card(v, section) for v in (each if isinstance(each, list) else [each])]
            found.setdefault(str(name), []).extend(own)
    return found


# -- the facts --------------------------------------------------------------------------------


def _explain(
    section: Section,
    wanted: Mapping[str, str],
    kernels: Mapping[str, Family],
    spec: Mapping[str, Any],
    recorded: Sequence[Mapping[str, Any]],
) -> Explanation:
    fitting = [
        row for row in section.candidates if wanted.items() <= chosen_by(row["trial"]).items()
    ]
    if not wanted and section.winner is not None:
        fitting = [section.winner]
    row = fitting[0] if fitting else None
    if row is None:
        base = _base(section, wanted.get("kernel"))
        _checked(section, wanted, spec, kernels.get(base["kernel"]))
        family, config = base["kernel"], _changed(base["trial"].config, wanted)
    else:
        family, config = row["kernel"], row["trial"].config
    ask = _Rules(kernels.get(family), section, config)
    rule = ask.removes(config) if row is None else None
    mine = [r for r in section.candidates if r["kernel"] == family]
    trials = [r["trial"] for r in mine]
    best = next((r for r in mine if r["rank"]), None)
    axes = axes_of((spec.get(family) or {}).get("variants"))
    facts = next((facts for facts in section.spaces if facts.get("kernel") == family), {})
    removed = facts.get("removed")
    return Explanation(
        section,
        family,
        dict(config),
        row,
        rule,
        tuple(_beside(section, row)),
        tuple(_neighbours(mine, row, config, _spec_values(spec, family, section), ask)),
        {n: c for n, c in removed.items() if c} if isinstance(removed, Mapping) else {},
        tuple(effects(trials, best["trial"], axes)) if best is not None else (),
        len(timed(trials, family)),
        len(trials),
        tuple(_counters(recorded, [row, section.winner])),
        ask.unknown,
        max(1, len(fitting)),
    )


def _base(section: Section, kernel: str | None) -> Row:
    """The candidate whose parameters complete a config that no row has."""
    rows = section.candidates
    if not rows:
        raise SpecError(f"the run has no candidate of {section.problem.label}")
    families = list(dict.fromkeys(row["kernel"] for row in rows))
    if kernel is not None and kernel not in families:
        raise SpecError(
            f"no candidate of {section.problem.label} has kernel={kernel}",
            hint=nearest(kernel, families),
        )
    return next(row for row in rows if kernel in (None, row["kernel"]))


def _changed(config: Mapping[str, Value], wanted: Mapping[str, str]) -> dict[str, Value]:
    return {
        name: _typed(wanted[name], value) if name in wanted else value
        for name, value in config.items()
    }


def _typed(text: str, like: Value) -> Value:
    """The text as a value of the type of another."""
    if isinstance(like, bool):
        return text in ("1", "true")
    return int(text) if isinstance(like, int) and text.isdigit() else text


class _Rules:
    """Today's rules of a family, asked about configs of one problem."""

    def __init__(
        self, kernel: Family | None, section: Section, config: Mapping[str, Value]
    ) -> None:
        self._kernel, self._problem = kernel, section.problem
        self.unknown: str | None = None
        if kernel is None:
            self.unknown = "the family is not here today, so its rules cannot be asked"
        elif section.environment is None:
            self.unknown = "the run has no usable environment.json, so its rules cannot be asked"
        else:
            changed = changed_since(kernel, Config(config))
            if changed is not None:
                self.unknown = f"{changed} since the run, so its rules cannot be asked"
        if self.unknown is None and section.environment is not None:
            self._arch = arch_on(section.environment)

    def removes(self, config: Mapping[str, Value]) -> tuple[str, str] | None:
        """Name and description of the rule that removes a config, or None."""
        if self.unknown is not None or self._kernel is None:
            return None
        try:
            today = of_today(self._kernel, config)
            name = self._kernel.refused_by(today, self._problem, self._arch)
        except AttnsweepError:
            return None  # a rule that fails for a value that no spec named
        if name is None:
            return None
        described = {n: text for n, (text, _) in self._kernel.rules.items()}
        described[CHUNKS] = CHUNKS_RULE
        return name, described.get(name, "the GPU's limits of threads, shared memory and grid")


def _beside(section: Section, row: Row | None) -> list[tuple[str, Row]]:
    """The rows to compare with, fastest first."""
    picked: dict[int, tuple[str, Row]] = {}

    def add(part: str, other: Row | None) -> None:
        if other is not None and other is not row:
            picked.setdefault(id(other), (part, other))

    add("winner", section.winner)
    add("fastest baseline", section.best_baseline)
    ranked = [r for r in section.candidates if r["rank"]]
    at = next((i for i, r in enumerate(ranked) if r is row), None)
    for other in [] if at is None else ranked[at + 1 : at + 1 + NEXT]:
        add("next", other)
    for other in section.best_of_families:
        if row is None or other["kernel"] != row["kernel"]:
            add("best of its family", other)
    return sorted(picked.values(), key=lambda item: item[1]["time_us"] or float("inf"))


def _neighbours(
    rows: Sequence[Row],
    row: Row | None,
    config: Mapping[str, Value],
    named_values: Mapping[str, Sequence[Value]],
    ask: _Rules,
) -> list[Neighbour]:
    """Every config one parameter away, of the values that the run or its spec has."""
    by_config = {_frozen(r["trial"].config): r for r in rows}
    own = row["trial"].screened_us if row is not None else None
    modes = {mode.name for mode in MODES}
    out = []
    for name, mine in config.items():
        seen = {value_text(v): v for v in named_values.get(name, ())}
        for other in rows:
            value = other["trial"].config.get(name)
            if value is not None:
                seen.setdefault(value_text(value), value)
        for text, value in sorted(seen.items(), key=lambda item: in_order(item[1])):
            if text == value_text(mine):
                continue
            near = {**config, name: value}
            there = by_config.get(_frozen(near))
            if there is not None:
                us = there["trial"].screened_us if there["rank"] else None
                why = None if there["rank"] else first_line(there["detail"])
                ratio = us / own if us and own else None
                out.append(Neighbour(name, value, us, ratio, there["status"], why or None))
                continue
            rule = ask.removes(near) if name not in modes else None
            fate = "removed" if rule else "not tried"
            out.append(Neighbour(name, value, None, None, fate, ": ".join(rule) if rule else None))
    return out


def _frozen(config: Mapping[str, Value]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value_text(value)) for name, value in config.items()))


def _counters(
    recorded: Sequence[Mapping[str, Any]], rows: Collection[Row | None]
) -> list[Mapping[str, Any]]:
    """What `profile` recorded of these rows."""
    found: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        for facts in recorded:
            if row is not None and (
                facts.get("problem") == row["problem"]
                and facts.get("kernel") == row["kernel"]
                and named(facts.get("config") or {}) == row["config"]
            ):
                found[id(facts)] = facts
    return list(found.values())
