"""One way to call a peer, and why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# By baseline, the first words of PyTorch's `… kernel not used because:`.
_TORCH_NAMES = {
    "torch_flash": "flash attention",
    "torch_cudnn": "cudnn attention",
    "torch_efficient": "memory efficient",
}


def why_not(name: str, error: Exception, warned: Sequence[str]) -> str:
    """PyTorch's warnings about this backend, or the first line of the error.

    PyTorch warns about every backend in turn, whichever was asked for. Before the lines with the
    reasons there is a line such as `Flash attention kernel not used because:`.
    """
    reasons: dict[str, None] = {}
    ours = False
    for line in (part for text in warned for part in text.split(" (Triggered")[0].splitlines()):
        head, found, rest = line.partition("not used because:")
        if found:
            label = _TORCH_NAMES.get(name)
            ours = label is not None and head.strip().lower().startswith(label)
        said = (rest if found else line).strip().rstrip(".")
        if ours and said:
            reasons[said] = None
    first = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ("; ".join(reasons) or (first or [type(error).__name__])[0])[:400]
