"""Commands that run a program: `shapes`, `exec` and `speedup`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnsweep.cli import options
from attnsweep.cli.app import FIND, GUARD, command, print_end, without_arch
from attnsweep.core.errors import AttnsweepError, NoGpuError, SpecError, reason
from attnsweep.reports.terminal import ProgressForm, console, errors

if TYPE_CHECKING:
    from attnsweep.serve.recorded_calls import Recorded
    from attnsweep.specs.load import ProblemEntry, SweepSpec


@command(FIND)
def shapes(
    out: Annotated[Path, typer.Argument()],
    command: options.Command,
    arch: Annotated[str | None, options.arch("One of {} (default: this GPU's).")] = None,
    force: bool = False,
    every_call: bool = False,
    top: Annotated[int, typer.Option(min=1, max=1000)] = 50,
) -> None:
    """Run a PyTorch program unchanged, and write its attention calls to OUT as a spec.

    Every shape that `scaled_dot_product_attention` is called with from Python, in all processes,
    becomes a problem with the number of its calls; `attnsweep run OUT` then says what the whole
    program gains. Calls of compiled code and C++ are counted with `--every-call` only. Calls that
    no family can serve are listed with the reason. The exit code is the program's; 1 if it is 0 but
    no problem was found.

    :out OUT: Spec to write.
    :--force: Replace OUT if it is there.
    :--every-call: Count calls of compiled code and C++ too; costs more.
    :--top: Most problems: the costliest shapes.

    $ attnsweep shapes model.yaml -- python generate.py --tokens 128
    $ attnsweep shapes model.yaml --arch sm_90a -- python -m my.training
    $ attnsweep shapes model.yaml --force -- torchrun --nproc-per-node 8 train.py
    """
    from attnsweep.family.discover import discover
    from attnsweep.serve.recorded_calls import lines_of, refuse, write
    from attnsweep.tools import target as cards

    refuse(out, force)
    families = discover()
    try:
        target = cards.target_of(families, arch)
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
        why = reason(error)
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
    """Write start-up files, by which each Python with this folder on PYTHONPATH begins with `act`.

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


# Problems that take this share of the attention's time are swept, each for so long at least.
_SHARE, _LEAST_S = 0.95, 20
# Pairs of runs of the program; fewer if they take longer than the budget, but two.
_PAIRS, _LEAST_PAIRS = 6, 2
_FILES = "attnsweep-speedup.json"


@command(GUARD)
def exec_(package: Annotated[str, typer.Argument()], command: options.Command) -> None:
    """Run a PyTorch program unchanged, with a package in the place of PyTorch's attention.

    The package is enabled in every Python process that the command starts, right after PyTorch is
    imported, and nowhere else. The exit code is the program's; 1 if it is 0 but the package could
    not be enabled.

    :package PACKAGE: Directory of an exported package, or the name of an installed one; `attnsweep`
        has the winners that come with it.

    $ attnsweep exec my_attention -- python generate.py --tokens 128
    $ attnsweep exec attnsweep -- torchrun --nproc-per-node 8 train.py
    """
    with tempfile.TemporaryDirectory(prefix="attnsweep-exec-") as folder:
        code, calls, failed = run_served(command, package, Path(folder))
    for error in failed:
        errors.print(f"{package} was not enabled: {error}", markup=False, soft_wrap=True)
    for wrong in _wrong_kernels(package):
        again = f"make it anew: attnsweep export RUN... --out {package}"
        errors.print(f"{package}: {wrong}; {again}", markup=False, soft_wrap=True)
    used = _calls_text(calls) if calls or failed else "not used: no process imported PyTorch"
    errors.print(f"{package}: {used}", markup=False, soft_wrap=True)
    raise typer.Exit(code or (1 if failed else 0))


