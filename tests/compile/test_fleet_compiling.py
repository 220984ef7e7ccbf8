"""Workers of a Dask cluster without a GPU compile for the asker: real workers, real NVRTC."""

import contextlib
import json
import threading
import time

import psutil
import pytest
from fake_cards import FakeCards

from attnsweep.compile.nvrtc import CACHE_VARIABLE, Compiler
from attnsweep.core.errors import CompileError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.trial import Status
from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.sweep import dask_cluster, dask_compile

clusters = pytest.importorskip("clusters")
pytestmark = pytest.mark.filterwarnings("default")  # of Dask's own code
ARCH = ARCHS["sm_90a"]
LONGEST_S = 60.0
FAULTS = "ATTNSWEEP_TEST_FAULTS"
# tests/process/test_sweep_dask_cluster.py has cards that are lost.
LOST = pytest.mark.nightly(push=3, of="workers that fail to compile")
SOURCE = """#include "part.cuh"
#include "common/tile/fragments.cuh"
extern "C" __global__ void f(float* out) { out[threadIdx.x] = VALUE + PART + attn::to_float(0); }
"""


def defines(number):
    return {"IS_BF16": "0", "VALUE": f"{number}.0f"}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "part.cuh").write_text("#define PART 1.0f\n")
    (tmp_path / "own" / "f.cu").write_text(SOURCE)
    return tmp_path / "own" / "f.cu"


