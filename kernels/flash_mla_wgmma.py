"""flash_mla_wgmma: decoding with latent keys over a paged cache on Hopper, as DeepSeek's models."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import LOG2E, Problem, ceil_div
from attnsweep.family import hopper
from attnsweep.family.family import Config, Family, Launch, Param, TensorMap

kernel = Family(
    "flash_mla_wgmma",
    summary="MLA decoding over a paged cache on Hopper: keys that are values too, two halves of "
    "the columns",
    params=(
        Param("BLOCK_N", (64, 32), "keys of a tile"),
        Param("LAG", (1, 0), "1: the second half's PV runs next to the softmax of the next tile"),
        Param(
            "SPLITS", (1, 2, 4, 8, 16), "blocks that share a request; the combine stage joins them"
        ),
        Param(
            "PLAN",
            (0, 2, 4),
            "0: none; otherwise blocks share all tiles evenly, and a part of a request counts so "
            "many more",
            absent=0,
        ),
        Param(
            "JOIN",
            (0, 1),
            "1: blocks that are done join a plan's parts of a request, and no combine stage runs",
            absent=0,
        ),
        Param("LSE", (0,), "1: the log-sum-exp of every row goes to the workspace `lse`"),
    ),
    min_arch="sm_90a",
    head_dims=(576,),
    head_dims_v=(512,),
    value_in_key=True,
    layouts=("paged",),
    lse="LSE",
    empty_rows=True,
    supports=(
        ("pages of 64 keys", lambda p: p.layout.page_size == 64),
        ("one key head", lambda p: p.heads_kv == 1),
    ),
)
THREADS, COMBINE_THREADS = 384, 128
PRODUCER_REGISTERS = 24
# SMs that workspaces have room for: they are made before a card is known.
MOST_SMS = 192
SHARE_BYTES = 32  # what the plan says of a block


def rows(p: Problem) -> int:
    """Rows of a request: the queries of all its heads."""
    return p.heads * p.seqlen_q


def row_tiles(p: Problem) -> int:
    """Blocks that have the same keys."""
    return ceil_div(rows(p), 64)


def parts(p: Problem, sms: int) -> int:
    """Parts into which a plan cuts the tiles of all requests: a block for each row tile."""
    return max(1, sms // row_tiles(p))


def slots(c: Config, p: Problem) -> int:
    """Partial results of requests: of a plan's block at most two."""
    return 2 * parts(p, MOST_SMS) if c.PLAN else p.batch * c.SPLITS if c.SPLITS > 1 else 0


def tile_bytes(of: int, p: Problem) -> int:
    """Bytes of so many rows of Q or of the cache."""
    return of * 128 * hopper.panels(p.head_dim)


def state_bytes(stages: int) -> int:
    """Bytes of factors of rows, flags of warps, and barriers."""
    return 4 * (64 * (stages + 2) + 4 * (stages + 1)) + 16 * (3 * stages + 1)


def smem_bytes(c: Config, p: Problem, stages: int) -> int:
    """Bytes of Q, tiles of keys, factors and barriers."""
    return tile_bytes(64 + stages * c.BLOCK_N, p) + state_bytes(stages)


def stages(c: Config, p: Problem, arch: Arch) -> int:
    """Tiles of keys in flight: as many as fit."""
    return max(n for n in range(1, 6) if n == 1 or smem_bytes(c, p, n) <= arch.smem_per_block)


# fmt: off
kernel.keep_if(
    ("known_values", "switches are 0 or 1; a tile has 32 or 64 keys",
     lambda c, p, arch: max(c.LAG, c.JOIN, c.LSE) < 2 and c.BLOCK_N in (32, 64) and c.PLAN >= 0),
    ("one_cut", "a plan splits requests as it needs, and blocks join what a plan has split",
     lambda c, p, arch: c.SPLITS == 1 if c.PLAN else c.JOIN == 0),
    ("ring_fits", "a ring has room for two tiles",
     lambda c, p, arch: stages(c, p, arch) >= 2),
)
kernel.keep_if(
    ("split_grid", "requests are split where they leave SMs idle, into four waves at most",
     lambda c, p, arch: c.SPLITS == 1 or (p.batch * row_tiles(p) < arch.sm_count
     and p.batch * row_tiles(p) * c.SPLITS <= 4 * arch.sm_count
     and c.SPLITS * c.BLOCK_N <= max(64, p.seqlen_k))),
    by_shape=True,
)
# fmt: on


