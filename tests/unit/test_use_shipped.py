"""`attnsweep.attention`: the winners that come with attnsweep, and what they follow from."""

from __future__ import annotations

import importlib.util
import io
import json
import lzma
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import attnsweep
from attnsweep.use.runtime import table as tables
from attnsweep.use.runtime.table import CUBINS, PACKED, TABLE, PackageError, read_table

ROOT = Path(attnsweep.__file__).parent.parent
PLACE = Path(tables.__file__).parent
H200_L2, H100_L2 = 62914560, 52428800


def script():
    spec = importlib.util.spec_from_file_location("winners", ROOT / "scripts" / "winners.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_h100_and_h200_are_known_and_every_cubin_is_whole():
    made = read_table(PLACE)
    assert {key.l2_bytes for key in made.gpus} == {H100_L2, H200_L2}
    for gpu in made.gpus.values():
        assert len(gpu.winners) > 30
        for winner in gpu.winners:
            for stage in winner.kernel.stages:
                assert set(stage) == {"fwd", "combine"} if winner.kernel.combines else {"fwd"}
                assert all(made.code(code)[:4] == b"\x7fELF" for code in stage.values())


def test_they_are_small():
    """Which is why cubins are shipped and nothing is compiled on first use."""
    size = (PLACE / PACKED).stat().st_size
    assert size < 512 * 2**10
    kernels = len(json.loads((PLACE / TABLE).read_text())["kernels"])
    page = " ".join((ROOT / "docs" / "how-to" / "use.md").read_text().split())
    raw = json.loads((PLACE / TABLE).read_text())
    assert f"{kernels} kernels in {size / 2**10:.0f} KiB, of NVRTC {raw['nvrtc']}" in page


def test_a_table_that_the_recorded_runs_no_longer_give_is_stale(monkeypatch, capsys, tmp_path):
    """scripts/check compares the shipped table with the runs themselves, which takes 10 s."""
    winners = script()
    text = (PLACE / TABLE).read_text()
    monkeypatch.setattr(winners, "exported_table", lambda runs: json.loads(text))
    monkeypatch.setattr(sys, "argv", ["winners.py", "--check"])
    assert winners.main() == 0
    raw = json.loads((PLACE / TABLE).read_text())
    raw["gpus"][0]["winners"][0]["gain"] += 0.01
    raw["source"] = "0" * 64
    (tmp_path / TABLE).write_text(json.dumps(raw))
    winners.TABLE = tmp_path / TABLE
    assert winners.main() == 1
    assert "stale (gpus, source)" in capsys.readouterr().out
    raw = json.loads((PLACE / TABLE).read_text())
    (tmp_path / TABLE).write_text(json.dumps(raw | {"nvrtc": "12.9"}))
    assert winners.main() == 1
    assert "compile with the NVRTC" in capsys.readouterr().out


def test_equal_cubins_are_packed_to_equal_bytes(tmp_path):
    for name in ("b.cubin", "a.cubin"):
        (tmp_path / name).write_bytes(name.encode())
    first = script().packed(tmp_path)
    shutil.move(tmp_path / "a.cubin", tmp_path / "c.cubin")
    shutil.move(tmp_path / "c.cubin", tmp_path / "a.cubin")
    assert script().packed(tmp_path) == first


@pytest.mark.parametrize("spoil", ["cut", "other", "empty", "missing"])
def test_damaged_packed_cubins(tmp_path, spoil):
    shutil.copy(PLACE / TABLE, tmp_path)
    shutil.copy(PLACE / PACKED, tmp_path)
    data = (PLACE / PACKED).read_bytes()
    packed = tmp_path / PACKED
    if spoil == "missing":
        packed.unlink()
    elif spoil == "other":
        (tmp_path / CUBINS).mkdir()
        (tmp_path / CUBINS / "x.cubin").write_bytes(b"\x7fELF")
        packed.write_bytes(script().packed(tmp_path / CUBINS))
    else:
        packed.write_bytes(data[: len(data) // 2] if spoil == "cut" else b"")
    made = read_table(tmp_path)
    code = next(iter(made.gpus.values())).winners[0].kernel.stages[0]["fwd"]
    with pytest.raises(PackageError, match="cannot be read"):
        made.code(code)


def test_packed_cubins_that_would_fill_the_memory(tmp_path, monkeypatch):
    """A file of 150 KiB can hold a gigabyte of zeros."""
    monkeypatch.setattr(tables, "_MOST_BYTES", 2**20)
    shutil.copy(PLACE / TABLE, tmp_path)
    code = next(iter(read_table(tmp_path).gpus.values())).winners[0].kernel.stages[0]["fwd"]
    (tmp_path / PACKED).write_bytes(lzma.compress(bytes(2**24)))
    with pytest.raises(PackageError, match="more than 1048576 bytes"):
        read_table(tmp_path).code(code)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(PLACE / TABLE, other)
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(code.file, bytes(2**24))
    (other / PACKED).write_bytes(lzma.compress(inner.getvalue()))
    with pytest.raises(PackageError, match="compressed once more"):
        read_table(other).code(code)


def ran(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_pytorch_the_error_says_what_to_install():
    out = ran(
        "import sys; sys.modules['torch'] = None\n"
        "import attnsweep\n"
        "try: attnsweep.attention(1, 2, 3)\n"
        "except ImportError as error: print(error)\n"
    )
    assert "pip install 'attnsweep[torch]'" in out


def test_importing_attnsweep_imports_no_pytorch():
    assert ran("import sys, attnsweep; attnsweep.attention; print('torch' in sys.modules)") == (
        "False\n"
    )


def test_importing_it_imports_no_compiler():
    """PyTorch's takes 1.2 s, where all of a package takes 0.04."""
    pytest.importorskip("torch")
    code = "import sys, torch\nbefore = set(sys.modules)\nimport attnsweep\n"
    code += "attnsweep.attention_counters()\n"
    code += "print({name.split('.')[1] for name in {*sys.modules} - before if 'torch.' in name})\n"
    assert "_dynamo" not in ran(code)


def test_on_the_cpu_and_enabled():
    pytest.importorskip("torch")
    out = ran(
        """
import logging, sys
import attnsweep, torch
import torch.nn.functional as F
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
q = torch.randn(1, 2, 8, 64)
expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
assert torch.equal(attnsweep.attention(q, q, q, causal=True), expected)
with attnsweep.enable():
    assert torch.equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), expected)
assert attnsweep.attention_counters() == {"device": 2}
assert attnsweep.explain_attention(q, q, q).code == "device"
attnsweep.enable()
attnsweep.disable()
compiled = torch.compile(
    lambda q: attnsweep.attention(q, q, q, causal=True), fullgraph=True, backend="eager"
)
assert torch.equal(compiled(q), expected)
assert not {"cupy", "numpy.testing", "pandas", "pydantic", "transformers"} & set(sys.modules)
"""
    )
    assert out.startswith("WARNING:attnsweep:scaled_dot_product_attention: tensors are on cpu")


def test_compiled_before_it_is_imported():
    pytest.importorskip("torch")
    ran(
        """
import attnsweep, torch
q = torch.randn(1, 2, 8, 64)
compiled = torch.compile(
    lambda q: attnsweep.attention(q, q, q), fullgraph=True, backend="eager"
)
assert torch.allclose(compiled(q), attnsweep.attention(q, q, q))
"""
    )


def test_a_kernel_of_the_shipped_package_is_launched(tmp_path):
    """With a fake driver, on a shape that the recorded runs tuned."""
    torch = pytest.importorskip("torch")
    from attending import Kernel
    from fake_driver import FakeDriver

    from attnsweep.use.runtime.operator import Operator

    driver = FakeDriver(Kernel())
    operator = Operator(read_table(PLACE), "shipped_for_tests", driver, devices=("cpu",))
    key = next(key for key in operator.table.gpus if key.l2_bytes == H100_L2)
    operator._gpus[0] = operator.table.gpus[key]
    q = torch.randn(4, 16, 2048, 64).bfloat16()
    assert operator.explain(q, q, q).code == "tuned"
    driver.on_launch = None
    operator.attention(q, q, q)
    assert operator.counters() == {"kernel": 1}
    assert driver.modules[0][:4] == b"\x7fELF"
