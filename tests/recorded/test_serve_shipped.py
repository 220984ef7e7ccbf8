"""`attnsweep.attention`: the winners that come with attnsweep, and what they follow from."""

import hashlib
import importlib.util
import json
import lzma
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import attnsweep
from attnsweep.serve.runtime import table as tables
from attnsweep.serve.runtime.families import WGMMA, WGMMA_BACKWARD, WIDE
from attnsweep.serve.runtime.table import ALIGNMENT, BASE, CUBINS, TABLE, PackageError, read_table, unpacked

ROOT = Path(attnsweep.__file__).parent.parent
PLACE = Path(tables.__file__).parent
H200_L2, H100_L2 = 62914560, 52428800


def script():
    place = ROOT / "scripts"
    spec = importlib.util.spec_from_file_location("winners", place / "winners.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)  # as of a script
        spec.loader.exec_module(module)
    return module


def stages_of(made):
    """The machine code of each kernel, by the names of its launches, once; and the kernel."""
    every = [w.kernel for gpu in made.gpus.values() for w in gpu.winners]
    stages = {tuple(each.stages.items()): (each, each.stages) for each in every}
    return stages.values()


def test_h100_and_h200_are_known_and_every_cubin_is_whole():
    made = read_table(PLACE)
    assert {key.l2_bytes for key in made.gpus} == {H100_L2, H200_L2}
    assert min(len(gpu.winners) for gpu in made.gpus.values()) > 30
    for kernel, stage in stages_of(made):
        if kernel.declaration is WGMMA_BACKWARD:
            again = kernel.values.RECOMPUTE
            assert set(stage) == {"keys", *(("queries",) if again else ("delta", "convert"))}
            continue
        if kernel.declaration is WIDE:
            assert set(stage) == {"fwd", *["combine"] * (kernel.values.SPLITS > 1)}
            continue
        combine = {"combine"} if WGMMA.combines(kernel.values) else set()
        scan = {"mask"} if kernel.values.ITEM_KEYS else {"mask", "order"}
        scan = scan if kernel.mask.split()[0] not in ("full", "causal") else set()
        assert set(stage) == {"fwd"} | combine | scan
    codes = {code for _, stage in stages_of(made) for code in stage.values()}
    for code in sorted(codes, key=lambda code: made.archives[code.file].archive):
        assert made.code(code)[:4] == b"\x7fELF"


def test_they_are_small():
    size = sum(path.stat().st_size for path in (PLACE / CUBINS).iterdir())
    # Of a wheel that may have 5 MB. Kernels within 2 % of others are left out already.
    assert size < 1400 * 2**10
    raw = json.loads((PLACE / TABLE).read_text())
    page = " ".join((ROOT / "docs" / "how-to" / "use.md").read_text().split())
    told = f"{len(raw['kernels'])} kernels in {size / 2**10:.0f} KiB, of NVRTC {raw['nvrtc']}"
    assert told in page


def test_a_call_unpacks_a_small_share_of_them():
    made = read_table(PLACE)
    bytes_of = {path.name: len(unpacked(path)) for path in (PLACE / CUBINS).iterdir()}
    for _, stage in stages_of(made):
        archives = {BASE, *(made.archives[code.file].archive for code in stage.values())}
        # What many kernels have in common, as the scan of a mask, is in the base.
        assert len(archives) <= 2
        assert sum(bytes_of[archive] for archive in archives) <= 8e6  # a tenth of those 79 ms's


def test_the_archives_hold_each_cubin_of_the_table_once_and_nothing_else():
    raw = json.loads((PLACE / TABLE).read_text())
    there = {path.name for path in (PLACE / CUBINS).iterdir()}
    assert there == set(raw["archives"])
    held = [name for files in raw["archives"].values() for name, _ in files]
    codes = {code for kernel in raw["kernels"] for code in kernel["stages"].values()}
    assert sorted(held) == sorted(f"{code[:16]}.cubin" for code in codes)
    for archive, files in raw["archives"].items():
        whole = sum(nbytes + -nbytes % ALIGNMENT for _, nbytes in files)
        assert len(unpacked(PLACE / CUBINS / archive)) == whole


def test_fewer_kernels_than_are_shipped_need_no_compiler(tmp_path):
    """Their code is what was shipped of them."""
    winners, raw = script(), json.loads((PLACE / TABLE).read_text())
    fewer = {**raw, "kernels": [{**kernel, "stages": {}} for kernel in raw["kernels"][::40]]}
    assert winners.without_compiler(tmp_path, fewer, winners.kept(raw, fewer))
    made = json.loads((tmp_path / TABLE).read_text())
    assert made["kernels"] == raw["kernels"][::40]
    assert made["nvrtc"] == raw["nvrtc"]
    digests = {digest for kernel in made["kernels"] for digest in kernel["stages"].values()}
    files = {path.name: path.read_bytes() for path in (tmp_path / CUBINS).iterdir()}
    assert {hashlib.sha256(data).hexdigest() for data in files.values()} == digests


def test_other_text_or_another_kernel_must_be_compiled(tmp_path):
    """Of a family whose text has changed everything, and nothing else."""
    winners, raw = script(), json.loads((PLACE / TABLE).read_text())
    masked = [{**raw["kernels"][0], "mask": "padded"}, *raw["kernels"][1:]]
    name, every = WGMMA_BACKWARD.kernel.name, len(raw["kernels"])
    other = {"source": raw["source"] | {name: "0" * 64}}
    of_other = sum(kernel.get("family") == name for kernel in raw["kernels"])
    assert 0 < of_other < every
    for changed, lost in ((other, of_other), ({"kernels": masked}, 0), ({"format": 0}, every)):
        known = winners.kept(raw, raw | changed)
        assert len(known) == every - lost
        assert not winners.without_compiler(tmp_path / "made", raw | changed, known)


def test_a_table_that_the_recorded_runs_no_longer_give_is_stale(capsys, tmp_path):
    """scripts/check compares the shipped table with the runs themselves, which takes 10 s."""
    winners = script()
    text = (PLACE / TABLE).read_text()
    winners.table_of = lambda runs, slower: json.loads(text)
    assert winners.main(["--check"]) == 0
    raw = json.loads((PLACE / TABLE).read_text())
    raw["gpus"][0]["winners"][0]["gain"] += 0.01
    raw["source"] = {}
    (tmp_path / TABLE).write_text(json.dumps(raw))
    winners.TABLE = tmp_path / TABLE
    assert winners.main(["--check"]) == 1
    assert "stale (gpus, source)" in capsys.readouterr().out
    raw = json.loads((PLACE / TABLE).read_text())
    (tmp_path / TABLE).write_text(json.dumps(raw | {"nvrtc": "12.9"}))
    assert winners.main(["--check"]) == 1
    assert "compile with the NVRTC" in capsys.readouterr().out


def test_equal_packages_are_packed_to_equal_bytes(tmp_path):
    """Whatever was there before, and in whichever order a directory is read."""
    winners, made = script(), tmp_path / "made"
    (made / CUBINS).mkdir(parents=True)
    rows, configs = [], [f"BLOCK_N={16 * number} LSE=0" for number in range(7)]
    winners.GROUP, winners.OF_BASE, many = 60_000, 8, 60
    for number in range(many):
        digest = f"{97 * number % 1000:064}"[::-1]
        file = f"{digest[:16]}.cubin"
        (made / CUBINS / file).write_bytes(bytes([number]) * 5000)
        stages = {"fwd": digest}
        facts = {"head_dim": 64 + 64 * (number % 2), "mask": "fc"[number % 3 == 0], "dtype": "fp16"}
        rows.append({**facts, "config": number % 7, "stages": stages})
    written = []
    for place in ("one", "two"):
        winners.TABLE, winners.CUBINS = (tmp_path / place / name for name in (TABLE, CUBINS))
        (tmp_path / place / CUBINS).mkdir(parents=True)
        if place == "two":
            (tmp_path / place / CUBINS / "77.lzma2").write_bytes(b"of an earlier sweep")
        (made / TABLE).write_text(json.dumps({"configs": configs, "kernels": rows}))
        winners.write(made)
        files = sorted(path for path in (tmp_path / place).rglob("*") if path.is_file())
        written.append([(path.name, path.read_bytes()) for path in files])
    assert written[0] == written[1]
    archives = json.loads(written[0][-1][1])["archives"]
    read = [unpacked(tmp_path / "one" / CUBINS / archive) for archive in archives]
    for data, files in zip(read, archives.values(), strict=True):
        cubins = [(made / CUBINS / file).read_bytes() for file, _ in files]
        assert data == b"".join(cubin + bytes(8) for cubin in cubins)  # of 5000 bytes each


@pytest.fixture
def copied(tmp_path):
    """A copy of what is shipped, a code of it, and the archive of that."""
    shutil.copy(PLACE / TABLE, tmp_path)
    shutil.copytree(PLACE / CUBINS, tmp_path / CUBINS)
    made = read_table(tmp_path)
    winners = next(iter(made.gpus.values())).winners
    codes = [code for winner in winners for code in winner.kernel.stages.values()]
    archives = {code: made.archives[code.file].archive for code in codes}
    # The smallest, since tests pack it anew.
    others = [code for code, archive in archives.items() if archive != BASE]
    code = min(others, key=lambda code: (tmp_path / CUBINS / archives[code]).stat().st_size)
    return made, code, tmp_path / CUBINS / archives[code]


@pytest.mark.parametrize("spoil", ["cut", "other", "empty", "missing", "directory"])
def test_a_damaged_archive(copied, spoil):
    made, code, archive = copied
    data = archive.read_bytes()
    if spoil in ("missing", "directory"):
        archive.unlink()
    if spoil == "directory":
        archive.mkdir()
    elif spoil == "other":
        other = next(path for path in archive.parent.iterdir() if path != archive)
        archive.write_bytes(other.read_bytes())
    elif spoil != "missing":
        archive.write_bytes(data[: len(data) // 2] if spoil == "cut" else b"")
    with pytest.raises(PackageError, match=rf"{archive.name}.*: (cannot be read|damaged).*export again"):
        made.code(code)
    codes = (each for _, stages in stages_of(made) for each in stages.values())
    other = next(each for each in codes if made.archives[each.file].archive not in (archive.name, BASE))
    assert made.code(other)[:4] == b"\x7fELF"
    if spoil in ("cut", "empty"):
        archive.write_bytes(data)  # repaired, it is read again
        assert made.code(code)[:4] == b"\x7fELF"


def test_an_archive_with_another_cubin_of_the_same_name(copied):
    made, code, archive = copied
    whole = bytearray(unpacked(archive))
    first = made.archives[code.file].first
    whole[first : first + 20] = b"\x7fELF of someone else"
    archive.write_bytes(script().packed(bytes(whole), unpacked(archive.with_name(BASE))))
    unpacked.cache_clear()
    with pytest.raises(PackageError, match=r"damaged: its SHA-256 is not the table's"):
        made.code(code)


def test_archives_that_would_fill_the_memory(copied):
    """A file of 3 KiB can hold 16 MiB of zeros, one of 150 KiB a gigabyte."""
    made, code, archive = copied
    archive.write_bytes(lzma.compress(bytes(2**24), lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}]))
    assert archive.stat().st_size < 2**15
    with pytest.raises(PackageError, match="more than 8388608 bytes"):
        made.code(code)


def test_the_wheel_and_the_source_distribution_have_what_is_shipped():
    """By the rules of the build: all of attnsweep/ that git does not ignore."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert told["wheel"]["packages"] == ["attnsweep"]
    assert not {"exclude", "only-include"} & {*told["wheel"]}
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout, so git ignores nothing")
    files = [PLACE / TABLE, *(PLACE / CUBINS).iterdir()]
    asked = ["git", "check-ignore", *map(str, files)]
    assert subprocess.run(asked, cwd=ROOT, capture_output=True).returncode == 1


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
    assert "pip install -e '.[torch]'" in out  # from the clone, as `doctor` says


def test_importing_it_imports_no_compiler():
    """PyTorch's takes 1.2 s, where all of a package takes 0.04."""
    pytest.importorskip("torch")
    code = "import sys, torch\nbefore = set(sys.modules)\nimport attnsweep\n"
    code += "attnsweep.attention_counters()\n"
    code += "print({name.split('.')[1] for name in {*sys.modules} - before if 'torch.' in name})\n"
    assert "_dynamo" not in ran(code)


@pytest.mark.nightly(push=2, of="programs with PyTorch")
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
