"""One way to call a peer, and why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnsweep.problem import Problem

if TYPE_CHECKING:
    from attnsweep.gpu.device import Session

Forward = Callable[..., Any]
"""A call: attention of its inputs, as a tensor (batch, heads, seqlen, head_dim)."""


class Unavailable(Exception):
    """A baseline that cannot run this problem here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to call a peer. convert: makes its inputs of the problem's before any call is timed.

    spare: tried only if no way before it works. finish: makes the values of the output of it and
    of the inputs, if it is stored with a scale; it is not timed.
    """

    forward: Forward
    convert: Callable[..., tuple[Any, ...]] | None = None
    spare: bool = False
    finish: Callable[..., Any] | None = None


Builder = Callable[[Any, Problem, "Session"], list[Way]]
"""Takes the module torch; raises Unavailable, or anything else, if the peer cannot run here."""
