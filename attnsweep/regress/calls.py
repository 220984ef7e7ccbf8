"""Two versions of a callable of the user's, timed in turns: may this change go in?"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from attnsweep.bench.worker import Worker
from attnsweep.compile.calls import build_of, configs_of, tracers_of
from attnsweep.compile.cubin import compiler_for
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.callables import CALLABLE, Asked
from attnsweep.core.errors import CompileError, NoGpuError, SpecError
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem, Value
from attnsweep.device.lock import held
from attnsweep.family.called import CalledFamily
from attnsweep.family.family import Config, Family
from attnsweep.regress.budget import Budget
from attnsweep.regress.live import PROVES, Gate, Pair, Tell, not_compared
from attnsweep.regress.verdicts import Comparison, Finding
from attnsweep.specs.load import SweepSpec, spec_of, with_problems
from attnsweep.specs.plan import arch_of
from attnsweep.specs.yaml_file import Document

_OLD = "--old FILE.py@REV:FUNCTION"


@contextmanager
def at_revision(old: str) -> Iterator[str]:
    """`FILE.py@REV:FUNCTION` as a callable whose file lies beside all files of that revision.

    Without @REV it is the callable itself. Raises SpecError.
    """
    named, _, options = old.partition("?")
    place, _, function = named.rpartition(":")
    file, _, revision = place.partition("@")
    call = f"{file}:{function}" + (f"?{options}" if options else "")
    if CALLABLE.fullmatch(call) is None:
        raise SpecError(f"no callable: {old!r}", where="--old", hint=f"write {_OLD}")
    if not revision:
        yield call
        return
    if not file.endswith(".py"):
        raise SpecError("a revision needs a file", where=f"--old {old}", hint=f"write {_OLD}")
    with TemporaryDirectory(prefix="attnsweep-old-", ignore_cleanup_errors=True) as tree:
        yield str(Path(tree, _unpacked(Path(file), revision, Path(tree)))) + call[len(file) :]


def _unpacked(file: Path, revision: str, tree: Path) -> Path:
    """Unpack a revision of a file's repository; returns where the file is in it."""
    top = Path(_git(file, "rev-parse", "--show-toplevel").decode().strip())
    verify = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    commit = _git(file, *verify, said=revision)
    inside = file.resolve().relative_to(top.resolve())
    text = _git(file, "archive", "--format=tar", commit.decode().strip(), at=top)
    with tarfile.open(fileobj=io.BytesIO(text)) as archive:
        archive.extractall(tree, filter="data")
    if not (tree / inside).is_file():
        what = f"{revision} has no {inside}: what is new has nothing to be compared with"
        raise SpecError(what, where=f"--old {file}@{revision}")
    return inside


def _git(file: Path, *command: str, said: str = "", at: Path | None = None) -> bytes:
    place = at or file.resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(place), *command], capture_output=True, check=False, timeout=60
        )
    except OSError as error:
        raise SpecError(f"git cannot be run: {error.strerror}", where=f"--old {file}") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        what = f"no revision {said!r}" if said else (why or ["git failed"])[0]
        hint = "`git log` lists what there is"
        if said and _git(file, "rev-parse", "--is-shallow-repository").strip() == b"true":
            hint = (
                "this clone is shallow: `git fetch --unshallow`; actions/checkout: fetch-depth: 0"
            )
        raise SpecError(what, where=f"--old {file}", hint=hint)
    return done.stdout


@contextmanager
def both_calls(
    old: str, new: str, problems: Sequence[Problem]
) -> Iterator[tuple[SweepSpec, Family]]:
    """A spec of the new callable, and the old one, whose files lie there until the end.

    Raises SpecError.
    """
    spec = _spec_of(new, problems)
    with at_revision(old) as call:
        yield spec, CalledFamily("old", old, (), call=call)


