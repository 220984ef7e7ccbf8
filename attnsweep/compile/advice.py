"""Warnings about what is allowed, but hardly meant so. Each is said once a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from attnsweep.compile.nvrtc import source_closure
from attnsweep.core.errors import KernelError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Value
from attnsweep.core.trial import OURS, Status, Trial
from attnsweep.family.family import Config, Family
from attnsweep.family.space import Space
from attnsweep.specs.load import SweepSpec

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")


class _Asked(Config):
    """A config that remembers which of its parameters were read."""

    __slots__ = ("read",)

    def __init__(self, config: Config) -> None:
        super().__init__(dict(config))
        for name in config:
            del vars(self)[name]  # so that __getattr__ is asked for it
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Value:
        self.read.add(name)
        return super().__getitem__(name)

    def __getattr__(self, name: str) -> int:
        self.read.add(name)
        return super().__getattr__(name)


def unused_parameters(spaces: Iterable[Space], arch: Arch) -> Iterator[str]:
    """A warning for each parameter that is swept, but that neither template nor launch reads.

    All its values then give the same kernel. The template is read with its headers, as text.
    """
    first: dict[str, Space] = {}
    for space in spaces:
        if space.configs:
            first.setdefault(space.kernel.name, space)
    for space in first.values():
        kernel = space.kernel
        if kernel.call:
            continue  # Python knows what a function takes
        words = _words(kernel)
        asked = _Asked(space.configs[0])
        try:
            kernel.launches(asked, space.problem, arch)
        except KernelError:
            continue  # building the candidate says so, with its place
        for param in kernel.params:
            names = {param.name} | {
                f"{param.name}_{value.upper()}" for value in param.values if isinstance(value, str)
            }
            if any(isinstance(value, str) and value[:1] == "-" for value in param.values):
                continue  # compiler options
            swept = len({config[param.name] for config in space.configs})
            if swept > 1 and not names & words and param.name not in {*asked.read, kernel.lse}:
                yield (
                    f"warning: {kernel.name}: neither {kernel.source.name} nor a launch uses "
                    f"{param.name}, so its {swept} values are the same kernel; use it in the "
                    "template, or remove it from the declaration"
                )


def _words(kernel: Family) -> set[str]:
    """Every identifier of a family's template and its headers, outside of comments."""
    texts = (
        text.decode(errors="replace")
        for text in source_closure(kernel.source, kernel.include_places).values()
    )
    return {word for text in texts for word in _WORD.findall(_COMMENT.sub(" ", text))}


def spilling(trials: Sequence[Trial], spec: SweepSpec) -> str | None:
    """A warning that candidates spill registers while the spec says nothing about it, or None."""
    if spec.limits.spill_bytes is not None or "spill_bytes" in spec.require:
        return None
    ours = [t for t in trials if t.provider == OURS and t.resources is not None]
    spilled = [
        t.resources.spill_bytes
        for t in ours
        if t.resources is not None and t.resources.spill_bytes and t.status is not Status.PRUNED
    ]
    if not spilled:
        return None
    return (
        f"warning: {len(spilled)} of {len(ours)} candidates spill registers, up to "
        f"{max(spilled)} bytes a thread; `require: {{spill_bytes: 0}}` in the spec leaves them out"
    )
