"""Verdicts on a change, problem by problem, as terminal lines, Markdown, JSON and JUnit XML.

`compare` derives them from two recorded runs: did the best candidate get slower? Both runs were
measured earlier, at different times. Each verdict says how much that can prove: baselines timed in
both runs show how far the sessions themselves drifted apart, and a difference counts only beyond
that. Needs no GPU. Times are microseconds of one call.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from attnsweep.choose.evidence import ratio_interval
from attnsweep.choose.ranking import rank
from attnsweep.errors import StoreError, ToolchainError
from attnsweep.files import install_command, write_file
from attnsweep.show.sentences import Row, Section, by_problem, figure
from attnsweep.show.terminal import GLUE, aligned, wrap
from attnsweep.store.run import Run
from attnsweep.trial import Environment


class Verdict(StrEnum):
    """The verdict on one problem."""

    PASS = "pass"
    REGRESSION = "regression"
    WRONG = "wrong"  # does not compile or run, breaks the spec's rules, or gives wrong results
    IMPROVEMENT = "improvement"
    INCONCLUSIVE = "inconclusive"


EXIT = {Verdict.REGRESSION: 1, Verdict.WRONG: 1, Verdict.INCONCLUSIVE: 4}
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
CAN = (
    "This compares recorded runs. It can show that a problem's best candidate is slower or faster "
    "by more than the scatter of the rounds and the drift of the baselines timed in both."
)
CANNOT = (
    "It cannot show why, or see changes that affect only our kernels (other clocks under load, "
    "another card of the same name). Only timing both codes in turns on one GPU can."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding for one problem. ratio: new time over old; low, high: its limits with drift.

    rounds: number of rounds in which both were timed in turns. drift: range of the drift between
    two recorded sessions. slower: this problem's own threshold.
    """

    label: str
    verdict: Verdict
    why: str
    old: Row | None = None
    new: Row | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    drift: tuple[float, float] | None = None
    rounds: int | None = None
    slower: float | None = None

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
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All problems, and the differences between the two sides.

    old, new: run directories; with live timing, new is the spec. slower: the threshold, a share.
    damage: parts of the runs that could not be read, and that may matter.
    """

    old: Path
    new: Path
    slower: float
    findings: tuple[Finding, ...]
    differences: tuple[str, ...]
    interval: str = "95 % interval"
    proves: str = CAN
    does_not_prove: str = CANNOT
    damage: tuple[str, ...] = ()

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
            "problems": [finding.to_json() for finding in self.findings],
            "differences": list(self.differences),
            "damage": list(self.damage),
            "proves": self.proves,
            "does_not_prove": self.does_not_prove,
        }

    def _rows(self) -> list[list[str]]:
        paired = any(f.rounds is not None for f in self.findings)
        last = "rounds" if paired else "drift"
        rows = [["problem", "old µs", "new µs", "new/old", self.interval, last, "verdict"]]
        for f in self.findings:
            times = [
                "–" if row is None or row["time_us"] is None else figure(row["time_us"], 4)
                for row in (f.old, f.new)
            ]
            ratio = "–" if f.ratio is None else f"{f.ratio:.3f}"
            interval = "–" if f.low is None or f.high is None else f"{f.low:.3f}–{f.high:.3f}"
            of = "–" if f.drift is None else f"{f.drift[0]:.3f}–{f.drift[1]:.3f}"
            if paired:
                of = "–" if f.rounds is None else str(f.rounds)
            rows.append([f.label, *times, ratio, interval, of, f.verdict.value])
        return rows

    def _notes(self) -> list[str]:
        notes = [f"{f.label}: {f.why}" for f in self.findings if f.why]
        counts = Counter(finding.verdict for finding in self.findings)
        said = [f"{counts[verdict]}{GLUE}{verdict}" for verdict in Verdict if counts[verdict]]
        notes.append(f"{', '.join(said) or 'no problem to compare'}; slower means more than "
                     f"{100 * self.slower:g}{GLUE}%")  # fmt: skip
        notes += [
            f"{f.label}: slower means more than {100 * f.slower:g}{GLUE}%"
            for f in self.findings
            if f.slower is not None
        ]
        if self.damage:
            notes.append("inconclusive, a run is damaged: restore it, or record it again")
            notes += self.damage
        return [*notes, *(f"the two differ: {line}" for line in self.differences)]

    def lines(self, width: int) -> list[tuple[str, str]]:
        """Lines for a terminal, each with its style."""
        styles = {
            Verdict.REGRESSION: "bold red",
            Verdict.WRONG: "bold red",
            Verdict.IMPROVEMENT: "bold green",
            Verdict.INCONCLUSIVE: "yellow",
            Verdict.PASS: "",
        }
        header, *body = aligned(self._rows(), "lrrrrrl", width, shrink=(0,))
        out = [(line, "dim") for line in wrap(f"{self.old} → {self.new}", width)]
        out.append((header, "bold"))
        for finding, line in zip(self.findings, body, strict=True):
            out.append((line, styles[finding.verdict]))
        out += [(line, "") for note in self._notes() for line in wrap(note, width)]
        said = (self.proves, self.does_not_prove)
        return out + [(line, "dim") for text in said for line in wrap(text, width)]

    def to_markdown(self) -> str:
        """Markdown for a page or a job's summary."""
        header, *body = self._rows()
        rows = [header, ["---", *["---:"] * 5, "---"], *body]
        table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in r)} |" for r in rows]
        notes = [f"- {note}" for note in self._notes()]
        title = f"# {self.old} → {self.new}"
        text = "\n".join(
            [title, "", *table, "", *notes, "", f"{self.proves} {self.does_not_prove}"]
        )
        return text.replace(GLUE, " ") + "\n"

    def to_junit(self) -> str:
        """JUnit XML with a case per problem.

        A regression or a wrong result is a failure; inconclusive is an error. Raises ToolchainError
        without the `ci` extra.
        """
        try:
            import junitparser
        except ImportError as error:
            raise ToolchainError(
                "JUnit XML needs junitparser", hint=install_command("ci")
            ) from error
        suite = junitparser.TestSuite("attnsweep check")
        suite.add_property("old", str(self.old))
        suite.add_property("new", str(self.new))
        suite.add_property("slower", f"{self.slower:g}")
        header, *body = self._rows()
        for finding, cells in zip(self.findings, body, strict=True):
            case = junitparser.TestCase(finding.label, classname="attnsweep.check")
            if finding.verdict in (Verdict.REGRESSION, Verdict.WRONG):
                case.result = [junitparser.Failure(_xml(finding.why), finding.verdict.value)]
            elif finding.verdict is Verdict.INCONCLUSIVE:
                case.result = [junitparser.Error(_xml(finding.why), finding.verdict.value)]
            facts = [f"{name}: {cell}" for name, cell in zip(header, cells, strict=True)]
            case.system_out = _xml("\n".join([*facts, finding.why]))
            suite.add_testcase(case)
        if self.damage:
            case = junitparser.TestCase("the runs can be read", classname="attnsweep.check")
            case.result = [junitparser.Error(_xml(self.damage[0]), Verdict.INCONCLUSIVE.value)]
            case.system_out = _xml("\n".join(self.damage))
            suite.add_testcase(case)
        xml: Any = junitparser.JUnitXml("attnsweep")
        xml.add_testsuite(suite)
        xml.update_statistics()
        text: bytes = xml.tostring()
        return text.decode("utf-8")


