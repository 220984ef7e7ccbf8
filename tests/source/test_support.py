"""The fakes are what they stand in for, and no test needs another test."""

import inspect
import os
from pathlib import Path

from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu

from attnsweep.bench.gpu import Gpu
from attnsweep.compile.nvrtc import CACHE_VARIABLE, Compiler, default_cache_dir


def public(of: type) -> dict[str, object]:
    """Methods by name, with the parameters that a caller must give."""
    return {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(of, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_fake_gpu_has_a_method_of_its_own_for_each_of_a_gpu():
    own = {name: method for name, method in public(FakeGpu).items() if name in vars(FakeGpu)}
    assert public(Gpu).items() <= own.items()


def test_the_fake_compiler_answers_as_the_compiler_does():
    own = public(FakeCompiler)
    assert own.keys() == public(Compiler).keys() - {"closure", "flags"}
    assert own.items() <= public(Compiler).items()


def test_the_session_has_one_cache_of_compiled_code(shared_cache, tmp_path_factory):
    assert default_cache_dir() == shared_cache == Path(os.environ[CACHE_VARIABLE])