@kernel.workspace
def workspace(c, p):
    every = slots(c, p) * rows(p)
    made = {"lse": 4 * p.batch * rows(p) if c.LSE else 16}
    made |= {"partial": 4 * every * p.value_dim, "partial_lse": 4 * every} if every else {}
    if c.PLAN:
        of_blocks, of_requests = planned(c)
        made |= {of_blocks: SHARE_BYTES * parts(p, MOST_SMS), of_requests: 4 * (p.batch + 1)}
    return made | ({"counters": 4 * counters(p)} if c.JOIN else {})


def counters(p: Problem) -> int:
    """Counters of joins: of each half of a request's rows."""
    return 3 * 2 * p.batch * row_tiles(p)


def planned(c: Config) -> tuple[str, str]:
    """Where the plan is: of each block, and of each request. Other configs have other plans."""
    return f"shares_{c.BLOCK_N}_{c.PLAN}", f"first_slot_{c.BLOCK_N}_{c.PLAN}"


def in_rows(p: Problem) -> tuple[int, int, int, int]:
    """How the rows of a request lie: how many, heads, queries, and rows from query to query."""
    return rows(p), p.heads, p.seqlen_q, 1


def map_of_pages(c: Config, p: Problem, panels: int) -> TensorMap:
    """The map of the cache: a box is a tile of so many panels."""
    page, slot, _ = (2 * stride for stride in p.layout.strides(p))
    pages, whole = p.layout.pages(p.batch, p.seqlen_k), hopper.panels(p.head_dim)
    dims = (64, p.layout.page_size, whole, pages)
    return TensorMap("k", dims, (slot, 128, page), (64, c.BLOCK_N, panels, 1))


@kernel.stage("plan", params=("BLOCK_N",), constants=())
def plan(c, p, arch):
    if not c.PLAN:
        return None
    count = parts(p, min(arch.sm_count, MOST_SMS))
    return Launch(
        function="flash_mla_wgmma_plan",
        grid=(1, 1, 1),
        threads=32,
        args=(
            *("seqused_k", *planned(c), "counters" if c.JOIN else "lse"),
            *(p.batch, p.layout.blocks(p.seqlen_k), count, counters(p) if c.JOIN else 0),
        ),
        defines={"COST": c.PLAN},
        once=True,
    )


@kernel.stage(
    "fwd", params=("BLOCK_N", "LAG", "SPLITS", "JOIN", "LSE"), constants=("HEAD_DIM", "IS_BF16")
)
def fwd(c, p, arch):
    entry = hopper.registers_at_entry(arch, THREADS)
    half = hopper.panels(p.value_dim) // 2
    of_tile = (c.SPLITS, p.batch)
    if c.PLAN:
        of_tile = (parts(p, min(arch.sm_count, MOST_SMS)), 1)
    return Launch(
        function="flash_mla_wgmma",
        grid=(row_tiles(p), *of_tile),
        threads=THREADS,
        args=(
            hopper.tensor_map("q", p.batch, rows(p), p.head_dim, box=(64, 64)),
            map_of_pages(c, p, half),
            map_of_pages(c, p, hopper.panels(p.head_dim) - 2 * half),
            *("seqused_k", "block_table", planned(c)[0] if c.PLAN else "lse", "o", "lse"),
            *(("partial", "partial_lse") if slots(c, p) else ("lse", "lse")),
            *((planned(c)[1], "counters") if c.JOIN else ("lse", "lse")),
            *(*in_rows(p), *[p.layout.blocks(p.seqlen_k)] * 2, p.scale * LOG2E),
        ),
        smem_bytes=smem_bytes(c, p, stages(c, p, arch)),
        defines=hopper.value_columns(p)
        | {
            "STAGES": stages(c, p, arch),
            "PLANNED": int(c.PLAN > 0),
            "CAUSAL": int(p.mask.kind == "causal"),
            "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
            "CONSUMER_REGISTERS": hopper.registers_of_roles(entry, 2, PRODUCER_REGISTERS),
        },
    )


@kernel.stage("combine", params=("SPLITS", "LSE"), constants=("IS_BF16",))
def combine(c, p, arch):
    if not slots(c, p) or c.JOIN:
        return None
    return Launch(
        function="flash_mla_wgmma_combine",
        grid=(ceil_div(rows(p) * p.value_dim, 4 * COMBINE_THREADS), p.batch, 1),
        threads=COMBINE_THREADS,
        args=(
            *("partial", "partial_lse", planned(c)[1] if c.PLAN else "lse", "o", "lse"),
            *in_rows(p),
        ),
        defines=hopper.value_columns(p)
        | {"COMBINE_THREADS": COMBINE_THREADS, "PLANNED": int(c.PLAN > 0)},
    )
