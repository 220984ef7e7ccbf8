"""Every family compiles for every architecture it claims, without spills, as its plan says."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnsweep.compile.candidate import Build, as_ready, compiled_row
from attnsweep.compile.cubin import check_arguments, compiler_warnings, functions
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.errors import CompileError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.layouts import EXAMPLES
from attnsweep.core.ops import OPS
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.family.discover import discover, load_kernel
from attnsweep.family.family import Launch, TensorMap
from attnsweep.family.space import Space
from attnsweep.specs.load import load_spec
from attnsweep.tools.coverage import as_served

KERNELS = {**discover(), "twice": load_kernel(Path(__file__).parent.parent / "families/twice.py")}
ARCH_NAMES = ("sm_80", "sm_89", "sm_90a", "sm_100a")
BASE = Problem(2, 16, 16, 1024, 1024, 64)
# Bytes, stored and loaded, of what stays the same from tile to tile: a few loads a tile.
SPILLS = {"flash_bwd_wgmma": 192, "flash_fwd_fp32_halves": 320}
WIDE = Problem(1, 4, 4, 64, 64, 512)  # in fp32, for few rows
GROUPED = replace(BASE, heads_kv=4)


@pytest.fixture(scope="session")
def compilers():
    made = {}

    def of(name):
        if name not in made:
            made[name] = Compiler(ARCHS[name])
        return made[name]

    yield of
    for compiler in made.values():
        compiler.close()


def corners(space):
    """Feasible configs at the edges: for each parameter, its extremes among small and large others.

    Aims at each corner in turn and takes the feasible config that agrees with it in most
    parameters, so every extreme value that any feasible config has is met.
    """
    configs = space.configs
    columns = [[config[name] for config in configs] for name in configs[0]]
    values = [sorted(set(column)) for column in columns]
    # [configs, parameters]: whether a config has the least value of each, and the largest.
    least, most = (
        np.array([[value == own[end] for value in column] for own, column in zip(values, columns, strict=True)]).T
        for end in (0, -1)
    )
    chosen = {}
    for own in range(len(values)):
        for others in (least, most):
            alike = others.sum(axis=1) - others[:, own]
            for edge in (least, most):
                best = configs[np.where(edge[:, own], alike, -1).argmax()]
                chosen[best.label] = best
    return list(chosen.values())


def problems(kernel):
    """Each head_dim, with masks and dtypes taking turns so that each pair of them occurs.

    Of a paged family each second problem has a cache in FP8, if it can have one.
    """
    turns = [("fp16", False), ("bf16", True), ("fp16", True), ("bf16", False)]
    for number, head_dim in enumerate(kernel.some_head_dims):
        layout = EXAMPLES[kernel.layouts[0]]
        if kernel.cache_dtypes and number % 2:
            layout = replace(layout, cache_dtype=kernel.cache_dtypes[0])
        base = BASE if head_dim <= 256 else WIDE if kernel.dtypes == ("fp32",) else GROUPED
        base = replace(base, head_dim=head_dim, op=OPS[kernel.ops[0]], layout=layout)
        base = as_served(kernel, base)
        if kernel.dtypes == ("fp32",):
            yield replace(base, head_dim=head_dim, dtype="fp32", causal=number % 2 == 0)
        if not {"fp16", "bf16", "fp32"} & set(kernel.dtypes):  # dtypes in turn, both masks
            for causal in (False, True):
                dtype = kernel.dtypes[(2 * number + causal) % len(kernel.dtypes)]
                yield replace(base, head_dim=head_dim, dtype=dtype, causal=causal)
        for turn in (number, number + 1):
            dtype, causal = turns[turn % len(turns)]
            if dtype in kernel.dtypes:
                yield replace(base, head_dim=head_dim, dtype=dtype, causal=causal)


@pytest.mark.parametrize(
    "arch", [pytest.param(name, marks=() if name == "sm_90a" else pytest.mark.nightly(push=3)) for name in ARCH_NAMES]
)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=str)
def test_corners_compile_as_planned(kernel, arch, compilers, request, some):
    """Every corner with --thorough; otherwise a part of them, another one for each problem.

    And of one of the problems, which the commit draws.
    """
    # On a push: most families are for sm_90a; what the others add is another ptxas.
    parts = 1 if request.config.option.thorough else 48
    step = 2 if arch in ("sm_80", "sm_90a") else 4  # of problems
    step = 1 if parts == 1 else step if arch != "sm_90a" else 1 + (len(kernel.some_head_dims) > 3)
    compiler = compilers(arch)
    built = {}
    every = list(enumerate(problems(kernel)))
    refused = {number: kernel.refusal(problem, compiler.arch) for number, problem in every}
    if all(refused.values()):
        pytest.skip(refused[0])
    for number, problem in some([each for each in every if not refused[each[0]]][::step], 1):
        space = Space.build(kernel, problem, compiler.arch)
        assert space.configs, f"no config of {kernel} is left for {problem.label}"
        configs = corners(space)
        if min(kernel.head_dims) > 256:  # three of each size
            configs = configs[:: -(-len(configs) // 3)]
        elif arch in ("sm_89", "sm_100a"):  # what sm_80 and sm_90a have in full, built for others
            configs = configs[::3]
        elif len(kernel.some_head_dims) > 3:  # the two problems of a head_dim share them
            configs = configs[number // step % 2 :: 2]
        if min(kernel.head_dims) <= 256:
            configs = configs[number % parts :: parts] or configs[:1]
        for config in configs:
            build = Build(kernel, config, problem, compiler)
            built[(build.keys, problem)] = build
    for build in built.values():
        build.submit()
    for build in as_ready(list(built.values())):
        what = _named(build)
        row = compiled_row(build, _no_limits())
        assert row.status is Status.OK, f"{what}: {row.detail}"
        for name, facts in row.resources.stages.items():
            launch = build.launches[name]
            spills = SPILLS.get(kernel.name, 0)
            assert facts["spill_bytes"] <= spills, f"{what}: {name} spills"
            assert facts["static_smem_bytes"] == 0, f"{what}: {name} has unplanned shared memory"
            assert facts["smem_bytes"] == launch.smem_bytes, f"{what}: {name}"
            assert facts["blocks_per_sm"] >= launch.min_blocks_per_sm, (
                f"{what}: {name} plans {launch.min_blocks_per_sm} blocks per SM, "
                f"has {facts['blocks_per_sm']:.0f} with {facts['registers']:.0f} registers"
            )


def _named(build):
    return f"{build.kernel} {build.config.label} {build.problem.label}"


def _no_limits():
    spec = Path(__file__).parent / "any.yaml"
    return load_spec(spec)


def row_of_changed_family(compiler, directory, old, new):
    """The compiled row of tests/families/twice with `old` replaced by `new` in its files."""
    for name in ("twice.py", "twice.cuh", "twice.cu"):
        text = (Path(__file__).parent.parent / "families" / name).read_text()
        (directory / name).write_text(text.replace(old, new))
    kernel = load_kernel(directory / "twice.py")
    config = Space.build(kernel, BASE, compiler.arch).configs[0]
    build = Build(kernel, config, BASE, compiler)
    build.submit()
    return compiled_row(build, _no_limits())


def test_a_function_that_is_not_there_is_said(compilers, tmp_path):
    row = row_of_changed_family(compilers("sm_90a"), tmp_path, '"twice_mix"', '"twice_mixed"')
    assert row.status is Status.COMPILE_ERROR
    assert "'twice_mixed'" in row.detail


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "p.seqlen_k, p.scale),",
            "p.seqlen_k),",
            "the template's twice_scores takes 8 parameters of 8, 8, 8, 4, 4, 4, 4, 4 bytes, "
            "the declaration's Launch.args are 7 arguments of 8, 8, 8, 4, 4, 4, 4 bytes",
        ),
        ("float scale)", "double scale)", "8, 8, 8, 4, 4, 4, 4, 8 bytes"),
        ('("q", "k", "scores",', '(p.heads, "k", "scores",', "arguments of 4, 8, 8, 4"),
        # Right on the timed problem, but not on a smaller one that it is checked on.
        ("p.scale),", "*(p.scale,) * (p.seqlen_q > 512)),", "7 arguments"),
    ],
    ids=["missing", "double", "int for pointer", "of a checked case"],
)
def test_arguments_that_the_template_does_not_take_are_said(compilers, tmp_path, old, new, words):
    row = row_of_changed_family(compilers("sm_90a"), tmp_path, old, new)
    assert row.status is Status.COMPILE_ERROR
    first = row.detail.splitlines()[0]
    assert first.startswith("stage 'scores': ")
    assert words in first


def test_the_example_of_the_page_on_writing_a_kernel_fits_its_declaration(compilers, tmp_path):
    page = (Path(__file__).parent.parent.parent / "docs" / "writing-a-kernel.md").read_text()
    for language, suffix in (("cuda", "cu"), ("python", "py")):
        block, *_ = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (tmp_path / f"mine.{suffix}").write_text(block)
    kernel, compiler = load_kernel(tmp_path / "mine.py"), compilers("sm_90a")
    build = Build(kernel, Space.build(kernel, BASE, compiler.arch).configs[0], BASE, compiler)
    build.submit()
    row = compiled_row(build, _no_limits())
    assert row.status is Status.OK, row.detail


def taking(compiler, directory, parameters):
    """The cubin of a function `f` with these parameters."""
    (directory / "f.cu").write_text(
        "struct Map { alignas(64) char bytes[128]; };\nstruct Large { char bytes[20000]; };\n"
        f'extern "C" __global__ void f({parameters}) {{}}\n'
    )
    return compiler.compile(directory / "f.cu", {})


def passing(*args):
    return Launch("f", (1, 1, 1), 32, args)


TAKEN = [
    ("", ()),
    ("const float* q, int n, float scale", ("q", 1, 0.5)),
    ("int n, const __grid_constant__ Map map, float* o", (1, TensorMap("q", (), (), ()), "o")),
]


@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize(("parameters", "args"), TAKEN, ids=["none", "plain", "map"])
def test_what_a_function_takes_is_read_from_its_cubin(compilers, tmp_path, arch, parameters, args):
    cubin = taking(compilers(arch), tmp_path, parameters)
    check_arguments("fwd", cubin, passing(*args))
    with pytest.raises(CompileError, match=f"are {len(args) + 1} arguments? of"):
        check_arguments("fwd", cubin, passing(*args, "k"))


def test_more_than_4_kb_of_parameters_are_read_too(compilers, tmp_path):
    cubin = taking(compilers("sm_90a"), tmp_path, "const float* q, Large large, int n")
    with pytest.raises(CompileError, match=r"3 parameters of 8, 20000, 4 bytes, .* 1 argument of"):
        check_arguments("fwd", cubin, passing("q"))


def test_what_an_unknown_nvrtc_says_of_parameters_is_no_reason_to_refuse(compilers, tmp_path):
    cubin = taking(compilers("sm_90a"), tmp_path, "const float* q, int n")
    known, unknown = bytes([4, 0x17, 12, 0]), bytes([4, 0xEE, 12, 0])
    path = tmp_path / "later.cubin"
    path.write_bytes(cubin.path.read_bytes().replace(known, unknown))
    check_arguments("fwd", replace(cubin, path=path), passing())


def test_a_stage_sees_only_its_own_parameters(compilers):
    """Configs that differ in another stage's parameter share the stage's cubin."""
    kernel = KERNELS["three_kernel_mma"]
    compiler = compilers("sm_90a")
    configs = Space.build(kernel, BASE, compiler.arch).configs
    softmax = list(kernel.stages["softmax"].params)
    stage = list(kernel.stages).index("softmax")
    keys = {}
    for config in configs:
        own = tuple(config[name] for name in softmax)
        keys.setdefault(own, set()).add(Build(kernel, config, BASE, compiler).keys[stage])
    assert len(keys) > 1
    assert all(len(found) == 1 for found in keys.values())


def test_logs_carry_registers_and_no_warning(compilers):
    compiler = compilers("sm_90a")
    build = Build(KERNELS["naive"], Space.build(KERNELS["naive"], BASE, compiler.arch).configs[0], BASE, compiler)
    build.submit()
    log = build.cubins()["fwd"].log
    assert functions(log)["naive"]["registers"] > 16
    assert compiler_warnings(log) == []
    assert compiler_warnings("ptxas info    : (C7519) Potential Performance Loss: wgmma") == [
        "C7519: Potential Performance Loss: wgmma"
    ]
