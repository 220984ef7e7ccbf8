"""Problem: one attention shape, its FLOPs and its minimum bytes."""

from __future__ import annotations

import marshal
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from attnsweep.core.errors import ProblemError
from attnsweep.core.formats import DTYPE_BYTES as DTYPE_BYTES
from attnsweep.core.formats import FORMATS, Format
from attnsweep.core.formats import SCALE_BLOCK as SCALE_BLOCK
from attnsweep.core.formats import Dtype as Dtype
from attnsweep.core.layouts import DENSE, Layout, of_facts, of_label
from attnsweep.core.layouts import Packed as Packed
from attnsweep.core.layouts import Padded as Padded
from attnsweep.core.layouts import Paged as Paged
from attnsweep.core.masks import CAUSAL as CAUSAL
from attnsweep.core.masks import FULL as FULL
from attnsweep.core.masks import Boolean as Boolean
from attnsweep.core.masks import Interval as Interval
from attnsweep.core.masks import Mask, Range, mask_of_facts, mask_of_label
from attnsweep.core.ops import BACKWARD as BACKWARD
from attnsweep.core.ops import FORWARD, OPS, Op, Tensor
from attnsweep.core.scores import PLAIN, WORDS
from attnsweep.core.scores import Scores as Scores

MOST_MEMORY_BYTES = 288 * 2**30
"""Memory of the largest card there is, a B300. No card holds the tensors of a larger problem."""
MOST_ITEMS = 2**18
"""Items with keys of their own, or packed sequences: each is listed wherever keys are counted."""
MOST_DRAWN = 2**32
"""Pairs of a query and a key of a drawn mask: each is drawn wherever they are counted."""
LOG2E = math.log2(math.e)
"""log2(e). Kernels scale scores by it, because the hardware computes exp2, not exp."""


