"""Kernels from elsewhere: from a file to ranked candidates, and what a bug in one is said as.

support/own_kernels has one with a query a thread, one with static shared memory and __half2, and one with mma.h.
"""

import json
import re
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from sweeping import use

from attnsweep.store.run import open_run
from attnsweep.tools.from_source import declared
from attnsweep.tools.simulator import COMPILER, BuildError, translate

OWN = Path(__file__).parents[1] / "support" / "own_kernels"
NAMES = sorted(path.stem for path in OWN.glob("*.cu"))
with_gxx = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
SHAPE = ("--problem", "1,1,33x40,64")


class AnyGpu(FakeGpu):
    """A GPU on which each candidate takes another time, and no baseline is installed."""

    def time_us(self, name):
        if "=" not in name:
            raise KeyError(name)
        return 10.0 + sum(map(int, re.findall(r"=(\d+)", name))) / 7


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@with_gxx
@pytest.mark.parametrize("name", NAMES)
def test_a_file_becomes_ranked_candidates_by_three_commands(attnsweep, monkeypatch, name):
    """Nothing is edited between them."""
    use(monkeypatch, AnyGpu())
    for command in (
        ("init", "--kernel", "mine", "--from", OWN / f"{name}.cu"),
        ("verify", "mine", *SHAPE),
        ("run", "mine/mine.yaml"),
    ):
        done = attnsweep(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = Path("results/test-1").iterdir()
    ranked = [row for row in open_run(directory).trials if row.provider == "attnsweep" and row.time_us]
    assert len(ranked) == {"one_row": 3, "tiled": 9, "tensor": 3}[name]
    said, use_line = done.stdout.splitlines()[-2:]
    assert said.startswith("mine takes ")
    assert "to explain it: attnsweep explain " in use_line


def broken(name, before, after):
    text = (OWN / f"{name}.cu").read_text()
    assert before in text
    return text.replace(before, after, 1)


@with_gxx
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "key < M ? *reinterpret_cast<const __half2*>(K + at) : none",
            "*reinterpret_cast<const __half2*>(K + at)",
            r"fwd: reads past the end of buffer k: byte \d+ of 5120\n  at mine\.cu:(\d+)\n  in block",
        ),
        ("__syncthreads();", "", r"schedules disagree on \d+ outputs: a barrier is missing, or threads race"),
        (
            "keys[COLS]",
            "keys[COLS / 2]",
            r"(?:reads|writes) past the end of the shared array keys: byte \d+ of 1024\n  at",
        ),
        ("if (!mine) return;", "", r"writes past the end of buffer o: byte \d+ of 4224\n  at mine\.cu:(\d+)"),
        ("score *= scale;", "score *= 2 * scale;", r"wrong: error of o "),
    ],
    ids=["read", "barrier", "shared", "write", "formula"],
)
def test_a_bug_is_said_with_its_line(attnsweep, here, before, after, said):
    text = broken("tiled", before, after)
    Path("mine.cu").write_text(text)
    assert attnsweep("init", "--kernel", "mine", "--from", "mine.cu").returncode == 0
    done = attnsweep("verify", "mine", *SHAPE)
    assert done.returncode == 1, done.stderr
    found = re.search(said, done.stdout)
    assert found is not None, done.stdout
    if found.groups():
        line = text.splitlines()[int(found[1]) - 1]
        assert re.search(r"K \+ at|O\[", line), line


@with_gxx
def test_findings_of_one_bug_are_one_paragraph(attnsweep):
    """There were eleven."""
    Path("mine.cu").write_text(broken("tiled", "__syncthreads();", ""))
    attnsweep("init", "--kernel", "mine", "--from", "mine.cu")
    paragraphs = attnsweep("verify", "mine").stdout.strip().split("\n\n")
    assert len(paragraphs) == 2
    assert re.match(r"\d+ of 11 cases: schedules disagree", paragraphs[1])


