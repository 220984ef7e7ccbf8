"""A baseline: ways to call it, its packages, and why it cannot run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from attnsweep.core.errors import Unavailable as Unavailable
from attnsweep.core.files import install_command
from attnsweep.core.problem import Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

Forward = Callable[..., Any]
"""A call: attention of its inputs, as a tensor (batch, heads, seqlen, head_dim).

Of a backward, dq, dk and dv as a tuple of such tensors, from q, k, v, o, lse and do.
"""


class Unconfirmed(Unavailable):
    """The card, or the clock, was not as it should be: that is no verdict about a callable."""

    status = "damaged"


class Failed(Unavailable):
    """Raised when a candidate's call fails; the row says so, as for a failed launch."""

    status = "launch_error"


class OtherCode(Unavailable):
    """Raised when a candidate launches other code than its config compiled to."""

    status = "wrong"


class NotInstalled(Unavailable):
    """A baseline whose package is missing: `prepare` adds how to get it."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to call a baseline. convert: makes its inputs of the problem's, which is not timed.

    spare: tried only if no way before it works. finish: makes the values of the output of it and
    of the inputs, if it is stored with a scale; it is not timed.
    """

    forward: Forward
    convert: Callable[..., tuple[Any, ...]] | None = None
    spare: bool = False
    finish: Callable[..., Any] | None = None


Builder = Callable[[Any, Problem, "CudaSession"], list[Way]]
"""Takes the module torch; raises Unavailable, or anything else, if the baseline cannot run here."""


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


@dataclass(frozen=True, slots=True)
class Package:
    """The distributions of which one brings a baseline, and how to get it."""

    names: tuple[str, ...]
    fix: str

    def installed(self) -> list[str]:
        """`name version` of each that is installed."""
        found = []
        for name in self.names:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found.append(f"{name} {metadata.version(name)}")
        return found


@dataclass(frozen=True, slots=True)
class Backend:
    """A baseline: which problems it does, and the ways to call it on one of them.

    builders: who makes these, by the op's name; by `forward FP8` or `forward paged` where that is
    called in another way. rounds_scores: how often it rounds its scores: 2
    where it stores them, before and after scaling.
    """

    name: str
    builders: Mapping[str, Builder]
    package: Package
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    masks: tuple[str, ...] = ("full", "causal", "window")
    layouts: tuple[str, ...] = ("dense",)
    scores: tuple[str, ...] = ()
    rounds_scores: int = 0
    head_dim_v: bool = True
    """Whether it may have v of another head_dim than q; which ones, it says when it is called."""
    value_in_key: bool = False
    """Whether it does problems without a v, whose values are a part of the keys."""
    cannot: Callable[[Problem], str | None] = lambda _: None
    """Why it cannot do a problem whose dtype and mask it has, in words after its name; or None."""

    def ways(self, torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        """The ways to call it on a problem: see Builder."""
        op, kinds = problem.op.name, (problem.format.kind, problem.layout.kind)
        own = (self.builders.get(f"{op} {kind}") for kind in kinds)
        build = next(filter(None, own), None) or self.builders[op]
        return build(torch, problem, session)

    def supports(self, problem: Problem) -> str | None:
        """Why it cannot do a problem at all; None if it can, as far as that is known before."""
        if problem.op.name not in (*self.builders, *(name.split()[0] for name in self.builders)):
            return f"{self.name} is timed in no {problem.op.name}"
        if problem.dtype not in self.dtypes:
            return f"{self.name} does not do {problem.dtype}"
        if problem.value_in_key and not self.value_in_key:
            return f"{self.name} has no value_in_key: it reads a v apart from k"
        if problem.head_dim_v and not self.head_dim_v:
            return f"{self.name} has no head_dim_v: v has as many columns as q"
        if problem.mask.kind not in self.masks:
            return f"{self.name} has no mask {problem.mask.label}"
        if problem.layout.kind not in self.layouts:
            kinds = {"padded": "padding", "packed": "packed sequences", "paged": "paged caches"}
            return f"{self.name} has no {kinds.get(problem.layout.kind, problem.layout.kind)}"
        for kind in problem.scores.kinds:
            if kind not in self.scores:
                return f"{self.name} has no {kind}"
        reason = self.cannot(problem)
        return None if reason is None else f"{self.name} {reason}"


TORCH = Package(("torch",), install_command("torch"))
