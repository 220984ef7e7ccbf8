"""Why a candidate won or lost, and which parameters mattered, by the rows of its run.

Needs no GPU and no CUDA. Times are microseconds of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from rich.text import Text

from attnsweep.choose.columns import Row, chosen_by, named, value_text
from attnsweep.choose.effects import Effect, axes_of, effects, in_order, percents, timed
from attnsweep.core.errors import AttnsweepError, ProblemError, SpecError
from attnsweep.core.hardware import arch_on
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import Status, Trial
from attnsweep.family.family import SMS, Family, values_in
from attnsweep.reports.sections import Section, kernels_of, sections_of
from attnsweep.reports.terminal import GLUE
from attnsweep.reports.text import (
    all_recorded,
    faster_baseline,
    figure,
    first_line,
    heading,
    judged_line,
    place_of,
    recorded_lines,
    who,
)
from attnsweep.reports.views import counters, said, table
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
class ConfigExplanation:
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
    *("cold_us", "eager_us", "launch_us", "light", "ratio_to_best_baseline"),
    *("registers", "spill_bytes", "smem_bytes", "occupancy"),
)


def _json_row(row: Row | None) -> dict[str, Any]:
    if row is None:
        return {}
    trial: Trial = row.facts
    used = trial.resources
    return {name: row[name] for name in _FACTS} | {
        "config": dict(trial.config),
        "stages_us": dict(trial.stages_us),
        "judged": trial.accuracy.judged if trial.accuracy else None,
        "limited_by": dict(used.limiters) if used is not None else {},
    }


def explain(
    run: Run, given: Sequence[str], problem: str | None, kernels: Mapping[str, Family]
) -> Iterator[ConfigExplanation]:
    """An explanation for each problem of the run, or only for `problem`, as it is asked for.

    given: words that name a candidate: `NAME=value` (a parameter, an axis of variants, or
    `kernel`), a family, or the values that tables print, `128/1/2`; without any, the winner. Of
    several rows that fit, the first in the ranking is explained. kernels: today's families, whose
    rules say why a config was no candidate. Raises SpecError for an unknown name, value or problem.
    """
    sections: Sequence[Section] = sections_of(run)
    if problem is not None:
        sections = [_of_problem(sections, problem, run)]
    recorded = outputs.read(run.directory)
    spec = kernels_of(run.spec_text)
    found, error = False, None
    for section in sections:
        try:
            yield _explain(section, _words(given, section), kernels, spec, recorded)
            found = True
        except SpecError as wrong:
            error = error or wrong
    if not found and error is not None:
        raise error


def _of_problem(sections: Sequence[Section], text: str, run: Run) -> Section:
    labels = {section.problem.label: section for section in sections}
    try:
        asked = Problem.parse(text).label
    except ProblemError as error:
        raise SpecError(error.what, hint=error.hint) from error
    if asked not in labels:
        what, where = f"the run has no problem {asked}", str(run.directory)
        raise SpecError(what, where=where, hint=nearest(asked, labels))
    return labels[asked]


# -- the candidate that is meant --------------------------------------------------------------


def _words(given: Sequence[str], section: Section) -> dict[str, str]:
    """The given words as names and values."""
    wanted: dict[str, str] = {}
    families = list(dict.fromkeys(row["kernel"] for row in section.candidates))
    words = " ".join(given).split()
    named = [word for word in words if all(word.partition("="))]
    for name, value in values_in(" ".join(named)).items():
        wanted[name] = value_text(_on_card(value, section))
    for word in words:
        if word in named:
            continue
        if word in families:
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
        said = chosen_by(row.facts)
        if names and [said[name] for name in names if name in said] == values:
            return {"kernel": row["kernel"]} | dict(zip(names, values, strict=True))
    order = [f"{k}: {' / '.join(names)}" for k, names in families.items() if names]
    if fitting:
        family, names = next(iter(fitting.items()))
        return {"kernel": family} | dict(zip(names, values, strict=True))
    if word in {row.facts.provider for row in section.rows if row["baseline"]}:
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
    said = [chosen_by(row.facts) for row in section.candidates]
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


def _is_value(value: object) -> bool:
    """Whether it can be a parameter's value; a damaged spec has others."""
    return value is None or isinstance(value, int | str)


