"""flash_fwd_fp8_wgmma: fused forward on Hopper in E4M3: wgmma of bytes, V transposed on its way."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import LOG2E, SCALE_BLOCK, Problem, ceil_div
from attnsweep.family import hopper
from attnsweep.family.family import SMS, Config, Family, Launch, Param

kernel = Family(
    "flash_fwd_fp8_wgmma",
    summary="fused FlashAttention forward on Hopper in E4M3: wgmma of bytes, bf16 output",
    params=(
        Param("BLOCK_N", (64, 96, 128, 160, 224), "keys of a tile, a multiple of 32"),
        Param("WARPGROUPS", (2, 3, 1), "consumer warpgroups of a block, 64 queries each"),
        Param("NUM_STAGES", (2,), "tiles of K, and of transposed V, in flight"),
        Param("V_STAGES", (2,), "tiles of V that wait to be transposed"),
        Param("BLOCKS_PER_SM", (1, 2), "blocks that an SM has room for"),
        Param("OVERLAP", (1, 2), "1: softmax next to the PV of the tile before; 2: none after it"),
        Param("PINGPONG", (0, 1), "1: warpgroups take turns to begin their products"),
        Param(
            "INTERVAL", (0, 64, 96, 128), "keys that the tensor core sums before fp32 does; 0: all"
        ),
        Param(
            "SUMS",
            (0, 1, 2),
            "sums of P's rows: 0 by threads, before P is rounded; of rounded P: 1 by the tensor "
            "core, 2 by threads",
        ),
        Param(
            "MAXIMA", (1, 2), "maxima 1 of each tile, 2 only where weights would outgrow the format"
        ),
        Param(
            "HEADROOM",
            (0, 1, 2, 3, 4, 5),
            "log2 of how far P may outgrow its reference: less is more exact",
        ),
        Param("EXP2_POLY", (0, 2), "exponentials out of 8 by a polynomial on the FMA units"),
        Param("ORDER", (0, 1), "block order: 0 by head; 1 longest first, by heads that fit L2"),
        Param("PERSISTENT", (0, SMS), "SMs whose blocks take turns at tiles; 0: a block per tile"),
        Param("PDL", (0,), "programmatic launch: next may begin 1 after the loads, 2 at once"),
        Param("LSE", (0,), "1: the log-sum-exp of every row goes to the workspace `lse`"),
    ),
    min_arch="sm_90a",
    dtypes=("e4m3", "e4m3_tensor", "e4m3_block"),
    head_dims=(64, 128, 256),
    empty_rows=True,
    lse="LSE",
)
L2_BYTES = 32 * 2**20  # bytes of K and V that blocks which run at the same time should share
# Registers that ptxas 13 needs besides scores, P and accumulators, from compiling the whole space.
REST = {"sums of whole tiles": 20, "otherwise": 28}
PRODUCER_REGISTERS = (56, 48, 40, 32)


def block_m(c: Config) -> int:
    """Query rows of a block."""
    return 64 * c.WARPGROUPS


def width(columns: int) -> int:
    """Bytes of a panel's row, in a tile with this many columns of one byte."""
    return 128 if columns % 128 == 0 else 64


def tile_bytes(rows: int, columns: int) -> int:
    """Bytes of a tile in whole panels."""
    return rows * ceil_div(columns, width(columns)) * width(columns)


def out_columns(c: Config, p: Problem) -> int:
    """Columns of P V: V's, and with SUMS 1 eight of ones."""
    return p.head_dim + 8 * (c.SUMS == 1)


def smem_bytes(c: Config, p: Problem) -> int:
    """Bytes of Q, the rings of K, V and transposed V, the staged output and barriers."""
    k_bytes = tile_bytes(c.BLOCK_N, p.head_dim)
    ring = c.NUM_STAGES * (k_bytes + tile_bytes(out_columns(c, p), c.BLOCK_N))
    staged, v_ring = block_m(c) * p.head_dim * 2, c.V_STAGES * k_bytes
    v_bytes = v_ring + staged if c.PERSISTENT else max(v_ring, staged)
    barriers = 32 * c.NUM_STAGES + 16 * c.V_STAGES + 8 * (1 + c.WARPGROUPS)
    return tile_bytes(block_m(c), p.head_dim) + ring + v_bytes + barriers


