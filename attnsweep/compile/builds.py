"""Builds of any family's configs: of a template's stages, or of a call of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnsweep.compile.calls import CalledBuild
from attnsweep.compile.candidate import Build
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.problem import Problem
from attnsweep.family.family import Config, Family
from attnsweep.family.space import Space


def build_of(
    kernel: Family,
    config: Config,
    problem: Problem,
    compiler: Compiler,
    *,
    workspace_limit: int | None = None,
    variant: Mapping[str, str] | None = None,
) -> Build:
    """Make the build of a config on a problem; nothing is compiled yet.

    workspace_limit: bytes above which a call is cut into chunks.
    """
    kind = CalledBuild if kernel.call else Build
    limits = {"workspace_limit": workspace_limit, "variant": variant}
    return kind.of(kernel, config, problem, compiler, **limits)  # type: ignore[arg-type]


def builds_of(
    space: Space, configs: Iterable[Config], compiler: Compiler, workspace_limit: int | None
) -> list[Build]:
    """The builds of some of a space's configs."""
    return [
        build_of(
            space.kernel,
            config,
            space.problem,
            compiler,
            workspace_limit=workspace_limit,
            variant=space.variants.get(config),
        )
        for config in configs
    ]