def _xml(text: str) -> str:
    """The text without characters that XML cannot hold, which compilers and damaged files print."""
    return "".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def compare(old: Run, new: Run, *, slower: float) -> Comparison:
    """The verdict on every problem of `old`, in its order; problems only in `new` are named.

    slower: the share by which a best candidate may be slower; beyond it, it is a regression.
    """
    before = {s.problem: s for s in by_problem(rank(old.trials, old.environment), old.environment)}
    after = {s.problem: s for s in by_problem(rank(new.trials, new.environment), new.environment)}
    control = other_card(old.environment, new.environment)
    findings = [
        _judge(section, after.get(problem), slower, control) for problem, section in before.items()
    ]
    damage = tuple(dict.fromkeys((*old.warnings, *new.warnings)))
    if damage:  # a damaged run proves nothing: its best row may be lost
        findings = [
            replace(
                finding,
                verdict=Verdict.INCONCLUSIVE,
                why=f"a run is damaged; its remaining rows say {finding.verdict}"
                + (f": {finding.why}" if finding.why else ""),
            )
            for finding in findings
        ]
    differing = differences(old.environment, new.environment)
    added = [problem.label for problem in after if problem not in before]
    if added:
        differing.append(f"only the new run has {', '.join(added)}")
    return Comparison(
        old.directory,
        new.directory,
        slower,
        tuple(findings),
        tuple(differing),
        damage=damage,
    )


