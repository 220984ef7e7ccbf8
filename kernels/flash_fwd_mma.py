"""flash_fwd_mma: fused forward on mma.sync and cp.async; scores and P never leave registers."""

from attnsweep.arch import Arch
from attnsweep.kernel import Config, Kernel, Launch, Param
from attnsweep.problem import Problem

kernel = Kernel(
    "flash_fwd_mma",
    summary="fused FlashAttention-2 forward: mma.sync, cp.async ring, online softmax in registers",
    params=(
        Param("BLOCK_M", (64, 128), "query rows per block"),
        Param("BLOCK_N", (32, 64, 128), "keys per tile"),
        Param("NUM_WARPS", (4, 8), "warps per block"),
        Param("KEY_GROUPS", (1, 2), "groups of warps that split each tile's keys and merge at the end"),
        Param("NUM_STAGES", (1, 2, 3), "depth of the K and V ring; 1 overlaps V with QK, K with PV"),
        Param("SWIZZLE", (0, 1), "bank conflicts avoided by 16 bytes of padding a row (0) or XOR (1)"),
        Param("Q_IN_REGISTERS", (0, 1), "Q fragments kept in registers (1) or read again each tile (0)"),
        Param("MIN_BLOCKS", (1, 2, 3), "blocks per SM that the registers are limited for"),
    ),
)


def warp_m(config: Config) -> int:
    """Query rows of one warp."""
    return config.BLOCK_M * config.KEY_GROUPS // config.NUM_WARPS


def smem_bytes(config: Config, head_dim: int) -> int:
    """Q, then the K and V ring or the merge of key groups, whichever is larger."""
    pitch = head_dim * 2 + (0 if config.SWIZZLE else 16)
    ring = 2 * config.NUM_STAGES * config.BLOCK_N * pitch
    words_per_lane = warp_m(config) // 16 * (head_dim // 2 + 4)
    merge = (config.KEY_GROUPS - 1) * config.NUM_WARPS // config.KEY_GROUPS * 128 * words_per_lane
    return config.BLOCK_M * pitch + max(ring, merge)


def registers_needed(config: Config, problem: Problem) -> int:
    """Outputs, scores and kept Q of one lane, and what fragments and addresses take on top."""
    tiles = warp_m(config) // 16
    head_dim, keys = problem.head_dim, config.BLOCK_N // config.KEY_GROUPS
    per_tile = head_dim // 2 + keys // 2 + (head_dim // 4 if config.Q_IN_REGISTERS else 0) + 8
    return tiles * per_tile + 60


@kernel.rule("a warp owns 16 or 32 queries")
def warp_rows(config: Config, problem: Problem, arch: Arch) -> bool:
    return warp_m(config) in (16, 32)


@kernel.rule("a tile is a whole number of 16-byte chunks for every thread")
def whole_chunks(config: Config, problem: Problem, arch: Arch) -> bool:
    chunks = config.BLOCK_N * problem.head_dim // 8
    return chunks % (config.NUM_WARPS * 32) == 0


@kernel.rule("outputs, scores and Q fit the registers of MIN_BLOCKS blocks")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    available = min(255, arch.registers_per_sm // (config.MIN_BLOCKS * config.NUM_WARPS * 32))
    return registers_needed(config, problem) <= available


@kernel.rule("MIN_BLOCKS blocks fit the shared memory of an SM")
def occupancy(config: Config, problem: Problem, arch: Arch) -> bool:
    block = smem_bytes(config, problem.head_dim) + arch.smem_reserved_per_block
    return config.MIN_BLOCKS * block <= arch.smem_per_sm


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        function="flash_fwd_mma",
        grid=(-(-p.seqlen_q // config.BLOCK_M), p.batch * p.heads, 1),
        threads=config.NUM_WARPS * 32,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
        smem_bytes=smem_bytes(config, p.head_dim),
        min_blocks_per_sm=config.MIN_BLOCKS,
    )
