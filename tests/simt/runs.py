"""What tests/simt runs of each family: kernels, problems and configs, by the name of the test."""

from dataclasses import replace
from functools import lru_cache
from itertools import cycle, product

from attnsweep.core.cases import Case, small_cases
from attnsweep.core.ops import OPS
from attnsweep.core.problem import Dtype, Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family
from attnsweep.family.space import Space

from .harness import ARCH, config_of
from .unusual import FLASH_FWD_FP8_WGMMA, FLASH_FWD_WGMMA, THREE_KERNEL_WGMMA

KERNELS = discover()
BASE = Problem(1, 8, 8, 1024, 1024, 64)
# K and V longer than any ring; more queries than keys.
MORE = (Problem(1, 1, 1, 65, 700, 64), Problem(1, 2, 1, 129, 67, 64))
# What wide heads are tested on: 700 columns of 97 rows would take minutes.
FEW_ROWS = (
    (Problem(1, 1, 1, 1, 1, 64), "normal"),
    (Problem(2, 2, 1, 17, 70, 64), "normal"),
    (Problem(1, 1, 1, 33, 33, 64), "large_scores"),
)
# Values that no config of a default space has.
UNUSUAL = {
    "flash_fwd_fp8_wgmma": FLASH_FWD_FP8_WGMMA,
    "flash_fwd_wgmma": FLASH_FWD_WGMMA,
    "three_kernel_wgmma": THREE_KERNEL_WGMMA,
    "wmma_pipeline": (
        "BLOCK_M=32 BLOCK_N=32 STAGES=4 PRODUCER_WARPS=4 EARLY=1 LAYOUT=2 CTAS=3",
        "BLOCK_M=32 BLOCK_N=128 STAGES=3 PRODUCER_WARPS=0 EARLY=1 LAYOUT=1 CTAS=2",
    ),
    # Without branches, tiles past the last key are there all the same.
    "ladder_5_swizzled": ("BLOCK_N=128 BRANCHES=0", "BLOCK_M=64 KEY_WARPS=2 BLOCK_N=64 STAGES=4"),
}
# Families whose head dims are a range: these configs alone, each with its head dim and mask.
WIDE = {
    "flash_fwd_fp32_wide": (
        ("SLICES=4 MATH=ffma CHUNK=32 NUM_STAGES=3 NUM_WARPS=4 BLOCK_N=32", 1540, True),
        ("SLICES=8 MATH=tf32x3 CHUNK=16 NUM_STAGES=2 NUM_WARPS=8 SHARE_ROWS=0 V_EARLY=2", 516, False),
        ("SLICES=2 MATH=tf32x3 CHUNK=32 NUM_WARPS=4 BLOCK_M=32 BLOCK_N=64 V_EARLY=1", 512, True),
        ("SCORES=workspace SLICES=3 MATH=ffma NUM_WARPS=4 BLOCK_M=32 BLOCK_N=64 PDL=1", 772, False),
    ),
    "flash_fwd_fp32_wgmma": (
        ("SLICES=4 CLUSTER=4 BLOCK_M=16 WARPGROUPS=2 NUM_STAGES=2", 516, True),
        ("SLICES=2 CLUSTER=2 BLOCK_M=32 WARPGROUPS=4 NUM_STAGES=3 PDL=0", 772, False),
        ("SLICES=4 CLUSTER=2 BLOCK_M=64 WARPGROUPS=2 NUM_STAGES=3", 772, True),
        (
            "SLICES=4 CLUSTER=2 BLOCK_M=64 WARPGROUPS=3 NUM_STAGES=3 OUTPUT_SLICES=3 "
            "OUTPUT_WARPGROUPS=2 OUTPUT_ALONE=1",
            772,
            False,
        ),
        ("SLICES=6 CLUSTER=2 BLOCK_M=16 WARPGROUPS=1 NUM_STAGES=4 PDL=0", 516, False),
    ),
}
# Configs for head dims that are not among a family's first two, each with its mask.
MORE_DIMS = {
    "flash_fwd_fp8_wgmma": (
        ("BLOCK_N=96 V_STAGES=1 OVERLAP=2", 256, True),
        ("BLOCK_N=64 V_STAGES=1 INTERVAL=32", 256, False),
    )
}
# Families of few parts of their own, or that take long to build: of mask, dtype and head_dim every
# third of the eight that there are, which takes each value.
FEW_CONFIGS = ("ladder_", "wmma_", "three_kernel_mma", "flash_fwd_mma")


