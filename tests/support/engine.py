"""A small serving engine: continuous batching over pages with a Llama of transformers.

Requests come and go, their lengths grow, prompts are read in pieces, guesses are checked, a prefix
is shared, and pages are freed and used again. Its attention is the class of docs/how-to/engine.md.
Steps in which every request has as many tokens may be CUDA graphs, replayed with other numbers.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GUIDE = Path(__file__).parents[2] / "docs/how-to/engine.md"


def class_of_guide() -> Any:
    """The class that the guide shows."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    return names["PagedAttention"]


def llama(device: str, dtype: torch.dtype, seed: int = 0, **sizes: int) -> Any:
    """A Llama of random weights, whose layers attend by the step that an engine set."""
    torch.manual_seed(seed)
    given = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    given |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64} | sizes
    config = LlamaConfig(**given, max_position_embeddings=1 << 20, tie_word_embeddings=False)
    config._attn_implementation = "step"
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def _by_step(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
    out = STEP.attend(module.layer_idx, *(each[0].transpose(0, 1) for each in (query, key, value)))
    return out[None], None


def _replayed(graph: Any, made: torch.Tensor) -> torch.Tensor:
    graph.replay()
    return made


STEP = SimpleNamespace(attend=None)
ALL_ATTENTION_FUNCTIONS.register("step", _by_step)


@dataclass(eq=False)
class Request:
    """A prompt, the tokens that follow it, and the pages of both."""

    prompt: list[int]
    wanted: int
    made: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    stored: int = 0  # tokens whose keys are in the pages

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.made


class Engine:
    """Steps of a model over a pool of pages.

    graphed: tokens of the longest request that a graph serves; 0: no step is a graph.
    """

    def __init__(
        self,
        model: Any,
        pages: int,
        page_size: int = 16,
        budget: int = 64,
        guesses: int = 0,
        attention: Callable[..., Any] | None = None,
        most: int = 8,
        graphed: int = 0,
    ) -> None:
        config = model.config
        self.model, self.page_size, self.budget, self.guesses = model, page_size, budget, guesses
        device, dtype = model.device, model.dtype
        shape = (2, pages + 1, page_size, config.num_key_value_heads, config.head_dim)
        self.caches = [
            torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(config.num_hidden_layers)
        ]
        sizes = (config.num_attention_heads, config.head_dim, config.head_dim**-0.5, config.num_key_value_heads)
        self.attention = (attention or class_of_guide())(*sizes)
        self.free, self.users = list(range(pages))[::-1], [0] * pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.most, self.steps = most, 0
        self.nobody = pages * page_size  # a slot of a page that no request has
        self.graphed, self.replays = graphed, 0
        self.graphs: dict[int, tuple[dict[str, torch.Tensor], Callable[[], torch.Tensor]]] = {}
        self.kinds: set[str] = set()

    def add(self, prompt: list[int], wanted: int, like: Request | None = None) -> Request:
        """A request; like: one whose whole pages of an equal beginning it uses too."""
        made = Request(list(prompt), wanted)
        if like is not None:
            pairs = enumerate(zip(prompt, like.prompt, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), len(like.prompt))
            whole = min(same, like.stored, len(prompt) - 1) // self.page_size
            made.pages, made.stored = like.pages[:whole], whole * self.page_size
            for page in made.pages:
                self.users[page] += 1
        self.waiting.append(made)
        return made

    def run(self) -> None:
        """Steps until every request is done."""
        while self.step():
            pass

    def step(self) -> bool:
        """One call of the model; False if nothing is left to do."""
        while self.waiting and len(self.running) < self.most:
            self.running.append(self.waiting.popleft())
        left, work = self.budget, []
        for request in self.running:
            known = len(request.tokens) - request.stored
            if request.made and self.guesses:
                guessed = self._guess(request)
                tokens = [*request.tokens[request.stored :], *guessed]
            else:
                tokens, guessed = request.tokens[request.stored :][: max(0, left)], []
            if tokens:
                left -= len(tokens)
                work.append((request, tokens, guessed, known))
                self._hold(request, request.stored + len(tokens))
        if not work:
            return False
        logits = self._call(work)
        at = 0
        for request, tokens, guessed, known in work:
            best = logits[at : at + len(tokens)].argmax(-1).tolist()
            at += len(tokens)
            self._take(request, tokens, guessed, known, best)
        self.steps += 1
        return bool(self.running or self.waiting)

    def _guess(self, request: Request) -> list[int]:
        """Tokens that may come next: those that came after the last one before, and others."""
        tokens = request.tokens
        before = [n for n, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        after = tokens[before[-1] + 1 :][: self.guesses] if before else []
        return (after + [len(tokens) % 7] * self.guesses)[: self.guesses]

    def _take(self, request: Request, tokens: list[int], guessed: list[int], known: int, best: list[int]) -> None:
        request.stored += len(tokens) - len(guessed)
        if len(tokens) - len(guessed) < known:
            return  # a piece of a prompt
        own = len(tokens) - len(guessed) - 1
        request.made.append(best[own])
        for number, guess in enumerate(guessed):
            if guess != request.made[-1] or len(request.made) >= request.wanted:
                break
            request.stored += 1  # its key is in its page already
            request.made.append(best[own + 1 + number])
        if len(request.made) >= request.wanted:
            self.running.remove(request)
            self._hold(request, 0)

    def _hold(self, request: Request, tokens: int) -> None:
        """Give a request the pages that its tokens need; with no tokens, take its pages back."""
        wanted = -(-tokens // self.page_size)
        while len(request.pages) < wanted:
            request.pages.append(self.free.pop())
            self.users[request.pages[-1]] = 1
        for page in request.pages[wanted:] if not tokens else []:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _call(self, work: list[Any]) -> torch.Tensor:
        """Logits of all tokens of a step."""
        counts = [len(tokens) for _, tokens, *_ in work]
        ids = [token for _, tokens, *_ in work for token in tokens]
        own = [range(request.stored, request.stored + n) for (request, *_), n in zip(work, counts, strict=True)]
        slots = [
            request.pages[at // self.page_size] * self.page_size + at % self.page_size
            for (request, *_), places in zip(work, own, strict=True)
            for at in places
        ]
        positions, lengths = [at for places in own for at in places], [places[-1] + 1 for places in own]
        tables, longest = [request.pages for request, *_ in work], max(lengths)
        even = len(set(counts)) == 1
        self.kinds.add(f"{counts[0]} each" if even else "mixed")
        replayed = even and counts[0] <= 1 + self.guesses and longest <= self.graphed
        if replayed:  # requests that there are not have no key, and store theirs where nobody looks
            missing, longest = self.most - len(work), self.graphed
            rest = [0] * (missing * counts[0])
            ids, positions, slots = ids + rest, positions + rest, slots + [self.nobody] * len(rest)
            counts, lengths, tables = counts + counts[:1] * missing, lengths + [0] * missing, tables + [[]] * missing
        blocks = -(-longest // self.page_size)
        begins = [sum(counts[:n]) for n in range(len(counts) + 1)]
        given = {
            "ids": torch.tensor([ids]),
            "positions": torch.tensor([positions]),
            "slots": torch.tensor(slots),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
            "begins": torch.tensor(begins, dtype=torch.int32),
            "table": torch.tensor([(pages + [-1] * blocks)[:blocks] for pages in tables], dtype=torch.int32),
        }
        run = self._replay if replayed else self._forward
        return run(given, max(counts), longest)

    def _replay(self, given: dict[str, torch.Tensor], count: int, longest: int) -> torch.Tensor:
        """The same by a graph of as many tokens of each request; without a card, by the step itself."""
        if count not in self.graphs:
            held = {name: each.to(self.model.device) for name, each in given.items()}
            step: Callable[[], torch.Tensor] = partial(self._forward, held, count, longest)
            if self.model.device.type == "cuda":
                step()  # so that all is compiled, and allocated once
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    logits = step()
                step = partial(_replayed, graph, logits)
            self.graphs[count] = held, step
        held, step = self.graphs[count]
        for name, each in given.items():
            held[name].copy_(each)
        self.replays += 1
        return step()

    def _forward(self, given: dict[str, torch.Tensor], most: int, longest: int) -> torch.Tensor:
        on = {name: each.to(self.model.device) for name, each in given.items()}
        metadata = SimpleNamespace(
            num_actual_tokens=on["ids"].numel(),
            max_query_len=most,
            query_start_loc=on["begins"],
            max_seq_len=longest,
            seq_lens=on["lengths"],
            block_table=on["table"],
            slot_mapping=on["slots"],
            use_cascade=False,
        )

        def attend(layer: int, query: Any, key: Any, value: Any) -> Any:
            return self.attention.forward(
                None, query, key, value, self.caches[layer], metadata, torch.empty_like(query)
            )

        STEP.attend = attend
        return self.model(input_ids=on["ids"], position_ids=on["positions"], use_cache=False).logits[0]


@torch.no_grad()  # type: ignore[untyped-decorator]
def dense_loop(model: Any, prompt: list[int], wanted: int) -> tuple[list[int], list[float]]:
    """The tokens that follow a prompt by attention in float64 over all, and by how much each won.

    In standard deviations of the logits.
    """

    def attend(layer: int, query: Any, key: Any, value: Any) -> Any:
        q, k, v = (each.double().transpose(0, 1) for each in (query, key, value))
        group = len(q) // len(k)
        scores = q @ k.repeat_interleave(group, 0).mT * q.shape[-1] ** -0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v.repeat_interleave(group, 0)).transpose(0, 1).to(query.dtype)

    tokens, margins = list(prompt), []
    for _ in range(wanted):
        STEP.attend = attend
        ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        last = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -1].float()
        best = last.topk(2)
        margins.append(float((best.values[0] - best.values[1]) / last.std()))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margins


# By how much a token must win in the dense loop to be the engine's too, in standard deviations of the
# logits, which differ in the last places of 16 bits.
MARGIN = 0.02


def served(
    device: str, dtype: torch.dtype, requests: int = 6, guesses: int = 0, seed: int = 0, graphed: int = 0, **sizes: int
) -> Any:
    """An engine with requests that are done, and how many tokens were compared with a dense loop."""
    rng = random.Random(seed)
    model = llama(device, dtype, **sizes)
    engine = Engine(model, pages=40, budget=24, guesses=guesses, most=4, graphed=graphed)
    prefix = [rng.randrange(512) for _ in range(37)]
    first = engine.add([*prefix, 3, 4], 12)
    made = [first]
    for _ in range(4):
        engine.step()
    assert first in engine.running
    for number in range(requests - 1):
        own = [rng.randrange(512) for _ in range(rng.choice((1, 5, 30, 50)))]
        prompt, like = ([*prefix, *own], first) if number % 2 == 0 else (own, None)
        made.append(engine.add(prompt, rng.choice((3, 7, 12)), like=like))
        assert like is None or made[-1].stored == 32  # two pages of the prefix
    engine.run()
    compared = 0
    for request in made:
        assert len(request.made) >= request.wanted
        tokens, margins = dense_loop(model, request.prompt, request.wanted)
        for token, right, margin in zip(request.made, tokens, margins, strict=False):
            if margin < MARGIN:
                break  # from here on another token may be right
            assert token == right, (request.prompt, request.made, tokens, margins)
            compared += 1
    assert len(engine.free) == 40
    return engine, compared
