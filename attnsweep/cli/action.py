"""What check/action.yml runs in a workflow: its inputs as `attnsweep check`, its outputs, its end.

`check` runs the code of a change. It is a process of its own, without the runner's variables: no
token, no file that sets variables or outputs of later steps. That is no sandbox; the workflow's
permissions are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnsweep.cli.guard import Mode
from attnsweep.core.callables import CALLABLE
from attnsweep.core.errors import INTERNAL, AttnsweepError, SpecError, StoreError
from attnsweep.regress.verdicts import ACTIONS_VARIABLE, Verdict, annotation, summarise
from attnsweep.reports import terminal

# The worst first: what one of several shapes is decides what all are.
_WORST = (
    Verdict.WRONG,
    Verdict.REGRESSION,
    Verdict.INCONCLUSIVE,
    Verdict.CHANGED,
    Verdict.IMPROVEMENT,
    Verdict.PASS,
)
_REVISION = re.compile(r"[\w/][\w./~^@{}+-]*")
_VERDICTS = (0, 1, 4)
"""Exit codes of `check` with a verdict."""


def main() -> None:
    """Compare as the inputs ask, write the outputs, and exit.

    Exit code 1 if a shape has a verdict of fail-on, 4 if that is `inconclusive` alone, 0 otherwise;
    without a verdict that of `check`, which is none of these.
    """
    try:
        sys.exit(_compared(os.environ))
    except AttnsweepError as error:
        print(annotation("error", "attnsweep: no verdict", error.render()))  # noqa: T201
        raise


def _compared(environment: Mapping[str, str]) -> int:
    if environment.get("GITHUB_EVENT_NAME") == "pull_request_target":
        what = "would run a stranger's change with the rights and secrets of this repository"
        raise SpecError(what, where="on: pull_request_target", hint="write on: pull_request")
    inputs = {
        name.removeprefix("INPUT_").lower().replace("_", "-"): value.strip()
        for name, value in environment.items()
        if name.startswith("INPUT_")
    }
    arguments, fail_on = arguments_of(inputs), fail_on_of(inputs["fail-on"])
    folder = Path(tempfile.mkdtemp(prefix="attnsweep-", dir=environment.get("RUNNER_TEMP")))
    files = {name: folder / f"check.{name}" for name in ("json", "xml", "md")}
    command = [sys.executable, "-P", "-m", "attnsweep", "check", "--json"]
    command += [f"--junit={files['xml']}", f"--markdown={files['md']}", *arguments]
    with files["json"].open("wb") as out:
        code = subprocess.run(command, stdout=out, env=_own(environment), check=False).returncode
    if code not in _VERDICTS:
        text = f"attnsweep check ended in exit code {code}; its last lines say why"
        print(annotation("error", "attnsweep: no verdict", text))  # noqa: T201
        return code if code > 0 else 128 - code  # of a signal, as a shell has it
    try:
        found = json.loads(files["json"].read_bytes())
        outputs = outputs_of(found) | {"json": str(files["json"]), "junit": str(files["xml"])}
        summarise(files["md"].read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError):
        return INTERNAL
    _write(environment.get("GITHUB_OUTPUT"), outputs)
    return end_of({Verdict(each["verdict"]) for each in found["problems"]}, fail_on)


def arguments_of(inputs: Mapping[str, str]) -> list[str]:
    """The inputs as arguments of `check`. Raises SpecError."""
    kernel, base, mode = inputs["kernel"], inputs["base"], inputs["mode"]
    named, _, how = kernel.partition("?")
    file, _, function = named.rpartition(":")
    if CALLABLE.fullmatch(kernel) is None or not file.endswith(".py"):
        raise SpecError(f"no function: {kernel!r}", where="kernel", hint="write FILE.py:FUNCTION")
    if _REVISION.fullmatch(base) is None:
        raise SpecError(f"no revision: {base!r}", where="base", hint="write one, as HEAD^1")
    if mode not in (*Mode,):
        raise SpecError(f"no mode: {mode!r}", where="mode", hint="write time or compile")
    if inputs["causal"] not in ("true", "false"):
        hint = "write true or false"
        raise SpecError(f"neither: {inputs['causal']!r}", where="causal", hint=hint)
    names = ["dtype", "config", "mode", "budget-s", "arch" if mode == Mode.COMPILE else "slower"]
    old = f"{file}@{base}:{function}" + (f"?{how}" if how else "")
    causal = ["--causal"] if inputs["causal"] == "true" else []
    given = [f"--{name}={inputs[name]}" for name in names]
    return [
        f"--old={old}",
        f"--new={kernel}",
        *causal,
        *given,
        "--",
        *inputs["shapes"].splitlines(),
    ]


def fail_on_of(text: str) -> set[Verdict]:
    """Read the verdicts of the input fail-on: `regression,wrong`. Raises SpecError."""
    known = {verdict.value: verdict for verdict in _WORST if verdict is not Verdict.PASS}
    words = text.replace(",", " ").split()
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        what = f"no verdict: {unknown[0]!r}" if unknown else "names no verdict"
        raise SpecError(what, where="fail-on", hint=f"there are {', '.join(known)}")
    return {known[word] for word in words}


def outputs_of(found: Mapping[str, Any]) -> dict[str, str]:
    """The outputs that say what `check --json` found: of the worst, and of the largest ratio."""
    met = {problem["verdict"] for problem in found["problems"]}
    timed = [problem for problem in found["problems"] if problem["ratio"] is not None]
    ratio = low = high = ""
    if timed:
        most = max(timed, key=lambda problem: problem["ratio"])
        ratio, low, high = (f"{number:.4f}" for number in (most["ratio"], *most["interval"]))
    verdict = next(verdict.value for verdict in _WORST if verdict in met)
    return {"verdict": verdict, "ratio": ratio, "low": low, "high": high}


def end_of(met: set[Verdict], fail_on: set[Verdict]) -> int:
    """The exit code of verdicts of which some fail."""
    failing = met & fail_on
    return 0 if not failing else 4 if failing == {Verdict.INCONCLUSIVE} else 1


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `check`: none of the runner's but the one that asks for annotations."""
    runners = ("GITHUB_", "RUNNER_", "ACTIONS_", "INPUT_")
    kept = {name: value for name, value in environment.items() if not name.startswith(runners)}
    return kept | {ACTIONS_VARIABLE: environment.get(ACTIONS_VARIABLE, "")}


def _write(path: str | None, outputs: Mapping[str, str]) -> None:
    """Add outputs to the step's file, if there is one. Raises StoreError."""
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{name}={value}\n" for name, value in outputs.items())
    except OSError as error:
        raise StoreError(f"cannot write the outputs: {error.strerror}", where=path) from error


if __name__ == "__main__":
    terminal.to_the_end(main)
