"""Calls at random of the whole operator in one process on a GPU, against float64; and what is planted is found.

`python tests/support/net.py --seconds 300 --seed 1` makes more of them.
"""

import pytest

torch = pytest.importorskip("torch")

import net  # noqa: E402
from planted_faults import PLANTED  # noqa: E402

import attnsweep  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def choose():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    q = torch.zeros(4, 16, 1024, 128, device="cuda", dtype=torch.bfloat16)
    explained = attnsweep.explain_attention(q, q, q)
    if explained.code == "gpu":
        pytest.skip(explained.reason)
    with net.guarded_and_not() as choose:
        yield choose


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_calls_at_random_are_right(choose, seed):
    calls = net.Net(net.CARD, "cuda", seed, choose=choose)
    wrong = [str(found) for _, found in calls.run(range(10**6), 30.0) if found is not None]
    assert not wrong, "\n".join(wrong[:5])
    assert calls.by["kernel"] > calls.by.total() / 20


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(choose, name):
    if any(known.split()[0] == name.split()[0] for known in net.OPEN):
        pytest.skip("the operator still has it")
    assert net.finds(PLANTED[name], net.Net(net.CARD, "cuda", 21, choose=choose), 60.0) is not None
