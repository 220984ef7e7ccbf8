"""An explanation as lines of text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from attnsweep.choose.columns import named, value_text
from attnsweep.choose.effects import Effect
from attnsweep.core.problem import Value
from attnsweep.core.trial import Status
from attnsweep.reports.explain import Explanation, Neighbour
from attnsweep.reports.notes import judged_line
from attnsweep.reports.terminal import GLUE
from attnsweep.reports.text import Row, faster_baseline, figure, first_line, heading, place_of, who
from attnsweep.reports.views import counters, said, table

HOW = (
    "share: of the variance of the logarithm of all first times of the family, the part between "
    "groups of equal value, adjusted for their number (epsilon squared); rules tie parameters "
    "together, so shares need not add up to 100 % · pairs: candidates that differ in this "
    "parameter only · ×: median over such pairs of a value's first time over the reference's, with "
    "the number of pairs and in how many the value was faster · a parameter that never varied is "
    "not listed"
)
# Values and neighbours named per rule before the rest is only counted.
_NAMED = 6


def lines(found: Explanation, width: int) -> list[Text]:
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
    out += _neighbours(found, width)
    out += _effects(found, width)
    if found.counters:
        out += [Text(), *counters(found.counters, width)]
    elif row is not None and row["rank"]:
        none = (
            "no hardware counters are recorded of it; on its GPU, attnsweep profile RUN --where "
            "'NAME=value …' records them"
        )
        out += said(none, width, "dim")
    return out


def verdict(found: Explanation) -> list[str]:
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
    ranked = sum(bool(r["rank"]) and not r["baseline"] for r in found.section.rows)
    if found.won:
        baseline = faster_baseline(found.section)
        tied = sum(r["tied"] and not r["baseline"] for r in found.section.rows)
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
    """What ranks a row: `10.8 µs`, or `12.3 mJ` where energy does."""
    if row["ranked_as"] == "energy":
        return f"{figure(row['energy_uj'] / 1e3, 4)}{GLUE}mJ"
    return f"{figure(row['time_us'], 4)}{GLUE}µs"


def differences(found: Explanation) -> list[str]:
    """For a loser of the winner's family: each differing parameter, and what its pairs say."""
    row, won = found.row, found.winner
    if won is None or found.won or won["kernel"] != found.kernel:
        return []
    theirs: Mapping[str, Value] = won["trial"].config
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
    """What the pairs of a parameter say of a value, next to the winner's."""
    each = (
        next((v for v in effect.values if value_text(v.value) == value), None) if effect else None
    )
    if each is None or each.ratio is None:
        return "no two timed candidates differ in it only"
    return (
        f"×{each.ratio:.3f} in the median of {each.pairs} pair{'s' * (each.pairs > 1)} that differ "
        f"in it only, faster in {each.faster}"
    )


def _table(found: Explanation, row: Row, width: int) -> list[Text]:
    """The explained row and those beside it, fastest first."""
    parts = [("this one", row), *found.beside]
    parts.sort(key=lambda item: item[1]["time_us"] or float("inf"))
    cells = [["", "#", "kernel", "µs", "× this", "regs", "smem", "occ", "limited by"]]
    tails = ["differs by"]
    for part, each in parts:
        trial, us = each["trial"], each["time_us"]
        used = trial.resources
        limited = "/".join(dict.fromkeys(used.limiters.values())) if used is not None else ""
        cells.append(
            [
                *(part, place_of(each), who(each)),
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


def _differs(each: Row, row: Row) -> str:
    """The parameters in which a row of the same family differs."""
    if each is row or each["baseline"] or each["kernel"] != row["kernel"]:
        return ""
    own = row["trial"].config
    return named({n: v for n, v in each["trial"].config.items() if v != own.get(n)})


def _stages(found: Explanation) -> list[str]:
    """The stages of the explained candidate next to the winner's, if both have them."""
    row, won = found.row, found.winner
    if row is None or not row["trial"].stages_us:
        return []
    theirs = won["trial"].stages_us if won is not None and not found.won else {}
    each = [
        f"{name} {us:.1f}{GLUE}µs" + (f" (winner {theirs[name]:.1f})" if name in theirs else "")
        for name, us in row["trial"].stages_us.items()
    ]
    return [f"stages timed alone: {', '.join(each)}"]


# -- neighbours and parameters ----------------------------------------------------------------


def _neighbours(found: Explanation, width: int) -> list[Text]:
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


def _effects(found: Explanation, width: int) -> list[Text]:
    """Which parameters mattered, the most important first."""
    if not found.effects:
        few = f"{found.kernel}: {found.timed} candidates have a time, too few to compare parameters"
        return [Text(), *said(few, width, "dim")]
    rows, tails = [["parameter", "share", "pairs"]], ["values"]
    for effect in found.effects:
        share = "–" if effect.share is None else f"{100 * effect.share:.0f}{GLUE}%"
        rows.append([effect.name, share, str(effect.pairs)])
        tails.append(" · ".join(_value(effect, each) for each in effect.values))
    title = (
        f"which parameters of {found.kernel} mattered, by {found.timed} timed of {found.tried} "
        "tried candidates"
    )
    return [
        Text(),
        *said(title, width, "bold"),
        *table(rows, "lrr", tails, width, styles=["bold"]),
        *said(HOW, width, "dim"),
    ]


def _value(effect: Effect, each: Any) -> str:
    value = value_text(each.value)
    of_reference = value == value_text(effect.reference)
    value = value.replace(" ", GLUE)  # `2 of 64 x 128`, of a variant
    if of_reference:
        return f"{value}{GLUE}reference"
    if each.ratio is None:
        return f"{value}{GLUE}no{GLUE}pair"
    return f"{value}{GLUE}×{each.ratio:.3f} ({each.faster} of {each.pairs} faster)"
