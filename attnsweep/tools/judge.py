"""Judge one callable on one problem: right in the calls that are timed, and how fast beside others.

It takes turns with the baselines in the rounds of a sweep's finals. What it returns in them is
compared with float64, on inputs that no call before has seen.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import secrets
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from attnsweep import __version__
from attnsweep.bench.gpu import WorkerError, is_its_own
from attnsweep.bench.worker import Worker
from attnsweep.choose.columns import Row, light_text
from attnsweep.choose.finals import Finals
from attnsweep.choose.ranking import ranked
from attnsweep.choose.stats import ratio_interval
from attnsweep.core.callables import CALLABLE, Asked
from attnsweep.core.errors import SpecError
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import PROTOCOL, Environment, Status, Trial
from attnsweep.core.user_code import CANNOT_IMPORT, source_of
from attnsweep.device.lock import held
from attnsweep.specs.model import BASELINES, MeasureSpec
from attnsweep.verify.oracle import oracle_of

# What computes attention already: a callable that calls it adds nothing, and is right.
_LIBRARIES = re.compile(
    rb"\b(?:scaled_dot_product_attention|flex_attention|flash_attn\w*|cudnn\w*|xformers)\b"
)
Outcome = Literal["confirmed", "wrong", "refused", "unconfirmed"]


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """The verdict on a callable on a problem, and its times in microseconds of one call.

    confirmed: right wherever it was judged, and timed. wrong: an output was over a limit. refused:
    it cannot be judged, or did what no kernel may, as `reason` says. unconfirmed: nothing is known
    of it, because its times were noisy or the judge failed.
    """

    verdict: Outcome
    name: str
    problem: str
    reason: str
    """One sentence."""
    case: str | None = None
    """The shape and the inputs of the output that was the nearest to a limit, or over it."""
    where: dict[str, int] | None = None
    """`batch`, `head` and `row` of a wrong row."""
    got: float | None = None
    """The error of the worst row, and its limit: relative to the row's length."""
    limit: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    """Each measure of the error as a share of its limit."""
    hints: list[str] = field(default_factory=list)
    """Where to look: what a wrong output is right for, which rows are wrong, libraries named."""
    calls_judged: int = 0
    """Calls made alone and compared in every element, and those of timed replays that were judged.

    Of the latter, rows are compared, or all bits with a call of which they are.
    """
    time_us: float | None = None
    ci95: tuple[float, float] | None = None
    form: str | None = None
    """`graph`, or `issued` where no CUDA graph holds its calls: host time is in it, no ratio is.

    Of the strict judge `chain`, whose times are only comparable with those of its own rounds.
    """
    trusted_us: float | None = None
    """Strict only: the time of a call by the clock of a process that runs none of its code."""
    base: str | None = None
    """The fastest baseline of the same rounds."""
    x_base: float | None = None
    """Its time over the callable's: above 1, the callable is faster."""
    x_base_ci95: tuple[float, float] | None = None
    bound_us: float | None = None
    """The bound at boost clock."""
    unit: str | None = None
    sm_mhz: float | None = None
    """The SM clock in the rounds, for which `unit` and sol_share are."""
    sol_share: float | None = None
    sha256: str | None = None
    """Digest of the file that defines the callable, without what it imports; None if not found."""
    gpu: str | None = None
    attnsweep: str = __version__
    protocol: int = PROTOCOL

    @property
    def exit_code(self) -> int:
        """0 confirmed; 1 wrong or refused; 4 unconfirmed."""
        return {"confirmed": 0, "unconfirmed": 4}.get(self.verdict, 1)

    @property
    def sentence(self) -> str:
        """The verdict, its reason and, if it is confirmed or only marked, how fast it is."""
        first = f"{self.name} on {self.problem}: {self.verdict}"
        if self.time_us is None or self.verdict in ("refused", "unconfirmed"):
            hints = self.hints if self.verdict == "wrong" else []
            return "; ".join([f"{first}: {self.reason}", *hints])
        said = [f"{self.time_us:.4g} µs"]
        if self.ci95 is not None:
            said[0] += f" ({self.ci95[0]:.4g} to {self.ci95[1]:.4g})"
        if self.x_base is not None:
            said.append(f"{self.x_base:.2f}× {self.base}, the fastest baseline")
        if self.trusted_us is not None:
            said.append(f"{self.trusted_us:.4g} by the judge's clock")
        if self.sol_share is not None:
            facts = {"light": self.sol_share, "light_by": self.unit, "light_mhz": self.sm_mhz}
            said.append(light_text(facts))
        return f"{first}: {', '.join(said)}; {self.reason}"

    @property
    def next(self) -> str:
        """The command for what comes next: guard what is confirmed, or look at what is not."""
        asked = replace(Asked.of(self.name), label="", strict=False)
        if self.verdict == "confirmed":  # `check` has a way of its own to call both
            asked = replace(asked, graph=None, workspace=None)
        call = shlex.quote(str(asked))
        problem = shlex.quote(self.problem)
        file, _, function = call.rpartition(":")
        if self.verdict == "unconfirmed":
            return f"to try again: attnsweep judge {call} {problem} --rounds 45"
        if self.verdict == "confirmed":
            old = f"{file}@HEAD:{function}" if file.endswith(".py") else call
            return f"to guard it: attnsweep check {problem} --old {old} --new {call}"
        if file.endswith(".py") and not asked.factory:
            return f"to run it on the CPU: attnsweep verify {call}"
        return f"to see more: attnsweep judge {call} {problem} --json"


