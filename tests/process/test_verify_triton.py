"""`attnsweep init --triton` writes a kernel, and `attnsweep verify` runs one, in Triton's interpreter."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from attnsweep.baselines import backend

EXAMPLE = Path(backend.__file__).with_name("triton_kernel.py").read_text()
TUTORIAL = Path(__file__).parent.parent.parent / "docs" / "tutorials" / "judge.md"


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
def test_the_tutorials_kernel_is_right_where_it_says_that_it_serves(attnsweep, here):
    (block, *_) = re.findall(r"```python\n(.+?)```", TUTORIAL.read_text(), re.DOTALL)
    (here / "my_kernel.py").write_text(block)
    done = attnsweep("verify", "my_kernel.py:forward", "--causal")
    assert (done.returncode, done.stdout) == (0, "")
    assert "0 findings in 11 cases" in done.stderr


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


OWN = """import torch

def attention(q, k, v, causal=False):
    assert k.shape == q.shape
    shown = torch.ones(len(q[0, 0]), len(k[0, 0]), dtype=torch.bool).tril()
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~shown, float("-inf")) if causal else scores
    return (scores.softmax(-1) @ v.float()).to(q.dtype)

def masked(q, k, v, mask):
    return q
"""

FAULTY = """import torch
import triton
import triton.language as tl

@triton.jit
def kernel(o, N: tl.constexpr):
    tl.store(o + tl.arange(0, N), nowhere)

def attention(q, k, v):
    kernel[(1,)](q, 16)
    return torch.empty_like(q)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_bare_assert_is_quoted_and_leads_to_supports(attnsweep, here):
    (here / "own.py").write_text(OWN)
    advice = "masks or a softcap, supports(problem) in its file must refuse"
    grouped = ("--problem", "1,2/1,33,16", "--problem", "1,2,33,16 causal")
    done = attnsweep("verify", "own.py:attention", *grouped)
    first, said = done.stdout.strip().splitlines()
    assert first == "attention: (1,2/1,33,16) fp16 full, normal:"
    assert said == "own.py:attention raised AssertionError: assert k.shape == q.shape (own.py:4)"
    assert advice in done.stderr
    done = attnsweep("inspect", "own.py:attention", "--problem", "1,2/1,33,16")
    assert done.returncode == 2
    assert "\n1: own.py:attention raised AssertionError: assert k.shape == q.shape (own.py:4)\n" in done.stdout
    arguments = ("1,2/1,33,16", "--kernel", "own.py:attention", "--dry-run", "--arch", "sm_90a")
    done = attnsweep("tune", *arguments)
    assert done.stderr == (
        "error: kernels: own_attention: own.py:attention raised AssertionError: assert k.shape == q.shape (own.py:4)\n"
        f"  what it does not serve, such as grouped heads, other lengths, {advice}\n"
    )
    done = attnsweep("tune", "1,2,33,16", "--kernel", "own.py:masked", *arguments[3:])
    assert done.stderr == (
        "error: tune-1-2-33-16-fp16-full-own_masked: no candidate is left for (1,2,33,16) fp16 full on sm_90a\n"
        "  own_masked: it takes 4 tensors, q, k, v, mask, and a call has 3, q, k, v\n"
    )
    done = attnsweep("tune", "1,2,33,16", *arguments[1:])
    assert "\n  in a spec, as own_attention: {call: 'own.py:attention', M: [64, 128]}; or give its" in done.stderr


UNTESTED = """
def supports(problem):
    return problem.layout.kind in ("dense", "packed") or "dense alone"

def attention(q, k, v):
    raise ValueError(f"got {len(q)} at {q.shape[2]}")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_cases_of_one_kind_are_counted_by_their_form_and_listed_with_verbose(attnsweep, here):
    """Numbers told them apart: 123 findings had as many lines, and the advice came behind the last."""
    (here / "own.py").write_text(UNTESTED)
    done = attnsweep("verify", "own.py:attention", "--causal")
    first, said, _, whole, *forms = done.stdout.strip().splitlines()
    assert (first, said) == ("attention: (1,1,1,64) fp16 causal, normal:", whole.partition(" cases: ")[2])
    assert said.startswith("own.py:attention raised ValueError: got 1 at 1 (own.py:6)")
    assert re.fullmatch(r"(\d+) of \1", whole.partition(" cases")[0])
    assert re.fullmatch(r"  (\d+) of \1 fp16 · causal: \(1,1,1,64\) fp16 causal, normal", forms[0])
    assert re.fullmatch(r"  (\d+) of \1 fp16 · causal · packed: \S+ fp16 causal packed\S+, normal", forms[1])
    assert all(line.count(" fp16 causal") == 1 for line in forms)
    assert done.stderr.startswith("what it does not serve, such as")
    every = attnsweep("-v", "verify", "own.py:attention", "--causal").stdout.strip().splitlines()[4:]
    assert every[0].count(" fp16 causal, ") == int(every[0].split()[0])
    told = json.loads(attnsweep("verify", "own.py:attention", "--causal", "--json").stdout)
    assert len(told["findings"]) == told["cases"] == int(whole.split()[0])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("own.py:atention",),
            "cannot import own.py:atention: atention is not in it; its functions are attention, masked",
        ),
        (("own.py",), "of a callable, name the function: own.py:FUNCTION"),
        (("own.py:masked",), "own.py: serves none of the small cases: it takes 4 tensors, q, k, v, mask, and a"),
        (("own.py:masked", "--problem", "1,2,33,16"), "own.py:masked cannot run (1,2,33,16) fp16 full: it takes 4"),
    ],
)
def test_a_callable_that_cannot_be_verified_is_refused_with_the_reason(arguments, says, attnsweep, here):
    (here / "own.py").write_text(OWN)
    done = attnsweep("verify", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "raised" not in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_what_triton_cannot_compile_is_named_and_no_kernel_is_taken_for_its_launcher(attnsweep, here):
    (here / "faulty.py").write_text(FAULTY)
    done = attnsweep("inspect", "faulty.py:attention", "--problem", "1,2,33,16")
    assert done.returncode == 2
    assert "raised CompilationError: at 2:34: NameError('nowhere is not defined')" in " ".join(done.stdout.split())
    for command in ("inspect", "verify"):
        done = attnsweep(command, "faulty.py:kernel")
        assert done.returncode == 2
        assert "kernel is no callable but " in done.stderr
        assert "Function; its functions are attention" in done.stderr


@pytest.mark.parametrize("command", ["run", "compile"])
@pytest.mark.parametrize(("name", "call"), [("own.py", "own.py:FUNCTION"), ("own.py:attention", "own.py:attention")])
def test_a_kernel_in_a_specs_place_is_told_what_sweeps_it(name, call, command, attnsweep, here):
    (here / "own.py").write_text(OWN)
    done = attnsweep(command, name)
    assert done.returncode == 2
    assert f"{name}: a kernel, and no spec\n  attnsweep tune --kernel {call} SHAPE sweeps it" in done.stderr
