"""The cubin cache: content-addressed, shared between processes, and never a wrong hit."""

import json
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from attnsweep.compile import nvrtc
from attnsweep.compile.nvrtc import LATER, NOW, SOON, Compiler, installed_headers, nvrtc_version, source_closure
from attnsweep.core.errors import CompileError, ToolchainError
from attnsweep.core.hardware import ARCHS, Arch
from attnsweep.family.discover import discover

KERNEL = 'extern "C" __global__ void f(float* out) { out[threadIdx.x] = VALUE + PART; }\n'
SOURCE = '#include "part.cuh"\n' + KERNEL


@pytest.fixture
def source(tmp_path):
    (tmp_path / "f.cu").write_text(SOURCE)
    (tmp_path / "part.cuh").write_text("#define PART 1.0f\n")
    return tmp_path / "f.cu"


def compiler(tmp_path, arch="sm_90a"):
    return Compiler(ARCHS[arch], tmp_path / "cache", threads=2)


def test_a_second_compile_is_a_hit_with_the_same_log(source, tmp_path):
    first = compiler(tmp_path).compile(source, {"VALUE": "2.0f"})
    again = compiler(tmp_path).compile(source, {"VALUE": "2.0f"})
    assert (first.cached, again.cached) == (False, True)
    assert again.digest == first.digest
    assert "Used" in again.log
    assert again.log == first.log


@pytest.mark.parametrize(
    "change",
    [
        lambda source: source.write_text(SOURCE.replace("VALUE +", "VALUE -")),
        lambda source: source.with_name("part.cuh").write_text("#define PART 3.0f\n"),
    ],
    ids=["template", "header"],
)
def test_a_change_of_source_or_header_is_a_miss(source, tmp_path, change):
    first = compiler(tmp_path).compile(source, {"VALUE": "2.0f"})
    change(source)
    after = compiler(tmp_path).compile(source, {"VALUE": "2.0f"})
    assert not after.cached
    assert after.digest != first.digest


def test_a_header_of_a_header_is_looked_up_beside_it(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "f.cu").write_text('#include "deep/a.cuh"\n#include <deep/c.cuh>\n' + KERNEL)
    (tmp_path / "deep" / "a.cuh").write_text('#include "b.cuh"\n')
    (tmp_path / "deep" / "b.cuh").write_text("#define PART 1.0f\n")
    (tmp_path / "deep" / "c.cuh").write_text("#define VALUE 1.0f\n")
    made = compiler(tmp_path)
    assert set(source_closure(tmp_path / "f.cu")) == {"f.cu", "deep/a.cuh", "deep/b.cuh", "deep/c.cuh"}
    digests = {made.compile(tmp_path / "f.cu", {}).digest}
    for header in ("b", "c"):
        path = tmp_path / "deep" / f"{header}.cuh"
        path.write_text(path.read_text().replace("1.0f", "7.0f"))
        again = compiler(tmp_path).compile(tmp_path / "f.cu", {})
        assert not again.cached
        digests.add(again.digest)
    assert len(digests) == 3


def test_a_header_of_the_family_comes_before_the_shipped_one_of_its_name(tmp_path):
    (tmp_path / "common").mkdir()
    own = tmp_path / "common" / "element.cuh"
    own.write_text("#define VALUE 1.0f\n#define PART 2.0f\n")
    (tmp_path / "f.cu").write_text('#include "common/element.cuh"\n' + KERNEL)
    assert source_closure(tmp_path / "f.cu")["common/element.cuh"] == own.read_bytes()
    assert compiler(tmp_path).compile(tmp_path / "f.cu", {}).digest


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A place where packages with headers are installed; the toolkit is not."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    installed_headers.cache_clear()
    yield tmp_path / "site"
    installed_headers.cache_clear()


