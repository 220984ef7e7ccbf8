"""× base: which baseline it compares with, in which rounds, and what is said of it."""

import csv
import io
import math
from collections.abc import Sequence

import pytest
from rich.console import Console
from samples import candidate, full_run, once, timed

from attnsweep.choose.baseline_ratio import common_rounds
from attnsweep.choose.pace import at_pace
from attnsweep.choose.ranking import judged, rank
from attnsweep.core.trial import OURS, Accuracy, Energy, Measurement, Status, Trial
from attnsweep.reports import tables
from attnsweep.reports.sections import Sections
from attnsweep.reports.tables import to_csv, to_markdown


def ours(rounds: Sequence[float], number: int = 1, **changes: object) -> Trial:
    return candidate("flash", 1.0, A=number).with_(time_us=timed(rounds), **changes)


def baseline(name: str, rounds: Sequence[float], status: Status = Status.OK, **changes: object) -> Trial:
    return candidate(name, 1.0).with_(
        provider=name, resources=None, time_us=timed(rounds), status=status, cold_us=None, **changes
    )


def best(*rows: Trial) -> dict[str, object]:
    """The first row of ours, as the ranking tells it."""
    frame = rank(rows, None)
    return dict(frame[~frame["baseline"]].iloc[0])


def printed(rows: Sequence[Trial], width: int) -> str:
    out = io.StringIO()
    tables.print_run(full_run(trials=list(rows)), Console(file=out, width=width))
    return out.getvalue()


CLOCK = [1.0, 1.3, 1.1, 1.0, 1.2, 1.3, 1.0, 1.1, 1.2, 1.0, 1.3, 1.1]
"""The pace of each round: at its power cap a card has many."""


def test_the_ratio_is_the_median_of_the_rounds_that_both_ran() -> None:
    own = [10.0 * pace for pace in CLOCK]
    theirs = [us * ratio for us, ratio in zip(own, [1.1, 1.09, 1.1, 1.11] * 3, strict=True)]
    row = best(ours(own), baseline("torch_cudnn", theirs))
    assert row["ratio_to_best_baseline"] == pytest.approx(1.1)
    assert (row["ratio_low"], row["ratio_high"]) == pytest.approx((1.09, 1.11))
    assert (row["ratio_of"], row["best_baseline"]) == ("rounds", "torch_cudnn")


def test_a_slow_baseline_that_left_is_paired_with_the_rounds_that_it_ran() -> None:
    own = [20.0] * 5 + [10.0] * 10  # the clock doubled when the slow one had left
    row = best(ours(own), baseline("unfused", [40.0] * 5))
    assert row["ratio_to_best_baseline"] == 2  # the medians would say 4
    assert (row["ratio_low"], row["ratio_high"]) == (2, 2)


def test_rounds_taken_later_are_paired_by_their_position() -> None:
    own = ours([20.0] * 6 + [10.0] * 6)
    later = baseline("torch_cudnn", [1.0])
    later = later.with_(time_us=timed([12.0] * 6, first_round=6))
    assert common_rounds(own, later) == ([10.0] * 6, [12.0] * 6)
    assert common_rounds(later, own) == ([12.0] * 6, [10.0] * 6)
    assert best(own, later)["ratio_to_best_baseline"] == pytest.approx(1.2)
    beyond = later.with_(time_us=timed([12.0] * 6, first_round=20))
    assert common_rounds(own, beyond) == ([], [])


def test_without_rounds_in_common_it_is_marked_and_has_no_interval() -> None:
    alone = ours([1.0]).with_(time_us=once(10.0))
    row = best(alone, baseline("torch_cudnn", [12.0] * 9))
    assert row["ratio_to_best_baseline"] == pytest.approx(1.2)
    assert row["ratio_of"] == "medians"
    assert math.isnan(float(str(row["ratio_low"])))
    text = printed([alone, baseline("torch_cudnn", [12.0] * 9)], 120)
    assert "~1.20" in text
    assert "1.20× torch_cudnn, the fastest baseline by medians of different rounds" in " ".join(text.split())


