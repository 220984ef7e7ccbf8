"""A small model of DeepSeek-V3's kind, with random weights, and its decoding over pages of latent keys.

Needs PyTorch and transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gemmas import float64, logits

import attnsweep

PAGE, LATENT, ROPE, NOPE, VALUE = 64, 512, 64, 128, 128


def deepseek(device: str = "cpu", heads: int = 4, seqlen: int = 256) -> Any:
    """Two layers of MLA, of head_dim 192 and 128 of v, with YaRN's scale. Skips without DeepSeek-V3."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV3Config"):
        pytest.skip("this transformers has no DeepSeek-V3")
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "initializer_range": 0.1}
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 96, "kv_lora_rank": LATENT}
    of_heads |= {"qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": seqlen // 4}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "num_mtp_layers": 0}
    more = {"max_position_embeddings": seqlen, "rope_parameters": yarn, "n_routed_experts": 4, "n_group": 1}
    config = transformers.DeepseekV3Config(**sizes, **of_heads, **layers, **more, topk_group=1, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).to(device, torch.bfloat16).eval()
    assert model.model.layers[0].self_attn.scaling > 192**-0.5
    return model


class LatentDecoder:
    """A model's steps with absorbed weights: a cache row is 512 latent columns and 64 rotated ones.

    form: `mla_decode`, or `qv` for FlashAttention-3's. lengths: the keys that each request has.
    """

    def __init__(self, model: Any, requests: int, seqlen: int, form: str = "mla_decode") -> None:
        self.model, self.form, device = model, form, model.device
        blocks = -(-seqlen // PAGE)
        shape = (requests * blocks, PAGE, 1, LATENT + ROPE)
        made = torch.full(shape, float("nan"), dtype=model.dtype, device=device)
        self.caches = [made.clone() for _ in model.model.layers]
        self.table = torch.randperm(requests * blocks, device=device).int().view(requests, blocks)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, ids: torch.Tensor, requests: Sequence[int]) -> torch.Tensor:
        """The logits of the next tokens of some requests, (requests, tokens)."""
        inner, which = self.model.model, torch.tensor(requests, device=ids.device)
        positions = self.lengths[which, None] + torch.arange(ids.shape[1], device=ids.device)
        self.lengths[which] += ids.shape[1]
        lengths, table = self.lengths[which], self.table[which]
        hidden = inner.embed_tokens(ids)
        turned = inner.rotary_emb(hidden, position_ids=positions)
        plan = attnsweep.mla_plan(lengths, self.model.config.num_attention_heads * ids.shape[1])
        for layer, cache in zip(inner.layers, self.caches, strict=True):
            own = layer.self_attn
            q, qv, rows = self._projected(own, layer.input_layernorm(hidden), turned)
            pages = table.gather(1, positions // PAGE)
            cache[pages, positions % PAGE, 0] = rows
            how = {"softmax_scale": own.scaling, "causal": True}
            if self.form == "qv":
                given = (q, cache[..., LATENT:], cache[..., :LATENT])
                how |= {"qv": qv, "cache_seqlens": lengths, "page_table": table, "scheduler_metadata": plan}
                out = attnsweep.flash_attn_with_kvcache(*given, **how)
            else:
                out = attnsweep.mla_decode(torch.cat((qv, q), -1), cache, table, lengths, **how, plan=plan)
            values = torch.einsum("bnhl,hvl->bnhv", out, self._absorbed(own)[:, NOPE:])
            hidden = hidden + own.o_proj(values.flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(inner.norm(hidden)).double()

    def _absorbed(self, own: Any) -> torch.Tensor:
        """What makes keys and values of latent columns, (heads, NOPE + VALUE, LATENT)."""
        return own.kv_b_proj.weight.view(-1, NOPE + VALUE, LATENT)

    def _projected(self, own: Any, hidden: torch.Tensor, turned: Any) -> tuple[torch.Tensor, ...]:
        """Queries of rotated and of latent columns, and the rows that go into the cache."""
        q = own.q_b_proj(own.q_a_layernorm(own.q_a_proj(hidden))).unflatten(-1, (-1, NOPE + ROPE))
        plain, rotary = q.split((NOPE, ROPE), -1)
        latent, key = own.kv_a_proj_with_mqa(hidden).split((LATENT, ROPE), -1)
        turn = sys.modules[type(own).__module__].apply_rotary_pos_emb_interleave
        rotary, key = turn(rotary.transpose(1, 2), key[:, None], *turned)
        qv = torch.einsum("bnhd,hdl->bnhl", plain, self._absorbed(own)[:, :NOPE])
        return rotary.transpose(1, 2), qv, torch.cat((own.kv_a_layernorm(latent), key[:, 0]), -1)


def near_after_steps(model: Any, form: str) -> None:
    """Check the logits of requests that come at other times, read four tokens a step, then decode.

    They are as near to those of float64 attention over all tokens as those of the model's own code.
    """
    ids = torch.randint(1, 128, (3, 128), generator=torch.manual_seed(1)).to(model.device)
    own, theirs = logits(float64(model), ids), logits(model, ids)
    decoder = LatentDecoder(model, len(ids), ids.shape[1], form)
    outs: list[list[torch.Tensor]] = [[] for _ in ids]
    for tokens, steps, requests in ((4, 15, [0]), (4, 8, [2, 0]), (1, 12, [0, 1, 2]), (2, 1, [1, 2])):
        for _ in range(steps):
            begins = decoder.lengths.tolist()
            given = [ids[request, begins[request] :][:tokens] for request in requests]
            made = decoder.step(torch.stack(given), requests)
            for request, each in zip(requests, made, strict=True):
                outs[request].append(each)
    for request, each in enumerate(outs):
        ours = torch.cat(each)
        exact, plain = own[request, : len(ours)], theirs[request, : len(ours)]
        assert (ours - exact).norm() <= 1.5 * (plain - exact).norm(), (form, request)
