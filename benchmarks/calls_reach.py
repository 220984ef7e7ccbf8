"""Sweeps of Triton kernels beside `triton.autotune` on one GPU: time, regret, reruns, widened spaces.

    python benchmarks/calls_reach.py --out DIR --seconds 240 cold regret
    python benchmarks/calls_reach.py --plan

Each part writes DIR/PART.json after each case, and another call goes on with the cases that are not there. Three
kernels, on 20 shapes: the one of `attnsweep init --triton`, one of TMA descriptors, a backward. The parts of a case
share its sweeps of the file's configs and the choices of `triton.autotune`, each in a fresh process, in turns.

- `cold`: seconds of a process that sweeps the file's configs, proof included, over those of a process that calls the
  function once, so that `triton.autotune` chooses. The caches of attnsweep and of Triton are new and empty.
- `warm`: the same again, with the caches that such processes have filled.
- `regret`: time of the sweep's winner, and of what `triton.autotune` chose, over the best of an oracle, less 1. The
  oracle times all configs within 5 % of the best, by either, in 45 rounds in turns, in CUDA graphs.
- `twice`: sweeps in fresh processes, each beside the one before: whether its winner is the same, or is in the other's
  tie set; and the span of tie sets, their slowest over their fastest, less 1.
- `widened`: time of the winner of the file's own configs over that of the winner with `widen`, in 45 rounds in turns.
- `template`: time of a call that launches the machine code of a template by CuPy, over the template's, in turns.
- `five`: commands, and seconds with empty caches, from a file to a sentence.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas
from setting import builds, console, described, spec_of, write

from attnsweep import AttnsweepError, Problem, Run, open_run, rank
from attnsweep.api import plan
from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.choose.search import DEFAULT_STRATEGY
from attnsweep.compile.calls import build_of
from attnsweep.compile.launches import CallPlan, Candidate
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import arch_named
from attnsweep.core.trial import Environment
from attnsweep.family.called import USUAL, called
from attnsweep.family.family import Config
from attnsweep.specs import load

HERE = Path(__file__).parent
CALLS = {
    "attend.py:attention": (
        *("1,8,256,64", "1,16,1024,64 bf16 causal", "1,32/8,64x8192,128 bf16", "2,32/8,3000,128 bf16 causal"),
        *("4,32,1024,64 bf16", "8,16,2048,64 fp16 causal", "4,32,4096,128 bf16 causal", "4,16,8192,128 bf16"),
    ),
    "calls_tma.py:attention": (
        *("1,8,512,64 bf16", "1,16,1024,128 bf16 causal", "2,32/8,2000,64 fp16 causal"),
        *("4,32,2048,128 bf16", "2,16,8192,64 bf16 causal", "4,32,4096,128 bf16 causal"),
    ),
    "calls_backward.py:gradients": (
        *("1,8,256,64 fp16 backward", "1,16,1024,64 bf16 causal backward", "2,32/8,1500,128 fp16 causal backward"),
        *("4,16,2048,128 bf16 causal backward", "2,16,4096,128 bf16 backward", "4,32,4096,64 bf16 causal backward"),
    ),
}
NEAR, ROUNDS, REPLAY_US = 1.05, 45, 1000.0
SWEEPS = 4  # of `twice`: three pairs a shape, 60 in all
FIVE = ("tune", "--kernel", "attend.py:attention", "4,32,4096,128", "--causal", "--dtype", "bf16")
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Case:
    """A function on a shape."""

    call: str
    problem: Problem

    @property
    def label(self) -> str:
        """`attend.py:attention (1,8,256,64) fp16 full`."""
        return f"{self.call} {self.problem.label}"

    def spec(self, *, widen: bool = False, **more: Any) -> str:
        """A spec of the file's configs, or of the widened ones, alone."""
        return spec_text([self], {"widen": True} if widen else {}, more)


