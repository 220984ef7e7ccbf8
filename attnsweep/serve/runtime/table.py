"""The table of a package: which compiled kernel serves which shape on which GPU."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from attnsweep.core.errors import ProblemError
from attnsweep.core.problem import Problem
from attnsweep.family.family import Config

from .families import DECLARED, WGMMA, config_of, kind_of_code

_T = TypeVar("_T")
FORMAT = 7
"""Raise it if older code would misread the table. Code reads its own format only."""
TABLE = "table.json"
CUBINS = "cubins"
"""The directory of a package's cubins, or of archives with several of them each."""
BASE = "base.lzma2"
"""The archive whose bytes go before those of each other one, which repeat much of them."""
ALIGNMENT = 16
"""Bytes of an instruction. A cubin in an archive begins at a multiple: so it takes 7 % less."""
WINDOW = 2**23
"""The most bytes of an archive and BASE together, unpacked: so far back may bytes be repeated."""
# Archives that are kept unpacked, 5 MB each: cubins of one model are mostly next to each other.
_KEPT = 3
# Exceptions of reading a file that is no table.
_NONSENSE = (
    ProblemError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_TYPES: Mapping[str, type] = {"int": int, "str": str, "bool": bool, "float": float}


class PackageError(Exception):
    """A package cannot be used: its table or a cubin is missing, damaged or foreign."""


class GpuKey(NamedTuple):
    """Facts of a GPU: times hold on another with the same. l2_bytes: of the whole L2."""

    compute_capability: tuple[int, int]
    sm_count: int
    l2_bytes: int

    @classmethod
    def of(cls, properties: Any) -> GpuKey:
        """The key of a GPU. properties: what torch.cuda.get_device_properties returns."""
        capability = (properties.major, properties.minor)
        return cls(capability, properties.multi_processor_count, properties.L2_cache_size)

    @property
    def label(self) -> str:
        """`sm_90, 132 SMs, 50 MiB of L2`."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}, {self.sm_count} SMs, {self.l2_bytes / 2**20:.0f} MiB of L2"


class CardCapacity(NamedTuple):
    """The facts of a GPU on which times of kernels depend. memory_bytes_per_us: its peak."""

    sm_count: int
    l2_bytes: int
    memory_bytes_per_us: float


@dataclass(frozen=True, slots=True)
class Code:
    """The machine code of one stage: a file below CUBINS, its SHA-256, and the function in it."""

    file: str
    sha256: str
    function: str


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One compiled config of a family.

    dtype, mask: as of `kind_of_code`. config: its label. stages: stage name to its code. values:
    the config itself.
    """

    head_dim: int
    dtype: str
    mask: str
    config: str
    stages: Mapping[str, Code]
    family: str = WGMMA.kernel.name
    values: Config = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", config_of(self.declaration, self.config))

    @property
    def declaration(self) -> Any:
        """The module of its family."""
        return DECLARED[self.family]

    @property
    def kind(self) -> tuple[int, str, str]:
        """The kind of problems that the code serves: see `kind_of_code`."""
        return self.head_dim, self.dtype, self.mask


@dataclass(frozen=True, slots=True)
class Timed:
    """The kernel that won a problem, and its time there in microseconds."""

    problem: Problem
    kernel: CompiledKernel
    time_us: float


@dataclass(frozen=True, slots=True)
class Winner(Timed):
    """A timed kernel, and how it compares with PyTorch's own attention there.

    gain: time of scaled_dot_product_attention over the kernel's, medians. gain_low: the lower end
    of its 95 % interval where the run has one, otherwise the gain. others: the package's other
    kernels that the run timed on the shape, with their times in microseconds.
    """

    sdpa_us: float
    gain: float
    gain_low: float
    others: tuple[tuple[CompiledKernel, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Guard:
    """When a shape that was not tuned is served: see dispatch.choose.

    margin: share by which a kernel must be predicted to be faster than PyTorch's own attention.
    per_octave: what each octave to the nearest tuned shape adds to it. reach: octaves at most.
    short_us: calls that record gradients are left to PyTorch, whatever was tuned, if its forward
    takes less. The device needs about 4.2 times as long for forward and backward; the host, which
    goes through Python for the backward here, 0.2 to 0.5 ms (benchmarks/training.py).
    scan_us: so are calls with a mask of which nothing may be kept: on an H100's host a scan takes
    them from 27 to 43 us, and PyTorch's call takes 20 (benchmarks/masks.py). Not those of CUDA
    graphs, where the host has no part, nor of grouped heads, for which models of transformers
    repeat k and v in a call of PyTorch's with a mask.
    """

    margin: float = 0.02
    per_octave: float = 0.01
    reach: float = 6.0
    short_us: float = 100.0
    scan_us: float = 40.0


@dataclass(frozen=True, slots=True)
class TunedGpu:
    """The kernels and times of one kind of GPU. names: of the cards that were measured.

    memory_bytes_per_us: the least peak rate of their memories; 0 if none was measured. twins:
    kernels that serve besides the winners': runners-up, and configs for the other dtype. stand_in:
    the GPU whose rows serve where these say nothing; see `known`. kinds: what dispatch has worked
    out of the rows, by head_dim, dtype, kind of mask, and whether there are few queries.
    """

    key: GpuKey
    names: tuple[str, ...]
    guard: Guard
    winners: tuple[Winner, ...]
    memory_bytes_per_us: float = 0.0
    twins: tuple[CompiledKernel, ...] = ()
    stand_in: TunedGpu | None = None
    kinds: dict[tuple[int, str, str, bool], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def card(self) -> CardCapacity:
        """The card's facts that times depend on."""
        return CardCapacity(self.key.sm_count, self.key.l2_bytes, self.memory_bytes_per_us)


def known(gpus: Mapping[GpuKey, TunedGpu], key: GpuKey) -> TunedGpu | None:
    """A table's rows for a GPU: its own, if any, and those of a similar GPU.

    Those are of a GPU with the same compute capability, which runs the same machine code, and as
    many SMs, on which work divides in the same way; of several, of the one whose L2 is nearest.
    None if there are neither.
    """
    own = gpus.get(key)
    alike = [each for each in gpus.values() if each.key[:2] == key[:2] and each.key != key]
    if not alike:
        return own
    nearest = min(alike, key=lambda each: (abs(each.key.l2_bytes - key.l2_bytes), each.key))
    return replace(own or TunedGpu(key, (), nearest.guard, ()), stand_in=nearest)


@dataclass(frozen=True, slots=True)
class TunedFp8Gpu:
    """The FP8 kernels and times of one kind of GPU. names: of the cards that were measured.

    spare: kernels for shapes where the rules allow no winner to run. They were not timed.
    """

    key: GpuKey
    names: tuple[str, ...]
    winners: tuple[Timed, ...]
    spare: tuple[CompiledKernel, ...] = ()


class PackedCubin(NamedTuple):
    """Where a cubin is: the archive below CUBINS, and its first byte and size in it, unpacked."""

    archive: str
    first: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Table:
    """A package's table. attnsweep: the version that wrote it.

    archives: of each cubin that is packed, where it is; the others are files below CUBINS.
    fp8: what is known in FP8, of GPUs that also have winners in 16 bits or have none.
    """

    directory: Path
    attnsweep: str
    digest: str
    gpus: Mapping[GpuKey, TunedGpu]
    archives: Mapping[str, PackedCubin] = field(default_factory=dict)
    fp8: Mapping[GpuKey, TunedFp8Gpu] = field(default_factory=dict)

    def code(self, code: Code) -> bytes:
        """A cubin's bytes. Raises PackageError if it is missing, or not what was exported."""
        cubins, packed = self.directory / CUBINS, self.archives.get(code.file)
        path = cubins / (code.file if packed is None else packed.archive)
        try:
            if packed is None:
                data = path.read_bytes()
            else:
                data = unpacked(path)[packed.first : packed.first + packed.nbytes]
                path /= code.file
        except (OSError, ImportError, RuntimeError) as error:
            raise PackageError(f"{path}: cannot be read: {error}; export again") from error
        if hashlib.sha256(data).hexdigest() != code.sha256:
            raise PackageError(f"{path}: damaged: its SHA-256 is not the table's; export again")
        return data


@functools.lru_cache(maxsize=_KEPT)
def unpacked(path: Path) -> bytes:
    """The bytes of an archive. Raises OSError, ImportError or RuntimeError.

    It is a stream of LZMA2 that goes on after the bytes of BASE. liblzma takes such bytes when it
    compresses; here it gets them as chunks that are not compressed, which it only copies.
    """
    import lzma  # a Python may have been built without it

    before = b"" if path.name == BASE else unpacked(path.with_name(BASE))
    how = [{"id": lzma.FILTER_LZMA2, "dict_size": WINDOW}]
    try:
        reading = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=how)
        for at in range(0, len(before), 2**16):
            block = before[at : at + 2**16]  # the first one, 1, begins anew
            reading.decompress(
                bytes([2 if at else 1]) + (len(block) - 1).to_bytes(2, "big") + block
            )
        data = reading.decompress(path.read_bytes(), WINDOW)
    except (lzma.LZMAError, EOFError) as error:
        raise RuntimeError(f"damaged: {error}") from error
    if not reading.eof:
        raise RuntimeError(f"damaged: cut, or more than {WINDOW} bytes")
    return data


def read_table(directory: Path) -> Table:
    """The table of a package. Raises PackageError if there is none that this code can read."""
    path = directory / TABLE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PackageError(f"{path}: cannot be read: {error.strerror}; export again") from error
    try:
        raw = json.loads(data)
        found = raw["format"]
    except _NONSENSE as error:
        raise PackageError(f"{path}: damaged: {error!r}; export again") from error
    if found != FORMAT:
        by = raw.get("attnsweep", "?")
        raise PackageError(
            f"{path}: its format is {found}, by attnsweep {by}, and the code next to it reads "
            f"{FORMAT}; export again with one version of attnsweep"
        )
    try:
        configs = raw["configs"]
        kernels = [_kernel(each, configs) for each in raw["kernels"]]
        gpus = [_gpu(each, kernels) for each in raw["gpus"]]
        archives = _archives(raw.get("archives", {}))
        fp8 = [_fp8_gpu(each, kernels) for each in raw.get("fp8", ())]
        by = str(raw["attnsweep"])
    except (*_NONSENSE, ProblemError) as error:
        raise PackageError(f"{path}: damaged: {error!r}; export again") from error
    digest = hashlib.sha256(data).hexdigest()
    own, of_fp8 = {gpu.key: gpu for gpu in gpus}, {gpu.key: gpu for gpu in fp8}
    return Table(directory, by, digest, own, archives, of_fp8)


def _archives(raw: Mapping[str, Any]) -> dict[str, PackedCubin]:
    """Where each cubin is, from names and sizes of the cubins of each archive."""
    archives: dict[str, PackedCubin] = {}
    for archive, files in raw.items():
        if not _is_name(archive):
            raise ValueError(f"{archive!r} is no file name")
        first = 0
        for file, nbytes in files:
            if type(file) is not str or type(nbytes) is not int or not 0 < nbytes <= WINDOW:
                raise TypeError(f"{archive} has {file!r} of {nbytes!r} bytes")
            archives[file] = PackedCubin(archive, first, nbytes)
            first += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return archives


def _kernel(raw: Mapping[str, Any], configs: Sequence[str]) -> CompiledKernel:
    stages, family = raw["stages"], raw.get("family", WGMMA.kernel.name)
    op = "backward" if raw["mask"].endswith(" backward") else "forward"
    declared = DECLARED[family].kernel
    if op not in declared.ops or raw["dtype"] not in declared.dtypes:
        raise ValueError(f"{family} has no {op} of {raw['dtype']}")
    codes = {name: _code(family, name, digest) for name, digest in stages.items()}
    config = _numbered(configs, raw["config"])
    return _sound(CompiledKernel(**{**raw, "config": config, "stages": codes}))


def _code(family: str, stage: str, sha256: str) -> Code:
    """The code of a stage, whose file and function are named by its digest and its stage."""
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise ValueError(f"{sha256!r} is no SHA-256")
    return Code(f"{sha256[:16]}.cubin", sha256, family + ("" if stage == "fwd" else f"_{stage}"))


def _is_name(file: str) -> bool:
    """Whether it is the name of a file in a directory, and no path to elsewhere."""
    return os.path.basename(file) == file and file not in ("", ".", "..") and "\0" not in file


@functools.cache
def _declared(kind: Any) -> tuple[tuple[str, type], ...]:
    """Name and type of a row's fields that are numbers or text."""
    written = ((each.name, str(each.type)) for each in fields(kind))
    return tuple((name, _TYPES[of]) for name, of in written if of in _TYPES)


def _sound(made: _T) -> _T:
    """A row whose fields have their declared types, and numbers that can be calculated with."""
    row: Any = type(made)
    for name, kind in _declared(row):
        value: Any = getattr(made, name)
        found: type = type(value)
        if kind is float:
            positive = isinstance(made, Guard) or value > 0
            right = found in (int, float) and math.isfinite(value) and positive
        else:
            right = found is kind and (kind is not int or 1 <= value < 2**31)
        if not right:
            raise ValueError(f"{name} is {value!r}")
    return made


def _numbered(kernels: Sequence[_T], number: int) -> _T:
    if number < 0:
        raise IndexError(f"kernel {number}")
    return kernels[number]


def _key(raw: Mapping[str, Any]) -> GpuKey:
    major, minor = raw["compute_capability"]
    key = GpuKey((int(major), int(minor)), int(raw["sm_count"]), int(raw["l2_bytes"]))
    if min(key.sm_count, key.l2_bytes) < 1:
        raise ValueError(f"{key}")
    return key


def _won(raw: Mapping[str, Any], kernels: list[CompiledKernel]) -> tuple[Any, ...]:
    """A winner's problem and its kernel, and its other facts."""
    facts = dict(raw)
    problem = Problem.parse(facts.pop("problem"))
    kernel = _numbered(kernels, facts.pop("kernel"))
    if kernel.kind != kind_of_code(problem):
        raise ValueError(f"a kernel of other code serves {problem.label}")
    return problem, kernel, facts


def _gpu(raw: Mapping[str, Any], kernels: list[CompiledKernel]) -> TunedGpu:
    winners = []
    for each in raw["winners"]:
        problem, kernel, facts = _won(each, kernels)
        others = tuple((_numbered(kernels, n), float(us)) for n, us in facts.pop("others"))
        if not all(0 < us < math.inf for _, us in others):
            raise ValueError(f"times on {problem.label}: {others}")
        winners.append(_sound(Winner(problem, kernel, **facts, others=others)))
    twins = tuple(_numbered(kernels, number) for number in raw.get("twins", ()))
    rate = float(raw["memory_bytes_per_us"])
    if not 0 < rate < math.inf:
        raise ValueError(f"memory_bytes_per_us is {rate}")
    names, guard = tuple(raw["names"]), _sound(Guard(**raw["guard"]))
    return TunedGpu(_key(raw), names, guard, tuple(winners), rate, twins)


def _fp8_gpu(raw: Mapping[str, Any], kernels: list[CompiledKernel]) -> TunedFp8Gpu:
    won = [_won(each, kernels) for each in raw["winners"]]
    winners = tuple(_sound(Timed(problem, kernel, **facts)) for problem, kernel, facts in won)
    spare = tuple(_numbered(kernels, number) for number in raw["spare"])
    return TunedFp8Gpu(_key(raw), tuple(raw["names"]), winners, spare)