@pytest.mark.parametrize("place", ["nvidia/cu{}/include", "nvidia/cu{}/include/cccl", "cutlass_library/source/include"])
def test_headers_of_installed_packages_are_found_and_part_of_the_address(packages, place, tmp_path):
    header = packages / place.format(nvrtc_version()[0]) / "deep" / "part.h"
    header.parent.mkdir(parents=True)
    (header.parent / "value.h").write_text("#define VALUE 1.0f\n")
    header.write_text("#include <deep/value.h>\n#define PART 1.0f\n")
    (tmp_path / "f.cu").write_text("#include <deep/part.h>\n" + KERNEL)
    first = compiler(tmp_path).compile(tmp_path / "f.cu", {})
    (header.parent / "value.h").write_text("#define VALUE 2.0f\n")
    assert compiler(tmp_path).compile(tmp_path / "f.cu", {}).digest != first.digest


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("cute/tensor.hpp", "pip install nvidia-cutlass"),
        ("cuda/barrier", "pip install nvidia-cuda-cccl"),
        ("cuda_fp16.h", "pip install nvidia-cuda-runtime"),
        ("mine.h", "include_dirs"),
    ],
)
def test_a_missing_header_says_where_it_is(packages, header, said, tmp_path):
    (tmp_path / "f.cu").write_text(f"#include <{header}>\n" + KERNEL)
    with pytest.raises(CompileError, match=said):
        compiler(tmp_path).compile(tmp_path / "f.cu", {})


def test_include_dirs_and_options_of_a_family_are_part_of_the_address(tmp_path):
    own = tmp_path / "own" / "part.h"
    own.parent.mkdir()
    own.write_text("#define PART 1.0f\n")
    (tmp_path / "f.cu").write_text("#include <part.h>\n" + KERNEL.replace("+", "/"))
    defines = {"VALUE": "out[1]", f"-I{own.parent}": ""}
    first = compiler(tmp_path).compile(tmp_path / "f.cu", defines)
    own.write_text("#define PART out[2]\n")
    second = compiler(tmp_path).compile(tmp_path / "f.cu", defines)
    fast = compiler(tmp_path).compile(tmp_path / "f.cu", {**defines, "-use_fast_math": ""})
    assert len({first.digest, second.digest, fast.digest}) == 3
    with pytest.raises(CompileError, match="-no_such_option"):
        compiler(tmp_path).compile(tmp_path / "f.cu", {**defines, "-no_such_option": ""})


def test_shipped_families_have_the_addresses_of_before(tmp_path):
    """Recorded rows are known by them: no header of a package and no option is part of them."""
    made = compiler(tmp_path)
    for family in discover().values():
        assert made.closure(family.source, {}) == source_closure(family.source)
        assert not any(stage.options for stage in family.stages.values())
    flags = ["-arch=sm_90a", "-std=c++17", "-default-device", "--ptxas-options=-v"]
    flags += ["-diag-suppress=177", *(["--no-cache"] if nvrtc_version() >= (13, 0) else [])]
    assert made.flags({"B": "2", "A": "1"}) == [*flags, "-DA=1", "-DB=2"]


def test_defines_and_architecture_are_part_of_the_address(source, tmp_path):
    keys = {
        compiler(tmp_path, arch).key(source, {"VALUE": value})
        for arch in ("sm_80", "sm_90a")
        for value in ("1.0f", "2.0f")
    }
    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["truncate", "remove", "garbage"])
def test_a_damaged_entry_is_compiled_again(source, tmp_path, damage):
    first = compiler(tmp_path).compile(source, {"VALUE": "2.0f"})
    whole = first.path.read_bytes()
    if damage == "truncate":
        first.path.write_bytes(whole[:-1])
    elif damage == "remove":
        first.path.unlink()
    else:
        first.path.with_name("meta.json").write_text("{")
    after = compiler(tmp_path).compile(source, {"VALUE": "2.0f"})
    assert not after.cached
    assert after.path.read_bytes() == whole
    assert json.loads(after.path.with_name("meta.json").read_text())["digest"] == first.digest


def _compile_in_process(args):
    source, cache = args
    made = Compiler(ARCHS["sm_90a"], cache, threads=1)
    return [made.compile(source, {"VALUE": f"{n}.0f"}).digest for n in range(4)]