def ceil_div(a: int, b: int) -> int:
    """The smallest whole number that is at least a / b."""
    return -(-a // b)


_SIZE = r"(\d{1,18})"
_LABEL = re.compile(
    rf"\(?{_SIZE}, ?{_SIZE}(?:/{_SIZE})?, ?{_SIZE}(?:x{_SIZE})?, ?{_SIZE}(?:/{_SIZE})?\)?"
    r"(?: +(?!causal_|window|boolean|padded|paged|packed|scale|softcap|sinks|bias|value_|backward)"
    r"(\w+))?"
    r"(?: +(full|(?:causal|window)(?:_top_left)?(?:\([^)]*\))?|boolean\(\S+\)))?"
    r"(?: +(pa(?:dded|cked|ged)\([^)]*\)))?(?: +(value_in_key))?"
    rf"({WORDS})"
    r"(?: +(backward))?"
)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Problem:
    """One attention call: O = softmax(scale Q Kᵀ) V, or as `scores` change them.

    Or, with `op` BACKWARD, the gradients of Q, K and V: see core/ops.py.

    q, o: (batch, heads, seqlen_q, head_dim) · k, v: (batch, heads_kv, seqlen_k, head_dim), all
    contiguous; with `head_dim_v`, v and o have rows of that many elements. Query head h reads key
    head h // (heads // heads_kv). `mask` says which keys a query sees; causal=True is another way
    to write mask=CAUSAL. A query that sees none has output 0, and a log-sum-exp of minus infinity.
    In a padded `layout`, an item of the batch has keys of its own range alone, which is one more
    input of a call, `key_range`, int32 (batch, 2): the first key and the one after the last. A
    query sees a key if the mask and the range let it. A Boolean mask is an input too, `mask`. In a
    paged layout, k and v are pages, and a table says which an item has: see Paged. With
    `value_in_key`, there is no v: the first head_dim_v elements of a key are its value, as in MLA's
    decoding.

    In e4m3, e4m3_tensor and e4m3_block, q, k and v are FP8 (1 sign, 4 exponent, 3 mantissa bits,
    no infinity) and o is bf16. A stored value times its scale is the value. The scales are three
    more inputs of a call, float32 and above 0, which a launch names as it names q, k and v:
    q_scale, k_scale, v_scale, each (batch, heads_kv). The query heads of a key head share a scale.
    e4m3_tensor: all scales of a tensor are equal. e4m3_block: k_scale and v_scale are
    (batch, heads_kv, ceil(seqlen_k / SCALE_BLOCK)), one of each block of SCALE_BLOCK keys.
    Raises ProblemError for a shape that cannot exist.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: Dtype = "fp16"
    mask: Mask = FULL
    layout: Layout = DENSE
    scores: Scores = PLAIN
    op: Op = FORWARD
    """What a call computes."""
    head_dim_v: int | None = None
    """Elements of a row of v and o, if they are not as many as of q and k: see value_dim."""
    value_in_key: bool = False
    # The hash of whole numbers, which is the same in every process. Dispatch asks for it in each
    # new call, so it is worked out once.
    _hash: int = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        batch: int,
        heads: int,
        heads_kv: int,
        seqlen_q: int,
        seqlen_k: int,
        head_dim: int,
        dtype: Dtype = "fp16",
        mask: Mask = FULL,
        layout: Layout = DENSE,
        scores: Scores = PLAIN,
        op: Op = FORWARD,
        head_dim_v: int | None = None,
        value_in_key: bool = False,
        *,
        causal: bool | None = None,
    ) -> None:
        """causal: in the place of `mask`, CAUSAL or FULL. head_dim_v: head_dim is None's too."""
        if causal is not None:
            mask = CAUSAL if causal else FULL
        mask = mask.of_lengths(seqlen_q, seqlen_k)
        sizes = (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim)
        of_v = None if head_dim_v == head_dim else head_dim_v
        if scores.scale is not None and math.isclose(scores.scale**2 * head_dim, 1):
            scores = replace(scores, scale=None)
        values = (*sizes, dtype, mask, layout, scores, op, of_v, value_in_key)
        for each, value in zip(fields(self), values, strict=False):
            object.__setattr__(self, each.name, value)
        self._check()
        own = [[*FORMATS].index(dtype), *mask.numbers, *layout.numbers, *scores.numbers]
        own += ([1] if op is not FORWARD else []) + ([of_v] if of_v else [])
        own += [-1] if value_in_key else []
        object.__setattr__(self, "_hash", hash((*sizes, *own)))

    def __hash__(self) -> int:
        return self._hash

    def _check(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ProblemError(f"{name} must be at least 1, not {getattr(self, name)}")
            if getattr(self, name) >= 2**31:
                raise ProblemError(f"{name} must be at most {2**31 - 1}")
        if self.value_dim < 1:
            raise ProblemError(f"head_dim_v must be at least 1, not {self.value_dim}")
        if self.dtype not in FORMATS:
            raise ProblemError(f"unknown dtype {self.dtype!r}: use one of {', '.join(FORMATS)}")
        format = self.format
        if self.head_dim * format.nbytes % format.row_bytes:
            tiles = f"{format.kind} tiles have rows of {format.row_bytes} bytes"
            raise ProblemError(
                f"{self.dtype} with head_dim {self.head_dim}: {tiles}",
                hint=f"use a multiple of {format.row_bytes // format.nbytes}",
            )
        if self.heads % self.heads_kv:
            raise ProblemError(
                f"heads_kv must divide heads: {self.heads} is not a multiple of {self.heads_kv}"
            )
        for what, hint in self._faults():
            raise ProblemError(f"{self.label}: {what}", hint=hint)
        if (size := _all_bytes(self)) > MOST_MEMORY_BYTES:
            raise ProblemError(
                f"{self.label}: its tensors need {size / 2**30:,.0f} GiB, and the "
                f"largest card has {MOST_MEMORY_BYTES // 2**30} GiB",
                hint="make batch, heads, seqlen or head_dim smaller",
            )

    def _faults(self) -> Iterator[tuple[str, str | None]]:
        """Pairs: facts that exclude each other, and what to write instead."""
        mask, layout, format = self.mask, self.layout, self.format
        if mask.pattern is not None and layout != DENSE:
            hint = "boolean(padding,40) hides padding by itself"
            yield "a boolean mask has no padding beside it", hint
        items = layout.sequences or (layout != DENSE or mask.of_item) * self.batch
        if items > MOST_ITEMS:
            yield f"at most {MOST_ITEMS} items have keys of their own, not {items}", "write fewer"
            return
        if mask.pattern is not None and self.seqlen_q * self.seqlen_k > MOST_DRAWN:
            yield f"at most {MOST_DRAWN} pairs of a pattern are drawn", "make seqlen smaller"
        yield from layout.faults(self)
        if self.value_in_key and self.value_dim > self.head_dim:
            yield f"a key has no {self.value_dim} elements to be its value", None
        parts = [*["head_dim_v"] * bool(self.head_dim_v), *["value_in_key"] * self.value_in_key]
        parts += self.scores.kinds
        yield from ((f"{format.kind} has no {one}", None) for one in parts if one in format.lacks)
        if self.scores.bias is not None and (mask != FULL or layout != DENSE):
            hint = "minus infinity in a bias hides a key by itself"
            yield "a bias has no mask beside it", hint
        yield from self.op.faults(self)

    @property
    def causal(self) -> bool:
        """Whether the mask is the causal one."""
        return self.mask == CAUSAL

    @property
    def value_dim(self) -> int:
        """Elements of a row of v and o: head_dim_v, or else head_dim."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def head_dims(self) -> tuple[int, int]:
        """(head_dim, head_dim_v): the row lengths of q and k, and of v and o."""
        return self.head_dim, self.value_dim

    @property
    def rows_with_keys(self) -> int:
        """Queries of a head that see a key, in the whole batch."""
        return _rows_with_keys(self)

    @property
    def has_empty_rows(self) -> bool:
        """Whether some queries see no key: their output is 0, their log-sum-exp minus infinity."""
        return self.rows_with_keys < self.batch * self.seqlen_q

    @property
    def kind(self) -> str:
        """`full`, `causal`, `window` or `boolean`, or the layout: `padded`, `packed`, `paged`."""
        if self.mask.as_tensor or self.layout == DENSE:
            return self.mask.kind
        return self.layout.kind

    @property
    def variant(self) -> str:
        """The code that serves a head_dim and dtype: `causal`, `window sinks`, `full v128`."""
        own = [f"v{self.head_dim_v}"] if self.head_dim_v else []
        own += ["value_in_key"] if self.value_in_key else []
        own += [] if self.op == FORWARD else [self.op.name]
        return " ".join((self.kind, *self.scores.kinds, *own))

    @property
    def key_ranges(self) -> tuple[Range, ...]:
        """The keys that each item of the batch has: the first, and the one after the last."""
        return self.layout.ranges(self.batch, self.seqlen_k)

    @property
    def diagonals(self) -> tuple[int, int]:
        """(low, high): query i sees the keys i + low to i + high that there are.

        In a packed layout i counts from the key beside the last query of the sequence.
        """
        return self.layout.diagonals(self.mask.interval, self.seqlen_q, self.seqlen_k)

    @property
    def sequence_ranges(self) -> tuple[tuple[Range, Range], ...]:
        """The range of queries and the range of keys of each packed sequence."""
        assert isinstance(self.layout, Packed)
        return self.layout.of_sequences(self.seqlen_q, self.seqlen_k)

    def query_tiles(self, block_m: int) -> int:
        """Number of tiles of block_m queries, over all heads."""
        return self.batch * self.heads * ceil_div(self.seqlen_q, block_m)

    @property
    def label(self) -> str:
        """Short, unambiguous name: `(1,16,1024,64) fp16 causal`, `(2,32/8,64x80,128) bf16 full`.

        With head_dim_v, `(1,16,2048,192/128) bf16 causal`. With padding, `(4,8,512,64) bf16 causal
        padded(right,40)`; then come ` value_in_key`, `scores.label`, and ` backward` of such calls.
        """
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        seqlen = (
            f"{self.seqlen_q}"
            if self.seqlen_q == self.seqlen_k
            else f"{self.seqlen_q}x{self.seqlen_k}"
        )
        dims = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        sizes = f"({self.batch},{heads},{seqlen},{dims})"
        op = "" if self.op == FORWARD else f" {self.op.name}"
        seen = f"{self.mask.label}{self.layout.label}" + " value_in_key" * self.value_in_key
        return f"{sizes} {self.dtype} {seen}{self.scores.label}{op}"

    @classmethod
    def parse(cls, text: str) -> Problem:
        """The problem of a label; without dtype and mask it is fp16 and full: `1,16,1024,64`.

        Raises ProblemError for any other text.
        """
        match = _LABEL.fullmatch(text.strip())
        if match is None:
            raise ProblemError(
                f"{text!r} is not a problem",
                hint="write batch, heads, seqlen, head_dim, and dtype and mask if not fp16 and "
                "full: '1,16,1024,64' or '(2,32/8,512x2048,128) bf16 causal'",
            )
        b, heads, kv, q, k, d, of_v, dtype, mask, padding, in_key, scores, op = match.groups()
        sizes = (int(b), int(heads), int(kv or heads), int(q), int(k or q), int(d))
        known: Any = dtype or "fp16"  # Problem refuses any other dtype
        layout = of_label(padding) if padding else DENSE
        seen = mask_of_label(mask) if mask else FULL
        how = Scores.parse(scores), OPS[op or "forward"], int(of_v) if of_v else None
        return cls(*sizes, known, seen, layout, *how, in_key is not None)

    def __repr__(self) -> str:
        """The repr of a dataclass of the facts: fingerprints of recorded rows hash it."""
        facts = ", ".join(f"{name}={value!r}" for name, value in self.facts.items())
        return f"Problem({facts})"

    @property
    def facts(self) -> dict[str, Any]:
        """Sizes, dtype and mask as rows have them in JSON."""
        sizes = {name: getattr(self, name) for name in SIZES}
        own = self.mask.facts | self.layout.facts | self.scores.facts
        op = {} if self.op == FORWARD else {"op": self.op.name}
        of_v = {} if self.head_dim_v is None else {"head_dim_v": self.head_dim_v}
        in_key = {"value_in_key": True} if self.value_in_key else {}
        return sizes | {"dtype": self.dtype} | own | op | of_v | in_key

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Problem:
        """The problem of such facts. Raises ProblemError, also for keys of a later version."""
        if unknown := facts.keys() - FACTS:
            raise ProblemError(
                f"a problem has no {', '.join(sorted(unknown))}: written by another version of "
                "attnsweep?"
            )
        own = {name: facts[name] for name in (*SIZES, "dtype") if name in facts}
        missing = [name for name in SIZES if not isinstance(own.get(name), int)]
        if missing:
            raise ProblemError(f"not a problem: no whole number {', '.join(missing)}")
        values: dict[str, Any] = {"mask": mask_of_facts(facts), "layout": of_facts(facts)}
        values["scores"] = Scores.of(facts)
        if (op := facts.get("op", FORWARD.name)) not in OPS:
            raise ProblemError(f"an op is one of {', '.join(OPS)}, not {op!r}")
        of_v = facts.get("head_dim_v")
        if not isinstance(of_v, int | None):
            raise ProblemError(f"head_dim_v is a whole number, not {of_v!r}")
        in_key = bool(facts.get("value_in_key"))
        return cls(**own | values, op=OPS[op], head_dim_v=of_v, value_in_key=in_key)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        """In models a problem is its facts. Nothing else of this file needs pydantic."""
        from pydantic_core import core_schema

        def validated(given: Any) -> Problem:
            if isinstance(given, Problem):
                return given
            with suppress(Exception):  # what is wrong is said below
                return _of_bytes(marshal.dumps(given, 2))
            try:
                return cls.of(given)
            except (ProblemError, TypeError, AttributeError) as error:
                raise ValueError(str(error)) from error

        facts = core_schema.plain_serializer_function_ser_schema(lambda problem: problem.facts)
        return core_schema.no_info_plain_validator_function(validated, serialization=facts)

    @property
    def format(self) -> Format:
        """How q, k and v are stored."""
        return FORMATS[self.dtype]

    @property
    def out_dtype(self) -> str:
        """Type of o: bf16 if q, k and v are FP8, otherwise theirs."""
        return self.format.out

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of a call's inputs: q, k, v, and what else there is, as `op.inputs` has them."""
        return _tensors(self)[0]

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the inputs that are numbers, and do not say which keys are hidden."""
        return tuple(t.name for t in self.op.inputs(self) if t.dtype not in ("bool", "int32"))

    @property
    def items_differ(self) -> bool:
        """Whether the items of a batch see different keys."""
        return self.mask.of_item or self.layout.of_item

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the scales of q, k and v, or of k and v alone."""
        return self.format.scales or self.layout.scales

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of a call's outputs."""
        return _tensors(self)[1]

    def tensor(self, name: str) -> Tensor:
        """An input or output of a call, or what a callable may return beside."""
        return _tensors(self)[2][name]

    def bytes_of(self, tensor: str) -> int:
        """Bytes of such a tensor."""
        return self.tensor(tensor).nbytes

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Shape of such a tensor: four sizes, but of scales two or three, of sinks one."""
        return self.tensor(tensor).shape

    @property
    def scale(self) -> float:
        """The softmax scale: that of `scores`, or else 1 / sqrt(head_dim)."""
        own = self.scores.scale
        return 1.0 / math.sqrt(self.head_dim) if own is None else float(own)

    @property
    def at_any_scale(self) -> Problem:
        """The problem without a scale of its own, for what is the same with any."""
        if self.scores.scale is None:
            return self
        return replace(self, scores=replace(self.scores, scale=None))

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs over all heads: the pairs that both products and exp need."""
        return self.heads * _pairs(self)

    @property
    def flops(self) -> int:
        """FLOPs of the products (multiply-add = 2), without the softmax and masked pairs."""
        return self.op.flops(self)

    @property
    def min_bytes(self) -> int:
        """Bytes of the inputs read once, and of the outputs: of k and v what queries see.

        Of several queries, only padding counts as not seen.
        """
        pattern = self.mask.pattern
        padded = pattern is not None and pattern.name == "padding"
        if self.seqlen_q == 1 or padded:
            slots = self.layout.slots(self.batch, self.seqlen_k)
            unseen = slots - _pairs(self) // self.seqlen_q
        else:
            unseen = self.layout.unseen(self.batch, self.seqlen_k)
        columns = self.head_dim if self.value_in_key else sum(self.head_dims)
        row = self.heads_kv * columns * DTYPE_BYTES[self.tensor("k").dtype]
        return self.tensor_bytes - unseen * row

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all inputs and outputs."""
        return _tensor_bytes(self)


@lru_cache(maxsize=4096)
def _of_bytes(facts: bytes) -> Problem:
    """The problem of facts as marshal writes them: the rows of a run share one."""
    return Problem.of(marshal.loads(facts))


@lru_cache(maxsize=256)  # judging a call asks for them, dozens of times
def _tensors(p: Problem) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Tensor]]:
    """Names of the inputs, names of the outputs, and all tensors by name."""
    inputs, outputs = p.op.inputs(p), p.op.outputs(p)
    every = {each.name: each for each in (*p.op.written(p), *inputs)}
    return tuple(each.name for each in inputs), tuple(each.name for each in outputs), every


def _all_bytes(p: Problem) -> int:
    return sum(t.nbytes for t in (*p.op.inputs(p), *p.op.outputs(p)))


_tensor_bytes = lru_cache(maxsize=4096)(_all_bytes)


@lru_cache(maxsize=128)
def _pairs(p: Problem) -> int:
    """Pairs of a query and a key that it sees, of one head in the whole batch."""
    if p.mask.pattern is not None:
        from attnsweep.core import boolean_masks  # packages have no NumPy, and no such problem

        return boolean_masks.counts(p)[0]
    return p.layout.pairs(p.mask.interval, p.batch, p.seqlen_q, p.seqlen_k)


@lru_cache(maxsize=128)
def _rows_with_keys(p: Problem) -> int:
    if p.mask.pattern is not None:
        from attnsweep.core import boolean_masks

        return boolean_masks.counts(p)[1]
    empty = p.layout.empty_rows(p.mask.interval, p.batch, p.seqlen_q, p.seqlen_k)
    return p.batch * p.seqlen_q - empty


SIZES = ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")
FACTS = frozenset(
    {
        *(*SIZES, "dtype", "causal", "window", "top_left", "boolean", "padding", "packed"),
        *("paged", "cache_dtype", "scale", "softcap", "sinks", "bias", "op", "head_dim_v"),
        "value_in_key",
    }
)
"""Keys that `Problem.facts` may have."""

Value = int | bool | str | None
"""Value of a parameter. It reaches the preprocessor, so it is never a float. None leaves a keyword
of a call out, and sorts before every other value."""
