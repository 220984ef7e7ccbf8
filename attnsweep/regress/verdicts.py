"""Verdicts on a change, problem by problem, as terminal lines, Markdown, JSON and JUnit XML.

They come from code timed in turns (live.py), from two recorded runs (recorded.py), or from compiled
code alone (compiled.py). Needs no GPU. Times are microseconds of one call. GitHub Actions gets
annotations and a summary of the job:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from attnsweep.core.errors import StoreError, ToolchainError
from attnsweep.core.files import install_command
from attnsweep.core.trial import Environment
from attnsweep.reports.terminal import GLUE, aligned, wrap
from attnsweep.reports.text import figure


class Verdict(StrEnum):
    """The verdict on one problem."""

    PASS = "pass"
    REGRESSION = "regression"
    WRONG = "wrong"  # does not compile or run, breaks the spec's rules, or gives wrong results
    IMPROVEMENT = "improvement"
    CHANGED = "changed"  # other machine code, of which compiling says neither
    INCONCLUSIVE = "inconclusive"


EXIT = {Verdict.REGRESSION: 1, Verdict.WRONG: 1, Verdict.INCONCLUSIVE: 4}


@dataclass(frozen=True, slots=True)
class StageCode:
    """A kernel's resources and instructions, old and new; None of a side that does not have it."""

    name: str
    old: Mapping[str, Any] | None
    new: Mapping[str, Any] | None

    def cells(self) -> list[str]:
        """`168 → 170` for each of _FACTS; a figure that both have stands once."""
        cells = []
        for fact in _FACTS:
            both = [(side or {}).get(fact) for side in (self.old, self.new)]
            texts = ["–" if value is None else f"{value:.0f}" for value in both]
            cells.append(" → ".join(dict.fromkeys(texts)))
        return cells


