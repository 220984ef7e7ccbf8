"""Callables of the user's as families: their configs on a problem, and one of them compiled."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from attnsweep.compile.candidate import Build
from attnsweep.compile.launches import CallPlan, Candidate
from attnsweep.compile.nvrtc import NOW, PERHAPS, SOON, Compiler, Cubin
from attnsweep.compile.trace import Traced, Tracer, Tracers, said_of
from attnsweep.core.callables import Asked
from attnsweep.core.cases import called_cases, served_cases, small_cases
from attnsweep.core.errors import CompileError, SpecError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import THIS_BINARY, THIS_SHAPE
from attnsweep.family.called import USUAL, CalledFamily, Tuning
from attnsweep.family.family import Config, Family
from attnsweep.family.launch import Launch
from attnsweep.family.params import Param
from attnsweep.family.space import Selection, Space, Values
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import PlannedProblem, plan

SAY_SO = (
    "what it does not serve, such as grouped heads, other lengths, masks or a softcap, "
    "supports(problem) in its file must refuse"
)
"""What to do about a callable that raises."""

CONFIGS = "config"
"""The axis of variants that an autotuner's own configs are."""


def tracers_of(compiler: Compiler) -> Tracers:
    """The compiler's tracers, which end with it."""
    if compiler.tracers is None:
        compiler.tracers = Tracers(compiler.arch, compiler.cache_dir)
    return compiler.tracers


def with_calls(spec: SweepSpec, tracers: Tracers) -> SweepSpec:
    """The spec with the configs of its callables, which their files alone know.

    A callable without parameters has those of the autotuner that it launches: each config is a
    variant, and what the autotuner's own function leaves on a problem is a rule. Raises SpecError
    if it launches none, KernelError if a file cannot be imported.
    """
    families: dict[str, Family] = dict(spec.families)
    kernels = dict(spec.kernels)
    for name, selection in spec.kernels.items():
        family = families.get(spec.family_of(name))
        if not isinstance(family, CalledFamily):
            continue
        problems = [entry.problem for entry in spec.problems if name in entry.kernels]
        try:
            known = known_space(family, selection, tracers.of(family.call), problems)
        except CompileError as error:
            where, what = f"kernels: {name}", said_of(family.call, error.what)
            raised = "no autotuner" not in what
            own = f"in a spec, as {name}: {{call: '{family.call}', M: [64, 128]}}"
            hint = SAY_SO if raised else f"{own}; or give its kernel an autotuner"
            raise SpecError(what, where=where, hint=hint) from error
        families[name], kernels[name] = known
    return replace(spec, kernels=kernels, families=families)


def plan_alone(spec: SweepSpec, arch: Arch) -> tuple[PlannedProblem, ...]:
    """The plan of a spec, with the configs of its callables, where nothing else is to be traced."""
    with Tracers(arch) as tracers:
        return plan(with_calls(spec, tracers), arch)


def known_space(
    family: CalledFamily, selection: Selection, tracer: Tracer, problems: Sequence[Problem]
) -> tuple[CalledFamily, Selection]:
    """Fill in what only the user's file knows, such as its autotuner's configs: see with_calls.

    Several autotuners of a call are axes of variants; widened configs are values of parameters.

    Raises CompileError if the call launches no autotuner, and no parameter is selected.
    """
    family = family.with_(refused=tracer.refusals(problems), closure=tracer.closure)
    able = [problem for problem in problems if problem not in family.refused]
    if able and not selection.names:
        tunings = {problem: tracer.space(problem, widen=family.widen) for problem in able}
        family, selection = _tuned(family, selection, tunings)
    return _kept(family, selection, tracer, able), selection


def configs_with(
    values: Mapping[str, Value], tracer: Tracer, problem: Problem
) -> tuple[Space, list[Config]]:
    """A callable's space on a problem as its file has it, and the configs that have these values.

    If none has them, or it launches no autotuner, a config of these values alone.
    """
    family = CalledFamily(tracer.call.rpartition(":")[2], "", (), call=tracer.call)
    try:
        family, selection = known_space(family, Selection(), tracer, [problem])
    except CompileError:
        selection = Selection({name: (value,) for name, value in values.items()})
    space = Space.build(family, problem, tracer.arch, selection)
    return space, [c for c in space.configs if values.items() <= c.items()] or [Config(values)]


