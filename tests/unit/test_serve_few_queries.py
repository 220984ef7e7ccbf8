"""Calls of few queries on many keys: no kernel that was timed with more queries serves them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from attnsweep import dispatch_summary, judge_dispatch
from attnsweep.serve import evaluate, shipped
from attnsweep.serve.runtime.dispatch import choose
from attnsweep.serve.runtime.table import Problem, known, read_table

H100 = Path(__file__).parent.parent.parent / "results/h100-80gb-hbm3"
JUDGE = H100 / "held_out_decode"
FEW = 64  # a whole tile of queries
TUNED = (
    *("h100", "flash_training", "flash_short", "batched", "flash_dims", "flash_long", "between"),
    *("between_short", "held_out", "held_out_later"),
)
RUNS = [H100 / name for name in TUNED]
# By kernels that were timed with 64 queries it took 51.6 µs, 48.9 by PyTorch's own attention.
SLOWER_BEFORE = Problem(1, 32, 8, 1, 32768, 128, "bf16")


@cache
def gpu_of(which):
    place = Path(shipped.__file__).parent / "runtime"
    gpus = read_table(place).gpus if which == "shipped" else evaluate.tuned(RUNS)
    return known(gpus, evaluate.key_of(JUDGE))


@pytest.fixture(params=["shipped", "exported"])
def gpu(request):
    return gpu_of(request.param)


@pytest.fixture
def shapes():
    return [one.problem for one in evaluate.swept(JUDGE)]


def test_no_kernel_of_more_queries_serves_few(gpu, shapes):
    """Until few queries are tuned for packages, PyTorch's own attention serves all of them."""
    assert len(shapes) == 18
    assert max(shape.seqlen_q for shape in shapes) < FEW
    assert not [w for w in gpu.winners if w.problem.seqlen_q < FEW], "judge their times then"
    for shape in (*shapes, SLOWER_BEFORE):
        choice = choose(gpu, shape)
        assert (choice.kernel, choice.code) == (None, "far"), choice.reason


def test_no_call_of_few_queries_is_slower_than_pytorchs(gpu):
    rows = [evaluate.judge(gpu, one) for one in evaluate.swept(JUDGE)]
    found = dispatch_summary(rows)
    assert found["not_timed"] == 0
    assert found["slower_than_sdpa_by_3_percent"] == 0
    # What the kernels that pack the heads of a group would gain, which no package holds.
    assert found["regret"]["median"] <= 0.31
    assert found["regret"]["p95"] <= 3.86


def test_the_page_says_what_is_lost_on_few_queries():
    found = dispatch_summary(judge_dispatch(RUNS, [JUDGE]))
    page = (H100.parent.parent / "docs/tutorials/your-model.md").read_text()
    told = (
        f"The best of their own sweep would be {1 + found['regret']['median']:.2f} times as fast "
        f"at the median, {1 + found['regret']['p95']:.1f} times at the 95th percentile"
    )
    assert told in " ".join(page.split())


def test_nothing_in_the_shipped_table_comes_from_what_judges_it(gpu, shapes):
    assert not {winner.problem for winner in gpu.winners} & {*shapes}
