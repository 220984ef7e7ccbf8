"""Calls on paged caches at random, by kernels in PyTorch; and that they find what is planted."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import net  # noqa: E402
import net_paged  # noqa: E402
from net_paged import STAND_IN, draw, of_paged  # noqa: E402
from planted_paged_faults import PLANTED  # noqa: E402
from test_net import seed_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CALLS = 150


@pytest.fixture
def calls(request, drawn_by):
    with of_paged(SimpleNamespace(device="cpu", seed=seed_of(drawn_by, request.node.name))) as made:
        yield made


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("number", range(40))
def test_calls_at_random_are_right(calls, number):
    wrong = [str(found) for _, found in calls.run(range(CALLS)) if found is not None]
    assert not wrong, "\n".join(wrong[:5])
    assert calls.by["kernel"] > CALLS / 20


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(calls, name):
    found = net.finds(PLANTED[name], calls, 60.0)
    assert found is not None
    assert f"net_paged.py --seed {found.seed} --only {found.number}" in str(found)


def test_a_call_is_drawn_again_by_its_seed_and_by_its_text():
    calls = [draw(STAND_IN, 7, number) for number in range(300)]
    for number, drawn in enumerate(calls):
        assert drawn == draw(STAND_IN, 7, number)
        assert eval(str(drawn), vars(net_paged)) == drawn
    assert {drawn.refused for drawn in calls} == {"", *net_paged.REFUSED}
    assert {drawn.cache.order for drawn in calls} == {*net_paged.ORDERS}
    assert {drawn.metadata for drawn in calls} == {"", "step", "another"}
