"""Fixtures of the tests that need no GPU: stand-ins for the card, the compiler, the disk and PyTorch's driver.

`stand_ins`, which each of their directories has, applies the first three to every test.
"""

import os
import stat
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import fleets
import pytest
import typer
from fake_cards import FakeCards
from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu
from once import once
from samples import TEST_GPU
from sweeping import FAMILIES, SPEC, TIMES, use, use_fake_compiler

from attnsweep.baselines.backend import Package
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.files import shipped
from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.family import discover as discovering
from attnsweep.family.discover import discover
from attnsweep.reports import progress
from attnsweep.specs.load import load_spec
from attnsweep.store.run import open_run
from attnsweep.sweep import candidates, session
from attnsweep.tools import doctor

load_kernel = discovering.load_kernel
known_kernel = cache(load_kernel)


def loaded_once(path):
    """`load_kernel`, which loads a family once for a process, if it ships or is the tests' own."""
    return (known_kernel if path.parent in (shipped("kernels"), FAMILIES) else load_kernel)(path)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Dozens of files ask for all families when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovering, "load_kernel", loaded_once)
        return (yield)


@pytest.fixture(scope="session")
def made_once():
    """What cannot change and hundreds of tests need is made once for a process.

    What recorded runs give; families, shipped ones and those of tests; the command line.
    """
    with pytest.MonkeyPatch.context() as patch, once():
        patch.setattr(discovering, "load_kernel", loaded_once)
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def fake_compilers():
    """What a test asked of the fake compilers ends with it: another file's test uses them too."""
    yield
    FakeCompiler.as_new()


@pytest.fixture
def disk(monkeypatch):
    """A disk that takes no time, as no test loses power. fails: the errno of each sync.

    at: what happens at the n-th one. folder: whether the last one was of a folder.
    """
    disk = SimpleNamespace(fails=None, at={}, synced=0, folder=False)

    def sync(fd):
        disk.synced += 1
        disk.folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        disk.at.get(disk.synced, lambda: None)()
        if disk.fails is not None:
            raise OSError(disk.fails, os.strerror(disk.fails))

    monkeypatch.setattr(os, "fsync", sync)
    return disk


@pytest.fixture
def driver():
    """A driver whose kernels are NumPy's; needs PyTorch."""
    from attending import Kernel
    from fake_driver import FakeDriver

    return FakeDriver(Kernel())


@pytest.fixture
def kernel(driver):
    """The driver's kernel."""
    return driver.on_launch


@pytest.fixture
def operator(tmp_path, driver):
    """The operator of a package with three winners: full, causal and of grouped heads."""
    from operators import make
    from packages import shape, winner

    winners = (winner(shape()), winner(shape(causal=True)), winner(shape(heads=4, heads_kv=2)))
    return make(tmp_path, driver, *winners)


@pytest.fixture
def has(monkeypatch):
    """Has PyTorch tell of a GPU of this key; needs PyTorch."""
    import torch

    def set_(key):
        major, minor = key.compute_capability
        sizes = {"multi_processor_count": key.sm_count, "L2_cache_size": key.l2_bytes}
        told = SimpleNamespace(major=major, minor=minor, **sizes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)

    return set_


@pytest.fixture
def planned(operator):
    """The calls that the operator has looked up by shapes and strides."""
    asked, own = [], operator.planner.looked_up
    operator.planner.looked_up = lambda *what: asked.append(what) or own(*what)
    return asked


@pytest.fixture
def pytorchs():
    """The backend of attention that PyTorch would call on the host, 3 for cuDNN or 1 for flash.

    asked: how often it was asked. PyTorch's own attention there would call it as well.
    """
    pytest.importorskip("torch")
    from operators import aten

    found = SimpleNamespace(backend=3, asked=0)

    def choice(*_, **__):
        found.asked += 1
        return found.backend

    with aten(_fused_sdp_choice=choice):
        yield found


@pytest.fixture
def remember(constants):
    """Sets how much operators and their launches keep: remember(plans=3, ready=3, of_a_kind=2)."""

    def set_(plans=None, **most):
        for owner, of in (
            *((name, {"MOST_PLANS": plans}) for name in ("planner", "backward_operator", "operator") if plans),
            ("driver", {f"MOST_{name.upper()}": n for name, n in most.items()}),
        ):
            constants(import_module(f"attnsweep.serve.runtime.{owner}"), **of)

    return set_


