"""docs/benchmarks.md: what the scripts of benchmarks/ were asked for, and what they measured.

Every figure is of a recorded file under results/h200; whether a target is reached follows from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

REACHED, MISSED, SHORT = "reached", "**missed**", "**not enough runs**"
SAME_WINNERS, NOISE_SHARE, REGRET_PERCENT, RACE_SHARE = 19, 0.95, 0.5, 0.2
TIMES_KERNEL_TUNER, TIMES_HUNDRED_MS = 10.0, 2.0
COMPARISONS, DETECTED_SHARE, SECONDS = 1000, 0.95, 60.0
TOOLS = {
    "kernel_tuner": ("Kernel Tuner 1.5, brute force", TIMES_KERNEL_TUNER),
    "hundred_ms": ("everything compiled by all cores, then 100 ms each", TIMES_HUNDRED_MS),
}


class Line(NamedTuple):
    """A target: what it asks, what was measured, and whether that reaches it."""

    asked: str
    measured: str
    verdict: str


def verdict(reached: bool) -> str:
    """The word for it."""
    return REACHED if reached else MISSED


def stability(found: dict[str, Any]) -> Iterator[Line]:
    """Fresh processes that sweep the same space."""
    ran, asked = found["processes"], found["asked"]
    enough = ran >= asked

    def of(count: int, wanted: int) -> str:
        return SHORT if not enough and count == ran else verdict(count >= wanted)

    yield Line(
        f"{asked} fresh processes on {found['candidates']} candidates: the same winner "
        f"{SAME_WINNERS} times",
        f"{found['same_winner']} of {ran}" + ("" if enough else ", when time was over"),
        of(found["same_winner"], SAME_WINNERS),
    )
    ties = found["ties_hold_oracle_best"]
    yield Line("its ties hold the best of a long oracle run", f"{ties} of {ran}", of(ties, asked))
    regret = found["largest_regret_percent"]
    yield Line(
        f"the winner at most {REGRET_PERCENT:g} % slower than the oracle's best",
        f"{regret:.1f} % at most",
        verdict(regret <= REGRET_PERCENT),
    )
    share = found["race_launch_share"]
    yield Line(
        f"a race launches at most {100 * RACE_SHARE:.0f} % of 100 ms a candidate",
        f"{100 * share:.1f} %",
        verdict(share <= RACE_SHARE),
    )


def noise(found: dict[str, Any]) -> Iterator[Line]:
    """A config paired with itself."""
    for case in found["cases"]:
        pairs = case["pairs"]
        yield Line(
            f"`{case['kernel']}` {case['problem']}, {pairs['time_us']:.0f} µs, paired with itself: "
            f"within {pairs['limit_percent']:g} % {100 * NOISE_SHARE:.0f} times of 100",
            f"{100 * pairs['share_within']:.0f} of 100; 95 of 100 within "
            f"{pairs['percent_off_of_95_in_100']:.2g} %",
            verdict(pairs["share_within"] >= NOISE_SHARE),
        )


def kernel_tuner(found: dict[str, Any]) -> Iterator[Line]:
    """Whole sweeps of the same configs, each tool from an empty cache."""
    ours = found["tools"]["attnsweep"]["all_s"]
    for name, (label, wanted) in TOOLS.items():
        tool, times = found["tools"][name], found["times_attnsweep"].get(name)
        part = f" (extrapolated from {tool['configs']})" if tool["extrapolated"] else ""
        measured = f"{ours:.1f} s against {tool['all_s']:.0f}{part}: {times:.1f}×" if times else "–"
        yield Line(
            f"{found['configs']} configs on {found['environment']['host_cores']} cores, at least "
            f"{wanted:g} times as fast as {label}",
            measured,
            verdict(bool(times) and times >= wanted),
        )


def gate(found: dict[str, Any]) -> Iterator[Line]:
    """`attnsweep check` on kernels compared with themselves, and slowed."""
    itself = found["itself"]
    count, wrong = itself["comparisons"], itself["false_alarms"]
    yield Line(
        f"`check` of a kernel against itself: no false alarm in {COMPARISONS}",
        f"{wrong} in {count} comparisons of {len(itself['cases'])} kernels",
        verdict(False) if wrong else SHORT if count < COMPARISONS else REACHED,
    )
    for share, of in found["slowed"]["totals"].items():
        wanted = DETECTED_SHARE if share == "2 %" else 1.0
        reached = of["detected"] >= wanted * of["comparisons"] and of["seconds_most"] <= SECONDS
        yield Line(
            f"slower by {share}: detected {100 * wanted:.0f} times of 100, within {SECONDS:.0f} s",
            f"{of['detected']} of {of['comparisons']}, in {of['seconds_most']:.2f} s at most and "
            f"{found['slowed']['opening_a_second_process_s']:.1f} for a second process",
            verdict(reached),
        )


def sanitizer(found: dict[str, Any]) -> Iterator[Line]:
    """compute-sanitizer on small problems."""
    for tool in found["tools"]:
        yield Line(
            f"compute-sanitizer, {tool['tool']}: clean",
            f"{tool['errors']} errors in {tool['cases']} cases: {len(found['cases'])} configs, "
            "most of them full and causal",
            verdict(tool["clean"]),
        )


def search(found: dict[str, Any]) -> Iterator[Line]:
    """Strategies that are told recorded times."""
    spaces: dict[tuple[str, str, str, int], list[str]] = {}
    for space in found["spaces"]:
        key = (space["run"], space["kernel"], space["problem"], space["candidates"])
        trials = space["median_trials_to_1_percent"]
        spaces.setdefault(key, []).append(
            f"{space['strategy']} {'never' if trials is None else trials} "
            f"({space['seeds_within_1_percent']} of {found['seeds']} seeds)"
        )
    for (run, kernel, problem, candidates), told in spaces.items():
        yield Line(
            f"{run}, `{kernel}` {problem}, {candidates} candidates: trials until one is "
            "within 1 % of the best",
            ", ".join(told),
            "–",
        )


PAGES = {
    "stability": ("Does a rerun pick the same winner?", stability),
    "noise": ("How far apart are two times of one thing?", noise),
    "kernel_tuner": ("How long does a sweep take?", kernel_tuner),
    "gate": ("Can CI trust `check`?", gate),
    "search_replay": ("How many trials does a search need?", search),
    "sanitizer": ("Do the kernels touch what is not theirs?", sanitizer),
}
SCRIPTS = {
    "kernel_tuner": "kernel_tuner_compare",
    "sanitizer": "sanitize",
    "search_replay": "search",
}


def made_on(found: dict[str, Any]) -> str:
    """The card, versions and day of a file."""
    if "environment" not in found:
        return f"replayed from {found['recorded_on']}"
    here = found["environment"]
    versions = f"driver {here['driver']}, NVRTC {here['nvrtc']}"
    return f"{here['gpu']}, {versions}, {here['date'][:10]}"


def page(results: Path) -> str:
    """The page of the files that are there."""
    out = [
        "<!-- Written by scripts/measured.py from recorded files; change that instead. -->",
        "",
        "# What the benchmarks measured",
        "",
        "Each section is one command and the file that it wrote. A target that is missed says so; "
        "how the figures come about is told in [measuring.md](measuring.md).",
        "",
    ]
    for name, (title, lines_of) in PAGES.items():
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        script, where = SCRIPTS.get(name, name), made_on(found)
        out += [
            f"## {title}",
            "",
            f"`python benchmarks/{script}.py`: "
            f"[results/h200/{name}.json](../results/h200/{name}.json), {where}.",
            "",
            "| asked | measured | |",
            "|---|---|---|",
            *(f"| {line.asked} | {line.measured} | {line.verdict} |" for line in lines_of(found)),
            "",
        ]
    return "\n".join(out).rstrip() + "\n"
