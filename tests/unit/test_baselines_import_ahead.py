"""Baselines' packages are imported in a thread, which is over before rounds are timed."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from attnsweep.baselines import import_ahead
from attnsweep.baselines.import_ahead import ImportAhead
from attnsweep.bench import process
from attnsweep.core import timings
from attnsweep.core.errors import NoGpuError
from attnsweep.core.problem import Problem
from attnsweep.device import cuda

PROBLEM = Problem(1, 2, 2, 64, 64, 64)
NAMES = ("torch_flash", "triton_flash")


@pytest.fixture(autouse=True)
def no_steps():
    timings.taken()
    yield
    timings.taken()


TRITON = SimpleNamespace(done=lambda problem: False)
TORCH = {"torch/__init__.py": "", "torch/_dynamo.py": ""}


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Makes packages of files; and says which of them, or of their modules, are imported."""
    real = ("torch", "triton")
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith(real)}
    monkeypatch.syspath_prepend(tmp_path)
    names = set()

    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            names.add(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        importlib.invalidate_caches()
        return lambda: names & sys.modules.keys()

    yield make
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_packages_are_imported_ahead_and_none_that_is_not_asked_for(there):
    there(TORCH | {"triton.py": "", "cudnn.py": "raise RuntimeError('no driver')"})
    import_ahead.load(["torch_flash", "flash_attn_3"])
    # What a missing package would import is not needed.
    assert {"torch", "torch._dynamo", "triton"} & sys.modules.keys() == {"torch"}
    imported = there({"fa3_fwd_interface.py": "_flash_attn_forward = object()  # no function"})
    import_ahead.load(["cudnn", "flash_attn_3", "flash_attn_3_fp8"])
    assert imported() == {"torch", "fa3_fwd_interface", "torch._dynamo"}


def test_what_calls_launch_with_is_imported_and_started_ahead(there):
    """The first trial waited 5 s for it, on H200 hosts."""
    started = (
        "import sys\nclass Driver:\n    @property\n    def utils(self):\n        sys.modules['triton'].built = True\n"
    )
    there(
        TORCH
        | {
            "triton/__init__.py": "from triton import runtime\n",
            "triton/runtime.py": f"{started}driver = active = Driver()\ndriver.active = active\n",
        }
    )
    import_ahead.load(["attend.py:attention", "mine=other.py:attention"])
    assert sys.modules["triton"].built


def test_a_package_that_exits_while_it_is_imported_keeps_no_other_from_it(there):
    imported = there(TORCH | {"triton.py": "raise SystemExit(3)", "cudnn.py": ""})
    import_ahead.load(["attend.py:attention", "triton_flash", "cudnn"])
    assert imported() == {"torch", "cudnn"}


FLASH_3 = """
class Operator:  # as torch.library.custom_op makes one; a call of it imports torch._dynamo
    def __init__(self, function):
        self._init_fn = function

    def __call__(self, *given):
        raise AssertionError("the operator was called")


def forward(x):
    return x + 1


def flash_attn_func(x):
    return _flash_attn_forward(x)


_flash_attn_forward = FORWARD
"""


@pytest.mark.parametrize("forward", ["Operator(forward)", "forward"])
def test_flash_attention_3_is_called_without_its_operator(there, forward):
    imported = there(TORCH | {"flash_attn_interface.py": FLASH_3.replace("FORWARD", forward)})
    import_ahead.load(["flash_attn_3"])
    assert imported() == {"torch", "flash_attn_interface"}  # and not torch._dynamo
    assert sys.modules["flash_attn_interface"].flash_attn_func(1) == 2


def test_rounds_wait_for_imports_within_bounds(there):
    """The call that waits is an entrant's, which would fail in the place of a hanging import."""
    imported = there({"torch.py": "import time\ntime.sleep(0.4)\nhere = True\n"})
    for longest_s, done in ((0.1, False), (30.0, True)):
        made = ImportAhead(TRITON, longest_s=longest_s)
        made.end()  # nothing was begun
        made.begin(["torch_flash"])
        made.end()
        assert hasattr(sys.modules.get("torch"), "here") == done
        assert timings.taken()["wait for imports"] > 0.05
        made.end()
        assert "wait for imports" not in timings.taken()  # it waits once
    assert imported() == {"torch"}


def test_nothing_is_begun_without_a_driver(monkeypatch):
    """It would go on for seconds after the command has said why it ended."""
    monkeypatch.setattr(cuda, "driver_cuda", lambda: None)
    with pytest.raises(NoGpuError, match="no NVIDIA driver"):
        process.describe(NAMES, (PROBLEM, 3), SimpleNamespace())  # which begins nothing
