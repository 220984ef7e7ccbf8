"""Strategies, driven by ask and tell."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.choose import search
from attnsweep.choose.search import STRATEGIES, Search, strategy
from attnsweep.choose.strategies.gp import BATCH, FEW, LEAST, Model
from attnsweep.core.errors import SpecError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status, Trial
from attnsweep.family.family import Family, Launch, Param
from attnsweep.family.space import Selection, Space
from attnsweep.specs.model import SearchSpec

PROBLEM = Problem(1, 2, 2, 64, 64, 64)
caps = st.none() | st.integers(1, 40)


def space_of(count, name="toy", problem=PROBLEM):
    kernel = Family(name, summary="", params=(Param("A", tuple(range(count)), ""),))
    kernel.stage("fwd")(lambda *_: Launch(name, (1, 1, 1), 32, ()))
    return Space.build(kernel, problem, ARCHS["sm_90a"])


def trial_of(config):
    return Trial(kernel="toy", provider="attnsweep", config=config, problem=PROBLEM, status=Status.OK)


def asked(name, space, **settings):
    """Every config a strategy proposes when each is told before the next is asked for."""
    at_work, out = Search(name, space, **settings), []
    while (config := at_work.ask()) is not None:
        out.append(config)
        at_work.tell(trial_of(config))
    assert at_work.ask() is None  # and stays so
    return out


@given(st.integers(1, 30), caps)
def test_exhaustive_takes_the_space_in_order(count, cap):
    space = space_of(count)
    assert asked("exhaustive", space, candidates=cap) == list(space.configs[:cap])


@given(st.integers(1, 30), caps, st.integers(0, 2**40))
def test_random_draws_without_repeats_and_again_the_same(count, cap, seed):
    space = space_of(count)
    drawn = asked("random", space, candidates=cap, seed=seed)
    assert len(drawn) == len(set(drawn)) == min(cap or count, count)
    assert set(drawn) <= set(space.configs)
    assert drawn == asked("random", space_of(count), candidates=cap, seed=seed)


def test_random_differs_by_seed_family_and_problem():
    base = asked("random", space_of(50), seed=1)
    causal = Problem(1, 2, 2, 64, 64, 64, causal=True)
    assert asked("random", space_of(50), seed=2) != base
    assert asked("random", space_of(50, "other"), seed=1) != base
    assert asked("random", space_of(50, problem=causal), seed=1) != base


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_empty_space_has_nothing_to_ask(name):
    space = space_of(1)
    empty = Space(space.kernel, space.problem, (), 1, {"rule": 1})
    assert asked(name, empty, candidates=5) == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_asks_may_run_ahead_of_tells(name):
    at_work = Search(name, space_of(LEAST + 2), candidates=LEAST + 2)
    ahead = [at_work.ask() for _ in range(LEAST)]
    for config in ahead:
        at_work.tell(trial_of(config))
    later = [at_work.ask(), at_work.ask()]
    assert len({*ahead, *later} - {None}) == LEAST + 2


def test_what_gp_would_ask_for_next_is_known_while_it_waits_and_changes_nothing():
    space = space_of(FEW + 20)
    at_work = Search("gp", space)
    batch = list(iter(at_work.ask, None))
    likely = at_work.likely
    assert len(batch) + len(likely) == BATCH
    assert not {*batch} & {*likely}
    for config in batch:
        at_work.tell(trial_of(config))
    model, other = (Model.of(space, (), 0) for _ in range(2))
    first = model.choose(5)
    assert first == other.choose(5)
    expected = model.likely(7)
    assert [*expected[:5]] == [model.configs[number] for number in other.choose(5)]
    assert model.choose(7) == [model.configs.index(config) for config in expected]


@pytest.mark.parametrize("candidates", [LEAST, LEAST + 3])
def test_gp_does_not_expect_to_ask_for_more_than_it_may(candidates):
    at_work = Search("gp", space_of(FEW + 20), candidates=candidates)
    batch = list(iter(at_work.ask, None))
    assert len(batch) + len(at_work.likely) == candidates


def test_the_spec_offers_the_strategies_there_are():
    assert set(get_args(SearchSpec.model_fields["strategy"].annotation)) == set(STRATEGIES)


def test_an_unknown_strategy_names_the_known():
    with pytest.raises(SpecError, match="unknown strategy 'bayes'") as caught:
        strategy("bayes")
    assert caught.value.hint == "there are: exhaustive, gp, random, staged"


def pipeline_space(sizes, forbidden=frozenset()):
    """A family of one stage a size, each with one parameter; a rule refuses `forbidden`."""
    names = [f"S{n}" for n in range(len(sizes))]
    kernel = Family(
        "toy", summary="", params=tuple(Param(f"{n}_P", tuple(range(s)), "") for n, s in zip(names, sizes, strict=True))
    )
    for name in names:
        kernel.stage(name, params=(f"{name}_P",))(lambda *_: Launch("f", (1, 1, 1), 32, ()))
    kernel.rule("not forbidden")(lambda config, problem, arch: tuple(config.values()) not in forbidden)
    return Space.build(kernel, PROBLEM, ARCHS["sm_90a"])


def staged_winner(space, times, ahead):
    """What strategy staged finds if the stages' times add up, and how many configs it tried."""
    at_work, tried, pending = Search("staged", space), {}, []
    while True:
        config = at_work.ask()
        if config is not None:
            pending.append(config)
        if config is None and not pending:
            break
        if config is None or len(pending) > ahead:
            for done in pending:
                stages_us = {name: times[name][done[f"{name}_P"]] for name in space.kernel.stages}
                tried[done] = sum(stages_us.values())
                at_work.tell(trial_of(done).with_(stages_us=stages_us))
            pending = []
    return min(tried.values()), len(tried)