@lru_cache
def covering(name: str, causal: bool, head_dim: int, dtype: Dtype = "fp16") -> list[Config]:
    """Few configs that together take every value which some config of the space has."""
    facts = {"causal": causal, "head_dim": head_dim, "dtype": dtype}
    problem = replace(BASE, **facts, op=OPS[KERNELS[name].ops[0]])
    configs = Space.build(KERNELS[name], problem, ARCH).configs
    items = [set(config.items()) for config in configs]
    left = set().union(*items)
    chosen: list[Config] = []
    while left:
        best = max(range(len(configs)), key=lambda number: len(left & items[number]))
        chosen.append(configs[best])
        left -= items[best]
    return chosen


def runs():
    """Kernel, problem, config: the values of an unusual one, or the number of a covering one."""
    for kernel in KERNELS.values():
        for words, head_dim, causal in (*WIDE.get(kernel.name, ()), *MORE_DIMS.get(kernel.name, ())):
            facts = {"head_dim": head_dim, "dtype": kernel.dtypes[0], "causal": causal}
            yield kernel, replace(BASE, **facts), words
        if kernel.name in WIDE or "dense" not in kernel.layouts:  # test_paged.py has these
            continue
        masks_and_dtypes = list(product((True, False), kernel.dtypes))
        compiled = [(*each, dim) for each in masks_and_dtypes for dim in kernel.some_head_dims[:2]]
        if len(kernel.dtypes) > 2:  # of each mask and dtype one head_dim, in turn
            dims = cycle((*kernel.some_head_dims[:2], *kernel.some_head_dims[1::-1]))
            compiled = [(*each, dim) for each, dim in zip(masks_and_dtypes, dims, strict=False)]
        step = 3 if kernel.name.startswith(FEW_CONFIGS) else 1
        for number, (causal, dtype, head_dim) in enumerate(compiled[::step]):
            problem = replace(BASE, causal=causal, dtype=dtype, head_dim=head_dim)
            problem = replace(problem, op=OPS[kernel.ops[0]])
            if not kernel.refusal(problem, ARCH):
                yield kernel, problem, number
        for words, causal, dtype in zip(
            UNUSUAL.get(kernel.name, ()), cycle((True, False)), cycle(kernel.dtypes), strict=False
        ):
            yield kernel, replace(BASE, causal=causal, dtype=dtype), words


def name_of(kernel: Family, problem: Problem, which: int | str) -> str:
    words = "-".join(which.split()[:3]) if isinstance(which, str) else which
    return f"{kernel}-{problem.label}-{words}".replace(" ", "-")


RUNS = {name_of(*run): run for run in runs()}


def config_for(kernel: Family, problem: Problem, which: int | str) -> Config:
    if isinstance(which, str):
        return config_of(kernel, which)
    dtype = "fp16" if "fp16" in kernel.dtypes else problem.dtype
    configs = covering(kernel.name, problem.causal, problem.head_dim, dtype)
    # In step with what is compiled in, but shifted: else the first config meets only one dtype.
    return configs[(which + which // len(configs)) % len(configs)]


def cases(problem: Problem) -> list[Case]:
    """Short ones, compiled as the problem."""
    compiled = {n: getattr(problem, n) for n in ("head_dim", "dtype", "causal", "op")}
    if problem.head_dim > 256:
        return [Case(replace(shape, **compiled), inputs) for shape, inputs in FEW_ROWS]
    more = [s for s in MORE if not problem.causal or s.seqlen_q <= s.seqlen_k]
    return [*small_cases(problem), *(Case(replace(shape, **compiled)) for shape in more)]


def is_unusual(name: str) -> bool:
    """Whether the run's config is one of UNUSUAL, and so nightly."""
    kernel, _, which = RUNS[name]
    return which in UNUSUAL.get(kernel.name, ())
