"""Instructions of compiled code: how they are counted, required, and shown by `inspect`."""

import json
import subprocess
from pathlib import Path

import pytest

from attnsweep.api import winners
from attnsweep.compile import sass
from attnsweep.compile.candidate import Build
from attnsweep.compile.cubin import stack_bytes
from attnsweep.core.errors import KernelError, SpaceError, ToolchainError
from attnsweep.core.files import read_code
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.specs.load import load_spec
from attnsweep.specs.require import INSTRUCTIONS
from attnsweep.store.run import open_run
from attnsweep.tools import inspect as inspection
from attnsweep.tools.compile import compile_all

try:
    sass.nvdisasm()
except ToolchainError as error:
    pytest.skip(f"needs nvdisasm: {error.what}", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent
WINNER = "1-16-1024-64-fp16-full.flash_fwd_mma.fwd.cubin.xz"
# No loop and no condition; then one branch that depends on data, kept by the barrier in it.
STRAIGHT = 'extern "C" __global__ void f(float* o) { o[threadIdx.x] = 1.0f; }\n'
BRANCHES = (
    'extern "C" __global__ void f(float* o, int n) {\n'
    "  if (n > 3) { o[0] = exp2f(o[1]); __syncthreads(); o[n] = o[7]; __syncthreads(); }\n"
    "}\n"
)


def counted(compiler, tmp_path, text):
    (tmp_path / "f.cu").write_text(text)
    return sass.counts(compiler.compile(tmp_path / "f.cu", {}))["f"]


def test_straight_code_has_no_branch_although_it_ends_in_a_loop(compiler, tmp_path):
    found = counted(compiler, tmp_path, STRAIGHT)
    assert set(found) == set(INSTRUCTIONS)
    assert (found["branches"], found["predicated_branches"], found["bar"]) == (0, 0, 0)
    assert 3 < found["instructions"] < 20


def test_a_plain_read_has_its_loads_on_their_way_together(compiler):
    numbers = {"PAGE": "512u", "SLOT": "128u", "PAGE_SIZE": "16"}
    cubin = compiler.compile(ROOT / "attnsweep/baselines/plain_read.cu", numbers)
    code = subprocess.run([sass.nvdisasm(), cubin.path], capture_output=True, text=True, check=True).stdout
    assert code.count("LDG.E.128") == 8
    assert not any(name in code for name in ("STL", "LDL"))


def test_barriers_and_special_functions_are_counted(compiler, tmp_path):
    found = counted(compiler, tmp_path, BRANCHES)
    assert found["bar"] == 2
    assert found["mufu"] == 1
    assert found["branches"] >= found["predicated_branches"]


def test_an_array_indexed_at_run_time_is_in_local_memory(compiler, tmp_path):
    indexed = "  float a[64]; a[n] = o[2]; a[n * 3 % 64] += o[3]; o[n] = a[n * 7 % 64];\n"
    found = counted(compiler, tmp_path, BRANCHES.replace("  if", f"{indexed}  if"))
    assert found["stl"] > 0
    assert found["ldl"] > 0
    assert stack_bytes(compiler.compile(tmp_path / "f.cu", {}).path) == {"f": 256}


@pytest.mark.parametrize(
    ("instruction", "counts"),
    [
        ({"opcode": "BRA", "operands": "0x740", "predicate": "@P0"}, (1, 1, 1)),
        ({"opcode": "BRA", "operands": "!UP1, 0x740"}, (1, 1, 1)),
        ({"opcode": "BRA.DIV", "operands": "0x740"}, (1, 1, 0)),
        ({"opcode": "BRA", "operands": "0x0"}, (0, 0, 0)),  # to itself: after the end
        ({"opcode": "LDS", "operands": "RZ,[RZ]", "predicate": "@!PT"}, (0, 0, 0)),
        ({"opcode": "NOP"}, (0, 0, 0)),
        ({"opcode": "EXIT", "predicate": "@P1"}, (1, 0, 0)),
    ],
)
def test_what_can_never_run_is_not_counted(instruction, counts):
    found = sass.count([instruction])
    kinds = ("instructions", "branches", "predicated_branches")
    assert tuple(found[kind] for kind in kinds) == counts


def test_a_recorded_winner_can_be_read(tmp_path):
    code = read_code(ROOT / "results/h200/mma_h200/cubins" / WINNER)
    (tmp_path / "winner.cubin").write_bytes(code)
    (found,) = sass.disassemble(tmp_path / "winner.cubin").values()
    assert found["hmma"] > 0
    assert found["hgmma"] == found["ldl"] == found["stl"] == 0


def test_counts_are_kept_by_what_the_cubin_holds(compiler, tmp_path):
    # What it damages is kept beside a cubin of its own: processes share those of equal text.
    (tmp_path / "f.cu").write_text(STRAIGHT.replace("f(", "kept("))
    cubin = compiler.compile(tmp_path / "f.cu", {})
    first = sass.counts(cubin)
    kept = cubin.path.with_name("sass.json")
    kept.write_text(kept.read_text().replace('"kept"', '"read"'))
    assert sass.counts(cubin) == {"read": first["kept"]}
    kept.write_text("{torn")
    assert sass.counts(cubin) == first


def test_a_file_that_is_no_cubin_is_named(tmp_path):
    (tmp_path / "x.cubin").write_bytes(b"no ELF")
    with pytest.raises(ToolchainError, match=r"x\.cubin: nvdisasm cannot read this cubin: \S+"):
        sass.disassemble(tmp_path / "x.cubin")


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_ladders_form_without_branches_has_none(compiler, causal):
    kernel = discover()["ladder_5_swizzled"]
    first = {param.name: param.values[0] for param in kernel.params}
    config = Config({**first, "BLOCK_N": 128, "BRANCHES": 0})
    problem = Problem(1, 8, 8, 512, 512, 64, causal=causal)
    assert kernel.refused_by(config, problem, compiler.arch) is None
    launch = kernel.launches(config, problem, compiler.arch)["fwd"]
    defines = kernel.stages["fwd"].defines(config, problem, launch)
    (found,) = sass.counts(compiler.compile(kernel.source, defines)).values()
    assert found["branches"] == found["predicated_branches"] == 0
    assert found["ldl"] == found["stl"] == 0


# -- require ----------------------------------------------------------------------------------

SPEC = """
arch: sm_90a
problems: [{batch: 1, heads: 2, seqlen: 256, head_dim: 64}]
kernels:
  naive: {THREADS: [64, 128]}
  flash_fwd_mma: {BLOCK_M: 64, BLOCK_N: 64, NUM_WARPS: 4, KEY_GROUPS: 1, NUM_STAGES: 1,
    SWIZZLE: 1, Q_IN_REGISTERS: [0, 1], BLOCK_ORDER: 0}
"""


def compiled(tmp_path, require, cache=None):
    path = tmp_path / "small.yaml"
    path.write_text(SPEC + f"require: {require}\n")
    return compile_all(load_spec(path, discover()), ARCHS["sm_90a"], cache_dir=cache)


def test_a_requirement_prunes_with_its_reason(tmp_path):
    rows = compiled(tmp_path, "{hmma: '> 0', ldl: 0}")
    assert len(rows) == 4
    for row in rows:
        (stage,) = row.resources.stages.values()
        assert stage["instructions"] > 100
        if row.kernel == "naive":
            assert row.status is Status.PRUNED
            assert row.detail == "hmma: 0, the spec requires > 0"
        else:
            assert (row.status, row.detail) == (Status.OK, None)


@pytest.fixture
def no_disassembler(constants, monkeypatch, tmp_path):
    sass.nvdisasm.cache_clear()
    constants(sass, WHEEL="no-such-wheel")
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    sass.nvdisasm.cache_clear()


@pytest.mark.usefixtures("no_disassembler")
def test_without_a_requirement_of_instructions_none_are_counted(tmp_path):
    rows = compiled(tmp_path, "{cubin_bytes: '< 30000', spill_bytes: 0}")
    for row in rows:
        (stage,) = row.resources.stages.values()
        assert "instructions" not in stage
        assert row.resources.limiters == {"fwd": "registers"}
        small = stage["cubin_bytes"] < 30000
        assert row.status is (Status.OK if small else Status.PRUNED)


@pytest.mark.usefixtures("no_disassembler")
def test_a_missing_disassembler_is_told_before_anything_is_compiled(tmp_path):
    with pytest.raises(ToolchainError, match=r"needs nvdisasm.*\n.*\[inspect\]"):
        compiled(tmp_path, "{branches: 0}", tmp_path / "cubins")
    assert not (tmp_path / "cubins").exists()


# -- inspect ----------------------------------------------------------------------------------


def looked_at(kernel="flash_fwd_mma", given="", problem=None, arch="sm_90a"):
    families = discover()
    return inspection.inspect(families[kernel], given, problem, ARCHS[arch])


def test_a_config_is_completed_by_the_first_that_the_rules_keep():
    found = looked_at(given="BLOCK_N=128 NUM_WARPS=8")
    config, problem = Config(found["config"]), Problem.of(found["problem"])
    assert (config.BLOCK_N, config.NUM_WARPS) == (128, 8)
    assert discover()[found["kernel"]].refused_by(config, problem, ARCHS[found["arch"]]) is None
    json.dumps(found, allow_nan=False)
    assert found["label"] == "(1,16,1024,64) fp16 full"
    stage = found["stages"]["fwd"]
    assert stage["hmma"] > 0
    assert stage["limited_by"] in ("registers", "shared memory", "threads", "blocks")
    assert found["bounds_us"] is None
    assert found["bounds_sm_clocks"]["matrix"] == pytest.approx(problem.flops / 4096)


def test_a_recorded_card_gives_the_bound_its_unit():
    card = inspection.card_of(ARCHS["sm_90a"], ROOT / "results" / "h200")
    assert card.gpu == "NVIDIA H200"
    assert inspection.card_of(ARCHS["sm_80"], ROOT / "results") is None
    families = discover()
    found = inspection.inspect(families["naive"], "THREADS=64", None, ARCHS["sm_90a"], card=card)
    assert found["bounds_us"]["matrix"] == pytest.approx(4.01, abs=0.01)
    assert found["stages"]["fwd"]["waves"] == pytest.approx(256 / (132 * 10), rel=0.3)
    assert any("4.01 µs" in line for line in inspection.lines(found, 100))


@pytest.mark.parametrize(
    ("kernel", "given", "arch", "error", "said"),
    [
        ("naive", "THREAD=64", "sm_90a", KernelError, "naive has no parameter 'THREAD'\n"),
        ("naive", "THREADS", "sm_90a", KernelError, "not a parameter's value: 'THREADS'\n"),
        ("naive", "THREADS=few", "sm_90a", KernelError, "THREADS cannot be 'few'\n"),
        ("flash_fwd_mma", "BLOCK_M=65", "sm_90a", SpaceError, "ruled out by: "),
        ("three_kernel_wgmma", "", "sm_80", SpaceError, "needs sm_90a, not sm_80"),
    ],
)
def test_what_cannot_be_inspected_is_said(kernel, given, arch, error, said):
    with pytest.raises(error) as caught:
        looked_at(kernel, given, arch=arch)
    assert said in str(caught.value)


@pytest.mark.usefixtures("no_disassembler")
def test_without_a_disassembler_the_rest_is_still_shown():
    found = looked_at("naive", "THREADS=224")  # that nobody else looks at
    assert "no instructions: " in " ".join(inspection.lines(found, 100))
    assert found["stages"]["fwd"]["registers"] > 0


def test_the_command_prints_one_document(attnsweep):
    problem = ("--problem", "(2,32/8,512x2048,128) bf16 causal", "--arch", "sm_80")
    done = attnsweep("inspect", "naive", "THREADS=128", "--json", *problem)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["config"] == {"THREADS": 128}
    assert data["problem"]["seqlen_k"] == 2048
    assert data["stages"]["fwd"]["threads"] == 128


def test_of_a_run_the_winner_is_inspected(attnsweep):
    run = ROOT / "results" / "h200" / "ladder"
    (winner, *_) = winners(open_run(run))
    done = attnsweep("inspect", run)
    assert (done.returncode, "--problem picks another of" in done.stderr) == (0, True), done.stderr
    data = json.loads(attnsweep("inspect", run, "--json").stdout)
    assert (data["kernel"], data["config"]) == (winner.kernel, winner.config)
    assert (data["arch"], data["card"]) == ("sm_90a", "NVIDIA H200")
    other = ("BLOCK_N=32", "--problem", winner.problem.label, "--arch", "sm_90")
    data = json.loads(attnsweep("inspect", run, *other, "--json").stdout)
    assert data["config"] == winner.config | {"BLOCK_N": 32}


def test_exponentials_count_as_beside_a_product_only_before_its_wait():
    def ops(text):
        names = {"p": "HGMMA.64x64x16.F32", "w": "WARPGROUP.DEPBAR.LE", "e": "MUFU.EX2"}
        return [{"opcode": names.get(letter, "MUFU.RCP")} for letter in text]

    # Scores' product and PV begin, scores are waited for, the softmax runs, PV is waited for.
    assert sass.count(ops("ppweeerwe"))["ex2_before_wait"] == 3
    assert sass.count(ops("ppwweeep"))["ex2_before_wait"] == 0  # sunk below the wait
    assert sass.count(ops("eeepwpeeew"))["ex2_before_wait"] == 0


def test_products_in_fp8_are_products_of_a_warpgroup(compiler):
    kernel = discover()["flash_fwd_fp8_wgmma"]
    config = Config({param.name: param.values[0] for param in kernel.params})
    config = Config({**config, "BLOCK_N": 128, "OVERLAP": 1})
    build = Build(kernel, config, Problem.parse("4,16,4096,128 e4m3 full"), compiler)
    build.submit()
    (found,) = sass.counts(build.cubins()["fwd"]).values()
    # The first tile's scores, the loop's scores and PV, and the last PV: each is four products.
    assert found["hgmma"] == 16
    assert found["ex2_before_wait"] < 64  # OVERLAP 1 waits for PV first


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(("maxima", "all_of_them"), [(1, False), (2, True)])
def test_only_without_maxima_the_softmax_stays_beside_pv(maxima, all_of_them, compiler):
    kernel = discover()["flash_fwd_wgmma"]
    config = Config({param.name: param.values[0] for param in kernel.params})
    values = {"BLOCK_N": 128, "WARPGROUPS": 2, "MAXIMA": maxima, "P_SHARED": 0}
    config = Config({**config, **values})
    build = Build(kernel, config, Problem.parse("4,16,4096,128 fp16 full"), compiler)
    build.submit()
    (found,) = sass.counts(build.cubins()["fwd"]).values()
    # A thread has 64 exponentials of a tile; those of the rare path are as many again.
    assert (found["ex2_before_wait"] >= 64) == all_of_them
