"""A twin stands in for a whole header of PTX: it has all of it, and hides nothing that could run.

Rings, phases, descriptors, layouts and schedules are in kernels/common/tile and in the templates,
which run here as they are.
"""

import re
import subprocess

import numpy as np
import pytest

from attnsweep.family.discover import discover
from attnsweep.verify.encoding import from_bits, to_bits

from .harness import COMPILER, FLAGS, HERE, compile_cpp

KERNELS = discover()["naive"].source.parent
HEADERS = sorted((KERNELS / "common/ptx").iterdir())
ASM = re.compile(
    r"\basm(?: volatile)?\((?:[^()\"]|\"[^\"]*\"|\((?:[^()]|\([^()]*\))*\))*\)|"
    r"\b(?:WGMMA|MMA|WMMA|MBARRIER)_\w+\([^;]*\)"
)
# What C++ does there beside a single instruction: a wait that polls, registers one after the other,
# the byte count of one operand.
LOGIC = {
    "unsigned done = 0;",
    "long long begin = clock64();",
    "do {",
    "if (OfCluster) PTX;",
    "if (!done && clock64() - begin > 1000000000LL) PTX;",
    "} while (!done);",
    "for (int i = 0; i < N; ++i) PTX;",
    "int bytes = valid ? 16 : 0;",
    "unsigned address = smem_address(from);",
}


def body(path):
    """The header without comments, preprocessor and constants, its inline PTX as one word."""
    text = re.sub(r"//.*", "", path.read_text())
    text = re.sub(r"^ *#(?:.*\\\n)*.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^constexpr [^;]*;", "", text, flags=re.MULTILINE)
    return ASM.sub("PTX", text)


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_what_a_twin_stands_in_for_is_ptx_alone(header):
    lines = {" ".join(line.split()) for line in body(header).splitlines()}
    works = re.compile(r"[^<>=!]=[^=]|\?|\b(?:for|do|while)\b|\bif \(|return .*[-+*/%^|&]")
    declares = re.compile(r"template <|__device__|unsigned x\[Bf16 \? 4 : 8\];")
    assert {line for line in lines if works.search(line) and not declares.match(line)} <= LOGIC


def test_every_primitive_has_its_twin():
    twins = {path.name for path in (HERE / "common/ptx").iterdir()}
    assert {path.name for path in HEADERS} == twins
    for header in HEADERS:
        defined = r"(?:__forceinline__ [\w ]+[ \n]|^struct )(\w+)(?=\(| \{)"
        there = set(re.findall(defined, header.read_text(), re.M)) - {"TensorMap", "alignas"}
        assert there
        twin = (HERE / "common/ptx" / header.name).read_text()
        assert not {each for each in there if f" {each}" not in twin}, header.name


@pytest.mark.parametrize(("header", "define"), [("wgmma.cuh", "WGMMA_DEFINE"), ("fp8.cuh", "WGMMA_E4M3_DEFINE")])
def test_the_twin_multiplies_the_widths_that_there_are(header, define):
    text = (KERNELS / "common/ptx" / header).read_text()
    there = {int(width) for width in re.findall(rf"^{define}\((\d+),", text, re.MULTILINE)}
    twin = (HERE / "common/ptx" / header).read_text()
    (condition,) = re.findall(r"static_assert\((.*?),\s+\"", twin)
    words = condition.replace("||", "or").replace("&&", "and")
    assert {n for n in range(1, 300) if eval(words, {"N": n})} == there


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_e4m3_is_rounded_as_numpy_rounds_it(tmp_path):
    """Every number of E4M3, halfway to its neighbours, and next to halfway."""
    numbers = np.sort(from_bits(np.arange(127, dtype=np.uint8), "e4m3"))
    halfway = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, halfway, np.nextafter(halfway, 0), np.nextafter(halfway, 500)])
    x = np.concatenate([x, [464, 465, 1e9, np.inf, 2.0**-10, 1e-30]]).astype(np.float32)
    x = np.concatenate([x, -x, x[: -2 * len(x) % 4]])  # in fours
    (tmp_path / "round.cpp").write_text(
        '#include "simt.hpp"\n#include "common/ptx/fp8.cuh"\n#include <stdio.h>\n'
        "int main() {\n    float x[4];\n    while (fread(x, 4, 4, stdin) == 4) {\n"
        "        unsigned y = attn::pack_e4m3(x[0], x[1], x[2], x[3]);\n"
        "        fwrite(&y, 4, 1, stdout);\n    }\n}\n"
    )
    program = tmp_path / "round"
    compile_cpp([*FLAGS, "-O1", "-I", str(HERE), str(tmp_path / "round.cpp"), "-o", str(program)])
    done = subprocess.run([program], input=x.tobytes(), capture_output=True, check=True)
    assert np.array_equal(np.frombuffer(done.stdout, np.uint8), to_bits(x, "e4m3"))
