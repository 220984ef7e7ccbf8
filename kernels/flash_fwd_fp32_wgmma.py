"""flash_fwd_fp32_wgmma: fp32, heads of 512 to 8192 columns, few queries and keys, on Hopper."""

from attnsweep.arch import Arch
from attnsweep.kernel import Config, Kernel, Launch, Param, TensorMap
from attnsweep.problem import Problem

kernel = Kernel(
    "flash_fwd_fp32_wgmma",
    summary="fp32 forward of very wide heads on Hopper: TMA, TF32 wgmma, scores added in clusters",
    params=(
        Param("SLICES", (4, 8, 16, 32), "blocks that share a head's columns"),
        Param("CLUSTER", (4, 8, 16), "of them, those that add scores; if all, one launch"),
        Param("BLOCK_M", (16, 32, 64), "query rows per block"),
        Param("WARPGROUPS", (2, 4), "warpgroups of a block, which split its columns"),
        Param("NUM_STAGES", (2, 3, 4, 6, 7), "panels of 32 columns in a warpgroup's ring"),
        Param("PDL", (1, 2), "the launch behind may begin 1 at once, 2 after Q K; 0: at the end"),
    ),
    min_arch="sm_90a",
    dtypes=("fp32",),
    head_dims=range(512, 8193, 4),
)
LOG2E = 1.4426950408889634
KEYS = 64


