"""Few queries of grouped heads, which a package's kernels take for queries of one head."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from attending import seen  # noqa: E402
from operators import close, exact, make, tensors  # noqa: E402
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


@pytest.mark.parametrize("gain", [1.2, 4.0])
def test_several_queries_are_copied_where_the_kernel_gains_more(tmp_path, driver, gain):
    """Rows of a group's queries are equally far apart in contiguous ones alone."""
    of = shape(2, 8, 4, heads_kv=2, seqlen_k=300)
    made = make(tmp_path, driver, winner(of, ROWS, gain=gain))  # 10 us of the kernel's
    q, k, v = call(queries=4)
    assert close(made.attention(q, k, v, enable_gqa=True), expected(q, k, v))
    assert driver.launches[0]["values"][0]["dims"] == [64, 16, 2, 2]
    assert steps(driver.launches[0], 0) == [64, 16 * 64, 32 * 64]

    served = gain == 4.0
    for number, layout in enumerate(("bshd", "packed"), 1):
        q, k, v = call(queries=4, layout=layout)
        why = made.explain(q, k, v, enable_gqa=True)
        assert (why.code, why.gain) == ("tuned" if served else "layout", pytest.approx(gain))
        out = made.attention(q, k, v, enable_gqa=True)
        assert close(out, expected(q, k, v))
        assert out.stride() == torch.empty_like(q).stride()
        assert made.counters() == ({"kernel": 1 + number} if served else {"kernel": 1, "layout": number})
        assert steps(driver.launches[-1], 0) == [64, 16 * 64, 32 * 64]
    assert len(driver.launches) == (3 if served else 1)


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


# ---- keys of an item: by lengths, or by the mask of the one query ----
OF_ITEMS = with_config(ROWS, ITEM_KEYS=1)
LENGTHS = {
    "filled in part": [7, 300],
    "none and one": [0, 1],
    "below zero and beyond the tensor": [-3, 4000],
    "beyond any tensor": [2**40, -(2**40)],
    "left": [[130, 300], [299, 300]],
    "on both sides": [[1, 2], [150, 170]],
    "reversed and from below zero": [[200, 100], [-7, 9]],
    "from beyond the tensor": [[300, 400], [299, 4000]],
}


def served_by_items(directory, driver, kernel=OF_ITEMS, queries=1, **of):
    """An operator of one kernel that looks keys up by items, for queries of 2 items."""
    return make(directory, driver, winner(shape(2, 8, queries, heads_kv=2, seqlen_k=300, **of), kernel))


def item_masks(*sizes, seed=0):
    """Half of all keys, drawn; in the last item none before the 140th."""
    mask = torch.rand(*sizes, generator=torch.manual_seed(seed)) < 0.5
    mask[-1, ..., :140] = False
    return mask


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed", "several queries"])
@pytest.mark.parametrize("what", LENGTHS)
def test_queries_see_the_lengths_of_their_item(tmp_path, driver, kernel, layout, what):
    queries, layout = (4, "bhsd") if layout == "several queries" else (1, layout)
    made = served_by_items(tmp_path, driver, queries=queries, padded=True)
    q, k, v = call(queries=queries, layout=layout, slack=17)
    lengths = torch.tensor(LENGTHS[what])
    lengths = lengths.int() if layout == "bshd" and what != "beyond any tensor" else lengths
    out = made.attention(q, k, v, key_lengths=lengths, enable_gqa=True)
    assert close(out, exact(q, k, v, seen(q, k, key_lengths=lengths)))
    assert out.stride() == torch.empty_like(q).stride()
    assert made.counters() == {"kernel": 1}
    scan, fwd = driver.launches
    assert (scan["config"].gridDimX, fwd["values"][14]) == (2, 2), "items, and heads of one"


