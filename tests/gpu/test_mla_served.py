"""`mla_decode` on a card: the kernel serves, with a plan and without, in graphs, and is right."""

import itertools

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
mla = pytest.importorskip("attnsweep.serve.mla")

PAGE, DIM, VALUE, SCALE = 64, 576, 512, 0.0722
LENGTHS = ((1, 0, 64, 65, 700, 4096), (4096, 3, 129, 1000, 0, 63))


class Cache:
    """Pages in an order at random, NaN where no request is, and what a call must give."""

    def __init__(self, heads, rows, lengths):
        self.random = torch.Generator("cuda").manual_seed(heads + rows)
        self.blocks, batch = -(-4096 // PAGE), len(lengths)
        self.pages = batch * self.blocks
        self.kv = torch.empty(self.pages, PAGE, 1, DIM, dtype=torch.bfloat16, device="cuda")
        self.table = torch.zeros(batch, self.blocks, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.q = torch.empty(batch, rows, heads, DIM, dtype=torch.bfloat16, device="cuda")
        self.fill(lengths)

    def fill(self, lengths):
        """Other lengths, tables, queries and keys at the same addresses."""
        self.lengths.copy_(torch.tensor(lengths))
        self.table.copy_(torch.randperm(self.pages, generator=self.random, device="cuda").view_as(self.table))
        self.q.copy_(torch.randn(self.q.shape, generator=self.random, device="cuda"))
        keys = torch.randn(len(lengths), self.blocks * PAGE, DIM, generator=self.random, device="cuda")
        behind = torch.arange(self.blocks * PAGE, device="cuda") >= self.lengths[:, None]
        keys[behind] = float("nan")
        self.kv[self.table.long().flatten()] = keys.view(-1, PAGE, 1, DIM).bfloat16()

    def check(self, out):
        rows = self.q.shape[1]
        for item, length in enumerate(self.lengths.tolist()):
            keys = self.kv[self.table[item].long()].view(-1, DIM)[:length].double()
            scores = torch.einsum("rhd,kd->hrk", self.q[item].double(), keys) * SCALE
            last = length - rows + torch.arange(rows, device="cuda")
            hidden = torch.arange(length, device="cuda") > last[:, None]
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0)
            right = torch.einsum("hrk,kd->rhd", weights, keys[:, :VALUE])
            off = (out[item].double() - right).norm(dim=-1)
            assert (off <= 6e-3 * right.norm(dim=-1) + 1e-6).all(), (item, length)

    def call(self, plan=None):
        given = (self.q, self.kv, self.table, self.lengths, VALUE)
        return mla.mla_decode(*given, softmax_scale=SCALE, plan=plan)


@pytest.mark.parametrize(("heads", "rows"), [*itertools.product((16, 64, 128), (1, 2, 4))])
def test_with_a_plan_and_without_and_replayed_with_other_lengths(heads, rows):
    cache, before = Cache(heads, rows, LENGTHS[0]), mla.counters["kernel"]
    cache.check(cache.call())
    cache.check(cache.call(mla.mla_plan(cache.lengths, heads * rows)))
    assert mla.counters["kernel"] == before + 2, dict(mla.counters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.call(mla.mla_plan(cache.lengths, heads * rows))
    for lengths in LENGTHS[::-1]:
        cache.fill(lengths)
        graph.replay()
        cache.check(out)
