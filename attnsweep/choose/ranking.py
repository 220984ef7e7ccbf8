"""Which candidate is the fastest, and what is only a tie: trials in, one DataFrame out.

Everything that shows or compares runs is a view of that DataFrame. Needs no GPU, no CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

from attnsweep.choose.baseline_ratio import below_ranking, common_rounds, fastest_baseline
from attnsweep.choose.columns import COLUMNS, WHOLE, ProblemContext, Row, named
from attnsweep.choose.pace import at_pace, last_round, rounds_of, session, time_kind, time_of
from attnsweep.choose.stats import ratio_interval
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Environment, Measurement, Status, Trial, unsound
from attnsweep.store.rows import StoredRows, of_problems

if TYPE_CHECKING:  # the process of a card ranks nothing, and starts 0.25 s sooner without it
    import pandas

# A time without rounds leads only if it is this factor below the best with rounds: luck may make
# one sample low, but not that low. Nor may a rank be slower than a later one by more than this.
MARGIN = 1.1
# Candidates closer than this are equally good. It is above the intended noise floor, 0.3 %
# (docs/tried.md), and below the intended regret, 0.5 % (benchmarks/stability.py).
EQUIVALENT = 1.004
# Order of the rows after the ranked ones: first those that ran, last those that never did.
_AFTER = [
    Status.DAMAGED,
    Status.NOISY,
    Status.WRONG,
    Status.LAUNCH_ERROR,
    Status.TIMEOUT,
    Status.COMPILE_ERROR,
    Status.PRUNED,
    Status.NO_RECORD,
    Status.SKIPPED,
]


def rank(trials: Sequence[Trial], environment: Environment | None) -> pandas.DataFrame:
    """One row per trial, problems in order of first appearance, ranked within each; see COLUMNS.

    Candidates and baselines are ranked together. Only `ok` rows are ranked, and a row with a NaN
    anywhere is not ok, whatever it says. Rows share a rank (`tied`) if they are not shown to be
    more than 0.4 % slower: the 95 % sign interval of their paired rounds' ratio to the fastest
    reaches below 1.004. A row without the rounds of the others ties with none. It leads only if it
    is more than 10 % faster than the best row with rounds and has the same kind of time (warm, cold
    or eager). If baselines lead, the same holds for the first candidates after them; below that,
    rank is the order of medians and claims no difference. A baseline that computes in another
    format is not ranked: it follows the ranked rows, `ok`, with the reason in `detail` and no ratio
    to the base. No rank precedes one whose time is less than 1/1.1 of its own.
    Wherever rows without common rounds are compared, their times are taken at one pace of the card
    (pace.at_pace). A time below the bound at the clock of its rounds is no time: its row is
    damaged.

    winner: take the candidates that share the best rank of any candidate. Those whose median paired
    ratio to the fastest of them is at most 1.004 are equally good. The winner is the equally good
    candidate with the least shared memory, then registers, then the first config. Times do not
    choose among the equally good, so that a rerun picks the same one. If all candidates that took
    part in rounds were noisy, none wins, though one that did not may have a lower time.

    Where a spec ranks by energy (ranked_as is then energy), the energies of a call stand in for
    times in all of this; × base stays one of times.

    time_us is the median; spread_us is half the interquartile range of the rounds (NaN if timed
    once); cycles counts SM clock cycles in the rounds; timed_as is the kind of time_us: warm, cold
    or eager. us_per_head is time / (batch * heads). light is the share of the speed of light, which
    light_by sets at light_mhz: the SM clock of the rounds, or the boost clock if that is not known,
    which bound_us always takes. If eager is ranked, TFLOP/s, GB/s and light use warm_us. Bounds
    need an environment of the GPU that measured the trials. The column `trial` holds the Trial.

    ratio_to_best_baseline is the time of best_baseline, the fastest baseline known, over this
    row's: above 1, this one is faster. ratio_of says what it is: `rounds`, the median of the ratios
    of the rounds that both ran, with the 95 % sign interval ratio_low to ratio_high; `medians` if
    they have no round in common, both at the pace of the rounds; `bound` if that baseline is noisy,
    so that its fastest round stands for it and the ratio is a lower bound. over_limit: a baseline
    whose error exceeds the limit; it is ranked and serves as base all the same, unless it computes
    in another format.
    """
    return frame([row for rows in ranked(trials, environment) for row in rows])


def ranked(
    trials: Sequence[Trial], environment: Environment | None, *, distinct: bool = False
) -> Iterator[list[Row]]:
    """The rows of each problem: see `rank`. distinct: no two have one key, as those of a Run."""
    for problem, members in members_of(trials, distinct=distinct).items():
        yield rank_problem(problem, members, environment)


Members = Callable[[], Sequence[Trial]]
"""Gives the facts of a problem's rows (store.rows), perhaps by reading them again."""