@command(FIND)
def speedup(
    out: Annotated[Path, typer.Argument()],
    command: options.Command,
    budget_s: Annotated[int, typer.Option(min=_LEAST_S)] = 600,
    form: options.Progress = ProgressForm.AUTO,
    wait: options.Wait = False,
) -> None:
    """Make a PyTorch program faster, and say by how much.

    Records the program's attention calls, sweeps the shapes that take 95 % of their time, exports
    the winners to OUT/package, and runs the program without and with that package in turns. The
    same command again continues where it ended. Nothing stays enabled: `attnsweep exec OUT/package
    -- COMMAND` runs the program so.

    :out OUT: Directory of all that it makes.
    :--budget-s: Seconds for candidates of all shapes.

    $ attnsweep speedup out -- python generate.py --tokens 128
    $ attnsweep speedup out --budget-s 1800 -- python -m my.training
    """
    _begin(out, command)
    spec = _recorded(out / "model.yaml", command)
    _export(out, costliest(spec, budget_s), form, wait)
    digest = hashlib.sha256(next(out.glob("package/*/table.json")).read_bytes()).hexdigest()[:16]
    pairs = list(_timed(out, command, digest, budget_s))
    console.print(said_of(shlex.join(command), pairs), markup=False, soft_wrap=True)
    again = shlex.join(["attnsweep", "exec", str(out / "package"), "--", *command])
    errors.print(f"it is used by: {again}", markup=False, soft_wrap=True)


def _wrong_kernels(package: str) -> list[str]:
    """The known faults of a package's kernels; the package is a directory or installed."""
    from attnsweep.serve.export_code import wrong_kernels

    found = [*Path(package).glob("*/table.json")]
    if not Path(package).is_dir() and package.isidentifier():
        spec = importlib.util.find_spec(package)
        origins = [spec.origin] if spec is not None and spec.origin else []
        found = [Path(origin).with_name("table.json") for origin in origins]
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return wrong_kernels(json.loads(found[0].read_text(encoding="utf-8")))
    return []


def run_served(
    command: Sequence[str], package: str, folder: Path
) -> tuple[int, Counter[str], list[str]]:
    """Run a command with a package on: its exit code, calls by what served them, and failures.

    Raises SpecError if there is no such package.
    """
    from attnsweep.serve.recorder.log import ERRORS
    from attnsweep.serve.recorder.start import SERVED

    place, name = Path(package), package
    if place.is_dir():
        tables = sorted(place.glob("*/table.json"))
        if not tables:
            hint = "give what attnsweep export wrote to --out"
            raise SpecError("is no exported package", where=package, hint=hint)
        name = tables[0].parent.name
    elif not all(part.isidentifier() for part in package.split(".")):
        raise SpecError("no such directory, and no name of a package", where=package)
    install(folder, f"enable(folder, {name!r})")
    code = run_program(command, folder, *([place.resolve()] if place.is_dir() else []))
    calls: Counter[str] = Counter()
    for path in folder.glob(f"*{SERVED}"):
        calls.update(json.loads(path.read_text(encoding="utf-8")))
    failed = {
        path.read_text(encoding="utf-8").strip().splitlines()[-1]
        for path in folder.glob(f"*{ERRORS}")
    }
    return code, calls, sorted(failed)


def said_of(program: str, pairs: Sequence[dict[str, Any]]) -> str:
    """`python x.py: 12.3 → 11.1 s, 1.11 times as fast (95 % interval 1.09–1.13, 6 pairs …)`."""
    from attnsweep.choose.stats import ratio_interval

    before, after = ([pair[name] for pair in pairs] for name in ("before_s", "after_s"))
    low, high = ratio_interval(before, after)
    ratio = statistics.median(a / b for a, b in zip(before, after, strict=True))
    what = "95 % interval" if len(pairs) >= _PAIRS else "range"
    how = f"{what} {low:.3f}–{high:.3f}, {len(pairs)} pairs of runs"
    took = f"{statistics.median(before):.4g} → {statistics.median(after):.4g} s"
    said = f"{ratio:.3f} times as fast" if not low <= 1 <= high else "no difference is shown"
    return f"{program}: {took}, {said} ({how}); {_calls_text(Counter(pairs[-1]['calls']))}"


def _calls_text(calls: Counter[str]) -> str:
    """How many calls went to kernels, of how many, and why the others did not."""
    ours = sum(n for name, n in calls.items() if name.startswith("kernel"))
    others = [
        f"{n:,} {name}" for name, n in calls.most_common() if not name.startswith("kernel") and n
    ]
    rest = f" ({', '.join(others)})" if others else ""
    return f"{ours:,} of {calls.total():,} attention calls went to its kernels{rest}"