def _spec_values(spec: Mapping[str, Any], kernel: str, section: Section) -> dict[str, list[Value]]:
    """Each parameter's values that the spec names for a family, in its variants too."""
    family = spec.get(kernel, {})
    found: dict[str, list[Value]] = {}
    variants = family.get("variants")
    sets: list[Mapping[str, Any]] = [{n: v for n, v in family.items() if n != "variants"}]
    for choices in variants.values() if isinstance(variants, Mapping) else ():
        named = choices.values() if isinstance(choices, Mapping) else ()
        sets += [values for values in named if isinstance(values, Mapping)]
    for values in sets:
        for name, each in values.items():
            own = [v for v in (each if isinstance(each, list) else [each]) if _is_value(v)]
            found.setdefault(str(name), []).extend(_on_card(v, section) for v in own)
    return found


# -- the facts --------------------------------------------------------------------------------


def _explain(
    section: Section,
    wanted: Mapping[str, str],
    kernels: Mapping[str, Family],
    spec: Mapping[str, Any],
    recorded: Sequence[Mapping[str, Any]],
) -> ConfigExplanation:
    if not wanted and section.winner is not None:
        fitting = [section.winner]
    else:
        rows, asked = section.candidates, wanted.items()
        fitting = [row for row in rows if asked <= chosen_by(row.facts).items()]
    row = fitting[0] if fitting else None
    if row is None:
        if not section.candidates:
            raise SpecError(f"the run has no candidate of {section.problem.label}")
        named_one = (r for r in section.candidates if wanted.get("kernel") in (None, r["kernel"]))
        base = next(named_one, section.candidates[0])  # which completes a config that no row has
        _checked(section, wanted, spec, kernels.get(base["kernel"]))
        family, config = base["kernel"], _changed(base.facts.config, wanted)
    else:
        family, config = row["kernel"], row.facts.config
    own, values = kernels.get(family), _spec_values(spec, family, section)
    mine = [r for r in section.candidates if r["kernel"] == family]
    trials = [r.facts for r in mine]
    call = next((trial.call["function"] for trial in trials if trial.call), None)
    unknown, removes = _rules(own, section, config, call)
    modes = [mode.name for mode in own.modes] if own is not None else []
    rule = removes(config) if row is None else None
    best = next((r for r in mine if r["rank"]), None)
    axes = axes_of((spec.get(family) or {}).get("variants"))
    facts = next((facts for facts in section.spaces if facts.get("kernel") == family), {})
    removed = facts.get("removed")
    return ConfigExplanation(
        section,
        family,
        dict(config),
        row,
        rule,
        tuple(_beside(section, row)),
        tuple(_neighbours(mine, trials, row, config, values, removes, modes)),
        {n: c for n, c in removed.items() if c} if isinstance(removed, Mapping) else {},
        tuple(effects(trials, best.facts, axes)) if best is not None else (),
        len(timed(trials, family)),
        len(trials),
        tuple(_counters(recorded, [row, section.winner])),
        unknown,
        max(1, len(fitting)),
    )


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


Asks = Callable[[Mapping[str, Value]], tuple[str, str] | None]
"""Name and description of the rule that removes a config of a problem, or None."""


def _rules(
    kernel: Family | None, section: Section, config: Mapping[str, Value], call: str | None
) -> tuple[str | None, Asks]:
    """Why today's rules of a family cannot be asked, or None; and what asks them.

    call: the function that its candidates call, if it is no template.
    """
    unknown, where = None, section.environment
    if call is not None:
        unknown = f"the rules of {call} are its own file's, which explain does not run"
    elif kernel is None:
        unknown = "the family is not here today, so its rules cannot be asked"
    elif where is None:
        unknown = "the run has no usable environment.json, so its rules cannot be asked"
    elif (changed := kernel.changed_since(config)) is not None:
        unknown = f"{changed} since the run, so its rules cannot be asked"

    def removes(config: Mapping[str, Value]) -> tuple[str, str] | None:
        if unknown is not None or kernel is None or where is None:
            return None
        try:
            name = kernel.refused_by(kernel.of_today(config), section.problem, arch_on(where))
        except AttnsweepError:
            return None  # a rule that fails for a value that no spec named
        if name is None:
            return None
        described = {n: text for n, (text, _) in kernel.rules.items()} | kernel.mode_rules
        return name, described.get(name, "the GPU's limits of threads, shared memory and grid")

    return unknown, removes


def _beside(section: Section, row: Row | None) -> list[tuple[str, Row]]:
    """Rows to show beside the explained one, fastest first."""
    picked: dict[int, tuple[str, Row]] = {}

    def add(part: str, other: Row | None) -> None:
        if other is not None and other is not row:
            picked.setdefault(id(other), (part, other))

    add("winner", section.winner)
    add("baseline" if section.lost else "fastest baseline", section.best_baseline)
    add("bound", section.plain_read)
    ranked = section.contenders
    at = next((i for i, r in enumerate(ranked) if r is row), None)
    for other in [] if at is None else ranked[at + 1 : at + 1 + NEXT]:
        add("next", other)
    for other in section.best_of_families:
        if row is None or other["kernel"] != row["kernel"]:
            add("best of its family", other)
    return sorted(picked.values(), key=lambda item: item[1]["time_us"] or float("inf"))