def members_of(trials: Sequence[Trial], *, distinct: bool = False) -> Mapping[Problem, Members]:
    """The problems of these rows, and what reads the rows of one. distinct: see `ranked`."""
    if not distinct and not isinstance(trials, StoredRows):
        trials = [*{trial.key: trial for trial in trials}.values()]
    return of_problems(trials)


def frame(rows: Sequence[Row]) -> pandas.DataFrame:
    """The rows as a DataFrame: see `rank`."""
    import pandas

    whole = [row.columns(named(row.facts.config)) | {"trial": row["trial"]} for row in rows]
    columns = {
        name: pandas.Series([_fit(row[name], dtype) for row in whole], dtype=dtype)
        for name, dtype in COLUMNS.items()
    }
    return pandas.DataFrame(columns)


def _fit(value: Any, dtype: str) -> Any:
    """The value, unless it is a whole number of a damaged row that no column of integers holds."""
    return None if dtype == WHOLE and value is not None and value.bit_length() > 63 else value


def judged(trial: Trial) -> tuple[Status, str | None]:
    """Checked status and detail: an ok row needs error <= limit, and times that can be times.

    A baseline may exceed the limit: it says what its users get, and `over_limit` marks it.
    """
    if trial.status is not Status.OK:
        return trial.status, trial.detail
    if (found := unsound(trial)) is not None:
        return found
    return trial.status, trial.detail


def _identity(trial: Trial) -> tuple[Any, ...]:
    """Config order: baselines first, then kernel, then each value: None, numbers, texts."""
    values = [(v is not None, isinstance(v, str), v or 0) for v in trial.config.values()]
    return (trial.provider == OURS, trial.provider, trial.kernel, values)


def _sorted(trials: Sequence[Trial], key: Callable[[Trial], Any]) -> list[Trial]:
    """The rows by a key; those with the same one by their configs, which take longer to compare."""
    out: list[Trial] = []
    for _, alike in groupby(sorted(trials, key=key), key):
        first, *others = alike
        out += sorted((first, *others), key=_identity) if others else (first,)
    return out


def _paired(trial: Trial, leader: Trial) -> tuple[list[float], list[float]]:
    """The common rounds of two rows, if both were in the last ones; otherwise none."""
    own, other = common_rounds(trial, leader)
    return (own, other) if last_round(trial) == last_round(leader) else ([], [])


def _tied(trial: Trial, leader: Trial) -> bool:
    """Whether paired rounds do not show `trial` to be slower than `leader`."""
    own, other = _paired(trial, leader)
    return bool(own) and ratio_interval(own, other)[0] <= EQUIVALENT


