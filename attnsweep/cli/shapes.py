"""`attnsweep shapes`: run a program, and write its attention calls as a spec."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from attnsweep.cli import options
from attnsweep.cli.app import FIND, app, examples, without_arch
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.reports.terminal import errors

if TYPE_CHECKING:
    from attnsweep.serve.recorded_calls import Recorded


@app.command(
    rich_help_panel=FIND,
    epilog=examples(
        "attnsweep shapes model.yaml -- python generate.py --tokens 128",
        "attnsweep shapes model.yaml --arch sm_90a -- python -m my.training",
        "attnsweep shapes model.yaml --force -- torchrun --nproc-per-node 8 train.py",
    ),
)
def shapes(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Spec to write.")],
    command: options.Command,
    arch: Annotated[str | None, options.arch("One of {} (default: this GPU's).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    every_call: Annotated[
        bool,
        typer.Option("--every-call", help="Count calls of compiled code and C++ too; costs more."),
    ] = False,
    top: Annotated[
        int, typer.Option("--top", min=1, max=1000, help="Most problems: the costliest shapes.")
    ] = 50,
) -> None:
    """Run a PyTorch program unchanged, and write its attention calls to OUT as a spec.

    Every shape that `scaled_dot_product_attention` is called with from Python, in all processes,
    becomes a problem with the number of its calls; `attnsweep run OUT` then says what the whole
    program gains. Calls of compiled code and C++ are counted with `--every-call` only. Calls that
    no family can serve are listed with the reason. The exit code is the program's; 1 if it is 0 but
    no problem was found.
    """
    from attnsweep.family.discover import discover
    from attnsweep.serve.recorded_calls import lines_of, refuse, write
    from attnsweep.tools import target as cards

    refuse(out, force)
    families = discover()
    try:
        target = cards.here(families) if arch is None else cards.named(arch, families)
    except NoGpuError as error:
        again = shlex.join(["attnsweep", "shapes", str(out), "--arch", "sm_90a", "--", *command])
        raise without_arch(error, again) from error
    code, recorded = record(command, every_call)
    found = write(out, recorded, target, top)
    for line in lines_of(found, recorded):
        errors.print(line, markup=False, soft_wrap=True)
    if found.problems:
        errors.print(f"{out}: next: attnsweep run {out}", markup=False, soft_wrap=True)
    else:
        errors.print(f"{out}: not written: no call can be served", markup=False, soft_wrap=True)
    raise typer.Exit(code or (0 if found.problems else 1))


def record(command: Sequence[str], every_call: bool = False) -> tuple[int, Recorded]:
    """Run a command: its exit code, and its calls of PyTorch's attention."""
    from attnsweep.serve.recorded_calls import read

    with tempfile.TemporaryDirectory(prefix="attnsweep-shapes-") as folder:
        install(Path(folder), f"begin(folder, {every_call})")
        return run_program(command, Path(folder)), read(Path(folder))


def run_program(command: Sequence[str], *places: Path) -> int:
    """Run a command with these folders first on PYTHONPATH; returns its exit code.

    A command that a signal ended has 128 and the signal's number. Ctrl-C and SIGTERM reach the
    command; this process waits until it ends. Raises SpecError if it cannot be started.
    """
    paths = [*map(str, places), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        child = subprocess.Popen([*command], env=environment)
    except OSError as error:
        hint = "write the command as in a shell, behind --: -- python script.py"
        why = error.strerror or str(error)
        raise SpecError(f"cannot be started: {why}", where=command[0], hint=hint) from error

    def wait_on(number: int, frame: FrameType | None) -> None:
        pass  # a terminal sends Ctrl-C to both processes

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            child.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, wait_on),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def install(folder: Path, act: str = "begin(folder, False)") -> None:
    """Have each Python that finds this folder on PYTHONPATH act so from its start.

    act: a call of a function of serve/recorder/start.py, which leaves its files in the folder.
    """
    from attnsweep.serve import recorder

    name = "attnsweep_recorder"
    unneeded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(recorder.__file__).parent, folder / name, ignore=unneeded)
    # Python imports sitecustomize when it starts, whatever launches it.
    begin = f"import pathlib\nimport {name}.start as start\n"
    begin += f"folder = pathlib.Path({str(folder)!r})\nstart.{act}\n"
    (folder / "sitecustomize.py").write_text(begin, encoding="utf-8")
