"""Which few configs are chosen for many shapes, and which times that choice believes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import candidate

from attnsweep.choose.pace import label_of_row
from attnsweep.core.errors import SpecError
from attnsweep.serve.portfolio import OFF, facts_of, lines_of, of_size, portfolios, times_as_long

KEYS = "abcdefg"
TIMES = st.dictionaries(st.sampled_from(KEYS), st.floats(1.001, 3.0), max_size=5)
SHAPES = st.lists(
    st.tuples(st.sampled_from(KEYS), TIMES).map(lambda each: each[1] | {each[0]: 1.0}), min_size=1, max_size=7
)
ALONE = 1e4
"""What a shape costs in these tests that nothing serves."""


def total(shapes, kept, otherwise=None):
    spare = otherwise or [None] * len(shapes)
    return sum(
        math.log(min([other or ALONE, *(shape[key] for key in kept if key in shape)]))
        for shape, other in zip(shapes, spare, strict=True)
    )


@given(SHAPES, st.data())
def test_no_exchange_of_one_config_for_another_helps(shapes, data):
    one = st.none() | st.floats(1.0, 3.0)
    otherwise = data.draw(st.none() | st.lists(one, min_size=len(shapes), max_size=len(shapes)))
    found = portfolios(shapes, otherwise or ())
    for size, portfolio in enumerate(found, 1):
        assert len({*portfolio.kept}) == size
        least = total(shapes, portfolio.kept, otherwise)
        for old, new in itertools.product(portfolio.kept, KEYS):
            kept = [*({*portfolio.kept} - {old} | {new})]
            assert least <= total(shapes, kept, otherwise) + 1e-6
        for shape, other, own, longer in zip(
            shapes, otherwise or [None] * len(shapes), portfolio.own, portfolio.longer, strict=True
        ):
            times = [shape[key] for key in portfolio.kept if key in shape]
            assert own is None or own in portfolio.kept
            assert longer == pytest.approx(min([*times, *[other] * (other is not None)], default=None))
            assert (own is None) == (not times or (other is not None and other < min(times)))


@given(SHAPES)
def test_one_config_is_the_best_one_and_the_last_lose_nothing(shapes):
    found = portfolios(shapes)
    assert total(shapes, found[0].kept) <= min(total(shapes, [key]) for key in KEYS) + 1e-6
    assert found[-1].longer == pytest.approx([1.0] * len(shapes))
    totals = [total(shapes, each.kept) for each in found]
    assert totals == sorted(totals, reverse=True)
    assert [each.facts["configs"] for each in found] == [*range(1, len(found) + 1)]


@given(SHAPES, st.randoms())
def test_the_choice_does_not_follow_the_order_of_configs(shapes, random):
    def shuffled(shape):
        items = [*shape.items()]
        random.shuffle(items)
        return dict(items)

    assert portfolios(shapes) == portfolios([*map(shuffled, shapes)])


def test_more_shapes_are_served_before_any_is_served_sooner():
    one, *_ = portfolios([{"a": 1.0, "z": 9.0}, {"a": 1.0, "z": 9.0}, {"z": 1.0}])
    assert (one.kept, one.own) == (["z"], ["z"] * 3)
    left, *_ = portfolios([{"a": 1.0}, {"a": 1.0}, {"z": 1.0}])
    assert (left.own, left.longer) == (["a", "a", None], [1.0, 1.0, None])
    assert left.facts == {"configs": 1, "mean": 1.0, "worst": 1.0, "off": 1, "without": 1}


def test_what_is_there_anyway_serves_where_it_is_sooner():
    one, *_ = portfolios([{"a": 1.0, "z": 9.0}, {"a": 1.0, "z": 9.0}, {"z": 1.0}], [1.5, 1.5, 1.2])
    assert (one.kept, one.own, one.longer) == (["a"], ["a", "a", None], pytest.approx([1.0, 1.0, 1.2]))
    assert portfolios([{"a": 1.0}], [1.0]) == []


def test_of_equal_configs_the_one_that_wins_on_most_shapes_is_kept():
    tied = {"a": 1.0, "z": 1.0}
    found = portfolios([tied, {"b": 1.0, "z": 1.0}, {"c": 1.0, "a": 1.2, "z": 1.2}, {"z": 1.0}])
    assert [each.kept for each in found] == [["z"], ["z", "c"]]
    assert portfolios([tied])[0].kept == ["a"]


def test_a_size_is_a_number_from_1_on():
    found = portfolios([{"a": 1.0}, {"z": 1.0}])
    assert [len(of_size(found, size).kept) for size in (1, 2, 3)] == [1, 2, 2]
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(SpecError, match=f"--at-most: at most {wrong!r} configs; it is a number from 1 on"):
            of_size(found, wrong)


def test_the_facts_mark_each_shape_that_loses_much():
    found = portfolios([{"a": 1.0}, {"a": OFF, "z": 1.0}, {"a": OFF - 0.001, "z": 1.0}, {"y": 1.0}])
    facts = facts_of(found, found[0], ["one", "two", "three", "four"])
    assert facts["kept"] == ["a"]
    assert [(each["problem"], each["times_as_long"], each["off"]) for each in facts["shapes"]] == [
        ("one", 1.0, False),
        ("two", 1.05, True),
        ("three", 1.049, False),
        ("four", None, True),
    ]
    assert [each["off"] for each in facts["curve"]] == [2, 1, 0]
    assert [*lines_of(facts)] == [
        "times as long as with its winner (5% off or more: *)",
        " 1.000   one",
        " 1.050 * two",
        " 1.049   three",
        "     – * four, without a config",
        "configs   mean  worst   *  without",
        "      1  1.033  1.050   2        1",
        "      2  1.024  1.050   1        0",
        "      3  1.000  1.000   0        0",
    ]


# ---- the times that count ----
WON, TIED, LOST, ROUGH = (
    candidate("flash", us, BLOCK_M=size) for us, size in ((20.0, 64), (21.0, 128), (23.0, 32), (20.5, 16))
)


def raced(trial, against, ratio):
    """A row that the race put out: it has no final rounds."""
    time = trial.time_us.model_copy(update={"rounds": []})
    return trial.with_(time_us=time, race={"against": label_of_row(against), "ratio": ratio, "survived": False})


def times(trial, *others):
    return times_as_long(trial, WON, {label_of_row(row): row for row in (WON, trial, *others)})


def test_final_rounds_count_and_what_the_race_allows_does():
    assert times(WON) == 1.0
    assert times(TIED) == pytest.approx(1.05)
    assert times(raced(LOST, WON, [1.1, 1.2])) == pytest.approx(1.2)
    assert times(raced(LOST, TIED, [1.1, 1.2]), TIED) == pytest.approx(1.05 * 1.2)


def test_no_rough_time_counts():
    assert times(ROUGH.with_(time_us=ROUGH.time_us.model_copy(update={"rounds": []}))) is None
    assert times(raced(LOST, WON, [1.1, None])) is None
    assert times(raced(LOST, TIED, [1.1, 1.2])) is None
    assert times(raced(LOST, ROUGH, [1.1, 1.2]), raced(ROUGH, WON, [1.0, 1.1])) is None
