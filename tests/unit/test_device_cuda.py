"""The order in which a call is issued: stages, streams, forks and joins, graph or eager."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.compile.launches import CompiledStage, LaunchPlan
from attnsweep.core.problem import Problem
from attnsweep.device import cuda
from attnsweep.device.bound_call import BoundCall
from attnsweep.device.cuda_graph import lasting
from attnsweep.family.family import Launch


class Stream:
    """Writes what it is told into a log, and is the current stream inside `with`."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __enter__(self):
        self.log.current.append(self.name)

    def __exit__(self, *_):
        self.log.current.pop()

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")

    def begin_capture(self):
        self.log.append("begin")

    def end_capture(self):
        self.log.append("end")
        return self

    def upload(self, stream):
        assert stream is self

    def launch(self, stream):
        self.log.append(f"replay on {stream.name}")


class Event:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def record(self, stream):
        self.log.append(f"{self.name} after {stream.name}")


class Log(list):
    def __init__(self):
        super().__init__()
        self.current = []


class Session:
    """Stands for CudaSession: launches become lines `stage@stream(copy)`."""

    def __init__(self):
        self.log = Log()
        self._streams = [Stream(self.log, f"s{n}") for n in range(4)]
        self.stream = self._streams[0]

    capture = cuda.CudaSession.capture

    def streams(self, count):
        return self._streams[:count]

    def marks(self, count):
        names = ["fork", *(f"join{n}" for n in range(1, count))]
        return [Event(self.log, name) for name in names]

    def bind(self, stage, buffers):
        def launch():
            offset = stage.offsets.get("q", 0)
            self.log.append(f"{stage.name}@{self.log.current[-1]}({buffers['q']}+{offset})")

        return launch


def plan(*stages, streams=1, eager=False):
    launch = Launch("f", (1, 1, 1), 32, ("q",))
    compiled = tuple(CompiledStage(name, "x", launch, stream, {"q": 8 * n}) for n, (name, stream) in enumerate(stages))
    return LaunchPlan(Problem(1, 1, 1, 1, 1, 64), compiled, {}, streams, eager)


@pytest.fixture
def session():
    return Session()


def test_one_stream_needs_no_event(session):
    BoundCall(session, plan(("qk", 0), ("pv", 0)), [{"q": "a"}]).enqueue()
    assert session.log == ["qk@s0(a+0)", "pv@s0(a+8)"]


def test_what_calls_have_in_common_is_in_no_graph_of_them(session):
    stages = plan(("mask", 0), ("fwd", 0))
    mask = replace(stages.stages[0], launch=replace(stages.stages[0].launch, once=True))
    call = BoundCall(session, replace(stages, stages=(mask, *stages.stages[1:])), [{"q": "a"}])
    call.enqueue()
    assert session.log == ["mask@s0(a+0)", "fwd@s0(a+8)"]
    session.log.clear()
    call.refresh(1)
    assert session.log == ["mask@s0(a+0)"]
    assert (call.stage_names, call.once_names) == (("fwd",), ("mask",))
    session.log.clear()
    call.capture(2)
    assert [line for line in session.log if "@" in line] == ["fwd@s0(a+8)"] * 2


class Tensor:
    """A buffer of which the log says when it is turned, and back."""

    def __init__(self, log, name):
        self._log, self._name = log, name

    def turned(self):
        return f"{self._name}'"

    def turn(self, shape, *, back):
        self._log.append(f"{self._name} {'back' if back else 'there'} {shape}")


def test_tensors_are_turned_before_a_call_and_back_but_in_no_timed_graph(session):
    shape, names = (1, 1, 1, 64), ("q", "k", "v", "o")
    stages = replace(plan(("fwd", 0)), turned=True)
    call = BoundCall(session, stages, [{name: Tensor(session.log, name) for name in names}])
    there, back = ([f"{n} {way} {shape}" for n in names] for way in ("there", "back"))

    def logged(work):
        session.log.clear()
        work()
        return [line for line in session.log if "@" in line or line[1] == " "]

    assert logged(call.enqueue) == [*there, "fwd@s0(q'+0)", *back]
    assert logged(lambda: call.issue()) == ["fwd@s0(q'+0)"]
    assert logged(lambda: call.capture(2)) == ["fwd@s0(q'+0)"] * 2
    assert logged(lambda: call.refresh(1)) == there
    assert logged(lambda: call.turn(back=True, every=False)) == back[-1:]
    judged = logged(lambda: call.capture(2, after=lambda n: session.log.append(f"n {n}")))
    assert judged == [*there, "fwd@s0(q'+0)", *back, "n 0", *there, "fwd@s0(q'+0)", *back, "n 1"]


def test_streams_fork_from_and_join_the_first(session):
    stages = (("qk", 0), ("pv", 0), ("qk", 1), ("pv", 1))
    BoundCall(session, plan(*stages, streams=2), [{"q": "a"}]).enqueue()
    assert session.log == [
        "fork after s0",
        "s1 waits for fork",
        *("qk@s0(a+0)", "pv@s0(a+8)", "qk@s1(a+16)", "pv@s1(a+24)"),
        "join1 after s1",
        "s0 waits for join1",
    ]