def spec_text(cases: Sequence[Case], own: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """A spec of one function on the problems of cases."""
    (call,) = {case.call for case in cases}
    facts = {
        "name": "reach",
        "problems": [case.problem.facts for case in cases],
        "kernels": {"own": {"call": call, **own}},
        "baselines": [],
        "measure": {"cold": False, "eager": False},
    }
    return json.dumps(facts | dict(more))  # which is YAML


CASES = [Case(call, Problem.parse(shape)) for call, shapes in CALLS.items() for shape in shapes]


class Place:
    """A directory with the three files, from which everything is run. end: time.monotonic() of the last second."""

    def __init__(self, directory: Path, end: float, arch: str, *, widen_s: int = 0, sweeps: int = SWEEPS) -> None:
        self.directory, self._end, self.arch = directory, end, arch
        self.widen_s, self.sweeps = widen_s, sweeps
        for name in ("calls_tma.py", "calls_backward.py", "calls_autotune.py"):
            (directory / name).write_text((HERE / name).read_text(encoding="utf-8"), encoding="utf-8")
        self.run("attnsweep", "init", "--triton", "attend.py")

    def run(self, module: str, *arguments: str, **variables: str) -> tuple[str, float]:
        """Run `python -m MODULE`; returns what it prints, and its seconds from start to end.

        Raises RuntimeError if it fails, TimeoutExpired if it is late.
        """
        tree = str(Path(load.__file__).parents[2])
        path = os.pathsep.join(filter(None, (tree, os.environ.get("PYTHONPATH"))))
        command, left = [sys.executable, "-m", module, *arguments], self._end - time.monotonic()
        begin = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": path, **variables},
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=max(1.0, left),
        )
        spent_s = time.monotonic() - begin
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[2:])}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout, spent_s

    def caches(self) -> dict[str, str]:
        """New and empty caches of attnsweep and Triton, as variables."""
        names = ("ATTNSWEEP_CACHE_DIR", "TRITON_CACHE_DIR")
        return {name: tempfile.mkdtemp(prefix="cache-", dir=self.directory) for name in names}

    def sweep(self, text: str, **variables: str) -> tuple[Run, float]:
        """The run of a spec in a fresh process, and its seconds."""
        results = Path(tempfile.mkdtemp(prefix="run-", dir=self.directory))
        spec = results / "reach.yaml"
        spec.write_text(text, encoding="utf-8")
        _, spent_s = self.run("attnsweep", "run", str(spec), "--results", str(results), **variables)
        (rows,) = results.rglob("trials.jsonl")
        return open_run(rows.parent), spent_s

    def autotune(self, case: Case, **variables: str) -> tuple[dict[str, Any], float]:
        """The choice of `triton.autotune` in a fresh process, and its seconds."""
        file, _, function = case.call.partition(".py:")
        problem = case.problem
        tensors = [(problem.shape_of(n), DTYPES["fp32" if n == "lse" else problem.dtype]) for n in problem.values]
        keywords = {"causal": problem.causal, "sm_scale": problem.scale}
        asked = {"file": file, "function": function, "tensors": tensors, "keywords": keywords}
        said, spent_s = self.run("calls_autotune", json.dumps(asked), **variables)
        return json.loads(said.splitlines()[-1]), spent_s

    def in_turns(self, case: Case, configs: Sequence[Config]) -> dict[Config, list[float]]:
        """Microseconds of a call of each config, in rounds in which each has its turn, in one process."""
        compiler, family = Compiler(arch_named(self.arch), templates=False), called(case.call)
        try:
            made = [build_of(family, config, case.problem, compiler) for config in configs]
            for build in made:
                build.submit()
            candidates = {build.config.label: build.candidate() for build in made}
        finally:
            compiler.close()
        rounds = timed_in_turns(case.problem, candidates)
        return {config: rounds[config.label] for config in configs}