_FACTS = {
    "registers": "registers",
    "spill_bytes": "spill B",
    "smem_bytes": "smem B",
    "blocks_per_sm": "blocks/SM",
    "instructions": "SASS",
}
"""Facts of a kernel that the table of compiled code shows, and the heads of their columns."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding for one problem. ratio: new time over old; low, high: its limits with drift.

    rounds: number of rounds in which both were timed in turns. drift: range of the drift between
    two recorded sessions. slower: this problem's own threshold. budget_ended: whether the check's
    time ended before this was decided. took_s: what deciding it took. stages: the kernels, if only
    their code was compared.
    """

    label: str
    verdict: Verdict
    why: str
    old: Mapping[str, Any] | None = None
    new: Mapping[str, Any] | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    drift: tuple[float, float] | None = None
    rounds: int | None = None
    slower: float | None = None
    budget_ended: bool = False
    took_s: float | None = None
    stages: tuple[StageCode, ...] = ()

    @property
    def line(self) -> str:
        """The finding as one line of text: problem, verdict, ratio, and why."""
        ratio = "" if self.ratio is None else f", {self.ratio:.3f} times the old time"
        return f"{self.label}: {self.verdict.value}{ratio}{f': {self.why}' if self.why else ''}"

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {
            "problem": self.label,
            "verdict": self.verdict.value,
            "why": self.why,
            "old": _plain(self.old),
            "new": _plain(self.new),
            "ratio": self.ratio,
            "interval": None if self.low is None else [self.low, self.high],
            "drift": None if self.drift is None else list(self.drift),
            "rounds": self.rounds,
            "slower": self.slower,
            "budget_ended": self.budget_ended,
            "took_s": None if self.took_s is None else round(self.took_s, 3),
            "stages": [{"name": s.name, "old": s.old, "new": s.new} for s in self.stages],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """The finding that `to_json` wrote."""
        told = dict(data)
        label, verdict, why = (told.pop(name) for name in ("problem", "verdict", "why"))
        low, high = told.pop("interval") or (None, None)
        drift = told.pop("drift")
        told["drift"] = None if drift is None else (drift[0], drift[1])
        told["stages"] = tuple(StageCode(**stage) for stage in told["stages"])
        return cls(label, Verdict(verdict), why, low=low, high=high, **told)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All problems, and the differences between the two sides.

    old, new: run directories; with live timing, new is the spec. slower: the threshold, a share;
    None if only compiled code was compared. damage: parts of the runs that could not be read, and
    that may matter. budget_s, took_s: of the whole check, if it measured.
    """

    old: Path
    new: Path
    slower: float | None
    findings: tuple[Finding, ...]
    differences: tuple[str, ...] = ()
    interval: str = "interval"
    proves: str = ""
    does_not_prove: str = ""
    damage: tuple[str, ...] = ()
    budget_s: float | None = None
    took_s: float | None = None

    @property
    def exit_code(self) -> int:
        """1 if a problem regressed or is wrong; otherwise 4 if one is inconclusive; otherwise 0.

        Also 4 if there is nothing to compare, or if a run is damaged.
        """
        codes = {EXIT.get(finding.verdict, 0) for finding in self.findings}
        unsure = 4 in codes or not self.findings or bool(self.damage)
        return 1 if 1 in codes else 4 if unsure else 0

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data: stable keys, None for unknown values."""
        return {
            "old": str(self.old),
            "new": str(self.new),
            "slower": self.slower,
            "exit_code": self.exit_code,
            "budget_s": self.budget_s,
            "took_s": None if self.took_s is None else round(self.took_s, 3),
            "problems": [finding.to_json() for finding in self.findings],
            "differences": list(self.differences),
            "damage": list(self.damage),
            "proves": self.proves,
            "does_not_prove": self.does_not_prove,
        }

    @property
    def _header(self) -> list[str]:
        if self.slower is None:
            return ["problem", "kernel", *_FACTS.values(), "verdict"]
        paired = any(f.rounds is not None for f in self.findings)
        last = "rounds" if paired else "drift"
        return ["problem", "old µs", "new µs", "new/old", self.interval, last, "verdict"]

    def _rows(self, f: Finding) -> list[list[str]]:
        """The cells of a finding: one row, or of compiled code a row for each kernel."""
        if self.slower is None:
            stages = [[s.name, *s.cells()] for s in f.stages] or [["–"] * (1 + len(_FACTS))]
            return [[f.label, *cells, f.verdict.value] for cells in stages]
        times = [
            "–" if row is None or row["time_us"] is None else figure(row["time_us"], 4)
            for row in (f.old, f.new)
        ]
        ratio = "–" if f.ratio is None else f"{f.ratio:.3f}"
        interval = "–" if f.low is None or f.high is None else f"{f.low:.3f}–{f.high:.3f}"
        of = "–" if f.drift is None else f"{f.drift[0]:.3f}–{f.drift[1]:.3f}"
        if "rounds" in self._header:
            of = "–" if f.rounds is None else str(f.rounds)
        return [[f.label, *times, ratio, interval, of, f.verdict.value]]

    def _reasons(self, *, quiet: bool = False) -> list[str]:
        """A line for each reason, with the problems that have it. quiet: of what did not pass."""
        same: dict[str, list[str]] = {}
        for f in self.findings:
            if not (quiet and f.verdict is Verdict.PASS):
                same.setdefault(f.why, []).append(f.label)
        return [f"{'; '.join(labels)}: {why}" for why, labels in same.items() if why]

    def _of_damage(self) -> list[str]:
        head = "inconclusive, a run is damaged: restore it, or record it again"
        return [head, *self.damage] if self.damage else []

    def _notes(self) -> list[str]:
        notes = self._reasons()
        counts = Counter(finding.verdict for finding in self.findings)
        said = [f"{counts[verdict]}{GLUE}{verdict}" for verdict in Verdict if counts[verdict]]
        slower = f"; slower means more than {100 * (self.slower or 0):g}{GLUE}%"
        notes.append((", ".join(said) or "no problem to compare") + slower * bool(self.slower))
        notes += [
            f"{f.label}: slower means more than {100 * f.slower:g}{GLUE}%"
            for f in self.findings
            if f.slower is not None
        ]
        if self.budget_s is not None and self.took_s is not None:
            notes.append(f"took {self.took_s:.0f}{GLUE}s, budget {self.budget_s:g}{GLUE}s")
        late = [f.label for f in self.findings if f.budget_ended]
        if late:
            notes.append(
                f"the budget ended before {len(late)} of {len(self.findings)} problems were "
                f"decided, raise --budget-s: {'; '.join(late)}"
            )
        return [
            *notes,
            *self._of_damage(),
            *(f"the two differ: {line}" for line in self.differences),
        ]

    def lines(self, width: int, *, quiet: bool = False) -> list[tuple[str, str]]:
        """Lines for a terminal, each with its style. quiet: verdicts and their reasons alone."""
        styles = {
            Verdict.REGRESSION: "bold red",
            Verdict.WRONG: "bold red",
            Verdict.IMPROVEMENT: "bold green",
            Verdict.INCONCLUSIVE: "yellow",
        }
        rows = [(finding, cells) for finding in self.findings for cells in self._rows(finding)]
        sides = "lrrrrrl" if self.slower is not None else "llrrrrrl"
        table = [self._header, *(cells for _, cells in rows)]
        header, *body = aligned(table, sides, width, shrink=(0,))
        runs = [] if quiet else wrap(f"{self.old} → {self.new}", width)
        out = [*((line, "dim") for line in runs), (header, "bold")]
        for (finding, _), line in zip(rows, body, strict=True):
            out.append((line, styles.get(finding.verdict, "")))
        notes = [*self._reasons(quiet=True), *self._of_damage()] if quiet else self._notes()
        out += [(line, "") for note in notes for line in wrap(note, width)]
        said = () if quiet else (self.proves, self.does_not_prove)
        return out + [(line, "dim") for text in said for line in wrap(text, width)]

    def to_markdown(self) -> str:
        """Markdown for a page or a job's summary."""
        left, header = (1 if self.slower is not None else 2), self._header
        sides = ["---"] * left + ["---:"] * 5 + ["---"]
        rows = [header, sides, *(cells for f in self.findings for cells in self._rows(f))]
        table = [f"| {' | '.join(map(markdown, r))} |" for r in rows]
        notes = [f"- {markdown(note)}" for note in self._notes()]
        title = f"# {markdown(f'{self.old} → {self.new}')}"
        text = "\n".join(
            [title, "", *table, "", *notes, "", f"{self.proves} {self.does_not_prove}"]
        )
        return text.replace(GLUE, " ") + "\n"

    def to_junit(self) -> str:
        """JUnit XML with a case per problem.

        A regression or a wrong result is a failure; inconclusive is an error. Raises ToolchainError
        without the `ci` extra.
        """
        junitparser = junit_library()
        suite = junitparser.TestSuite("attnsweep check")
        suite.timestamp = datetime.now(UTC).isoformat(timespec="seconds")
        # Files of several specs in one job are told apart by the class.
        of = f"attnsweep.check.{self.new.resolve().stem}"
        suite.add_property("old", str(self.old))
        suite.add_property("new", str(self.new))
        if self.slower is not None:
            suite.add_property("slower", f"{self.slower:g}")
        for finding in self.findings:
            case = junitparser.TestCase(finding.label, classname=of)
            case.time = round(finding.took_s or 0.0, 3)
            if finding.verdict in (Verdict.REGRESSION, Verdict.WRONG):
                case.result = [junitparser.Failure(_xml(finding.why), finding.verdict.value)]
            elif finding.verdict is Verdict.INCONCLUSIVE:
                case.result = [junitparser.Error(_xml(finding.why), finding.verdict.value)]
            facts = [
                f"{name}: {cell}"
                for cells in self._rows(finding)
                for name, cell in zip(self._header, cells, strict=True)
            ]
            case.system_out = _xml("\n".join([*facts, finding.why]))
            suite.add_testcase(case)
        if self.damage:
            case = junitparser.TestCase("the runs can be read", classname=of)
            case.result = [junitparser.Error(_xml(self.damage[0]), Verdict.INCONCLUSIVE.value)]
            case.system_out = _xml("\n".join(self.damage))
            suite.add_testcase(case)
        xml: Any = junitparser.JUnitXml("attnsweep")
        xml.add_testsuite(suite)
        xml.update_statistics()
        text: bytes = xml.tostring()
        return text.decode("utf-8")


def junit_library() -> Any:
    """The library that writes JUnit XML. Raises ToolchainError without the `ci` extra."""
    try:
        import junitparser
    except ImportError as error:
        raise ToolchainError("JUnit XML needs junitparser", hint=install_command("ci")) from error
    return junitparser


_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|"} | {"<": "&lt;", "&": "&amp;"})


def markdown(text: str) -> str:
    """The text on one line, as Markdown that shows it literally: compilers and files write it."""
    return " ".join(text.split()).translate(_MARKDOWN)


def _xml(text: str) -> str:
    """The text without the control characters that XML forbids; compilers print some."""
    return "".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def percent(ratio: float) -> str:
    """The size of a change in percent of the old time: `3.0 %` for 1.03 and for 0.97."""
    return f"{100 * abs(ratio - 1):.1f} %"


def change(ratio: float) -> str:
    """`3.0 % slower` for 1.03, `3.0 % faster` for 0.97."""
    return f"{percent(ratio)} {'slower' if ratio >= 1 else 'faster'}"


def at_least(ratio: float) -> str:
    """`slower by at least 3.0 %` for 1.03, `faster by at least 3.0 %` for 0.97."""
    return f"{'slower' if ratio >= 1 else 'faster'} by at least {percent(ratio)}"


def other_card(old: Environment | None, new: Environment | None) -> str | None:
    """The reason why both cannot be shown to be from the same kind of card, or None."""
    if old is None or new is None:
        return "a run has no usable environment.json, so its GPU is unknown"
    if old.gpu != new.gpu:
        return f"measured on another GPU: {old.gpu}, then {new.gpu}"
    return None


_CARD = {"sm_count": "SMs", "l2_bytes": "bytes of L2", "power_limit_w": "W of power limit"}


def other_machine(
    old: Mapping[str, Any], new: Mapping[str, Any], *, other_driver: bool = False
) -> str | None:
    """How two cards of one name differ, or their drivers; None if they do not, or nothing says so.

    old, new: facts as Environment.machine has them. other_driver: whether drivers may differ.
    """
    said = []
    for name in (*_CARD, *([] if other_driver else ["driver"])):
        was, now = old.get(name), new.get(name)
        if was is None or now is None or was == now:
            continue
        of = _CARD.get(name)
        said.append(f"{was:g} {of}, then {now:g}" if of else f"driver {was}, then {now}")
    hint = "; --other-driver compares them" if said and "driver" in said[-1] else ""
    return f"measured with {' and '.join(said)}{hint}" if said else None


def other_protocol(old: Environment | None, new: Environment | None) -> str | None:
    """The reason why the times of two runs were taken by other rules, or None."""
    if old is None or new is None or old.protocol == new.protocol:
        return None
    by = [f"protocol {run.protocol}" if run.protocol else "one before 4" for run in (old, new)]
    return f"timed by another protocol: {by[0]}, then {by[1]}; record the older run anew"


def differences(old: Environment | None, new: Environment | None) -> list[str]:
    """`driver 580 → 590`: differences between two environments that could matter."""
    if old is None or new is None:
        return []
    names = ("gpu", *_CARD, "driver", "cuda", "nvrtc", "attnsweep", "host_cores")
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in names]
    for name in dict.fromkeys([*old.packages, *new.packages]):
        pairs.append((name, old.packages.get(name, "absent"), new.packages.get(name, "absent")))
    return [f"{name} {was} → {now}" for name, was, now in pairs if was != now]


