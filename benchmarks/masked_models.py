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
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setting
import torch
from setting import console

import attnsweep
from attnsweep import Worker


def exact(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **options: Any
) -> tuple[Any, None]:
    """Attention in float64, as transformers calls it, eight heads at once. mask: to be added."""
    groups, softcap, sinks = q.shape[1] // k.shape[1], options.get("softcap"), options.get("s_aux")
    out = torch.empty(*q.shape[:3], v.shape[3], device=q.device, dtype=q.dtype)
    for item, head in itertools.product(range(q.shape[0]), range(0, q.shape[1], 8)):
        few = range(head, min(head + 8, q.shape[1]))
        keys, values = (each[item, [h // groups for h in few]].double() for each in (k, v))
        scores = q[item, few.start : few.stop].double() @ keys.mT * (scaling or q.shape[3] ** -0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores += mask[min(item, len(mask) - 1)]
        elif getattr(module, "is_causal", False) and scores.shape[1] > 1:
            scores.masked_fill_(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        if sinks is not None:
            sink = sinks[few.start : few.stop].double().view(-1, 1, 1).expand(-1, len(scores[0]), 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        out[item, few.start : few.stop] = (weights @ values).to(q.dtype)
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
        runs = dict.fromkeys((self.theirs, ours), model)
        if self.compiled:
            runs = {way: copy.deepcopy(model) for way in runs}
        calls: dict[str, Callable[..., Any]] = {}
        for way, each in runs.items():
            each.set_attn_implementation(way)
            calls[way] = torch.compile(each) if self.compiled else each
        times: dict[str, list[float]] = {way: [] for way in runs}
        logits, served = {}, 0
        with torch.no_grad():
            for turn in range(9 if self.compiled else 7):
                for way, call in calls.items():
                    runs[way].set_attn_implementation(way)
                    before = attnsweep.attention_counters().get("kernel", 0)
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    out = call(**given)[0]
                    torch.cuda.synchronize()
                    if turn >= (2 if self.compiled else 1):
                        times[way].append((time.perf_counter() - begin) * 1e3)
                    served = attnsweep.attention_counters().get("kernel", 0) - before
                    logits[way] = out[keep].double()
            model.set_attn_implementation("float64")
            right = model(**given)[0][keep].double()
        medians = {way: statistics.median(each) for way, each in times.items()}
        off = {way: float((each - right).norm() / right.norm()) for way, each in logits.items()}
        return {
            "model": f"{self.name}, {self.batch} x {self.seqlen}",
            "compiled": self.compiled,
            "sdpa_ms": round(medians[self.theirs], 2),
            "ours_ms": round(medians[ours], 2),
            "ratio": round(medians[self.theirs] / medians[ours], 3),
            "served": f"{served} of {self.calls}",
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
    gemma = few | {"hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4}
    llama = ("Llama kind", t.LlamaConfig(**grouped), t.LlamaForCausalLM, 4, 2048)
    mistral = t.MistralConfig(**grouped, sliding_window=1024), t.MistralForCausalLM
    bert = ("BERT kind", t.BertConfig(num_hidden_layers=6, vocab_size=1024), t.BertModel, 32, 512)
    gemma_3 = t.Gemma3TextConfig(**gemma, head_dim=256, sliding_window=1024), t.Gemma3ForCausalLM
    whisper = t.WhisperConfig(
        **{f"{side}_layers": 4 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 16 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4096 for side in ("encoder", "decoder")},
        d_model=1024,
        num_mel_bins=80,
    )
    eager = [
        (name, config, model, batch, seqlen, "eager")
        for name, config, model in (
            ("Gemma 2 kind, by eager", t.Gemma2Config(**few), t.Gemma2ForCausalLM),
            ("gpt-oss kind, by eager", t.GptOssConfig(**experts), t.GptOssForCausalLM),
        )
        for batch, seqlen in ((1, 4096), (2, 2048))
    ]
    for row in (
        llama,
        ("Qwen3 kind", t.Qwen3Config(**grouped), t.Qwen3ForCausalLM, 4, 2048),
        ("Mistral kind, window 1024", *mistral, 1, 8192),
        ("Gemma 3 kind, window 1024", *gemma_3, 2, 4096),
        bert,
        ("Whisper kind", whisper, t.WhisperForConditionalGeneration, 8, 448),
        *eager,
    ):
        yield Model(*row).timed()
        torch.cuda.empty_cache()
    for row in (llama, ("Mistral kind, window 1024", *mistral, 1, 8192), bert, eager[0]):
        torch._dynamo.reset()
        yield Model(*row, compiled=True).timed()
        torch.cuda.empty_cache()


def main() -> None:
    """Time everything; write each row, as it comes, to the file that was asked for."""
    with Worker(timeout_s=60) as worker:
        environment = worker.describe()
    found: dict[str, Any] = {"models": []}
    for row in models():
        found["models"].append(row)
        console.print(row)
        for name in sys.argv[1:]:
            setting.write(Path(name), environment, found)


if __name__ == "__main__":
    main()