@pytest.fixture
def load(tmp_path):
    """Loads a spec given as text (or bytes) from sweep.yaml."""

    def load(text, kernels=None, name="sweep.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_spec(path, kernels)

    return load


@pytest.fixture
def error_of(load, tmp_path):
    """The message for a wrong spec, with the directory left out."""

    def error_of(text, kernels=None, name="sweep.yaml"):
        with pytest.raises(SpecError) as caught:
            load(text, kernels, name)
        assert caught.value.exit_code == 2
        return str(caught.value).replace(f"{tmp_path}/", "")

    return error_of


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU and a fake compiler for sweeps."""
    return use(monkeypatch, FakeGpu(TIMES))


@pytest.fixture
def clock(gpu, timed_by):
    """The clock of a problem's time, `gpu.now_s`: `gpu.trial_s` moves it, or a test."""
    timed_by(lambda: gpu.now_s, candidates)
    return gpu


@pytest.fixture
def found(monkeypatch):
    """Has `doctor` find something: found(nvrtc_version=(13, 0), driver_cuda=None)."""

    def set_(**facts):
        for name, value in facts.items():
            monkeypatch.setattr(doctor, name, lambda value=value: value)

    return set_


@pytest.fixture
def installed(monkeypatch):
    """Has these packages of baselines be there, and no others: installed("torch 2.9")."""

    def set_(*packages):
        named = {each.partition(" ")[0]: each for each in packages}
        there = lambda self: [named[name] for name in self.names if name in named]  # noqa: E731
        monkeypatch.setattr(Package, "installed", there)

    return set_


@pytest.fixture
def lookahead(constants):
    """Sets how many candidates are asked for ahead of their turn."""
    return lambda count: constants(candidates, LOOKAHEAD=count, LOOKAHEAD_IN_TIME=count)


@pytest.fixture
def every_step(constants):
    """Progress leaves no line out, however soon it comes."""
    constants(progress, JSON_INTERVAL_S=-1.0, PLAIN_INTERVAL_S=-1.0)


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU."""
    use(monkeypatch, FakeGpu(environment=NoGpuError("no driver", hint="get one")))


@pytest.fixture
def go(tmp_path):
    """Sweeps `sweeping.SPEC` or another, in tmp_path."""

    def run(text=SPEC, kernels=None, **options):
        path = tmp_path / "test.yaml"
        path.write_text(text)
        spec = load_spec(path, kernels or discover)
        return session.run(spec, results=tmp_path / "results", cache_dir=tmp_path / "cache", **options)

    return run


@pytest.fixture
def tuned(attnsweep, gpu, tmp_path, monkeypatch):
    """Tunes a shape on a stand-in for an H100, where it is reported, explained and resumed.

    slower: microseconds that a config takes longer, by words of it. Returns the run's directory.
    """
    monkeypatch.chdir(tmp_path)
    facts = {"arch": "sm_90a", "gpu": "NVIDIA H100", "sm_count": 132}
    gpu.environment = TEST_GPU.model_copy(update=facts)

    def tune(shape, family, us, slower):
        theirs = {"torch_cudnn": 1.4 * us, "torch_flash": 1.8 * us}
        gpu.times |= dict.fromkeys(theirs, 0.0)  # they are installed
        gpu.time_us = lambda name: theirs.get(name, us + sum(more for words, more in slower.items() if words in name))
        done = attnsweep("tune", *shape.split())
        assert done.returncode == 0, done.stderr
        *_, said, config = done.stdout.splitlines()
        assert config.startswith("config: ")
        assert said.startswith(f"{family} is 1.400 ± 0.000 times as fast as")
        (run,) = (path.parent for path in tmp_path.glob("results/*/*/trials.jsonl"))
        problem = open_run(run).trials[0].problem
        assert said.endswith(f"{problem.label}.")
        assert problem.label in attnsweep("report", run).stdout
        rate = f"{problem.flops / us / 1e6:.4g}"  # of the fastest
        assert rate in attnsweep("report", run, "--full", width=300).stdout
        assert next(iter(slower)).partition("=")[0] in attnsweep("explain", run).stdout
        before = gpu.names("trial")
        assert attnsweep("tune", *shape.split()).returncode == 0
        assert gpu.names("trial") == before
        return run

    return tune


@pytest.fixture
def accept(attnsweep):
    """The command, which returns its exit code, output and errors on one line."""

    def run(*arguments):
        done = attnsweep("accept", *arguments)
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    return run


@pytest.fixture
def cards(monkeypatch, tmp_path, nursery):
    """Fake cards, each a process of its own, and a compiler that compiles nothing."""
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    use_fake_compiler(monkeypatch)
    return FakeCards(tmp_path, nursery=nursery, times=fleets.TIMES, trial_s=0.02)
