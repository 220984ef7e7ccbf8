"""The recorded runs that GPU tests make packages of, and the calls that those packages must serve.

tests/recorded/test_serve_recorded.py asks the table of each card for them, without a GPU.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unguarded import unguarded as unguarded

from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Trial
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family
from attnsweep.serve.export import export
from attnsweep.serve.export_code import compile_for_models, gpu_row
from attnsweep.serve.package_kernels import spares
from attnsweep.serve.runtime.families import FP8, kind_of_code
from attnsweep.serve.runtime.table import CUBINS, FORMAT, TABLE, GpuKey, Table, read_table
from attnsweep.store.rows import row_bytes
from attnsweep.store.run import TRIALS, Run, find_runs

RESULTS = Path(__file__).parent.parent.parent / "results"
RUNS = frozenset({"flash_short", "flash_training", "flash_long", "flash_dims"})
"""In 16 bits, of each card: short and long shapes, and every head_dim."""
FP8_RUNS = frozenset({"fp8_h100"})


# ---- runs ----
def cards(names: Collection[str]) -> dict[GpuKey, list[Path]]:
    """The runs of these names of each kind of GPU that has all of them."""
    found: dict[GpuKey, list[Path]] = defaultdict(list)
    for run in find_runs(RESULTS):
        if run.name in names:
            facts = json.loads((run / "environment.json").read_text())
            capability = arch_named(facts["arch"]).compute_capability
            found[GpuKey(capability, facts["sm_count"], facts["l2_bytes"])].append(run)
    return {
        key: runs for key, runs in sorted(found.items()) if {run.name for run in runs} == set(names) and key.l2_bytes
    }


def runs_for(key: GpuKey, names: Collection[str]) -> list[Path]:
    """The runs of a GPU's kind, or else of the kind next to it that runs the same machine code.

    Which kernel is right does not depend on the card, although which is fast does.
    """
    found = cards(names)
    same = [each for each in found if each.compute_capability == key.compute_capability]

    def unlike(each: GpuKey) -> tuple[int, int]:
        return abs(each.sm_count - key.sm_count), abs(each.l2_bytes - key.l2_bytes)

    return found[min(same, key=unlike)] if same else []


def exported_for(
    key: GpuKey, runs: Sequence[Path], place: Path, name: str, compilers: Mapping[str, Compiler] | None = None
) -> Path:
    """A project with a package of runs of one kind, which takes a GPU for one of that kind."""
    done = export(runs, place / name, discover(), name=name, compilers=compilers)
    path = done.directory / name / TABLE
    path.write_text(json.dumps(taken_for(json.loads(path.read_text()), key)))
    return done.directory


def taken_for(raw: dict[str, Any], key: GpuKey) -> dict[str, Any]:
    """A table of one kind of GPU under the key of another."""
    for gpus in (raw["gpus"], raw.get("fp8", [])):
        assert len(gpus) <= 1, "one key for several kinds"
        for gpu in gpus:
            gpu |= key._asdict()
    return raw


def changed(run: Run, place: Path, trials: Iterable[Trial]) -> Path:
    """A copy of a recorded run with other rows."""
    place.mkdir()
    shutil.copy(run.directory / "environment.json", place)
    (place / TRIALS).write_bytes(b"".join(map(row_bytes, trials)))
    return place


# ---- calls in 16 bits ----
def call(batch: int, heads: int, heads_kv: int, seqlen: int, head_dim: int, dtype: Any, causal: bool) -> Problem:
    """A call with as many queries as keys."""
    return Problem(batch, heads, heads_kv, seqlen, seqlen, head_dim, dtype, causal=causal)


BOTH = (False, True)
OUTPUTS = tuple(
    call(batch, 16, heads_kv, seqlen, head_dim, dtype, causal)
    for batch, seqlen in ((1, 1024), (3, 333), (2, 4000))
    for heads_kv, head_dim, dtype in ((16, 64, "fp16"), (16, 128, "bf16"), (4, 128, "bf16"))
    for causal in BOTH
)
GRADIENTS = tuple(call(1, 16, heads_kv, 700, 64, "fp16", causal) for heads_kv in (16, 4) for causal in BOTH)
PLAIN = call(1, 16, 16, 1024, 64, "fp16", False)
"""In graphs, in threads, and at other addresses; also with the guard of a package."""
COMPILED = call(2, 16, 16, 512, 64, "fp16", True)
MAPPED = tuple(call(2, 16, 4, 1000, head_dim, "bf16", False) for head_dim in (64, 128))
CHANGING = tuple(range(500, 1200))
"""Lengths of calls whose shapes keep changing."""
SHIPPED = tuple(call(4, 16, 16, 2048, head_dim, "bf16", causal) for head_dim in (64, 128) for causal in BOTH)
"""By the winners that come with attnsweep, on each card that they are of."""


def changing(seqlen: int) -> Problem:
    """The call of a length of CHANGING."""
    return call(1, 16, 16, seqlen, 64, "fp16", False)


# ---- FP8 ----
FP8_DTYPES = ("e4m3_tensor", "e4m3", "e4m3_block")
FP8_SIZES = (
    *((2, 8, 8, 1000, 1000), (1, 8, 2, 333, 333), (1, 4, 4, 2900, 2900), (3, 4, 4, 65, 65)),
    *((3, 4, 2, 64, 64), (2, 8, 4, 1, 777), (1, 4, 1, 200, 129), (2, 3, 3, 17, 17)),
)


def off(problem: Problem) -> Problem:
    """Half a tile off a problem."""
    return replace(problem, seqlen_q=problem.seqlen_q - 37, seqlen_k=problem.seqlen_k - 37)


def fp8_table(key: GpuKey, compiler: Compiler, place: Path, notes: list[str]) -> Table:
    """A package of every head_dim, mask and kind of scales for a GPU. notes: its spills."""
    family = discover()[FP8.kernel.name]
    arch, won = arch_named(family.min_arch), _of_every_kind(family)
    codes = dict.fromkeys(won)
    for config, problem in won:
        codes.update(dict.fromkeys(spares(config, problem, family, arch)))
    (place / CUBINS).mkdir()
    labels = sorted({config.label for config, _ in codes})
    kernels = []
    for config, problem in codes:
        stages, files, spills = compile_for_models(family, config, problem, compiler).done()
        notes += [config.label] * (spills > 0)
        for file, data in files.items():
            (place / CUBINS / file).write_bytes(data)
        kernel = dict(zip(("head_dim", "dtype", "mask"), kind_of_code(problem), strict=True))
        kernels.append(kernel | {"config": labels.index(config.label), "stages": stages, "family": family.name})
    winners = [{"problem": problem.label, "kernel": n, "time_us": 1.0} for n, (_, problem) in enumerate(won)]
    of_gpu = gpu_row(key, ["this"]) | {"winners": winners, "spare": [*range(len(won), len(codes))]}
    raw = {"format": FORMAT, "attnsweep": "0", "configs": labels, "kernels": kernels, "gpus": [], "fp8": [of_gpu]}
    (place / TABLE).write_text(json.dumps(raw))
    return read_table(place)


def _of_every_kind(family: Family) -> list[tuple[Config, Problem]]:
    arch, winners = arch_named(family.min_arch), []
    for dtype in ("e4m3", "e4m3_block"):
        for head_dim in family.head_dims:
            for causal in BOTH:
                configs = zip((1000, 3000), _configs(family, head_dim), strict=True)
                for seqlen, config in configs:
                    problem = Problem(2, 8, 8, seqlen, seqlen, head_dim, dtype, causal=causal)
                    own = Config({**config, "ORDER": int(causal)})
                    assert family.refused_by(own, problem, arch) is None, (own.label, problem.label)
                    winners.append((own, problem))
    return winners


def _configs(family: Family, head_dim: int) -> list[Config]:
    """Configs that no rule refuses at 1000 tokens, with each way to keep or to save accuracy."""
    first = {param.name: param.values[0] for param in family.params} | {"BLOCK_N": 64}
    first |= {"WARPGROUPS": 2, "OVERLAP": 1, "HEADROOM": 0, "LSE": 0}
    few = {"MAXIMA": 2, "HEADROOM": 5} if head_dim < 256 else {}
    return [Config(first | {"INTERVAL": 64}), Config(first | few)]
