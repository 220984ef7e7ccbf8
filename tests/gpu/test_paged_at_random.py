"""Calls on paged caches at random in one process on a GPU, against float64; and what is planted is found.

`python tests/support/net_paged.py --seconds 300 --seed 1` makes more of them.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import net  # noqa: E402
from net_paged import of_paged  # noqa: E402
from planted_paged_faults import ON_CPU, PLANTED  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def calls():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    with of_paged(SimpleNamespace(device="cuda", seed=11)) as made:
        yield made


def test_calls_at_random_are_right(calls):
    wrong = [str(found) for _, found in calls.run(range(10**6), 30.0) if found is not None]
    assert not wrong, "\n".join(wrong[:5])
    assert calls.by["kernel"] > calls.by.total() / 20


@pytest.mark.parametrize("name", [name for name in PLANTED if name not in ON_CPU])
def test_a_planted_fault_is_found(calls, name):
    assert net.finds(PLANTED[name], calls, 60.0) is not None
