"""The baseline `triton_flash`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import NotInstalled, Way
from attnsweep.baselines.triton_precompile import _compile_triton
from attnsweep.core.problem import Problem
from attnsweep.core.timings import step

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


def _triton(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    try:
        from attnsweep.baselines import triton_kernel
    except ImportError as error:
        raise NotInstalled("Triton is not installed") from error

    def way(config: Any) -> Way:
        def forward(q: Any, k: Any, v: Any) -> Any:
            out = torch.empty_like(q)
            causal = problem.causal
            return triton_kernel.forward(q, k, v, out, problem.scale, causal=causal, config=config)

        return Way(forward)

    with step("take up Triton's code"):
        _compile_triton(torch, problem)
    return [way(config) for config in triton_kernel.CONFIGS]
