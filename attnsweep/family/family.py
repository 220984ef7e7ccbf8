"""The declaration of a kernel family: its rules, stages and launches.

A family is `NAME.cu` (the CUDA template) and `NAME.py`, which builds one `kernel = Family(...)`.
Only attnsweep.serve, which launches one from PyTorch, knows a family by name. See
docs/writing-a-kernel.md.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnsweep.core.errors import KernelError
from attnsweep.core.formats import FORMATS
from attnsweep.core.hardware import Arch
from attnsweep.core.ops import ORDERS
from attnsweep.core.problem import Problem, Value
from attnsweep.family import time_limit, validate
from attnsweep.family.chunks import IN_CHUNKS, Chunks
from attnsweep.family.chunks import Schedule as Schedule
from attnsweep.family.launch import Arg as Arg
from attnsweep.family.launch import Launch as Launch
from attnsweep.family.launch import TensorMap as TensorMap
from attnsweep.family.params import SMS as SMS
from attnsweep.family.params import Config as Config
from attnsweep.family.params import Param as Param
from attnsweep.family.params import text_of
from attnsweep.family.params import values_in as values_in
from attnsweep.family.validate import Fault

Rule = Callable[[Config, Problem, Arch], bool]
LaunchBuilder = Callable[[Config, Problem, Arch], "Launch | None"]
WorkspaceBuilder = Callable[[Config, Problem], dict[str, int]]


def _text_of_dims(dims: tuple[int, ...] | range) -> str:
    if isinstance(dims, range):
        return f"{dims[0]} to {dims[-1]} in steps of {dims.step}"
    return ", ".join(map(str, dims))


def _no_workspace(config: Config, problem: Problem) -> dict[str, int]:
    return {}


# The rule that every family has: CUDA can launch its threads, shared memory and grid.
BLOCK_LIMITS = "block_limits"
# Ctrl-C names the function that has run for so long; it is then why nothing else happened.
_SLOW_S = 0.5

# Compile-time facts of a problem that a stage may ask for.
PROBLEM_CONSTANTS: dict[str, Callable[[Problem], int]] = {
    "HEAD_DIM": lambda p: p.head_dim,
    "IS_BF16": lambda p: int(p.dtype == "bf16"),
    "CAUSAL": lambda p: int(p.kind == "causal"),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch of a pipeline. Its compiler gets only `params` and `constants`, as -D.

    strided: what STRIDED code, which serves models, gets after its arguments: sizes of the problem
    by name, and of each tensor the elements from batch to batch, head to head and row to row.
    options: the family's compiler options, and -I with each of its include directories.
    """

    name: str
    params: tuple[str, ...]
    constants: tuple[str, ...]
    launch: LaunchBuilder
    strided: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def defines(self, config: Config, problem: Problem, launch: Launch) -> dict[str, str]:
        """The -D options of this stage: STAGE_<NAME>=1, parameters, problem constants, extras.

        A name that begins with a hyphen is a compiler option as it is.
        """
        out = {f"STAGE_{self.name.upper()}": "1"}
        for name in self.params:
            value = config[name]
            if isinstance(value, str) and value.startswith("-"):
                out[value] = ""
            elif isinstance(value, str):
                out[f"{name}_{value.upper()}"] = "1"
            else:
                out[name] = text_of(value)
        out |= {name: str(PROBLEM_CONSTANTS[name](problem)) for name in self.constants}
        out |= {name: str(value) for name, value in launch.defines.items()}
        return out | dict.fromkeys(self.options, "")


