"""Callables on the CPU, in Triton's interpreter: right ones pass, and each fault is a sentence."""

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import attnsweep
from attnsweep.compile import trace
from attnsweep.core.cases import Case
from attnsweep.core.errors import SpecError
from attnsweep.core.hardware import arch_named
from attnsweep.core.ops import FORWARD
from attnsweep.core.problem import Problem
from attnsweep.tools.coverage import cases_of
from attnsweep.tools.interpret import Interpreter
from attnsweep.tools.simulator import SimtError

missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"the interpreter needs {', '.join(missing)}"),
    pytest.mark.usefixtures("forked_tracers"),
]

LAUNCHERS = Path(__file__).parents[1] / "support/launchers/wrong.py"
EXAMPLE = Path(attnsweep.__file__).parent / "baselines/triton_kernel.py"
ARCH = arch_named("sm_90a")
SMALL = Case(Problem.parse("(1,4/2,65x70,16) fp16 causal"))


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory):
    """An interpreter of each function of the launchers, all begun when they are first asked for."""
    place, made = tmp_path_factory.mktemp("wrong"), {}
    shutil.copy(LAUNCHERS, place)

    def of(function):
        if function not in made:
            file = EXAMPLE if function == "example" else place / "wrong.py"
            made[function] = Interpreter(f"{file}:{'attention' if function == 'example' else function}", ARCH)
        return made[function]

    yield of
    for each in made.values():
        each.__exit__()


FAULTS = {
    "": None,
    "diagonal": "wrong: error of o",
    "beyond the keys": "error of o nan",
    "last row": "error of o nan",
    "input": "wrote to its input q, or next to it",
    "far away": "its process died (SIG",
    "shape": "must be a power of 2",
    "exits": "raised SystemExit: 3",
    "dtype": "o: returned torch.float32 on cpu, not torch.float16",
    "nothing": "o: returned NoneType in place of a torch.Tensor",
    "returns an input": "o: returned memory of an input",
    "hangs": "no answer within 2 s",
}


def said_of(machine, values, case):
    try:
        result = machine.check(machine.family, values, case)
    except SimtError as error:
        return str(error)
    return None if result.ok else f"wrong: {result}"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_told(interpreters, fault, monkeypatch):
    if fault == "hangs":
        monkeypatch.setattr(trace, "_LIMIT_S", 2.0)
    said, why = said_of(interpreters("attention"), {"fault": fault}, SMALL), FAULTS[fault]
    assert said is None if why is None else why in said


def test_what_raises_is_told_with_the_users_line(interpreters):
    (line,) = [n for n, text in enumerate(LAUNCHERS.read_text().split("\n"), 1) if "the line that raises" in text]
    assert f"wrong.py:{line})" in said_of(interpreters("attention"), {"fault": "shape"}, SMALL)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("(2,4/2,97x161,64) fp16 causal", "BLOCK_M=64 BLOCK_N=32"),
        ("(1,2,130x95,16) fp16 full", "BLOCK_M=32"),
        ("(1,1,200x70,32) fp16 causal", "BLOCK_M=128 BLOCK_N=64"),  # with rows that see no key
        ("(1,1,70,40) fp32 causal", ""),  # in a tile of 64 columns
    ],
)
def test_the_example_is_right(interpreters, case, config):
    machine, case = interpreters("example"), Case(Problem.parse(case))
    configs = machine.configs(machine.family, config, case.problem)
    assert said_of(machine, configs[0], case) is None
    assert all(word in configs[0].label for word in config.split())


def test_gradients_are_those_of_a_callable_that_takes_six_tensors(interpreters):
    machine, whole = interpreters("gradients"), Problem.parse("(2,8,1024,16) fp16 causal backward")
    assert machine.family.serves(whole)
    assert not machine.family.serves(replace(whole, op=FORWARD))
    case = cases_of(machine.family, whole)[2]
    assert said_of(machine, {}, case) is None
    assert "error of dv" in said_of(machine, {"fault": "dv"}, case)


def test_bf16_is_refused_since_the_interpreter_multiplies_its_bits(interpreters):
    with pytest.raises(SpecError, match="does not compute in bf16"):
        interpreters("attention").check(None, {}, Case(Problem.parse("(1,2,64,16) bf16 full")))
