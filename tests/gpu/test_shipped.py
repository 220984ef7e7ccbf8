"""The winners that come with attnsweep, on a GPU that they were recorded on."""

import pytest
import recorded

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from on_card import error, served_since  # noqa: E402

import attnsweep  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def served():
    """Counts the calls that kernels served since the test began."""
    yield served_since(lambda: attnsweep.explain_attention(*tensors(), is_causal=True))
    attnsweep.disable()


def tensors(shape=recorded.SHIPPED[-1]):
    torch.manual_seed(0)
    size = (shape.batch, shape.seqlen_q, shape.heads, shape.head_dim)
    made = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return [t.transpose(1, 2) for t in made]


def check(got, given, **options):
    exact = F.scaled_dot_product_attention(*(t.double() for t in given), **options)
    theirs = error(F.scaled_dot_product_attention(*given, **options), exact)
    assert error(got, exact) <= 1.5 * theirs + 1e-5


@pytest.mark.parametrize("shape", recorded.SHIPPED, ids=lambda shape: shape.label)
def test_a_recorded_shape(served, shape):
    given = tensors(shape)
    got = attnsweep.attention(*given, is_causal=shape.causal)
    assert served() == 1
    check(got, given, is_causal=shape.causal)


def test_an_enabled_model_that_is_compiled(served):
    def block(q, k, v):
        return F.scaled_dot_product_attention(q * 1.0, k, v, is_causal=True) * 1.0

    torch._dynamo.reset()
    given = tensors()
    with attnsweep.enable():
        got = torch.compile(block, fullgraph=True)(*given)
    assert served() == 1
    check(got, given, is_causal=True)


def test_an_enabled_model_in_a_graph(served):
    q, k, v = tensors()
    with attnsweep.enable():
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert served() == 2
    given = tensors()
    v.copy_(2 * given[2])
    graph.replay()
    torch.cuda.synchronize()
    check(out, (q, k, v), is_causal=True)


def test_a_prefill_of_transformers(served):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(1, 512, (4, 2048), device="cuda")
    with torch.no_grad():
        exact = transformers.LlamaForCausalLM(config).to("cuda", torch.float64).eval()
        exact.load_state_dict(model.state_dict())
        right = exact(ids).logits
        theirs = error(model(ids).logits, right)
        model.set_attn_implementation(attnsweep.register_attention())
        ours = error(model(ids).logits, right)
    assert served() == 2
    assert ours <= 1.2 * theirs