class Cluster:
    """Workers, each with its own cache; a worker named `card…` has a GPU."""

    def __init__(self, local, client, place):
        self.local, self.client, self.place = local, client, place

    def compiled(self, name):
        """The keys of the stages in a worker's cache."""
        return {path.parent.name for path in (self.place / name).rglob("??/*/stage.cubin")}

    def began(self, name):
        path = self.place / f"{name}.began"
        return path.read_text().split() if path.exists() else []

    def fault(self, name, text):
        (self.place / f"{name}.fault").write_text(text)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts workers of these names, two threads each."""
    clusters.find_fakes(monkeypatch)
    with contextlib.ExitStack() as at_end:

        def start(*names):
            place = tmp_path / "workers"
            place.mkdir()
            environments = {
                name: {
                    CACHE_VARIABLE: str(place / name),
                    FAULTS: str(place),
                    "CUDA_VISIBLE_DEVICES": f"GPU-{number:08d}",
                }
                for number, name in enumerate(names)
            }
            preload = [str(clusters.SUPPORT / "faulty_compiling.py")]
            local = at_end.enter_context(clusters.local(tmp_path, environments, preload=preload))
            client = at_end.enter_context(dask_cluster.connected(local.scheduler_address))
            return Cluster(local, client, place)

        yield start


class Asker:
    """A compiler of one thread with helpers. busy: its thread compiles nothing before `free`.

    here: the keys of what its thread made, and waited for `pause_s` after each.
    """

    def __init__(self, client, place, at_end, busy):
        self.notes, self.here, self.pause_s = [], [], 0.0
        self.compiler = Compiler(ARCH, place / "cache", threads=1, after=self._after)
        self._gate, self._thread, self._known = threading.Event(), None, threading.Event()
        if not busy:
            self.free()
        first = place / "first.cu"
        first.write_text('extern "C" __global__ void first() {}')
        at_end.callback(self.compiler.close)
        at_end.callback(self._gate.set)
        self.compiler.submit(first, {})
        assert self._known.wait(LONGEST_S)  # else a helper's thread would be taken for it
        self.helpers = at_end.enter_context(contextlib.ExitStack())
        self.helpers.enter_context(dask_compile.shared(client, self.compiler, lambda text: self.notes.append(text)))

    def _after(self, made):
        if self._thread is None:
            self._thread = threading.get_ident()
            self._known.set()
            self._gate.wait()
        elif threading.get_ident() == self._thread:
            self.here.append(made.path.parent.name)
            time.sleep(self.pause_s)

    def free(self):
        self._gate.set()

    def noted(self, *words):
        """Wait for a note with all these words."""
        ends = time.monotonic() + LONGEST_S
        while not (found := [n for n in self.notes if all(word in n for word in words)]):
            assert time.monotonic() < ends, self.notes
            time.sleep(0.02)
        return found


@pytest.fixture
def asker(tmp_path):
    with contextlib.ExitStack() as at_end:
        yield lambda on, busy=True: Asker(on.client, tmp_path, at_end, busy)


def test_a_worker_without_a_gpu_compiles_what_would_be_compiled_here(started, asker, source, tmp_path):
    on = started("card0", "host1")
    asking = asker(on)
    other = Compiler(ARCH, tmp_path / "alone")
    futures = [asking.compiler.submit(source, defines(n)) for n in range(6)]
    made = [future.result(LONGEST_S) for future in futures]
    here = [other.compile(source, defines(n)) for n in range(6)]
    assert [cubin.digest for cubin in made] == [cubin.digest for cubin in here]
    assert [cubin.path.parent.name for cubin in made] == [c.path.parent.name for c in here]
    assert [cubin.path.read_bytes() for cubin in made] == [c.path.read_bytes() for c in here]
    assert all("Used" in cubin.log and not cubin.cached for cubin in made)
    assert on.compiled("host1") == {cubin.path.parent.name for cubin in made}
    assert not on.compiled("card0")
    assert not on.began("card0")
    again = Compiler(ARCH, tmp_path / "cache").compile(source, defines(3))
    assert (again.cached, again.digest, again.log) == (True, made[3].digest, made[3].log)
    asking.helpers.close()
    assert asking.notes == ["compiled by workers without a GPU: 6 on host1"]


def test_each_stage_is_compiled_once_here_or_there(started, asker, source):
    on = started("host1", "host2")
    for name in ("host1", "host2"):
        on.fault(name, "slow")
    asking = asker(on, busy=False)
    asking.pause_s = 0.5
    futures = [asking.compiler.submit(source, defines(n)) for n in range(30)]
    keys = {future.result(LONGEST_S).path.parent.name for future in futures}
    there = on.began("host1") + on.began("host2")
    assert len(keys) == 30
    assert sorted(asking.here + there) == sorted(keys), asking.notes
    assert asking.here
    assert on.began("host1")
    assert on.began("host2")


def test_what_the_cache_has_is_not_sent(started, asker, source, tmp_path):
    Compiler(ARCH, tmp_path / "cache").compile(source, defines(1))
    on = started("host1")
    asking = asker(on)
    assert asking.compiler.submit(source, defines(1)).result(LONGEST_S).cached
    assert not asking.compiler.submit(source, defines(2)).result(LONGEST_S).cached
    assert len(on.began("host1")) == 1


@pytest.mark.parametrize("where", ["f.cu", "part.cuh"])
def test_an_error_of_the_compiler_is_shown_as_from_here(started, asker, source, tmp_path, where):
    path = source.with_name(where)
    path.write_text(path.read_text() + "int broken = nothing;\n")
    on = started("host1")
    asking = asker(on)
    with pytest.raises(CompileError) as there:
        asking.compiler.submit(source, defines(1)).result(LONGEST_S)
    with pytest.raises(CompileError) as here:
        Compiler(ARCH, tmp_path / "alone").compile(source, defines(1))
    assert len(on.began("host1")) == 1
    assert str(path) in there.value.what
    assert (there.value.what, there.value.log) == (here.value.what, here.value.log)
    assert there.value.render() == here.value.render()


INCLUDES = {
    "outside": '#include "../x.cuh"',
    "computed": "#define N <part.cuh>\n#include N",
    "link": '#include "link.cuh"',
    "detour": '#include "folder/../part.cuh"',
}


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("form", INCLUDES)
def test_a_template_that_cannot_travel_is_compiled_here(started, asker, source, form):
    values = defines(1)
    (source.parent.parent / "x.cuh").write_text("#define PART 1.0f\n")
    (source.parent / "link.cuh").symlink_to("part.cuh")
    (source.parent / "folder").mkdir()
    fit = source.with_name("fit.cu")
    fit.write_text(SOURCE)
    source.write_text(f"{INCLUDES[form]}\n" + SOURCE.partition("\n")[2])
    on = started("host1")
    asking = asker(on)
    future = asking.compiler.submit(source, values)
    after_it = asking.compiler.submit(fit, values).result(LONGEST_S)
    assert not future.done()
    asking.free()
    assert future.result(LONGEST_S).digest
    assert on.compiled("host1") == {after_it.path.parent.name}
    assert not asking.notes


@pytest.mark.parametrize(
    ("patched", "value", "words"),
    [
        ("_nvrtc", lambda: "1.0", ("it has NVRTC ", "not 1.0", "nvidia-cuda-nvrtc==1.0.*")),
        ("__version__", "9.9", ("it has attnsweep ", "not 9.9", "pip install")),
    ],
)
def test_another_version_is_left_out_by_name(started, asker, source, constants, patched, value, words):
    constants(dask_compile, **{patched: value})
    on = started("host1")
    asking = asker(on)
    future = asking.compiler.submit(source, defines(1))
    asking.noted("worker host1 compiles nothing for this sweep", *words)
    asking.free()
    assert future.result(LONGEST_S).digest
    assert not on.began("host1")


@LOST
def test_a_killed_worker_costs_a_stage_again_and_comes_back(started, asker, source):
    on = started("host1")
    on.fault("host1", "kill once")
    asking = asker(on)
    futures = [asking.compiler.submit(source, defines(n)) for n in range(5)]
    asking.noted("worker host1: ", "left the cluster", "compiled elsewhere")
    keys = {future.result(LONGEST_S).path.parent.name for future in futures}
    began = on.began("host1")
    assert set(began) == keys == on.compiled("host1")
    assert len(began) <= 5 + 2  # the stages of its two threads


@LOST
def test_a_stage_that_kills_workers_is_compiled_here_after_two(started, asker, source):
    on = started("host1", "host2")
    for name in ("host1", "host2"):
        on.fault(name, "kill")
    asking = asker(on)
    future = asking.compiler.submit(source, defines(1))
    asking.noted("left the cluster")
    ends = time.monotonic() + LONGEST_S
    while len(on.began("host1") + on.began("host2")) < 2 or len(asking.notes) < 2:
        assert time.monotonic() < ends, asking.notes
        time.sleep(0.05)
    asking.free()
    assert future.result(LONGEST_S).digest
    assert len(on.began("host1") + on.began("host2")) == 2


@LOST
@pytest.mark.parametrize("fault", ["sleep", "stop"])
def test_a_worker_that_hangs_is_left_out(started, asker, source, constants, fault):
    constants(dask_compile, ANSWER_S=3.0)
    on = started("host1", "host2")
    on.fault("host1", fault)
    asking = asker(on)
    futures = [asking.compiler.submit(source, defines(n)) for n in range(8)]
    keys = {future.result(LONGEST_S).path.parent.name for future in futures}
    assert len(keys) == 8
    asking.noted("worker host1 compiles nothing for this sweep", "no answer for 3 s")
    assert len(on.began("host1")) <= 2
    assert set(on.began("host2")) == keys
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED and process.environ().get(CACHE_VARIABLE) == str(
                on.place / "host1"
            ):
                process.kill()


@LOST
@pytest.mark.parametrize(("fault", "word"), [("full", "No space left on device"), ("damaged", "arrived damaged")])
def test_a_worker_that_fails_again_and_again_is_left_out(started, asker, source, fault, word):
    on = started("host1")
    on.fault("host1", fault)
    asking = asker(on)
    futures = [asking.compiler.submit(source, defines(n)) for n in range(6)]
    asking.noted("worker host1 compiles nothing for this sweep", word)
    asking.free()
    assert len({future.result(LONGEST_S).digest for future in futures}) == 6
    assert len(on.began("host1")) <= 2 * 6
    assert not list((asking.compiler.cache_dir).rglob(".new-*"))


def test_a_worker_that_comes_late_helps(started, asker, source):
    on = started()
    asking = asker(on)
    future = asking.compiler.submit(source, defines(1))
    time.sleep(1.0)
    assert not future.done()
    on.local.worker_spec["host1"] = clusters.worker(
        on.place, "host1", {CACHE_VARIABLE: str(on.place / "host1"), FAULTS: str(on.place)}
    )
    on.local.scale(1)
    assert future.result(LONGEST_S).path.parent.name in on.compiled("host1")


@LOST
def test_ctrl_c_waits_for_no_worker(started, asker, source):
    on = started("host1")
    on.fault("host1", "sleep")
    asking = asker(on)
    futures = [asking.compiler.submit(source, defines(n)) for n in range(4)]
    ends = time.monotonic() + LONGEST_S
    while len(on.began("host1")) < 2:
        assert time.monotonic() < ends
        time.sleep(0.02)
    began = time.monotonic()
    asking.compiler.close()
    asking.helpers.close()
    assert time.monotonic() - began < 5
    assert all(future.cancelled() for future in futures)
    assert not asking.notes


def test_texts_stay_in_their_place(tmp_path, monkeypatch):
    task = {"key": "", "arch": "sm_90a", "source": "f.cu", "defines": {}}
    texts = {"../../escaped.cu": "text"}
    answer = json.loads(dask_compile.compile_stage(json.dumps(task | {"texts": texts})))
    assert "leads elsewhere" in answer["why"]


def test_a_sweep_has_its_stages_compiled_by_both(started, tmp_path, monkeypatch):
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    on = started("card0", "card1", "host1")
    times = {f"THREADS={threads}": 10.0 + threads for threads in (32, 64, 128)}
    cards = FakeCards(tmp_path, times=times, together=2, nvrtc=True)
    outcome, _ = clusters.swept(tmp_path, cards, on.local.scheduler_address, helped=True)
    assert outcome.exit_code == 0
    assert {trial.status for trial in outcome.run.trials} == {Status.OK}
    assert len(outcome.run.trials) == 12
    there = on.began("host1")
    ours = {path.parent.name for path in (tmp_path / "cache").rglob("stage.cubin")}
    assert there
    assert set(there) <= ours
    assert len(set(there)) == len(there)
    assert not on.began("card0") + on.began("card1")