def test_another_kind_of_time_has_no_ratio() -> None:
    cold = baseline("torch_cudnn", [12.0] * 9)
    cold = cold.with_(time_us=timed([12.0] * 9, l2="cold"))
    row = best(ours([10.0] * 9), cold)
    assert math.isnan(float(str(row["ratio_to_best_baseline"])))


# -- noisy baselines ----------------------------------------------------------------------------

WILD = [12.0, 30.0, 13.0, 29.0, 12.5, 31.0]
"""Rounds of a baseline that stays noisy; its fastest takes 12 µs."""


def test_a_noisy_baseline_bounds_the_ratio_and_is_never_dropped_in_silence() -> None:
    rows = [
        ours([10.0] * 6),
        baseline("torch_cudnn", WILD, Status.NOISY, detail="quartiles of 6 rounds 12.38 to 29.75 us"),
        baseline("unfused", [39.7] * 6),
    ]
    row = best(*rows)
    assert row["ratio_to_best_baseline"] == pytest.approx(1.2)
    assert (row["ratio_of"], row["best_baseline"]) == ("bound", "torch_cudnn")
    for width in (80, 120):
        text = " ".join(printed(rows, width).split())
        assert "≥1.20" in text
        assert "at least 1.20× torch_cudnn, the fastest baseline" in text
        assert "torch_cudnn stayed noisy: × base takes its fastest round, 12.00 µs" in text
    page = to_markdown(Sections(rows, None))
    assert "| – | torch_cudnn | base, noisy | 21.00" in page
    assert "stayed noisy" in page


def test_a_noisy_baseline_that_is_slower_even_at_its_best_changes_nothing() -> None:
    row = best(ours([10.0] * 6), baseline("torch_flash", WILD, Status.NOISY), baseline("b", [11.0] * 6))
    assert (row["best_baseline"], row["ratio_of"]) == ("b", "rounds")


def test_a_noisy_baseline_without_a_believable_time_is_no_base() -> None:
    broken = baseline("b1", [float("nan")] * 6, Status.NOISY)
    row = best(ours([10.0] * 6), broken, baseline("b2", [11.0] * 6))
    assert row["best_baseline"] == "b2"


# -- baselines over the error limit, and in another format ----------------------------------------

OVER = Accuracy(rel_err=7.1e-6, limit=5.0e-6)


def test_a_plain_read_is_a_bound_and_no_rival() -> None:
    error = Accuracy(rel_err=1.0, limit=5e-6)  # its output is 0
    own = [10.0 * pace for pace in CLOCK]
    read = baseline("plain_read", [us * 0.9 for us in own], accuracy=error)
    rows = [read, ours(own), baseline("flash_attn_3", [us * 1.1 for us in own])]
    row = best(*rows)
    assert (row["rank"], row["best_baseline"], row["ratio_to_best_baseline"]) == (1, "flash_attn_3", pytest.approx(1.1))
    text = " ".join(printed(rows, 100).split())
    assert "plain_read: the best of ours has 90 % of a plain read of K and V" in text
    assert "neither ranked nor taken as base: it computes no attention" in text
    assert "over the limit" not in text
    assert "| – | plain_read | bound |" in to_markdown(Sections(rows, None))
    assert "plain read" not in printed(rows[1:], 100)
    assert Sections(rows[1:], None, asked=("plain_read", "flash_attn_3"))[0].lost is None


def test_a_baseline_over_the_limit_is_ranked_marked_and_serves_as_base() -> None:
    """The limit is our rule: without the faster one, the ratio to a slower one flattered us."""
    rows = [ours([10.0] * 6), baseline("unfused", [12.0] * 6, accuracy=OVER), baseline("b", [20.0] * 6)]
    assert judged(rows[1])[0] is Status.OK
    ranking = rank(rows, None)
    assert ranking["provider"].tolist() == [OURS, "unfused", "b"]
    assert ranking["rank"].tolist() == [1, 2, 3]
    row = best(*rows)
    assert (row["best_baseline"], row["ratio_to_best_baseline"]) == ("unfused", pytest.approx(1.2))
    text = printed(rows, 100)
    assert "base, over the limit" in text
    assert "unfused: error 7.1e-06, over the limit 5.0e-06" in text
    page = to_markdown(Sections(rows, None))
    assert "| base, over the limit |" in page
    assert "unfused: error 7.1e-06, over the limit 5.0e-06" in page
    assert "over_limit" in to_csv(ranking).splitlines()[0]