class _FailedError(Exception):
    """The callable's row failed: nothing needs to be timed beside it any more."""


def judge(
    function: str | Callable[..., Any],
    problem: Problem,
    *,
    against: Sequence[str] | None = None,
    strict: bool = False,
    role: Literal["candidate", "baseline"] = "candidate",
    rounds: int = 15,
    timeout_s: float = 30.0,
    wait: bool = False,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
) -> KernelVerdict:
    """Judge a callable on a problem, and time it in turns with baselines.

    function: called as f(q, k, v, problem=...) with CUDA tensors (batch, heads, seqlen, head_dim),
    as baselines.callable.ways_of says, in the process that owns the GPU; or its name there,
    `module:function` or `file.py:function`. against: names of baselines (default: all). strict:
    call them in processes of their own, in chains whose times the judge's clock confirms. role: a
    baseline that is over a limit on the timed inputs is timed all the same, as libraries are; it
    stays wrong. rounds: in which all take turns. timeout_s: of one step of it. wait: for another
    run on the card, which otherwise is an error. Raises SpecError if it cannot be imported,
    NoGpuError.
    """
    against = BASELINES if against is None else against
    name = function if isinstance(function, str) else name_of(function)
    if CALLABLE.fullmatch(name) is None:
        what = f"{name!r} is no callable's name"
        raise SpecError(what, hint="write MODULE:FUNCTION or FILE.py:FUNCTION")
    file = Path(Asked.of(name).call.rpartition(":")[0])
    if file.suffix == ".py" and not file.is_file():  # known before a GPU is asked
        raise SpecError(f"{CANNOT_IMPORT} {name}: there is no such file", where=str(file))
    source = source_of(name)
    strict |= any(Asked.of(each).strict for each in (name, *against))
    measure = MeasureSpec(rounds=rounds, timeout_s=timeout_s, cold=False, eager=False)
    observer, seed = observer or Observer(), secrets.randbits(32)
    how: dict[str, Any] = {"shown": [name]} if role == "baseline" else {}
    trusted_us: float | None = None
    if strict and not oracle_of(problem).can_chain(problem):
        what = f"the strict judge has no inputs that can be drawn anew for {problem.label}"
        raise SpecError(what, hint="judge very wide heads without it")
    rows: dict[tuple[object, ...], Trial] = {}

    def put(row: Trial) -> None:
        ours = row.status is Status.LAUNCH_ERROR
        # Strictly, callables fail in processes of their own.
        if ours and (strict or not is_its_own(row.detail or "")):
            row = row.with_(status=Status.DAMAGED, detail=f"the judge failed: {row.detail}")
        rows[row.key] = row
        observer.tried(row)
        if row.candidate and row.status not in (Status.OK, Status.NOISY):
            raise _FailedError

    with ExitStack() as locks, Worker(measure.timeout_s, cache_dir=cache_dir) as gpu:
        every = (name, *(other for other in against if other != name))
        environment = gpu.describe(preload=() if strict else every, first=(problem, seed))
        lock = held(environment.uuid, environment.gpu, wait=wait, say=observer.note)
        locks.enter_context(lock)
        if strict:
            place = TemporaryDirectory(prefix="attnsweep-", ignore_cleanup_errors=True)
            how["strict"] = locks.enter_context(place)
        blank: dict[str, Any] = {"config": {}, "problem": problem, "status": Status.SKIPPED}
        own, *others = (Trial(kernel=each, provider=each, **blank) for each in every)
        own = own.with_(candidate=True)
        observer.planned([0], finals=True)
        observer.opening(problem, 0, 0)
        try:
            gpu.open(problem, replay_us=measure.replay_us, seed=seed, baselines=every, **how)
            finals = Finals(measure, gpu, seed=0, put=put, keep=put, observer=observer)
            # A stranger finds them prepared, and can take neither memory nor files from them.
            finals.run([], [*others, own] if strict else [own, *others])
            trusted_us = gpu.trusted_us(name) if strict else None
        except _FailedError:
            pass
        except WorkerError as error:  # of the problem, before the callable was called
            rows[own.key] = own.with_(status=Status.DAMAGED, detail=error.detail)
    (ranking,) = ranked([*rows.values()], environment)
    facts = next(row for row in ranking if row["provider"] == name)
    verdict = _verdict(facts, trusted_us, environment)
    if source is None:
        return verdict
    named = ", ".join(sorted({each.decode() for each in _LIBRARIES.findall(source)}))
    more = [f"its file names {named}, which may do its work"] if named else []
    digest = hashlib.sha256(source).hexdigest()
    return replace(verdict, sha256=digest, hints=[*verdict.hints, *more])


