"""Every header that templates share compiles alone, and leaves no name of a parameter undefined."""

import re

import pytest

from attnsweep.compile.nvrtc import Compiler, source_closure
from attnsweep.core.files import shipped
from attnsweep.core.hardware import ARCHS
from attnsweep.family.discover import discover
from attnsweep.verify.compare import SOURCE

KERNELS = shipped("kernels")
LINES = 80
HEADERS = sorted(str(path.relative_to(KERNELS)) for path in KERNELS.glob("common/**/*.cuh"))


@pytest.fixture(scope="module", params=["sm_90a", "sm_80"])
def compiler(request, tmp_path_factory):
    made = Compiler(ARCHS[request.param], tmp_path_factory.mktemp("cubins"))
    yield made
    made.close()


@pytest.mark.nightly(push=6)
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone(compiler, header, tmp_path):
    source = tmp_path / "alone.cu"
    source.write_text(f'#include "{header}"\nextern "C" __global__ void alone() {{}}\n')
    assert compiler.compile(source, {}).path.is_file()


@pytest.mark.nightly(push=6)
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_bears_the_names_of_parameters(compiler, header, tmp_path):
    """-D gives a family's parameters to all that it includes: no template may use one as a name."""
    source = tmp_path / "alone.cu"
    source.write_text(f'#include "{header}"\nextern "C" __global__ void alone() {{}}\n')
    included = [family for family in discover().values() if header in source_closure(family.source)]
    names = {param.name for family in included for param in family.params}
    names |= {"HEAD_DIM", "CAUSAL", "STAGES", "THREADS", "WARPS", "ROWS", "SWIZZLE", "LSE"}
    assert compiler.compile(source, dict.fromkeys(names, "3")).path.is_file()


@pytest.mark.parametrize("header", HEADERS)
def test_functions_of_a_header_are_short(header):
    function = re.compile(r"^( *)__device__ .*?^\1\}$", re.DOTALL | re.MULTILINE)
    found = function.finditer((KERNELS / header).read_text())
    assert all(match[0].count("\n") < LINES for match in found)


# All dtypes where all families run; elsewhere another ptxas compiles what they share. They take
# longest of all tests here, so that a push draws one.
@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("dtype", "arch"),
    [*((dtype, "sm_90a") for dtype in ("FP16", "BF16", "FP32", "E4M3")), ("FP32", "sm_80"), ("E4M3", "sm_100a")],
)
def test_the_judge_compiles_without_spills(dtype, arch, tmp_path):
    compiler = Compiler(ARCHS[arch], tmp_path / "cubins")
    try:
        made = compiler.compile(SOURCE, {f"DTYPE_{dtype}": "1"})
    finally:
        compiler.close()
    spills = [line for line in made.log.splitlines() if "spill" in line]
    assert spills
    assert all(" 0 bytes stack frame, 0 bytes spill" in line for line in spills)
