"""Strategy `gp`: Bayesian optimization with a Gaussian process over the configs of a space.

The logarithm of a config's time is a Gaussian process over (problem, config): two configs are alike
by their share of equal parameters, and two problems by their sizes. It begins with the times that
recorded runs hold of other problems (history), which is multi-task Bayesian optimization (Swersky,
Snoek and Adams, NeurIPS 2013), and each trial of this problem corrects it. Each space has an
unknown factor of its own, so that only ratios of times are transferred, never times.

A batch holds the candidates of greatest expected improvement, each chosen as if those before it
had taken the time that is expected of them ("kriging believer": Ginsbourger, Le Riche and Carraro,
2010). How far times are from what was expected of them scales what is expected of the others: a
rough space is explored for longer, and a smooth one is left sooner. The search ends when it expects
less than EXPECTED from any other candidate and PATIENCE trials brought no better one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from attnsweep.choose.strategies.history import History, history_on
from attnsweep.core.problem import Problem, Value
from attnsweep.core.threads import one_blas_thread
from attnsweep.core.trial import Trial
from attnsweep.family.family import Config
from attnsweep.family.space import Space

Floats = NDArray[np.float64]

# Candidates between two looks at the times: a sixteenth of the space, but at least LEAST, and at
# most BATCH, which a host compiles at once.
BATCH = 16
LEAST = 5
# A space of no more candidates is tried whole: a host compiles it in a few seconds. Its batches
# double from LEAST to BATCH: the first ones are small, since what they teach orders the rest, and
# the last ones are not, since the host waits after each.
FEW = 48
# The search goes on while some candidate is expected to lower the best time by EXPECTED, a share of
# it, or while the best was found within the last PATIENCE trials (twice as many without history).
EXPECTED = 0.0005
PATIENCE = 20
# The most candidates of a space, and the most rows of history, that the model compares with each
# other: its square matrices then take 32 MB and 3 MB.
POOL = 2048
HISTORY_ROWS = 640

# The process's scales, in logarithms of time: chosen on recorded runs (benchmarks/search.py).
_AMPLITUDE = 0.3
_NOISE = 0.015
_ALONE = 0.8  # share of the variance that parameters contribute each by itself
_DECAY = 0.5  # per parameter that differs, of the rest
_REACH = 4.0  # distance of problems: see _place
_SHARED = 0.7  # correlation of two spaces of the same problem
_SLOWEST = 0.7  # slower than twice the best teaches no more than that
_FACTOR = 1.0  # of a space's unknown factor
_FAILED = 0.3
_SURE = 16  # trials by whose weight _AMPLITUDE is believed next to those of the space


def gp(
    space: Space, candidates: int | None, seed: int, history: Sequence[History] | None = None
) -> Generator[Config | tuple[Config, ...] | None, list[Trial], str]:
    """Batches of greatest expected improvement; returns why it stopped.

    history: times of this family on other problems (default: what the package ships). seed breaks
    ties, and picks the pool of a space of more than POOL candidates. A failed candidate counts as
    the slowest so far. A space of no more than FEW candidates is tried whole, in batches that
    double from LEAST to BATCH.
    """
    count = len(space.configs) if candidates is None else min(candidates, len(space.configs))
    tried: set[Config] = set()
    few = len(space.configs) <= FEW
    if space.configs:
        known = history_on(space.kernel, space.sm_count) if history is None else history
        with one_blas_thread():  # others would wait for each other on cores that compile
            model = Model.of(space, known, seed)
        while len(tried) < min(count, len(model.configs)):
            if not few and model.settled():
                return model.why()
            size = min(BATCH, max(LEAST, len(tried) if few else len(space.configs) // BATCH))
            batch = model.choose(min(size, count - len(tried), len(model.configs) - len(tried)))
            told: list[Trial] = []
            for number in batch:
                told += yield model.configs[number]
            if len(told) < len(batch):
                room = min(BATCH, count - len(tried)) - len(batch)
                told += yield model.likely(room)
            while len(told) < len(batch):  # the sweep asks ahead, so wait for its answers
                told += yield None
            model.learn(batch, told)
            tried |= {model.configs[number] for number in batch}
    rest = (config for config in space.configs if config not in tried)
    for config in itertools.islice(rest, count - len(tried)):  # noqa: UP028
        yield config
    if count < len(space.configs):
        return f"the limit of {count} is reached"
    return "all are tried"


@dataclass
class Model:
    """The process on a pool of a space's configs, in random order; times are logarithms throughout.

    mean: [configs], expected. covariance: [configs, configs], with every chosen config taken as
    tried. Each chosen config has a gain, by which its time, when it is known, moves the mean.
    """

    configs: tuple[Config, ...]
    mean: Floats
    covariance: Floats
    patience: int = PATIENCE
    gains: dict[int, Floats] = field(default_factory=dict)
    tried: dict[int, float] = field(default_factory=dict)
    """Every candidate that was told, to the logarithm of its time; of a failed one, to NaN."""
    since_best: int = 0
    """Trials since the best time fell by EXPECTED or more."""
    variances: dict[int, float] = field(default_factory=dict)
    """The variance of each chosen config's time, at the moment it was chosen."""
    surprises: list[float] = field(default_factory=list)
    """Squares of (time - expected) over the variance; 1 on average if the model is right."""

    @classmethod
    def of(cls, space: Space, history: Sequence[History], seed: int) -> Model:
        """The model before the first trial. history: a space's own problem is used like others."""
        source = random.Random(f"{seed} {space.kernel.name} {space.problem.label}")
        drawn = source.sample(space.configs, len(space.configs))
        fit = _Fit(space, history)
        if len(drawn) > POOL:  # half of the pool by what is expected of them, half by chance
            means = fit.means(drawn)
            order = [int(i) for i in np.argsort(means, kind="stable")]
            drawn = [drawn[i] for i in (*order[: POOL // 2], *sorted(order[POOL // 2 :]))][:POOL]
        mean, covariance = fit.posterior(drawn)
        patience = PATIENCE if history else 2 * PATIENCE
        return cls(tuple(drawn), mean, covariance + _FACTOR**2, patience)

    def choose(self, size: int) -> list[int]:
        """The next batch, by index into configs."""
        batch: list[int] = []
        for _ in range(size):
            worth = self.worth() if self.gains else -self.mean
            worth[list(self.gains)] = -np.inf
            # Rounded, so that the last bits of a sum do not choose. The first of equals is taken.
            chosen = int(np.argmax(np.round(worth, 9)))
            column = self.covariance[:, chosen].copy()
            self.variances[chosen] = float(column[chosen]) + _NOISE**2
            self.gains[chosen] = column / self.variances[chosen]
            self.covariance -= np.outer(self.gains[chosen], column)
            batch.append(chosen)
        return batch

    def likely(self, size: int) -> tuple[Config, ...]:
        """The configs that follow if those already chosen take the times that the model expects."""
        if size < 1:
            return ()
        kept = dict(self.gains), dict(self.variances), self.covariance.copy()
        try:
            batch = self.choose(min(size, len(self.configs) - len(self.gains)))
        finally:
            self.gains, self.variances, self.covariance = kept
        return tuple(self.configs[number] for number in batch)

    def learn(self, batch: Sequence[int], told: Sequence[Trial]) -> None:
        """Take in the rows of a batch."""
        rows = {Config(trial.config): trial for trial in told}
        for number in batch:
            row = rows.get(self.configs[number])
            us = row.screened_us if row is not None else None
            known = [value for value in self.tried.values() if not math.isnan(value)]
            if us:
                value = math.log(us)
                better = not known or value < min(known) - EXPECTED
                self.since_best = 0 if better else self.since_best + 1
            else:
                value = math.nan
                self.since_best += 1
            self.tried[number] = value
            worst = max(known) if known else self.mean[number] + _FAILED
            believed = worst if math.isnan(value) else value
            off = float(believed - self.mean[number])
            if known and not math.isnan(value):  # the first one teaches the space's factor
                self.surprises.append(off * off / self.variances[number])
            # The gains were taken in this order, each with the earlier ones as tried.
            self.mean = self.mean + self.gains[number] * off

    def worth(self) -> Floats:
        """[configs]: expected improvement of each, tried ones too, as a share of the best time."""
        failed = {number for number, value in self.tried.items() if math.isnan(value)}
        good = [number for number in self.gains if number not in failed]
        if not good:
            return -self.mean
        # The mean of the scale's posterior: an inverse gamma that is worth _SURE trials at 1.
        scale = (_SURE + sum(self.surprises)) / (_SURE + len(self.surprises))
        spread = np.sqrt(scale * np.maximum(np.diag(self.covariance), 1e-12))
        below = float(np.min(self.mean[good])) - self.mean
        z = below / spread
        density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        share = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
        worth: Floats = below * share + spread * density
        return worth

    def settled(self) -> bool:
        """Whether another batch is not expected to find a better candidate."""
        if all(math.isnan(value) for value in self.tried.values()):
            return False
        return self.since_best >= self.patience and self.left() <= EXPECTED

    def left(self) -> float:
        """The largest expected improvement among untried configs, as a share of the best time."""
        worth = self.worth()
        worth[list(self.tried)] = -np.inf
        return float(np.max(worth))

    def why(self) -> str:
        """Why the search stopped."""
        return (
            f"the last {self.since_best} were no better, and another one is expected to gain "
            f"{max(0.0, self.left()):.2%} at most".replace("%", " %")
        )


class _Fit:
    """The process given the history: means and covariances of any configs of a space."""

    def __init__(self, space: Space, history: Sequence[History]) -> None:
        place = _place(space.problem)
        near = sorted(
            (h for h in history if len(h.times_us) > 1),
            key=lambda h: (math.dist(_place(h.problem), place), h.run, h.problem.label),
        )
        self._codes = _Codes(tuple(space.configs[0]))
        rows: list[Mapping[str, Value]] = []
        values, places, groups = [], [], []
        for group, one in enumerate(near):
            if len(rows) + len(one.configs) > HISTORY_ROWS:
                break
            logs = np.log(one.times_us)
            rows += list(one.configs)
            values.append(np.minimum(logs - logs.min(), _SLOWEST))
            places += [_place(one.problem)] * len(one.configs)
            groups += [group] * len(one.configs)
        self._rows = rows
        if not rows:
            return
        where = np.array(places)
        self._near = _likeness(where, np.array([place]))[:, 0]
        of = np.array(groups)
        same = of[:, None] == of[None, :]
        among = self._configs_alike(rows, rows) * np.where(same, 1.0, _likeness(where, where))
        among += _FACTOR**2 * same + _NOISE**2 * np.eye(len(rows))
        self._root = np.linalg.inv(np.linalg.cholesky(among))
        self._values = self._root @ np.concatenate(values)

    def _configs_alike(
        self, some: Sequence[Mapping[str, Value]], others: Sequence[Mapping[str, Value]]
    ) -> Floats:
        equal = self._codes.equal(some, others)
        count = len(self._codes.names)
        alike = _ALONE * equal / count + (1 - _ALONE) * np.exp(-_DECAY * (count - equal))
        return _AMPLITUDE**2 * alike

    def _seen(self, configs: Sequence[Config]) -> Floats:
        """[rows, configs]: the covariance with the history, in its orthogonal coordinates."""
        with_rows = self._configs_alike(self._rows, configs) * self._near[:, None]
        seen: Floats = self._root @ with_rows
        return seen

    def means(self, configs: Sequence[Config]) -> Floats:
        """The expected log time of each config; 0 without history."""
        if not self._rows:
            return np.zeros(len(configs))
        parts = [configs[i : i + POOL] for i in range(0, len(configs), POOL)]
        return np.concatenate([self._values @ self._seen(part) for part in parts])

    def posterior(self, configs: Sequence[Config]) -> tuple[Floats, Floats]:
        """Means, and covariances of all pairs."""
        covariance = self._configs_alike(configs, configs)
        if not self._rows:
            return np.zeros(len(configs)), covariance
        seen = self._seen(configs)
        return self._values @ seen, covariance - seen.T @ seen


class _Codes:
    """Configs as rows of zeros and ones, one column for each value of each parameter."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._columns: dict[tuple[str, Value | None], int] = {}

    def equal(
        self, some: Sequence[Mapping[str, Value]], others: Sequence[Mapping[str, Value]]
    ) -> Floats:
        """[some, others]: the number of parameters in which they are equal."""
        columns = [[self._of(config) for config in configs] for configs in (some, others)]
        one, other = (self._ones(rows) for rows in columns)
        return one @ other.T

    def _of(self, config: Mapping[str, Value]) -> list[int]:
        column = self._columns.setdefault
        return [column((n, config.get(n)), len(self._columns)) for n in self.names]

    def _ones(self, rows: Sequence[Sequence[int]]) -> Floats:
        ones = np.zeros((len(rows), len(self._columns)))
        ones[np.arange(len(rows))[:, None], np.array(rows)] = 1
        return ones


def _place(problem: Problem) -> tuple[float, ...]:
    """A problem as a point: doubling a size is a step of 1, of the head's dimension a step of 2."""
    return (
        math.log2(problem.batch * problem.heads),
        math.log2(problem.seqlen_q),
        math.log2(problem.seqlen_k),
        2 * math.log2(problem.head_dim),
        math.log2(problem.value_dim / problem.head_dim),
        2.0 * problem.causal,
        {"fp16": 0.0, "bf16": 0.5, "fp32": 4.0}.get(problem.dtype, 2.0),  # FP8: twice as fast
    )


def _likeness(some: Floats, others: Floats) -> Floats:
    """[some, others]: the correlation of two spaces, less with distance."""
    squares = ((some[:, None, :] - others[None, :, :]) ** 2).sum(axis=-1)
    likeness: Floats = _SHARED * np.exp(-squares / (2 * _REACH**2))
    return likeness
