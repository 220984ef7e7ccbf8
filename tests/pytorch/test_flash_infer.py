"""FlashInfer's baselines call it with the pages, lengths and scales that a problem has."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.registry import BACKENDS
from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.oracle import oracle_of

LABELS = [
    "(3,4/2,1x40,32) bf16 causal paged(16,1x40+1x0+1x17)",
    "(3,4/2,1x64,32) fp16 full paged(32,hnd,1x33+1x2+1x64)",
    "(2,6/2,1x50,16) bf16 causal paged(16,e4m3)",
]


class OnTheHost(SimpleNamespace):
    """PyTorch whose tensors are made on the host."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def tensor(self, *args, device, **how):
        return torch.tensor(*args, **how)

    def zeros(self, *args, device, **how):
        return torch.zeros(*args, **how)

    def empty(self, *args, device, **how):
        return torch.empty(*args, **how)


def attention(q, k, v, scale):
    """Of q (heads, head_dim) and keys (n, heads_kv, head_dim)."""
    k, v = (x.float().repeat_interleave(len(q) // x.shape[1], dim=1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q.float(), k) * scale, -1)
    return torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)


class Wrapper:
    """FlashInfer's wrapper, by loops over the pages that it was planned with."""

    def __init__(self, space, layout, use_tensor_cores):
        assert (space.dtype, layout) == (torch.uint8, "NHD")

    def plan(self, first, pages, last, heads, heads_kv, head_dim, page_size, *, kv_data_type, sm_scale, **how):
        self.first, self.pages, self.last, self.size, self.scale = first, pages, last, page_size, sm_scale
        self.stored = kv_data_type

    def run(self, q, caches):
        assert all(cache.dtype == self.stored for cache in caches)
        out = torch.zeros_like(q)
        for at, (begin, end) in enumerate(zip(self.first[:-1], self.first[1:], strict=True)):
            own = self.pages[begin:end].long()
            length = (len(own) - 1) * self.size + int(self.last[at])
            if len(own):
                k, v = (cache.float()[own].flatten(0, 1)[:length] for cache in caches)
                out[at] = attention(q[at], k, v, self.scale)
        return out


def by_table(q, k, v, table, lengths, out, space, counts, heads_kv, page_size, *, q_scale):
    """FlashInfer's XQA, which divides by the root of head_dim itself."""
    assert (lengths.dtype, counts.dtype, k.shape[1:3]) == (torch.uint32, torch.uint32, (page_size, heads_kv))
    for at, (length,) in enumerate(lengths.tolist()):
        keys, values = (cache.float()[table[at].long()].flatten(0, 1)[:length] for cache in (k, v))
        out[at, 0] = attention(q[at, 0], keys, values, q_scale / q.shape[-1] ** 0.5) if length else 0


@pytest.fixture(autouse=True)
def package(monkeypatch):
    made = ModuleType("flashinfer")
    made.BatchDecodeWithPagedKVCacheWrapper, made.xqa = Wrapper, by_table
    monkeypatch.setitem(sys.modules, "flashinfer", made)


def tensor(bits, dtype):
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
    return torch.from_numpy(bits.view({1: np.uint8, 2: np.int16}[bits.itemsize]).copy()).view(types[dtype])


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("name", ["flashinfer", "xqa"])
def test_it_is_called_so_that_its_answer_is_right(name, label):
    problem = Problem.parse(label)
    assert BACKENDS[name].supports(problem) is None
    inputs = make_inputs(Case(problem), 1)
    stored = problem.layout.cache_dtype or problem.dtype
    given = [tensor(inputs["q"], problem.dtype), *(tensor(inputs[each], stored) for each in "kv")]
    given += [torch.from_numpy(inputs[each]) for each in problem.scales]
    exact, _ = oracle_of(problem).exact(inputs, problem)
    for way in BACKENDS[name].ways(OnTheHost(), problem, None):
        converted = way.convert(*given)
        out = way.forward(*converted)
        again = way.forward(*converted)
        assert again.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()  # calls in a graph are all judged
        out = out if way.finish is None else way.finish(out, *converted)
        np.testing.assert_allclose(out.double().numpy(), exact["o"], rtol=0, atol=2.0**-6 * np.abs(exact["o"]).max())


def test_what_it_cannot_do_is_said():
    four = Problem.parse("(3,4/2,4x40,32) bf16 causal paged(16)")
    assert BACKENDS["xqa"].supports(four) == "xqa decodes one query of a request"
    with pytest.raises(Unavailable, match="pages of 16, 32, 64 or 128 keys, not 1"):
        BACKENDS["xqa"].ways(OnTheHost(), Problem.parse("(3,4/2,1x40,32) bf16 causal paged(1)"), None)