def scale_block(p: Problem) -> int:
    """Keys that share a scale of K and of V, or 0 if all of a head do."""
    return SCALE_BLOCK if p.dtype == "e4m3_block" else 0


def registers_given(c: Config, p: Problem, arch: Arch) -> tuple[int, int, int]:
    """Registers of a thread at entry, then of a producer's thread, and of a consumer's.

    A producer has as many as do not cost consumers what they need, because it spills with fewer.
    """
    entry = hopper.registers_at_entry(arch, 128 * (c.WARPGROUPS + 1), c.BLOCKS_PER_SM)
    for producer in PRODUCER_REGISTERS:
        consumer = hopper.registers_of_roles(entry, c.WARPGROUPS, producer)
        if consumer >= registers_needed(c, p):
            break
    return entry, producer, consumer


def registers_needed(c: Config, p: Problem) -> int:
    """Registers that a consumer thread needs without spills: scores, P, accumulators, the rest."""
    out = out_columns(c, p)
    # The tensor core sums a wide head 64 columns at a time.
    part = 0 if not c.INTERVAL else 64 if p.head_dim > 128 else out
    rest = REST["sums of whole tiles" if c.INTERVAL >= c.BLOCK_N else "otherwise"]
    of_p = c.BLOCK_N // 8 * (2 if c.OVERLAP == 2 else 1)  # 2: the next P is there beside it
    return c.BLOCK_N // 2 + of_p + (out + part) // 2 + rest


