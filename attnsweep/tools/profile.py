"""Hardware counters of chosen candidates, through NVIDIA's Nsight Compute (`ncu`).

`ncu` runs a small process of ours that launches each candidate once between the profiler's start
and stop; one launch is one line of its CSV. Each launch runs alone, as many times as the counters
need, so its duration is not that of a sweep: the counters show where the time goes, not how much it
is.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.choose.columns import chosen_by
from attnsweep.choose.ranking import rank
from attnsweep.compile.calls import build_of
from attnsweep.compile.launches import Candidate, LaunchPlan
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core import cases
from attnsweep.core.errors import (
    KernelError,
    NoGpuError,
    SpecError,
    StoreError,
    ToolchainError,
    reason,
)
from attnsweep.core.files import write_file
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Trial
from attnsweep.family.family import Family, values_in
from attnsweep.specs.yaml_file import nearest
from attnsweep.store.outputs import FILE, read
from attnsweep.store.run import Run
from attnsweep.verify.oracle import oracle_of

_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_SECTOR_BYTES = 32
_STALL = "smsp__average_warps_issue_stalled_"
# Figure to ncu's metric and the factor to our unit. Names: Nsight Compute's metrics reference and
# `ncu --query-metrics`; metrics that a chip lacks are left out.
METRICS: dict[str, tuple[str, float]] = {
    "duration_us": ("gpu__time_duration.sum", 1e-3),
    "dram_read_bytes": ("dram__bytes_read.sum", 1.0),
    "dram_write_bytes": ("dram__bytes_write.sum", 1.0),
    "l2_read_bytes": ("lts__t_sectors_op_read.sum", _SECTOR_BYTES),
    "l2_write_bytes": ("lts__t_sectors_op_write.sum", _SECTOR_BYTES),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct", 1.0),
    "tensor_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1.0),
    "exp2_percent": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1.0),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "shared_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", 1.0),
}
STALLS = (
    *("barrier", "branch_resolve", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "no_instruction"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
"""Reasons why a warp did not issue: warps in that state for each instruction issued."""


def find_ncu() -> Path | None:
    """Nsight Compute's command line: on PATH, or where its and CUDA's installers put it."""
    found = shutil.which("ncu")
    if found is not None:
        return Path(found)
    places = [
        *Path("/opt/nvidia/nsight-compute").glob("*/ncu"),
        *Path("/usr/local").glob("cuda*/bin/ncu"),
    ]
    return max(places, default=None)


def count(
    candidates: Sequence[Candidate], ncu: Path | None = None, *, keep: Path | None = None
) -> list[list[dict[str, Any]]]:
    """The counters of every launch of each candidate's timed call, in order of issue.

    stage: its name. figures: values of METRICS. stalls: warps per issue, largest first. keep: where
    ncu writes its report, `NAME.ncu-rep`, which Nsight Compute opens. Raises NoGpuError without
    `ncu` or without the right to read counters, ToolchainError if ncu fails.
    """
    ncu = ncu or find_ncu()
    if ncu is None:
        raise NoGpuError(
            "hardware counters need Nsight Compute (ncu), which is not installed",
            hint="install the CUDA toolkit, or only https://developer.nvidia.com/nsight-compute",
        )
    metrics = _known(ncu)
    with tempfile.TemporaryDirectory(prefix="attnsweep-") as place:
        work = Path(place) / "candidates"
        work.write_bytes(pickle.dumps(list(candidates)))
        command = [
            *(str(ncu), "--csv", "--page", "raw", "--print-units", "base"),
            # Leave the clocks alone. Keep the caches too: a stage finds in L2 what the one before
            # it left.
            *("--clock-control", "none", "--cache-control", "none"),
            # Run the program again for each set of counters. By default ncu saves and restores
            # memory between them, which would replace the contents of L2.
            *("--replay-mode", "application"),
            *("--profile-from-start", "off", "--target-processes", "all"),
            *("--metrics", ",".join(metrics.values())),
            *(() if keep is None else ("--export", str(keep))),
            *(sys.executable, "-m", "attnsweep.tools.profile", str(work)),
        ]
        done = _ran(command)
    refused = _NO_PERMISSION in done.stdout + done.stderr
    if keep is not None and not done.returncode and not refused:  # the report holds the counters
        shown = [str(ncu), "--import", str(keep), "--csv", "--page", "raw"]
        done = _ran([*shown, "--print-units", "base"])
    said = done.stdout + done.stderr
    if refused:
        raise NoGpuError(
            "the driver lets only root read hardware counters",
            hint="run as root, or see https://developer.nvidia.com/ERR_NVGPUCTRPERM",
        )
    if done.returncode:
        raise ToolchainError("ncu failed", hint="\n  ".join(said.strip().splitlines()[-12:]))
    launches = list(_parse(done.stdout, metrics))
    wanted = [stage.name for candidate in candidates for stage in candidate.timed.stages]
    if len(launches) != len(wanted):
        raise ToolchainError(f"ncu saw {len(launches)} launches, not {len(wanted)}")
    named = iter([{"stage": n} | facts for n, facts in zip(wanted, launches, strict=True)])
    return [[next(named) for _ in candidate.timed.stages] for candidate in candidates]


def _ran(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with what it printed."""
    how: Any = {"capture_output": True, "encoding": "utf-8", "errors": "replace", "check": False}
    return subprocess.run(command, **how)


