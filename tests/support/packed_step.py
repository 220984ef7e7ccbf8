"""A step of an engine on a paged cache, and what is right for it in float64."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import attnsweep

PAGE = 16  # slots of a page, if no other number is said


class Step:
    """Requests with keys in pages, NaN beside them, some of the keys new, and their packed tokens.

    how: `page`, `device`, `order` (`hnd`: heads before slots), `capacity` (keys that a request may come to have).
    """

    def __init__(
        self,
        tokens: Sequence[int],
        keys: Sequence[int],
        heads: int = 4,
        heads_kv: int = 2,
        dim: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        cache: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        page, device = how.get("page", PAGE), how.get("device", "cpu")
        self.random = torch.Generator(device).manual_seed(seed)
        self.tokens, self.group, self.page, self.device = tokens, heads // heads_kv, page, device
        batch, self.blocks = len(keys), -(-max(how.get("capacity", 1), *keys) // page)
        inside = (heads_kv, page) if how.get("order") == "hnd" else (page, heads_kv)
        pool = torch.empty(2, batch * self.blocks + 2, *inside, dim, dtype=cache or dtype, device=device)
        self.k, self.v = pool.transpose(2, 3) if how.get("order") == "hnd" else pool
        self.table = torch.empty(batch, self.blocks, dtype=torch.int32, device=device)
        self.lengths = torch.empty(batch, dtype=torch.int32, device=device)
        self.scales = torch.rand(2, batch, heads_kv, generator=self.random, device=device) + 0.5 if cache else None
        self.q = torch.empty(sum(tokens), heads, dim, dtype=dtype, device=device)
        self.begins = torch.tensor([0, *tokens], device=device).cumsum(0).int()
        self.fill(keys)

    def fill(self, keys: Sequence[int]) -> None:
        """Draw lengths, tables, queries and keys, at the same addresses as before."""
        self.keys, batch, page = keys, len(keys), self.page

        def draw(like: torch.Tensor) -> torch.Tensor:
            return torch.randn(like.shape, generator=self.random, device=self.device)

        self.q.copy_(draw(self.q))
        self.lengths.copy_(torch.tensor(keys))
        order = torch.randperm(len(self.k), generator=self.random, device=self.device)[: batch * self.blocks]
        self.table.copy_(order.view(batch, self.blocks))
        at = torch.arange(self.blocks * page, device=self.device)
        seen = at < self.lengths[:, None]
        used = torch.zeros(len(self.k), page, dtype=torch.bool, device=self.device)
        used[self.table.long().repeat_interleave(page, 1)[seen], (at % page).expand(batch, -1)[seen]] = True
        for each in (self.k, self.v):
            each.copy_(draw(each).masked_fill_(~used[..., None, None], math.nan).to(each.dtype))
        self.table[at[::page] >= self.lengths[:, None]] = -9

    def call(self, **options: Any) -> Any:
        """`flash_attn_varlen_func` of the step."""
        own = {"max_seqlen_q": max(self.tokens), "max_seqlen_k": max(self.keys), "causal": True}
        own |= {"cu_seqlens_q": self.begins, "seqused_k": self.lengths, "block_table": self.table}
        if self.scales is not None:
            own |= {"k_descale": self.scales[0], "v_descale": self.scales[1]}
        return attnsweep.flash_attn_varlen_func(self.q, self.k, self.v, **own | options)

    def keys_of(self, request: int) -> Iterator[torch.Tensor]:
        """k and v of a request, (heads, keys, head_dim), in float64."""
        at = torch.arange(self.keys[request], device=self.device)
        page = self.table[request].long()[at // self.page]
        scales = (None, None) if self.scales is None else self.scales
        for cache, scale in zip((self.k, self.v), scales, strict=True):
            own = cache[page, at % self.page].double().transpose(0, 1)
            own = own if scale is None else own * scale[request].double()[:, None, None]
            yield own.repeat_interleave(self.group, 0)

    def right(
        self,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and log-sum-exps in float64."""
        outs, sums = [], []
        for request in range(len(self.tokens)):
            k, v = self.keys_of(request)
            q = self.q[self.begins[request] : self.begins[request + 1]].double().transpose(0, 1)
            own = attended(q, k, v, scale or q.shape[-1] ** -0.5, causal, window, softcap, sinks)
            outs.append(own.out.transpose(0, 1))
            sums.append(own.lse)
        return torch.cat(outs), torch.cat(sums, 1)


class Attended(NamedTuple):
    """What is right for a request. unit: sizes of what each row is summed from, which may cancel."""

    out: torch.Tensor
    lse: torch.Tensor
    unit: torch.Tensor


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window: Sequence[int],
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> Attended:
    """Attention of a request's last queries with its keys, (heads, rows, columns), in float64."""
    n, length = q.shape[1], k.shape[1]
    scores = q @ k.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    own = length - n + torch.arange(n, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    seen = torch.ones(n, length, dtype=torch.bool, device=q.device)
    seen &= key <= own if causal else seen
    seen &= key >= own - window[0] if window[0] >= 0 else seen
    seen &= key <= own + window[1] if window[1] >= 0 else seen
    scores = scores.masked_fill(~seen, -math.inf)
    extra = scores.new_empty(*scores.shape[:2], 0)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, n, 1)
    lse = torch.logsumexp(torch.cat([scores, extra], -1), -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    squares = weights**2 @ v.pow(2).sum(-1, keepdim=True)
    return Attended(weights @ v, lse, squares.sqrt())


def check(out: torch.Tensor, right: torch.Tensor) -> None:
    """Whether all elements are right, to the rounding of 16 bits."""
    most = right.abs().max() if right.numel() else 0
    torch.testing.assert_close(out.double(), right, rtol=0, atol=2.0**-7 * float(most))
