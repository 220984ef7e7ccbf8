"""Every family is right on odd shapes, and its planned resources are the driver's."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from attnsweep.compile.candidate import Build, as_ready
from attnsweep.compile.cubin import resources
from attnsweep.core.hardware import ARCHS
from attnsweep.core.ops import OPS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover, load_kernel
from attnsweep.family.space import Selection, Space

pytestmark = pytest.mark.gpu

KERNELS = {**discover(), "twice": load_kernel(Path(__file__).parent.parent / "families/twice.py")}
# Each trial also runs the small cases of numerics.small_cases: tails, one key, hard inputs.
SHAPES = [
    Problem(1, 2, 1, 1, 17, 64),
    Problem(1, 4, 2, 63, 200, 64),
    Problem(2, 6, 2, 129, 129, 64),
    Problem(1, 3, 3, 1023, 1025, 64),
    Problem(1, 2, 1, 200, 63, 64),
]
VALUE_DIMS = ((192, 128), (96, 64), (64, 128), (128, 256), (72, 40))
CONFIGS_PER_SPACE = 5  # others for each shape


def seqlen(head_dim):
    """Rows that a space is built for: wide heads are of few."""
    return 1024 if head_dim <= 256 else 256


def cases():
    for kernel in KERNELS.values():
        for head_dim, dtype, causal in product(kernel.some_head_dims, kernel.dtypes, (False, True)):
            for shape in SHAPES:
                if causal and shape.seqlen_q > shape.seqlen_k:
                    continue
                if shape.seqlen_q > seqlen(head_dim):
                    continue
                problem = replace(shape, head_dim=head_dim, dtype=dtype, causal=causal)
                yield parameters(kernel, replace(problem, op=OPS[kernel.ops[0]]))
        if kernel.head_dims_v:
            for shape, (head_dim, of_v) in product(SHAPES[:3], VALUE_DIMS):
                dims = {"head_dim": head_dim, "head_dim_v": of_v}
                yield parameters(kernel, replace(shape, dtype="bf16", **dims))


def parameters(kernel, problem):
    return pytest.param(kernel, problem, id=f"{kernel}-{problem.label}".replace(" ", "-"))


@pytest.mark.parametrize(("kernel", "problem"), list(cases()))
def test_right_on_odd_shapes(kernel, problem, worker, compiler):
    reason = kernel.refusal(problem, compiler.arch)
    if reason is not None:
        pytest.skip(reason)
    # Rules may call a config wasteful on a tiny shape; it must be right there all the same.
    rows = seqlen(problem.head_dim)
    space = Space.build(kernel, replace(problem, seqlen_q=rows, seqlen_k=rows), compiler.arch)
    step = max(1, len(space.configs) // CONFIGS_PER_SPACE)
    first = step * [s.seqlen_k for s in SHAPES].index(problem.seqlen_k) // len(SHAPES)
    builds = [Build(kernel, c, problem, compiler) for c in space.configs[first::step]]
    for build in builds:
        build.submit()
    worker.open(problem, replay_us=100, seed=1)
    for build in as_ready(builds):
        accuracy, first = worker.trial(build.candidate())
        assert accuracy.rel_err <= accuracy.limit, build.config.label
        assert first.time_us > 0
        assert first.launch_us > 0
        assert set(first.stages_us) == (set(build.launches) if len(build.launches) > 1 else set())
        worker.add("it", build.candidate(), cold=False)
        assert worker.confirm("it", 2_000.0) > 0, build.config.label  # with huge scores, too
        worker.drop("it")


PAGED = ("(4,8/2,64x256,64) bf16 causal paged(16)", "(4,16/1,1x256,576/512) bf16 causal paged(64) value_in_key")


def some_problem(kernel):
    """One that a family serves: from a cache of pages, if it takes no other tensors."""
    if kernel.layouts == ("paged",):
        served = (problem for problem in map(Problem.parse, PAGED) if kernel.refusal(problem, ARCHS["sm_90a"]) is None)
        return next(served)
    head_dim, dtype = kernel.some_head_dims[0], kernel.dtypes[0]
    return Problem(1, 4, 4, seqlen(head_dim), seqlen(head_dim), head_dim, dtype, op=OPS[kernel.ops[0]])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=str)
def test_occupancy_is_what_the_driver_says(kernel, worker, compiler):
    problem = some_problem(kernel)
    configs = Space.build(kernel, problem, compiler.arch).configs
    builds = [Build(kernel, c, problem, compiler) for c in configs[:: len(configs) // 24 + 1]]
    for build in builds:
        build.submit()
    worker.open(problem, replay_us=100, seed=1)
    for build in builds:
        cubins = build.cubins()
        ours = resources([(n, cubins[n], launch) for n, launch in build.launches.items()], build.arch)
        for name, blocks in worker.call("blocks_per_sm", build.candidate()).items():
            assert ours.stages[name]["blocks_per_sm"] == blocks, f"{build.config.label} {name}"


PIPELINES = [kernel for kernel in KERNELS.values() if len(kernel.stages) > 1]
MODES = [
    {"LAUNCH": "eager"},
    {"STREAMS": 3},
    {"CHUNK_HEADS": 2},
    {"CHUNK_HEADS": 2, "STREAMS": 2, "LAUNCH": "eager"},
    {"CHUNK_ROWS": 256},
    {"CHUNK_ROWS": 256, "STREAMS": 4},
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("kernel", [*PIPELINES, KERNELS["flash_fwd_mma"]], ids=str)
def test_right_in_every_mode(kernel, modes, causal, worker, compiler):
    problem = Problem(2, 4, 2, 700, 900, 64, "fp16", causal=causal)
    reason = kernel.refusal(problem, compiler.arch)
    if reason is not None:
        pytest.skip(reason)
    selection = Selection({name: (value,) for name, value in modes.items()})
    configs = Space.build(kernel, problem, compiler.arch, selection).configs
    builds = [Build(kernel, c, problem, compiler) for c in configs[:: len(configs) // 4 + 1]]
    for build in builds:
        build.submit()
    worker.open(problem, replay_us=100, seed=1)
    for build in builds:
        accuracy, first = worker.trial(build.candidate())
        assert accuracy.rel_err <= accuracy.limit, build.config.label
        assert min(first.time_us, first.launch_us) > 0


@pytest.mark.parametrize("kernel", PIPELINES, ids=str)
def test_a_workspace_limit_is_kept_and_the_result_right(kernel, worker, compiler):
    problem = Problem(1, 4, 4, 1500, 1500, 64, "fp16", causal=True)
    reason = kernel.refusal(problem, compiler.arch)
    if reason is not None:
        pytest.skip(reason)
    config = Space.build(kernel, problem, compiler.arch).configs[0]
    whole = Build(kernel, config, problem, compiler).schedule.facts["workspace_bytes"]
    for limit, rows in ((10 << 20, 1500), (3 << 20, 768)):
        build = Build(kernel, config, problem, compiler, workspace_limit=limit)
        assert build.schedule.facts["workspace_bytes"] <= limit
        # A pipeline that needs less than the limit is not cut: flash_fwd_wgmma has no scores.
        assert build.schedule.facts["rows"] <= (rows if whole > limit else problem.seqlen_q)
        build.submit()
        worker.open(problem, replay_us=100, seed=1)
        accuracy, _ = worker.trial(build.candidate())
        assert accuracy.rel_err <= accuracy.limit
