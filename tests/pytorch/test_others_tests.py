"""scripts/others_tests.py, with a clone of a few tests of our own in the place of FlashAttention's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent.parent
HELPERS = """
def same(out, exact):
    assert (out - exact).abs().max() < 1e-5
"""
TESTS = """
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as exact
from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import USE_SOMETHING
from flash_attn.helpers import same
from flash_attn.layers.rotary import apply_rotary_emb

ORDER = []

def qkv(**how):
    return [torch.randn(1, 9, 2, 8, **how) for _ in range(3)]

def right(q, k, v, **how):
    return exact(*(t.transpose(1, 2) for t in (q, k, v)), **how).transpose(1, 2)

@pytest.mark.parametrize("number", range(6))
def test_right(number):
    given = qkv()
    out, lse, _ = flash_attn_func(*given, 0.0, causal=True, return_attn_probs=True, num_splits=3, qv=None)
    same(out, right(*given, is_causal=True))

def test_packed():
    q, k, v = given = qkv()
    same(flash_attn_qkvpacked_func(torch.stack(given, 2), 0.0), right(*given))
    same(flash_attn_kvpacked_func(q, torch.stack((k, v), 2), 0.0), right(*given))
    assert not USE_SOMETHING

def test_refused():
    flash_attn_func(*qkv(), alibi_slopes=torch.ones(2))

def test_no_log_sum_exp():
    _, lse, _ = flash_attn_func(*qkv(), return_attn_probs=True)
    assert torch.equal(lse, lse)

def test_no_cache():
    flash_attn_with_kvcache(*qkv())

def test_skipped():
    pytest.skip("of its own")
"""
WRONG = """
def test_wrong():
    given = qkv()
    same(flash_attn_func(*given, causal=True), right(*given))
"""


def clone(place, *more):
    package, tests = place / "flash_attn", place / "tests"
    package.mkdir()
    tests.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('that of the clone')")
    (package / "helpers.py").write_text(HELPERS)
    (tests / "test_flash_attn.py").write_text(TESTS + "".join(more))
    return place


def run(*arguments):
    command = [sys.executable, ROOT / "scripts" / "others_tests.py", "flash-attention", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def said(done):
    return " ".join(done.stdout.splitlines())


def test_their_tests_run_through_ours(tmp_path):
    done = run(clone(tmp_path, WRONG), "--seed", 3)
    assert done.returncode == 1
    assert "12 of 12 tests, seed 3: 7 passed, 1 failed, 3 refused by attnsweep, 1 skipped" in said(done), done.stdout
    assert "1 refused: attnsweep has no flash_attn_with_kvcache" in done.stdout
    assert "1 refused: alibi_slopes is not computed here: call flash_attn itself" in done.stdout
    assert "1 refused: log-sum-exp and weights are not returned" in done.stdout
    assert "failed: tests/test_flash_attn.py::test_wrong" in done.stdout


def test_a_sample_of_them_without_those_of_a_name(tmp_path):
    done = run(clone(tmp_path), "--sample", 4, "--pytest=-k=right")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 6 tests, seed 1: 4 passed, 0 failed, 0 refused" in said(done)


def test_what_is_no_clone_is_said(tmp_path):
    spec = importlib.util.spec_from_file_location("others_tests", ROOT / "scripts" / "others_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit, match="name a clone of FlashAttention"):
        module.flash_attention(SimpleNamespace(checkout=tmp_path, file="tests/test_flash_attn.py"))
