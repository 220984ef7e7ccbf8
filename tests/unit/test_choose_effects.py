"""Effects of parameters, of made-up spaces whose effects are known."""

import itertools
import re
from pathlib import Path

import pytest
from samples import candidate, failed

from attnsweep.choose.effects import axes_of, effects, percents, timed
from attnsweep.core.trial import Status, Trial
from attnsweep.reports.explain import explain, lines
from attnsweep.store.run import open_run

RESULTS = Path(__file__).parents[2] / "results"


def row(us: float, **config: int | str) -> Trial:
    return candidate("flash", us).with_(config=config, first_us=us)


def grid() -> list[Trial]:
    """M doubles the time, N adds a tenth, S does nothing, and FIXED never varies."""
    return [
        row(10.0 * m * (1.1 if n == 64 else 1.0), M=m, N=n, S=s, FIXED=7)
        for m, n, s in itertools.product((1, 2), (64, 128), (2, 3, 4))
    ]


def test_the_pairs_of_a_full_grid_tell_each_factor_and_the_shares_add_up() -> None:
    trials = grid()
    found = effects(trials, trials[3])  # M=1 N=128
    assert [e.name for e in found] == ["M", "N", "S"]
    m, n, s = found
    assert (m.candidates, m.pairs, m.spread) == (12, 6, pytest.approx(2.0))
    one, two = m.values
    assert (one.value, one.ratio, one.pairs) == (1, None, 0)
    assert (two.ratio, two.pairs, two.faster) == (pytest.approx(2.0), 6, 0)
    assert n.values[0].ratio == pytest.approx(1.1)
    assert (s.pairs, s.spread, s.share) == (12, 1.0, 0.0)
    assert m.share is not None
    assert n.share is not None
    # log 2 squared next to log 1.1 squared, up to the adjustment for 12 rows.
    assert m.share == pytest.approx(0.981, abs=0.003)
    assert m.share + n.share == pytest.approx(1.0, abs=0.1)


def test_chance_alone_explains_nothing() -> None:
    """Many values of one row each would explain everything without the adjustment."""
    noise = [10.0, 10.2, 9.9, 10.1, 10.0, 9.8, 10.1, 10.2, 9.9, 10.0]
    trials = [row(us, SEED=i // 2, TWICE=i % 2) for i, us in enumerate(noise)]
    by_name = {effect.name: effect for effect in effects(trials, trials[0])}
    assert by_name["SEED"].share is not None
    assert by_name["SEED"].share < 0.4
    alone = [row(us, SEED=i) for i, us in enumerate(noise)]
    assert [effect.share for effect in effects(alone, alone[0])] == [None]


def test_only_right_candidates_of_the_family_with_a_first_time_count() -> None:
    trials = [
        *grid(),
        failed("flash", Status.WRONG, "no", M=1, N=64, S=2, FIXED=7).with_(first_us=1.0),
        candidate("other", 1.0, M=1).with_(first_us=1.0),
        row(10.0, M=9, N=1, S=1, FIXED=7).with_(first_us=None, time_us=None),
    ]
    assert len(timed(trials, "flash")) == 12
    assert effects(trials, trials[0])[0].candidates == 12


def test_parameters_that_change_together_are_paired_by_their_axis() -> None:
    variants = {
        "p": {"shared": {"P": [1], "MAX": [2]}, "registers": {"P": [0], "MAX": [1]}},
        "stages": {"few": {"ST": [2]}, "more": {"ST": [2, 4]}},
        "odd": "not a mapping",
    }
    axes = axes_of(variants)
    assert axes == {"p": ["P", "MAX"]}
    trials = [
        row(us * n, P=p, MAX=most, N=n).with_(variant={"p": name})
        for us, p, most, name in ((10.0, 1, 2, "shared"), (13.0, 0, 1, "registers"))
        for n in (1, 2)
    ]
    without, found = effects(trials, trials[0]), effects(trials, trials[0], axes)
    assert {e.name: e.pairs for e in without} == {"N": 2, "P": 0, "MAX": 0}
    assert {e.name: e.pairs for e in found} == {"N": 2, "p": 2}
    assert found[-1].sets == ("P", "MAX")
    assert {v.value: v.ratio for v in found[-1].values} == {"shared": None, "registers": pytest.approx(1.3)}


def test_shares_of_parameters_that_rules_tie_together_add_up_with_the_rest():
    """AHEAD had 96 % and DQ_RING 46 %, which followed it."""
    trials = [
        row(10.0 * (1.2 if ahead else 1.0) * (1.03 if ring else 1.0) * (1 + number / 1000), AHEAD=ahead, RING=ring)
        for number, (ahead, ring) in enumerate([(0, 0)] * 4 + [(1, 1)] * 4 + [(1, 0)] * 2)
    ]
    found = effects(trials, trials[0])
    assert [e.name for e in found] == ["AHEAD", "RING"]
    assert sum(e.share for e in found) <= 1
    *whole, rest = percents(found)
    assert (whole[0] > 90, whole[1] < 5, rest >= 0, sum(whole) + rest) == (True, True, True, 100)
    assert percents([]) == [100]


@pytest.mark.parametrize("run", ["h200/flash_short", "h100-80gb-hbm3/backward", "h200/three_kernel"])
def test_shares_of_a_recorded_run_add_up(run):
    for each in explain(open_run(RESULTS / run), (), None, {}):
        if each.effects:
            assert sum(percents(each.effects)) == 100
            assert sum(effect.share or 0 for effect in each.effects) <= 1 + 1e-9
            text = [line.plain for line in lines(each, 120)]
            first = next(n for n, line in enumerate(text) if line.startswith("parameter "))
            table = itertools.takewhile(lambda line: not line.startswith("share:"), text[first:])
            assert sum(int(n) for n in re.findall(r"^\S.*? (\d+)\s%", "\n".join(table), re.MULTILINE)) == 100