# fmt: off
kernel.keep_if(
    ("known_values", "switches are 0 or 1, PDL, OVERLAP and SUMS to 2, EXP2_POLY to 8",
     lambda c, p, arch: c.EXP2_POLY <= 8 and c.PDL < 3
     and max(c.OVERLAP, c.SUMS) < 3 and c.MAXIMA in (1, 2)
     and max(c.PINGPONG, c.ORDER, c.LSE) < 2),
    ("tiles", "a block has 1 to 3 warpgroups; a tile has 64 to 256 keys, in thirty-twos",
     lambda c, p, arch: c.WARPGROUPS in (1, 2, 3) and c.BLOCK_N in range(64, 257, 32)),
    ("intervals", "an interval is whole tiles, or divides one in thirty-twos, as wide heads need",
     lambda c, p, arch: c.INTERVAL == 0 or (c.INTERVAL % 32 == 0
     and (c.BLOCK_N % c.INTERVAL == 0 or (c.INTERVAL % c.BLOCK_N == 0 and p.head_dim <= 128)))),
    ("one_scale", "a tile of keys has one scale, so it divides a block of keys that share one",
     lambda c, p, arch: scale_block(p) % c.BLOCK_N == 0),
    ("sums", "rows of ones fit a product's 256 columns, and the log-sum-exp is of P not rounded",
     lambda c, p, arch: not c.SUMS or (not c.LSE and (c.SUMS == 2 or p.head_dim < 256))),
    ("sums_by_interval", "the tensor core cuts sums of many weights: of 16,384 keys it loses 45 %",
     lambda c, p, arch: c.SUMS != 1 or c.INTERVAL > 0),
    ("small_weights", "HEADROOM is 0 to 5: with 7, small weights that count are lost",
     lambda c, p, arch: c.HEADROOM <= 5),
    ("sums_by_headroom",
     "sums of rounded P need HEADROOM 0 or 1: with 5, rows of 16,384 keys were 16 % too large",
     lambda c, p, arch: c.SUMS == 0 or c.HEADROOM <= 1),
    ("tried_tiles", "tiles are tried without their maxima only with OVERLAP",
     lambda c, p, arch: c.MAXIMA == 1 or c.OVERLAP > 0),
    ("warpgroups_of_sm", "an SM has 2 to 4 consumer warpgroups, so that their products overlap",
     lambda c, p, arch: 2 <= c.WARPGROUPS * c.BLOCKS_PER_SM <= 4),
    ("turns", "two or more warpgroups take turns, with OVERLAP",
     lambda c, p, arch: not c.PINGPONG or (c.OVERLAP and c.WARPGROUPS > 1)),
    ("registers", "scores, P and accumulators fit the registers of a thread, so nothing spills",
     lambda c, p, arch: registers_needed(c, p) <= registers_given(c, p, arch)[2]
     # ptxas refuses a wgmma whose accumulators do not fit the registers at entry (C7602).
     and max(c.BLOCK_N, p.head_dim) // 2 + 26 <= registers_given(c, p, arch)[0]),
    ("producer_registers", "a producer that loads V after each tile has 48 registers, or spills",
     lambda c, p, arch: c.V_STAGES > 1 or registers_given(c, p, arch)[1] >= 48),
    ("blocks_fit", "the planned blocks fit the shared memory of an SM",
     lambda c, p, arch: smem_bytes(c, p) <= arch.smem_per_block
     and arch.smem_per_sm // (smem_bytes(c, p) + arch.smem_reserved_per_block) >= c.BLOCKS_PER_SM),
)
kernel.keep_if(
    ("no_idle_tile", "a tile is under twice its sequence, and a ring holds at most it",
     lambda c, p, arch: block_m(c) < 2 * max(64, p.seqlen_q) and c.BLOCK_N < 2 * max(64, p.seqlen_k)
     and c.V_STAGES <= c.NUM_STAGES <= max(2, ceil_div(p.seqlen_k, c.BLOCK_N))),
    ("block_order", "longest first needs blocks of different lengths, and turns then need it",
     lambda c, p, arch: (p.causal and p.seqlen_q > block_m(c)) in ([True] if c.ORDER else
                                                                   [False, not c.PERSISTENT])),
    ("turns_of_blocks", "blocks that take turns have at least two tiles of queries each",
     lambda c, p, arch: p.query_tiles(block_m(c)) >= 2 * c.PERSISTENT * c.BLOCKS_PER_SM),
    ("short_calls", "a programmatic launch is for short calls, under 2e11 FLOPs",
     lambda c, p, arch: c.PDL == 0 or p.flops < 2e11),
    by_shape=True,
)
# fmt: on


@kernel.workspace
def workspace(c, p):
    return {"lse": 4 * p.batch * p.heads * p.seqlen_q if c.LSE else 16}


@kernel.stage("fwd", constants=("HEAD_DIM", "CAUSAL"))
def fwd(c, p, arch):
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    tiles_m = ceil_div(p.seqlen_q, block_m(c))
    turns = c.PERSISTENT * c.BLOCKS_PER_SM
    # Twice as many as that function counts, which is of numbers of two bytes.
    together = hopper.heads_sharing_l2(p, block_m(c), c.BLOCK_N, turns, 2 * L2_BYTES)
    grid = (tiles_m, heads, 1)
    if c.PERSISTENT:
        grid = (min(turns, tiles_m * heads), 1, 1)
    elif c.ORDER:
        grid = (together, tiles_m, heads // together)
    _, producer, consumer = registers_given(c, p, arch)

    def of_pairs(name: str, heads: int, rows: int, box_rows: int):
        """Map of a tensor of bytes, which maps count in pairs."""
        box = (width(p.head_dim) // 2, box_rows)
        return hopper.tensor_map(name, heads, rows, p.head_dim // 2, box=box)

    return Launch(
        function="flash_fwd_fp8_wgmma",
        grid=grid,
        threads=128 * (c.WARPGROUPS + 1),
        args=(
            of_pairs("q", heads, p.seqlen_q, 64),
            of_pairs("k", heads_kv, p.seqlen_k, c.BLOCK_N),
            of_pairs("v", heads_kv, p.seqlen_k, c.BLOCK_N),
            hopper.tensor_map("o", heads, p.seqlen_q, p.head_dim, box=(64, 16)),
            *("q_scale", "k_scale", "v_scale", "lse", heads, p.heads // p.heads_kv, together),
            *(p.seqlen_q, p.seqlen_k, p.scale * LOG2E),
        ),
        smem_bytes=smem_bytes(c, p),
        defines={"PRODUCER_REGISTERS": producer, "CONSUMER_REGISTERS": consumer}
        | {"SCALE_BLOCK": scale_block(p), **hopper.empty_rows(p)},
        min_blocks_per_sm=c.BLOCKS_PER_SM,
        programmatic=c.PDL > 0,
    )
