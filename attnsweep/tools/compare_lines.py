"""Two runs side by side, as lines of text for a terminal."""

from __future__ import annotations

import math

from rich.text import Text

from attnsweep.show.figures import figure
from attnsweep.show.terminal import aligned, counted, wrap
from attnsweep.tools.compare import Comparison, Pair, Side, config_changes

LEGEND = (
    "first, second: µs of each run's best candidate · second/first: above 1, the second run is "
    "slower; on two cards that is the card as much as the kernel · × peer: time of the fastest "
    "peer that both runs timed over the best candidate's, in each run · winner: same, tied (each "
    "is in the other's tie for the first place), or how much slower the first run's winner is in "
    "the second run, and the second's in the first (– if not ranked there)"
)


def lines(found: Comparison, width: int) -> list[Text]:
    """The comparison, no line wider than `width` unless names need it."""
    out: list[Text] = []

    def say(text: str, style: str = "") -> None:
        out.extend(Text(line, style) for line in wrap(text, width))

    say(f"first:  {found.first.directory}")
    say(f"second: {found.second.directory}")
    for name, (one, other) in found.differences.items():
        say(f"{name}: {_fact(one)} → {_fact(other)}", "dim")
    out.append(Text())
    header = ["problem", "first", "second", "second/first", "× peer", "peer", "winner"]
    rows = [_row(pair) for pair in found.pairs]
    table = aligned([header, *rows], "lrrrrll", width, shrink=(0, 5, 6))
    out += [Text(line, "" if number else "bold") for number, line in enumerate(table)]
    changed = [pair for pair in found.pairs if not pair.same_winner]
    if changed:
        out.append(Text())
    for pair in changed:
        say(f"{pair.problem.label}: {', '.join(config_changes(pair))}")
    out.append(Text())
    say(verdict(found), "bold")
    for labels, which in zip(found.only, ("first", "second"), strict=True):
        if labels:
            say(f"only in the {which} run: {', '.join(labels)}", "dim")
    say(LEGEND, "dim")
    return out


def verdict(found: Comparison) -> str:
    """`4 problems: the winners agree on 3; the second run's times are 1.02 times the first's …`."""
    pairs = found.pairs
    agree = sum(pair.agree for pair in pairs)
    ratios = [pair.second.us / pair.first.us for pair in pairs]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    said = f"{counted(len(pairs), 'problem')}: the winners agree on {agree}"
    if agree < len(pairs):
        lost = [side.of_the_others for pair in pairs for side in (pair.first, pair.second)]
        known = [ratio for ratio in lost if ratio is not None]
        if known:
            said += f" (elsewhere, the other's winner costs up to {100 * (max(known) - 1):.1f} %)"
    return (
        f"{said}; the second run's times are {mean:.3f} times the first's in the geometric mean"
        f" ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def _row(pair: Pair) -> list[str]:
    peers = pair.over_peers
    name = min(peers, key=lambda peer: pair.first.peers[peer], default=None)
    both = "–" if name is None else f"{peers[name][0]:.2f} → {peers[name][1]:.2f}"
    return [
        pair.problem.label,
        figure(pair.first.us, 4),
        figure(pair.second.us, 4),
        f"{pair.second.us / pair.first.us:.3f}",
        both,
        name or "–",
        "same" if pair.same_winner else "tied" if pair.agree else _lost(pair),
    ]


def _lost(pair: Pair) -> str:
    def share(side: Side) -> str:
        ratio = side.of_the_others
        return "–" if ratio is None else f"{100 * (ratio - 1):+.1f} %"

    return f"{share(pair.second)}, {share(pair.first)}"


def _fact(value: object) -> str:
    return "unknown" if value is None else str(value)
