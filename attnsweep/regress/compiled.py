"""Old machine code against new, without a GPU: does it spill more, or does less fit an SM?

Nothing runs, so a verdict is of the code alone. Worse is what costs time nearly always: more bytes
of spills or of a thread's stack, or fewer warps on an SM at a time. Other differences, such as a
register more, decide nothing: `changed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnsweep.compile import sass
from attnsweep.compile.calls import CalledBuild
from attnsweep.compile.candidate import Build, compiled_row
from attnsweep.compile.cubin import compiler_for, stack_bytes, with_instructions
from attnsweep.compile.launches import LaunchPlan
from attnsweep.compile.nvrtc import Compiler, nvrtc_version
from attnsweep.core.errors import SpecError, ToolchainError
from attnsweep.core.files import read_code
from attnsweep.core.hardware import Arch, arch_on
from attnsweep.core.observer import Observer
from attnsweep.core.problem import ceil_div
from attnsweep.core.trial import Resources, Status
from attnsweep.regress.ab_test import RECORD, Ended, said
from attnsweep.regress.budget import Budget
from attnsweep.regress.live import Late, Pair, Sides, Tell, Winners, shown_row
from attnsweep.regress.verdicts import Comparison, Finding, StageCode, Verdict
from attnsweep.specs.load import SweepSpec
from attnsweep.store.run import environment_of

PROVES = (
    "Both sides were compiled for {}. In a regression a kernel has more bytes of spills or of "
    "stack than before, or fewer of its warps fit an SM at a time."
)
DOES_NOT_PROVE = (
    "Nothing ran: this says nothing of times and results. Changed code may be slower, or wrong; "
    "on a GPU, attnsweep check without --mode compile decides both."
)

Stages = dict[str, dict[str, Any]]
"""Facts of each launch by its stage's name: resources, instructions where they can be counted."""


def check_code(
    sides: Sides,
    arch: Arch,
    *,
    budget_s: float | None = None,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
    tell: Tell | None = None,
) -> Comparison:
    """The verdict on the code of every problem. The arguments are those of live.check.

    arch: for callables; winners of a run are compiled for its card. Raises SpecError, StoreError or
    ToolchainError.
    """
    spec, budget, here = sides.spec, sides.budget(budget_s), None
    observer, findings = observer or Observer(), list[Finding]()
    if isinstance(sides, Winners):
        card = environment_of(sides.baseline)
        if spec.arch not in (None, card.arch):
            what = f"the spec is for {spec.arch}, the baseline's {card.gpu} is {card.arch}"
            raise SpecError(what, where=str(spec.document.path), hint="give the baseline's spec")
        compiler = compiler_for(spec, arch_on(card), cache_dir)
        here = card.model_copy(update={"nvrtc": ".".join(map(str, nvrtc_version()))})
    else:
        compiler = Compiler(arch, cache_dir, templates=False)
    with compiler:
        pairs, covers = sides.pairs(compiler, here), sides.covers(compiler)
        for pair in pairs:
            begin_s = budget.spent_s
            if not isinstance(pair, Finding):
                observer.opening(pair.problem, 1, 0)
                pair = _finding(pair, spec, budget)
                observer.compiled(1, 1)
            findings.append(replace(pair, took_s=budget.spent_s - begin_s))
            if tell is not None:
                tell(findings[-1])
    said = f"{DOES_NOT_PROVE} {covers.removesuffix(',')}." if covers else DOES_NOT_PROVE
    proves = PROVES.format(compiler.arch.name)
    facts = {"slower": None, "proves": proves, "does_not_prove": said}
    return sides.comparison(findings, budget, here, **facts)


def _finding(pair: Pair, spec: SweepSpec, budget: Budget) -> Finding:
    label, row = pair.problem.label, shown_row(pair.row) or {}
    try:
        verdict, why, stages = _compared(pair, spec, budget)
    except Ended as ended:
        late = isinstance(ended, Late)
        return Finding(label, ended.verdict, ended.why, row, budget_ended=late)
    old, new = (
        row | {key: max(each[key] for each in side if each) for key in ("registers", "smem_bytes")}
        for side in zip(*((stage.old, stage.new) for stage in stages), strict=True)
    )
    return Finding(label, verdict, why, old, new, stages=tuple(stages))


