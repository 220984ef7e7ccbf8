"""Changes to scores before the softmax: softcap, sinks, biases. The standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attnsweep.core.errors import ProblemError

WORDS = r"(?: +softcap\([^)]*\))?(?: +sinks)?(?: +bias\([^)]*\))?"
"""Regular expression of `Scores.label`."""
_SOFTCAP = re.compile(r"softcap\(([^)]*)\)")
_BIAS = re.compile(r"bias\(([^)]*)\)")
_OWN = ("item", "head")
KINDS = ("softcap", "sinks", "bias")
"""What a family may be able to do."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores that a softmax takes, computed from scaled scores s.

    softcap: softcap * tanh(s / softcap); 0: s itself. bias: a tensor that is added then, an input
    `bias` of q's dtype, (batch, heads, seqlen_q, seqlen_k); it has one for all items of the batch
    without "item", and one for all heads without "head". Its rows are a multiple of 8 elements
    apart, and what lies between is no one's. Minus infinity in it hides a key. sinks:
    each query head has one more score, of an input `sinks`, float32 (heads,): it takes weight from
    the keys and has no value.
    """

    softcap: float = 0
    sinks: bool = False
    bias: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.softcap) is float and self.softcap.is_integer():
            object.__setattr__(self, "softcap", int(self.softcap))
        number = type(self.softcap) in (int, float) and math.isfinite(self.softcap)
        if not number or self.softcap < 0:
            raise ProblemError(f"softcap is a number above 0, not {self.softcap!r}")
        if self.bias is not None and not {*self.bias} <= {*_OWN}:
            own = ", ".join(map(str, self.bias))
            raise ProblemError(f"a bias is of {', '.join(_OWN)}, not of {own}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The KINDS that a family must support."""
        there = (self.softcap, self.sinks, self.bias is not None)
        return tuple(kind for kind, has in zip(KINDS, there, strict=True) if has)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that distinguish such values."""
        if self == PLAIN:
            return ()
        own = 0 if self.bias is None else 1 + sum(2 ** _OWN.index(name) for name in {*self.bias})
        return self.softcap, int(self.sinks), own

    @property
    def label(self) -> str:
        """` softcap(50)`, ` sinks`, ` bias(item,head)`: those that there are, or nothing."""
        cap = f" softcap({self.softcap:g})" if self.softcap else ""
        bias = "" if self.bias is None else f" bias({','.join(self.bias)})"
        return cap + " sinks" * self.sinks + bias

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in rows and specs, only those that are set."""
        given = {"softcap": self.softcap} if self.softcap else {}
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
        )

    @classmethod
    def parse(cls, text: str) -> Scores:
        """Scores from a label. Raises ProblemError."""
        cap, bias = _SOFTCAP.search(text), _BIAS.search(text)
        try:
            softcap = float(cap[1]) if cap else 0
        except ValueError:
            raise ProblemError(f"{cap and cap[0]!r}: softcap is a number above 0") from None
        names = None if bias is None else in_order(filter(None, bias[1].split(",")))
        return cls(softcap, "sinks" in text, names)


def in_order(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names in the order of a tensor's dimensions; unknown ones last."""
    given = [names] if isinstance(names, str) else [str(name).strip() for name in names]
    known = [name for name in _OWN if name in given]
    return (*known, *(name for name in given if name not in _OWN))


PLAIN = Scores()
