"""ladder_2_tiles: tiles of 64 keys in shared memory, 256 threads, scores in registers."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

BLOCK_N, THREADS = 64, 256

kernel = Family(
    "ladder_2_tiles",
    summary="ladder 2: rows share tiles of 64 keys in shared memory; 256 threads, no tensor cores",
    params=(Param("BLOCK_M", (32, 64), "query rows per block"),),
    head_dims=(64, 128),
)


@kernel.rule("rows are whole 16-byte chunks for every thread, and P fits where K was")
def rows_fit(config: Config, problem: Problem, arch: Arch) -> bool:
    chunks = config.BLOCK_M * problem.head_dim // 8
    return config.BLOCK_M % 16 == 0 and chunks % THREADS == 0 and problem.head_dim >= config.BLOCK_M


@kernel.rule("a block is smaller than twice the rows of a head, or small itself")
def no_idle_block(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.BLOCK_M < 2 * max(32, problem.seqlen_q)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    pitch = p.head_dim * 2 + 4  # bytes; one more bank, so that a column lies in different banks
    return Launch(
        function="ladder_2_tiles",
        grid=(ceil_div(p.seqlen_q, config.BLOCK_M), p.batch * p.heads, 1),
        threads=THREADS,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
        smem_bytes=(config.BLOCK_M + 2 * BLOCK_N) * pitch,
    )
