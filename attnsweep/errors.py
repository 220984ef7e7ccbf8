"""Every error attnsweep raises on purpose, as one tree.

Each error says where, what, why and what to do next, and carries the exit code of the command that
it ends: 0 ok · 1 every candidate failed, or one regressed · 2 usage or spec · 3 no usable GPU · 4
inconclusive.
"""

from __future__ import annotations


class AttnsweepError(Exception):
    """Base of all errors. `where`: a file:line:column or a command; `hint`: what to do next."""

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(self.render())

    def render(self) -> str:
        """`where: what`, then the hint on its own indented line."""
        first = f"{self.where}: {self.what}" if self.where else self.what
        return f"{first}\n  {self.hint}" if self.hint else first


class SpecError(AttnsweepError):
    """The YAML sweep spec is wrong: syntax, an unknown name, a value out of range."""


class ProblemError(AttnsweepError):
    """An attention shape that cannot exist, such as causal with seqlen_q > seqlen_k."""


class KernelError(AttnsweepError):
    """A kernel declaration is wrong, or no family has that name."""


class SpaceError(AttnsweepError):
    """The rules leave no candidate, or no family supports the problem."""


class StoreError(AttnsweepError):
    """A run directory cannot be read, written or locked."""


class ToolchainError(AttnsweepError):
    """NVRTC (or its Python binding) is missing or refuses the architecture."""


class CompileError(AttnsweepError):
    """NVRTC or ptxas refused one stage. `log` is the whole compiler log."""

    def __init__(self, what: str, *, log: str, where: str | None = None) -> None:
        super().__init__(what, where=where)
        self.log = log


class NoGpuError(AttnsweepError):
    """No usable GPU: no driver, a driver too old, CuPy missing, or the wrong architecture."""

    exit_code = 3