def timed_in_turns(problem: Problem, candidates: Mapping[str, Candidate]) -> dict[str, list[float]]:
    """ROUNDS samples of each candidate, whose turn in a round is drawn."""
    order, rounds = random.Random(problem.label), {name: list[float]() for name in candidates}
    with Worker(timeout_s=60) as worker:
        worker.open(problem, replay_us=REPLAY_US, seed=0)
        for name, candidate in candidates.items():
            worker.add(name, candidate, cold=False)
        for number in range(ROUNDS + 3):
            for name in order.sample(sorted(candidates), len(candidates)):
                time_us, _ = worker.race(name, REPLAY_US, "warm")
                if number >= 3:  # clocks rise before that
                    rounds[name].append(time_us)
    return rounds


def levels(rounds: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    """The median over the rounds of each entry's time over the round's median, relative to the least one."""
    names, frame = [*rounds], pandas.DataFrame([*rounds.values()]).T
    level = frame.div(frame.median(axis=1), axis=0).median()
    return dict(zip(names, level / level.min(), strict=True))


def whole(values: Mapping[str, Any]) -> Config:
    """A config with all options of a launch: two that say the same are equal."""
    return Config(dict(sorted({**USUAL, **values}.items())))


def facts(run: Run) -> dict[str, Any]:
    """The winner, the tie set and the time of each config of a run of one problem."""
    ranking = rank(run)
    right = ranking[ranking["status"].isin(["ok", "noisy"])].sort_values("time_us")
    winner = [*right.loc[right["winner"], "trial"], *right["trial"]][0]  # none wins if all are noisy
    first = [*right.loc[right["rank"] == right["rank"].min(), "trial"]] or [winner]
    return {
        "winner": whole(winner.config),
        "ties": {whole(t.config): t.time_us.median for t in first},
        "times_us": {whole(t.config): t.time_us.median for t in right["trial"]},
    }


def near(times: Mapping[Config, float]) -> set[Config]:
    """Those within 5 % of the best."""
    return {config for config, us in times.items() if us <= NEAR * min(times.values())}


# ---- parts: the row of one case ----


class Asked:
    """What processes of a case said: sweeps, and choices of autotune, in turns; the first had empty caches."""

    def __init__(self, place: Place, case: Case) -> None:
        self.place, self.case = place, case
        self._caches: dict[str, str] = {}
        self._sweeps: list[tuple[Run, float]] = []
        self._choices: list[tuple[dict[str, Any], float]] = []

    def sweep(self, number: int) -> tuple[Run, float]:
        """A sweep and its seconds."""
        self._caches = self._caches or self.place.caches()
        while len(self._sweeps) <= number:
            if len(self._sweeps) == len(self._choices) + 1 < 3:
                self.choice(len(self._choices))
            self._sweeps.append(self.place.sweep(self.case.spec(), **self._caches))
        return self._sweeps[number]

    def choice(self, number: int) -> tuple[dict[str, Any], float]:
        """What autotune chose, and the seconds."""
        self.sweep(number)
        while len(self._choices) <= number:
            self._choices.append(self.place.autotune(self.case, **self._caches))
        return self._choices[number]


def answers(asked: Asked, number: int) -> dict[str, Any]:
    """Seconds to an answer: of the processes with empty caches, number 0, or of the next."""
    (run, ours_s), (chosen, autotune_s) = asked.sweep(number), asked.choice(number)
    return {
        "ours_s": round(ours_s, 2),
        "autotune_s": round(autotune_s, 2),
        "candidates": len(run.trials),
        "timed_by_autotune": len(chosen["times_ms"]),
    }


def regret(asked: Asked) -> dict[str, Any]:
    """The winner, and what autotune chose, beside the oracle's best."""
    place, case = asked.place, asked.case
    ours, (chosen, _) = facts(asked.sweep(0)[0]), asked.choice(0)
    by_autotune = whole(chosen["chosen"])
    timed = {whole(values): ms for values, ms in chosen["times_ms"]}
    entered = {ours["winner"], by_autotune, *ours["ties"], *near(ours["times_us"])} | (near(timed) if timed else set())
    level = levels(place.in_turns(case, sorted(entered, key=lambda config: config.label)))
    return {
        "winner": ours["winner"].label,
        "autotune": by_autotune.label,
        "best": min(level, key=level.__getitem__).label,
        "entered": len(entered),
        "of": len(ours["times_us"]),
        "regret_percent": round(100 * (level[ours["winner"]] - 1), 3),
        "autotune_regret_percent": round(100 * (level[by_autotune] - 1), 3),
        "levels": {config.label: round(share, 5) for config, share in level.items()},
    }


def twice(asked: Asked) -> dict[str, Any]:
    """Sweeps one after the other, each beside the one before."""
    return pairs([facts(asked.sweep(number)[0]) for number in range(asked.place.sweeps)])


def pairs(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often two sweeps agree. A winner in both tie sets is one that either could have had."""
    both = [*itertools.pairwise(found)]
    agreed = [one["winner"] in other["ties"] and other["winner"] in one["ties"] for one, other in both]
    spans = [max(each["ties"].values()) / min(each["ties"].values()) - 1 for each in found]
    return {
        "winners": [each["winner"].label for each in found],
        "pairs": len(both),
        "same": sum(one["winner"] == other["winner"] for one, other in both),
        "same_or_tied": sum(agreed),
        "ties": [len(each["ties"]) for each in found],
        "span_percent": round(100 * max(spans), 3),
    }


def widened(asked: Asked) -> dict[str, Any]:
    """The winner of the file's own configs beside that of more."""
    place, case = asked.place, asked.case
    search = {"strategy": DEFAULT_STRATEGY, "budget_s": place.widen_s}
    own, (run, _) = facts(asked.sweep(0)[0]), place.sweep(case.spec(widen=True, search=search))
    wide = facts(run)
    both = [*dict.fromkeys((own["winner"], wide["winner"]))]
    level = levels(place.in_turns(case, both)) if len(both) > 1 else dict.fromkeys(both, 1.0)
    return {
        "own": own["winner"].label,
        "wide": wide["winner"].label,
        "tried": len(wide["times_us"]),
        "ratio": round(level[own["winner"]] / level[wide["winner"]], 5),
    }


LAUNCHED = """
import cupy, torch
KERNEL = cupy.RawModule(path={cubin!r}).get_function({function!r})
KERNEL.max_dynamic_shared_size_bytes = max({smem_bytes}, KERNEL.max_dynamic_shared_size_bytes)
ARGS = {args!r}

def attention(q, k, v, *, problem, out):
    own = {{"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(), "o": out.data_ptr()}}
    kinds = {{str: lambda name: cupy.uint64(own[name]), int: cupy.int32, float: cupy.float32}}
    args = tuple(kinds[type(arg)](arg) for arg in ARGS)
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        KERNEL({grid!r}, ({threads}, 1, 1), args, shared_mem={smem_bytes})
"""


def template(asked: Asked) -> dict[str, Any]:
    """One machine code, launched as a template's and by a call."""
    place, case = asked.place, asked.case
    kernels = {"flash_fwd_mma": {}}
    text = json.dumps({"problems": [case.problem.facts], "kernels": kernels, "baselines": []})
    (build,) = builds(spec_of(text, place.directory, "template"), arch=place.arch, limit=1)
    own = build.candidate()
    (stage,) = own.timed.stages
    launch = stage.launch
    how = {"grid": launch.grid, "threads": launch.threads, "smem_bytes": launch.smem_bytes, "args": launch.args}
    text = LAUNCHED.format(cubin=stage.cubin, function=launch.function, **how)
    file = Path(tempfile.mkdtemp(prefix="launched-", dir=place.directory)) / "launched.py"
    file.write_text(text, encoding="utf-8")
    call = CallPlan(case.problem, f"{file}:attention", {}, "", frozenset())
    plain = replace(own, timed=call, checks=(), empty=None, turns=None, cases=(), deterministic=False)
    rounds = timed_in_turns(case.problem, {"template": own, "call": plain})
    ratios = [call / own for call, own in zip(rounds["call"], rounds["template"], strict=True)]
    times = {f"{name}_us": round(statistics.median(each), 3) for name, each in rounds.items()}
    return {"config": build.config.label, **times, "ratio": round(statistics.median(ratios), 5)}


def five(asked: Asked) -> dict[str, Any]:
    """From a file to a sentence."""
    commands = [FIVE]
    said = [asked.place.run("attnsweep", *command, **asked.place.caches()) for command in commands]
    sentence = said[-1][0].rstrip().rpartition("\n\n")[2]
    return {
        "commands": len(commands),
        "seconds": round(sum(spent_s for _, spent_s in said), 1),
        "sentence": " ".join(sentence.split()),
    }


@dataclass(frozen=True)
class Part:
    """A measurement of each case, and the bars that it must reach. summary: of all rows."""

    row: Callable[[Asked], dict[str, Any]]
    summary: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    must: Mapping[str, tuple[str, float]]
    cases: Sequence[Case] = tuple(CASES)


def of_answers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Our seconds over autotune's."""
    ratios = [row["ours_s"] / row["autotune_s"] for row in rows]
    return {"median_ratio": statistics.median(ratios), "worst_ratio": max(ratios)}


def of_regret(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst regret of the winners and of autotune's choices."""
    found = {}
    for name in ("regret", "autotune_regret"):
        each = [row[f"{name}_percent"] for row in rows]
        found |= {f"median_{name}_percent": statistics.median(each), f"worst_{name}_percent": max(each)}
    return found


def of_twice(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pairs that agree, of all."""
    asked, agreed, same = (sum(row[name] for row in rows) for name in ("pairs", "same_or_tied", "same"))
    span = max(row["span_percent"] for row in rows)
    return {"pairs": asked, "same": same, "disagreed": asked - agreed, "worst_span_percent": span}


def of_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios of times."""
    ratios = [row["ratio"] for row in rows]
    off = max(abs(100 * (ratio - 1)) for ratio in ratios)
    return {"mean_ratio": statistics.geometric_mean(ratios), "worst_ratio": min(ratios), "most_off_percent": off}


def of_five(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The one row."""
    return {name: rows[0][name] for name in ("commands", "seconds")}


FORWARDS = tuple(case for case in CASES if case.call == "attend.py:attention")
PARTS = {
    "cold": Part(lambda asked: answers(asked, 0), of_answers, {"worst_ratio": ("<=", 1.0)}),
    "warm": Part(lambda asked: answers(asked, 1), of_answers, {"worst_ratio": ("<=", 3.0)}),
    "regret": Part(regret, of_regret, {"median_regret_percent": ("<=", 0.2), "worst_regret_percent": ("<=", 1.0)}),
    "twice": Part(twice, of_twice, {"disagreed": ("<=", 0.0), "worst_span_percent": ("<=", 1.0)}),
    "widened": Part(widened, of_ratios, {"mean_ratio": (">=", 1.02), "worst_ratio": (">=", 1.0)}),
    "template": Part(template, of_ratios, {"most_off_percent": ("<=", 0.5)}, FORWARDS),
    "five": Part(five, of_five, {"commands": ("<=", 2.0), "seconds": ("<=", 120.0)}, FORWARDS[-2:-1]),
}


def summary_of(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A part's figures, and whether each of those that must reach something does; nothing without rows."""
    if not rows:
        return {}
    part = PARTS[name]
    found = {key: round(value, 4) for key, value in part.summary(rows).items()}
    reached = {key: found[key] <= bar if sign == "<=" else found[key] >= bar for key, (sign, bar) in part.must.items()}
    must = {key: f"{sign} {bar:g}" for key, (sign, bar) in part.must.items()}
    return {"cases": len(rows), "of": len(part.cases), **found, "must": must, "reached": reached}


class Kept:
    """The rows of a part in its file. card: which of a host measured, of each new row."""

    def __init__(self, name: str, file: Path, environment: Environment) -> None:
        self.name, self._file, self._environment = name, file, environment
        before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._rows: list[dict[str, Any]] = before.get("rows", [])

    def lacks(self, case: Case) -> bool:
        """Whether a case belongs to the part and has no row."""
        known = {row["case"] for row in self._rows}
        return case in PARTS[self.name].cases and case.label not in known

    def measure(self, asked: Asked) -> None:
        """Measure a case, write its row and print it; or print why there is none."""
        label = asked.case.label
        try:
            row = {"case": label, **PARTS[self.name].row(asked), "card": self._environment.uuid}
        except (RuntimeError, AttnsweepError, WorkerError) as error:
            console.print(f"{self.name}: {label}: {error}")
            return
        self._rows.append(row)
        console.print(f"{self.name}: {row}")
        facts = {"part": self.name, "summary": self.summary, "rows": self._rows}
        write(self._file, self._environment, facts)

    @property
    def summary(self) -> dict[str, Any]:
        """The part's figures so far."""
        return summary_of(self.name, self._rows)


def measure(parts: Sequence[Kept], place: Place, end: float, only: str) -> None:
    """Measure the cases that parts lack, until one that lasts as long as the last would be late.

    only: a text that the labels of cases hold.
    """
    longest = 0.0
    for case in CASES:
        wanted = [part for part in parts if only in case.label and part.lacks(case)]
        if not wanted:
            continue
        begin = time.monotonic()
        if begin + longest > end:
            return
        asked = Asked(place, case)
        try:
            for part in wanted:
                part.measure(asked)
        except subprocess.TimeoutExpired:
            console.print(f"{case.label}: not in the seconds that were left; again in another call")
            return
        longest = max(longest, time.monotonic() - begin)


def show_plan(names: Sequence[str], arch: str, only: str) -> None:
    """Print what would be done, and the configs that the files keep on an architecture; needs no GPU."""
    wanted = {name: [case for case in PARTS[name].cases if only in case.label] for name in names}
    labels = {case.label for cases in wanted.values() for case in cases}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        Place(Path(directory), time.monotonic() + 60, arch)
        for call in CALLS:
            own = [case for case in CASES if case.call == call and case.label in labels]
            if not own:
                continue
            for planned in plan(spec_of(spec_text(own, {}, {}), Path(directory)), arch=arch):
                kept = sum(len(space.configs) for space in planned.spaces)
                console.print(f"{call} {planned.problem.label}: {kept} configs")
    for name in names:
        musts = ", ".join(f"{key} {sign} {bar:g}" for key, (sign, bar) in PARTS[name].must.items())
        console.print(f"{name}: {len(wanted[name])} cases; must: {musts}")


def main() -> None:
    """Measure the parts that were asked for, as far as the seconds go."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, help="directory of the JSON files")
    parser.add_argument("--seconds", type=float, default=240.0, help="of all parts together (default: 240)")
    parser.add_argument("--widen-s", type=int, default=40, help="seconds of a widened space's candidates (default: 40)")
    parser.add_argument("--sweeps", type=int, default=SWEEPS, help=f"of each case of twice (default: {SWEEPS})")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose label holds this text")
    parser.add_argument("--plan", action="store_true", help="only say what would be done; needs no GPU")
    parser.add_argument("--arch", default="sm_90a", help="with --plan")
    asked = parser.parse_args()
    names = asked.parts or [*PARTS]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}: one of {', '.join(PARTS)}")
    labels = sorted({case.label for name in names for case in PARTS[name].cases})
    if not any(asked.only in label for label in labels):
        parser.error(f"no case of {', '.join(names)} holds {asked.only!r}: there are {', '.join(labels)}")
    if asked.plan:
        show_plan(names, asked.arch, asked.only)
        return
    if asked.out is None:
        parser.error("--out is missing: a directory for the JSON files")
    out, end = asked.out.resolve(), time.monotonic() + asked.seconds
    environment = described()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        place = Place(Path(directory), end, environment.arch, widen_s=asked.widen_s, sweeps=asked.sweeps)
        parts = [Kept(name, out / f"{name}.json", environment) for name in names]
        measure(parts, place, end, asked.only)
    for part in parts:
        console.print(f"{part.name}: {part.summary}")


if __name__ == "__main__":
    main()
