"""`attnsweep init --kernel`: three files that run as they are."""

import pytest

from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import load_kernel
from attnsweep.family.family import Config
from attnsweep.tools.simulator import COMPILER

OWN = """
// a kernel from elsewhere
#include "common/tile/fragments.cuh"
extern "C" __global__ void attention_kernel(const element_t* __restrict__ Q, const element_t* K,
    const element_t* V, element_t* Out, int num_heads, const int seq_len, int tile,
    float softmax_scale) {}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_kernel_is_found_counted_and_right(attnsweep, here):
    done = attnsweep("init", "--kernel", "mine")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (here / "mine").iterdir()) == ["mine.cu", "mine.py", "mine.yaml"]
    assert "naive" not in "".join(path.read_text() for path in (here / "mine").iterdir())
    assert "next: attnsweep verify mine" in done.stdout
    assert attnsweep("run", "mine/mine.yaml", "--dry-run", "--arch", "sm_90a").returncode == 0
    if COMPILER is not None:
        assert attnsweep("verify", "mine", "--problem", "1,2,33,64").returncode == 0


@pytest.mark.parametrize("words", [(), ("--from", "attention.cu")])
def test_a_new_kernel_has_seqlen_before_heads_if_that_is_asked_for(attnsweep, here, words):
    (here / "attention.cu").write_text(OWN)
    done = attnsweep("init", "--kernel", "mine", "--layout", "bshd", *words)
    assert done.returncode == 0, done.stderr
    assert load_kernel(here / "mine" / "mine.py").order == "bshd"
    own = (here / "mine" / "mine.cu").read_text()
    if words:
        assert own == OWN
        return
    assert "q, o: (batch, seqlen_q, heads, HEAD_DIM)" in own
    if COMPILER is not None:
        assert attnsweep("verify", "mine", "--problem", "2,4/2,33x40,64").returncode == 0
    done = attnsweep("list", "mine", "--kernels", "mine")
    assert "tensors (batch, seqlen, heads, head_dim)" in " ".join(done.stdout.split())


def test_a_template_of_ones_own_gets_the_arguments_that_its_names_say(attnsweep, here):
    (here / "attention.cu").write_text(OWN)
    done = attnsweep("init", "--kernel", "mine", "--from", "attention.cu")
    assert done.returncode == 0, done.stderr
    assert (here / "mine" / "mine.cu").read_text() == OWN
    kernel = load_kernel(here / "mine" / "mine.py")
    problem = Problem(1, 4, 4, 256, 256, 64)
    launch = kernel.launches(Config({"THREADS": 128}), problem, ARCHS["sm_90a"])["fwd"]
    assert launch.function == "attention_kernel"
    assert launch.args == ("q", "k", "v", "o", 4, 256, 0, 0.125)
    assert "not known: tile is passed as 0; edit it" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kernel", "a-b"], "C identifier"),
        (["--kernel", "mine", "--from", "absent.cu"], "cannot be read"),
        (["--from", "absent.cu"], "--from needs --kernel"),
        (["other.yaml", "--kernel", "mine"], "no FILE"),
        (["--layout", "bshd"], "--layout needs --kernel"),
        (["--kernel", "mine", "--layout", "sbhd"], "one of bhsd, bshd, not 'sbhd'"),
    ],
)
def test_what_cannot_be_written_is_refused(attnsweep, here, words, said):
    done = attnsweep("init", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert list(here.iterdir()) == []


def test_files_that_are_there_stay_unless_forced(attnsweep, here):
    assert attnsweep("init", "--kernel", "mine").returncode == 0
    (here / "mine" / "mine.cu").write_text("mine")
    done = attnsweep("init", "--kernel", "mine")
    assert done.returncode == 2
    assert "--force replaces it" in done.stderr
    assert (here / "mine" / "mine.cu").read_text() == "mine"
    assert attnsweep("init", "--kernel", "mine", "--force").returncode == 0
    assert (here / "mine" / "mine.cu").read_text() != "mine"