def test_processes_share_one_cache(source, tmp_path):
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        digests = list(pool.map(_compile_in_process, [(source, tmp_path / "cache")] * 4))
    assert all(found == digests[0] for found in digests)
    assert not list((tmp_path / "cache").rglob(".new-*"))


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 3), ("150000 100000", 2), ("50000 100000", 1), ("", 3)])
def test_as_many_are_compiled_at_once_as_this_process_has_cores(tmp_path, monkeypatch, quota, cores):
    """Not as many as the machine has: what is likely to come would hold up what is asked for."""
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(nvrtc, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(nvrtc.os, "sched_getaffinity", lambda _: {1, 5, 8}, raising=False)
    monkeypatch.setattr(nvrtc.sys, "platform", "linux")
    assert Compiler(ARCHS["sm_90a"], tmp_path / "cache").threads == cores


def test_the_same_stage_is_compiled_once(source, tmp_path):
    made = compiler(tmp_path)
    asked = made.submit(source, {"VALUE": "1.0f"})
    assert asked is made.submit(source, {"VALUE": "1.0f"})
    asked.result(20)  # or it is compiled by what the next test has in its place


def test_what_is_asked_for_goes_before_what_may_be(source, tmp_path, monkeypatch):
    begun, go = [], threading.Event()

    def obtain(self, key, source, defines):
        begun.append(defines["VALUE"])
        assert go.wait(20)

    monkeypatch.setattr(Compiler, "_obtain", obtain)
    made = Compiler(ARCHS["sm_90a"], tmp_path / "cache", threads=1)
    first = made.submit(source, {"VALUE": "first"})
    asked = [
        made.submit(source, {"VALUE": value}, turn)
        for value, turn in (("later", LATER), ("of another", LATER), ("likely", SOON), ("asked", NOW), ("later", NOW))
    ]
    go.set()
    for future in (first, *asked):
        future.result(20)
    assert begun == ["first", "asked", "later", "likely", "of another"]
    assert asked[0] is asked[-1]


def test_what_was_asked_for_again_sooner_is_compiled_once_and_in_silence(source, tmp_path, caplog):
    made = Compiler(ARCHS["sm_90a"], tmp_path / "cache", threads=1)
    for number in range(20):
        for turn in (LATER, SOON, NOW):
            made.submit(source, {"VALUE": f"{number}.0f"}, turn)
    made._pool.shutdown()
    assert made.submit(source, {"VALUE": "19.0f"}).result(20)
    assert not caplog.records


def test_a_closed_compiler_refuses_each_time_and_lets_nobody_wait(source, tmp_path):
    made = compiler(tmp_path)
    made.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shutdown"):
            made.submit(source, {"VALUE": "1.0f"})


def test_what_waits_is_cancelled_at_the_end(source, tmp_path, monkeypatch):
    first, go = threading.Event(), threading.Event()

    def obtain(*_):
        first.set()
        return go.wait(20)

    monkeypatch.setattr(Compiler, "_obtain", obtain)
    made = Compiler(ARCHS["sm_90a"], tmp_path / "cache", threads=1)
    begun, waiting = (made.submit(source, {"VALUE": value}) for value in "ab")
    assert first.wait(20)
    made.close()
    go.set()
    assert waiting.cancelled()
    assert begun.result(20)


def test_an_error_carries_the_log_and_leaves_nothing(source, tmp_path):
    with pytest.raises(CompileError, match=r"f\.cu\(2\): error") as failure:
        compiler(tmp_path).compile(source, {})
    assert "VALUE" in failure.value.log
    assert not list((tmp_path / "cache").rglob("stage.cubin"))


def test_an_unwritable_cache_says_so(source, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ToolchainError, match="ATTNSWEEP_CACHE_DIR"):
        compiler(tmp_path).compile(source, {"VALUE": "1.0f"})


def test_an_architecture_nvrtc_does_not_know(tmp_path):
    future = Arch("sm_999a", (99, 9), 1024, 1024, 1024, 1, 1)
    with pytest.raises(ToolchainError, match="cannot compile for sm_999a"):
        Compiler(future, tmp_path)
