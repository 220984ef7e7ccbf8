"""Time models whose batches are padded or whose layers have windows, with attnsweep and without.

Needs a GPU that attnsweep has winners for. Random weights, bf16, a batch that is padded on the
right to 40 to 100 % of its length, T5's apart; milliseconds a forward, by transformers' sdpa and by
`register_attention()`, in turns, eager or both by torch.compile; `served`: calls by a kernel of
all; `sdpa_off` and `off`: the norm of the difference of the logits from those by attention in
float64, of tokens that are no padding, over their norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from random_models import float64_attention
from setting import described, options, package_at, write_rows
from timing import Way, counted, gains, turns

import attnsweep

ROUNDS = 7


def exact(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **given: Any) -> tuple[Any, None]:
    """Attention in float64, as transformers calls it. mask: to be added."""
    bias = given.get("position_bias")
    if bias is not None:
        mask = bias if mask is None else mask + bias
    causal = mask is None and getattr(module, "is_causal", False) and q.shape[2] > 1
    scores = {"softcap": given.get("softcap"), "sinks": given.get("s_aux")}
    out = float64_attention(q, k, v, mask, is_causal=causal, scale=scaling, **scores)
    return out.transpose(1, 2).contiguous(), None


def inputs(config: Any, batch: int, seqlen: int) -> tuple[dict[str, Any], Any]:
    """What a model is called with, and which tokens of its output count."""
    ids = torch.randint(0, config.vocab_size, (batch, seqlen), device="cuda")
    length = torch.linspace(0.4 * seqlen, seqlen, batch, device="cuda").int()
    keep = torch.arange(seqlen, device="cuda") < length[:, None]
    if config.model_type == "t5":  # whole sequences, whose bias is one tensor for all layers
        return {"input_ids": ids}, keep | True
    if not config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": keep.long()}, keep
    sound = torch.randn(batch, config.num_mel_bins, 3000, device="cuda").bfloat16()
    facts = {"input_features": sound, "decoder_input_ids": ids}
    return facts | {"decoder_attention_mask": keep.long()}, keep


def timed(name: str, config: Any, kind: Any, batch: int, seqlen: int, theirs: str, compiled: bool) -> dict[str, Any]:
    """A row: both ways in turns, and how far each is from attention in float64."""
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind(config).cuda().bfloat16().eval()
    given, keep = inputs(config, batch, seqlen)
    ours, calls = attnsweep.register_attention(), dict[str, Callable[..., Any]]()
    for way in (theirs, ours, "float64"):
        each = copy.deepcopy(model)
        each.set_attn_implementation(way)
        calls[way] = torch.compile(each) if compiled and way != "float64" else each
    with torch.no_grad():
        right = calls.pop("float64")(**given)[0][keep].double()
        ways = {way: Way(partial(call, **given)) for way, call in calls.items()}
        found = gains(turns(ways, ROUNDS))
        off = {}
        for way, call in calls.items():
            logits = call(**given)[0][keep].double()
            off[way] = float((logits - right).norm() / right.norm())
        served = counted(package_at(None), ways[ours].call).get("kernel", 0)
    if config.is_encoder_decoder and config.model_type != "t5":
        layers = config.encoder_layers + 2 * config.decoder_layers
    else:
        layers = config.num_hidden_layers
    return {
        "model": f"{name}, {batch} x {seqlen}",
        "compiled": compiled,
        "sdpa_ms": round(found["before_ms"], 2),
        "ours_ms": round(found["after_ms"], 2),
        "ratio": round(found["gain"], 3),
        "served": f"{served} of {layers}",
        "sdpa_off": off[theirs],
        "off": off[ours],
    }


def rows() -> Iterator[dict[str, Any]]:
    """A row of each model: name, config, class, batch, tokens, whose attention, compiled."""
    import transformers as t
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("float64", exact)
    AttentionMaskInterface.register("float64", AttentionMaskInterface()["eager"])
    few = {"num_hidden_layers": 4, "vocab_size": 1024}
    grouped = few | {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
    grouped |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    gemma = few | {"hidden_size": 2560, "head_dim": 256, "sliding_window": 1024}
    gemma |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    experts = few | {"num_local_experts": 4, "num_experts_per_tok": 4}  # all, so that none flips
    sides = {
        f"{side}_{name}": size
        for name, size in {"layers": 4, "attention_heads": 16, "ffn_dim": 4096}.items()
        for side in ("encoder", "decoder")
    }
    llama = ("Llama kind", t.LlamaConfig(**grouped), t.LlamaForCausalLM, 4, 2048, "sdpa")
    qwen = ("Qwen3 kind", t.Qwen3Config(**grouped), t.Qwen3ForCausalLM, 4, 2048, "sdpa")
    config = t.MistralConfig(**grouped, sliding_window=1024)
    mistral = ("Mistral kind, window 1024", config, t.MistralForCausalLM, 1, 8192, "sdpa")
    config = t.Gemma3TextConfig(**gemma)
    gemma_3 = ("Gemma 3 kind, window 1024", config, t.Gemma3ForCausalLM, 2, 4096, "sdpa")
    config = t.BertConfig(num_hidden_layers=6, vocab_size=1024)
    bert = ("BERT kind", config, t.BertModel, 32, 512, "sdpa")
    config = t.T5Config(**few | {"d_model": 1024, "d_ff": 4096, "num_heads": 16})
    t5 = ("T5 encoder's kind", config, t.T5EncoderModel, 16, 512, "sdpa")
    config = t.WhisperConfig(**sides, d_model=1024, num_mel_bins=80)
    whisper = ("Whisper kind", config, t.WhisperForConditionalGeneration, 8, 448, "sdpa")
    gemma_2 = ("Gemma 2 kind, by eager", t.Gemma2Config(**few), t.Gemma2ForCausalLM)
    gpt_oss = ("gpt-oss kind, by eager", t.GptOssConfig(**experts), t.GptOssForCausalLM)
    unfused = [(*kind, *size, "eager") for kind in (gemma_2, gpt_oss) for size in ((1, 4096), (2, 2048))]
    for model in (llama, qwen, mistral, gemma_3, bert, t5, whisper, *unfused):
        yield timed(*model, compiled=False)
    for model in (llama, mistral, bert, unfused[0]):
        yield timed(*model, compiled=True)


if __name__ == "__main__":
    file = options(__doc__).parse_args().file
    write_rows(file, described(), rows(), "models")
