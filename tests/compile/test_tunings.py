"""Autotuners of a call: two of them, and configs beside those of the file."""

import importlib.util
from pathlib import Path

import pytest

from attnsweep.compile.calls import with_calls
from attnsweep.compile.trace import Tracers
from attnsweep.core.errors import CompileError, SpecError
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan

missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"tracing needs {', '.join(missing)}"),
    pytest.mark.usefixtures("forked_tracers"),
]

LAUNCHERS = Path(__file__).parents[1] / "support/launchers/twice.py"
ARCH = arch_named("sm_90a")
PROBLEM = Problem(1, 2, 2, 256, 256, 64, "bf16")
SPEC = """
name: calls
arch: sm_90a
problems: [{batch: 1, heads: 2, seqlen: 256, head_dim: 64, dtype: bf16}]
kernels:
  both: {call: 'twice.py:both'}
  wide: {call: 'twice.py:hooked', widen: true}
baselines: []
"""


@pytest.fixture(scope="module")
def tracers(place):
    with Tracers(ARCH, place / "cache") as made:
        yield made


@pytest.fixture(scope="module")
def spaces(place, tracers):
    spec = load_spec(place / "calls.yaml", discover)
    (place / "again.yaml").write_text(spec.resolved(place))
    assert load_spec(place / "again.yaml", discover) == spec
    return plan(with_calls(spec, tracers), ARCH)[0].spaces


def test_two_autotuners_are_two_axes_and_names_of_both_say_whose(spaces, tracers):
    both, _ = spaces
    assert (both.total, len(both.configs)) == (4, 4)
    assert {*both.configs[0]} == {"first.BLOCK", "first.num_warps", "second.BLOCK", "TIMES"}
    assert {*both.variants[both.configs[0]]} == {"first", "second"}
    values = {"first.BLOCK": 32, "first.num_warps": 8, "second.BLOCK": 128, "TIMES": 2}
    launches = [launch for _, _, launch in tracers.of("twice.py:both").submit(PROBLEM, values).result().stages]
    assert [(n.function, n.threads, n.grid[0]) for n in launches] == [("first", 256, 16), ("second", 128, 256)]


def test_a_value_that_neither_takes(tracers):
    with pytest.raises(CompileError, match=r"neither the function nor its autotuner has third\.BLOCK"):
        tracers.of("twice.py:both").submit(PROBLEM, {"third.BLOCK": 32}).result()


def test_widened_configs_are_combinations_of_values_and_neighbours_that_the_file_keeps(spaces, tracers):
    _, wide = spaces
    assert {c["BLOCK"] for c in wide.configs} == {16, 32}
    assert {c["num_warps"] for c in wide.configs} == {2, 4, 8, 16}
    assert (wide.total, wide.removed["prune_configs_by"]) == (12, 4)
    # Its descriptor has the shape that the original's hook gives it.
    made = tracers.of("twice.py:hooked").submit(PROBLEM, {"BLOCK": 64, "num_warps": 2}).result()
    assert [(n.threads, n.grid[0]) for _, _, n in made.stages] == [(64, 8)]


@pytest.mark.parametrize("kernel", ["{call: 'twice.py:hooked', BLOCK: 32, widen: true}", "{widen: true}"])
def test_only_a_calls_own_configs_are_widened(place, kernel):
    (place / "wrong.yaml").write_text(SPEC.replace("{call: 'twice.py:hooked', widen: true}", kernel))
    with pytest.raises(SpecError, match="which is of a call's own configs"):
        load_spec(place / "wrong.yaml", discover)
