"""flash_fwd_fp32_halves: fp32 forward on mma.sync of fp16, of numbers split into two parts once.

The faster of the two for ordinary heads, but for short calls, where flash_fwd_fp32_mma saves the
launch that splits, and for K and V with numbers that are too far apart for one scale (tried.md).
"""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "flash_fwd_fp32_halves",
    summary="fp32 forward: K and V split into fp16 once, each product as three of mma.sync; the "
    "faster one from some 500 keys on",
    params=(
        Param("BLOCK_M", (64, 128, 256), "query rows per block"),
        Param("BLOCK_N", (16, 32, 64), "keys per tile"),
        Param("NUM_WARPS", (4, 8), "warps per block"),
        Param("NUM_STAGES", (1, 2, 3), "K and V ring; with 1, V loads under QK and K under PV"),
        Param(
            "LOAD_AHEAD", (0, 1), "1: fragments may be loaded ahead of products, for more registers"
        ),
        Param("BLOCK_ORDER", (0, 1), "0 by head; 1, if causal, longest first"),
    ),
    dtypes=("fp32",),
    head_dims=range(8, 257, 8),
    usual_head_dims=(64, 128, 256, 72),
)


def image_bytes(config: Config, head_dim: int) -> int:
    """Bytes of a tile of K or V in two planes of fp16, rows padded to 16 columns, and its scale."""
    return config.BLOCK_N * ceil_div(head_dim, 16) * 64 + 16


def warp_m(config: Config) -> int:
    """Query rows of one warp."""
    return config.BLOCK_M // config.NUM_WARPS


def smem_bytes(config: Config, head_dim: int) -> int:
    """Bytes of Q in two planes, a scale of each query, and the ring of K and V."""
    queries = config.BLOCK_M * (ceil_div(head_dim, 16) * 64 + 4)
    return queries + 2 * config.NUM_STAGES * image_bytes(config, head_dim)


def registers_needed(config: Config, head_dim: int) -> int:
    """Registers of a lane: outputs, P in two parts, sums of a step, fragments and addresses."""
    keys = config.BLOCK_N // 2 + config.LOAD_AHEAD * config.BLOCK_N // 4
    return warp_m(config) // 16 * (head_dim // 2 + keys + 24) + 72


@kernel.rule("a warp owns 16 or 32 queries")
def warp_rows(config: Config, problem: Problem, arch: Arch) -> bool:
    return warp_m(config) in (16, 32)


@kernel.rule("a tile is shorter than twice its sequence, or short itself")
def no_idle_tile(config: Config, problem: Problem, arch: Arch) -> bool:
    longest_m, longest_n = 2 * max(64, problem.seqlen_q), 2 * max(64, problem.seqlen_k)
    return longest_m > config.BLOCK_M and longest_n > config.BLOCK_N


@kernel.rule("ordering blocks by length needs blocks of different lengths")
def block_order(config: Config, problem: Problem, arch: Arch) -> bool:
    return problem.causal or config.BLOCK_ORDER == 0


@kernel.rule("outputs take at most 128 registers of a thread, and P, beside more than 64, 32")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    # Compiling all showed it: beyond, 376 to 5000 bytes are spilled; within, up to 28 loads and
    # stores a tile of some 2000 instructions, and none at (2,16,2048,128) without a mask.
    outputs = warp_m(config) // 16 * problem.head_dim
    return outputs <= 256 and (outputs <= 128 or warp_m(config) // 16 * config.BLOCK_N <= 64)


@kernel.rule("loading ahead needs registers")
def ahead(config: Config, problem: Problem, arch: Arch) -> bool:
    numbers = warp_m(config) // 16 * (problem.head_dim + config.BLOCK_N)
    return not config.LOAD_AHEAD or numbers <= 192


@kernel.workspace
def workspace(config: Config, problem: Problem) -> dict[str, int]:
    p = problem
    images = 2 * p.batch * p.heads_kv * ceil_div(p.seqlen_k, config.BLOCK_N)
    return {"halves": images * image_bytes(config, p.head_dim)}


@kernel.stage("split", params=("BLOCK_N",), constants=("HEAD_DIM",))
def split(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        function="flash_fwd_fp32_halves_split",
        grid=(ceil_div(p.seqlen_k, config.BLOCK_N), p.batch * p.heads_kv, 2),
        threads=256,
        args=("k", "v", "halves", p.seqlen_k),
        smem_bytes=8 * 8,  # the range of each warp's numbers
    )


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    needed = registers_needed(config, p.head_dim)
    smem = smem_bytes(config, p.head_dim)
    blocks = arch.planned_blocks(config.NUM_WARPS * 32, needed, smem)
    grid = (ceil_div(p.seqlen_q, config.BLOCK_M), p.batch * p.heads)
    sizes = (p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale)
    return Launch(
        function="flash_fwd_fp32_halves",
        grid=(*(grid if config.BLOCK_ORDER == 0 else grid[::-1]), 1),
        threads=config.NUM_WARPS * 32,
        args=("q", "k", "v", "halves", "o", *sizes),
        smem_bytes=smem,
        defines={"MIN_BLOCKS": blocks},
        min_blocks_per_sm=blocks,
    )