def test_a_faster_baseline_over_the_limit_has_the_first_rank() -> None:
    ranking = rank([ours([10.0] * 6), baseline("unfused", [8.0] * 6, accuracy=OVER)], None)
    assert ranking["provider"].tolist() == ["unfused", OURS]
    assert ranking["rank"].tolist() == [1, 2]
    assert ranking["ratio_to_best_baseline"].tolist()[1] == pytest.approx(0.8)


def test_a_candidate_over_the_limit_stays_wrong_and_so_does_a_baseline_that_is_nan() -> None:
    assert judged(ours([10.0] * 6, accuracy=OVER))[0] is Status.WRONG
    for error in (None, math.nan, math.inf):
        row = baseline("unfused", [12.0] * 6, accuracy=Accuracy(rel_err=error, limit=5e-6))
        assert judged(row)[0] is Status.WRONG


@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        (Accuracy(rel_err=4e-2, limit=4e-3), "; error 4.0e-02, over the limit 4.0e-03"),
        (Accuracy(rel_err=3e-3, limit=4e-3), ""),
        (None, ""),
    ],
    ids=["over-the-limit", "within-the-limit", "unchecked"],
)
def test_a_baseline_in_another_format_is_shown_but_never_has_a_rank_nor_is_the_base(
    accuracy: Accuracy | None, said: str
) -> None:
    fp8 = baseline("flash_attn_3_fp8", [5.0] * 6, accuracy=accuracy)
    rows = [fp8, ours([10.0] * 6), baseline("flash_attn_3", [11.0] * 6)]
    ranking = rank(rows, None)
    assert ranking["provider"].tolist() == [OURS, "flash_attn_3", "flash_attn_3_fp8"]
    assert ranking["rank"].tolist()[:2] == [1, 2]
    assert ranking["rank"].isna().tolist() == [False, False, True]
    assert ranking["best_baseline"].tolist() == ["flash_attn_3"] * 3
    row, _, below = ranking.to_dict("records")
    assert (row["ratio_of"], row["ratio_to_best_baseline"]) == ("rounds", pytest.approx(1.1))
    assert math.isnan(below["ratio_to_best_baseline"])
    assert (below["status"], below["detail"]) == ("ok", "it does not compute in fp16")
    why = f"flash_attn_3_fp8: neither ranked nor taken as base: it does not compute in fp16{said}"
    text = printed(rows, 100)
    lines = [line.split()[:2] for line in text.splitlines()]
    assert lines.index(["–", "flash_attn_3_fp8"]) > lines.index(["2", "flash_attn_3"])
    assert " ".join(text.split()).count(why) == 1
    page = to_markdown(Sections(rows, None))
    assert "| – | flash_attn_3_fp8 | other format | 5.000" in page
    assert page.count(why) == 1
    *_, last = csv.DictReader(io.StringIO(to_csv(ranking)))
    assert (last["provider"], last["rank"], last["ratio_of"]) == ("flash_attn_3_fp8", "", "")
    assert last["detail"] == below["detail"]
    assert best(ours([10.0] * 6), fp8)["best_baseline"] is None


# -- tables ---------------------------------------------------------------------------------


def test_a_row_out_of_the_rounds_of_the_finals_is_marked() -> None:
    raced = Measurement(median=11.0, low=10.9, high=11.1, samples=20)
    rows = [ours([10.0] * 12), ours([1.0], 2).with_(time_us=raced, race={"rounds": 20}), baseline("b", [12.0] * 12)]
    text = printed(rows, 100)
    assert "~11.00" in text
    assert "~10.00" not in text


