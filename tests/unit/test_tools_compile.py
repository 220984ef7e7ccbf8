"""Compiling a spec without a GPU: what ends it well, and what does not."""

from pathlib import Path

import pytest
from fake_compiler import REGISTERS, FakeCompiler
from sweeping import use_fake_compiler

from attnsweep.core.errors import CompileError

FAMILIES = Path(__file__).parent.parent / "families"
SPEC = """
arch: sm_90a
problems:
  - {{batch: 1, heads: 2, seqlen: 64, head_dim: 64, kernels: burns}}
  - {{batch: 1, heads: 2, seqlen: 128, head_dim: 64}}
kernels: {{burns: {{}}, twice: {{}}}}
baselines: []
require: {{registers: "{}"}}
"""


@pytest.fixture
def compiled(monkeypatch, tmp_path, attnsweep):
    """Run `compile` of the spec with this requirement; returns exit code, stdout and stderr."""
    use_fake_compiler(monkeypatch)

    def run(require, *options):
        (tmp_path / "ci.yaml").write_text(SPEC.format(require))
        done = attnsweep("compile", tmp_path / "ci.yaml", "--kernels", FAMILIES, *options)
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    return run


def test_what_all_candidates_meet_ends_in_0(compiled):
    code, out, err = compiled(f"<= {REGISTERS}")
    assert code == 0
    assert " ok" in out
    assert f"{REGISTERS}–" not in out  # a range of one value
    assert "no candidate is left" not in err


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_requirement_that_prunes_every_candidate_ends_in_1_and_says_so(compiled, options):
    code, _, err = compiled(f"< {REGISTERS}", *options)
    assert code == 1
    for label in ("(1,2,64,64) fp16 full", "(1,2,128,64) fp16 full"):
        assert f"{label}: no candidate is left" in err


def test_one_problem_without_candidates_is_enough(compiled):
    said = "burns.cu(3): error: no"
    FakeCompiler.errors["burns.cu"] = CompileError(said, log=said)
    code, _, err = compiled(f"<= {REGISTERS}")
    assert code == 1
    assert "(1,2,64,64) fp16 full: no candidate is left" in err
    assert "(1,2,128,64) fp16 full: no candidate" not in err
