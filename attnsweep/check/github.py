"""What GitHub Actions shows of a check: annotations of the job, and its summary.

Workflow commands: https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os

from attnsweep.check.verdicts import Comparison, Verdict
from attnsweep.errors import StoreError
from attnsweep.show.terminal import GLUE

ACTIONS_VARIABLE = "GITHUB_ACTIONS"
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
_KINDS = {
    Verdict.WRONG: "error",
    Verdict.REGRESSION: "error",
    Verdict.INCONCLUSIVE: "warning",
}


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
                out.append(_command(kind, f"attnsweep: {finding.label}", text))
    if compared.damage:
        text = "\n".join(compared.damage)
        out.append(_command("warning", "attnsweep: a run is damaged", text))
    elif not compared.findings:
        out.append(_command("warning", "attnsweep", "no problem to compare"))
    return out


def _command(kind: str, title: str, text: str) -> str:
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