def _known(ncu: Path) -> dict[str, str]:
    """Figure to metric, without metrics that no chip of this ncu has."""
    wanted = {name: metric for name, (metric, _) in METRICS.items()}
    wanted |= {f"stall {why}": f"{_STALL}{why}_per_issue_active.ratio" for why in STALLS}
    done = _ran([str(ncu), "--query-metrics", "--csv"])
    there = {
        line.replace('"', "").split(",")[0].split()[0]
        for line in done.stdout.splitlines()
        if line.strip()
    }
    if not there:
        return wanted  # ncu gives no list, so it must report unknown metrics itself
    return {name: metric for name, metric in wanted.items() if metric.split(".")[0] in there}


def _parse(text: str, metrics: Mapping[str, str]) -> Iterator[dict[str, dict[str, float]]]:
    """Figures and stalls of each launch in ncu's raw CSV, whose second line holds the units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    for row in rows:
        if not row.get("ID"):
            continue  # the line of units
        values = {}
        for name, metric in metrics.items():
            try:
                values[name] = float((row.get(metric) or "").replace(",", ""))
            except ValueError:
                continue  # n/a
        figures = {n: v * METRICS[n][1] for n, v in values.items() if n in METRICS}
        stalls = {n.removeprefix("stall "): v for n, v in values.items() if n not in METRICS}
        stalls = dict(sorted(stalls.items(), key=lambda item: -item[1]))
        yield {"figures": figures, "stalls": stalls}


def chosen(
    run: Run, where: Sequence[str] = (), top: int = 1, problems: Sequence[Problem] = ()
) -> list[Trial]:
    """The fastest `top` candidates of each problem, for each text of `where` if there are any.

    A text is `NAME=value …`, where NAME is `kernel`, a parameter, or an axis of the spec's
    variants. problems: only these. Raises KernelError if a text has another form, SpecError if no
    candidate has one of its names or values, none has them all, or the run lacks a problem.
    """
    ranked = [
        row["trial"]
        for row in rank(run.trials, run.environment).to_dict("records")
        if row["rank"] == row["rank"] and not row["baseline"]
    ]
    there = {trial.problem.label: trial.problem for trial in ranked}
    for problem in problems:
        if problem.label not in there:
            what = f"no ranked candidate of the run has the problem {problem.label}"
            raise SpecError(what, where=str(run.directory), hint=nearest(problem.label, there))
    asked = [there[problem.label] for problem in problems] or [*there.values()]
    said = [chosen_by(trial) for trial in ranked]
    found: dict[tuple[object, ...], Trial] = {}
    for text in where or ("",):
        wanted = _wanted(text, said, str(run.directory)).items()
        fit = [t for t, facts in zip(ranked, said, strict=True) if wanted <= facts.items()]
        if not fit:
            raise SpecError(f"no ranked candidate of the run is {text!r}", where=str(run.directory))
        for problem in asked:
            for trial in [t for t in fit if t.problem == problem][:top]:
                found[trial.key] = trial
    if not found:
        raise SpecError("no such candidate is ranked on these problems", where=str(run.directory))
    return list(found.values())


def _wanted(text: str, said: Sequence[Mapping[str, str]], where: str) -> dict[str, str]:
    """`NAME=value …` as a mapping. Raises SpecError if no candidate has such a name or value."""
    wanted = values_in(text)
    names = dict.fromkeys(name for facts in said for name in facts)
    for name, value in wanted.items():
        if name not in names:
            what = f"no ranked candidate of the run has a parameter {name!r}"
            raise SpecError(what, where=where, hint=nearest(name, names))
        values = dict.fromkeys(facts[name] for facts in said if name in facts)
        if value not in values:
            what = f"no ranked candidate of the run has {name}={value}"
            raise SpecError(what, where=where, hint=nearest(value, values))
    return wanted


def check(trials: Sequence[Trial], kernels: Mapping[str, Family]) -> None:
    """Raise KernelError if a row's config is not one that its family has today."""
    for trial in trials:
        if trial.kernel not in kernels:
            raise KernelError(f"the run's family {trial.kernel!r} does not exist")
        changed = kernels[trial.kernel].changed_since(trial.config)
        if changed is not None:
            raise KernelError(
                f"{changed} since the run, so its configs no longer exist",
                hint="repeat the run: attnsweep run SPEC --fresh",
            )