def _neighbours(
    rows: Sequence[Row],
    trials: Sequence[Trial],
    row: Row | None,
    config: Mapping[str, Value],
    named_values: Mapping[str, Sequence[Value]],
    removes: Asks,
    modes: Collection[str],
) -> list[Neighbour]:
    """Every config one parameter away, of the values that the run or its spec has.

    trials: of the rows. modes: parameters that no rule of the family reads.
    """
    configs = [trial.config for trial in trials]
    by_config = {frozenset(c.items()): row for c, row in zip(configs, rows, strict=True)}
    own = row.facts.screened_us if row is not None else None
    out = []
    for name, mine in config.items():
        seen = {value_text(v): v for v in named_values.get(name, ())}
        for value in dict.fromkeys([each.get(name) for each in configs]):
            if value is not None:
                seen.setdefault(value_text(value), value)
        for text, value in sorted(seen.items(), key=lambda item: in_order(item[1])):
            if text == value_text(mine):
                continue
            near = {**config, name: value}
            there = by_config.get(frozenset(near.items()))
            if there is not None:
                us = there.facts.screened_us if there["rank"] else None
                why = None if there["rank"] else first_line(there["detail"])
                ratio = us / own if us and own else None
                out.append(Neighbour(name, value, us, ratio, there["status"], why or None))
                continue
            rule = removes(near) if name not in modes else None
            fate = "removed" if rule else "not tried"
            out.append(Neighbour(name, value, None, None, fate, ": ".join(rule) if rule else None))
    return out


def _counters(
    recorded: Sequence[Mapping[str, Any]], rows: Collection[Row | None]
) -> list[Mapping[str, Any]]:
    """The hardware counters that `profile` recorded of these rows."""
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


HOW = (
    "share: of the variance of the logarithm of all first times of the family, the part between "
    "groups of equal value, adjusted for their number (epsilon squared), beyond what those above "
    "explain; the rest is of combinations and noise · pairs: candidates that differ in this "
    "parameter only · ×: median over such pairs of a value's first time over the reference's, with "
    "the number of pairs and in how many the value was faster · a parameter that never varied is "
    "not listed"
)
# Values and neighbours named per rule before the rest is only counted.
_NAMED = 6


def lines(found: ConfigExplanation, width: int) -> list[Text]:
    """The explanation, no line wider than `width` unless names need it."""
    row = found.row
    out = said(" · ".join(heading(found.section)), width, "bold")
    out += said(f"{found.kernel} {named(found.config)}".rstrip(), width)
    if found.fit > 1:
        fit = f"{found.fit} candidates fit; this one ranks first among them"
        out += said(fit, width, "dim")
    out.append(Text())
    for line in verdict(found):
        out += said(line, width, "bold")
    sampled = judged_line([] if row is None else [row])
    if sampled is not None:
        out += said(f"{sampled[0].upper()}{sampled[1:]}.", width)
    for line in differences(found):
        out += said(line, width)
    if row is not None and found.beside:
        out += [Text(), *_table(found, row, width)]
        for line in _stages(found):
            out += said(line, width)
    out += _neighbour_lines(found, width)
    out += _effect_lines(found, width)
    if found.counters:
        out += [Text(), *counters(found.counters, width)]
    elif row is not None and row["rank"]:
        none = (
            "no hardware counters are recorded of it; on its GPU, attnsweep profile RUN --where "
            "'NAME=value …' records them"
        )
        out += said(none, width, "dim")
    for line in [] if all_recorded(found.section) else recorded_lines(found.section):
        out += said(line, width, "dim")
    return out