MASKS = {
    "of items": lambda m: m,
    "one of all": lambda m: m[1:],
    "expanded": lambda m: m[1:].expand(2, 1, 1, 300),
    "of two dimensions": lambda m: m[1, 0],
    "all keys or none": lambda m: torch.tensor([True, False]).view(2, 1, 1, 1),
    "every second key": lambda m: m.repeat_interleave(2, 3)[..., ::2],
    "a slice of a longer one": lambda m: torch.cat([m, m, m], 3)[..., 299:599],
    "transposed": lambda m: m.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "no key": lambda m: m & False,
    "the last key": lambda m: torch.arange(300).expand_as(m) == 299,
    "all but one": lambda m: torch.arange(300).expand_as(m) != 128,
    "bytes that are not 1": lambda m: (m * torch.tensor(254, dtype=torch.uint8)).view(torch.bool),
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("what", MASKS)
def test_one_query_sees_the_mask_of_its_item(tmp_path, driver, kernel, layout, what):
    made = served_by_items(tmp_path, driver, boolean=("item",))
    q, k, v = call(layout=layout)
    mask = MASKS[what](item_masks(2, 1, 1, 300))
    assert close(made.attention(q, k, v, mask, enable_gqa=True), exact(q, k, v, mask.view(torch.uint8) != 0))
    assert made.counters() == {"kernel": 1}


@pytest.mark.parametrize("how", [{"window": (100, 0)}, {"causal_offset": 120}], ids=str)
def test_one_query_of_several_items_sees_the_mask_that_a_window_stands_for(tmp_path, driver, kernel, how):
    """One for all items: what lies behind it in memory is not the next one's."""
    made = served_by_items(tmp_path, driver, boolean=())
    q, k, v = call()
    out = made.attention(q, k, v, enable_gqa=True, **how)
    assert close(out, exact(q, k, v, seen(q, k, **how)))
    assert made.counters() == {"kernel": 1}
    assert driver.launches[0]["values"][5] == 0, "bytes from item to item"


@pytest.mark.parametrize("splits", [{"SPLITS": 2, "PDL": 2}, {"SPLITS": 2, "SPLIT_CLUSTER": 1}], ids=str)
def test_the_scan_goes_ahead_of_splits(tmp_path, driver, kernel, splits):
    driver.on_launch = None
    made = served_by_items(tmp_path, driver, with_config(OF_ITEMS, **splits), padded=True)
    q, k, v = call(layout="bshd")
    made.attention(q, k, v, key_lengths=torch.tensor([5, 9]), enable_gqa=True)
    names = [launch["function"][1].removeprefix("flash_fwd_wgmma") for launch in driver.launches]
    assert names == ["_mask", "", *(["_combine"] if "PDL" in splits else [])]
    scan, fwd, *_ = driver.launches
    assert fwd["values"][12] == scan["values"][2], "where the keys of items are"


GIVEN = {
    "lengths": ({"padded": True}, lambda n: {"key_lengths": torch.tensor([n, 300])}, "key_lengths"),
    "mask": ({"boolean": ("item",)}, lambda n: {"attn_mask": item_masks(2, 1, 1, 300, seed=n)}, "attn_mask"),
}


@pytest.mark.parametrize("what", GIVEN)
def test_what_items_see_is_looked_up_once_until_it_changes(tmp_path, driver, kernel, what):
    """As the layers of a model have it, and each step of a generation."""
    of, drawn, name = GIVEN[what]
    made = served_by_items(tmp_path, driver, **of)
    q, k, v = call(layout="bshd")

    def right(given):
        told = given[name]
        hidden = seen(q, k, key_lengths=told) if what == "lengths" else told
        return close(made.attention(q, k, v, enable_gqa=True, **given), exact(q, k, v, hidden))

    given = drawn(8)
    assert all(right(given) for _ in range(3))
    assert kernel.scans == 1
    given[name].copy_(drawn(9)[name])
    assert right(given)
    assert kernel.scans == 2
    assert right(drawn(10))
    assert right(given)
    assert kernel.scans == 3
    assert len(driver.modules) == 2, "a scan's and a kernel's"
    assert made.counters() == {"kernel": 6}


NOT_OF_ITEMS = {
    "several queries": (2, {"boolean": ("item",)}, lambda: {"attn_mask": item_masks(2, 1, 2, 300)}),
    "a mask of each head": (1, {"boolean": ("item",)}, lambda: {"attn_mask": item_masks(2, 8, 1, 300)}),
    "lengths beside a diagonal": (
        4,
        {"padded": True},
        lambda: {"key_lengths": torch.tensor([9, 300]), "causal_offset": 200},
    ),
}


@pytest.mark.parametrize("what", NOT_OF_ITEMS)
def test_queries_that_see_other_keys_than_their_item_are_not_served(tmp_path, driver, kernel, what):
    queries, of, drawn = NOT_OF_ITEMS[what]
    made = served_by_items(tmp_path, driver, **of)
    q, k, v = call(queries=queries)
    given = drawn()
    assert made.explain(q, k, v, enable_gqa=True, **given).kernel is None
    out = made.attention(q, k, v, enable_gqa=True, **given)
    mask = given.pop("attn_mask", None)
    assert close(out, exact(q, k, v, seen(q, k, **given) if mask is None else mask))
    assert driver.launches == []


@pytest.mark.parametrize("what", GIVEN)
def test_gradients_of_what_an_item_sees_are_pytorchs(tmp_path, driver, kernel, what):
    """Gradients are PyTorch's: nothing of a kernel that has no backward is kept for them."""
    of, drawn, name = GIVEN[what]
    made = served_by_items(tmp_path, driver, **of)
    q, k, v = call()
    q.requires_grad_()
    given = drawn(8)
    out = made.attention(q, k, v, enable_gqa=True, **given)
    hidden = seen(q, k, key_lengths=given[name]) if what == "lengths" else given[name]
    assert close(out, exact(q, k, v, hidden))
    assert out.requires_grad
    assert driver.launches == []


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize(("batch", "keys"), [(1, 1), (2, 127), (3, 100_000), (1000, 5)])
@pytest.mark.parametrize("what", ["padded", "boolean"])
def test_any_size_of_what_items_see(tmp_path, driver, kernel, what, batch, keys):
    of = {"padded": True} if what == "padded" else {"boolean": ("item",) if batch > 1 else ()}
    kernel_of = with_config(OF_ITEMS, PACK_GQA=0)
    made = make(tmp_path, driver, winner(shape(batch, 1, 1, seqlen_k=keys, **of), kernel_of))
    q, *_ = tensors(batch, 1, 1)
    _, k, v = tensors(batch, 1, keys)
    lengths = torch.arange(batch) % (keys + 1)
    told = seen(q, k, key_lengths=lengths)
    given = {"key_lengths": lengths} if what == "padded" else {"attn_mask": told}
    assert close(made.attention(q, k, v, **given), exact(q, k, v, told))
    assert made.counters() == {"kernel": 1}