def compiled(
    trials: Sequence[Trial], kernels: Mapping[str, Family], arch: Arch, limit: int | None
) -> list[Candidate]:
    """The candidates of these rows, compiled from today's kernels.

    limit: bytes of workspace. Raises KernelError or CompileError if a config no longer works.
    """
    check(trials, kernels)
    with Compiler(arch) as compiler:
        builds = []
        for trial in trials:
            kernel = kernels[trial.kernel]
            config = kernel.of_today(trial.config)
            builds.append(build_of(kernel, config, trial.problem, compiler, workspace_limit=limit))
            builds[-1].submit()
        return [build.candidate() for build in builds]


def write(
    directory: Path, counted: Sequence[tuple[Trial, Sequence[dict[str, Any]]]], where: str
) -> list[dict[str, Any]]:
    """Add counters to a run's directory; they replace older ones of the same candidates.

    where: GPU, driver and date, stored with each candidate. Raises StoreError if the file cannot be
    read or written; it is then as it was.
    """
    kept = {_key(facts): facts for facts in read(directory)}
    for trial, stages in counted:
        facts = {
            "kernel": trial.kernel,
            "config": dict(trial.config),
            "problem": trial.problem.label,
            "variant": dict(trial.variant),
            "where": where,
            "stages": [
                each | {of: _short(each[of]) for of in ("figures", "stalls")} for each in stages
            ],
        }
        kept[_key(facts)] = facts
    lines = ",\n".join(json.dumps(facts, ensure_ascii=False) for facts in kept.values())
    path = directory / FILE
    try:
        write_file(path, f"[\n{lines}\n]\n".encode(), durable=True)
    except OSError as error:
        why = reason(error)
        raise StoreError(f"cannot be written: {why}", where=str(path)) from error
    return list(kept.values())


def report_path(directory: Path) -> Path:
    """Where to keep ncu's next report of a run: `profile.ncu-rep`, or a numbered one after it."""
    numbers = itertools.count(2)
    path = directory / "profile.ncu-rep"
    while path.exists():  # a report is never overwritten
        path = directory / f"profile-{next(numbers)}.ncu-rep"
    return path


def _key(facts: Mapping[str, Any]) -> tuple[object, ...]:
    return (facts["problem"], facts["kernel"], *sorted(facts["config"].items()))


def _short(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in values.items()}


# -- the profiled process -------------------------------------------------------------------


def _launch(path: Path) -> None:
    """Launch each candidate twice unseen, and then once seen by the profiler."""
    from attnsweep.device.bound_call import BoundCall
    from attnsweep.device.buffers import Buffer
    from attnsweep.device.cuda import CudaSession

    session = CudaSession()
    candidates: list[Candidate] = pickle.loads(path.read_bytes())
    for candidate in candidates:
        plan = candidate.timed
        assert isinstance(plan, LaunchPlan)  # calls are refused
        buffers = {}
        for name, bits in inputs_of(plan.problem).items():
            buffers[name] = Buffer(bits.nbytes)
            buffers[name].upload(bits)
        for name in plan.problem.outputs:
            buffers[name] = Buffer(plan.problem.bytes_of(name))
        buffers |= {name: Buffer(nbytes) for name, nbytes in plan.workspaces.items()}
        call = BoundCall(session, plan, [buffers])
        call.enqueue()
        call.enqueue()
        session.synchronize()
        with session.profiled():
            call.enqueue()


def inputs_of(problem: Problem) -> dict[str, npt.NDArray[Any]]:
    """Inputs of one group of heads, repeated for all: each of several passes makes them anew."""
    if problem.layout.kind == "paged":
        whole: Mapping[str, Any] = oracle_of(problem).make_inputs(cases.Case(problem), 0)
        return dict(whole)
    group = problem.heads // problem.heads_kv
    case = cases.Case(replace(problem, batch=1, heads=group, heads_kv=1))
    one: Mapping[str, Any] = oracle_of(problem).make_inputs(case, 0, windows=False)
    times = (problem.batch, problem.heads_kv)
    return {
        name: np.tile(bits, (*times, *[1] * (bits.ndim - len(times)))) for name, bits in one.items()
    }


if __name__ == "__main__":
    _launch(Path(sys.argv[1]))