def _compared(pair: Pair, spec: SweepSpec, budget: Budget) -> tuple[Verdict, str, list[StageCode]]:
    """The verdict on a pair, its reason, and what was compared. Raises Ended."""
    sides = [side for side in (pair.old, pair.build) if isinstance(side, Build)]
    futures = [future for side in sides for future in side.futures.values()]
    if wait_for(futures, budget.left_s).not_done:
        raise Late(Verdict.INCONCLUSIVE, f"still compiling when {budget} ended: raise --budget-s")
    pair.old_plan()  # first: what compiles neither way is no fault of the new code
    pair.check_compiler()
    row = compiled_row(pair.build, spec)
    if row.status is not Status.OK:
        raise Ended(Verdict.WRONG, said(row.status, row.detail))
    now = _code(pair.build, row.resources)
    if pair.same():
        return Verdict.PASS, "same machine code and launches", _paired(now, now)
    if isinstance(pair.old, Build):
        was = _code(pair.old, compiled_row(pair.old, spec).resources)
    else:
        was = _kept_code(pair, pair.old)
    stages = _paired(was, now)
    if len(was) != len(now):
        what = f"launches {', '.join(now)}, launched {', '.join(was)}"
        return Verdict.INCONCLUSIVE, f"{what}: none can be compared with another", stages
    worse: list[str] = []
    better: list[str] = []
    for stage in stages:
        for of, which in zip((worse, better), _differences(stage.old, stage.new), strict=True):
            of += [f"{stage.name}: {', '.join(which)}"] if which else []
    if worse:
        return Verdict.REGRESSION, "; ".join(worse), stages
    if better:
        return Verdict.IMPROVEMENT, "; ".join(better), stages
    return Verdict.CHANGED, "other code, no more spills or stack, as many warps on an SM", stages


def _code(build: Build, used: Resources | None) -> Stages:
    """The facts of a build that is compiled. Raises Ended if a trace does not show all of it."""
    why = build.traced.why if isinstance(build, CalledBuild) else ""
    if used is None or why:
        what = f"{why or 'it launches no kernel'}: only a call on a GPU shows its code"
        raise Ended(Verdict.INCONCLUSIVE, what)
    cubins, launches = build.cubins(), build.launched
    with contextlib.suppress(ToolchainError):  # they are not counted
        used = with_instructions(used, cubins, launches)
    stacks = {n: stack_bytes(c.path).get(launches[n].function) for n, c in cubins.items()}
    return _stages(used, stacks)


def _kept_code(pair: Pair, plan: LaunchPlan) -> Stages:
    """The facts of a recorded winner: of its row, and of its cubins. Raises Ended."""
    used = pair.row["trial"].resources
    names = {stage.name: stage for stage in plan.stages}
    if used is None or used.stages.keys() != names.keys():
        raise Ended(Verdict.INCONCLUSIVE, f"the winner's row has not all resources; {RECORD}")
    stacks: dict[str, int | None] = {}
    counts: dict[str, dict[str, int]] = {}
    with TemporaryDirectory(prefix="attnsweep-") as folder:
        for name, stage in names.items():
            path, function = Path(folder, "cubin"), stage.launch.function
            path.write_bytes(read_code(stage.cubin))
            stacks[name], counts[name] = stack_bytes(path).get(function), {}
            with contextlib.suppress(ToolchainError):
                counts[name] = sass.disassemble(path)[function]
    whole = {name: facts | counts[name] for name, facts in used.stages.items()}
    return _stages(used.model_copy(update={"stages": whole}), stacks)


def _stages(used: Resources, stacks: Mapping[str, int | None]) -> Stages:
    return {
        name: {**facts, "stack_bytes": stacks[name], "limited_by": used.limiters.get(name)}
        for name, facts in used.stages.items()
    }


def _paired(old: Stages, new: Stages) -> list[StageCode]:
    """Launches of equal names; of other names, if as many, in the order of issue; else none."""
    if old.keys() == new.keys():
        return [StageCode(name, old[name], facts) for name, facts in new.items()]
    if len(old) == len(new):
        both = zip(old.items(), new.items(), strict=True)
        return [StageCode(f"{a} → {b}", was, now) for (a, was), (b, now) in both]
    gone = [StageCode(name, facts, None) for name, facts in old.items()]
    return [*gone, *(StageCode(name, None, facts) for name, facts in new.items())]


def _differences(old: Any, new: Any) -> tuple[list[str], list[str]]:
    """What is worse of a launch than it was, and what is better."""
    worse: list[str] = []
    better: list[str] = []
    for what, key in (("spills", "spill_bytes"), ("stack", "stack_bytes")):
        if new[key] != old[key] and None not in (old[key], new[key]):
            of = worse if new[key] > old[key] else better
            of.append(f"{what} {old[key]:g} → {new[key]:g} bytes")
    was, now = (int(each["blocks_per_sm"] * ceil_div(each["threads"], 32)) for each in (old, new))
    if was != now:
        limit = f", limited by {new['limited_by']}" if new["limited_by"] else ""
        (worse if now < was else better).append(f"{was} → {now} warps on an SM{limit}")
    return worse, better
