"""`attnsweep init --triton` writes a kernel, and `attnsweep verify` runs one, in Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest

from attnsweep.baselines import backend

EXAMPLE = Path(backend.__file__).with_name("triton_kernel.py").read_text()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_triton_kernel_is_a_file_of_its_own(attnsweep, here):
    done = attnsweep("init", "--triton")
    assert "attend.py: a Triton kernel; next: attnsweep verify attend.py:attention" in done.stdout
    assert (here / "attend.py").read_text() == EXAMPLE
    assert "attnsweep" not in [line.split()[1] for line in EXAMPLE.splitlines() if line.startswith(("from", "import"))]
    assert attnsweep("init", "--triton", "attend.py").returncode == 2  # it is there
    assert "--arch does nothing with --triton" in attnsweep("init", "--triton", "--arch", "sm_90a").stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_wrong_callable_is_a_paragraph_and_exit_code_1(attnsweep, here):
    assert "--asan does nothing with a callable" in attnsweep("verify", "attend.py:attention", "--asan").stderr
    (here / "attend.py").write_text(EXAMPLE.replace("keys[None, :] <= rows", "keys[None, :] < rows"))
    shapes = ("--problem", "1,2/1,33x40,16", "--problem", "1,2/1,33x40,16 causal")
    done = attnsweep("verify", "attend.py:attention", "BLOCK_M=64", *shapes)
    assert done.returncode == 1, done.stderr
    first, said = done.stdout.strip().splitlines()
    assert first.startswith("attention BLOCK_M=64 BLOCK_N=32 num_warps=4")
    assert first.endswith("(1,2/1,33x40,16) fp16 causal, normal:")
    assert said.startswith("wrong: error of o")
    assert "1 finding in 2 cases of 1 kernel" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_shape_with_backward_is_one_of_gradients(attnsweep, here):
    (here / "grads.py").write_text("import torch\n\ndef own(q, k, v, o, lse, do):\n    return q * 0, k * 0, v * 0\n")
    done = attnsweep("verify", "grads.py:own", "--problem", "1,2,32,16 causal backward")
    assert done.returncode == 1, done.stderr
    assert "(1,2,32,16) fp16 causal backward" in done.stdout
    assert "wrong: error of d" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("call", "values", "shapes"),
    [
        ("calls_tma.py:attention", "BLOCK_N=128", ["1,2/1,70x321,32", "1,2/1,130x100,16 causal"]),
        ("calls_backward.py:gradients", "BLOCK=128", ["1,2/1,70x201,32 backward", "1,2/1,130x100,16 causal backward"]),
    ],
)
def test_the_kernels_that_calls_are_measured_with_are_right(call, values, shapes, attnsweep, here):
    file = call.partition(":")[0]
    (here / file).write_text((Path(__file__).parents[2] / "benchmarks" / file).read_text())
    done = attnsweep("verify", call, values, *(word for shape in shapes for word in ("--problem", shape)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings in 2 cases" in done.stderr
