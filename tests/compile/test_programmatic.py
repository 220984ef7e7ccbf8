"""What a launch ahead may still write is never read through the cache of constants.

A programmatic launch begins while the one ahead of it writes. `ld.global.nc`, which the compiler
takes for a `const __restrict__` pointer, and for any `__restrict__` pointer that a kernel only
reads, must read what nobody writes while the kernel lives: PTX ISA, "ld.global.nc". That the loads
come behind grid_wait does not help.
"""

import re
import subprocess
from dataclasses import replace
from shutil import copytree

import pytest

from attnsweep.compile import sass
from attnsweep.core.errors import ToolchainError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.masks import FULL, Interval
from attnsweep.core.ops import OPS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, TensorMap

try:
    sass.nvdisasm()
except ToolchainError as error:
    pytest.skip(f"needs nvdisasm: {error.what}", allow_module_level=True)

ARCH = ARCHS["sm_90a"]
KERNELS = discover()
BASE = Problem(1, 16, 16, 1024, 1024, 64)
FP32 = Problem(1, 4, 4, 64, 64, 2048, "fp32")
FP8 = Problem(1, 16, 16, 1024, 1024, 64, "e4m3_block")
PAGED = Problem.parse("(4,16,1x1024,64) bf16 causal paged(16)")
# Every kind of programmatic launch that has a pointer to what a launch ahead writes.
CONFIGS = {
    "decode_paged_mma": ("SCHEDULE=1 PDL=1",),
    "flash_bwd_wgmma": ("PDL=1", "PDL=1 RECOMPUTE=1"),
    "flash_fwd_fp8_wgmma": ("PDL=2 LSE=1",),
    "flash_fwd_wgmma": ("PDL=2 WARPGROUPS=2 SPLITS=2 LSE=1",),
    "three_kernel_wgmma": (
        *("STATS=0 PDL=1 SOFTMAX_THREADS=32", "STATS=0 PDL=1 SOFTMAX_THREADS=32 SOFTMAX_PASSES=3"),
        *(f"STATS={stats} PDL=1 SOFTMAX_THREADS=32" for stats in (1, 2, 3)),
    ),
    "flash_fwd_fp32_wide": ("SCORES=workspace SLICES=8 NUM_WARPS=4 BLOCK_M=32 BLOCK_N=64 PDL=1 MATH=ffma",),
    "flash_fwd_fp32_wgmma": ("SLICES=16 CLUSTER=8 BLOCK_M=16 WARPGROUPS=2 NUM_STAGES=2 PDL=2",),
}
# Those whose mask is scanned before a call.
MASKS = {"flash_fwd_wgmma": (FULL.as_boolean(()), Interval(64, 0))}
# Those whose blocks look up what the scan of the same call wrote.
OF_ITEMS = {
    "flash_fwd_wgmma": tuple(
        (f"{words} PDL={pdl} ITEM_KEYS=1", f"(8,32/8,1x1024,64) bf16 {seen}")
        for words, pdl in (("PACK_GQA=1 BLOCKS_PER_SM=2", 1), ("SPLITS=2 BLOCKS_PER_SM=2", 2))
        for seen in ("full padded(right,30)", "boolean(full,item)")
    )
}
# Inputs, which no launch of a call writes.
INPUT = re.compile(r"(const \w+\*) __restrict__ ([qkv])\b")
CONSTANT = re.compile(r"\bLDG\S*\.CONSTANT\S*")


def launches():
    """Family, config, problem, stage: of every programmatic launch that may meet such a load."""
    for name, texts in CONFIGS.items():
        kernel = KERNELS[name]
        bases = (BASE, FP32, FP8) if "dense" in kernel.layouts else (PAGED,)
        base = next(p for p in bases if p.dtype in kernel.dtypes)
        base = replace(base, op=OPS[kernel.ops[0]])
        masked = [("", replace(base, mask=mask)) for mask in MASKS.get(name, ())]
        of_items = [(text, Problem.parse(label)) for text, label in OF_ITEMS.get(name, ())]
        for text, problem in (*((text, base) for text in texts), *masked, *of_items):
            values = {param.name: param.values[0] for param in kernel.params}
            for word in text.split():
                parameter, _, value = word.partition("=")
                values[parameter] = int(value) if value.isdigit() else value
            config = Config(values)
            ahead: set[str] = set()
            for stage, launch in kernel.launches(config, problem, ARCH).items():
                pointers = {arg for arg in launch.args if isinstance(arg, str)}
                if launch.programmatic and pointers & ahead:
                    case = f"{name}-{stage}-{text or problem.label}-{problem.kind}"
                    yield pytest.param(kernel, config, problem, stage, id=case)
                maps = {arg.buffer for arg in launch.args if isinstance(arg, TensorMap)}
                ahead |= (pointers | maps) - {"q", "k", "v"}


def constant_loads(cubin):
    """Instructions that load through the cache of constants."""
    done = subprocess.run([str(sass.nvdisasm()), "-c", str(cubin.path)], capture_output=True, text=True, check=True)
    assert "EXIT" in done.stdout
    return CONSTANT.findall(done.stdout)


def test_every_family_with_a_programmatic_launch_is_here():
    having = {
        kernel.name
        for kernel in KERNELS.values()
        if re.search(r"\bprogrammatic=", kernel.source.with_suffix(".py").read_text())
    }
    assert having == set(CONFIGS)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize(("kernel", "config", "problem", "stage"), list(launches()))
def test_a_programmatic_launch_loads_no_constants(compiler, tmp_path, kernel, config, problem, stage):
    launch = kernel.launches(config, problem, ARCH)[stage]
    defines = kernel.stages[stage].defines(config, problem, launch)
    source = kernel.source
    if {"q", "k", "v"} & {arg for arg in launch.args if isinstance(arg, str)}:
        copytree(source.parent, tmp_path / "kernels")
        source = tmp_path / "kernels" / source.name
        text, inputs = INPUT.subn(r"\1 \2", source.read_text())
        assert inputs or "__restrict__" not in text
        source.write_text(text)
    assert constant_loads(compiler.compile(source, defines)) == []


def test_such_a_load_would_be_seen(compiler, tmp_path):
    source = tmp_path / "f.cu"
    source.write_text(
        'extern "C" __global__ void f(const float* __restrict__ x, float* __restrict__ o)'
        " { o[threadIdx.x] = x[threadIdx.x]; }\n"
    )
    assert constant_loads(compiler.compile(source, {})) != []