def panels(config: Config, head_dim: int) -> int:
    """Panels of 32 columns of a warpgroup: whole pairs."""
    return -(-head_dim // (config.SLICES * config.WARPGROUPS * 64)) * 2


def key_tiles(problem: Problem) -> int:
    return -(-problem.seqlen_k // KEYS)


def stages(config: Config, problem: Problem, stage: str) -> int:
    """Panels of a warpgroup's ring. The second launch has room for all values at once."""
    if stage == "output":
        return max(config.NUM_STAGES, panels(config, problem.head_dim))
    return config.NUM_STAGES


def smem_bytes(config: Config, problem: Problem, stage: str) -> int:
    """Rings; low parts of Q; scores to add; P, high and low; barriers."""
    c = config
    q_panel, kv_panel = c.BLOCK_M * 128, KEYS * 128
    scores = c.BLOCK_M * KEYS * 4 * key_tiles(problem)
    first, last = stage != "output", stage != "scores"
    ring = c.WARPGROUPS * stages(c, problem, stage)
    out = ring * (kv_panel + q_panel * first + 8) + 16
    return out + first * (c.WARPGROUPS * 2 * q_panel + scores) + last * 2 * scores


@kernel.rule("a block has 16, 32 or 64 queries, at most 4 warpgroups, and PDL is 0 to 2")
def known_values(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.BLOCK_M in (16, 32, 64) and config.WARPGROUPS <= 4 and config.PDL <= 2


@kernel.rule("clusters divide the slices, have 2 to 16 blocks, and as many rows or more")
def clusters(config: Config, problem: Problem, arch: Arch) -> bool:
    # In a launch without clusters a counted store is an illegal instruction (seen on an H200).
    c = config
    return c.SLICES % c.CLUSTER == 0 and 2 <= c.CLUSTER <= min(16, c.BLOCK_M)


@kernel.rule("the second launch has at most 4 clusters' scores to add")
def few_to_add(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.SLICES // config.CLUSTER <= 4


@kernel.rule("at most 256 keys")
def few_keys(config: Config, problem: Problem, arch: Arch) -> bool:
    return problem.seqlen_k <= 256


@kernel.rule("queries fill half a block, and blocks of 16 are for up to 32: all read K and V")
def no_idle_rows(config: Config, problem: Problem, arch: Arch) -> bool:
    c, queries = config, problem.seqlen_q
    return queries <= 32 if c.BLOCK_M == 16 else c.BLOCK_M < 2 * queries


@kernel.rule("three quarters of the slices' columns are there")
def no_idle_columns(config: Config, problem: Problem, arch: Arch) -> bool:
    c, head_dim = config, problem.head_dim
    columns = 32 * panels(c, head_dim) * c.WARPGROUPS * c.SLICES
    return 3 * columns <= 4 * head_dim or c.SLICES * c.WARPGROUPS <= 8


@kernel.rule("a warpgroup has at most 256 columns, or 128 with the registers of 64 queries")
def short_sums(config: Config, problem: Problem, arch: Arch) -> bool:
    return panels(config, problem.head_dim) <= (4 if config.BLOCK_M == 64 else 8)


@kernel.rule("a lane of the second launch has at most 32 scores, so that nothing spills")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    turns = -(-c.BLOCK_M // (8 * c.WARPGROUPS))
    return c.SLICES == c.CLUSTER or turns * 4 * key_tiles(problem) <= 32


@kernel.rule("a ring is no longer than what passes through it: Q and K, and in one launch V")
def no_idle_stage(config: Config, problem: Problem, arch: Arch) -> bool:
    one_launch = config.SLICES == config.CLUSTER
    return config.NUM_STAGES <= panels(config, problem.head_dim) * (2 if one_launch else 1)


@kernel.rule("the second of two launches may begin late: it needs room beside the first")
def second_begins_late(config: Config, problem: Problem, arch: Arch) -> bool:
    c, reserved = config, arch.smem_reserved_per_block
    room = arch.smem_per_sm - 2 * reserved - smem_bytes(c, problem, "scores")
    both = c.SLICES != c.CLUSTER and c.WARPGROUPS == 2 and smem_bytes(c, problem, "output") <= room
    return c.PDL != 2 or both


@kernel.rule("a head has slices for 16 blocks in all, and half as many would not make 256")
def grid_size(config: Config, problem: Problem, arch: Arch) -> bool:
    tiles = problem.batch * problem.heads * -(-problem.seqlen_q // config.BLOCK_M)
    blocks = tiles * config.SLICES
    return blocks >= min(16, tiles * 8) and (config.SLICES == 4 or blocks < 512)


def launch(config: Config, problem: Problem, stage: str) -> Launch:
    """What the three stages have in common."""
    c, p = config, problem

    def tensor_map(buffer: str, heads: int, rows: int, box: int) -> TensorMap:
        """In halves of a float, which is what a descriptor counts."""
        return TensorMap(
            buffer,
            dims=(2 * p.head_dim, rows, heads),
            strides=(4 * p.head_dim, 4 * rows * p.head_dim),
            box=(64, box, 1),
        )

    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    defines = {"NUM_STAGES": stages(c, p, stage), "MAX_TILES": key_tiles(p)}
    if stage != "output":
        defines["CLUSTER"] = c.CLUSTER
    return Launch(
        function="flash_fwd_fp32_wgmma" + ("" if stage == "fwd" else f"_{stage}"),
        grid=(c.SLICES * -(-p.seqlen_q // c.BLOCK_M), heads, 1),
        threads=c.WARPGROUPS * 128,
        args=(
            tensor_map("q", heads, p.seqlen_q, c.BLOCK_M),
            tensor_map("k", heads_kv, p.seqlen_k, KEYS),
            tensor_map("v", heads_kv, p.seqlen_k, KEYS),
            tensor_map("o", heads, p.seqlen_q, c.BLOCK_M),
            *("partial", p.heads // p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale * LOG2E),
        ),
        smem_bytes=smem_bytes(c, p, stage),
        defines=defines,
        programmatic=stage == "output" or c.PDL == 1,
    )


@kernel.workspace
def workspace(config: Config, problem: Problem) -> dict[str, int]:
    c, p = config, problem
    if c.SLICES == c.CLUSTER:
        return {"partial": 16}
    rows = p.batch * p.heads * -(-p.seqlen_q // c.BLOCK_M) * c.BLOCK_M
    return {"partial": 4 * rows * (c.SLICES // c.CLUSTER) * KEYS * key_tiles(p)}


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    return launch(config, problem, "fwd") if config.SLICES == config.CLUSTER else None


@kernel.stage("scores")
def scores(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    return launch(config, problem, "scores") if config.SLICES != config.CLUSTER else None


@kernel.stage("output")
def output(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    return launch(config, problem, "output") if config.SLICES != config.CLUSTER else None