def pairs_of_calls(
    spec: SweepSpec,
    old: Family,
    config: Mapping[str, Value],
    compiler: Compiler,
    slower: float | None = None,
) -> list[Pair | Finding]:
    """A pair for each problem, already compiling with one config. slower: see check_calls."""
    found: list[Pair | Finding] = []
    for problem in (entry.problem for entry in spec.problems):
        own = Config(config), problem, compiler
        build, before = (build_of(side, *own) for side in (spec.families[_NEW], old))
        for each in (build, before):
            each.submit()
        row = {"kernel": _NEW, "config": own[0].label, "registers": None, "smem_bytes": None}
        share = spec.check.slower if slower is None else slower
        found.append(Pair(problem, share, row, before, build))
    return found


def covered(spec: SweepSpec, old: Family, config: Mapping[str, Value], compiler: Compiler) -> str:
    """A sentence on the shapes and the config that were compared.

    Without one, an autotuner stays at the first of its own, which only one side may have changed.
    """
    if config:
        return "It covers these shapes and this config"
    problem, said = spec.problems[0].problem, []
    for side in (old, spec.families[_NEW]):
        with suppress(CompileError):  # no autotuner: the function's defaults
            tunings = tracers_of(compiler).of(side.call).space(problem)
            said.append(" ".join(configs_of(tuning)[0][0].label for tuning in tunings))
    if not said:
        return "It covers these shapes and the functions' defaults"
    first = " → ".join(dict.fromkeys(said))
    return (
        "It covers these shapes and the first config alone of the autotuner, "
        f"{first} (--config names another),"
    )


def check_calls(
    old: str,
    new: str,
    problems: Sequence[Problem],
    config: Mapping[str, Value],
    *,
    slower: float | None = None,
    budget_s: float | None = None,
    wait: bool = False,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
    tell: Tell | None = None,
) -> Comparison:
    """The verdict on each problem: may the callable `new` take the place of `old`?

    old: `FILE.py:FUNCTION`, or `FILE.py@REV:FUNCTION` of a revision of its repository. config: for
    both, keywords or parameters of an autotuner. Others, and errors: see live.check.
    """
    observer = observer or Observer()
    with ExitStack() as at_end:  # until the worker has stopped
        spec, before = at_end.enter_context(both_calls(old, new, problems))
        budget = Budget(spec.check.budget_s if budget_s is None else budget_s)
        gpu = at_end.enter_context(Worker(spec.measure.timeout_s, cache_dir=cache_dir))
        try:
            here = gpu.describe()
        except NoGpuError as error:
            raise not_compared(error) from error
        with budget.paused():
            at_end.enter_context(held(here.uuid, here.gpu, wait=wait, say=observer.note))
        compiler = compiler_for(spec, arch_of(spec, here), cache_dir)
        at_end.callback(compiler.close)
        pairs = pairs_of_calls(spec, before, config, compiler, slower)
        covers = covered(spec, before, config, compiler)
        findings = Gate(spec, gpu, observer, budget).run(pairs, tell)
    return Comparison(
        Path(old),
        Path(new),
        spec.check.slower if slower is None else slower,
        tuple(findings),
        (),
        interval="99.9 % interval",
        proves=PROVES,
        does_not_prove=f"{covers} with a warm L2, in one process that both sides share.",
        budget_s=budget.total_s,
        took_s=budget.spent_s,
    )


def config_of(text: str) -> Config:
    """`BLOCK_M=64 num_warps=4` as a config. Raises SpecError."""
    values: dict[str, Value] = {}
    for word in text.split():
        name, is_one, value = word.partition("=")
        if not is_one or not name.isidentifier():
            hint = "write NAME=VALUE, as BLOCK_M=64"
            raise SpecError(f"no value of a parameter: {word!r}", where="--config", hint=hint)
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return Config(values)


_NEW = "new"


def _spec_of(new: str, problems: Sequence[Problem]) -> SweepSpec:
    if CALLABLE.fullmatch(new) is None or Asked.of(new).strict:
        raise SpecError(f"no callable: {new!r}", where="--new", hint="write FILE.py:FUNCTION")
    problem = "{batch: 1, heads: 1, seqlen: 64, head_dim: 64}"
    text = (
        f"problems: [{problem}]\nkernels: {{{_NEW}: {{call: {json.dumps(new)}}}}}\nbaselines: []\n"
    )
    spec = spec_of(Document.parse(Path("check.yaml"), text), {})
    return with_problems(spec, problems)
