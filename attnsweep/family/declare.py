"""Declaration of a kernel family: Param, Config, rules, stages, Launch; and how it is found.

A family is `NAME.cu` (the CUDA template) and `NAME.py`, which builds one `kernel = Kernel(...)`.
Nothing else in attnsweep knows a family by name. See docs/writing-a-kernel.md.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnsweep.errors import KernelError
from attnsweep.files import shipped
from attnsweep.hardware import ARCHS, Arch
from attnsweep.problem import DTYPE_BYTES, Problem
from attnsweep.trial import Value


@dataclass(frozen=True, slots=True)
class Param:
    """One tunable parameter of a family, with the values that a sweep tries by default."""

    name: str
    values: tuple[Value, ...]
    help: str

    def why_not(self, value: int) -> str | None:
        """Why a spec may not use this whole number as a value, or None.

        A value is at least 1, or the smallest declared value if that is less: rules divide by sizes
        and counts.
        """
        least = min([1, *(int(own) for own in self.values if not isinstance(own, str))])
        return f"{self.name} must be at least {least}, not {value}" if value < least else None


class Config(Mapping[str, Value]):
    """One value for each Param of a family: a mapping that also reads as attributes."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __getattr__(self, name: str) -> int:
        # Declarations do arithmetic on ints; they read the rare str Param as config["NAME"].
        try:
            return self._values[name]  # type: ignore[return-value]
        except KeyError:
            raise AttributeError(f"no parameter {name!r}; it has {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))  # as mappings, equal in any order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._values == dict(other)

    def __getstate__(self) -> dict[str, Value]:
        return self._values

    def __setstate__(self, state: dict[str, Value]) -> None:
        self._values = state

    @property
    def label(self) -> str:
        """`BLOCK_M=64 BLOCK_N=128 …`, in declaration order."""
        return " ".join(f"{name}={_text(value)}" for name, value in self.items())


def values_in(text: str) -> dict[str, str]:
    """The mapping of texts in `BLOCK_M=64 BLOCK_N=128 …`. Raises KernelError for any other text."""
    values = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise KernelError(
                f"not a parameter's value: {part!r}", hint="write NAME=VALUE, like BLOCK_M=64"
            )
        values[name] = value
    return values


def _text(value: Value) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor of a 16-bit tensor, passed by value (`const __grid_constant__`, 128 bytes).

    buffer: its name. dims: elements, innermost first. strides: bytes between neighbours of every
    dimension but the first, multiples of 16. box: elements that one copy moves. swizzle_bytes: 0,
    32, 64 or 128. Reads outside `dims` return zeros; writes outside are dropped.
    """

    buffer: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128


Arg = str | int | float | TensorMap


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch of a stage, fully determined.

    args: a str names a buffer (`q`, `k`, `v`, `o`, or a workspace) and passes its pointer; an int
    passes as int32, a float as float32, a TensorMap by value. `defines` are extra compile-time
    integers that follow from the problem. `min_blocks_per_sm` is the occupancy that the family
    plans for. `programmatic`: the launch uses programmatic stream serialization, so that it may
    begin before the launch ahead of it ends (sm_90; the template must wait with
    griddepcontrol.wait). `carveout`: percentage of the memory shared with L1 that the launch asks
    for as shared memory; -1 leaves it to the driver, which decides by what each launch needs.
    """

    function: str
    grid: tuple[int, int, int]
    threads: int
    args: tuple[Arg, ...]
    smem_bytes: int = 0
    defines: Mapping[str, int] = field(default_factory=dict)
    min_blocks_per_sm: int = 1
    programmatic: bool = False
    carveout: int = -1

    @property
    def arg_bytes(self) -> tuple[int, ...]:
        """Bytes of each argument as the kernel receives it."""
        return tuple(
            8 if isinstance(arg, str) else 128 if isinstance(arg, TensorMap) else 4
            for arg in self.args
        )


Rule = Callable[[Config, Problem, Arch], bool]
LaunchBuilder = Callable[[Config, Problem, Arch], "Launch | None"]
WorkspaceBuilder = Callable[[Config, Problem], dict[str, int]]


def _no_workspace(config: Config, problem: Problem) -> dict[str, int]:
    return {}


# The rule that every family has: CUDA can launch its threads, shared memory and grid.
BLOCK_LIMITS = "block_limits"

# Compile-time facts of a problem that a stage may ask for.
PROBLEM_CONSTANTS: dict[str, Callable[[Problem], int]] = {
    "HEAD_DIM": lambda p: p.head_dim,
    "IS_BF16": lambda p: int(p.dtype == "bf16"),
    "CAUSAL": lambda p: int(p.causal),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch of a pipeline. Its compiler gets only `params` and `constants`, as -D."""

    name: str
    params: tuple[str, ...]
    constants: tuple[str, ...]
    launch: LaunchBuilder

    def defines(self, config: Config, problem: Problem, launch: Launch) -> dict[str, str]:
        """The -D options of this stage: STAGE_<NAME>=1, parameters, problem constants, extras."""
        out = {f"STAGE_{self.name.upper()}": "1"}
        for name in self.params:
            value = config[name]
            if isinstance(value, str):
                out[f"{name}_{value.upper()}"] = "1"
            else:
                out[name] = _text(value)
        out |= {name: str(PROBLEM_CONSTANTS[name](problem)) for name in self.constants}
        return out | {name: str(value) for name, value in launch.defines.items()}


@dataclass
class Kernel:
    """A kernel family. `source` is the .cu file next to the declaration.

    rounds_scores: how often the family rounds scores to the problem's dtype (1 if it stores them
    between stages); the error limit comes from the same maths with scores rounded as often.
    head_dims: the supported ones, as a tuple or a range. deterministic: equal calls give equal
    bits, which is checked; False for a family with atomic sums. lse: name of the switch with which
    the family writes the log-sum-exp of every row (float32, natural) to the workspace `lse`; it is
    then checked too.
    """

    name: str
    summary: str
    params: tuple[Param, ...]
    min_arch: str = "sm_80"
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    head_dims: tuple[int, ...] | range = (64, 128, 256)
    rounds_scores: int = 0
    deterministic: bool = True
    lse: str = ""
    source: Path = field(init=False)
    rules: dict[str, tuple[str, Rule]] = field(init=False, default_factory=dict)
    stages: dict[str, Stage] = field(init=False, default_factory=dict)
    workspace_of: WorkspaceBuilder = field(init=False, default_factory=lambda: _no_workspace)

    def __post_init__(self) -> None:
        declared_in = Path(sys._getframe(2).f_code.co_filename)
        self.source = declared_in.with_name(f"{self.name}.cu")
        names = [param.name for param in self.params]
        if len(set(names)) != len(names):
            raise KernelError(f"{self.name}: a parameter is declared twice", where=str(declared_in))
        wrong = self._misdeclared()
        if wrong is not None:
            raise KernelError(f"{self.name}: {wrong}", where=str(declared_in))
        for param in self.params:
            if not isinstance(param.values, tuple) or not param.values:
                raise KernelError(
                    f"{param.name}: its values must be a tuple, not {param.values!r}",
                    where=str(declared_in),
                    hint="write a tuple of one as (64,)",
                )
            if not all(isinstance(value, int | str) for value in param.values):
                raise KernelError(
                    f"{param.name}: values are whole numbers, bools or text, not {param.values!r}",
                    where=str(declared_in),
                )

    def _misdeclared(self) -> str | None:
        """The fault of a field that refusal() reads, or None; there it would refuse or crash."""
        if self.min_arch not in {*ARCHS, *(name.rstrip("a") for name in ARCHS)}:
            return f"min_arch is one of {', '.join(ARCHS)}, not {self.min_arch!r}"
        known = f"dtypes are a tuple of {', '.join(DTYPE_BYTES)}, not {self.dtypes!r}"
        if not isinstance(self.dtypes, tuple) or not self.dtypes:
            return known
        if not set(self.dtypes) <= set(DTYPE_BYTES):
            return known
        dims = self.head_dims
        if not isinstance(dims, tuple | range) or not all(isinstance(dim, int) for dim in dims):
            return f"head_dims are a tuple of whole numbers, or a range, not {dims!r}"
        return None if dims else "head_dims are empty"

    def __str__(self) -> str:
        return self.name

    @property
    def head_dims_text(self) -> str:
        """`64, 128, 256`, or `512 to 8192 in steps of 4`."""
        if isinstance(self.head_dims, range):
            return f"{self.head_dims[0]} to {self.head_dims[-1]} in steps of {self.head_dims.step}"
        return ", ".join(map(str, self.head_dims))

    @property
    def some_head_dims(self) -> tuple[int, ...]:
        """The head_dims to compile and check: all, or a range's first, second and last."""
        if isinstance(self.head_dims, range):
            return (*self.head_dims[:2], self.head_dims[-1])
        return self.head_dims

    @property
    def archs_text(self) -> str:
        """The architectures it runs on, in words. One whose name ends in `a` stands alone."""
        return self.min_arch if self.min_arch.endswith("a") else f"{self.min_arch} and later"

    def rule(self, description: str) -> Callable[[Rule], Rule]:
        """Decorate `def name(config, problem, arch) -> bool`: False prunes, and is counted."""

        def add(rule: Rule) -> Rule:
            self.keep_if((rule.__name__, description, rule))
            return rule

        return add

    def keep_if(self, *rules: tuple[str, str, Rule]) -> None:
        """Add rules as rows of a table: name, description, `lambda config, problem, arch: bool`."""
        for name, description, rule in rules:
            if name in self.rules:
                raise KernelError(f"{self.name} has two rules called {name}", where=_place(rule))
            self.rules[name] = (description, rule)

    def stage(
        self,
        name: str,
        params: tuple[str, ...] | None = None,
        constants: tuple[str, ...] = ("HEAD_DIM", "IS_BF16", "CAUSAL"),
    ) -> Callable[[LaunchBuilder], LaunchBuilder]:
        """Decorate `def name(config, problem, arch) -> Launch`. Stages run in declared order.

        params: the parameters that this stage's code depends on (default: all). A builder that
        returns None leaves the stage out of that config.
        """

        def add(launch: LaunchBuilder) -> LaunchBuilder:
            own = tuple(param.name for param in self.params) if params is None else params
            self.stages[name] = Stage(name, own, constants, launch)
            return launch

        return add

    def workspace(self, builder: WorkspaceBuilder) -> WorkspaceBuilder:
        """Decorate `def name(config, problem) -> {buffer name: bytes}`."""
        self.workspace_of = builder
        return builder

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        """Why this family cannot run `problem` on `arch` at all, or None if it can."""
        number = int("".join(filter(str.isdigit, self.min_arch)))
        major, minor = arch.compute_capability
        if major * 10 + minor < number or (
            self.min_arch.endswith("a") and self.min_arch != arch.name
        ):
            return f"needs {self.min_arch}, not {arch.name}"
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}"
        if problem.head_dim not in self.head_dims:
            return f"head_dim {problem.head_dim} is not one of {self.head_dims_text}"
        return None

    def refused_by(self, config: Config, problem: Problem, arch: Arch) -> str | None:
        """Name of the first rule that refuses the config, or None. BLOCK_LIMITS comes last."""
        for name, (_, rule) in self.rules.items():
            passed = self._ask(f"rule {name}", rule, config, problem, arch)
            if passed is None:
                raise KernelError(
                    f"rule {name} of {self.name} returned nothing",
                    where=_place(rule),
                    hint="return True to keep a config, False to prune it",
                )
            if not passed:
                return name
        for launch in self.launches(config, problem, arch).values():
            if (
                launch.threads > arch.max_threads_per_block
                or launch.smem_bytes > arch.smem_per_block
                or launch.grid[0] >= 2**31
                or max(launch.grid[1:]) > 65535
            ):
                return BLOCK_LIMITS
        return None

    def launches(self, config: Config, problem: Problem, arch: Arch) -> dict[str, Launch]:
        """Stage name to its Launch, in running order. Raises KernelError for a faulty launch."""
        buffers = {"q", "k", "v", "o", *self.workspaces(config, problem)}
        launches = {}
        for name, stage in self.stages.items():
            launch = self._ask(f"stage {name}", stage.launch, config, problem, arch)
            if launch is None:
                continue
            fault = _fault(launch, buffers)
            if fault is not None:
                raise KernelError(
                    f"stage {name} of {self.name} {fault}",
                    where=_place(stage.launch),
                    hint=f"config {config.label}, problem {problem.label}",
                )
            launches[name] = launch
        if not launches:
            raise KernelError(
                f"no stage of {self.name} has a launch",
                where=_place(next(iter(self.stages.values())).launch),
                hint=f"config {config.label}, problem {problem.label}",
            )
        return launches

    def writes_lse(self, config: Config) -> bool:
        """Whether calls of this config write the log-sum-exp of every row."""
        return bool(self.lse and config[self.lse])

    def workspaces(self, config: Config, problem: Problem) -> dict[str, int]:
        """Bytes of each workspace by name."""
        made: dict[str, int] = self._ask("workspace", self.workspace_of, config, problem)
        return made

    def _ask(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call the declaration's function; its exception becomes a KernelError with its line."""
        try:
            return function(*args)
        except Exception as error:  # a user's declaration may raise anything
            raise KernelError(
                f"{what} of {self.name} raised {type(error).__name__}: {error}",
                where=_place(function, error),
                hint=f"config {args[0].label}, problem {args[1].label}",
            ) from error


def _place(function: Callable[..., Any], error: BaseException | None = None) -> str:
    """file:line of a declaration's function, or of the line in it that raised."""
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    for frame in traceback.extract_tb(error.__traceback__) if error is not None else ():
        if frame.filename == file and frame.lineno is not None:
            line = frame.lineno
    return f"{file}:{line}"


def _fault(launch: object, buffers: set[str]) -> str | None:
    """The reason why a declaration's Launch is impossible, or None."""
    if not isinstance(launch, Launch):
        return f"must return a Launch or None, not {launch!r}"
    sizes = {"threads": launch.threads, "grid": launch.grid, "smem_bytes": launch.smem_bytes}
    for name, value in sizes.items():
        parts = value if isinstance(value, tuple) else (value,)
        if len(parts) != (3 if name == "grid" else 1) or not all(type(x) is int for x in parts):
            return f"has {name} {value!r}: needs {'three ints' if name == 'grid' else 'an int'}"
        if min(parts) < (0 if name == "smem_bytes" else 1):
            return f"has {name} {value!r}, which is too small"
    for arg in launch.args:
        named = arg.buffer if isinstance(arg, TensorMap) else arg
        if isinstance(named, str) and named not in buffers:
            return f"names the buffer {named!r}; there are {', '.join(sorted(buffers))}"
        if not isinstance(arg, str | int | float | TensorMap):
            return f"passes {arg!r}: an argument is a buffer's name, an int, a float or a TensorMap"
    defines = launch.defines
    if not isinstance(defines, Mapping) or not all(isinstance(n, int) for n in defines.values()):
        return f"has defines {defines!r}: they are a mapping of names to ints"
    return None


def load_kernel(path: Path) -> Kernel:
    """The `kernel` that one declaration file builds. Raises KernelError with the fault."""
    path = path.resolve()
    name = f"attnsweep_family_{path.stem}_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise KernelError("cannot be imported", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except KernelError:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        # Find the declaration's own deepest line: it may have called something that raised.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        at = f"{path}:{lines[-1]}" if lines else str(path)
        raise KernelError(f"{type(error).__name__}: {error}", where=at) from error
    kernel = getattr(module, "kernel", None)
    if not isinstance(kernel, Kernel):
        raise KernelError(
            "defines no `kernel = Kernel(...)`",
            where=str(path),
            hint="the name of a file without a family must begin with `_`",
        )
    if not kernel.source.is_file():
        raise KernelError(f"its template {kernel.source.name} is not next to it", where=str(path))
    if not kernel.stages:
        raise KernelError("declares no stage", where=str(path), hint="add @kernel.stage(...)")
    return kernel


def discover(extra: Path | None = None) -> dict[str, Kernel]:
    """Every family in the shipped kernels/ and in `extra`, by name, sorted.

    A file whose name begins with `_` is not a family. Raises KernelError if a declaration is broken
    or repeated, or if `extra` is not a directory.
    """
    found: dict[str, Kernel] = {}
    for directory in [shipped("kernels")] + ([extra] if extra else []):
        if not directory.is_dir():
            raise KernelError("no such directory of kernels", where=str(directory))
        for path in sorted(directory.glob("[!_]*.py")):
            kernel = load_kernel(path)
            if kernel.name in found:
                raise KernelError(
                    f"family {kernel.name!r} is already declared, in {found[kernel.name].source}",
                    where=str(path),
                )
            found[kernel.name] = kernel
    return dict(sorted(found.items()))
