"""Models of a sweep spec's file, its values and the messages for wrong ones.

Values are never converted: a bool is not an int, a quoted number is text, `1e3` is not a whole
number, `no` is text. The models also give the JSON Schema with which editors complete a spec.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from attnsweep.core import share
from attnsweep.core.callables import CALL, CALLABLE, LABEL, Asked
from attnsweep.core.errors import ProblemError, SpecError
from attnsweep.core.formats import FORMATS, CacheDtype
from attnsweep.core.hardware import ARCHS, arch_named
from attnsweep.core.problem import Dtype, Problem
from attnsweep.specs.require import RequireSpec
from attnsweep.specs.yaml_file import NAME_PATTERN, Many, ManyLists, nearest, wrong

Device = Literal["cuda", "replay"]
MAX_PROBLEMS = 1000
"""A spec that expands to more is a mistake: at 1 s a problem and family, it takes hours."""

BaselineName = Literal[
    "torch_flash",
    "torch_cudnn",
    "torch_efficient",
    "torch_math",
    "torch_varlen",
    "unfused",
    "flex",
    "cudnn",
    "cudnn_deterministic",
    "triton_flash",
    "flash_attn_2",
    "flash_attn_3",
    "flash_attn_3_fp8",
    "flash_attn_4",
    "attnsweep_bf16",
    "flash_attn_3_ready",
    "flash_attn_3_fp8_ready",
    "torch_dense",
    "torch_gathered",
    "flash_mla",
    "plain_read",
    "flashinfer",
    "xqa",
]
KNOWN_BASELINES: tuple[BaselineName, ...] = get_args(BaselineName)
OWN_BF16: BaselineName = "attnsweep_bf16"
"""The winner of the recorded runs in bf16, on what FP8 inputs stand for. It must be asked for."""
FLEX: BaselineName = "flex"
"""It must be asked for, since it compiles for seconds; `tune` asks for it where masks are."""
VARLEN: BaselineName = "torch_varlen"
"""It does packed sequences alone, and must be asked for; `tune` asks for it where they are."""
CUDNN_DETERMINISTIC: BaselineName = "cudnn_deterministic"
"""It does backwards alone, and is slower than `cudnn`: it must be asked for."""
OF_PAGED: tuple[BaselineName, ...] = (
    *("flash_attn_3", "flash_attn_3_ready", "flash_attn_3_fp8", "flash_attn_3_fp8_ready"),
    *("torch_dense", "torch_gathered", "flash_mla", "plain_read"),
)
"""Those of a paged cache: all but FlashAttention-3 do nothing else, and must be asked for; `tune`
asks for them where caches are paged."""
PLAIN_READ: BaselineName = "plain_read"
"""A bound and no rival: the time of a kernel that only reads the keys and values of a cache."""
FLASHINFER: tuple[BaselineName, ...] = ("flashinfer", "xqa")
"""They must be asked for, by `tune` too, since they compile for minutes with nvcc."""
_COMPUTED_IN: dict[str, str] = {
    OWN_BF16: "BF16",
    **dict.fromkeys(("flash_attn_3_fp8", "flash_attn_3_fp8_ready"), "FP8"),
}
"""Kinds of formats of baselines that convert their inputs."""
_ASKED = (OWN_BF16, FLEX, VARLEN, CUDNN_DETERMINISTIC, *OF_PAGED[1:2], *OF_PAGED[3:], *FLASHINFER)
BASELINES = tuple(name for name in KNOWN_BASELINES if name not in _ASKED)
"""All other baselines: the default."""


def _baseline_name(value: object) -> object:
    known = isinstance(value, str) and (value in KNOWN_BASELINES or CALLABLE.fullmatch(value))
    if not known:
        raise wrong(
            "{name} cannot be {value}",
            f"{nearest(str(value), KNOWN_BASELINES)}, or a callable of yours as MODULE:FUNCTION",
        )
    if Asked.of(str(value)).strict:
        raise wrong(
            "{name} cannot be {value}", "strict is for candidates: kernels are not timed so"
        )
    return value


def _callable_name(value: object, pattern: str = CALLABLE.pattern) -> object:
    if isinstance(value, str) and re.fullmatch(pattern, value):
        return value
    raise wrong(
        "{name} cannot be {value}", "write a callable as MODULE:FUNCTION or FILE.py:FUNCTION"
    )


def _launcher_name(value: object) -> object:
    if value == "" or (isinstance(value, str) and re.fullmatch(_LAUNCHER, value)):
        return value
    raise wrong(
        "{name} cannot be {value}",
        "write a launcher as FILE.py:FUNCTION, with ?layout=bshd, ?factory=true or both",
    )


def _label(value: str) -> str:
    if re.fullmatch(LABEL, value):
        return value
    raise wrong("{name} cannot name a callable", "take a-z, 0-9, _ and - only")


def in_other_format(provider: str, problem: Problem) -> bool:
    """Whether a baseline computes in another format than the problem's: it is never × base.

    flash_attn_3_fp8 does so of a problem that is not in FP8, whose inputs it converts.
    """
    own = {problem.format.kind}
    if (cache := problem.layout.cache_dtype) is not None:
        own.add(FORMATS[cache].kind)
    return _COMPUTED_IN.get(provider, problem.format.kind) not in own


def _parameter_value(value: object) -> object:
    if type(value) in (int, bool, str) or value is None:
        return value
    raise wrong("{name} must be a whole number, true or false, or text, not {value}")


def _word(value: object) -> object:
    if type(value) in (int, str):
        return value
    raise wrong("{name} must be text or a whole number, not {value}")


def _mapping_or_null(value: object) -> object:
    return {} if value is None else value


def _arch_name(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return arch_named(value).name
    except SpecError as error:
        raise wrong(error.what, nearest(value, ARCHS)) from error


def _callables(value: object, *, strict: bool = False) -> object:
    """Names of callables of a mapping; anything else as it is. strict: whether that is a key."""
    if not isinstance(value, dict):
        return value
    named = TypeAdapter[Any](_Candidates if strict else _Labelled).validate_python(value)
    return [str(Asked(label=label, **dict(one))) for label, one in named.items()]


def _baseline_names(value: object) -> object:
    value = _callables(value)
    if value == "all":
        return list(BASELINES)
    if value in (None, "none"):
        raise wrong("baselines cannot be {value}", "write [] for none, or all")
    if value == []:  # no baseline; other lists must not be empty
        return value
    return value if isinstance(value, list) else [value]


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise wrong(
            "{name} must be a number of bytes or a size, not {value}",
            f"write an int, or a number and one of {', '.join(_UNITS)}: '2 GiB'",
        )
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _share(value: object) -> float:
    try:
        return share.share(value)
    except share.ShareError as error:
        raise wrong(f"{{name}} {error}", error.hint) from error


def _read_by(read: Callable[[Any], object], pattern: str, or_kind: Any = None) -> BeforeValidator:
    """A field that `read` takes; in the schema it is a text of this pattern, or of another kind."""
    kind: Any = Annotated[str, Field(pattern=f"^{pattern}$")]
    return BeforeValidator(read, json_schema_input_type=or_kind | kind if or_kind else kind)


Size = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Side = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] | None
Calls = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
_Share = Annotated[float, Field(ge=share.LEAST, le=share.MOST)]
Slower = Annotated[float, _read_by(_share, share.IN_PERCENT, _Share)]
"""A share by which a check lets code become slower: 0.02, or 2%."""
ParameterValue = Annotated[
    Any,
    BeforeValidator(_parameter_value),
    WithJsonSchema({"type": ["integer", "boolean", "string", "null"]}),
]
Word = Annotated[
    Any,
    BeforeValidator(_word),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
]
"""A part of a mask or a layout: a name, or a number."""
ParameterValues = dict[str, Many[ParameterValue]]
_HOW = "(layout=bshd|factory=true)"
_LAUNCHER = rf"{CALL}(\?{_HOW}(&{_HOW})?)?"


class KernelSpec(BaseModel):
    """Values of a family's parameters, and variants: parameters that change together."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    __pydantic_extra__: ParameterValues = Field(init=False)

    family: StrictStr = ""
    """The family, if the space has a name of its own: a family may have several spaces, and a
    problem names those that it gets under `kernels` (default: the name)."""
    call: Annotated[str, _read_by(_launcher_name, f"({_LAUNCHER})?")] = ""
    """A launcher of yours in place of a family, FILE.py:FUNCTION. Parameters are its keywords, or
    those of the autotuner that it launches; none: that autotuner's configs. null leaves one out.
    With `?factory=true` it is called once, with `problem` and them, and returns the launcher."""
    widen: StrictBool = False
    """With `call` alone: all combinations of the values of that autotuner's configs and of their
    neighbours, half and double of a power of two, as its own function prunes them."""
    variants: dict[str, dict[str, ParameterValues]] = {}
    """Axis to name to parameter values; a config combines one variant of each axis."""


