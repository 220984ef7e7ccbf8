"""Two versions of a callable of the user's, timed in turns: may this change go in?"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnsweep.compile.calls import build_of, configs_of, tracers_of
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.callables import CALLABLE, Asked
from attnsweep.core.errors import AttnsweepError, CompileError, SpecError
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import Environment
from attnsweep.family.called import CalledFamily
from attnsweep.family.family import Config, Family
from attnsweep.regress.live import Pair, Sides
from attnsweep.regress.verdicts import Finding
from attnsweep.specs.load import SweepSpec, spec_of, with_problems
from attnsweep.specs.yaml_file import Document

_OLD = "--old FILE.py@REV:FUNCTION"
_TREE = "attnsweep-old-"
# Such a folder of any check: the cache may hold what an earlier one said of the same files.
_IN_TREE = re.compile(rf"[\w./-]*{_TREE}\w+/([\w./-]+\.py)")


@contextmanager
def at_revision(old: str) -> Iterator[tuple[str, Callable[[str], str]]]:
    """`FILE.py@REV:FUNCTION` as a callable whose file lies beside all files of that revision.

    Without @REV it is the callable itself. Also gives a function that names those files so in a
    text. Raises SpecError.
    """
    named, _, options = old.partition("?")
    place, _, function = named.rpartition(":")
    file, _, revision = place.partition("@")
    call = f"{file}:{function}" + (f"?{options}" if options else "")
    if CALLABLE.fullmatch(call) is None:
        raise SpecError(f"no callable: {old!r}", where="--old", hint=f"write {_OLD}")
    if not revision:
        yield call, str
        return
    if not file.endswith(".py"):
        raise SpecError("a revision needs a file", where=f"--old {old}", hint=f"write {_OLD}")
    with TemporaryDirectory(prefix=_TREE, ignore_cleanup_errors=True) as tree:
        inside = _unpacked(Path(file), revision, Path(tree))

        def shown(text: str) -> str:
            own = {str(inside): file}
            return _IN_TREE.sub(lambda path: f"{own.get(path[1], path[1])}@{revision}", text)

        yield str(Path(tree, inside)) + call[len(file) :], shown


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


@dataclass(frozen=True)
class Calls(Sides):
    """Two callables with one config: keywords of both, or parameters of an autotuner."""

    before: Family = field(kw_only=True)
    config: Mapping[str, Value] = field(kw_only=True)
    named: Callable[[str], str] = field(kw_only=True)

    def told(self, finding: Finding) -> Finding:
        """See Sides."""
        return replace(finding, why=self.named(finding.why))

    def pairs(self, compiler: Compiler, _here: Environment | None) -> list[Pair | Finding]:
        """See Sides."""
        found: list[Pair | Finding] = []
        share = self.spec.check.slower if self.slower is None else self.slower
        for problem in (entry.problem for entry in self.spec.problems):
            own = Config(self.config), problem, compiler
            before, build = (build_of(side, *own) for side in self._families)
            for each in (build, before):
                each.submit()
            row = {"kernel": _NEW, "config": own[0].label, "registers": None, "smem_bytes": None}
            found.append(Pair(problem, share, row, before, build))
        return found

    @property
    def _families(self) -> tuple[Family, Family]:
        return self.before, self.spec.families[_NEW]

    def covers(self, compiler: Compiler) -> str:
        """A sentence on the shapes and the config.

        Without one, an autotuner stays at the first of its own, which only one side may have
        changed.
        """
        if self.config:
            return "It covers these shapes and this config"
        problem, said = self.spec.problems[0].problem, []
        for side in self._families:
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


@contextmanager
def calls_of(
    old: str,
    new: str,
    problems: Sequence[Problem],
    config: Mapping[str, Value],
    slower: float | None = None,
) -> Iterator[Calls]:
    """The callable `new` against `old`, whose files lie there until the end. Raises SpecError.

    old: `FILE.py:FUNCTION`, or `FILE.py@REV:FUNCTION` of a revision of its repository.
    """
    spec = _spec_of(new, problems)
    with at_revision(old) as (call, named):
        before = CalledFamily("old", old, (), call=call)
        try:
            how: dict[str, Any] = {"before": before, "config": config, "named": named}
            yield Calls(spec, Path(old), Path(new), slower, **how)
        except AttnsweepError as error:
            error.what, error.where = named(error.what), named(error.where or "") or None
            raise


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