def configs_of(tuning: Tuning) -> tuple[list[Config], list[Config]]:
    """An autotuner's configs, each once, and those it keeps; without options that none changes."""
    own = [name for name in tuning.configs[0] if _varies(name, tuning.configs)]
    every, kept = (
        [*dict.fromkeys(Config({name: values[name] for name in own}) for values in given)]
        for given in (tuning.configs, tuning.kept)
    )
    return every, kept


def _tuned(
    family: CalledFamily, selection: Selection, tunings: Mapping[Problem, Sequence[Tuning]]
) -> tuple[CalledFamily, Selection]:
    """The family and the selection of the autotuners' configs."""
    made, variants = family.with_(params=()), dict[str, dict[str, Values]]()
    for number, tuning in enumerate(first := next(iter(tunings.values()))):
        every, _ = configs_of(tuning)
        own = {name: tuple(dict.fromkeys(each[name] for each in every)) for name in every[0]}
        made.params += tuple(Param(name, values, "") for name, values in own.items())
        one = len(first) == 1
        variants[CONFIGS if one else tuning.name] = {
            each.label: {name: (value,) for name, value in each.items()} for each in every
        }
        kept = {problem: {*configs_of(met[number])[1]} for problem, met in tunings.items()}
        if any(len(each) < len(every) for each in kept.values()):
            rule = "prune_configs_by" if one else f"prune_configs_by_{tuning.name}"
            said = f"prune_configs_by of {tuning.name} keeps it"
            made.rules[rule] = (said, partial(_is_kept, kept, [*own]))
    if family.widen:
        return made, replace(selection, values={p.name: p.values for p in made.params})
    return made, replace(selection, variants=variants)


def _is_kept(
    kept: Mapping[Problem, Collection[Config]],
    own: Sequence[str],
    config: Config,
    problem: Problem,
    arch: Arch,
) -> bool:
    """Whether an autotuner, whose names are `own`, keeps its part of a config on a problem."""
    return problem not in kept or Config({name: config[name] for name in own}) in kept[problem]


def _varies(name: str, configs: Sequence[Mapping[str, Value]]) -> bool:
    """Whether a name is a parameter: all but the options that no config gives another value."""
    usual = name.rpartition(".")[2]
    return usual not in USUAL or any(each[name] != USUAL[usual] for each in configs)


def _kept(
    family: CalledFamily, selection: Selection, tracer: Tracer, problems: Sequence[Problem]
) -> CalledFamily:
    """The family with the rule `keep`, if the user's file has one beside the function."""
    configs = [
        Config(dict(zip(values, combination, strict=True)))
        for _, values in selection.groups()
        for combination in itertools.product(*values.values())
    ]
    answers = tracer.keep(problems, configs)
    if answers is not None:
        family.rules["keep"] = (
            f"keep of {family.call}",
            lambda config, problem, arch: not answers.get((problem.label, Config(dict(config)))),  # noqa: ARG005
        )
    return family


