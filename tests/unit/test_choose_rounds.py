"""What a round is, when it is repeated, and what its row says of the card."""

import math
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu
from hypothesis import given
from hypothesis import strategies as st
from samples import PROBLEM, built, candidate

from attnsweep.bench.gpu import WorkerError
from attnsweep.choose.finals import Finals
from attnsweep.choose.rounds import Rounds, affordable, difference, prepared, summary
from attnsweep.core.observer import Observer
from attnsweep.core.trial import Status, Trial
from attnsweep.specs.model import MeasureSpec, SearchSpec


class Card(FakeGpu):
    """A GPU whose conditions follow a list, the last of it for ever."""

    def __init__(self, *clocks):
        super().__init__()
        self.clocks = list(clocks)

    def conditions(self):
        clock = self.clocks.pop(0) if len(self.clocks) > 1 else self.clocks[0]
        if clock is None:
            raise WorkerError(Status.TIMEOUT, "no answer")
        usual = {"throttle": [], "other_processes": 0}
        return usual | (clock if isinstance(clock, dict) else {"sm_mhz": clock})


def turns(*clocks, lose=None):
    return Rounds(Card(*clocks), seed=0, fail=lose or (lambda name, error: None))


@pytest.mark.parametrize("faults", [1, 2])
def test_an_entry_that_fails_once_may_have_paid_for_the_one_before(faults):
    """As one does whose process another entry's launches end; a hang is tried once."""
    lost, calls = [], []

    def replay(name):
        calls.append(name)
        if name == "b" and calls.count("b") <= faults:
            raise WorkerError(Status.LAUNCH_ERROR, "an illegal memory access")
        if name == "c":
            raise WorkerError(Status.TIMEOUT, "no answer")
        return 1.0

    taken = turns(1980, lose=lambda name, error: lost.append((name, error.status)))
    times = taken.round(["a", "b", "c"], replay).times
    assert times == ({"a": 1.0, "b": 1.0} if faults == 1 else {"a": 1.0})
    wrong = [("b", Status.LAUNCH_ERROR), ("c", Status.TIMEOUT)]
    assert sorted(lost) == wrong[2 - faults :]
    assert (calls.count("b"), calls.count("c")) == (2, 1)


def test_the_order_is_random_and_the_same_for_a_seed():
    orders = []
    for _ in range(2):
        seen = []
        taken = turns(1980)
        for _ in range(20):
            taken.round(["c", "a", "b"], lambda name, seen=seen: float(seen.append(name) or 1))
        orders.append(seen)
    assert orders[0] == orders[1]
    rounds = {tuple(orders[0][n : n + 3]) for n in range(0, 60, 3)}
    assert len(rounds) == 6  # every order of three


def test_a_round_in_another_clock_state_is_taken_again():
    taken = turns(1980, 1980, 1980, 1980, 1500, 1980)
    taken.warm_up(["a"], lambda name: 1.0)
    times = iter([9.0, 5.0])
    turn = taken.round(["a"], lambda name: next(times))
    assert turn.times == {"a": 5.0}
    assert taken.repeated == 1


def test_a_clock_that_stays_changed_is_kept_after_a_few_and_then_usual():
    taken = turns(1980, 1980, 1980, 1980, 1500)
    taken.warm_up(["a"], lambda name: 1.0)
    calls = []
    assert taken.round(["a"], lambda name: float(calls.append(name) or 1)).times == {"a": 1.0}
    assert len(calls) == 4
    taken.round(["a"], lambda name: float(calls.append(name) or 1))
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("now", "repeats"),
    [
        ({"throttle": ["power_cap"]}, 0),
        ({"throttle": []}, 3),
        ({"throttle": ["power_cap"], "other_processes": 1}, 3),
        ({"throttle": ["power_cap", "power_brake"]}, 3),
    ],
)
def test_the_clock_of_a_card_at_its_power_cap_repeats_nothing_but_an_event_does(now, repeats):
    taken = turns(*[1980] * 4, {"sm_mhz": 1500, **now})
    taken.warm_up(["a"], lambda name: 1.0)
    taken.round(["a"], lambda name: 1.0)
    assert taken.repeated == repeats


def test_warm_up_goes_on_until_times_are_steady():
    times = iter([0.0, 9.0, 8.0, 7.0, 7.01, 7.02, 7.03, 7.03])
    taken = turns(1980)
    taken.warm_up(["a"], lambda name: next(times))
    assert taken.steady
    assert taken.warm_up_rounds == 6  # 7.00, 7.01 and 7.02 were the last


def test_warm_up_waits_for_the_clock():
    taken = turns(1200, 1500, 1800, 1980)
    taken.warm_up(["a"], lambda name: 1.0)
    assert taken.warm_up_rounds == 1 + 6


def test_a_card_that_is_never_steady_says_so():
    times = iter(float(n) for n in range(1, 100))
    taken = turns(1980)
    taken.warm_up(["a"], lambda name: next(times))
    assert not taken.steady
    assert taken.summary([])["steady"] is False
    assert taken.warm_up_rounds == 21


def test_who_fails_in_warm_up_leaves_it_to_the_next():
    lost = []

    def replay(name):
        if name == "a" and replay.count > 2:
            raise WorkerError(Status.TIMEOUT, "hung")
        replay.count += 1
        return 1.0

    replay.count = 0
    taken = turns(1980, lose=lambda name, error: lost.append(name))
    taken.warm_up(["a", "b"], replay)
    assert lost == ["a"]
    assert taken.steady


