"""Times that recorded runs hold of other problems: where a model-based search begins.

`history.json.xz` comes with the package; scripts/history.py writes it from results/.
"""

from __future__ import annotations

import functools
import itertools
import json
import lzma
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnsweep.core.problem import Problem, Value
from attnsweep.family.family import Family

FILE = Path(__file__).with_name("history.json.xz")
# Steps of a time's logarithm.
_STEPS = 1000
# SMs of every card in the shipped history.
_RECORDED_SMS = 132


@dataclass(frozen=True, slots=True)
class History:
    """Configs of one family that one run timed on one problem, and their first times."""

    kernel: str
    problem: Problem
    run: str
    """`h200/flash_short_h200`: the card and the name of the run."""
    configs: tuple[Mapping[str, Value], ...]
    times_us: tuple[float, ...]

    @staticmethod
    def pack(histories: Iterable[History]) -> bytes:
        """JSON in xz, by kernel. A config stands once, and a time as steps from the one before.

        Which makes a time 0.05 % longer or shorter at most.
        """
        groups: dict[tuple[str, ...], list[History]] = {}
        for one in histories:
            groups.setdefault((one.kernel, *one.configs[0]), []).append(one)
        facts = [_facts(kernel, params, group) for (kernel, *params), group in groups.items()]
        text = json.dumps(facts, separators=(",", ":"))
        return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)

    @staticmethod
    def unpack(data: bytes) -> list[History]:
        """The histories that `pack` packed, those of a kernel together."""
        return [one for facts in json.loads(lzma.decompress(data)) for one in _histories(facts)]


def shipped_history(kernel: str) -> tuple[History, ...]:
    """The recorded times of a family on other problems that come with attnsweep; may be empty."""
    return _shipped().get(kernel, ())


def history_on(kernel: Family, sm_count: int) -> tuple[History, ...]:
    """The shipped history of a family for a card: what counts SMs there counts this card's."""
    histories = shipped_history(kernel.name)
    names = {param.name for param in kernel.params if param.counts_sms}
    if sm_count == _RECORDED_SMS or not names:
        return histories

    def counted(config: Mapping[str, Value]) -> dict[str, Value]:
        same = {name for name in names if config.get(name) == _RECORDED_SMS}
        return {**config, **dict.fromkeys(same, sm_count)}

    return tuple(replace(h, configs=tuple(map(counted, h.configs))) for h in histories)


@functools.cache
def _shipped() -> dict[str, tuple[History, ...]]:
    found: dict[str, list[History]] = {}
    for history in History.unpack(FILE.read_bytes()):
        found.setdefault(history.kernel, []).append(history)
    return {kernel: tuple(histories) for kernel, histories in found.items()}


def _facts(kernel: str, params: Sequence[str], histories: Sequence[History]) -> dict[str, Any]:
    rows = [[tuple(config[name] for name in params) for config in h.configs] for h in histories]
    numbers = {row: at for at, row in enumerate(sorted({*itertools.chain(*rows)}, key=repr))}
    runs = []
    for history, own in zip(histories, rows, strict=True):
        logs = [0, *(round(_STEPS * math.log(us)) for us in history.times_us)]
        steps = [b - a for a, b in itertools.pairwise(logs)]
        runs.append([history.run, history.problem.label, [numbers[row] for row in own], steps])
    return {"kernel": kernel, "params": params, "configs": [*numbers], "runs": runs}


def _histories(facts: Mapping[str, Any]) -> Iterator[History]:
    configs = [dict(zip(facts["params"], row, strict=True)) for row in facts["configs"]]
    for run, label, numbers, steps in facts["runs"]:
        times_us = tuple(math.exp(log / _STEPS) for log in itertools.accumulate(steps))
        own = tuple(configs[number] for number in numbers)
        yield History(facts["kernel"], Problem.parse(label), run, own, times_us)