def _plain(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    kept = ("kernel", "config", "time_us", "spread_us", "rounds", "registers", "smem_bytes")
    return {name: row[name] for name in kept}


ACTIONS_VARIABLE = "GITHUB_ACTIONS"
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
_KINDS = {Verdict.WRONG: "error", Verdict.REGRESSION: "error", Verdict.INCONCLUSIVE: "warning"}


def commands(compared: Comparison) -> list[str]:
    """`::error` for each wrong or slower problem, `::warning` for each inconclusive one.

    Errors first: GitHub shows ten of a kind and step. Empty outside of GitHub Actions.
    """
    if os.environ.get(ACTIONS_VARIABLE) != "true":
        return []
    out = []
    for verdict, kind in _KINDS.items():
        for finding in compared.findings:
            if finding.verdict is verdict:
                ratio = "" if finding.ratio is None else f", {finding.ratio:.3f} times the old time"
                text = f"{verdict.value}{ratio}: {finding.why}"
                out.append(annotation(kind, f"attnsweep: {finding.label}", text))
    if compared.damage:
        text = "\n".join(compared.damage)
        out.append(annotation("warning", "attnsweep: a run is damaged", text))
    elif not compared.findings:
        out.append(annotation("warning", "attnsweep", "no problem to compare"))
    return out


def annotation(kind: str, title: str, text: str) -> str:
    """A workflow command on one line, whatever the text holds."""
    safe_title = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={safe_title}::{_escaped(text)}"


def _escaped(text: str) -> str:
    plain = text.replace(GLUE, " ").replace("%", "%25")
    return plain.replace("\r", "%0D").replace("\n", "%0A")


def summarise(text: str) -> None:
    """Add Markdown to the job's summary, if there is one. Raises StoreError."""
    path = os.environ.get(SUMMARY_VARIABLE)
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise StoreError(
            f"cannot write the job's summary: {error.strerror}",
            where=path,
            hint=f"unset {SUMMARY_VARIABLE}, or give --markdown FILE",
        ) from error