def alone(us: float, number: int, first_us: float) -> Trial:
    """A candidate that was timed once, before the rounds or in a race."""
    return candidate("flash", 1.0, A=number).with_(time_us=once(us), first_us=first_us)


def test_who_was_not_in_the_rounds_gains_nothing_by_a_card_that_is_slower_in_them() -> None:
    # Seen on a hot H100: first times of 2900 to 3200 us, rounds of 3400, and one that never raced,
    # whose first time was one of many, led with 1.28 times the baseline.
    there = [ours([131.0, 130.0, 132.0] * 5, n).with_(first_us=100.0 + n) for n in (1, 2)]
    rows = [*there, baseline("p", [143.0, 143.5, 144.0] * 5), alone(101.0, 3, 101.0)]
    rows.append(alone(104.0, 4, 102.0))  # lost a race, before the card was hot
    frame = rank(rows, None)
    placed = {row.trial.config.get("A", "p"): row for row in frame.itertuples()}
    assert placed[1].rank == placed[2].rank == 1
    assert placed[3].rank > 1
    assert placed[4].rank > 1
    assert frame.loc[frame["winner"], "rank"].item() == 1
    assert placed[3].time_us == 101.0
    pace = (131 / 101 + 131 / 102) / 2
    assert placed[3].ratio_to_best_baseline == pytest.approx(143.5 / (101 * pace))
    assert placed[4].ratio_to_best_baseline == pytest.approx(143.5 / (102 * pace))
    assert placed[3].ratio_of == placed[4].ratio_of == "medians"


def test_who_was_clearly_faster_from_the_first_leads_without_rounds_all_the_same() -> None:
    there = ours([131.0, 130.0, 132.0] * 5, 1).with_(first_us=100.0)
    assert best(there, alone(88.0, 2, 88.0))["time_us"] == 88.0
    assert best(there, alone(92.0, 2, 92.0))["time_us"] == 131.0


def test_a_card_that_is_faster_in_the_rounds_makes_nobody_faster_who_was_not_there() -> None:
    there = ours([88.0, 89.0, 90.0] * 5, 1).with_(first_us=100.0)
    paced = at_pace([there, alone(99.0, 2, 99.0), alone(70.0, 3, 71.0)])
    assert list(paced.values()) == [89.0, 99.0, 70.0]
    without = at_pace([there.with_(first_us=None), alone(99.0, 2, 99.0)])
    assert list(without.values()) == [89.0, 99.0]


STEP = [1.0] * 15 + [1.3] * 30
"""A card that is slower from the 16th round on."""


def test_who_left_before_the_card_became_slow_does_not_lead_by_it() -> None:
    whole = [ours([us * pace for pace in STEP], n) for n, us in ((1, 100.0), (2, 100.2))]
    left = ours([103.0] * 15, 3)
    frame = rank([*whole, left], None)
    placed = {row.trial.config["A"]: row for row in frame.itertuples()}
    assert [placed[n].rank for n in (1, 2, 3)] == [1, 1, 3]
    assert placed[3].time_us == 103.0
    assert at_pace([*whole, left])[id(left)] == pytest.approx(103.0 * 1.3)
    # The same on a card that becomes faster, and of one that came later.
    whole = [ours([us / pace for pace in STEP], n) for n, us in ((1, 100.0), (2, 100.2))]
    later = ours([97.0 / 1.3] * 30, 3)
    later = later.with_(time_us=timed([97.0 / 1.3] * 30, first_round=15))
    assert at_pace([*whole, later])[id(later)] == pytest.approx(97.0 / 1.3)
    assert at_pace([*whole, left])[id(left)] == pytest.approx(103.0 / 1.3)


def test_the_base_is_the_fastest_at_one_pace_and_not_the_one_that_left_the_slow_rounds() -> None:
    own = ours([100.0 * pace for pace in STEP])
    near = baseline("flash_attn_3", [101.0 * pace for pace in STEP])
    left = baseline("torch_cudnn", [125.0] * 15)
    row = best(own, near, left)
    assert (row["best_baseline"], row["ratio_of"]) == ("flash_attn_3", "rounds")
    assert row["ratio_to_best_baseline"] == pytest.approx(1.01)