def write(path: Path, text: str) -> None:
    """Write a report of the comparison. Raises StoreError."""
    try:
        write_file(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise StoreError(
            f"cannot write: {error.strerror}",
            where=str(path),
            hint="give a file in a writable directory",
        ) from error


def summarise(text: str) -> None:
    """Add Markdown to the job's summary on GitHub Actions. Raises StoreError."""
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


def _judge(old: Section, new: Section | None, slower: float, control: str | None) -> Finding:
    label, won = old.problem.label, old.winner
    if new is None:
        why = "the new run does not contain this problem"
        return Finding(label, Verdict.INCONCLUSIVE, why, won)
    now = new.winner
    if won is None and now is None:
        return Finding(label, Verdict.INCONCLUSIVE, "no candidate is ok in either run")
    if won is None:
        return Finding(label, Verdict.IMPROVEMENT, "no candidate was ok, now one is", None, now)
    if now is None:
        counts = Counter(row["status"] for row in new.rows if not row["baseline"])
        ends = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in counts.most_common())
        why = f"no candidate is ok now: {ends or 'none was tried'}"
        return Finding(label, Verdict.REGRESSION, why, won)
    ratio = now["time_us"] / won["time_us"]
    if control is not None:
        return Finding(label, Verdict.INCONCLUSIVE, control, won, now, ratio)
    for which, row in (("old", won), ("new", now)):
        if not row["trial"].time_us.rounds:
            why = f"the {which} run timed its best candidate without rounds"
            return Finding(label, Verdict.INCONCLUSIVE, why, won, now, ratio)
    drift = _drift(old, new)
    if drift is None:
        why = "no baseline has rounds in both runs, so the drift is unknown"
        return Finding(label, Verdict.INCONCLUSIVE, why, won, now, ratio)
    low, high = _ratio(won, now)
    low, high = low / max(1.0, drift[1]), high / min(1.0, drift[0])
    facts = (won, now, ratio, low, high, drift)
    change = _changed(won, now)
    if low > 1 + slower:
        why = f"slower by at least {100 * (low - 1):.1f} %{change}"
        return Finding(label, Verdict.REGRESSION, why, *facts)
    if high < 1 / (1 + slower):
        why = f"faster by at least {100 * (1 / high - 1):.1f} %{change}"
        return Finding(label, Verdict.IMPROVEMENT, why, *facts)
    if high <= 1 + slower:
        return Finding(label, Verdict.PASS, "", *facts)
    why = f"between {100 * (1 - low):.1f} % faster and {100 * (high - 1):.1f} % slower"
    if low > 1:
        why = f"between {100 * (low - 1):.1f} and {100 * (high - 1):.1f} % slower"
    return Finding(label, Verdict.INCONCLUSIVE, f"{why}{change}", *facts)


def _median_interval(row: Row) -> tuple[float, float]:
    """95 % sign interval of the median of a row's rounds."""
    rounds = row["trial"].time_us.rounds
    return ratio_interval(rounds, [1.0] * len(rounds))


def _ratio(old: Row, new: Row) -> tuple[float, float]:
    """95 % limits of the ratio new to old, from the intervals of both medians.

    Rounds of two sessions cannot be paired, so the distances from both medians to their limits, in
    logarithms, are added as squares (MOVER: Zou and Donner, Statist. Med. 27, 2008).
    """
    (old_low, old_high), (new_low, new_high) = _median_interval(old), _median_interval(new)
    before, after = float(old["time_us"]), float(new["time_us"])
    down = math.hypot(math.log(after / new_low), math.log(old_high / before))
    up = math.hypot(math.log(new_high / after), math.log(before / old_low))
    return after / before * math.exp(-down), after / before * math.exp(up)


def _drift(old: Section, new: Section) -> tuple[float, float] | None:
    """Least and largest ratio new to old of the baselines with rounds in both, or None."""
    before, after = (
        {
            row["provider"]: float(row["time_us"])
            for row in section.rows
            if row["baseline"] and row["rank"] and row["rounds"]
        }
        for section in (old, new)
    )
    ratios = [after[name] / before[name] for name in before if name in after]
    return (min(ratios), max(ratios)) if ratios else None


def _changed(old: Row, new: Row) -> str:
    """A clause that another candidate wins now, or nothing."""
    if (old["kernel"], old["config"]) == (new["kernel"], new["config"]):
        return ""
    names = [f"{row['kernel']} {row['config']}".strip() for row in (old, new)]
    return f"; the best was {names[0]}, is {names[1]}"


def other_card(old: Environment | None, new: Environment | None) -> str | None:
    """The reason why both cannot be shown to be from the same kind of card, or None."""
    if old is None or new is None:
        return "a run has no environment.json, so its GPU is unknown"
    if old.gpu != new.gpu:
        return f"measured on another GPU: {old.gpu}, then {new.gpu}"
    return None


def differences(old: Environment | None, new: Environment | None) -> list[str]:
    """`driver 580 → 590`: differences between two environments that could matter."""
    if old is None or new is None:
        return []
    names = ("gpu", "driver", "cuda", "nvrtc", "attnsweep", "clock_hz", "host_cores")
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in names]
    for name in dict.fromkeys([*old.packages, *new.packages]):
        pairs.append((name, old.packages.get(name, "absent"), new.packages.get(name, "absent")))
    return [f"{name} {was} → {now}" for name, was, now in pairs if was != now]


def _plain(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    kept = ("kernel", "config", "time_us", "spread_us", "rounds", "registers", "smem_bytes")
    return {name: row[name] for name in kept}
