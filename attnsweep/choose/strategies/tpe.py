"""Strategy tpe: Optuna's."""

from __future__ import annotations

import random as _random
import zlib
from typing import TYPE_CHECKING, Any

from attnsweep.choose.strategies.staged import _descend, _path
from attnsweep.core.errors import ToolchainError
from attnsweep.core.files import install_command
from attnsweep.core.trial import Trial
from attnsweep.family.family import Config
from attnsweep.family.space import Space

if TYPE_CHECKING:
    from attnsweep.choose.strategies.simple import Proposals


def tpe(space: Space, candidates: int | None, seed: int) -> Proposals:
    """Model-based: Optuna's tree-structured Parzen estimator, seeded, without repeats.

    It draws a config parameter by parameter, from the values of the configs with the same
    beginning, so that no draw breaks a rule. A parameter with other values is another parameter to
    the model. STARTUP configs are random; then come batches of BATCH, each after the trials of the
    last one. Failed candidates teach the model nothing. If the model draws only known configs, the
    next ones are random. Raises ToolchainError without Optuna. Bergstra et al., Algorithms for
    hyper-parameter optimization, NeurIPS 2011.
    """
    try:
        import optuna
    except ImportError as error:
        hint = install_command("search")
        raise ToolchainError("strategy tpe needs Optuna", hint=hint) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    label = f"{seed} {space.kernel.name} {space.problem.label}"
    sampler = optuna.samplers.TPESampler(
        seed=zlib.crc32(label.encode()), n_startup_trials=STARTUP, constant_liar=True
    )
    study = optuna.create_study(sampler=sampler)
    left = _random.Random(label).sample(space.configs, len(space.configs))
    count = len(left) if candidates is None else min(candidates, len(left))
    times: dict[Config, float | None] = {}
    failed = optuna.trial.TrialState.FAIL

    def learn(drawn: Any, time_us: float | None) -> None:
        study.tell(drawn, time_us, state=failed if time_us is None else None)

    while len(times) < count:
        size = min(BATCH if times else STARTUP, count - len(times))
        batch: dict[Config, Any] = {}
        attempts = 0
        while len(batch) < size:
            attempts += 1
            if not times or attempts > 4 * size:
                config = next(c for c in left if c not in batch and c not in times)
                study.enqueue_trial(_path(space.configs, config))
            drawn = study.ask()
            config = _descend(space.configs, drawn.suggest_categorical)
            if config in batch or config in times:
                learn(drawn, times.get(config))
            else:
                batch[config] = drawn
        told: list[Trial] = []
        for config in batch:
            told += yield config
        while len(told) < len(batch):  # the sweep asks ahead, so wait for its answers
            told += yield None
        for row in told:
            times[Config(row.config)] = row.screened_us
        for config, drawn in batch.items():
            learn(drawn, times.get(config))


# For strategy tpe: random configs before the model is asked, and configs of one batch.
STARTUP = 24
BATCH = 8
