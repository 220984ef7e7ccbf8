"""The masks that PyTorch's baselines get, with a PyTorch of the host."""

import numpy as np
import pytest

from attnsweep.baselines import torch_sdpa
from attnsweep.baselines.registry import BACKENDS, backend_of
from attnsweep.core.layouts import Padded
from attnsweep.core.masks import CAUSAL, FULL, Interval, pattern
from attnsweep.core.problem import Problem
from attnsweep.verify.reference import hidden_keys

PROBLEMS = (
    Problem(3, 4, 2, 70, 90, 64, "bf16", CAUSAL, Padded("left", 0)),
    Problem(3, 4, 4, 40, 150, 64, "bf16", FULL, Padded("right", 30, 1)),
    Problem(2, 2, 2, 150, 150, 64, "bf16", Interval(20, 3), Padded("right", 30)),
    Problem(2, 2, 1, 150, 40, 64, "bf16", Interval(None, 0, top_left=True)),
    Problem(1, 2, 1, 150, 200, 64, "bf16", Interval(17, 0)),
    Problem(2, 4, 2, 200, 150, 64, "bf16", pattern("blocks", 30)),
    Problem(2, 4, 2, 40, 150, 64, "bf16", Interval(17, 3), head_dim_v=32),
    Problem(3, 4, 2, 40, 150, 64, "bf16", pattern("padding", 0)),
)
MASKED = ("torch_cudnn", "torch_efficient", "torch_math", "unfused", "flex")


def hidden(problem):
    """(batch, seqlen_q, seqlen_k) by NumPy."""
    rows = np.arange(problem.seqlen_q)
    return np.stack([hidden_keys(problem, rows, item) for item in range(problem.batch)])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_sdpa_gets_the_mask_of_numpy(problem):
    torch = pytest.importorskip("torch")
    made = torch_sdpa.hidden_keys(torch, problem, "cpu").numpy()
    assert made.ndim == (4 if problem.kind in ("padded", "boolean") else 2)
    made = made[:, 0] if made.ndim == 4 else made[None]
    assert (np.broadcast_to(made, hidden(problem).shape) == hidden(problem)).all()


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_that_of_a_mask(problem):
    torch = pytest.importorskip("torch")
    flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")
    p, generator = problem, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(p.shape_of(name), generator=generator) for name in "qkv")
    items = p.batch if p.items_differ else None
    mask = flex_attention.create_block_mask(
        torch_sdpa.mask_of(torch, p, "cpu"), items, None, p.seqlen_q, p.seqlen_k, device="cpu"
    )
    out = flex_attention.flex_attention(q, k, v, block_mask=mask, enable_gqa=p.heads != p.heads_kv)
    seen = ~torch_sdpa.hidden_keys(torch, p, "cpu")
    k, v = (x.repeat_interleave(p.heads // p.heads_kv, dim=1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[-1]], ids=lambda p: p.kind)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_baseline_without_such_masks_says_so(name, problem):
    said = backend_of(name).supports(problem)
    if name in MASKED:
        assert said is None
    else:
        assert said.startswith(name)


def test_flex_is_for_masks():
    assert "is for masks" in backend_of("flex").supports(Problem(1, 1, 1, 8, 8, 64))
    assert "16 or more" in backend_of("flex").supports(Problem(1, 1, 1, 8, 8, 8, mask=CAUSAL))
    assert backend_of("flex").supports(Problem(1, 1, 1, 8, 8, 64, mask=CAUSAL)) is None


@pytest.mark.parametrize(("label", "ways"), [("4/2,90,320", 2), ("4,90,320", 1), ("4/2,90,256", 1)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_keys_of_wide_heads_are_repeated_where_grouped_heads_are_refused(label, ways, mask):
    torch = pytest.importorskip("torch")
    p = Problem.parse(f"(2,{label}) fp32 {mask}")
    made = backend_of("torch_efficient").ways(torch, p, None)
    assert len(made) == ways
    q, k, v = (torch.randn(p.shape_of(name)) for name in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=p.causal, enable_gqa=True)
    if ways == 2:
        with pytest.MonkeyPatch.context() as patch:  # the host has no such backend
            patch.setattr("torch.nn.attention.sdpa_kernel", lambda _: torch.no_grad())
            repeated = backend_of("torch_efficient").ways(torch, p, None)[-1]
        assert torch.allclose(repeated.forward(q, k, v), expected, atol=1e-5)
