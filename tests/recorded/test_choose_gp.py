"""Strategy `gp`: what it asks, when it stops, and what it found in recorded runs."""

import functools
import importlib
import math
import re
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.choose.search import DEFAULT_STRATEGY, STRATEGIES, Search, exhaustively
from attnsweep.choose.strategies import gp as module
from attnsweep.choose.strategies.gp import BATCH, FEW, LEAST, gp
from attnsweep.choose.strategies.history import History, shipped_history
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Status, Trial
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family, Launch, Param
from attnsweep.family.space import Space
from attnsweep.specs.load import load_spec
from attnsweep.store.run import open_run

PROBLEM = Problem(1, 2, 2, 64, 64, 64)
OTHER = Problem(2, 2, 2, 64, 64, 64)
RESULTS = Path(__file__).parents[2] / "results"


def space_of(*sizes, problem=PROBLEM):
    params = tuple(Param(f"P{i}", tuple(range(size)), "") for i, size in enumerate(sizes))
    kernel = Family("toy", summary="", params=params)
    kernel.stage("fwd")(lambda *_: Launch("toy", (1, 1, 1), 32, ()))
    return Space.build(kernel, problem, ARCHS["sm_90a"])


def row(config, us, **facts):
    status = Status.OK if us else Status.WRONG
    made = Trial(kernel="toy", provider=OURS, config=config, problem=PROBLEM, status=status)
    return made.with_(first_us=us, **facts)


def valley(config):
    """Least at (6, 2), where it is 10."""
    return 10.0 + abs(config["P0"] - 6) + 0.7 * abs(config["P1"] - 2)


def searched(space, us, seed=0, history=(), candidates=None, order=lambda rows: rows):
    """The batches asked for, each told whole before the next, and why the search ended."""
    search = Search(partial(gp, history=history), space, candidates=candidates, seed=seed)
    batches = []
    while batch := list(iter(search.ask, None)):
        for told in order([row(config, us(config)) for config in batch]):
            search.tell(told)
        batches.append(batch)
    return batches, search.why_ended


def flat(batches):
    return [config for batch in batches for config in batch]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 5),
    st.none() | st.integers(1, 60),
    st.dictionaries(st.integers(0, 215), st.none() | st.floats(0.5, 1e4), max_size=216),
)
def test_it_asks_configs_of_the_space_never_twice_and_says_why_it_ended(sizes, seed, cap, times):
    space = space_of(*sizes)
    number = {config: i for i, config in enumerate(space.configs)}
    batches, why = searched(space, lambda c: times.get(number[c], 3.0), seed, candidates=cap)
    asked = flat(batches)
    assert len(asked) == len(set(asked)) <= (cap or math.inf)
    assert set(asked) <= set(space.configs)
    if why == "all are tried":
        assert set(asked) == set(space.configs)
    elif cap is not None and why == f"the limit of {cap} is reached":
        assert len(asked) == cap < len(space.configs)
    else:
        assert re.fullmatch(r"the last \d+ were no better, and another one is expected to gain \d\.\d\d % at most", why)
        assert 20 < len(asked) < len(space.configs)


@pytest.mark.parametrize("count", [FEW, FEW + 1, 200])
def test_if_every_candidate_fails_all_are_tried(count):
    batches, why = searched(space_of(count), lambda _: None)
    assert len(flat(batches)) == count
    assert why == "all are tried"


def test_it_finds_the_valley_though_the_first_batches_fail():
    space = space_of(12, 10, 3)
    asked = []

    def us(config):
        asked.append(config)
        return valley(config) if len(asked) > 2 * BATCH else None

    searched(space, us)
    assert min(valley(config) for config in asked[2 * BATCH :]) <= 10.7


def test_equal_seeds_ask_alike_in_whatever_order_they_are_told_and_other_seeds_otherwise():
    space = space_of(12, 10)
    first, why = searched(space, valley, seed=1)
    assert searched(space, valley, seed=1, order=lambda rows: rows[::-1]) == (first, why)
    assert searched(space, valley, seed=2)[0] != first


def test_a_space_of_few_is_tried_whole_in_batches_that_double():
    batches, why = searched(space_of(12, 4), valley)
    assert (len(flat(batches)), why) == (FEW, "all are tried")
    assert [len(batch) for batch in batches] == [LEAST, LEAST, 2 * LEAST, BATCH, 12]


def test_it_stops_far_from_the_end_and_later_if_it_knows_nothing():
    space = space_of(12, 10, 5)
    history = [History("toy", OTHER, "x/y", space.configs, tuple(map(valley, space.configs)))]
    cold, why = searched(space, valley)
    warm, _ = searched(space, valley, history=history)
    assert "no better" in why
    assert len(flat(warm)) < len(flat(cold)) < 300
    assert min(map(valley, flat(cold))) == min(map(valley, flat(warm))) == 10.0


def test_it_begins_with_what_won_on_another_problem_and_believes_this_one():
    space = space_of(12, 10, 3)
    wrong = tuple(40.0 - valley(config) for config in space.configs)
    right = tuple(1000 * valley(config) for config in space.configs)
    first = {}
    for name, times in (("right", right), ("wrong", wrong)):
        history = [History("toy", OTHER, "x/y", space.configs, times)]
        asked = flat(searched(space, valley, history=history)[0])
        first[name] = next(n for n, c in enumerate(asked, 1) if valley(c) == 10.0)
    assert first["right"] <= 3  # three configs are the best: P2 does nothing
    assert first["wrong"] <= 90


