"""flash_fwd_fp32_wgmma: fp32, heads of 512 to 8192 columns, few queries and keys, on Hopper."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import LOG2E, Problem, ceil_div
from attnsweep.family import hopper
from attnsweep.family.family import Config, Family, Launch, Param, TensorMap

kernel = Family(
    "flash_fwd_fp32_wgmma",
    summary="fp32 forward of very wide heads on Hopper: TMA, TF32 wgmma, scores added in clusters",
    params=(
        Param("SLICES", (4, 8, 16, 24, 32), "blocks that share a head's columns"),
        Param("CLUSTER", (4, 8, 16), "blocks that add scores; if equal to SLICES, one launch"),
        Param("BLOCK_M", (16, 32, 64), "query rows per block"),
        Param("WARPGROUPS", (2, 3, 4), "warpgroups of a block, which split its columns"),
        Param("NUM_STAGES", (2, 3, 4, 6, 7), "panels of 32 columns in a warpgroup's ring"),
        Param(
            "OUTPUT_SLICES", (0, 32), "SLICES of the second launch, without clusters; 0: the same"
        ),
        Param("OUTPUT_WARPGROUPS", (0, 2, 4), "WARPGROUPS of the second launch; 0: the same"),
        Param("OUTPUT_ALONE", (0, 1), "1: an SM runs at most one block of the second launch"),
        Param("PDL", (1, 2), "next launch may begin: 0 at the end, 1 at once, 2 after Q K"),
    ),
    min_arch="sm_90a",
    dtypes=("fp32",),
    head_dims=range(512, 8193, 4),
)
KEYS = 64


# More than half of the shared memory of an SM, but it leaves room for a block of the first launch.
MORE_THAN_HALF = 113 * 1024 + 512


def sharing(config: Config, stage: str) -> tuple[int, int]:
    """Slices of a head and warpgroups of a block in a stage's launch."""
    if stage == "output" and config.OUTPUT_SLICES:
        return config.OUTPUT_SLICES, config.OUTPUT_WARPGROUPS
    return config.SLICES, config.WARPGROUPS


def panels(config: Config, head_dim: int, stage: str = "scores") -> int:
    """Panels of 32 columns per warpgroup, rounded up to whole pairs."""
    slices, warpgroups = sharing(config, stage)
    return ceil_div(head_dim, slices * warpgroups * 64) * 2


def key_tiles(problem: Problem) -> int:
    return ceil_div(problem.seqlen_k, KEYS)


def stages(config: Config, problem: Problem, stage: str) -> int:
    """Panels in a warpgroup's ring. The second launch has room for all values at once."""
    if stage == "output":
        return max(config.NUM_STAGES, panels(config, problem.head_dim, stage))
    return config.NUM_STAGES


def smem_bytes(config: Config, problem: Problem, stage: str) -> int:
    """Bytes of rings, low parts of Q, scores to add, P (high and low) and barriers."""
    c = config
    _, warpgroups = sharing(c, stage)
    q_panel, kv_panel = c.BLOCK_M * 128, KEYS * 128
    scores = c.BLOCK_M * KEYS * 4 * key_tiles(problem)
    first, last = stage != "output", stage != "scores"
    ring = warpgroups * stages(c, problem, stage)
    out = ring * (kv_panel + q_panel * first + 8) + 16
    out += first * (warpgroups * 2 * q_panel + scores) + last * 2 * scores
    return max(out, MORE_THAN_HALF) if stage == "output" and c.OUTPUT_ALONE else out


