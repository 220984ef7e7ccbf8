"""Few queries of grouped heads, which a package's kernels take for queries of one head."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from operators import close, make, tensors  # noqa: E402
from packages import PLAIN, shape, winner, with_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = with_config(PLAIN, WARPGROUPS=1, BLOCKS_PER_SM=2, PACK_GQA=1)
SPLIT_ROWS = with_config(ROWS, SPLITS=2, PDL=2)


def operator_of(directory, driver, *, queries=1, heads=8, heads_kv=2, keys=300, kernel=ROWS):
    of = shape(2, heads, queries, heads_kv=heads_kv, seqlen_k=keys)
    return make(directory, driver, winner(of, kernel))


def call(queries=1, heads=8, heads_kv=2, keys=300, layout="bhsd", slack=0):
    """q, k and v. packed: q is a part of a larger tensor, as of a fused projection.

    slack: keys that k and v have room for besides, as a static cache has.
    """
    q, *_ = tensors(2, heads, queries, heads_kv, layout)
    _, k, v = tensors(2, heads, keys + slack, heads_kv, "bshd" if layout == "bshd" else "bhsd")
    return q, k[:, :, :keys], v[:, :, :keys]


def expected(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def steps(launch, number):
    """Elements of a launch's map from row to row, from head to head and from item to item."""
    return [stride // 2 for stride in launch["values"][number]["strides"]]


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_one_query_of_any_layout(tmp_path, driver, layout, heads_kv):
    made = operator_of(tmp_path, driver, heads_kv=heads_kv)
    q, k, v = call(heads_kv=heads_kv, layout=layout, slack=17)
    out = made.attention(q, k, v, enable_gqa=True)
    assert close(out, expected(q, k, v))
    assert out.shape == q.shape
    assert out.stride() == torch.empty_like(q).stride()
    (launch,) = driver.launches
    group = 8 // heads_kv
    for number, tensor in ((0, q), (3, out)):
        assert launch["values"][number]["dims"] == [64, group, heads_kv, 2]
        of_row, of_head, of_item = steps(launch, number)
        assert (of_row, of_item) == (tensor.stride(1), tensor.stride(0))
        assert of_head == group * of_row or heads_kv == 1
    assert launch["values"][1]["dims"] == [64, 300, heads_kv, 2]
    assert steps(launch, 1)[2] == k.stride(0)
    heads, of_one, _, rows, keys, _, per_item, *strides = launch["values"][6:]
    assert (heads, of_one, rows, keys, per_item) == (2 * heads_kv, 1, group, 300, heads_kv)
    assert strides == [out.stride(0), group * out.stride(1), out.stride(1)]
    assert made.explain(q, k, v, enable_gqa=True).kernel == ROWS.config
    assert made.counters() == {"kernel": 1}


def test_one_query_of_heads_without_groups_is_served_unpacked(tmp_path, driver):
    alone = with_config(ROWS, PACK_GQA=0)
    made = operator_of(tmp_path, driver, heads_kv=8, kernel=alone)
    q, k, v = call(heads_kv=8, layout="bshd")
    assert close(made.attention(q, k, v), expected(q, k, v))
    assert driver.launches[0]["values"][0]["dims"] == [64, 1, 8, 2]
    packing = operator_of(tmp_path, driver)
    assert packing.explain(q, k, v).kernel is None, "a rule wants groups"


def test_contiguous_queries_are_served_and_transposed_ones_are_pytorchs(tmp_path, driver):
    made = operator_of(tmp_path, driver, queries=4)
    q, k, v = call(queries=4)
    assert close(made.attention(q, k, v, enable_gqa=True), expected(q, k, v))
    assert driver.launches[0]["values"][0]["dims"] == [64, 16, 2, 2]
    assert steps(driver.launches[0], 0) == [64, 16 * 64, 32 * 64]
    assert made.counters() == {"kernel": 1}

    for layout in ("bshd", "packed"):
        q, k, v = call(queries=4, layout=layout)
        why = made.explain(q, k, v, enable_gqa=True)
        assert (why.kernel, why.code) == (None, "layout")
        assert why.reason == (
            "the queries of grouped heads are not equally far apart in memory, as they are in query.contiguous()"
        )
        assert why.gain == pytest.approx(1.2)
        assert torch.equal(made.attention(q, k, v, enable_gqa=True), expected(q, k, v))
        assert made.explain(q.contiguous(), k, v, enable_gqa=True).kernel is not None
    assert made.counters() == {"kernel": 1, "layout": 2}
    assert len(driver.launches) == 1


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_log_sum_exp_has_its_usual_order(tmp_path, driver, layout):
    """A number for each query of each head, which PyTorch's backward reads."""
    made = operator_of(tmp_path, driver)
    q, k, v = call(layout=layout)
    forward = getattr(torch.ops, made.namespace).forward_lse.default
    out, lse = forward(q, k, v, False, 0.125)
    assert close(out, expected(q, k, v))
    scores = q.float() @ k.float().repeat_interleave(4, 1).mT * 0.125
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-3)
    assert made.counters() == {"kernel": 1}


def test_splits_are_joined_as_rows_of_one_head(tmp_path, driver):
    driver.on_launch = None
    made = operator_of(tmp_path, driver, kernel=SPLIT_ROWS)
    q, k, v = call(layout="bshd")
    out = made.attention(q, k, v, enable_gqa=True)
    first, second = driver.launches
    assert second["values"][:2] == [first["values"][5], first["values"][4]]
    assert second["values"][4:7] == [16, 4, 2], "rows in all, of a head, and heads of an item"
    assert second["values"][7:] == [out.stride(0), 4 * out.stride(1), out.stride(1)]


def test_compiled_as_one_graph(tmp_path, driver):
    made = operator_of(tmp_path, driver)
    compiled = torch.compile(
        lambda q, k, v: made.attention(q * 1.0, k, v, enable_gqa=True) + 1, fullgraph=True, backend="aot_eager"
    )
    q, k, v = call(layout="packed")
    assert close(compiled(q, k, v), expected(q, k, v) + 1)
    assert made.counters() == {"kernel": 1}


def test_a_call_that_is_met_again_makes_no_plan(tmp_path, driver):
    made = operator_of(tmp_path, driver)
    for _ in range(2):
        given = call(layout="bshd")
        assert close(made.attention(*given, enable_gqa=True), expected(*given))
    assert made.counters() == {"kernel": 2}
    assert len(driver.modules) == 1
