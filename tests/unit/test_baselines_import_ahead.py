"""Baselines' packages are imported in a thread, which is over before rounds are timed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from attnsweep.baselines import flash, import_ahead, triton_precompile
from attnsweep.baselines.import_ahead import ImportAhead
from attnsweep.bench import process
from attnsweep.core import timings
from attnsweep.core.errors import NoGpuError
from attnsweep.core.problem import Problem
from attnsweep.device import cuda

PROBLEM = Problem(1, 2, 2, 64, 64, 64)
NAMES = ("torch_flash", "triton_flash")


@pytest.fixture(autouse=True)
def no_steps():
    timings.taken()
    yield
    timings.taken()


TRITON = SimpleNamespace(done=lambda problem: False)


def test_packages_are_imported_ahead_each_once_and_none_that_is_not_asked_for(monkeypatch):
    there = ["torch", "triton", "cudnn", "fa3_fwd_interface", "flash_attn"]
    imported = []

    def imports(module):
        imported.append(module)
        if module == "cudnn":
            raise RuntimeError("no driver")
        return SimpleNamespace(_flash_attn_forward=object())  # no function: an operator

    monkeypatch.setattr(flash, "importable", lambda module: module in there)
    monkeypatch.setattr(triton_precompile, "importable", lambda module: module in there)
    monkeypatch.setattr(import_ahead.importlib, "import_module", imports)
    import_ahead.load(["torch_flash", "cudnn", "flash_attn_3", "flash_attn_3_fp8", "flash_attn_4"])
    assert list(dict.fromkeys(imported)) == ["torch", "cudnn", "fa3_fwd_interface", "torch._dynamo"]
    imported.clear()
    there.remove("fa3_fwd_interface")
    import_ahead.load(["flash_attn_3"])
    assert imported == ["torch"]  # what a missing package would import is not needed


class Operator:
    """As torch.library.custom_op makes one; a call of it imports torch._dynamo."""

    def __init__(self, function):
        self._init_fn = function

    def __call__(self, *given):
        raise AssertionError("the operator was called")


@pytest.mark.parametrize("declared", [True, False])
def test_flash_attention_3_is_called_without_its_operator(monkeypatch, declared):
    def forward(x):
        return x + 1

    package = SimpleNamespace(_flash_attn_forward=Operator(forward) if declared else forward)
    package.flash_attn_func = lambda x: package._flash_attn_forward(x)
    imported = []

    def imports(module):
        imported.append(module)
        return package

    monkeypatch.setattr(flash, "importable", lambda module: module in ("torch", *flash.FLASH_3))
    monkeypatch.setattr(
        triton_precompile, "importable", lambda module: module in ("torch", *flash.FLASH_3)
    )
    monkeypatch.setattr(import_ahead.importlib, "import_module", imports)
    import_ahead.load(["flash_attn_3"])
    assert set(imported) == {"torch", "flash_attn_interface"}  # and not torch._dynamo
    assert package.flash_attn_func(1) == 2


def test_an_operator_of_pytorch_has_a_function(tmp_path):
    """Which is no public name: without it, the import would be back, and only cost its time."""
    pytest.importorskip("torch")
    (tmp_path / "flash_attn_interface.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('test::forward', mutates_args=())\n"
        "def _flash_attn_forward(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x + 1\n"
        "def flash_attn_func(x):\n"
        "    return _flash_attn_forward(x)\n"
    )
    done = "import sys, torch; from attnsweep.baselines import registry as baselines; "
    done += "print(baselines._attention_of('flash_attn_interface')()(torch.zeros(1)).item(), "
    done += "'torch._dynamo' in sys.modules)"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    said = subprocess.run(
        [sys.executable, "-c", done],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["1.0", "False"]


def test_rounds_wait_for_imports(monkeypatch):
    imported = threading.Event()

    def slowly(names):
        time.sleep(0.2)
        imported.set()

    monkeypatch.setattr(import_ahead, "load", slowly)
    made = ImportAhead(TRITON)
    made.end()  # nothing was begun
    made.begin(["torch_flash"])
    assert not imported.is_set()
    made.end()
    assert imported.is_set()
    assert timings.taken()["wait for imports"] > 0.1
    made.end()
    assert timings.taken() == {}  # it waits once


def test_an_import_that_hangs_is_waited_for_within_bounds(monkeypatch):
    """The call that waits is an entrant's, which would fail in its place."""
    hanging = threading.Event()
    monkeypatch.setattr(import_ahead, "load", lambda names: hanging.wait(60))
    monkeypatch.setattr(import_ahead, "_LONGEST_S", 0.1)
    made = ImportAhead(TRITON)
    made.begin(["torch_flash"])
    began = time.monotonic()
    made.end()
    assert time.monotonic() - began < 5
    hanging.set()


def test_nothing_is_begun_without_a_driver(monkeypatch):
    """It would go on for seconds after the command has said why it ended."""
    monkeypatch.setattr(cuda, "driver_cuda", lambda: None)
    with pytest.raises(NoGpuError, match="no NVIDIA driver"):
        process._describe(NAMES, (PROBLEM, 3), SimpleNamespace())  # which begins nothing


# -- steps ----------------------------------------------------------------------------------


def test_steps_add_up_and_are_told_once():
    for _ in range(2):
        with timings.step("first calls"):
            time.sleep(0.01)
    with pytest.raises(ValueError, match="no engine"), timings.step("set up"):
        raise ValueError("no engine")
    told = timings.taken()
    assert list(told) == ["first calls", "set up"]
    assert told["first calls"] >= 0.02
    assert timings.taken() == {}