def test_a_baseline_of_slow_rounds_alone_flatters_no_row_without_rounds() -> None:
    # All rounds of the baseline were on a slow card, which then was as fast as in the first times.
    own = ours([us * (1.3 if n < 15 else 1.0) for n, us in enumerate([100.0] * 45)])
    own = own.with_(first_us=100.0)
    frame = rank([own, baseline("torch_cudnn", [112.0 * 1.3] * 15), alone(103.0, 2, 103.0)], None)
    ratios = {row.trial.config.get("A"): row.ratio_to_best_baseline for row in frame.itertuples()}
    assert ratios[1] == pytest.approx(1.12)
    assert ratios[2] == pytest.approx(112 / 103)


def test_who_lost_a_race_on_a_faster_card_stays_as_far_behind_as_it_was_there() -> None:
    # The race alone was on a fast card: first times, and rounds, took 1.3 times as long.
    there = ours([130.0, 131.0, 129.0] * 5, 1).with_(first_us=130.0)
    lost = alone(104.0, 2, 134.0).with_(race={"against": "flash A=1", "ratio": [1.03, 1.05]})
    behind = alone(106.0, 3, 137.0).with_(race={"against": "flash A=2", "ratio": [1.01, 1.03]})
    unshown = alone(104.0, 4, 134.0).with_(race={"against": "flash A=1", "ratio": [None, None]})
    rows = [there, lost, behind, unshown]
    paced = at_pace(rows)
    assert paced[id(lost)] == pytest.approx(130 * (1.03 * 1.05) ** 0.5)
    assert paced[id(behind)] == pytest.approx(paced[id(lost)] * (1.01 * 1.03) ** 0.5)
    assert paced[id(unshown)] == 134.0
    assert best(*rows)["trial"] is there


@pytest.mark.parametrize("ratio", [{"a": 1}, [1.0], "12", [[1.0], True], 2.0])
@pytest.mark.parametrize("against", ["flash A=1", ["flash A=1"], {}])
def test_a_race_of_odd_facts_says_nothing(ratio: object, against: object) -> None:
    there = ours([130.0, 131.0, 129.0] * 5, 1).with_(first_us=130.0)
    odd = alone(104.0, 2, 134.0).with_(race={"against": against, "ratio": ratio})
    assert at_pace([there, odd])[id(odd)] == 134.0


def test_who_beat_each_other_in_races_of_two_runs_end_the_search() -> None:
    rows = [ours([100.0] * 6, 1), *(alone(100.0, n, 101.0) for n in (2, 3))]
    rows[1:] = [
        row.with_(race={"against": f"flash A={other}", "ratio": [1.1, 1.1]})
        for row, other in zip(rows[1:], (3, 2), strict=True)
    ]
    assert [*at_pace(rows).values()] == pytest.approx([100, 110, 110])


def test_first_times_of_two_states_count_at_the_slower_of_time_and_cycles() -> None:
    there = ours([130.0] * 9, 1).with_(first_us=130.0, first_mhz=1500.0)
    early = alone(100.0, 2, 100.0).with_(first_mhz=1950.0)  # as many cycles, on a faster card
    assert at_pace([there, early])[id(early)] == pytest.approx(130.0)
    late = alone(140.0, 3, 140.0).with_(first_mhz=1200.0)
    assert at_pace([there, late])[id(late)] == pytest.approx(140.0)


def test_a_noisy_baseline_bounds_the_ratio_of_a_row_that_never_raced() -> None:
    there = ours([130.0] * 9, 1).with_(first_us=100.0)
    noisy = baseline("torch_cudnn", [150.0, 210.0] * 4 + [150.0], Status.NOISY)
    frame = rank([there, noisy, alone(101.0, 2, 101.0)], None)
    ratios = {row.trial.config.get("A"): row for row in frame.itertuples()}
    assert ratios[1].ratio_of == ratios[2].ratio_of == "bound"
    assert ratios[2].ratio_to_best_baseline == pytest.approx(150 / (1.3 * 101))