@kernel.rule(
    "a block has 16, 32 or 64 queries, at most 4 warpgroups, PDL 0 to 2, OUTPUT_ALONE 0 or 1"
)
def known_values(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    known = c.BLOCK_M in (16, 32, 64) and c.WARPGROUPS <= 4 and c.PDL <= 2
    return known and c.OUTPUT_WARPGROUPS <= 4 and c.OUTPUT_ALONE <= 1


@kernel.rule("clusters of 2 to 16 blocks divide the slices and a block's rows")
def clusters(config: Config, problem: Problem, arch: Arch) -> bool:
    # In a launch without clusters a counted store is an illegal instruction (seen on an H200).
    c = config
    return c.SLICES % c.CLUSTER == 0 == c.BLOCK_M % c.CLUSTER and 2 <= c.CLUSTER <= 16


@kernel.rule("the second launch has at most 4 clusters' scores to add")
def few_to_add(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.SLICES // config.CLUSTER <= 4


@kernel.rule("at most 256 keys")
def few_keys(config: Config, problem: Problem, arch: Arch) -> bool:
    return problem.seqlen_k <= 256


@kernel.rule("queries fill half a block; blocks of 16 only up to 32 queries (each reads K and V)")
def no_idle_rows(config: Config, problem: Problem, arch: Arch) -> bool:
    c, queries = config, problem.seqlen_q
    return queries <= 32 if c.BLOCK_M == 16 else c.BLOCK_M < 2 * queries


@kernel.rule("3 warpgroups need two launches: in one, warps share rows and copies evenly")
def shared_evenly(config: Config, problem: Problem, arch: Arch) -> bool:
    # With three, some warps gave P to blocks beyond the cluster: a launch failure on an H200.
    return config.SLICES != config.CLUSTER or config.WARPGROUPS != 3


@kernel.rule("settings of the second launch need two launches and differ from the first's")
def second_of_its_own(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    own = (c.OUTPUT_SLICES, c.OUTPUT_WARPGROUPS)
    if c.SLICES == c.CLUSTER:
        return own == (0, 0) and not c.OUTPUT_ALONE
    return own == (0, 0) or (0 not in own and own != (c.SLICES, c.WARPGROUPS))


@kernel.rule("OUTPUT_ALONE needs blocks of which two would fit an SM")
def alone_by_choice(config: Config, problem: Problem, arch: Arch) -> bool:
    # At 122 registers a thread there is no room for a second block of 4 warpgroups.
    c = config
    if not c.OUTPUT_ALONE:
        return True
    two = smem_bytes(Config({**c, "OUTPUT_ALONE": 0}), problem, "output") < MORE_THAN_HALF
    return sharing(c, "output")[1] <= 2 and two


@kernel.rule("the head fills three quarters of the slices' columns")
def no_idle_columns(config: Config, problem: Problem, arch: Arch) -> bool:
    for stage in ("scores", "output"):
        slices, warpgroups = sharing(config, stage)
        columns = 32 * panels(config, problem.head_dim, stage) * warpgroups * slices
        if 3 * columns > 4 * problem.head_dim and slices * warpgroups > 8:
            return False
    return True


@kernel.rule("a warpgroup has at most 256 columns, or 128 with the registers of 64 queries")
def short_sums(config: Config, problem: Problem, arch: Arch) -> bool:
    return panels(config, problem.head_dim) <= (4 if config.BLOCK_M == 64 else 8)


@kernel.rule("a lane of the second launch has at most 32 scores, so nothing spills")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    turns = ceil_div(c.BLOCK_M, 8 * sharing(c, "output")[1])
    return c.SLICES == c.CLUSTER or turns * 4 * key_tiles(problem) <= 32


@kernel.rule("a ring holds at most what passes through it: Q and K, and in one launch V")
def no_idle_stage(config: Config, problem: Problem, arch: Arch) -> bool:
    one_launch = config.SLICES == config.CLUSTER
    return config.NUM_STAGES <= panels(config, problem.head_dim) * (2 if one_launch else 1)


@kernel.rule("PDL 2 needs room on an SM for the second launch next to the first")
def second_begins_late(config: Config, problem: Problem, arch: Arch) -> bool:
    c, reserved = config, arch.smem_reserved_per_block
    room = arch.smem_per_sm - 2 * reserved - smem_bytes(c, problem, "scores")
    two = c.SLICES != c.CLUSTER and c.WARPGROUPS == 2 == sharing(c, "output")[1]
    both = two and smem_bytes(c, problem, "output") <= room
    return c.PDL != 2 or both


@kernel.rule("slices make 16 blocks or more, and half as many would make fewer than 256")
def grid_size(config: Config, problem: Problem, arch: Arch) -> bool:
    tiles = problem.query_tiles(config.BLOCK_M)
    blocks = tiles * max(config.SLICES, config.OUTPUT_SLICES)
    return blocks >= min(16, tiles * 8) and (config.SLICES == 4 or blocks < 512)


def launch(config: Config, problem: Problem, stage: str) -> Launch:
    """The launch of one of the three stages."""
    c, p = config, problem

    def tensor_map(buffer: str, heads: int, rows: int, box: int) -> TensorMap:
        """A tensor map in halves of a float: descriptors here count 16-bit elements."""
        return hopper.tensor_map(buffer, heads, rows, 2 * p.head_dim, box=(64, box))

    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    slices, warpgroups = sharing(c, stage)
    defines = {
        "SLICES": slices,
        "WARPGROUPS": warpgroups,
        "CLUSTERS": c.SLICES // c.CLUSTER,
        "NUM_STAGES": stages(c, p, stage),
        "MAX_TILES": key_tiles(p),
    }
    if stage != "output":
        defines["CLUSTER"] = c.CLUSTER
    return Launch(
        function="flash_fwd_fp32_wgmma" + ("" if stage == "fwd" else f"_{stage}"),
        grid=(slices * ceil_div(p.seqlen_q, c.BLOCK_M), heads, 1),
        threads=warpgroups * 128,
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
    rows = p.batch * p.heads * ceil_div(p.seqlen_q, c.BLOCK_M) * c.BLOCK_M
    return {"partial": 4 * rows * (c.SLICES // c.CLUSTER) * KEYS * key_tiles(p)}


# SLICES, WARPGROUPS and NUM_STAGES differ between launches, so `launch` defines them.
FIRST = ("BLOCK_M", "PDL")
OUTPUT = (*FIRST, "CLUSTER", "OUTPUT_SLICES", "OUTPUT_WARPGROUPS", "OUTPUT_ALONE")


@kernel.stage("fwd", params=FIRST)
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    return launch(config, problem, "fwd") if config.SLICES == config.CLUSTER else None


@kernel.stage("scores", params=FIRST)
def scores(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    return launch(config, problem, "scores") if config.SLICES != config.CLUSTER else None


@kernel.stage("output", params=OUTPUT)
def output(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    return launch(config, problem, "output") if config.SLICES != config.CLUSTER else None
