"""`attnsweep verify`: a wrong kernel is found on the CPU, and said as a sanitizer says it."""

import json
import re

import pytest

from attnsweep.core.cases import Case
from attnsweep.core.files import shipped
from attnsweep.family.discover import discover
from attnsweep.tools import coverage, simulator
from attnsweep.tools.simulator import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
SHAPE = ("--problem", "1,2/1,33x40,64")


@pytest.fixture
def mine(tmp_path):
    """A copy of `naive` with a change of its template."""

    def made(before="", after=""):
        for name in ("naive.cu", "naive.py"):
            text = (shipped("kernels") / name).read_text()
            assert name.endswith(".py") or before in text
            changed = text.replace(before, after, 1) if before and name.endswith(".cu") else text
            (tmp_path / name.replace("naive", "mine")).write_text(changed.replace("naive", "mine"))
        return tmp_path

    return made


@pytest.mark.nightly(push=0)
def test_a_right_kernel_has_no_finding(attnsweep, mine):
    done = attnsweep("verify", "naive", *SHAPE)
    assert (done.returncode, done.stdout) == (0, "")
    *_, left, last = done.stderr.splitlines()
    assert last.startswith("0 findings in 1 case of 1 kernel")
    assert left == "naive: not run: 1 other config (--all) · bf16 · causal · head_dim 128, 256"
    for place in (mine(), mine() / "mine.py"):
        assert attnsweep("verify", place, *SHAPE, "THREADS=64").returncode == 0


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("if (row >= seqlen_q) return;", "", ["of buffer q", "block (1,1,0)", "lane 1"]),
        ("visible_keys(row, seqlen_q, seqlen_k).end", "seqlen_k - 1", ["wrong", "error of o"]),
    ],
)
def test_a_wrong_kernel_is_a_paragraph_and_exit_code_1(attnsweep, mine, before, after, said):
    done = attnsweep("verify", mine(before, after), *SHAPE)
    assert done.returncode == 1, done.stdout
    paragraph, rest = done.stdout.split("\n\n")
    assert not rest.strip()
    assert paragraph.startswith("mine THREADS=32: (1,2/1,33x40,64) fp16 full, normal:")
    assert all(word in paragraph for word in said), paragraph
    assert "1 finding in 1 case of 1 kernel" in done.stderr
    found = json.loads(attnsweep("verify", mine(before, after), *SHAPE, "--json").stdout)
    assert [each["kernel"] for each in found["findings"]] == ["mine"]


KEYS = "visible_keys(row, seqlen_q, seqlen_k).end"


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("before", "after", "form"),
    [
        (KEYS, "CAUSAL && row + 1 < seqlen_k ? row + 1 : seqlen_k", "causal"),  # aligned top-left
        (KEYS, f"{KEYS} - (CAUSAL && {KEYS} > 1)", "causal"),  # the diagonal is hidden
        ("(scale * LOG2E)", "(scale * LOG2E * (IS_BF16 ? 2.f : 1.f))", "bf16"),
    ],
    ids=["top-left", "off by one", "bf16"],
)
def test_what_the_declaration_promises_runs_by_default(attnsweep, mine, before, after, form):
    """fp16 and full alone ran, so that a wrong mask and a wrong branch for bf16 had no finding."""
    done = attnsweep("verify", mine(before, after), "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["findings"]
    assert all(f" {form}" in each["case"] for each in said["findings"])
    ran, left = said["coverage"][0]["ran"], said["coverage"][0]["not_run"]
    assert (ran["dtypes"], ran["masks"]) == (["fp16", "bf16"], ["full", "causal"])
    assert ran["configs"] == ["THREADS=32"]
    assert left == {"other_configs": 3, "head_dims": [128, 256]}
    assert said["cases"] == 44


def test_findings_of_one_kind_are_one_paragraph(attnsweep, mine):
    done = attnsweep("verify", mine("(scale * LOG2E)", "(scale * LOG2E * 2.f)"), "--dtype", "bf16")
    first, like = done.stdout.strip().split("\n\n")
    assert " bf16 full, " in first
    assert re.match(r"\d+ of 22 cases: wrong: error of o ", like)
    assert " bf16 causal, " in like


def test_all_runs_every_config_that_the_rules_keep(attnsweep):
    said = json.loads(attnsweep("verify", "naive", *SHAPE, "--all", "--json").stdout)
    assert said["coverage"][0]["ran"]["configs"] == ["THREADS=32", "THREADS=64"]  # of 33 rows
    assert (said["cases"], said["coverage"][0]["not_run"]["other_configs"]) == (2, 0)


@pytest.mark.parametrize("name", discover())
def test_there_is_a_case_of_all_that_a_shipped_family_declares(name):
    family = discover()[name]
    dim = 64 if 64 in family.head_dims else family.some_head_dims[0]
    forms = [*coverage.forms(family, family.dtypes, family.masks, dim)]
    assert all(coverage.cases_of(family, each) for each in forms)
    left = coverage.left_out(family, coverage.facts(map(Case, forms)))
    assert left.keys() <= {"head_dims", "head_dims_v"}
    empty = {each.dtype for each in forms if each.has_empty_rows and each.layout.kind == "dense"}
    assert empty == ({*family.dtypes} if family.empty_rows and "dense" in family.layouts else set())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent"], "no such kernel"),
        (["naive", "TILE=3"], "naive has no parameter TILE"),
        (["naive", "THREADS=x"], "THREADS"),
        (["naive", "--problem", "1,2,3"], "--problem"),
        (["naive", "--inputs", "odd"], "--inputs is one of normal"),
        (["naive", "--dtype", "fp99"], "fp99"),
    ],
)
def test_what_cannot_be_verified_is_exit_code_2(attnsweep, words, said):
    done = attnsweep("verify", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_headers_of_the_standard_library_are_found(attnsweep, mine):
    names = ("stdint.h", "cstdint", "type_traits", "limits", "math.h", "cmath", "assert.h", "cassert", "float.h")
    includes = "".join(f"#include <{name}>\n" for name in names)
    text = f"{includes}using namespace attn;\nstatic_assert(std::is_same_v<uint32_t, unsigned>);"
    done = attnsweep("verify", mine("using namespace attn;", text), *SHAPE)
    assert done.returncode == 0, done.stderr


def test_what_the_simulator_cannot_build_says_what_it_takes(attnsweep, mine):
    done = attnsweep("verify", mine("using namespace attn;", "#include <cooperative_groups.h>"))
    assert done.returncode == 2
    assert "cooperative_groups.h" in done.stderr
    assert "cuda_fp16.h, cuda_bf16.h and mma.h; no asm" in done.stderr


def test_without_gxx_it_says_how_to_get_it(attnsweep, constants):
    constants(simulator, COMPILER=None)
    done = attnsweep("verify", "naive")
    assert done.returncode == 2
    assert "apt install g++" in done.stderr


def test_an_installed_wheel_has_the_simulator():
    import tomllib

    root = shipped("kernels").parent
    if (root / "pyproject.toml").is_file():
        project = tomllib.loads((root / "pyproject.toml").read_text())
        included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
        assert included["tests/simt/cuda"] == "attnsweep/simt"
