"""Time models whose batches are padded or whose layers have windows, with attnsweep and without.

Usage: python benchmarks/masked_models.py [FILE.json]. Needs a GPU that attnsweep has winners for.

Random weights, bf16, a batch that is padded on the right to 40 to 100 % of its length;
milliseconds a forward, by transformers' sdpa and by `register_attention()`, in turns, eager or both
by torch.compile; `served`: calls by a kernel of all; `sdpa_off` and `off`: the norm of the
difference of the logits from those by attention in float64, of tokens that are no padding, over
their norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from models import before_and_after, counted, float64_attention, turns
from setting import console, described, options, package_at, write

import attnsweep


def exact(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **given: Any) -> tuple[Any, None]:
    """Attention in float64, as transformers calls it. mask: to be added."""
    causal = mask is None and getattr(module, "is_causal", False) and q.shape[2] > 1
    scores = {"softcap": given.get("softcap"), "sinks": given.get("s_aux")}
    out = float64_attention(q, k, v, mask, is_causal=causal, scale=scaling, **scores)
    return out.transpose(1, 2).contiguous(), None


@dataclass
class Model:
    """A model of random weights and a batch, padded on the right if it has more than one item."""

    name: str
    config: Any
    of: Any
    batch: int
    seqlen: int
    theirs: str = "sdpa"
    compiled: bool = False

    def inputs(self) -> tuple[dict[str, Any], Any]:
        """What the model is called with, and which tokens of its output count."""
        ids = torch.randint(0, self.config.vocab_size, (self.batch, self.seqlen), device="cuda")
        length = torch.linspace(0.4 * self.seqlen, self.seqlen, self.batch, device="cuda").int()
        keep = torch.arange(self.seqlen, device="cuda") < length[:, None]
        if not self.config.is_encoder_decoder:
            return {"input_ids": ids, "attention_mask": keep.long()}, keep
        sound = torch.randn(self.batch, self.config.num_mel_bins, 3000, device="cuda")
        facts = {"input_features": sound.bfloat16(), "decoder_input_ids": ids}
        return facts | {"decoder_attention_mask": keep.long()}, keep

    @property
    def calls(self) -> int:
        """Calls of attention in a forward."""
        if self.config.is_encoder_decoder:
            return int(self.config.encoder_layers + 2 * self.config.decoder_layers)
        return int(self.config.num_hidden_layers)

    def timed(self) -> dict[str, Any]:
        """A row: both ways in turns, and how far each is from attention in float64."""
        torch.manual_seed(0)
        model = self.of(self.config).cuda().bfloat16().eval()
        given, keep = self.inputs()
        ours = attnsweep.register_attention()
        calls: dict[str, Callable[..., Any]] = {}
        for way in (self.theirs, ours, "float64"):
            each = copy.deepcopy(model)
            each.set_attn_implementation(way)
            calls[way] = torch.compile(each) if self.compiled and way != "float64" else each
        with torch.no_grad():
            right = calls.pop("float64")(**given)[0][keep].double()
            times = turns({way: partial(call, **given) for way, call in calls.items()}, rounds=7)
            off = {}
            for way, call in calls.items():
                with counted(package_at(None)) as served:
                    logits = call(**given)[0][keep].double()
                off[way] = float((logits - right).norm() / right.norm())
        found = before_and_after(*times.values())
        return {
            "model": f"{self.name}, {self.batch} x {self.seqlen}",
            "compiled": self.compiled,
            "sdpa_ms": round(found["before_ms"], 2),
            "ours_ms": round(found["after_ms"], 2),
            "ratio": round(found["gain"], 3),
            "served": f"{served.get('kernel', 0)} of {self.calls}",
            "sdpa_off": off[self.theirs],
            "off": off[ours],
        }


def models() -> Iterator[dict[str, Any]]:
    """A row of each model."""
    import transformers as t
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("float64", exact)
    AttentionMaskInterface.register("float64", AttentionMaskInterface()["eager"])
    sizes = {"hidden_size": 4096, "num_hidden_layers": 4, "vocab_size": 1024}
    wide = sizes | {"intermediate_size": 14336, "num_attention_heads": 32}
    grouped = wide | {"num_key_value_heads": 8, "head_dim": 128}
    few = {"num_hidden_layers": 4, "vocab_size": 1024}
    experts = few | {"num_local_experts": 4, "num_experts_per_tok": 4}  # all, so that none flips
    gemma = few | {"hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    llama = ("Llama kind", t.LlamaConfig(**grouped), t.LlamaForCausalLM, 4, 2048)
    window = {"sliding_window": 1024}
    mistral = ("Mistral kind, window 1024", t.MistralConfig(**grouped, **window), t.MistralForCausalLM, 1, 8192)
    bert = ("BERT kind", t.BertConfig(num_hidden_layers=6, vocab_size=1024), t.BertModel, 32, 512)
    stack = {"layers": 4, "attention_heads": 16, "ffn_dim": 4096}
    both = {f"{side}_{name}": size for name, size in stack.items() for side in ("encoder", "decoder")}
    whisper = t.WhisperConfig(**both, d_model=1024, num_mel_bins=80)
    gemma_2 = ("Gemma 2 kind, by eager", t.Gemma2Config(**few), t.Gemma2ForCausalLM)
    gpt_oss = ("gpt-oss kind, by eager", t.GptOssConfig(**experts), t.GptOssForCausalLM)
    eager = [(*kind, *size, "eager") for kind in (gemma_2, gpt_oss) for size in ((1, 4096), (2, 2048))]
    rows = (
        llama,
        ("Qwen3 kind", t.Qwen3Config(**grouped), t.Qwen3ForCausalLM, 4, 2048),
        mistral,
        ("Gemma 3 kind, window 1024", t.Gemma3TextConfig(**gemma, **window), t.Gemma3ForCausalLM, 2, 4096),
        bert,
        ("Whisper kind", whisper, t.WhisperForConditionalGeneration, 8, 448),
        *eager,
    )
    for row, compiled in (*((row, False) for row in rows), *((row, True) for row in (llama, mistral, bert, eager[0]))):
        if compiled:
            torch._dynamo.reset()
        yield Model(*row, compiled=compiled).timed()
        torch.cuda.empty_cache()


def main() -> None:
    """Time everything; write each row, as it comes, to the file that was asked for."""
    asked, environment = options(__doc__).parse_args(), described()
    rows: list[dict[str, Any]] = []
    for row in models():
        rows.append(row)
        console.print(row)
        write(asked.file, environment, {"models": rows})


if __name__ == "__main__":
    main()
