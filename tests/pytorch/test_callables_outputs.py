"""What a callable with a parameter `out` may return."""

import pytest

torch = pytest.importorskip("torch")

from attnsweep.core.problem import Problem  # noqa: E402
from attnsweep.core.user_code import BoundFunction, Unavailable  # noqa: E402

PROBLEM = Problem(batch=1, heads=2, heads_kv=2, seqlen_q=4, seqlen_k=4, head_dim=8)
INPUTS = [torch.zeros(1, 2, 4, 8, dtype=torch.float16)] * 3


@pytest.mark.parametrize(
    "returned",
    [
        pytest.param(lambda out: None, id="nothing"),
        pytest.param(lambda out: out, id="it"),
        pytest.param(lambda out: [], id="an empty list, as TileLang's kernels do"),
        pytest.param(lambda out: [out], id="it in a list"),
    ],
)
def test_it_is_the_output(returned):
    def attention(q, k, v, *, out):
        return returned(out.fill_(1))

    made = BoundFunction(torch, PROBLEM, "mine.py:attention", attention)(*INPUTS)
    assert made.shape == (1, 2, 4, 8)
    assert (made == 1).all()


def test_another_tensor_is_refused():
    def attention(q, k, v, *, out):
        return [torch.empty_like(out)]

    with pytest.raises(Unavailable, match=r"has a parameter out, and returned another one"):
        BoundFunction(torch, PROBLEM, "mine.py:attention", attention)(*INPUTS)
