"""What a tracing process is spared of PyTorch: usual launchers do without, and whoever asks for more has it."""

import itertools
import subprocess
import sys

import pytest

from attnsweep.compile.trace import Tracer
from attnsweep.compile.traced import warm
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem

BEGIN = """
import sys
from types import ModuleType
from attnsweep.compile.traced import fake, warm
from attnsweep.core.hardware import ARCHS
import torch
warm.import_all()
def usual(q):
    torch.empty_like(q), torch.zeros_like(q), q.new_empty(q.shape), torch.empty(3, device=q.device), torch.zeros_like(q)
    rows = q.transpose(1, 2).contiguous().view(-1, 16)[2:].reshape(-1, 2, 16)
    (rows.float() * rows + 1).sum(-1).to(q.dtype), q.unsqueeze(0).expand(3, *q.shape), q @ q.mT, q.split(1, 1)
    q.zero_(), q.amax(-1).exp(), q.stride(), q.flatten(0, 1), q.clone(), torch.softmax(q, -1), torch.cat([q, q])
"""
USUAL = """
with fake.no_card(ARCHS["sm_90a"]):
    usual(torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="cuda"))
assert not warm.used(), warm.used()
"""
WHOLE = """
from torch._dynamo.source import AttrSource
assert torch._dynamo.variables.builder.AttrSource is AttrSource is torch._dynamo.source.AttrSource
assert torch._dynamo.source.__spec__.origin == torch._dynamo.source.__file__
from torch.distributed.tensor import DTensor
import torch.fx.experimental.symbolic_shapes as symbols
from sympy import Basic, Symbol
from torch.utils._sympy.functions import Max
assert isinstance(Symbol("x"), Basic) and issubclass(DTensor, torch.Tensor)
assert symbols.compute_unbacked_bindings.__module__ == symbols.guard_or_false.__module__ == symbols.__name__
assert torch._dynamo.config.cache_size_limit and torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch._dynamo.disable.__module__.startswith("torch._dynamo"), torch._dynamo.disable
assert all(type(sys.modules[name]) is ModuleType for name in warm.used()) and warm.used() == [*warm._SPARED]
torch.testing.assert_close(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3)), torch.ones(3))
with fake.no_card(ARCHS["sm_90a"]):
    usual(torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="cuda"))
"""
HELD = """
import sympy, torch.distributed.tensor as distributed, torch.utils._sympy.functions as functions
held = sympy.Basic, distributed.DTensor, functions.Max
assert not isinstance(1, held) and not issubclass(int, held) and not warm.used()
def of_symbol(symbol: int | sympy.Basic) -> None | sympy.Basic: ...
class Own(held[0]): ...
x = sympy.Symbol("x")
assert isinstance(x, held) and isinstance(Own(x), sympy.Basic) and isinstance(functions.Max(x, 1), held[2])
assert issubclass(held[1], torch.Tensor) and held[1].from_local and held[0](x).args == (x,)
"""
THREADS = """
import threading
errors = []
def ask():
    try:
        import sympy
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
        assert sympy.Symbol("x") in sympy.Basic(sympy.Symbol("x")).args
    except BaseException as error:
        errors.append(error)
sys.path.insert(0, "mine")
threads = [threading.Thread(target=ask) for _ in range(6)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert not errors and sys.path[0] == "mine", (errors, sys.path)
"""
RELOADED = """
import importlib.util, sympy
assert importlib.util.find_spec("torch._dynamo.source").origin.endswith("source.py")
importlib.reload(sympy)
assert isinstance(sympy.Symbol("x"), sympy.Basic)
"""
FAILED = """
import pytest, sympy
sys.modules["sympy.core"] = None
for _ in range(2):
    with pytest.raises(ImportError):
        sympy.Symbol
del sys.modules["sympy.core"]
assert isinstance(sympy.Symbol("x"), sympy.Basic)
"""
SHADOWED = """
import pathlib, tempfile
with tempfile.TemporaryDirectory() as folder:
    for name in ("profile", "cProfile", "mpmath"):
        pathlib.Path(folder, f"{name}.py").write_text("raise RuntimeError(__file__)")
    sys.path.insert(0, folder)
    import torch._dynamo.source, sympy
    assert sympy.Symbol("x") and sys.path[0] == folder
"""
COMPILED = """
import pytest
with fake.no_card(ARCHS["sm_90a"]):
    import torch._dynamo
    with pytest.raises(fake.NoCard, match="torch.compile"):
        torch._dynamo.optimize("eager")(lambda x: x + 1)(torch.empty(3, device="cuda"))
torch.testing.assert_close(torch._dynamo.optimize("eager")(lambda x: x + 1)(torch.zeros(3)), torch.ones(3))
"""
NUMBERS = (True, False, 0, 1, 7, (), (1, 2), (1, 3), (1, 2, 3))


PROGRAMS = {
    "usual first": USUAL + WHOLE,
    "whole": WHOLE,
    "held before": HELD,
    "threads": THREADS,
    "reloaded": RELOADED,
    "failed": FAILED,
    "compiled in a call": COMPILED,
    "a user's profile.py": SHADOWED,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_usual_launchers_execute_none_and_others_the_whole_module(program):
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:guard_size_oblivious:FutureWarning")
def test_what_stands_in_answers_as_pytorch_does_for_numbers():
    symbols, compared = pytest.importorskip("torch.fx.experimental.symbolic_shapes"), 0
    for names, of_numbers in warm._OF_NUMBERS.items():
        for name in filter(lambda name: of_numbers and hasattr(symbols, name), names.split()):
            for args in itertools.chain(*(itertools.product(NUMBERS, repeat=n) for n in (1, 2))):
                try:
                    theirs = getattr(symbols, name)(*args)
                except (TypeError, AssertionError):  # what is no argument of it
                    continue
                ours = of_numbers(*args)
                assert (type(ours), ours) == (type(theirs), theirs), (name, args)
                compared += 1
    assert compared > 100


LAUNCHER = """
import sys
import torch

def attention(q, k, v, *, causal, sm_scale, before=0):
    kinds = [type(sys.modules[name]).__name__ for name in ("torch._dynamo", "sympy")]
    torch.tensor([before], device=q.device)
    raise ValueError(f"{kinds}")
"""


def test_what_one_config_has_executed_is_there_for_the_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LAUNCHER)
    tracer = Tracer("mine.py:attention", ARCHS["sm_90a"], tmp_path, jobs=1)
    problem, kinds = Problem(1, 2, 2, 64, 64, 16, "bf16"), []
    for before in (1, 2):
        kinds.append(str(tracer.submit(problem, {"before": before}).exception(30)))
    tracer.close()
    assert "['_Later', '_Later']" in kinds[0]
    assert "['module', 'module']" in kinds[1]


def test_a_pytorch_without_them_is_imported_as_it_is(monkeypatch):
    names = ("torch.no_such.module", "torch.utils.no_such")
    monkeypatch.setattr(warm, "_SPARED", dict.fromkeys(names, lambda _: {}))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    warm.import_all()
    assert not sys.modules.keys() & names