def verdict(found: ConfigExplanation) -> list[str]:
    """Sentences that say how it ended: won, lost by so much, failed, or no candidate at all."""
    row, won = found.row, found.winner
    if row is None:
        if found.rule is not None:
            return [f"It was no candidate: rule {found.rule[0]} removes it: {found.rule[1]}."]
        why = f"; {found.unknown}" if found.unknown else ""
        return [f"The run did not try it: no row has this config{why}."]
    if not row["rank"]:
        status = str(row["status"]).replace("_", " ")
        return [f"It has no rank, {status}: {first_line(row['detail']) or 'no reason given'}"]
    us = _cost(row)
    ranked = len(found.section.contenders)
    if found.won:
        baseline = faster_baseline(found.section)
        tied = sum(r["tied"] for r in found.section.contenders)
        sentences = [
            f"It is the best of ours, {us}; {baseline}."
            if baseline
            else f"It won: {us}, the first of {ranked} ranked candidates."
        ]
        if row["tied"] and tied > 1:
            sentences.append(
                f"It shares its rank with {tied - 1} more, for which no difference above 0.4 % was "
                "shown; of the equally good, it has the least shared memory, then the fewest "
                "registers."
            )
        return sentences
    if won is None or found.ratio is None:
        return [f"It takes {us}; the problem has no winner."]
    if row["tied"] and won["tied"] and row["rank"] == won["rank"]:
        return [
            f"It ties with the winner: {us} against {_cost(won)}; no "
            "difference above 0.4 % was shown, and the winner has less shared memory, fewer "
            "registers or an earlier config."
        ]
    by = "" if row["rounds"] else "; it did not reach the finals, so this is from fewer rounds"
    return [
        f"It lost: {us} is {found.ratio:.2f} times the winner's "
        f"{_cost(won)} (rank {place_of(row)}, {ranked} candidates are "
        f"ranked{by})."
    ]


def _cost(row: Row) -> str:
    """The time or energy that ranks a row: `10.8 µs`, `12.3 mJ`."""
    if row["ranked_as"] == "energy":
        return f"{figure(row['energy_uj'] / 1e3, 4)}{GLUE}mJ"
    return f"{figure(row['time_us'], 4)}{GLUE}µs"


def differences(found: ConfigExplanation) -> list[str]:
    """For a loser of the winner's family: each differing parameter, and what its pairs say."""
    row, won = found.row, found.winner
    if won is None or found.won or won["kernel"] != found.kernel:
        return []
    theirs: Mapping[str, Value] = won.facts.config
    differing = [n for n, v in found.config.items() if value_text(v) != value_text(theirs.get(n))]
    if not differing:
        return []
    out = [f"It differs from the winner in {len(differing)} parameter{'s' * (len(differing) > 1)}:"]
    by_name = {effect.name: effect for effect in found.effects}
    for name in differing:
        own, other = value_text(found.config[name]), value_text(theirs.get(name))
        out.append(f"  {name} {own} instead of {other}: {_paired(by_name.get(name), own)}")
    if row is not None and row["registers"] is not None and won["registers"] is not None:
        facts = [
            (what, f"{row[key]:.0f}", f"{won[key]:.0f}")
            for what, key in (("registers", "registers"), ("spill bytes", "spill_bytes"),
                              ("shared memory bytes", "smem_bytes"))
            if row[key] != won[key]
        ]  # fmt: skip
        if row["occupancy"] != won["occupancy"]:
            own, other = (f"{100 * each['occupancy']:.0f}{GLUE}%" for each in (row, won))
            facts.append(("occupancy", own, other))
        if facts:
            each = ", ".join(f"{what} {mine} against {its}" for what, mine, its in facts)
            out.append(f"Its code has {each}.")
    return out


def _paired(effect: Effect | None, value: str) -> str:
    """Time of a value over the winner's value, by pairs of configs that differ in it alone."""
    each = (
        next((v for v in effect.values if value_text(v.value) == value), None) if effect else None
    )
    if each is None or each.ratio is None:
        return "no two timed candidates differ in it only"
    return (
        f"×{each.ratio:.3f} in the median of {each.pairs} pair{'s' * (each.pairs > 1)} that differ "
        f"in it only, faster in {each.faster}"
    )


def _table(found: ConfigExplanation, row: Row, width: int) -> list[Text]:
    """The explained row and those beside it, fastest first."""
    parts = [("this one", row), *found.beside]
    parts.sort(key=lambda item: item[1]["time_us"] or float("inf"))
    cells = [["", "#", "kernel", "µs", "× this", "regs", "smem", "occ", "limited by"]]
    tails = ["differs by"]
    for part, each in parts:
        trial, us = each.facts, each["time_us"]
        used = trial.resources
        limited = "/".join(dict.fromkeys(used.limiters.values())) if used is not None else ""
        cells.append(
            [
                *(part, place_of(each), _who(found, each)),
                "–" if us is None else figure(us, 4),
                f"{us / row['time_us']:.2f}" if us and row["time_us"] else "–",
                "–" if each["registers"] is None else str(each["registers"]),
                "–" if each["smem_bytes"] is None else f"{each['smem_bytes'] / 1024:.0f}K",
                "–" if each["occupancy"] is None else f"{100 * each['occupancy']:.0f}{GLUE}%",
                limited or "–",
            ]
        )
        tails.append(_differs(each, row))
    styles = ["bold", *("bold green" if each is row else "" for _, each in parts)]
    return table(cells, "lrlrrrrrl", tails, width, styles=styles)


