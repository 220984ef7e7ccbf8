"""Exported configs of calls, read by what they are for: Python's import, Triton and Helion."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from called_rows import FAST, LONG, SHORT, SLOW, called, written  # noqa: E402

import attnsweep  # noqa: E402
from attnsweep.core.problem import Problem  # noqa: E402

WINDOW = Problem.parse("(1,4/2,256x512,16/8) fp16 window(64,0)")
CARD = {"name": "NVIDIA Test 1", "major": 9, "minor": 0, "multi_processor_count": 132}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(place, rows, card, monkeypatch):
    """The module of a run's configs, on this card."""
    path = place / "my_configs.py"
    attnsweep.export(written(place / "run", rows), path)
    module = imported(path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**CARD | card))
    return module


def inputs(problem, device="cuda", dtype=None, order=(0, 1, 2, 3)):
    """All that is asked of tensors on a card, without one."""
    own = {"device": torch.device(device), "dtype": dtype or TYPES[problem.dtype]}
    sizes = [[problem.shape_of(name)[axis] for axis in order] for name in "qkv"]
    return [SimpleNamespace(shape=torch.Size(each), **own) for each in sizes]


def test_a_module_knows_the_calls_that_were_measured(tmp_path, monkeypatch):
    rows = [called(SHORT, FAST, 20.0), called(LONG, SLOW, 20.0), called(WINDOW, SLOW, 20.0)]
    module = made(tmp_path, rows, {}, monkeypatch)
    assert module.config_for(*inputs(SHORT), causal=True) == {"M": 64, "num_warps": 4}
    assert module.config_for(*inputs(LONG), causal=True) == SLOW
    assert module.config_for(*inputs(WINDOW), window=(64, 0)) == SLOW
    assert module.config_for(*inputs(SHORT)) is None
    assert module.config_for(*inputs(WINDOW), causal=True) is None
    assert module.config_for(*inputs(WINDOW), window=[32, 0]) is None
    assert module.config_for(*inputs(SHORT, dtype=torch.float16), causal=True) is None
    assert module.config_for(*inputs(SHORT, dtype=torch.float16), causal=True, dtype="bf16") is None
    assert module.config_for(*inputs(SHORT, device="cpu"), causal=True) is None
    q, k, v = inputs(SHORT)
    assert module.config_for(q, *inputs(LONG)[1:], causal=True) is None
    assert module.config_for(q, k, inputs(LONG)[2], causal=True) is None
    assert module.config_for(q, k, inputs(SHORT, dtype=torch.float16)[2], causal=True) is None
    assert module.config_for(*inputs(SHORT, order=(1, 2, 3)), causal=True) is None
    module.config_for(q, k, v, causal=True)["M"] = 1
    assert module.config_for(q, k, v, causal=True)["M"] == 64
    assert module.TABLE["entries"][0]["call"]["closure"] == "c105"


@pytest.mark.parametrize("other", [{"name": "NVIDIA Test 2"}, {"minor": 3}, {"multi_processor_count": 16}])
def test_a_module_knows_no_other_card(tmp_path, monkeypatch, other):
    module = made(tmp_path, [called(SHORT, FAST, 20.0)], other, monkeypatch)
    assert module.config_for(*inputs(SHORT), causal=True) is None


def test_a_function_of_another_layout_is_asked_with_its_own_tensors(tmp_path, monkeypatch):
    row = called(SHORT, FAST, 20.0, function="attend.py:attention?layout=bshd")
    module = made(tmp_path, [row], {}, monkeypatch)
    assert module.config_for(*inputs(SHORT), causal=True) is None
    assert module.config_for(*inputs(SHORT, order=(0, 2, 1, 3)), causal=True) == {"M": 64, "num_warps": 4}


def test_a_module_imports_neither_attnsweep_nor_pytorch(tmp_path, monkeypatch):
    path = tmp_path / "my_configs.py"
    attnsweep.export(written(tmp_path / "run"), path)
    for name in ("torch", "attnsweep"):
        monkeypatch.setitem(sys.modules, name, None)
    exec(compile(path.read_text(), path, "exec"), {})


def test_triton_makes_its_configs_of_the_entries(tmp_path):
    triton = pytest.importorskip("triton")
    rows = [called(SHORT, FAST, 20.0), called(LONG, SLOW | {"num_stages": 2, "num_ctas": 2}, 20.0)]
    attnsweep.export(written(tmp_path / "run", rows), tmp_path / "mine.json", format="triton")
    entries = json.loads((tmp_path / "mine.json").read_text())
    one, two = (triton.Config(**entry["config"]) for entry in entries)
    assert one == triton.Config({"M": 64}, num_warps=4)
    assert two == triton.Config({"M": 128}, num_warps=8, num_stages=2, num_ctas=2, maxnreg=128)
    assert [Problem.of(entry["problem"]) for entry in entries] == [SHORT, LONG]


ADDED = """\
import helion
import helion.language as hl
import torch


@helion.kernel
def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size()):
        out[tile] = x[tile] + y[tile]
    return out
"""


def test_helion_loads_its_configs_and_makes_code_of_them(tmp_path):
    helion = pytest.importorskip("helion", reason="needs Helion: pip install helion")
    config = {"block_sizes_0": 16, "block_sizes_1": 64, "num_warps": 8, "pid_type": "flat", "maxnreg": None}
    attnsweep.export(written(tmp_path / "run", [called(SHORT, config, 20.0)]), tmp_path / "out", format="helion")
    found = helion.Config.load(tmp_path / "out" / "1,2,256,16_bf16_causal.json")
    assert found == helion.Config(block_sizes=[16, 64], num_warps=8, pid_type="flat")
    (tmp_path / "added.py").write_text(ADDED)
    x = torch.zeros(64, 128)
    code = imported(tmp_path / "added.py").added.bind((x, x)).to_triton_code(found)
    assert "_BLOCK_SIZE_0 = tl.constexpr(16)" in code
    assert "_BLOCK_SIZE_1 = tl.constexpr(64)" in code
    assert "num_warps=8" in code
