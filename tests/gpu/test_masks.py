"""Boolean masks by the kernels that come with attnsweep: right, and never a stale one."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from on_card import near, served_since  # noqa: E402
from operators import exact  # noqa: E402

import attnsweep  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BATCH, HEADS, ROWS = 4, 16, 1024


@pytest.fixture
def served():
    """Counts the calls that kernels served since the test began."""
    yield served_since(lambda: attnsweep.explain_attention(*tensors(), random_mask(BATCH, 1, ROWS, ROWS)))
    attnsweep.disable()


def tensors(batch=BATCH, heads=HEADS, rows=ROWS, keys=None, heads_kv=None, head_dim=128, seed=0):
    torch.manual_seed(seed)
    sizes = [(batch, heads, rows), *[(batch, heads_kv or heads, keys or rows)] * 2]
    made = (torch.randn(*size, head_dim, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return tuple(made)


def check(got, given, mask):
    assert near(got, exact(*given, mask))


def random_mask(*sizes):
    return torch.rand(*sizes, device="cuda") < 0.5


KINDS = {
    "all": lambda i, j, n: i >= 0,
    "causal": lambda i, j, n: i >= j,
    "padded right": lambda i, j, n: j < n,
    "causal, padded right": lambda i, j, n: (i >= j) & (j < n),
    "causal, padded left": lambda i, j, n: (i >= j) & (j >= n // 2),
    "window": lambda i, j, n: (i >= j) & (i - j < 200),
    "both sides": lambda i, j, n: (i - j).abs() < 100,
    "documents": lambda i, j, n: i * 5 // (n + 1) == j * 5 // (n + 1),
    "none": lambda i, j, n: i < 0,
    "half": lambda i, j, n: torch.rand_like((i + j + n).float()) < 0.5,
    "a key in a hundred": lambda i, j, n: torch.rand_like((i + j + n).float()) < 0.01,
    "causal with holes": lambda i, j, n: (i >= j) & (j % 7 != 3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_of_every_kind(served, kind, head_dim):
    cases = ((4, 16, 1024, 1024, 16), (2, 32, 777, 1040, 8), (3, 8, 1500, 1501, 8))
    for batch, heads, rows, keys, heads_kv in cases:
        given = tensors(batch, heads, rows, keys, heads_kv, head_dim)
        i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")
        lengths = torch.linspace(0.4 * keys, keys, batch, device="cuda").int()[:, None, None, None]
        shape = (batch, 1, rows, keys)
        mask = KINDS[kind](i, j, lengths).expand(shape).contiguous()
        before = served()
        got = attnsweep.attention(*given, mask, enable_gqa=heads != heads_kv)
        assert served() == before + 1, attnsweep.explain_attention(*given, mask, enable_gqa=heads != heads_kv)
        check(got, given, mask)


def test_forms_and_strides(served):
    given = tensors()
    whole = random_mask(BATCH, HEADS, ROWS, ROWS)
    masks = (
        whole,
        whole[:1],
        whole[:, :1],
        whole[0, 0],
        whole[0],
        whole[:, :1, :1],
        whole[:, :1, :, :1],
        whole.mT,
        random_mask(BATCH, 1, ROWS, 2 * ROWS)[..., 5 : 5 + ROWS],
        random_mask(BATCH, 1, ROWS, 2 * ROWS)[..., ::2],
        whole[:1, :1].expand(BATCH, HEADS, ROWS, ROWS),
    )
    for number, mask in enumerate(masks):
        check(attnsweep.attention(*given, mask), given, mask)
        assert served() == number + 1


def test_a_mask_that_changes_is_scanned_again(served):
    given = tensors()
    mask = random_mask(BATCH, 1, ROWS, ROWS)
    changes = (
        lambda: None,
        mask.logical_not_,
        mask[1].zero_,
        lambda: mask.copy_(random_mask(BATCH, 1, ROWS, ROWS)),
        lambda: setattr(mask, "data", random_mask(BATCH, 1, ROWS, ROWS)),
    )
    for change in changes:
        change()
        check(attnsweep.attention(*given, mask), given, mask)


def test_masks_that_come_and_go_at_one_address(served):
    given, addresses = tensors(), set()
    for _ in range(20):
        mask = random_mask(BATCH, 1, ROWS, ROWS)
        addresses.add(mask.data_ptr())
        check(attnsweep.attention(*given, mask), given, mask)
        del mask
    assert len(addresses) < 20, "the allocator gives the same memory again"


def test_two_masks_in_turn_on_two_streams(served):
    given = tensors()
    masks = [random_mask(BATCH, 1, ROWS, ROWS) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn // 2 % 2]):
            outs.append(attnsweep.attention(*given, masks[turn % 2]))
    torch.cuda.synchronize()
    for turn, out in enumerate(outs):
        check(out, given, masks[turn % 2])


def test_a_graph_scans_the_mask_that_it_is_replayed_with(served):
    given, mask = tensors(), random_mask(BATCH, 1, ROWS, ROWS)
    attnsweep.attention(*given, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attnsweep.attention(*given, mask) for _ in range(2)]
    for _ in range(3):
        mask.copy_(random_mask(BATCH, 1, ROWS, ROWS))
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            check(out, given, mask)
    check(attnsweep.attention(*given, mask), given, mask)


def test_under_inference_mode(served):
    given = tensors()
    with torch.inference_mode():
        mask = random_mask(BATCH, 1, ROWS, ROWS)
        for _ in range(3):
            check(attnsweep.attention(*given, mask), given, mask)
            mask.logical_not_()


def test_compiled_code_is_one_graph(served):
    def block(q, k, v, lengths):
        mask = torch.arange(ROWS, device="cuda") < lengths[:, None, None, None]
        mask = mask & torch.ones(ROWS, ROWS, device="cuda", dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q * 1.0, k, v, mask) * 1.0

    torch._dynamo.reset()
    given = tensors()
    with attnsweep.enable():
        compiled = torch.compile(block, fullgraph=True)
        for least in (100, 900):
            lengths = torch.tensor([least, 1024, 500, 700], device="cuda")
            got = compiled(*given, lengths)
            mask = torch.arange(ROWS, device="cuda") < lengths[:, None, None, None]
            check(got, given, mask & torch.ones(ROWS, ROWS, device="cuda").tril().bool())
    assert served() == 2


def test_a_padded_batch_of_a_model(served):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=512,
        head_dim=128,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).cuda().bfloat16().eval()
    ids = torch.randint(0, 512, (BATCH, ROWS), device="cuda")
    keep = torch.arange(ROWS, device="cuda") < torch.tensor([[400], [1024], [800], [600]]).cuda()
    with torch.no_grad():
        theirs = model(ids, attention_mask=keep.long()).logits[keep]
        model.set_attn_implementation(attnsweep.register_attention())
        ours = model(ids, attention_mask=keep.long()).logits[keep]
    assert served() == 3
    assert (ours - theirs).float().norm() <= 0.02 * theirs.float().norm()
