"""`attnsweep verify`: a wrong kernel is found on the CPU, and said as a sanitizer says it."""

import json

import pytest

from attnsweep.core.files import shipped
from attnsweep.tools import simulator
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
    assert done.stderr.startswith("0 findings in 1 case of 1 kernel")
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
    assert done.stderr.startswith("1 finding in 1 case of 1 kernel")
    found = json.loads(attnsweep("verify", mine(before, after), *SHAPE, "--json").stdout)
    assert [each["kernel"] for each in found["findings"]] == ["mine"]


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


def test_what_the_simulator_cannot_build_says_what_it_takes(attnsweep, mine):
    done = attnsweep("verify", mine("using namespace attn;", "#include <cooperative_groups.h>"))
    assert done.returncode == 2
    assert "cooperative_groups.h" in done.stderr
    assert "neither CUDA's headers" in done.stderr


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
