"""Scores before the softmax: scale, softcap, sinks, biases. The standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attnsweep.core.errors import ProblemError

WORDS = r"(?: +scale\([^)]*\))?(?: +softcap\([^)]*\))?(?: +sinks)?(?: +bias\([^)]*\))?"
"""Regular expression of `Scores.label`."""
_NUMBER = {name: re.compile(rf"{name}\(([^)]*)\)") for name in ("scale", "softcap")}
_NONE = {"scale": None, "softcap": 0}  # what says that there is none
_LEAST, _MOST = 2.0**-126, 2.0**126  # of float32, with room for a factor of log2(e)
_BIAS = re.compile(r"bias\(([^)]*)\)")
_OWN = ("item", "head")
KINDS = ("softcap", "sinks", "bias")
"""What a family may be able to do."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores that a softmax takes, computed from scaled scores s.

    scale: what products of q and k are multiplied by, None: 1 / sqrt(head_dim). softcap: softcap *
    tanh(s / softcap); 0: s itself. bias: a tensor that is added then, an input `bias` of q's dtype,
    (batch, heads, seqlen_q, seqlen_k); it has one for all items of the batch without "item", and
    one for all heads without "head". Its rows are a multiple of 8 elements apart, and what lies
    between is no one's. Minus infinity in it hides a key. sinks: each query head has one more
    score, of an input `sinks`, float32 (heads,): it takes weight from the keys and has no value.
    """

    softcap: float = 0
    sinks: bool = False
    bias: tuple[str, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in _NUMBER:
            value = getattr(self, name)
            if type(value) is float and value.is_integer():
                object.__setattr__(self, name, int(value))
            if value == _NONE[name]:
                continue
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ProblemError(f"{name} is a number above 0, not {value!r}")
            if not _LEAST <= value <= _MOST:
                hint = f"write one from {_LEAST:.3g} to {_MOST:.3g}"
                raise ProblemError(f"float32 cannot hold this {name}", hint=hint)
        if self.bias is not None and not {*self.bias} <= {*_OWN}:
            own = ", ".join(map(str, self.bias))
            raise ProblemError(f"a bias is of {', '.join(_OWN)}, not of {own}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which of KINDS a family must support; every family takes a scale."""
        there = (self.softcap, self.sinks, self.bias is not None)
        return tuple(kind for kind, has in zip(KINDS, there, strict=True) if has)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that distinguish such values."""
        if self == PLAIN:
            return ()
        own = 0 if self.bias is None else 1 + sum(2 ** _OWN.index(name) for name in {*self.bias})
        of_scale = () if self.scale is None else (self.scale,)
        return self.softcap, int(self.sinks), own, *of_scale

    @property
    def label(self) -> str:
        """` scale(1)`, ` softcap(50)`, ` sinks`, ` bias(item,head)`: those that there are."""
        scale = "" if self.scale is None else f" scale({self.scale!r})"
        cap = f" softcap({self.softcap!r})" if self.softcap else ""
        bias = "" if self.bias is None else f" bias({','.join(self.bias)})"
        return scale + cap + " sinks" * self.sinks + bias

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in rows and specs, only those that are set."""
        given = {} if self.scale is None else {"scale": self.scale}
        given |= {"softcap": self.softcap} if self.softcap else {}
        given |= {"sinks": True} if self.sinks else {}
        return given if self.bias is None else given | {"bias": [*self.bias]}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Scores:
        """Scores from a problem's facts. Raises ProblemError."""
        bias = facts.get("bias")
        return cls(
            facts.get("softcap") or 0,
            bool(facts.get("sinks")),
            None if bias is None else in_order(bias),
            facts.get("scale"),
        )

    @classmethod
    def parse(cls, text: str) -> Scores:
        """Scores from a label. Raises ProblemError."""
        bias, given = _BIAS.search(text), dict[str, float]()
        for name, pattern in _NUMBER.items():
            if found := pattern.search(text):
                try:
                    given[name] = float(found[1])
                except ValueError:
                    raise ProblemError(f"{found[0]!r}: {name} is a number above 0") from None
        names = None if bias is None else in_order(filter(None, bias[1].split(",")))
        return cls(given.get("softcap", 0), "sinks" in text, names, given.get("scale"))


def in_order(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names in the order of a tensor's dimensions; unknown ones last."""
    given = [names] if isinstance(names, str) else [str(name).strip() for name in names]
    known = [name for name in _OWN if name in given]
    return (*known, *(name for name in given if name not in _OWN))


PLAIN = Scores()