def _verdict(facts: Row, trusted_us: float | None, environment: Environment) -> KernelVerdict:
    """What the row of a callable says. Raises SpecError: see `judge`."""
    name, trial = facts["provider"], facts["trial"]
    verdict, reason = _outcome(Status(facts["status"]), facts["detail"] or "", trial)
    found: dict[str, Any] = {"name": name, "problem": trial.problem.label, "gpu": environment.gpu}
    if (accuracy := trial.accuracy) is not None:
        found |= {"case": accuracy.case, "where": accuracy.where, "got": accuracy.rel_err}
        found |= {"limit": accuracy.limit, "shares": accuracy.shares}
        found |= {"calls_judged": accuracy.calls or 0, "hints": accuracy.hints}
    time = trial.time_us
    marked = verdict == "wrong" and trial.status is Status.OK
    if time is not None and (marked or verdict in ("confirmed", "unconfirmed")):
        form = "issued" if trial.issued else "graph" if trusted_us is None else "chain"
        found |= {"time_us": time.median, "form": form, "trusted_us": trusted_us}
        if len(time.rounds) > 1:
            found["ci95"] = ratio_interval(time.rounds, [1.0] * len(time.rounds))
        found |= {"bound_us": facts["bound_us"], "unit": facts["light_by"] or facts["bound"]}
        found |= {"sol_share": facts["light"], "sm_mhz": facts["light_mhz"]}
        if (ratio := facts["ratio_to_best_baseline"]) is not None:
            ends = facts["ratio_low"], facts["ratio_high"]
            found |= {"x_base": ratio, "base": facts["best_baseline"]}
            found["x_base_ci95"] = None if None in ends else ends
    return KernelVerdict(verdict=verdict, reason=reason, **found)


def _outcome(status: Status, detail: str, trial: Trial) -> tuple[Outcome, str]:
    """The verdict of a row, and a sentence. Raises SpecError for what cannot be imported."""
    match status:
        case Status.OK if trial.time_us is not None:
            accuracy = trial.accuracy
            most = max(accuracy.shares.values(), default=0.0) if accuracy else 0.0
            said = f"its largest share of a limit is {100 * most:.0f} %"
            if most > 1:
                return "wrong", f"{said}; it is timed as a baseline"
            return "confirmed", f"{said}; {trial.issued}" if trial.issued else said
        case Status.WRONG:
            return "wrong", detail
        case Status.SKIPPED if detail.startswith(CANNOT_IMPORT):
            raise SpecError(detail, hint="the file or the module is looked for from here")
        case Status.DAMAGED if "faster than light" in detail:
            return "refused", detail
        case Status.SKIPPED | Status.TIMEOUT | Status.LAUNCH_ERROR:
            return "refused", detail
        case _:
            return "unconfirmed", detail or "it was not timed"


def name_of(function: Callable[..., Any]) -> str:
    """`module:function` or `file.py:function` of a function. Raises SpecError.

    It is imported by this name in another process: so it must be at the top level of a file.
    """
    own, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    if own.isidentifier() and module not in (None, "__main__"):
        return f"{module}:{own}"
    file = inspect.getsourcefile(function) if own.isidentifier() else None
    if file is None or not file.endswith(".py"):
        what = f"{function!r} cannot be imported by another process"
        raise SpecError(what, hint="define it with def at the top level of a file")
    return f"{file}:{own}"