@dataclass
class CalledBuild(Build):
    """A config of a callable on its way to compiled kernels."""

    def _keys(self) -> tuple[str, ...]:
        """The address of its trace."""
        return (self._tracer.key(self.problem, self.config),)

    def submit(self, turn: int = NOW) -> None:
        """Start to trace and compile the call; nothing if that has begun, or may be in vain."""
        if turn in (SOON, PERHAPS) or "call" in self.futures:
            return
        traced: Future[Any] = self._tracer.submit(self.problem, self.config)
        self.futures["call"] = traced

    @property
    def _tracer(self) -> Tracer:
        return tracers_of(self.compiler).of(self.kernel.call)

    @property
    def traced(self) -> Traced:
        """The finished trace of the call. Raises CompileError with what went wrong."""
        found: Any = self.futures["call"].result()
        assert isinstance(found, Traced)
        return found

    def cubins(self) -> dict[str, Cubin]:
        """The machine code of each launch. Raises CompileError with what went wrong."""
        return {name: cubin for name, cubin, _ in self.traced.stages}

    @property
    def launched(self) -> dict[str, Launch]:
        """Launches by stage name; waits for the trace."""
        return {name: launch for name, _, launch in self.traced.stages}

    @property
    def facts(self) -> dict[str, object]:
        """The `call` entry of the row: function, closure, versions, what its proof covers."""
        traced, call = self.traced, self.kernel.call
        facts = {"function": call, "closure": traced.closure, **self._tracer.versions}
        covers = THIS_BINARY if traced.cases else "any length, each by code of its own"
        covers = THIS_SHAPE if self._of_one_shape else covers
        return {"call": facts | {"covers": traced.why or covers}}

    @property
    def read_later(self) -> str:
        """See Build: of what its launcher imports when it is called."""
        return self._tracer.read_later(self.keys[0])

    @property
    def files(self) -> Mapping[str, bytes]:
        """See Build: those that were imported, if they are as they were then."""
        digests = self._tracer.files
        texts = {path: Path(path).read_bytes() for path in digests if Path(path).is_file()}
        whole = {
            p: text for p, text in texts.items() if hashlib.sha256(text).hexdigest() == digests[p]
        }
        top = os.path.commonpath([os.path.dirname(path) for path in whole]) if whole else ""
        return {os.path.relpath(path, top): text for path, text in whole.items()}

    def launches_for(self, problem: Problem) -> CallPlan:
        """The call on a problem, on which it launches what was compiled for the timed one."""
        traced = self.traced
        expects = frozenset() if traced.why else traced.hashes
        return CallPlan(problem, self.kernel.call, dict(self.config), str(traced.cache), expects)

    def candidate(self) -> Candidate:
        """All that the worker needs to call it."""
        plan = self.launches_for(self.problem)
        cases = self.traced.cases or ()
        # What a factory builds is of one shape: TileLang compiled the eleven cases of a candidate
        # for 30 s while the card waited, and they are other code than what is timed.
        if not (cases or self._of_one_shape):
            cases = served_cases(called_cases(self.problem), self.problem, self._as_grouped)
        expects = plan.expects if self.traced.cases else frozenset()
        checks = tuple(replace(plan, problem=case.problem, expects=expects) for case in cases)
        own = self.kernel.name, dict(self.config), plan, checks, self.kernel.rounds_scores
        return Candidate(*own, deterministic=False, cases=cases)

    def on_any_length(self) -> Callable[[], Candidate]:
        """Compile the usual small cases, each for its own lengths; returns what waits for them.

        That gives the candidate with these cases, or raises CompileError.
        """
        cases, config = called_cases(self.problem), dict(self.config)
        asked = [self._tracer.submit(case.problem, config, cases=False) for case in cases]

        def candidate() -> Candidate:
            checks = tuple(
                CallPlan(case.problem, self.kernel.call, config, str(traced.cache), traced.hashes)
                for case, traced in ((c, f.result()) for c, f in zip(cases, asked, strict=True))
            )
            every = cases == small_cases(self.problem)
            return replace(self.candidate(), checks=checks, cases=None if every else cases)

        return candidate

    @property
    def _of_one_shape(self) -> bool:
        return Asked.of(self.kernel.call).factory and not self.traced.cases

    def _as_grouped(self, problem: Problem) -> bool:
        """Whether its groups of heads are the timed problem's: not all launchers have any."""
        return problem.heads * self.problem.heads_kv == problem.heads_kv * self.problem.heads

    def machine_code(self) -> tuple[object, ...]:
        """See machine_code; of a call that is not traced, equal for equal configs."""
        return self.keys if self.traced.why else machine_code(self.traced)


def build_of(
    kernel: Family,
    config: Config,
    problem: Problem,
    compiler: Compiler,
    *,
    workspace_limit: int | None = None,
    variant: Mapping[str, str] | None = None,
) -> Build:
    """The build of a config of any family; nothing is compiled yet."""
    kind = CalledBuild if kernel.call else Build
    return kind(kernel, config, problem, compiler, workspace_limit, variant or {})


def builds_of(
    space: Space, configs: Iterable[Config], compiler: Compiler, workspace_limit: int | None
) -> list[Build]:
    """The builds of some of a space's configs."""
    how: Any = {"workspace_limit": workspace_limit}
    return [
        build_of(space.kernel, c, space.problem, compiler, variant=space.variants.get(c), **how)
        for c in configs
    ]


def machine_code(traced: Traced) -> tuple[object, ...]:
    """Equal for two configs that run the same code in the same way, whatever its debug info."""
    code = (
        (code_digest(c.path, c.digest), n.grid, n.threads, n.smem_bytes, n.args)
        for _, c, n in traced.stages
    )
    return (*code, traced.host)


@cache
def code_digest(path: Path, digest: str) -> str:
    """SHA-256 of what of a cubin is loaded: code, constants, memory; no debug information."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            name = section.name
            if name.startswith((".text.", ".nv.constant", ".nv.info.", ".nv.shared", ".nv.global")):
                found.update(f"{name}\0{section['sh_size']}\0".encode() + section.data())
    return found.hexdigest()