def test_init_prints_what_it_guessed_and_what_it_could_not(attnsweep):
    text = broken("tiled", "int N, int M,", "int N, int M, int stride,").replace("ROWS + threadIdx.x", "rows(ROWS)")
    Path("own.cu").write_text(text.replace("blockIdx.x * rows(ROWS)", "first_row()"))
    done = attnsweep("init", "--kernel", "mine", "--from", "own.cu")
    assert "guessed: ROWS: tries 32, 16, 64\nguessed: COLS: tries 16, 8, 32\n" in done.stdout
    assert "M is seqlen_k" in done.stdout
    places = re.findall(r"mine/mine\.py:(\d+): not known: (.*); edit it", done.stdout)
    lines = Path("mine/mine.py").read_text().splitlines()
    assert [(what, lines[int(at) - 1].split("=")[0].strip()) for at, what in places] == [
        ("stride is passed as 0", "args"),
        ("the rows of a block are taken for its threads", "grid"),
    ]
    said = json.loads(attnsweep("init", "--kernel", "mine", "--from", "own.cu", "--force", "--json").stdout)
    assert said["open"] == [what for _, what in places]


@pytest.mark.parametrize(
    ("source", "params", "threads", "grid"),
    [
        ("__launch_bounds__(64) a(int n) { blockIdx.x * 64; blockIdx.z; }", "THREADS", "64", "p.heads, p.batch"),
        ("a(int n) { blockIdx.x * blockDim.x; blockIdx.y; }", "THREADS", "config.THREADS", "config.THREADS"),
        ("__launch_bounds__(NT) a(int n) { BM * blockIdx.x; }", "BM", "256", "config.BM"),
    ],
)
def test_a_launch_is_guessed_from_bounds_and_the_index_of_a_block(source, params, threads, grid):
    before = "#define NT 256\n#ifndef BM\n#define BM 64\n#endif\n#ifndef HEAD_DIM\n#define HEAD_DIM 64\n#endif\n"
    own = declared("mine", f'{before if "BM" in source else ""}extern "C" __global__ void {source}')
    assert f'Param("{params}"' in own.text or params == "THREADS"
    assert "HEAD_DIM" not in own.text
    assert f"threads={threads}," in own.text
    assert grid in own.text


def test_every_obstacle_is_named_at_once():
    text = '#include <cooperative_groups.h>\nvoid f() {\n  asm("bar.sync 0;");\n  __shared__ auto x = 1;\n}\n'
    with pytest.raises(BuildError) as refused:
        translate(text, "mine.cu")
    said = str(refused.value)
    assert [line.split(" ")[0] for line in said.splitlines()] == ["mine.cu:3:", "mine.cu:4:", "mine.cu:1:"]
    assert "call what common/ptx/*.cuh has" in said


@with_gxx
def test_numbers_of_16_bits_are_rounded_as_cuda_does(attnsweep):
    """Each claim of this kernel is a static or a counted one: it writes o only if all hold."""
    Path("own.cu").write_text(
        """#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void own(const half* q, half* o, int seqlen_q) {
    bool ok = float(__float2half(1.0f + 0x1p-11f)) == 1.0f && float(__float2half(1.0f + 0x1.8p-10f)) == 1.0f + 0x1p-9f;
    ok = ok && float(__float2bfloat16(1.0f + 0x1p-8f)) == 1.0f && __hisnan(half(0.f) / half(0.f));
    const half2 two = __hfma2(__floats2half2_rn(2.f, 3.f), __float2half2_rn(0.5f), __halves2half2(1, -1));
    ok = ok && __low2float(two) == 2.f && __high2float(two) == 0.5f && __hgt(hexp(half(1.f)), half(2.7f));
    const float2 pair = __bfloat1622float2(__floats2bfloat162_rn(1.5f, -4.f));
    ok = ok && pair.x == 1.5f && pair.y == -4.f && sizeof(__nv_bfloat162) == 4;
    for (int i = threadIdx.x; ok && i < seqlen_q * HEAD_DIM; i += 128) o[blockIdx.y * seqlen_q * HEAD_DIM + i] = q[i];
}
"""
    )
    attnsweep("init", "--kernel", "own", "--from", "own.cu")
    done = attnsweep("verify", "own", "--problem", "1,1,8x8,64")
    # A copy of q is no attention; what was not written is NaN.
    assert "wrong: error of o" in done.stdout
    assert "nan" not in done.stdout, done.stdout