@pytest.mark.parametrize(
    ("now", "usual", "told"),
    [
        ({"sm_mhz": 1980}, {"sm_mhz": 1965}, None),
        ({"sm_mhz": 1500}, {"sm_mhz": 1980}, "SM clock 1500 MHz, not 1980"),
        ({"sm_mhz": 1500}, {}, None),
        ({}, {"sm_mhz": 1500}, None),
        ({"throttle": ["power_cap"]}, {"throttle": []}, None),
        ({"throttle": ["thermal_hardware"]}, {"throttle": []}, "thermal_hardware"),
        ({"throttle": ["thermal_hardware"]}, {"throttle": ["thermal_hardware"]}, None),
        ({"other_processes": 2}, {"other_processes": 1}, "2 other processes on the GPU"),
        ({"other_processes": 0}, {"other_processes": 1}, None),
    ],
)
def test_what_makes_a_state(now, usual, told):
    assert difference(now, usual) == told


conditions = st.fixed_dictionaries(
    {},
    optional={
        "sm_mhz": st.integers(300, 2000),
        "power_w": st.floats(10, 700),
        "temperature_c": st.integers(20, 90),
        "throttle": st.lists(st.sampled_from(["power_cap", "thermal_hardware"]), unique=True),
        "other_processes": st.integers(0, 3),
    },
)


@given(st.lists(conditions, max_size=12))
def test_a_summary_holds_every_round_and_marks_less_than_all(rounds):
    told = summary(rounds)
    if not told:
        assert not any(rounds)
        return
    for values in told["rounds"].values():
        assert len(values) == len(rounds)
    assert set(told["strays"]) <= {str(n) for n in range(len(rounds))}


@pytest.mark.parametrize(
    ("first_us", "others", "most", "rounds"),
    [
        ([180e3] * 5, 0, 30, 11),  # 10 s of 0.9 s each
        ([180e3] * 5, 3, 30, 6),  # a baseline is taken for 1.3 times the slowest of ours
        ([100e3, 200e3], 1, 30, 17),
        ([25e3], 0, 30, 30),  # as many as the spec asks for
        ([25e3], 0, 2, 3),
        ([3e6] * 5, 3, 30, 3),  # at least three
        ([], 4, 30, 3),
        ([math.inf], 0, 30, 3),
    ],
)
def test_long_calls_get_the_rounds_that_ten_seconds_have_room_for(first_us, others, most, rounds):
    assert affordable(first_us, others, most) == rounds


def test_rounds_that_begin_without_a_warm_up_take_the_state_then_as_the_usual_one():
    taken = turns(1500, 1500, 1980, 1500)
    taken.begin()
    assert taken.warm_up_rounds == 0
    times = iter([5.0, 9.0, 6.0])
    assert taken.round(["a"], lambda name: next(times)).times == {"a": 5.0}
    assert taken.repeated == 0
    assert taken.round(["a"], lambda name: next(times)).times == {"a": 6.0}
    assert taken.repeated == 1


# ---- whoever watches a run hears what is prepared before the rounds, and how long it took ----
class Heard(Observer):
    """Keeps what is prepared, in order."""

    def __init__(self):
        self.events = []

    def preparing(self, baseline, done, total):
        self.events.append(("preparing", baseline, done, total))

    def prepared(self, what, took_s, steps_s):
        assert 0 <= took_s < 60
        self.events.append(("prepared", what, steps_s))


class Slow(FakeGpu):
    """A GPU whose process tells a step of each call."""

    def heard(self, method, name=""):
        self.steps_s[f"{method} {name}"] = 1.5
        super().heard(method, name)


def baseline(name):
    return Trial(kernel=name, provider=name, config={}, problem=PROBLEM, status=Status.SKIPPED, detail=None)


def test_each_baseline_is_told_before_and_after_it_is_prepared_also_if_it_cannot_be():
    gpu, heard, rows = Slow({"flash A=1": 7.0, "torch_flash": 9.0}), Heard(), {}

    def put(row):
        rows[row.provider] = row.status

    spec = SimpleNamespace(measure=MeasureSpec(rounds=3), search=SearchSpec())
    build = built("A=1", "flash")
    finals = Finals(spec.measure, gpu, seed=0, put=put, keep=put, observer=heard)
    finals.run([(build, candidate("flash", 7.0, A=1))], [baseline("flash_attn_4"), baseline("torch_flash")])
    assert heard.events == [
        ("prepared", "finalists", {"add flash A=1": 1.5}),
        ("preparing", "flash_attn_4", 0, 2),
        ("prepared", "flash_attn_4", {"add_baseline flash_attn_4": 1.5}),
        ("preparing", "torch_flash", 1, 2),
        ("prepared", "torch_flash", {"add_baseline torch_flash": 1.5}),
    ]
    assert rows["flash_attn_4"] is Status.SKIPPED
    assert rows["torch_flash"] is Status.OK


def test_a_step_is_told_once_and_a_failure_is_raised():
    gpu, heard = FakeGpu(), Heard()
    gpu.steps_s["start CUDA"] = 2.0
    with pytest.raises(WorkerError), prepared("problem", gpu, heard):
        raise WorkerError(Status.LAUNCH_ERROR, "out of memory")
    with prepared("finalists", gpu, heard):
        pass
    assert heard.events == [("prepared", "problem", {"start CUDA": 2.0}), ("prepared", "finalists", {})]