KernelChoice = Annotated[
    KernelSpec, BeforeValidator(_mapping_or_null, json_schema_input_type=KernelSpec | None)
]
ArchName = Annotated[
    StrictStr,
    BeforeValidator(_arch_name),
    WithJsonSchema({"enum": sorted({*ARCHS, *(name.rstrip("a") for name in ARCHS)})}),
]
_OneBaseline = Annotated[str, _read_by(_baseline_name, f"({CALLABLE.pattern})", BaselineName)]
_Natural = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, Field(strict=True, ge=0), _read_by(_bytes, _SIZE.pattern, _Natural)]


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class CallableSpec(_Model):
    """A callable of the user's, and how it is called."""

    call: Annotated[str, _read_by(partial(_callable_name, pattern=CALL), CALL)]
    """MODULE:FUNCTION or FILE.py:FUNCTION."""
    graph: StrictBool | None = None
    """true: it is refused if no CUDA graph holds its calls. false: they are issued one by one
    (default: issued if no graph holds them)."""
    layout: Literal["bhsd", "bshd"] = "bhsd"
    """Layout of q, k, v and o. bshd: views of (batch, seqlen, heads, head_dim)."""
    workspace: Bytes | None = None
    """Device memory that a call may take beside its outputs: an int, or a size like '2 GiB'
    (default: any)."""
    factory: StrictBool = False
    """true: it is called once, with `problem`, and returns what is called on tensors."""