def _begin(out: Path, command: Sequence[str]) -> None:
    """Make OUT, or reuse it if the same command made it. Raises SpecError, NoGpuError."""
    from attnsweep.family.discover import discover
    from attnsweep.tools import target as cards

    own = out / _FILES
    if out.exists() and not own.is_file() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError(
            "is no directory of attnsweep speedup", where=str(out), hint="name a new one"
        )
    if not own.is_file():
        cards.here(discover())  # what is missing is said before OUT is made
    out.mkdir(parents=True, exist_ok=True)
    if own.is_file() and json.loads(own.read_text(encoding="utf-8"))["command"] != [*command]:
        before = shlex.join(json.loads(own.read_text(encoding="utf-8"))["command"])
        raise SpecError(f"is of another command: {before}", where=str(out), hint="name a new one")
    own.write_text(json.dumps({"command": [*command]}) + "\n", encoding="utf-8")


def _recorded(path: Path, command: Sequence[str]) -> SweepSpec:
    """The spec of the program's calls, which is recorded if it is not there."""
    from attnsweep.family.discover import discover
    from attnsweep.serve.recorded_calls import lines_of, write
    from attnsweep.specs.load import load_spec
    from attnsweep.tools import target as cards

    if not path.is_file():
        target = cards.here(discover())
        code, recorded = record(command)
        if code:
            raise _Failed(f"the program ended with exit code {code}", code)
        found = write(path, recorded, target)
        for line in lines_of(found, recorded):
            errors.print(line, markup=False, soft_wrap=True)
        if not found.problems:
            raise _Failed("no call can be served", 1)
    return load_spec(path, discover)


class _Failed(AttnsweepError):
    """Raised when the user's program fails, or has no attention call to make faster."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.exit_code = code


def costliest(spec: SweepSpec, budget_s: int) -> SweepSpec:
    """The spec of the problems that take most of the time, as many as the budget has time for."""
    from attnsweep.serve.recorded_calls import cost_us

    def cost(entry: ProblemEntry) -> float:
        return cost_us(entry.problem) * (entry.calls or 1)

    ordered = sorted(spec.problems, key=cost, reverse=True)[: budget_s // _LEAST_S]
    whole, so_far, chosen = sum(map(cost, spec.problems)), 0.0, []
    for entry in ordered:
        if so_far < _SHARE * whole:
            chosen.append(entry)
        so_far += cost(entry)
    search = spec.search.model_copy(update={"budget_s": budget_s // len(chosen)})
    pytorchs = tuple(name for name in spec.baselines if name.startswith("torch_"))
    return replace(spec, problems=tuple(chosen), search=search, baselines=pytorchs)


def _export(out: Path, spec: SweepSpec, form: ProgressForm, wait: bool) -> None:
    """Sweep what is not swept, and write the package of the winners."""
    import compileall

    from attnsweep.reports import progress
    from attnsweep.serve.export import export
    from attnsweep.sweep import session

    with progress.watch(errors, form) as observer:
        done = session.run(spec, results=out / "results", wait=wait, observer=observer)
    print_end(done)
    if done.interrupted or done.no_card:
        raise typer.Exit(done.exit_code)
    with progress.watch(errors, form) as observer:
        runs, compiled = [done.run.directory], observer.exporting
        export(runs, out / "package", spec.families, name="tuned", compiled=compiled)
    # Where Python writes no bytecode, each run would compile it: a program of 6.7 s took 7.5.
    compileall.compile_dir(out / "package", quiet=2)


def _timed(
    out: Path, command: Sequence[str], digest: str, budget_s: int
) -> Iterator[dict[str, Any]]:
    """Pairs of runs without and with the package, in turns; those that are known come first."""
    path, begin = out / "times.jsonl", time.monotonic()
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    known = [pair for pair in map(json.loads, lines) if pair["package"] == digest][:_PAIRS]
    yield from known
    for number in range(len(known), _PAIRS):
        if number >= _LEAST_PAIRS and time.monotonic() - begin > budget_s:
            return
        pair: dict[str, Any] = {"package": digest}
        order = ("after_s", "before_s") if number % 2 else ("before_s", "after_s")
        for run, which in enumerate(order, 2 * number + 1):
            errors.print(f"run {run} of {2 * _PAIRS}", markup=False)
            with tempfile.TemporaryDirectory(prefix="attnsweep-exec-") as folder:
                failed: list[str] = []
                started = time.perf_counter()
                if which == "before_s":
                    code = run_program(command)
                else:
                    ran = run_served(command, str(out / "package"), Path(folder))
                    code, pair["calls"], failed = ran
                pair[which] = time.perf_counter() - started
            if code or failed:
                what = f"the program ended with exit code {code}" if code else failed[0]
                raise _Failed(f"{which.removesuffix('_s')}: {what}", code or 1)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(pair) + "\n")
        yield pair
