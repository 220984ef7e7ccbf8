"""flash_fwd_mma: fused forward on mma.sync and cp.async; scores and P never leave registers."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "flash_fwd_mma",
    summary="fused FlashAttention-2 forward: mma.sync, cp.async ring, online softmax in registers",
    params=(
        Param("BLOCK_M", (64, 128), "query rows per block"),
        Param("BLOCK_N", (32, 64, 128, 256), "keys per tile"),
        Param("NUM_WARPS", (4, 8), "warps per block"),
        Param("KEY_GROUPS", (1, 2), "groups of warps that split the keys of a tile; merged last"),
        Param("NUM_STAGES", (1, 2, 3), "K and V ring; with 1, V loads under QK and K under PV"),
        Param("SWIZZLE", (1, 0), "rows in shared memory: chunks permuted by XOR (1) or padded (0)"),
        Param("Q_IN_REGISTERS", (0, 1), "Q fragments in registers (1) or read again each tile (0)"),
        Param("BLOCK_ORDER", (0, 1, 2), "0 by head; causal: 1 longest first, 2 long next to short"),
    ),
    head_dims=range(8, 257, 8),
    usual_head_dims=(64, 128, 256, 72),
    masks=("full", "causal", "window"),
)


def columns(head_dim: int) -> int:
    """Columns that are multiplied: those of a row, and zeros up to 16."""
    return ceil_div(head_dim, 16) * 16


def lanes_of_row(head_dim: int) -> int:
    """Threads that load a row, 16 bytes each: a power of two, some of which may be idle."""
    return 1 << (columns(head_dim) // 8 - 1).bit_length()


def warp_m(config: Config) -> int:
    """Query rows of one warp."""
    return config.BLOCK_M * config.KEY_GROUPS // config.NUM_WARPS


def smem_bytes(config: Config, head_dim: int) -> int:
    """Bytes of Q and the larger of the K and V ring and the merge of key groups."""
    pitch = ceil_div(head_dim, 64) * 128 + (0 if config.SWIZZLE else 16)
    ring = 2 * config.NUM_STAGES * config.BLOCK_N * pitch
    words_per_lane = warp_m(config) // 16 * (columns(head_dim) // 2 + 4)
    merge = (config.KEY_GROUPS - 1) * config.NUM_WARPS // config.KEY_GROUPS * 128 * words_per_lane
    return config.BLOCK_M * pitch + max(ring, merge)


def registers_needed(config: Config, head_dim: int, arch: Arch) -> int:
    """Registers of a lane: outputs, scores, kept Q, and extra for fragments and addresses."""
    keys = config.BLOCK_N // config.KEY_GROUPS
    kept_q = columns(head_dim) // 4 if config.Q_IN_REGISTERS else 0
    on_top = 60 if arch.compute_capability < (10, 0) else 76
    return warp_m(config) // 16 * (columns(head_dim) // 2 + keys // 2 + kept_q + 8) + on_top


@kernel.rule("a warp owns 16 or 32 queries and whole fragments of keys")
def warp_rows(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.BLOCK_N % (16 * config.KEY_GROUPS) == 0 and warp_m(config) in (16, 32)


@kernel.rule("Q, K and V tiles are whole 16-byte chunks for every thread")
def whole_chunks(config: Config, problem: Problem, arch: Arch) -> bool:
    per_row, threads = lanes_of_row(problem.head_dim), config.NUM_WARPS * 32
    return config.BLOCK_M * per_row % threads == 0 and config.BLOCK_N * per_row % threads == 0


@kernel.rule("a tile is shorter than twice its sequence, or short itself")
def no_idle_tile(config: Config, problem: Problem, arch: Arch) -> bool:
    longest_m, longest_n = 2 * max(64, problem.seqlen_q), 2 * max(64, problem.seqlen_k)
    return longest_m > config.BLOCK_M and longest_n > config.BLOCK_N


@kernel.rule("ordering blocks by length needs blocks of different lengths")
def block_order(config: Config, problem: Problem, arch: Arch) -> bool:
    return problem.causal or config.BLOCK_ORDER == 0


@kernel.rule("outputs, scores and Q fit the registers of a thread, so nothing spills")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    needed = registers_needed(config, problem.head_dim, arch)
    # The fastest tiles take all 255 registers and do not spill. Compiling them showed it; the
    # estimate is above 250 for them.
    tight = config.KEY_GROUPS == 1 and not config.Q_IN_REGISTERS
    tight = tight and (config.NUM_STAGES < 3 or arch.compute_capability >= (9, 0))
    return needed <= (270 if tight else 250)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    needed = registers_needed(config, p.head_dim, arch)
    smem = smem_bytes(config, p.head_dim)
    blocks = arch.planned_blocks(config.NUM_WARPS * 32, needed, smem)
    grid = (ceil_div(p.seqlen_q, config.BLOCK_M), p.batch * p.heads)
    window = p.diagonals if p.mask.kind == "window" else ()
    return Launch(
        function="flash_fwd_mma",
        grid=(*(grid if config.BLOCK_ORDER == 0 else grid[::-1]), 1),
        threads=config.NUM_WARPS * 32,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale, *window),
        smem_bytes=smem,
        defines={"MIN_BLOCKS": blocks, **({"WINDOW": 1} if window else {})},
        min_blocks_per_sm=blocks,
    )