def middle_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of paired rounds."""
    return median(a / b for a, b in zip(times, others, strict=True))


def _equally_good(trials: Sequence[Trial]) -> list[Trial]:
    """The candidates of a shared rank that rounds do not show slower than its fastest."""
    best = _sorted(trials, time_of)[0]
    good = [best]
    for trial in trials:
        own, other = _paired(trial, best)
        if trial is not best and own:
            good += [trial] if middle_ratio(own, other) <= EQUIVALENT else []
    return good


def _groups(trials: Sequence[Trial], us: Mapping[int, float]) -> list[list[Trial]]:
    """Ok trials in ranking order; those in one list share a rank. us: their times at one pace."""
    # Another kind of time cannot compete with that of the rounds: warm times are below cold ones.
    kinds = {time_kind(trial) for trial in trials if rounds_of(trial)}
    left = _sorted(trials, lambda t: (bool(kinds) and time_kind(t) not in kinds, us[id(t)]))
    raced = [trial for trial in left if rounds_of(trial)]
    most: dict[tuple[object, ...], int] = {}
    for trial in raced:
        most[session(trial)] = max(last_round(trial), most.get(session(trial), 0))
    full = [trial for trial in raced if last_round(trial) == most[session(trial)]]
    groups: list[list[Trial]] = []
    while left:
        leader = left[0]
        if full and us[id(full[0])] <= MARGIN * us[id(leader)]:
            leader = full[0]
        tied = [t for t in full if t is not leader and _tied(t, leader)]
        apart = {id(t) for t in (leader, *tied)}
        # Noisy rounds can tie with rows that are much slower than the next rank's. Another kind of
        # time says nothing of that: warm times are below cold ones, microseconds below microjoules.
        alike = (t for t in left if id(t) not in apart and time_kind(t) == time_kind(leader))
        after = next(alike, None)  # rows of a kind are in the order of their times
        fastest = math.inf if after is None else us[id(after)]
        group = [leader] + [t for t in tied if us[id(t)] <= MARGIN * fastest]
        groups.append(group)
        keys = {id(t) for t in group}
        left, full = ([t for t in those if id(t) not in keys] for those in (left, full))
        if any(t.provider == OURS for t in group):
            return groups + [[t] for t in left]
    return groups


def thrift(trial: Trial) -> tuple[Any, ...]:
    """Sort key among the equally good: shared memory, registers, then config order."""
    used = trial.resources
    cost = (used.smem_bytes, used.registers) if used is not None else (math.inf, math.inf)
    return (*cost, _identity(trial))


def _as_ranked(trial: Trial) -> Trial:
    """The row with its energy in place of its time, if energy ranks it; for its order alone."""
    energy = trial.energy_uj
    if energy is None or not energy.ranks:
        return trial
    names = ("median", "low", "high", "samples", "rounds")
    facts = {name: getattr(energy, name) for name in names}
    return trial.with_(time_us=Measurement(**facts, l2="energy"))


def winner_of(trials: Sequence[Trial]) -> Trial | None:
    """The candidate that wins among these rows of one problem; None if none does. See `rank`."""
    return _ranked(trials, {id(trial): judged(trial) for trial in trials}, {})[1]


Verdicts = dict[int, tuple[Status, str | None]]
"""What `judged` says of rows, by their ids."""


def _ranked(
    trials: Sequence[Trial], verdicts: Verdicts, us: Mapping[int, float]
) -> tuple[list[list[Trial]], Trial | None]:
    """The rows in ranking order, in one list those that share a rank; and the winner.

    us: the times of right rows at one pace, if they are known.
    """
    good = [t for t in trials if verdicts[id(t)][0] is Status.OK and below_ranking(t) is None]
    views = [_as_ranked(trial) for trial in good]
    own = {id(view): trial for view, trial in zip(views, good, strict=True)}
    groups = _groups(views, us if us.keys() == own.keys() else at_pace(views))
    ours = ([t for t in group if t.provider == OURS] for group in groups)
    first = None if _all_noisy(trials, good) else next(filter(None, ours), None)
    winner = None if first is None else min(_equally_good(first), key=thrift)
    groups = [
        _sorted(group, lambda t: (t is not winner, time_of(t))) if group[1:] else group
        for group in groups
    ]
    return [[own[id(t)] for t in group] for group in groups], winner and own[id(winner)]


def rank_problem(problem: Problem, members: Members, environment: Environment | None) -> list[Row]:
    """The rows of one problem: see `rank`."""
    trials = members()
    verdicts = {id(trial): judged(trial) for trial in trials}
    context = ProblemContext(problem, environment, members)
    for trial in trials:
        if verdicts[id(trial)][0] is Status.OK and (why := context.faster_than_light(trial)):
            verdicts[id(trial)] = Status.DAMAGED, why
    right = [t for t in trials if verdicts[id(t)][0] is Status.OK]
    us = at_pace([t for t in right if below_ranking(t) is None])  # those that are ranked
    groups, winner = _ranked(trials, verdicts, us)
    places: list[tuple[Trial, tuple[int | None, bool, bool]]] = []
    for group in groups:
        place = len(places) + 1
        places += [(t, (place, len(group) > 1, t is winner)) for t in group]
    below = _sorted([t for t in right if below_ranking(t) is not None], time_of)
    verdicts |= {id(t): (Status.OK, below_ranking(t)) for t in below}
    rest = [t for t in trials if verdicts[id(t)][0] is not Status.OK]
    rest = _sorted(rest, lambda t: _AFTER.index(verdicts[id(t)][0]))
    places += [(t, (None, False, False)) for t in (*below, *rest)]
    statuses = {number: status for number, (status, _) in verdicts.items()}
    context.base = fastest_baseline(trials, statuses, us)
    number = {id(trial): number for number, trial in enumerate(trials)}
    return [
        Row(t, number[id(t)], context, us.get(id(t)), verdicts[id(t)], place) for t, place in places
    ]


def _all_noisy(trials: Sequence[Trial], ranked: Sequence[Trial]) -> bool:
    """Whether there were rounds of candidates, and all of these candidates were noisy in them."""
    raced = [t for t in trials if t.provider == OURS and rounds_of(t)]
    standing = {id(t) for t in ranked}
    noisy = any(t.status is Status.NOISY for t in raced)
    return noisy and not any(id(t) in standing for t in raced)


def winners(ranking: pandas.DataFrame) -> list[Trial]:
    """The winning candidate of each problem that has one."""
    return list(ranking.loc[ranking["winner"], "trial"])