class CandidateSpec(CallableSpec):
    """A callable that is judged, and how."""

    strict: StrictBool = False
    """true: it is called in a process of its own, in chains whose times the judge's clock
    confirms, in rounds with the baselines alone, as by `attnsweep judge --strict`."""


_Labelled = dict[Annotated[str, AfterValidator(_label)], CallableSpec]
_Candidates = dict[Annotated[str, AfterValidator(_label)], CandidateSpec]
Baselines = Annotated[
    list[_OneBaseline],
    BeforeValidator(
        _baseline_names,
        json_schema_input_type=Literal["all"] | _OneBaseline | list[_OneBaseline] | _Labelled,
    ),
]
_OneCallable = Annotated[str, _read_by(_callable_name, f"({CALLABLE.pattern})")]
Callables = Annotated[
    list[_OneCallable],
    BeforeValidator(
        partial(_callables, strict=True), json_schema_input_type=list[_OneCallable] | _Candidates
    ),
]


class MeasureSpec(_Model):
    """How candidates are timed. See docs/measuring.md."""

    rank_by: Literal["warm", "cold", "eager", "energy"] = "warm"
    """What ranks: the time of a call with a warm or a cold L2, the host's cost of issuing one,
    or the energy of a warm one. Tables show the others next to it."""
    rounds: Size = 15
    """Rounds in which finalists and baselines take turns; up to three times as many while the
    best are undecided."""
    finalists: Size = 12
    """Candidates per problem that enter the rounds."""
    replay_us: Size = 1000
    """Shortest timed graph replay, in µs."""
    cold: StrictBool = True
    """Also time with a cold L2, by rotating buffers."""
    eager: StrictBool = True
    """Also time the host's cost of one eager call."""
    energy: StrictBool = False
    """Also measure the energy of a call of each finalist and baseline, by NVML's counter: about
    2 s each (default: true if rank_by is energy)."""
    input_seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] | None = None
    """Seed of q, k and v (default: another in each run; rows keep it)."""
    timeout_s: Annotated[float, Field(strict=True, gt=0)] = 30.0
    """Seconds one candidate may take before its worker is killed."""

    @model_validator(mode="before")
    @classmethod
    def _ranking_by_energy_measures_it(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("rank_by") == "energy":
            return {"energy": True, **data}
        return data

    @property
    def timed_by(self) -> str:
        """The kind of time that the rounds compare, and `time_us` holds."""
        return "warm" if self.rank_by == "energy" else self.rank_by

    @model_validator(mode="after")
    def _ranked_by_what_is_timed(self) -> MeasureSpec:
        if self.rank_by != "warm" and not getattr(self, self.rank_by):
            raise wrong(
                f"measure: rank_by {self.rank_by} needs {self.rank_by}: true",
                f"drop {self.rank_by}: false, or rank by something else",
            )
        return self


class CheckSpec(_Model):
    """When `attnsweep check SPEC --against RUN` calls code slower. See docs/ci.md."""

    slower: Slower = 0.02
    """Slowdown that counts as a regression: 0.02 or 2%."""
    budget_s: Annotated[float, Field(strict=True, gt=0)] = 120.0
    """Seconds of a whole check; problems undecided then are inconclusive."""


class UnservedCalls(_Model):
    """Attention calls of a program that no problem stands for; `attnsweep shapes` notes them."""

    call: StrictStr
    """The call's shape."""
    calls: Annotated[int, Field(strict=True, ge=0)]
    """How often the program called it; 0 if that is unknown."""
    reason: StrictStr
    """Why no family can serve it."""


class ProblemSpec(_Model):
    """One or more problems: a value may be a list, and then every combination is taken."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["seqlen"]}, {"required": ["seqlen_q", "seqlen_k"]}]
        }
    )

    batch: Many[Size]
    """Sequences in the batch."""
    heads: Many[Size]
    """Query heads."""
    heads_kv: Many[Size] | None = None
    """Key and value heads, a divisor of heads (default: heads)."""
    seqlen: Many[Size] | None = None
    """Sets both seqlen_q and seqlen_k."""
    seqlen_q: Many[Size] | None = None
    """Query rows per head."""
    seqlen_k: Many[Size] | None = None
    """Key and value rows per head."""
    head_dim: Many[Size]
    """Elements per head and row."""
    head_dim_v: Many[Size] | None = None
    """Elements per head and row of v and o, if not head_dim: 128 with head_dim 192, as in MLA's
    prefill."""
    value_in_key: Many[StrictBool] = [False]
    """There is no v: the first head_dim_v elements of a key are its value, as in MLA's decoding:
    head_dim 576, head_dim_v 512, heads_kv 1."""
    dtype: Many[Dtype] = ["fp16"]
    """Type of q, k, v and o. e4m3 is FP8 with a scale of each head, e4m3_tensor of each tensor,
    e4m3_block of each 128 keys; o is then bf16."""
    causal: Many[StrictBool] = [False]
    """Mask aligned bottom-right: the last query sees the last key."""
    window: ManyLists[Annotated[list[Side], Field(min_length=2, max_length=2)] | None] = [None]
    """In the place of causal: keys that a query sees before and after its own, [512, 0]; null
    is all of them."""
    top_left: Many[StrictBool] = [False]
    """With causal or window: the diagonal of query i is key i, as in PyTorch's is_causal, and
    not the last query's the last key."""
    padding: ManyLists[Annotated[list[Word], Field(min_length=2, max_length=3)] | None] = [None]
    """Items of a batch that have keys of their own number: the padded side, right or left, and
    percent of the keys that the shortest has, [right, 40]; a seed of their order may follow."""
    packed: ManyLists[Annotated[list[StrictInt], Field(min_length=1, max_length=3)] | None] = [None]
    """Sequences one behind the other, as cu_seqlens say: their number, and percent of the
    longest that the shortest has, [8, 40]; a seed of their order may follow. batch is 1, and
    seqlen counts the tokens of all."""
    paged: ManyLists[Annotated[list[Word], Field(min_length=1, max_length=5)] | None] = [None]
    """A cache of pages with a table of them, as serving engines have it: the page size, and, in any
    order, nhd or hnd (heads before slots), and how many requests have how many keys: [16, hnd,
    '32x128+32x4k']; batch counts requests, and seqlen_k is the longest."""
    cache_dtype: Many[CacheDtype | None] = [None]
    """With paged: k and v in FP8, with a scale of each request and head; q and o stay in dtype."""
    boolean: ManyLists[Annotated[list[Word], Field(max_length=3)] | None] = [None]
    """Calls get the mask as a boolean tensor: one for all, [], or of each item of the batch and
    each head, [item, head]. Or a mask that is no interval, [blocks, 30]. blocks: percent of 128
    x 128 blocks that are seen; documents: their number; holes: percent of causal pairs;
    padding: percent as in padding. A seed may follow."""
    scale: Many[Annotated[float, Field(strict=True, gt=0)] | None] = [None]
    """Scores are this times Q Kᵀ (default: 1 / sqrt(head_dim)): 1.0 in Gemma 4, whose queries and
    keys are normed."""
    softcap: Many[Annotated[float, Field(strict=True, gt=0)] | None] = [None]
    """Scores become softcap * tanh(score / softcap), as in Gemma 2: 50."""
    sinks: Many[StrictBool] = [False]
    """Each query head has one more score, which takes weight and has no value, as in gpt-oss."""
    bias: ManyLists[Annotated[list[Literal["item", "head"]], Field(max_length=2)] | None] = [None]
    """Calls add a tensor to the scores, as attn_mask of q's dtype: one for all, [], or of each
    item of the batch and each head, [item, head]."""
    op: Many[Literal["forward", "backward"]] = ["forward"]
    """What a call computes. backward: the gradients dq, dk, dv from q, k, v, o, lse and do."""
    kernels: Many[StrictStr] | None = None
    """Sweep only these of the spec's kernels on this entry."""
    slower: Slower | None = None
    """Replaces check.slower for the problems of this entry."""
    calls: Calls | None = None
    """How often a program calls this; reports then say what it gains."""

    @model_validator(mode="after")
    def _can_exist(self) -> ProblemSpec:
        self.expand()
        return self

    def expand(self) -> list[Problem]:
        """Every combination, the last field varying fastest."""
        seqlens: list[tuple[int, int]]
        if self.seqlen is not None:
            if self.seqlen_q is not None or self.seqlen_k is not None:
                raise wrong(
                    "seqlen already sets both seqlen_q and seqlen_k",
                    "give seqlen alone, or seqlen_q and seqlen_k",
                )
            seqlens = [(seqlen, seqlen) for seqlen in self.seqlen]
        else:
            for name in ("seqlen_q", "seqlen_k"):
                if getattr(self, name) is None:
                    raise wrong(f"{name} is missing", "give seqlen, or both seqlen_q and seqlen_k")
            seqlens = list(itertools.product(self.seqlen_q or (), self.seqlen_k or ()))
        axes: list[list[Any]] = [self.batch, self.heads, self.heads_kv or [None], seqlens]
        axes += [getattr(self, name) or [None] for name in _FACTS[5:]]
        count = math.prod(map(len, axes))
        if count > MAX_PROBLEMS:
            raise wrong(f"this entry has {count} problems; a spec may have {MAX_PROBLEMS}")
        return [
            _problem(dict(zip(_FACTS, (b, h, kv or h, *lengths, *rest), strict=True)))
            for b, h, kv, lengths, *rest in itertools.product(*axes)
        ]


# Facts of which an entry gives one value or several, in the order in which they vary, the last
# fastest.
_FACTS = (
    *("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim"),
    *("dtype", "causal", "op", "head_dim_v"),
    *("window", "top_left", "padding", "packed", "paged", "cache_dtype", "boolean"),
    *("scale", "softcap", "sinks", "bias", "value_in_key"),
)


def _problem(facts: dict[str, Any]) -> Problem:
    """The problem of these facts. Raises the error of a validator."""
    window, boolean = facts["window"], facts["boolean"]
    if window is not None and facts["causal"]:
        raise wrong("both causal and window", "a causal window is window: [LEFT, 0]")
    window = None if window == [None, None] else window
    if facts["top_left"] and window is None and not facts["causal"]:
        raise wrong("top_left without a mask", "add causal: true, or window: [LEFT, RIGHT]")
    others = window or any(facts[name] for name in ("causal", "padding", "packed", "paged"))
    if others and any(isinstance(value, int) for value in boolean or ()):
        raise wrong("a pattern of boolean beside another mask", "give boolean alone")
    try:
        return Problem.of(facts)
    except ProblemError as error:
        raise wrong(error.what, error.hint) from error


class SearchSpec(_Model):
    """Which candidates are tried, and in which order."""

    strategy: Literal["exhaustive", "gp", "random", "staged"] = "exhaustive"
    """exhaustive: all, in order. gp: a model that begins with recorded runs, and stops by
    itself. random: a sample without repeats. staged: each stage alone, then combinations of the
    best."""
    candidates: Size | None = None
    """Most candidates per kernel and problem; random needs it or budget_s."""
    budget_s: Size | None = None
    """Seconds for trying a problem's candidates; the rounds of the finalists follow."""
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    """Seed of strategies gp and random."""

    @model_validator(mode="after")
    def _random_is_bounded(self) -> SearchSpec:
        if self.strategy == "random" and self.candidates is None and not self.budget_s:
            raise wrong(
                "search: strategy random needs candidates",
                "set the number per kernel and problem, or budget_s: "
                "{strategy: random, candidates: 100}",
            )
        return self


class LimitsSpec(_Model):
    """Candidates above a limit are pruned, with the reason; null is no limit."""

    workspace_bytes: Bytes | None = None
    """Device memory for intermediate buffers: an int, or a size like '2 GiB'."""
    spill_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """Register spills of all stages, in bytes."""


class SpecFile(_Model):
    """A sweep spec of attnsweep: which kernels are tuned on which problems, and how."""

    name: Annotated[StrictStr, Field(pattern=NAME_PATTERN)] | None = None
    """Name of the run's directory (default: the file's stem)."""
    device: Device = "cuda"
    """cuda: measure on a GPU. replay: take times from a recorded run."""
    recording: Annotated[StrictStr, Field(min_length=1)] | None = None
    """With device replay: the run to replay, relative to this file."""
    arch: ArchName | None = None
    """Architecture of the spec; other GPUs are refused."""
    kernel_dir: Annotated[StrictStr, Field(min_length=1)] | None = None
    """Directory with kernel families of your own, relative to this file; --kernels replaces it."""
    problems: Annotated[list[ProblemSpec], Field(min_length=1)]
    """Attention shapes."""
    kernels: Annotated[dict[str, KernelChoice], Field(min_length=1)]
    """Family name to parameter values that replace its own; {} keeps its own."""
    baselines: Baselines = list(BASELINES)
    """Baselines timed in the same rounds: all, a list of names, or a mapping as candidates may
    be."""
    candidates: Callables = []
    """Python callables, as MODULE:FUNCTION or FILE.py:FUNCTION, that are judged and timed in
    the same rounds; nothing is compared with them. Or a mapping of names of yours to how each
    is called."""
    search: SearchSpec = SearchSpec()
    """Which candidates are tried."""
    measure: MeasureSpec = MeasureSpec()
    """How they are timed."""
    limits: LimitsSpec = LimitsSpec()
    """Limits that prune candidates."""
    require: RequireSpec = RequireSpec()  # type: ignore[valid-type]
    """Requirements for compiled code; others are pruned."""
    check: CheckSpec = CheckSpec()
    """When check calls a kernel slower than its baseline."""
    unserved: list[UnservedCalls] = []
    """A program's calls that are none of the problems, for the report."""


MODELS: dict[str, type[BaseModel]] = {
    "": SpecFile,
    "problems": ProblemSpec,
    "baselines": CallableSpec,
    "candidates": CandidateSpec,
    "search": SearchSpec,
    "measure": MeasureSpec,
    "limits": LimitsSpec,
    "require": RequireSpec,
    "check": CheckSpec,
    "unserved": UnservedCalls,
}
"""The model of each top-level key, and "" for that of the file."""
RETIRED: tuple[tuple[str, str], ...] = (("search", "skip_by_bound"), ("measure", "max_error"))
"""Section and key of settings that recorded specs have, and that are ignored."""
