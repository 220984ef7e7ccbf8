"""Which rule refuses which config, each rule asked once for all configs that it cannot tell apart.

A rule is a function of the config, the problem and the architecture, and reads few parameters. It
is asked with one config that notes what it reads; every other config with the same values of those
parameters would be read alike, and so has the same answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from attnsweep.core.errors import KernelError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, Value
from attnsweep.family import time_limit
from attnsweep.family.family import Config, Family

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.intp]

Values = Mapping[str, tuple[Value, ...]]


class _Noting(Config):
    """A config that notes the names of the parameters that are read, in order."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)  # alone, so that __getattr__ is asked
        self.read: dict[str, None] = {}

    def __getitem__(self, name: str) -> Value:
        value = super().__getitem__(name)
        self.read[name] = None
        return value

    def __getattr__(self, name: str) -> int:
        value = super().__getattr__(name)
        self.read[name] = None
        return value

    def _read_all(self) -> None:
        self.read.update(dict.fromkeys(self._values))

    def __hash__(self) -> int:
        self._read_all()
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        self._read_all()
        return super().__eq__(other)

    def __getstate__(self) -> dict[str, Value]:
        self._read_all()
        return super().__getstate__()


def refused(kernel: Family, problem: Problem, arch: Arch, values: Values) -> Iterator[str | None]:
    """The first rule that refuses each combination of values, or None, as itertools orders them."""

    def passes(rule: str, config: Config) -> bool:
        time_limit.begin()
        return kernel.passes(rule, config, problem, arch)

    rules = kernel.rules_for(values)
    try:
        return iter(_at_once(rules, passes, values))
    except KernelError as error:
        if isinstance(error.__cause__, time_limit.TooLong):
            raise  # the user has waited once
        # Ask one config after the other, so that the error names the first one.
        return _one_by_one(rules, passes, values)


def _one_by_one(
    rules: tuple[str, ...], passes: Callable[[str, Config], bool], values: Values
) -> Iterator[str | None]:
    for combination in itertools.product(*values.values()):
        config = Config(dict(zip(values, combination, strict=True)))
        yield next((rule for rule in rules if not passes(rule, config)), None)


def _at_once(
    rules: tuple[str, ...], passes: Callable[[str, Config], bool], values: Values
) -> list[str | None]:
    import numpy as np

    count = math.prod(map(len, values.values()))
    # [combinations] for each parameter of several values: which of them a combination has.
    columns: dict[str, NDArray[np.int16]] = {}
    strides, stride = [], count
    for name, options in values.items():
        stride //= len(options)
        strides.append((name, options, stride))
        if len(options) > 1:
            columns[name] = (np.arange(count) // stride % len(options)).astype(np.int16)

    def config_of(row: int) -> _Noting:
        return _Noting({name: own[row // stride % len(own)] for name, own, stride in strides})

    verdicts = np.full(count, -1, np.int16)  # which of the rules refuses it first
    for number, rule in enumerate(rules):
        waiting: list[Rows] = [np.flatnonzero(verdicts < 0)]
        while waiting:
            alike = waiting.pop()
            if not len(alike):
                continue
            first = int(alike[0])
            config = config_of(first)
            keeps = passes(rule, config)
            for name in config.read:
                if name not in columns or len(alike) == 1:
                    continue
                codes = columns[name][alike]
                same = codes == codes[0]
                if same.all():
                    continue
                # They agree in all that was read before, so that each would be asked for this one.
                for code in range(len(values[name])):
                    if code != codes[0]:
                        waiting.append(alike[codes == code])
                alike = alike[same]
            if not keeps:
                verdicts[alike] = number
    named = (*rules, None)
    return [named[number] for number in verdicts.tolist()]
