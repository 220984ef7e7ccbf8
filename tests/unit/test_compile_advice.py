"""Warnings of parameters without use and of spills, and errors of the compiler."""

from pathlib import Path

import pytest
from samples import NVRTC_LOG, PROBLEM, candidate, full_run

from attnsweep.compile.advice import spilling, unused_parameters
from attnsweep.compile.candidate import LOG_LENGTH, shortened
from attnsweep.compile.cubin import resources
from attnsweep.compile.nvrtc import Cubin
from attnsweep.core.errors import CompileError, compiler_errors
from attnsweep.core.hardware import arch_named
from attnsweep.core.trial import Resources, Status
from attnsweep.family.discover import discover, load_kernel
from attnsweep.family.family import Launch
from attnsweep.family.space import Space
from attnsweep.reports.views import compiled
from attnsweep.specs.load import load_spec

ARCH = arch_named("sm_90a")
DECLARATION = """
from attnsweep.family.family import Family, Launch, Param
kernel = Family("mine", summary="", params=(
    Param("THREADS", (32, 64), ""), Param("UNROLL", (1, 2), ""), Param("NEVER", (1, 2, 3), ""),
    Param("ORDER", ("rows", "columns"), ""), Param("FIXED", (1,), ""),
))
@kernel.stage("fwd")
def fwd(c, p, a):
    return Launch("mine", (1, 1, 1), c.THREADS, ("o",))
"""


def space(tmp_path: Path, template: str) -> Space:
    (tmp_path / "mine.py").write_text(DECLARATION)
    (tmp_path / "mine.cuh").write_text("#if ORDER_ROWS\n#endif\n")
    (tmp_path / "mine.cu").write_text('#include "mine.cuh"\n' + template)
    return Space.build(load_kernel(tmp_path / "mine.py"), PROBLEM, ARCH)


def test_a_swept_parameter_that_nothing_uses_is_warned_of_once(tmp_path) -> None:
    made = space(tmp_path, "// NEVER\n/* NEVER\n NEVER */\nint x = UNROLL, NEVERMORE;\n")
    (warning,) = unused_parameters([made, made], ARCH)
    assert "neither mine.cu nor a launch uses NEVER, so its 3 values are the same" in warning
    # THREADS is a launch's, ORDER a header's, FIXED is not swept.
    both = list(unused_parameters([space(tmp_path, "")], ARCH))
    assert [w.split(" uses ")[1].split(",")[0] for w in both] == ["UNROLL", "NEVER"]


def test_no_shipped_family_is_warned_of() -> None:
    for kernel in discover().values():
        if kernel.refusal(PROBLEM, ARCH) is None:
            assert list(unused_parameters([Space.build(kernel, PROBLEM, ARCH)], ARCH)) == []


@pytest.mark.parametrize(
    ("more", "warned"), [("", True), ("limits: {spill_bytes: 0}\n", False), ("require: {spill_bytes: '<= 8'}\n", False)]
)
def test_spills_that_the_spec_does_not_mention_are_warned_of(tmp_path, more, warned) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"name: s\nproblems: [{{batch: 1, heads: 2, seqlen: 64, head_dim: 64}}]\nkernels: {{naive: {{}}}}\n{more}"
    )
    spec = load_spec(path, discover())
    used = Resources(registers=255, spill_bytes=96, smem_bytes=0, occupancy=0.1)
    spills = candidate("naive", 9.0, N=1).with_(resources=used)
    pruned = spills.with_(status=Status.PRUNED, config={"N": 2})
    trials = [*full_run().trials[:2], spills, pruned]
    said = spilling(trials, spec)
    assert (said is not None) == warned
    if said:
        assert "1 of 4 candidates spill registers, up to 96 bytes a thread; `require: {" in said
    assert spilling(full_run().trials, spec) is None


def test_an_error_of_the_compiler_renders_every_error() -> None:
    error = CompileError('k.cu(5): error: identifier "y" is undefined', log=NVRTC_LOG)
    assert error.render().count("error: identifier") == 2
    assert "      int x = y;\n              ^" in error.render()
    assert "#177" not in error.render()
    other = CompileError("stage fwd has no function f", log="")
    assert other.render() == "stage fwd has no function f"
    (ptxas,) = compiler_errors("ptxas error   : Entry function 'f' uses too much shared data\n")
    assert ptxas.startswith("ptxas error")


def test_compiling_alone_prints_each_error_once() -> None:
    first = 'k.cu(5): error: identifier "y" is undefined'
    row = full_run().trials[0].with_(status=Status.COMPILE_ERROR, detail=f"{first}\n{NVRTC_LOG}")
    text = "\n".join(line.plain for line in compiled([row], arch_named("sm_90a"), False, 100))
    assert text.count("error: identifier") == 2
    assert text.count(first) == 1
    plain = row.with_(detail="stage fwd has no function f")
    lines = compiled([plain], arch_named("sm_90a"), False, 100)
    assert lines[-1].plain.endswith("compile_error: stage fwd has no function f")


def test_a_function_that_is_not_there_is_answered_with_those_that_are(tmp_path) -> None:
    log = "ptxas info    : Compiling entry function '_Z4minePf' for 'sm_80'\n"
    cubin = Cubin(tmp_path / "k.cubin", "", log, 0.0, False)
    launch = Launch("mine", (1, 1, 1), 32, ())
    with pytest.raises(CompileError, match=r"launches 'mine', .*; it defines: _Z4minePf"):
        resources([("fwd", cubin, launch)], arch_named("sm_80"))


def test_a_long_log_is_cut_between_errors() -> None:
    log = "\n".join(f'k.cu({n}): error: identifier "v{n}" is undefined\n  v{n}\n  ^\n' for n in range(200))
    kept = shortened(log)
    assert len(kept) < LOG_LENGTH + 100
    shown = len(compiler_errors(kept))
    assert kept.endswith(f"and {200 - shown} more errors")
    assert kept.count("  ^") == shown
    assert shortened(NVRTC_LOG) == NVRTC_LOG