def test_history_with_other_parameters_and_a_value_that_it_lacks_is_used_as_far_as_it_goes():
    space = space_of(12, 10, 3)
    configs = [{"P0": c["P0"], "P1": c["P1"], "GONE": 7} for c in space.configs if c["P0"] < 8]
    history = [History("toy", OTHER, "x/y", tuple(configs), tuple(map(valley, configs)))]
    asked = flat(searched(space, valley, history=history)[0])
    assert valley(asked[0]) == 10.0


def test_a_large_space_is_searched_in_a_pool_that_history_helps_to_fill(constants):
    constants(module, POOL=40)
    space = space_of(12, 10, 3)
    history = [History("toy", OTHER, "x/y", space.configs[::2], tuple(map(valley, space.configs[::2])))]
    batches, why = searched(space, lambda _: None, history=history)
    assert min(map(valley, flat(batches)[:40])) == 10.0
    assert max(map(valley, flat(batches)[:40])) > 14.0  # half of them by chance
    assert (len(flat(batches)), why) == (360, "all are tried")  # the pool, then the rest


def test_what_is_shipped_survives_packing_and_is_of_todays_families():
    for name, kernel in discover().items():
        shipped = shipped_history(name)
        assert History.unpack(History.pack(shipped)) == list(shipped)
        for history in shipped:
            assert len(history.configs) == len(history.times_us) > 1
            assert {param.name for param in kernel.params} <= set(history.configs[0])


def test_history_is_the_fastest_rows_and_some_others_of_todays_parameters(monkeypatch):
    monkeypatch.syspath_prepend(str(RESULTS.parent / "scripts"))
    script = importlib.import_module("history")
    most = script.ROWS
    space = space_of(200)
    rows = [row(config, 100.0 + (7 * i) % 200) for i, config in enumerate(space.configs)]
    rows += [row({"P0": 1000}, None), row({"P0": 1001}, 1.0, recorded=True)]
    rows += [row({"OLD": 1}, 1.0), row({"P0": 1002}, 1.0, provider="torch")]
    (history,) = script.recorded_history(rows, "card/run", {"toy": space.kernel})
    assert (history.kernel, history.problem, history.run) == ("toy", PROBLEM, "card/run")
    assert history.times_us[:most] == tuple(100.0 + i for i in range(most))
    assert most / 2 < len(history.times_us[most:]) <= most
    assert max(history.times_us) > 280
    times = {Config(trial.config): trial.first_us for trial in rows}
    for config, us in zip(history.configs, history.times_us, strict=True):
        assert times[Config(config)] == us


@functools.cache
def recorded_spaces(directory):
    """(space, rows by config) of a recorded run."""
    groups = defaultdict(dict)
    for trial in open_run(RESULTS / directory).trials:
        if trial.provider == OURS:
            groups[trial.kernel, trial.problem][Config(trial.config)] = trial
    families = discover()
    return [
        (Space(families[kernel], problem, tuple(rows), len(rows), {}), rows)
        for (kernel, problem), rows in groups.items()
    ]


def trials_to_a_good_one(space, rows, history):
    """The trials until one is within 1 % of the best, and all trials."""
    search = Search(partial(gp, history=history), space)
    finals = {c: t.time_us.median for c, t in rows.items() if t.time_us and t.time_us.rounds}
    good = {config for config, us in finals.items() if us <= 1.01 * min(finals.values())}
    asked = []
    while (config := search.ask()) is not None:
        asked.append(config)
        search.tell(rows[config])
    return next(n for n, c in enumerate(asked, 1) if c in good), len(asked)


@pytest.mark.parametrize("known", ["other problems", "other shapes", "nothing"])
def test_on_a_recorded_run_it_comes_within_1_percent_after_a_tenth_of_the_candidates(known):
    def shape(problem):
        return (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k, problem.head_dim)

    keeps = {
        "other problems": lambda one, other: one != other,
        "other shapes": lambda one, other: shape(one) != shape(other),
        "nothing": lambda one, other: False,
    }[known]
    shares = []
    for space, rows in recorded_spaces("h100-80gb-hbm3/flash_short"):
        if len(space.configs) < 120:
            continue
        history = [h for h in shipped_history(space.kernel.name) if keeps(h.problem, space.problem)]
        first, tried = trials_to_a_good_one(space, rows, history)
        assert tried < 0.5 * len(space.configs)
        shares.append(first / len(space.configs))
    assert len(shares) == 4
    assert sorted(shares)[2] <= (0.2 if known == "nothing" else 0.1)
    assert max(shares) <= 0.2


def test_the_default_is_a_strategy_and_a_spec_can_be_taken_whole(tmp_path):
    assert DEFAULT_STRATEGY in STRATEGIES
    path = tmp_path / "some.yaml"
    path.write_text(
        "problems: [{batch: 1, heads: 2, seqlen: 256, head_dim: 64}]\nkernels: {naive: {}}\n"
        "search: {strategy: gp, candidates: 5, seed: 3}\n"
    )
    whole = exhaustively(load_spec(path, discover())).search
    assert (whole.strategy, whole.candidates, whole.seed) == ("exhaustive", None, 3)
