"""What tests of served kernels share on a card. Needs PyTorch."""

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from unguarded import unguarded

import attnsweep
from attnsweep.serve.runtime.operator import Operator
from attnsweep.serve.runtime.table import GpuKey, read_table


def served_since(explain: Callable[[], Any]) -> Callable[[], int]:
    """A count of the calls that kernels serve from now on; skips on a GPU that they are not for.

    explain: explains a call that one serves.
    """
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    explained = explain()
    if explained.code == "gpu":
        pytest.skip(explained.reason)
    assert explained.kernel is not None, str(explained)
    before = attnsweep.attention_counters().get("kernel", 0)
    return lambda: attnsweep.attention_counters().get("kernel", 0) - before


def near(out: Any, want: Any) -> bool:
    """Whether each row is within 1 % of its own length, so that rows without a key are 0."""
    error, norm = (each.norm(dim=-1) for each in (out.double() - want, want))
    return bool((error <= 1e-2 * norm).all())


def error(got: Any, exact: Any) -> float:
    """The relative error of the whole: of norms."""
    return float((got.double() - exact).norm() / exact.norm())


def captured(step: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a step that ran before, and what its replays write to."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@contextmanager
def exported_package(
    names: Collection[str], place: Path, name: str, made: Callable[[Sequence[Path]], Sequence[Path]] = lambda runs: runs
) -> Iterator[Any]:
    """A package of this card's runs of these names, as a program imports it; skips where it has none.

    made: makes the runs that are exported of those.
    """
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    key = GpuKey.of(torch.cuda.get_device_properties(0))
    runs = recorded.runs_for(key, names)
    if not runs:
        pytest.skip(f"no card of sm_{''.join(map(str, key.compute_capability))} has recorded runs")
    path = str(recorded.exported_for(key, made(runs), place, name))
    sys.path.insert(0, path)
    yield importlib.import_module(name)
    sys.path.remove(path)


def always(package: Any, name: str) -> Operator:
    """An operator of the package's kernels with a guard that serves whatever the rules allow."""
    table = read_table(Path(package.__file__).parent)
    gpus = {key: unguarded(gpu) for key, gpu in table.gpus.items()}
    return Operator(replace(table, gpus=gpus), name)
