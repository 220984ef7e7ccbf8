"""flash_fwd_fp32_wide: fp32, heads of 512 to 8192 columns, few queries and keys. Memory-bound."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "flash_fwd_fp32_wide",
    summary="fp32 forward of very wide heads: blocks share a head by columns and exchange scores",
    params=(
        Param("SLICES", (1, 2, 4, 8, 16, 32), "blocks that share a head's columns"),
        Param("SCORES", ("cluster", "workspace"), "exchanged in a cluster, or by a second launch"),
        Param("MATH", ("ffma", "tf32x3"), "products in fp32, or each as three on tensor cores"),
        Param("BLOCK_M", (16, 32, 64), "query rows per block"),
        Param("BLOCK_N", (16, 32, 64), "keys per tile of scores"),
        Param("CHUNK", (16, 32), "columns that a warp multiplies at once"),
        Param("NUM_STAGES", (2, 3), "chunks in a warp's ring, including those in flight"),
        Param("NUM_WARPS", (4, 8), "warps per block"),
        Param(
            "SHARE_ROWS", (1, 0), "1: blocks of a cluster divide a softmax's rows; 0: each does all"
        ),
        Param("V_EARLY", (0, 1, 2), "first values load: 0 after Q K, 1 before; 2: all to L2"),
        Param("PDL", (0, 1), "workspace: the second launch begins early and waits for the first"),
    ),
    dtypes=("fp32",),
    head_dims=range(512, 8193, 4),
)


def pitch(config: Config) -> int:
    """Floats in a row of the ring, padded so that reads have no bank conflicts."""
    return config.CHUNK + (4 if config["MATH"] == "ffma" else 0)


def slice_columns(config: Config, head_dim: int) -> int:
    """Columns of one block, rounded up to whole chunks."""
    return ceil_div(head_dim, config.SLICES * config.CHUNK) * config.CHUNK


def vector(config: Config, head_dim: int) -> int:
    """Output columns that a lane computes at a time."""
    return 4 if config.BLOCK_M == 16 and slice_columns(config, head_dim) > 64 else 2


def key_warps(config: Config, head_dim: int) -> int:
    """Groups of warps that split the keys of P V because the slice is narrow."""
    blocks = ceil_div(slice_columns(config, head_dim), 32 * vector(config, head_dim))
    return config.NUM_WARPS // min(blocks, config.NUM_WARPS)


def smem_bytes(config: Config, problem: Problem) -> dict[str, int]:
    """Bytes per stage: P, scores, and the larger of the ring and the scratch of a merge."""
    columns = slice_columns(config, problem.head_dim)
    keys = ceil_div(problem.seqlen_k, config.BLOCK_N) * config.BLOCK_N
    ring = config.NUM_WARPS * config.NUM_STAGES * (config.BLOCK_M + config.BLOCK_N) * pitch(config)
    qk_warps = min(config.NUM_WARPS, columns // config.CHUNK)
    qk = max(ring, qk_warps * config.BLOCK_M * (config.BLOCK_N + 8))
    groups = key_warps(config, problem.head_dim)
    pv = groups * config.BLOCK_M * (columns + 4) if groups > 1 else 0
    p = keys * (config.BLOCK_M + 8)
    floats = {"fwd": p + config.BLOCK_M * keys + max(qk, pv), "scores": qk, "output": p + pv}
    return {name: 4 * count for name, count in floats.items()}


def registers_needed(config: Config, head_dim: int) -> int:
    """Registers of a lane: accumulators, operands, values in flight, and some for addresses."""
    values = 8 * vector(config, head_dim)
    scores = config.BLOCK_M * config.BLOCK_N // 32
    if config["MATH"] == "ffma":
        qk = scores + 4 * (config.BLOCK_N // 8) + 16
    else:
        qk = scores + config.BLOCK_M // 16 * (config.CHUNK + 4) + 16
    pv = config.BLOCK_M * vector(config, head_dim) + values + 16
    return max(qk, pv) + values + 30


@kernel.rule("a cluster needs sm_90 and has at most 16 blocks; more than 8 must be requested")
def clusters(config: Config, problem: Problem, arch: Arch) -> bool:
    if config["SCORES"] == "workspace":
        return True
    return config.SLICES == 1 or (config.SLICES <= 16 and arch.compute_capability >= (9, 0))


@kernel.rule("parameters of the other exchange keep their first value")
def exchange(config: Config, problem: Problem, arch: Arch) -> bool:
    if config["SCORES"] == "cluster":
        return config.PDL == 0 and (config.SLICES > 1 or config.SHARE_ROWS == 1)
    early = config.PDL == 0 or arch.compute_capability >= (9, 0)
    return early and config.SLICES > 1 and config.SHARE_ROWS == 1 and config.V_EARLY == 0


@kernel.rule("queries fill half a block, and keys one tile if 64 are enough")
def no_idle_rows(config: Config, problem: Problem, arch: Arch) -> bool:
    tile = next((n for n in (16, 32) if problem.seqlen_k <= n), 64)
    queries = config.BLOCK_M == 16 or config.BLOCK_M < 2 * problem.seqlen_q
    return queries and (config.BLOCK_N == tile or problem.seqlen_k > 64 > config.BLOCK_N == 32)


@kernel.rule("scores sum at most 2048 columns of a slice: longer sums exceed the error limit")
def short_sums(config: Config, problem: Problem, arch: Arch) -> bool:
    return slice_columns(config, problem.head_dim) <= 2048


@kernel.rule("each warp has a chunk of the slice")
def no_idle_warp(config: Config, problem: Problem, arch: Arch) -> bool:
    return slice_columns(config, problem.head_dim) >= config.CHUNK * config.NUM_WARPS


@kernel.rule("a ring holds at most what a warp multiplies of the slice")
def no_idle_stage(config: Config, problem: Problem, arch: Arch) -> bool:
    chunks = slice_columns(config, problem.head_dim) // config.CHUNK
    return config.NUM_STAGES == 2 or (config.NUM_STAGES - 1) * config.NUM_WARPS <= chunks


@kernel.rule("slices make 16 blocks or more, and half as many would make fewer than 256")
def grid_size(config: Config, problem: Problem, arch: Arch) -> bool:
    tiles = problem.query_tiles(config.BLOCK_M)
    blocks = tiles * config.SLICES
    return blocks >= min(16, tiles * 8) and (config.SLICES == 1 or blocks < 512)


@kernel.rule("accumulators and operands fit the registers of a thread, so nothing spills")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    return registers_needed(config, problem.head_dim) <= 250


def launch(config: Config, problem: Problem, stage: str, args: tuple[str, ...]) -> Launch:
    """The launch of one of the three stages."""
    p = problem
    scale = () if stage == "scores" else (p.scale,)
    return Launch(
        function="flash_fwd_fp32_wide" + ("" if stage == "fwd" else f"_{stage}"),
        grid=(config.SLICES * ceil_div(p.seqlen_q, config.BLOCK_M), p.batch * p.heads, 1),
        threads=config.NUM_WARPS * 32,
        args=(*args, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, *scale),
        smem_bytes=smem_bytes(config, p)[stage],
        defines={"CLUSTER": config.SLICES} if stage == "fwd" else {},
        programmatic=stage == "output" and config.PDL == 1,
    )


@kernel.workspace
def workspace(config: Config, problem: Problem) -> dict[str, int]:
    if config["SCORES"] == "cluster":
        return {}
    rows = ceil_div(problem.seqlen_q, config.BLOCK_M) * config.BLOCK_M
    keys = ceil_div(problem.seqlen_k, config.BLOCK_N) * config.BLOCK_N
    return {"partial": 4 * problem.batch * problem.heads * config.SLICES * rows * keys}


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    if config["SCORES"] != "cluster":
        return None
    return launch(config, problem, "fwd", ("q", "k", "v", "o"))


@kernel.stage("scores")
def scores(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    if config["SCORES"] == "cluster":
        return None
    return launch(config, problem, "scores", ("q", "k", "partial"))


@kernel.stage("output")
def output(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    if config["SCORES"] == "cluster":
        return None
    return launch(config, problem, "output", ("partial", "v", "o"))
