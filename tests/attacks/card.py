"""A card on which callables are judged: PyTorch on the CPU, and compare.cu compiled by g++.

The bench, the baselines and the verifier are the real ones. A graph replays the operators that were
called while it was captured. Time is what kernels.WORK_US says.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simt.device import Device, HostBuffer
from simt.harness import Simulator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attacks import kernels
from attnsweep.baselines.prepare import BoundBaseline
from attnsweep.bench import problem as opening
from attnsweep.bench.bench import Bench
from attnsweep.bench.process_state import ProcessState
from attnsweep.core import cases
from attnsweep.core.problem import Problem

torch.set_num_threads(1)  # several would wait for one another longer than these tensors take
PROBLEM = Problem(2, 2, 1, 9, 20, 16, "bf16")


class Buffer(HostBuffer):
    """With the arrays that DLPack takes."""

    def view(self, shape: Any, dtype: Any) -> Any:
        return self.main.view(dtype).reshape(shape)


class Stream(nullcontext):
    ptr = 0


class Card(Device):
    """A session whose clock is the kernels'."""

    stream = Stream()

    def time_us(self, work: Any, then: Any = None) -> float:
        before = kernels.WORK_US[0]
        work()
        took_us = kernels.WORK_US[0] - before + 5.0  # a launch
        if then is not None:
            then()
        return took_us

    def release(self) -> None:
        """There is no pool."""

    reset_l2 = release

    def sm_mhz(self) -> float:
        return 1980.0

    def identity(self) -> dict[str, Any]:
        return {}

    def settings(self) -> dict[str, Any]:
        return {**SETTINGS}


SETTINGS: dict[str, Any] = {"power limit (mW)": 700_000, "SM clock for programs (MHz)": 1980}
"""The settings of the card."""


class Graph:
    """The operators of a capture."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def replay(self) -> None:
        for function, args, options, made in self.calls:
            anew = function(*args, **options)
            if "empty" in str(function):
                continue
            for old, new in zip(tree_leaves(made), tree_leaves(anew), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        made = function(*args, **(kwargs or {}))
        self.graph.calls.append((function, args, kwargs or {}, made))
        return made


def fakes_of(capturing: list[Graph]) -> dict[str, Any]:
    """What PyTorch has for a card. capturing: the graphs that are being captured."""

    @contextmanager
    def graph(made: Graph, stream: object) -> Any:
        capturing.append(made)
        try:
            with Recorder(made):
                yield
        finally:
            capturing.pop()

    return {
        "is_available": lambda: True,
        "ExternalStream": lambda pointer: SimpleNamespace(synchronize=lambda: None),
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
        "is_current_stream_capturing": lambda: bool(capturing),
    }


FACTS = SimpleNamespace(arch="sm_90a", sm_count=2, l2_bytes=4_500, memory_bytes_per_second=1e12)


def opened(
    simulator: Simulator,
    state: ProcessState,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any = Bench,
    small: tuple[cases.Case, ...] = (),
    problem: Problem = PROBLEM,
    **options: Any,
) -> Any:
    """A bench of a problem."""
    card = Card(simulator)
    card.gpu = FACTS
    card.take_place(monkeypatch, Buffer)
    for name, fake in fakes_of([]).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(opening, "CudaSession", lambda: card)
    monkeypatch.setattr(cases, "small_cases", lambda problem: small)
    # As where all outputs of a graph find room.
    monkeypatch.setattr(BoundBaseline, "keep", lambda self, *of: setattr(self, "room", 100))
    kernels.MEMORY.clear()
    kernels.THREADS.clear()
    return kind(problem, replay_us=400, seed=3, state=state, **options)
