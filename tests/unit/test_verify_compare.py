"""What a DeviceCase makes of findings: which are wrong, in which words; and of sets of inputs."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.verify import limits
from attnsweep.verify.device_case import DeviceCase, Errors, WrongResult
from attnsweep.verify.expected import OPPOSITE, PLAIN, negated_heads
from attnsweep.verify.measures import TILT, Measures

PROBLEM = Problem(2, 4, 2, 100, 128, 64, "bf16")
ROOT = Path(__file__).parent.parent.parent
ROWS = 2 * 4 * 100
LIMITS = Measures(1e-2, 2e-2, 3e-3, 4e-3, 5e-3, 1e-4, 2e-4)


class Judge:
    """Notes which tensors are taken from one mix to another."""

    def __init__(self):
        self.turns = []

    def negate(self, tensors, dtype, heads, mix, old, new):
        self.turns.append(("".join(tensors), heads, old, new))


class Fixture(DeviceCase):
    """A case whose buffers are their names."""

    def __init__(self, heads_kv=4, parts=8):
        self.case, self.comparer, self.mix, self.rows = Case(PROBLEM), Judge(), PLAIN, ROWS
        self._seed, self._rng, self._mix = 0, np.random.default_rng(0), None
        self._heads_kv, self.parts = heads_kv, parts
        self.buffers = {name: name for name in "qkvo"}


@pytest.fixture
def fixture(monkeypatch):
    monkeypatch.setattr(limits, "limits", lambda case, rounds_scores, same=None: LIMITS)
    return Fixture()


def finding(**changes):
    """Values as compare.cu finds them, of measures that are half of each limit."""
    measured = replace(Measures(*(value / 2 for value in asdict(LIMITS).values())), **changes)
    return {
        **{name: getattr(measured, name) for name in ("row", "element", "row_gain", "tile_gain")},
        "nans": 0.0,
        "row_at": 205.0,
        "norm": 1.0,
        "tilt_norm": 2.0,
        "squares": measured.rms**2 * ROWS,
        "gains": -measured.gain * ROWS,
        "tilt": -measured.scale / TILT * 2.0,
    }


def test_measures_within_their_limits_pass(fixture):
    accuracy = fixture.accuracy(Errors([finding()], {"o": 0}, 1e-5), 0)
    assert accuracy.rel_err == LIMITS.row / 2
    assert accuracy.limit == LIMITS.row
    assert accuracy.shares == pytest.approx(dict.fromkeys(asdict(LIMITS), 0.5), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("row", "relative error {} over the limit 1.00e-02 in row 5 of head 2"),
        ("rms", "rows have a typical relative error of {}, over the limit 3.00e-03"),
        ("element", "an element is off by {} of its row, over the limit 2.00e-02"),
        ("row_gain", "a row is scaled by 1 ± {}, over the limit 4.00e-03"),
        ("tile_gain", "64 rows are scaled by 1 ± {}, over the limit 5.00e-03"),
        ("gain", "all outputs are scaled by 1 ± {}, over the limit 1.00e-04"),
        ("scale", "the softmax scale is off by {}, over the limit 2.00e-04"),
    ],
)
@pytest.mark.parametrize("times", [1.01, math.inf, math.nan])
def test_each_measure_over_its_limit_is_refused_in_its_words(name, words, times, fixture):
    value = getattr(LIMITS, name) * times
    with pytest.raises(WrongResult) as refused:
        fixture.accuracy(Errors([finding(**{name: value})], {}), 0)
    said = words.format(f"{value:.2e}")
    assert refused.value.detail == f"{said} ({PROBLEM.label}, normal)"
    share = refused.value.accuracy.shares[name]
    assert math.isnan(share) if math.isnan(times) else share == pytest.approx(times, rel=1e-2)


def test_a_scale_is_judged_without_what_rounding_the_scores_of_these_inputs_makes_of_it(fixture, monkeypatch):
    def scale_of_rounding(case, seed, rounds_scores):
        return off * rounds_scores

    off = -3e-4

    monkeypatch.setattr(limits, "scale_of_rounding", scale_of_rounding)
    for scale, rounds_scores, share in ((4e-4, 1, 0.5), (6e-4, 2, 0.0), (-1e-4, 0, 0.5)):
        accuracy = fixture.accuracy(Errors([finding(scale=scale)], {}), rounds_scores)
        assert accuracy.shares["scale"] == pytest.approx(share)
    with pytest.raises(WrongResult, match=r"scale is off by 3\.00e-04"):
        fixture.accuracy(Errors([finding(scale=0.0)], {}), 1)
    # The timed problem has no other scale to compare with, and is too large to compute it.
    off = 1.0
    timed = finding(scale=0.0) | {"tilt_norm": 0.0}
    assert fixture.accuracy(Errors([timed], {}), 1).shares["scale"] == 0


def test_of_several_the_error_of_a_row_is_named(fixture):
    wrong = finding(row=2 * LIMITS.row, rms=9 * LIMITS.rms, gain=3 * LIMITS.gain)
    with pytest.raises(WrongResult, match=r"relative error .* in row"):
        fixture.accuracy(Errors([wrong], {}), 0)


def test_nan_is_refused_whatever_else_is_right(fixture):
    wrong = finding() | {"nans": 3.0}
    with pytest.raises(WrongResult, match="3 of 51200 outputs are NaN or were never") as refused:
        fixture.accuracy(Errors([wrong], {}), 0)
    assert refused.value.accuracy.rel_err is None


def test_findings_that_no_launch_wrote_are_refused(fixture):
    with pytest.raises(WrongResult):
        fixture.accuracy(Errors([dict.fromkeys(finding(), math.nan)], {}), 0)


def test_damage_is_told_before_errors(fixture):
    wrong = finding(row=1.0) | {"nans": 1.0}
    with pytest.raises(WrongResult, match="wrote 7 bytes outside 'partial'"):
        fixture.accuracy(Errors([wrong], {"o": 0, "partial": 7}), 0)


@pytest.mark.parametrize("wrong", [1.1e-4, math.nan, 1e300])
def test_a_log_sum_exp_over_its_limit_is_refused(wrong, fixture):
    with pytest.raises(WrongResult, match="log-sum-exp off by"):
        fixture.accuracy(Errors([finding()], {}, wrong), 0)


@pytest.mark.parametrize("times", [5.0, math.inf])
def test_of_a_baseline_an_error_is_shown(times, fixture):
    shown = fixture.accuracy(Errors([finding(row=LIMITS.row * times)], {}), 0, baseline=True)
    assert shown.shares["row"] == times
    assert shown.rel_err == (LIMITS.row * times if times < math.inf else None)


def test_of_a_baseline_nan_is_refused(fixture):
    with pytest.raises(WrongResult, match="are NaN"):
        fixture.accuracy(Errors([finding() | {"nans": 1.0}], {}), 0, baseline=True)


# -- limits ---------------------------------------------------------------------------------------


def test_a_limit_that_is_nan_lets_nothing_pass():
    shares = Measures(0.0, 0.0).shares(Measures(math.nan, 1.0, *[math.inf] * 5))
    assert not all(share <= 1 for share in shares.values())


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_a_limit_of_rows_is_finite(error):
    for same in (Measures(error, 0.1), Measures(0.1, error)):
        with pytest.raises(ArithmeticError, match="no finite error"):
            limits.limits(Case(PROBLEM), 0, same)
    assert limits.limits(Case(PROBLEM), 0, Measures(0.1, 0.1)).row < math.inf


# -- sets of inputs -------------------------------------------------------------------------------


def test_only_keys_and_values_turn_and_only_if_they_must(fixture):
    fixture.go_to(PLAIN)
    assert fixture.comparer.turns == []
    fixture.go_to(OPPOSITE)
    fixture.go_to(OPPOSITE)
    fixture.go_to(77)
    assert fixture.comparer.turns == [("kv", 4, PLAIN, OPPOSITE), ("kv", 4, OPPOSITE, 77)]
    assert fixture.mix == 77


@pytest.mark.parametrize("heads_kv", [1, 2, 64])
def test_each_draw_turns_a_head(heads_kv):
    made = Fixture(heads_kv, heads_kv)
    for number in range(60):
        before = negated_heads(made.mix, heads_kv)
        if number % 3:
            made.draw_ahead()
        if number % 5 == 0:  # as a candidate's check between two replays does
            made.go_to(number % 2)
            before = negated_heads(made.mix, heads_kv)
        made.draw()
        assert (negated_heads(made.mix, heads_kv) != before).any()
        assert heads_kv > 1 or made.mix in (PLAIN, OPPOSITE)


def test_a_kernel_that_keeps_two_outputs_a_head_passes_as_the_page_of_what_cannot_be_found_says():
    """Where signs of k and v are all that changes, one sign of K tells which output is right."""
    heads, made = 4, Fixture(4, 4)
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, heads, 16, 8))

    def inputs():
        sign = np.where(negated_heads(made.mix, heads), -1.0, 1.0)[:, None, None]
        return sign * k, sign * v

    def right(keys, values):
        weights = np.exp(q @ keys.swapaxes(1, 2))
        return weights @ values / weights.sum(axis=2, keepdims=True)

    kept = {}
    for mix in (PLAIN, OPPOSITE):  # the checked calls
        made.go_to(mix)
        keys, values = inputs()
        for head, output in enumerate(right(keys, values)):
            kept[head, keys[head, 0, 0] > 0] = output
    contents = set()
    for _ in range(60):
        made.draw()
        keys, values = inputs()
        answers = np.array([kept[head, keys[head, 0, 0] > 0] for head in range(heads)])
        assert np.array_equal(answers, right(keys, values))
        contents |= {(head, keys[head].tobytes()) for head in range(heads)}
    assert len(contents) == 2 * heads
    _, _, page = (ROOT / "docs/explanation/numerics.md").read_text().partition("What cannot be")
    assert "have two contents for each head of keys" in " ".join(page.split())


@given(st.integers(0, 2**64 - 1), st.integers(1, 4), st.integers(1, 4))
def test_the_digest_of_a_mix_is_the_sum_of_its_heads(mix, heads_kv, group):
    made = Fixture(heads_kv, heads_kv * group)
    made.mix = mix
    of_sides = np.random.default_rng(0).integers(0, 2**64, (2, made.parts), dtype=np.uint64)
    negated = negated_heads(mix, heads_kv)
    expected = sum(int(of_sides[int(negated[n // group]), n]) for n in range(made.parts))
    assert made.digest(of_sides) == expected % 2**64