@given(st.data(), st.lists(st.integers(1, 6), min_size=2, max_size=3), st.integers(0, 40))
def test_staged_finds_the_exhaustive_winner_when_stages_add_up(data, sizes, ahead):
    space = pipeline_space(sizes)
    times = {
        f"S{n}": data.draw(st.lists(st.integers(1, 1000), min_size=size, max_size=size)) for n, size in enumerate(sizes)
    }
    best = min(sum(times[name][config[f"{name}_P"]] for name in times) for config in space.configs)
    found, tried = staged_winner(space, times, ahead)
    assert found == best
    assert tried <= sum(sizes) + search.COMBINED


def test_staged_keeps_to_the_rules():
    space = pipeline_space([3, 3], forbidden={(0, 0)})
    found, _ = staged_winner(space, {"S0": [1, 5, 9], "S1": [1, 4, 9]}, ahead=4)
    assert found == 5


def linked_space(selection=None):
    """Two stages that share FUSED; the second is left out where FUSED is 2."""
    kernel = Family(
        "toy",
        summary="",
        params=(Param("FUSED", (0, 1, 2), ""), Param("A", tuple(range(6)), ""), Param("B", tuple(range(6)), "")),
    )
    kernel.stage("first", params=("FUSED", "A"))(lambda *_: Launch("f", (1, 1, 1), 32, ()))
    kernel.stage("second", params=("FUSED", "B"))(
        lambda config, problem, arch: None if config.FUSED == 2 else Launch("f", (1, 1, 1), 32, ())
    )
    return Space.build(kernel, PROBLEM, ARCHS["sm_90a"], selection)


def search_linked(space, times):
    """What strategy staged tried of a linked space, and what each took."""
    at_work, tried = Search("staged", space), {}
    while (config := at_work.ask()) is not None:
        stages_us = {"first": times["first"][config.FUSED][config.A]}
        if config.FUSED != 2:
            stages_us["second"] = times["second"][config.FUSED][config.B]
        tried[config] = sum(stages_us.values())
        at_work.tell(trial_of(config).with_(stages_us=stages_us))
    return tried


linked_times = st.fixed_dictionaries(
    {
        name: st.lists(st.lists(st.integers(1, 1000), min_size=6, max_size=6), min_size=3, max_size=3)
        for name in ("first", "second")
    }
)


@given(linked_times)
def test_staged_combines_only_what_goes_together(times):
    tried = search_linked(linked_space(), times)
    best = min(min(times["first"][fused]) + (min(times["second"][fused]) if fused < 2 else 0) for fused in range(3))
    assert min(tried.values()) == best
    assert len(tried) < 108


def test_staged_finds_the_best_of_each_variant():
    axis = {"plain": {"FUSED": (0,)}, "fused": {"FUSED": (1,)}}
    space = linked_space(Selection({}, {"pipeline": axis}))
    times = {"first": [[9, 8, 7, 6, 5, 900], [1] * 6, []], "second": [[50, 40] * 3, [2] * 6, []]}
    tried = search_linked(space, times)
    assert min(us for config, us in tried.items() if config.FUSED == 0) == 45
    assert min(us for config, us in tried.items() if config.FUSED == 1) == 3


def test_staged_is_exhaustive_for_one_stage():
    space = space_of(7)
    assert asked("staged", space) == list(space.configs)