def test_a_noisy_baseline_of_slow_rounds_alone_is_no_bound_that_flatters() -> None:
    pace = [1.3] * 5 + [1.0] * 10
    own = [ours([us * slow for slow in pace], n) for n, us in ((1, 100.0), (2, 101.0))]
    noisy = baseline("torch_cudnn", [120.0 * 1.3, 180.0, 230.0, 120.0 * 1.3, 230.0], Status.NOISY)
    row = best(*own, noisy)
    assert row["ratio_of"] == "bound"
    assert row["ratio_to_best_baseline"] == pytest.approx(1.2)


@pytest.mark.parametrize("kind", ["cold", "energy"])
def test_another_kind_of_time_parts_no_tie(kind: str) -> None:
    # Warm times of who never raced are below cold ones, and microseconds below microjoules.
    rounds = [150.0, 151.0, 149.0] * 5
    if kind == "cold":
        alike = [candidate("flash", 1.0, A=n).with_(time_us=timed(rounds, l2="cold")) for n in (1, 2)]
    else:
        each = timed([300 * us for us in rounds])
        facts = each.model_dump(include={"median", "low", "high", "samples", "rounds"})
        energy = Energy(**facts, ranks=True)
        alike = [ours([100.0] * 5, n, energy_uj=energy, power_w=300.0) for n in (1, 2)]
    frame = rank([*alike, alone(130.0, 3, 130.0)], None)
    assert list(frame["rank"]) == [1, 1, 3]


def test_rows_of_as_many_slow_as_fast_rounds_are_at_one_pace() -> None:
    # Their medians are of either half, by chance: a slower row's of the fast one.
    pace = [1.0] * 15 + [1.3] * 15
    wobble = [0.001 * (n % 3 - 1) for n in range(30)]
    rows = [
        ours([us * slow * (1 + off) for slow, off in zip(pace, wobble, strict=True)], n)
        for n, us in ((1, 100.0), (2, 103.0), (3, 101.0))
    ]
    rows[1] = rows[1].with_(time_us=rows[1].time_us.model_copy(update={"median": 103.2}))
    base = baseline("torch_cudnn", [112.0] * 15)
    paced = at_pace([*rows, base])
    assert paced[id(rows[1])] / paced[id(rows[0])] == pytest.approx(1.03, abs=2e-3)
    assert paced[id(base)] / paced[id(rows[0])] == pytest.approx(1.12, abs=2e-3)
    assert best(*rows, base)["trial"] is rows[0]


@pytest.mark.parametrize(("median_us", "status"), [(6.0, "ok"), (6.00001, "ok"), (1e-9, "damaged")])
def test_a_median_that_is_not_that_of_its_rounds_is_damage(median_us: float, status: str) -> None:
    row = ours([6.0, 6.1, 5.9])
    changed = row.with_(time_us=timed([6.0, 6.1, 5.9], median=median_us))
    found, why = judged(changed)
    assert found == status
    assert (why is None) is (status == "ok")
    if why is not None:
        assert why == "says ok, but its median is 1e-09 and that of its rounds 6"


def test_a_callable_that_is_judged_or_that_no_graph_holds_is_no_base() -> None:
    rows = (
        ours([10.0] * 6),
        baseline("torch_flash", [12.0] * 6),
        baseline("a.b:c", [8.0] * 6, candidate=True),
        baseline("d.e:f", [9.0] * 6, issued="no CUDA graph holds its calls: it waits"),
    )
    ranking = rank(rows, None).set_index("provider")
    assert set(ranking["best_baseline"]) == {"torch_flash"}
    assert ranking.loc["a.b:c", "rank"] == 1
    assert ranking.loc["a.b:c", "ratio_to_best_baseline"] == pytest.approx(1.5)
    assert math.isnan(ranking.loc["d.e:f", "ratio_to_best_baseline"])
    assert ranking.loc["d.e:f", "detail"] == "no CUDA graph holds its calls: it waits"
    assert ranking["rank"].isna()["d.e:f"]