@dataclass
class Family:
    """A kernel family. `source` is the .cu file next to the declaration.

    rounds_scores: how often the family rounds scores to the problem's dtype (1 if it stores them
    between stages); the error limit comes from the same maths with scores rounded as often.
    head_dims: the supported ones, as a tuple or a range. head_dims_v: those that v and o may have
    where they differ from q's and k's; without, they may not. value_in_key: it serves problems that
    have no v, and no others. masks: the kinds that it can: full,
    causal, window, and boolean if it reads `mask`. layouts: dense, padded if it reads `key_range`,
    packed if it reads `cu_seqlens_q` and `cu_seqlens_k`, and paged if it reads `block_table` and
    `seqused_k`, with each of its masks. For all of those it must have empty_rows, since the inputs
    are known on the device alone. cache_dtypes: how k and v of a paged layout may be stored, if not
    as q is. scores: what it
    can make of them, of softcap, sinks and bias, which is minus infinity in places. deterministic:
    equal calls give equal bits, and the bits of a head follow from its own q, k and v alone, which
    is checked; False for a family with atomic sums; or the name of a switch with which they do.
    empty_rows: it writes 0, and a log-sum-exp of minus infinity, for a query that sees no key. lse:
    name of the switch with which the family writes the log-sum-exp of every row (float32, natural)
    to the workspace `lse`; it is then checked too. usual_head_dims: those of a range that tests
    compile and check; without, its first, second and last. ops: what its calls compute: forward,
    backward. supports: what else a problem must be, as pairs of a sentence and a function of it;
    its cases are made to be so. order: `bshd` if q, k, v, o and their gradients lie in memory as
    (batch, seqlen, heads, head_dim), as FlashAttention has them. include_dirs: where its headers
    lie, beside its own directory. compile_options: of NVRTC, for each of its stages. chunks:
    how its calls are cut, and the modes that say so.
    """

    name: str
    summary: str
    params: tuple[Param, ...]
    min_arch: str = "sm_80"
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    head_dims: tuple[int, ...] | range = (64, 128, 256)
    masks: tuple[str, ...] = ("full", "causal")
    layouts: tuple[str, ...] = ("dense",)
    cache_dtypes: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    empty_rows: bool = False
    rounds_scores: int = 0
    deterministic: bool | str = True
    lse: str = ""
    usual_head_dims: tuple[int, ...] = ()
    head_dims_v: tuple[int, ...] | range = ()
    value_in_key: bool = False
    ops: tuple[str, ...] = ("forward",)
    supports: tuple[tuple[str, Callable[[Problem], bool]], ...] = ()
    order: str = ORDERS[0]
    include_dirs: tuple[str | Path, ...] = ()
    compile_options: tuple[str, ...] = ()
    chunks: Chunks = IN_CHUNKS
    call: str = field(init=False, default="")
    """The callable of a family that has one in place of a template: see CalledFamily."""
    source: Path = field(init=False)
    declared_at: str = field(init=False)
    """file:line of the declaration."""
    rules: dict[str, tuple[str, Rule]] = field(init=False, default_factory=dict)
    by_shape: dict[str, Rule] = field(init=False, default_factory=dict)
    """The rules that depend on more of a problem than head_dim, dtype and mask."""
    stages: dict[str, Stage] = field(init=False, default_factory=dict)
    workspace_of: WorkspaceBuilder = field(init=False, default_factory=lambda: _no_workspace)
    _undecorated: dict[str, str] = field(init=False, default_factory=dict)
    """Place of each rule(...) and stage(...) that has not been given its function."""

    def __post_init__(self) -> None:
        self.declared_at = _caller()
        modes = [mode.name for mode in self.modes]
        fault = validate.of_kernel(self) or validate.of_params(
            self.params, Param, PROBLEM_CONSTANTS, modes, Config
        )
        self._refuse(fault, self.declared_at)
        self.source = Path(self.declared_at.rpartition(":")[0]).with_name(f"{self.name}.cu")

    @property
    def modes(self) -> tuple[Param, ...]:
        """The parameters that a config has only if its spec names them: how a call is issued."""
        return self.chunks.modes

    @property
    def mode_rules(self) -> dict[str, str]:
        """The rule that a config with modes must keep first: its name and description."""
        return {self.chunks.rule: self.chunks.description}

    def rules_for(self, names: Collection[str]) -> tuple[str, ...]:
        """The rules that configs of these parameters are asked, in order."""
        modes = any(mode.name in names for mode in self.modes)
        return (*(self.mode_rules if modes else ()), *self.rules, BLOCK_LIMITS)

    def schedule(
        self, config: Config, problem: Problem, workspace_limit: int | None = None
    ) -> Schedule:
        """How one call is issued. workspace_limit: bytes that the call may use if it can be cut."""
        return self.chunks.schedule(self, config, problem, workspace_limit)

    def of_today(self, recorded: Mapping[str, Value]) -> Config:
        """A recorded config in declared order, with Param.absent of parameters that it lacks."""
        own = {p.name: recorded.get(p.name, p.absent) for p in self.params}
        return Config({n: v for n, v in (own | dict(recorded)).items() if v is not None})

    def changed_since(self, recorded: Mapping[str, Value]) -> str | None:
        """The parameters that the family gained or lost since a config was recorded, or None.

        One that it gained does not count where the config means the same without it: see of_today.
        """
        own = {param.name for param in self.params}
        known = own | {mode.name for mode in self.modes}
        gone = [repr(name) for name in recorded if name not in known]
        new = [repr(name) for name in sorted(own - set(self.of_today(recorded)))]
        facts = [f"lost parameter{'s' * (len(gone) > 1)} {', '.join(gone)}"] if gone else []
        facts += [f"gained parameter{'s' * (len(new) > 1)} {', '.join(new)}"] if new else []
        return f"{self.name} {', '.join(facts)}" if facts else None

    @property
    def include_places(self) -> tuple[Path, ...]:
        """Its include directories, those with relative names next to the declaration."""
        return tuple((self.source.parent / place).resolve() for place in self.include_dirs)

    def _refuse(self, fault: Fault | None, where: str) -> None:
        """Raise KernelError for a fault."""
        if fault is not None:
            raise KernelError(f"{self.name}: {fault.what}", where=where, hint=fault.fix)

    def __str__(self) -> str:
        return self.name

    @property
    def head_dims_text(self) -> str:
        """`64, 128, 256`, or `512 to 8192 in steps of 4`; and those of v, if it may have others."""
        of_v = f", head_dim_v {_text_of_dims(self.head_dims_v)}" if self.head_dims_v else ""
        return _text_of_dims(self.head_dims) + of_v

    @property
    def some_head_dims(self) -> tuple[int, ...]:
        """Head_dims that tests compile: the usual, or all, or a range's first, second and last."""
        if self.usual_head_dims:
            return self.usual_head_dims
        if isinstance(self.head_dims, range):
            return (*self.head_dims[:2], self.head_dims[-1])
        return self.head_dims

    @property
    def archs_text(self) -> str:
        """The architectures it runs on, in words. One whose name ends in `a` stands alone."""
        return self.min_arch if self.min_arch.endswith("a") else f"{self.min_arch} and later"

    def rule(self, description: str) -> Callable[[Rule], Rule]:
        """Decorate `def name(config, problem, arch) -> bool`: False prunes, and is counted."""
        where = _caller()
        self._refuse(validate.of_rule("rule", description), where)
        self._undecorated[where] = f"rule({description!r})"

        def add(rule: Rule) -> Rule:
            self._undecorated.pop(where, None)
            self._add_rule(getattr(rule, "__name__", description), description, rule, where)
            return rule

        return add

    def outdated(self, call: Mapping[str, Any]) -> str | None:  # noqa: ARG002
        """Why a row that says that it is of this call is of other code, or None."""
        return f"{self.name} is no call now"

    def keep_if(self, *rules: tuple[str, str, Rule], by_shape: bool = False) -> None:
        """Add rules as rows of a table: name, description, `lambda config, problem, arch: bool`.

        by_shape: whether they depend on more of the problem than head_dim, dtype and mask. Only
        these are asked whether a winner may run on another shape.
        """
        where = _caller()
        for row in rules:
            if not isinstance(row, tuple) or len(row) != 3:
                fix = 'write ("name", "what it says", lambda config, problem, arch: ...)'
                self._refuse(Fault(f"a row of rules is {row!r}", fix), where)
            self._add_rule(*row, where)
            if by_shape:
                self.by_shape[row[0]] = row[2]

    def _add_rule(self, name: str, description: str, rule: Rule, where: str) -> None:
        where = _place(rule, where)
        fault = validate.of_function(f"rule {name}", rule, ("config", "problem", "arch"))
        self._refuse(fault or validate.of_rule(name, description), where)
        if name in {*self.rules, BLOCK_LIMITS, *self.mode_rules}:
            fix = "rename one: a dry run counts what each removes by its name"
            raise KernelError(f"{self.name} has two rules called {name}", where=where, hint=fix)
        self.rules[name] = (description, rule)

    def stage(
        self,
        name: str,
        params: tuple[str, ...] | None = None,
        constants: tuple[str, ...] = ("HEAD_DIM", "IS_BF16", "CAUSAL"),
        strided: tuple[str, ...] = (),
    ) -> Callable[[LaunchBuilder], LaunchBuilder]:
        """Decorate `def name(config, problem, arch) -> Launch`. Stages run in declared order.

        params: the parameters that this stage's code depends on (default: all). strided: see
        Stage. A builder that returns None leaves the stage out of that config.
        """
        where, all_of_them = _caller(), tuple(param.name for param in self.params)
        own = all_of_them if params is None else params
        fault = validate.of_stage(
            name, own, constants, declared=all_of_them, known=PROBLEM_CONSTANTS, taken=self.stages
        )
        self._refuse(fault, where)
        self._undecorated[where] = f"stage({name!r})"

        def add(launch: LaunchBuilder) -> LaunchBuilder:
            self._undecorated.pop(where, None)
            arguments = ("config", "problem", "arch")
            self._refuse(validate.of_function(f"stage {name}", launch, arguments), where)
            options = (*self.compile_options, *(f"-I{place}" for place in self.include_places))
            self.stages[name] = Stage(name, own, constants, launch, strided, options)
            return launch

        return add

    def workspace(self, builder: WorkspaceBuilder | None = None) -> WorkspaceBuilder:
        """Decorate `def name(config, problem) -> {buffer name: bytes}`, without parentheses."""
        where = _caller()
        fault = None
        if builder is None:
            fault = Fault("workspace has parentheses", "write @kernel.workspace")
        elif self.workspace_of is not _no_workspace:
            fault = Fault("two workspaces", "return all buffers from one function")
        fault = fault or validate.of_function("workspace", builder, ("config", "problem"))
        if fault is not None or builder is None:
            self._refuse(fault, where)
            raise AssertionError("a missing builder is a fault")
        self.workspace_of = builder
        return builder

    def finish(self) -> None:
        """Raise KernelError if the declaration, which has been read whole, lacks something."""
        fault = None
        if not self.source.is_file():
            what = f"its template {self.source.name} is not next to it"
            fault = Fault(what, f"write {self.source}, or correct the name in Family(...)")
        elif self._undecorated:
            where, what = next(iter(self._undecorated.items()))
            fix = "write it as a decorator, @kernel." + what + ", above the function"
            self._refuse(Fault(f"{what} decorates no function", fix), where)
        elif not self.stages:
            fault = Fault("declares no stage", "add @kernel.stage(...)")
        self._refuse(fault, self.declared_at)

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        """Why this family cannot run `problem` on `arch` at all, or None if it can."""
        number = int("".join(filter(str.isdigit, self.min_arch)))
        major, minor = arch.compute_capability
        if major * 10 + minor < number or (
            self.min_arch.endswith("a") and self.min_arch != arch.name
        ):
            return f"needs {self.min_arch}, not {arch.name}"
        if problem.op.name not in self.ops:
            return f"does no {problem.op.name}"
        format = problem.format
        if (major, minor) < (first := format.first_capability):
            return f"{arch.name} has no {format.kind}: it needs sm_{first[0]}{first[1]} or later"
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}"
        if problem.value_in_key != self.value_in_key:
            return f"reads {'no' if self.value_in_key else 'a'} v apart from k"
        if problem.head_dim_v and not self.head_dims_v:
            return f"v has as many columns as q and k, and not head_dim_v {problem.head_dim_v}"
        asked = [("head_dim", problem.head_dim, self.head_dims)]
        if problem.head_dim_v:
            asked.append(("head_dim_v", problem.head_dim_v, self.head_dims_v))
        for name, dim, dims in asked:
            if dim not in dims:
                nearest = min(dims, key=lambda own: (abs(own - dim), -own))
                return f"{name} {dim} is not one of {_text_of_dims(dims)}; the nearest is {nearest}"
        if problem.mask.kind not in self.masks:
            return f"mask {problem.mask.label} is not one of {', '.join(self.masks)}"
        if problem.layout.kind not in self.layouts:
            return f"layout {problem.layout.kind} is not one of {', '.join(self.layouts)}"
        if (stored := problem.layout.cache_dtype) is not None:
            if stored not in self.cache_dtypes:
                return f"cannot read a cache of {stored}"
            if (major, minor) < (first := FORMATS[stored].first_capability):
                return f"{arch.name} has no {stored}: it needs sm_{first[0]}{first[1]} or later"
        for kind in problem.scores.kinds:
            if kind not in self.scores:
                return f"cannot do {kind}"
        if problem.has_empty_rows and not self.empty_rows:
            return f"cannot do queries that see no key, which {problem.label} has"
        return next((f"serves only {said}" for said in self._unserved(problem)), None)

    @property
    def served_text(self) -> list[str]:
        """Sentences on the only problems that the family serves, and on its order of tensors."""
        only = [said for said, _ in self.supports]
        return only + ["tensors (batch, seqlen, heads, head_dim)"] * self.turned

    @property
    def turned(self) -> bool:
        """Whether its tensors lie in another order than those of a problem."""
        return self.order != ORDERS[0]

    def serves(self, problem: Problem) -> bool:
        """Whether a problem is as `supports` says."""
        return not any(self._unserved(problem))

    def _unserved(self, problem: Problem) -> Iterator[str]:
        for said, rule in self.supports:
            if not self._ask(f"supports {said!r}", rule, problem):
                yield said

    def refused_by(self, config: Config, problem: Problem, arch: Arch) -> str | None:
        """Name of the first rule that refuses the config, or None. BLOCK_LIMITS comes last."""
        names = (*self.rules, BLOCK_LIMITS)
        return next((n for n in names if not self.passes(n, config, problem, arch)), None)

    def refused_on(self, config: Config, problem: Problem, arch: Arch) -> str | None:
        """Name of the first by_shape rule that refuses the config, or None; other rules must hold.

        BLOCK_LIMITS is none of them: see `excess`.
        """
        for name, rule in self.by_shape.items():
            if not rule(config, problem, arch):
                return name
        return None

    def passes(self, name: str, config: Config, problem: Problem, arch: Arch) -> bool:
        """Whether a rule keeps a config that all earlier rules keep."""
        if name == BLOCK_LIMITS:
            return self.excess(config, problem, arch) is None
        if name in self.mode_rules:
            return self.chunks.keeps(self, config, problem)
        _, rule = self.rules[name]
        passed = self._ask(f"rule {name}", rule, config, problem, arch)
        if not isinstance(passed, int):
            returned = "nothing" if passed is None else repr(passed)
            fix = "return True to keep a config, False to prune it"
            fault = Fault(f"returned {returned}", fix)
            raise self._fault(f"rule {name}", fault, rule, config, problem)
        return bool(passed)

    def excess(self, config: Config, problem: Problem, arch: Arch) -> tuple[str, int, int] | None:
        """The limit of CUDA that a config exceeds, its value and the maximum, or None."""
        for name, launch in self.launches(config, problem, arch).items():
            for what, value, most in (
                ("threads per block", launch.threads, arch.max_threads_per_block),
                ("bytes of shared memory", launch.smem_bytes, arch.smem_per_block),
                ("blocks in x of the grid", launch.grid[0], 2**31 - 1),
                ("blocks in y or z of the grid", max(launch.grid[1:]), 65535),
            ):
                if value > most:
                    return f"{what} of stage {name}", value, most
        return None

    def launches(self, config: Config, problem: Problem, arch: Arch) -> dict[str, Launch]:
        """Stage name to its Launch, in running order. Raises KernelError for a faulty launch."""
        buffers = {*problem.inputs, *problem.outputs, *self.workspaces(config, problem)}
        launches = {}
        for name, stage in self.stages.items():
            launch = self._ask(f"stage {name}", stage.launch, config, problem, arch)
            if launch is None:
                continue
            fault = validate.of_launch(launch, buffers, {*stage.params, *stage.constants})
            if fault is not None:
                raise self._fault(f"stage {name}", fault, stage.launch, config, problem)
            launches[name] = launch
        if not launches:
            first = next(iter(self.stages.values()))
            fault = Fault("has a launch", "return a Launch from one stage at least")
            raise self._fault("no stage", fault, first.launch, config, problem)
        return launches

    def is_deterministic(self, config: Config) -> bool:
        """Whether equal calls of this config give equal bits."""
        how = self.deterministic
        return bool(config[how]) if isinstance(how, str) else how

    def workspaces(self, config: Config, problem: Problem) -> dict[str, int]:
        """Bytes of each workspace by name."""
        made: dict[str, int] = self._ask("workspace", self.workspace_of, config, problem)
        fault = validate.of_workspaces(made, (*problem.inputs, *problem.outputs))
        if fault is not None:
            raise self._fault("workspace", fault, self.workspace_of, config, problem)
        return made

    def _fault(
        self, what: str, fault: Fault, function: object, config: Config, problem: Problem
    ) -> KernelError:
        """The error for what a function of the declaration returned."""
        asked = f"config {config.label}, problem {problem.label}"
        where = _place(function, self.declared_at)
        said = f"{what} of {self.name} {fault.what}"
        return KernelError(said, where=where, hint=f"{asked}\n  {fault.fix}")

    def _ask(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call the declaration's function; what it raises becomes a KernelError with its line."""
        try:
            return function(*args)
        except (KeyboardInterrupt, time_limit.TooLong) as error:
            where, asked = _place(function, self.declared_at, error), _asked(args)
            if isinstance(error, time_limit.TooLong):
                raise KernelError(
                    f"{what} of {self.name} did not return within {time_limit.LIMIT_S:g} s",
                    where=where,
                    hint=f"{asked}\n  look for a loop that does not end",
                ) from error
            if time_limit.elapsed_s() < _SLOW_S:
                raise
            raise KeyboardInterrupt(f"{where}: in {what} of {self.name}\n  {asked}") from error
        except BaseException as error:  # a user's declaration may raise anything, or exit
            raise KernelError(
                f"{what} of {self.name} raised {_named(error)}",
                where=_place(function, self.declared_at, error),
                hint=_asked(args),
            ) from error


def _asked(args: Sequence[object]) -> str:
    """What a function of the declaration was asked about, in words."""
    kinds = (("config", Config), ("problem", Problem))
    return ", ".join(f"{n} {a.label}" for a in args for n, kind in kinds if isinstance(a, kind))


# Modules that declare for their caller.
_BETWEEN = (__name__, "attnsweep.tools.inline", "attnsweep.api")


def _caller() -> str:
    """file:line of the declaration's code that called into this module."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _place(function: object, otherwise: str, error: BaseException | None = None) -> str:
    """file:line of a declaration's function, or of the line in it that raised."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if code is None:  # a partial, or an object that can be called
        return otherwise
    file, line = code.co_filename, code.co_firstlineno
    for frame in traceback.extract_tb(error.__traceback__) if error is not None else ():
        if frame.filename == file and frame.lineno is not None:
            line = frame.lineno
    return f"{file}:{line}"


def _named(error: BaseException) -> str:
    """`ValueError: no such tile`, or the name alone; a user's error may even fail to say itself."""
    try:
        # The file and line of a syntax error stand before it already.
        said = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