def _who(found: ConfigExplanation, row: Row) -> str:
    """The name of a row, with the mark of recorded ones if others are not."""
    return who(row).removesuffix("†") if all_recorded(found.section) else who(row)


def _differs(each: Row, row: Row) -> str:
    """The parameters in which a row of the same family differs."""
    if each is row or each["baseline"] or each["kernel"] != row["kernel"]:
        return ""
    own = row.facts.config
    return named({n: v for n, v in each.facts.config.items() if v != own.get(n)})


def _stages(found: ConfigExplanation) -> list[str]:
    """The stages of the explained candidate next to the winner's, if both have them."""
    row, won = found.row, found.winner
    if row is None or not row.facts.stages_us:
        return []
    theirs = won.facts.stages_us if won is not None and not found.won else {}
    each = [
        f"{name} {us:.1f}{GLUE}µs" + (f" (winner {theirs[name]:.1f})" if name in theirs else "")
        for name, us in row.facts.stages_us.items()
    ]
    return [f"stages timed alone: {', '.join(each)}"]


# -- neighbours and parameters ----------------------------------------------------------------


def _neighbour_lines(found: ConfigExplanation, width: int) -> list[Text]:
    """Configs one parameter away: their first times, why they failed, which rule removed them."""
    out: list[Text] = []
    if found.unknown:
        out += said(f"neighbours: {found.unknown}", width, "dim")
    there = [n for n in found.neighbours if n.fate not in ("removed", "not tried")]
    if there:
        rows = [["one parameter away", "first µs", "× this"]]
        tails = [""]
        for near in there:
            rows.append(
                [
                    f"{near.parameter}={value_text(near.value)}",
                    "–" if near.first_us is None else figure(near.first_us, 4),
                    "–" if near.ratio is None else f"{near.ratio:.3f}",
                ]
            )
            ok = near.fate == Status.OK
            tails.append("" if ok else f"{near.fate.replace('_', ' ')}: {near.why or ''}")
        out += [Text(), *table(rows, "lrr", tails, width, styles=["bold"])]
    rules: dict[str, list[Neighbour]] = {}
    for near in found.neighbours:
        if near.fate == "removed":
            rules.setdefault(near.why or "", []).append(near)
    for why, removed in rules.items():
        out += said(f"rule {why}: removes {_listed(removed)}", width)
    untried = [near for near in found.neighbours if near.fate == "not tried"]
    if untried:
        out += said(f"not tried: {_listed(untried)}", width)
    if found.removed:
        each = ", ".join(f"{rule} {count:,}" for rule, count in found.removed.items())
        text = f"configs of {found.kernel} that rules removed before the sweep: {each}"
        out += said(text, width, "dim")
    return out


def _listed(neighbours: Sequence[Neighbour]) -> str:
    names = [f"{near.parameter}={value_text(near.value)}" for near in neighbours]
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _effect_lines(found: ConfigExplanation, width: int) -> list[Text]:
    """Which parameters mattered, the most important first."""
    if not found.effects:
        few = f"{found.kernel}: {found.timed} candidates have a time, too few to compare parameters"
        return [Text(), *said(few, width, "dim")]
    rows, tails = [["parameter", "share", "pairs"]], ["values"]
    *whole, rest = percents(found.effects)
    for effect, percent in zip(found.effects, whole, strict=True):
        share = "–" if effect.share is None else f"{percent}{GLUE}%"
        rows.append([effect.name, share, str(effect.pairs)])
        tails.append(" · ".join(_value(effect, each) for each in effect.values))
    rows.append(["the rest", f"{rest}{GLUE}%", ""])
    tails.append("")
    title = (
        f"which parameters of {found.kernel} mattered, by {found.timed} timed of {found.tried} "
        "tried candidates"
    )
    return [
        Text(),
        *said(title, width, "bold"),
        *table(rows, "lrr", tails, width, styles=["bold"]),
        *_how(width),
    ]


@lru_cache
def _how(width: int) -> list[Text]:
    """What the tables of all problems mean."""
    return said(HOW, width, "dim")


def _value(effect: Effect, each: Any) -> str:
    value = value_text(each.value)
    of_reference = value == value_text(effect.reference)
    value = value.replace(" ", GLUE)  # `2 of 64 x 128`, of a variant
    if of_reference:
        return f"{value}{GLUE}reference"
    if each.ratio is None:
        return f"{value}{GLUE}no{GLUE}pair"
    return f"{value}{GLUE}×{each.ratio:.3f} ({each.faster} of {each.pairs} faster)"