def test_a_stage_alone_is_of_every_chunk(session):
    pipeline = BoundCall(session, plan(("qk", 0), ("pv", 0), ("qk", 0), ("pv", 0)), [{"q": "a"}])
    assert pipeline.stage_names == ("qk", "pv")
    pipeline.enqueue(0, "pv")
    assert session.log == ["pv@s0(a+8)", "pv@s0(a+24)"]


def test_a_graph_holds_the_calls_and_rotates_over_copies(session):
    pipeline = BoundCall(session, plan(("fwd", 0)), [{"q": "a"}, {"q": "b"}])
    replay = pipeline.capture(3, rotate=True)
    replay()
    assert session.log == [*("begin", "fwd@s0(a+0)", "fwd@s0(b+0)", "fwd@s0(a+0)", "end"), "replay on s0"]


def test_an_eager_plan_is_launched_anew_at_each_replay(session):
    replay = BoundCall(session, plan(("fwd", 0), eager=True), [{"q": "a"}]).capture(2)
    assert session.log == []
    replay()
    replay()
    assert session.log == ["fwd@s0(a+0)"] * 4


def test_a_capture_that_fails_is_ended(session):
    def fail():
        raise ValueError("no")

    session.bind = lambda stage, buffers: fail
    with contextlib.suppress(ValueError):
        BoundCall(session, plan(("fwd", 0)), [{"q": "a"}]).capture(1)
    assert session.log == ["begin", "end"]


class NVMLError(Exception):
    pass


def nvml(**refused):
    """NVML of one card. refused: functions that raise NVMLError."""
    answers = {
        "nvmlDeviceGetPciInfo": SimpleNamespace(pciDeviceId=0x233010DE, pciSubSystemId=0x16C110DE),
        "nvmlDeviceGetBoardPartNumber": b"692-2G520-0200-000",
        "nvmlDeviceGetUUID": "GPU-01234567-89ab",
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,  # milliwatts
        "nvmlDeviceGetApplicationsClock": 1980,
        "nvmlDeviceGetComputeMode": 0,
    }

    def answer(name):
        def asked(card, of=None):
            if name in refused:
                raise NVMLError
            return answers[name]

        return asked

    clocks = {"NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2}
    module = SimpleNamespace(NVMLError=NVMLError, **clocks, **{name: answer(name) for name in answers})
    return SimpleNamespace(nvml=lambda: (module, "card"))


def test_a_card_says_which_it_is_and_its_uuid_is_hashed():
    found = cuda.CudaSession.identity(nvml())
    assert found["sku"] == "233010de:16c110de 692-2G520-0200-000"
    assert found["power_limit_w"] == 700.0
    assert found["uuid"]
    assert "0123" not in found["uuid"]


def test_what_a_card_does_not_tell_is_left_out_and_ends_nothing():
    whole = cuda.CudaSession.identity(nvml())
    part = cuda.CudaSession.identity(nvml(nvmlDeviceGetBoardPartNumber=True))
    assert part == whole | {"sku": "233010de:16c110de"}
    none = cuda.CudaSession.identity(nvml(nvmlDeviceGetPciInfo=True, nvmlDeviceGetUUID=True))
    assert none == {"power_limit_w": 700.0}


def test_what_a_program_may_set_of_a_card_is_told_by_name():
    whole = cuda.CudaSession.settings(nvml())
    assert whole["power limit (mW)"] == 700_000
    assert whole["SM clock for programs (MHz)"] == 1980
    part = cuda.CudaSession.settings(nvml(nvmlDeviceGetApplicationsClock=True))
    assert part == {"power limit (mW)": 700_000, "compute mode": 0}


# ---- how many calls a timed graph holds ----
LAUNCH_US = 13.0  # what a graph's own launch adds if nothing hides it


def lengthened(each_us: float, once_us: float, target_us: float = 300.0, most: int = 2000):
    """The calls of the graph, and every number of calls that was captured."""
    made = []

    def capture(calls):
        made.append(calls)
        return lambda: None

    replay, calls, launched = lasting(capture, lambda _: LAUNCH_US + made[-1] * each_us, once_us, target_us, most)
    assert callable(replay)
    assert calls == made[-1]
    assert launched >= 2 * sum(made[:-1])
    return calls, made


def test_a_call_that_outlasts_the_graph_is_captured_once():
    assert lengthened(3_000.0, 3_010.0) == (1, [1])
    assert lengthened(3_000.0, 1.0)[0] >= 1


def test_no_graph_holds_more_calls_than_it_may():
    assert lengthened(0.5, 20.0, target_us=1500.0, most=50) == (50, [50])
    assert lengthened(0.5, 2000.0, target_us=1500.0, most=50)[0] == 50


@given(st.floats(0.5, 5000.0), st.floats(0.5, 1e7), st.sampled_from([300.0, 500.0, 1500.0]))
def test_it_lasts_long_enough_or_is_as_long_as_it_may_be(each_us, once_us, target_us):
    calls, made = lengthened(each_us, once_us, target_us)
    assert calls >= 1
    assert len(made) <= 5
    if once_us >= each_us:  # a guess that is too long
        assert calls == 2000 or LAUNCH_US + calls * each_us >= 0.7 * target_us
        assert calls == 1 or calls * each_us <= 1.2 * target_us + each_us
