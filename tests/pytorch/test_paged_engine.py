"""A serving engine whose attention is the class of the guide: its tokens are those of a dense loop."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine import class_of_guide, served  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("guesses", "graphed"), [(0, 0), (4, 0), (0, 90), (4, 90)])
def test_tokens_are_those_of_a_dense_loop(guesses, graphed):
    engine, compared = served("cpu", torch.float16, guesses=guesses, graphed=graphed)
    assert compared > 20
    assert "mixed" in engine.kinds
    assert (engine.replays > 0) == (graphed > 0)


def test_a_cascade_is_the_whole():
    from types import SimpleNamespace

    random_ = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=random_).bfloat16()  # noqa: E731
    cache, query = draw(2, 12, 16, 2, 64), draw(6, 4, 64)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    table = torch.tensor([[3, 5, 7, 0], [3, 5, 1, 2]], dtype=torch.int32)
    metadata = SimpleNamespace(
        num_actual_tokens=6, max_query_len=4, query_start_loc=ints(0, 2, 6), max_seq_len=60, seq_lens=ints(40, 60)
    )
    metadata.block_table, metadata.common_prefix_len = table, 32
    attention, outs = class_of_guide()(4, 64, 0.125, 2), []
    for attend in (attention.attend, attention.cascade):
        outs.append(torch.empty_like(query))
        attend(query, *cache, metadata, outs[-1])
    torch.testing.assert_close(*outs, rtol=0, atol=2.0**-7 * float(outs[0].abs().max()))
