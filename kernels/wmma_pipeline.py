"""wmma_pipeline: WMMA fragments for both products, a cp.async ring, and warps that only copy."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

PADDED, XOR = 1, 3

kernel = Family(
    "wmma_pipeline",
    summary="WMMA 16x16x16 for both products, cp.async ring with producer warps, from sm_80",
    params=(
        Param("BLOCK_M", (64,), "query rows per block, 16 per compute warp"),
        Param("BLOCK_N", (64,), "keys per tile"),
        Param("STAGES", (2,), "tiles of K and V in the ring: 1 to 4"),
        Param("PRODUCER_WARPS", (1, 0), "warps that only copy: 0 (all copy), 1, 2 or 4"),
        Param(
            "EARLY", (0,), "tiles awaited before they are used: cp.async.wait_group STAGES-1-EARLY"
        ),
        Param(
            "LAYOUT",
            (3, 0),
            "rows of Q, K, V: 0 plain, 1 padded, 2 subtiles of 16x16, 3 XOR swizzle",
        ),
        Param(
            "O_IN_REGISTERS",
            (1, 0),
            "output fragments in registers (1) or in shared memory (0)",
        ),
        Param(
            "CTAS", (0,), "0: a block per tile of queries; otherwise this many blocks share them"
        ),
    ),
    head_dims=(64, 128),
)


def smem_bytes(config: Config, head_dim: int) -> int:
    """Bytes of Q and the ring, and of each warp's scores, row factors and output."""
    c = config
    pitch = 2 * head_dim + (16 if c.LAYOUT == PADDED else 0)
    output = 0 if c.O_IN_REGISTERS else head_dim + 4
    of_a_row = 4 * (c.BLOCK_N + 4 + 1 + output)
    return int((c.BLOCK_M + 2 * c.STAGES * c.BLOCK_N) * pitch + c.BLOCK_M * of_a_row)


def registers_needed(config: Config, head_dim: int) -> int:
    """Registers: output, queries or scores, and extra for other fragments and addresses."""
    output = head_dim // 2 if config.O_IN_REGISTERS else 0
    return output + max(head_dim // 4, config.BLOCK_N // 2) + 84


@kernel.rule("whole fragments; at most 32 warps; existing stages and layouts")
def known_values(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    fragments = c.BLOCK_M % 16 == 0 and c.BLOCK_N % 32 == 0
    return (
        fragments
        and 1 <= c.STAGES <= 4
        and 0 <= c.LAYOUT <= XOR
        and c.PRODUCER_WARPS in (0, 1, 2, 4)
    )


@kernel.rule("EARLY is less than STAGES: the ring also holds the tile in use")
def early_within_ring(config: Config, problem: Problem, arch: Arch) -> bool:
    return 0 <= config.EARLY < config.STAGES


@kernel.rule("a tile of K is whole 16-byte chunks for every copying thread")
def whole_chunks(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    copying = 32 * (c.PRODUCER_WARPS or c.BLOCK_M // 16)
    return c.BLOCK_N * problem.head_dim // 8 % copying == 0


@kernel.rule("a tile is shorter than twice its sequence, or short itself")
def no_idle_tile(config: Config, problem: Problem, arch: Arch) -> bool:
    longest_m, longest_n = 2 * max(64, problem.seqlen_q), 2 * max(64, problem.seqlen_k)
    return longest_m > config.BLOCK_M and longest_n > config.BLOCK_N


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    items = ceil_div(p.seqlen_q, config.BLOCK_M) * p.batch * p.heads
    threads, smem = config.BLOCK_M * 2 + 32 * config.PRODUCER_WARPS, smem_bytes(config, p.head_dim)
    blocks = arch.planned_blocks(threads, registers_needed(config, p.head_dim), smem)
    sizes = (items, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale)
    return Launch(
        function="wmma_pipeline",
        grid=(min(items, config.CTAS) if config.CTAS else items, 1, 1),
        threads=threads,
        args=("q", "k", "v", "o", *sizes),
        smem_bytes=smem,
        defines={"MIN_BLOCKS": blocks},
        min_blocks_per_sm=blocks,
    )
