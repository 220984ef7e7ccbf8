import itertools
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import H200, baseline, candidate, once, timed

from attnsweep.choose.columns import COLUMNS, frontier
from attnsweep.choose.pace import at_pace
from attnsweep.choose.ranking import judged, rank, winners
from attnsweep.choose.stats import ratio_interval
from attnsweep.core.hardware import ARCHS, binding, bounds
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Measurement, Resources, Status, Trial

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
import counts

PROBLEM = Problem(2, 16, 16, 1024, 1024, 64)
NAN, INFINITY = float("nan"), float("inf")


def trial(name: str, time: Measurement | None, **changes: object) -> Trial:
    """A candidate of family `name[0]` with the config `name`; a baseline if it begins with b."""
    baseline = name.startswith("b")
    row = Trial(
        kernel=name if baseline else name[0],
        provider=name if baseline else "attnsweep",
        config={} if baseline else {"ID": int(name[1:])},
        problem=PROBLEM,
        status=Status.OK,
        time_us=time,
        accuracy=Accuracy(rel_err=2e-4, limit=5e-4),
        resources=None if baseline else Resources(registers=128, spill_bytes=0, smem_bytes=65536, occupancy=0.25),
    )
    return row.with_(**changes)


def noisy_rounds(median: float, seed: int, noise: float = 0.01, rounds: int = 30) -> list[float]:
    generator = random.Random(seed)
    return [median * (1 + generator.gauss(0, noise)) for _ in range(rounds)]


def places(*trials: Trial) -> dict[str, object]:
    """`kernel + ID` to rank, None where there is none."""
    frame = rank(trials, None)
    return {
        f"{row.kernel}{row.trial.config.get('ID', '')}": None if row.rank is None else row.rank
        for row in frame.astype(object).where(frame.notna(), None).itertuples()
    }


def smem(nbytes: int, registers: int = 128) -> Resources:
    return Resources(registers=registers, spill_bytes=0, smem_bytes=nbytes, occupancy=0.25)


def test_the_sign_interval_leaves_out_what_the_binomial_allows() -> None:
    one = [1.0] * 30
    ratios = [1 + i / 100 for i in range(30)]
    random.Random(0).shuffle(ratios)
    # P(Binomial(30, 1/2) <= 9) = 2.14 %, <= 10 is 4.94 %: nine are left out at each end.
    assert ratio_interval(ratios, one) == pytest.approx((1.09, 1.20))
    # P(Binomial(9, 1/2) <= 1) = 1.95 %; for six rounds only <= 0, for five not even that.
    assert ratio_interval(ratios_of(9), one[:9]) == (2.0, 8.0)
    assert ratio_interval(ratios_of(6), one[:6]) == (1.0, 6.0)
    assert ratio_interval(ratios_of(5), one[:5]) == (1.0, 5.0)
    assert ratio_interval([2.0], [1.0]) == (2.0, 2.0)
    assert ratio_interval(ratios_of(2000), [1.0] * 2000)[0] == pytest.approx(956, abs=2)


def ratios_of(count: int) -> list[float]:
    return [float(i) for i in range(1, count + 1)]


def test_the_sign_interval_covers_the_median_as_often_as_it_says() -> None:
    generator = random.Random(7)
    hits = 0
    for _ in range(2000):
        low, high = ratio_interval([generator.lognormvariate(0, 1) for _ in range(20)], [1.0] * 20)
        hits += low <= 1 <= high
    assert 0.95 <= hits / 2000 < 0.975


def test_rounds_are_paired_so_that_drift_cancels() -> None:
    drift = [10 * (1 + i / 30) for i in range(30)]  # the clock halves meanwhile
    slower = [1.01 * time for time in drift]
    assert places(trial("k1", timed(drift)), trial("k2", timed(slower))) == {"k1": 1, "k2": 2}
    # The same times unpaired overlap almost wholly, and must then be a tie.
    shuffled = random.Random(1).sample(slower, 30)
    assert places(trial("k1", timed(drift)), trial("k2", timed(shuffled))) == {"k1": 1, "k2": 1}


def test_a_single_sample_leads_what_is_slower_by_more_than_luck() -> None:
    slow = [trial("n1", timed(noisy_rounds(5556, 1))), trial("b", timed(noisy_rounds(13.8, 2)))]
    quick = [trial("f1", once(20.69)), trial("f2", once(20.9))]
    rows = [*slow, *quick, trial("k3", timed([7.0] * 30), status=Status.NOISY)]
    assert places(*rows) == {"b": 1, "f1": 2, "f2": 3, "n1": 4, "k3": None}
    assert [(t.kernel, t.config["ID"]) for t in winners(rank(rows, None))] == [("f", 1)]
    assert places(slow[0], *quick) == {"f1": 1, "f2": 2, "n1": 3}
    at_margin = [trial("k1", timed([11.0] * 8)), trial("k2", once(10.01)), trial("k3", once(30))]
    assert places(*at_margin) == {"k1": 1, "k2": 2, "k3": 3}
    assert places(at_margin[0], trial("k2", once(9.99))) == {"k2": 1, "k1": 2}


def test_a_tie_by_noise_does_not_precede_what_is_clearly_faster() -> None:
    wild = [8.0, 20.0] * 15
    rows = [trial("k1", timed([10.0] * 30)), trial("k2", timed([11.0] * 30)), trial("k3", timed(wild))]
    assert places(*rows) == {"k1": 1, "k2": 2, "k3": 3}
    assert places(rows[0], rows[2]) == {"k1": 1, "k3": 1}


def test_full_rounds_are_those_of_one_session() -> None:
    recorded = trial("b", timed([7.5] * 30), recorded=True, recorded_on="NVIDIA H200, 2026-01-01")
    assert places(recorded, trial("k1", timed([7.0] * 12)), trial("k2", once(6.9))) == {"k1": 1, "k2": 2, "b": 3}


def test_where_a_baseline_leads_the_first_candidates_still_tie() -> None:
    rows = [
        trial("b", timed(noisy_rounds(5, 1))),
        trial("k1", timed(noisy_rounds(7.1, 2)), resources=smem(90_000)),
        trial("k2", timed(noisy_rounds(7.1, 3)), resources=smem(50_000)),
        trial("k3", once(6.9)),
        trial("k4", timed(noisy_rounds(8, 4))),
    ]
    assert places(*rows) == {"b": 1, "k1": 2, "k2": 2, "k3": 4, "k4": 5}
    assert [row.config["ID"] for row in winners(rank(rows, None))] == [2]


def test_a_baseline_may_share_the_first_rank_but_never_wins() -> None:
    rows = [trial("k1", timed(noisy_rounds(7.1, 1))), trial("b", timed(noisy_rounds(7.1, 2)))]
    assert places(*rows) == {"k1": 1, "b": 1}
    assert [row.provider for row in winners(rank(rows, None))] == ["attnsweep"]
    assert winners(rank(rows[1:], None)) == []


def test_recorded_rounds_are_not_paired_with_measured_ones() -> None:
    rounds = noisy_rounds(7.1, 1)
    recorded = trial("k2", timed(rounds), recorded=True, recorded_on="NVIDIA H200, 2026-01-01")
    assert sorted(map(str, places(trial("k1", timed(rounds)), recorded).values())) == ["1", "2"]


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        (smem(60_000, 200), smem(70_000, 90), 1),
        (smem(70_000, 90), smem(60_000, 200), 2),
        (smem(60_000, 128), smem(60_000, 120), 2),
        (smem(60_000), smem(60_000), 1),
        (None, smem(200_000), 2),
    ],
)
def test_of_tied_candidates_the_cheapest_wins(first: Resources | None, second: Resources, winner: int) -> None:
    rows = [
        trial("k1", timed(noisy_rounds(7.1, 1)), resources=first),
        trial("k2", timed(noisy_rounds(7.1, 2)), resources=second),
    ]
    for order in itertools.permutations(rows):
        frame = rank(order, None)
        assert [row.config["ID"] for row in winners(frame)] == [winner]
        assert list(frame["winner"]) == [True, False]
        assert list(frame["rank"]) == [1, 1]


def test_times_do_not_choose_among_the_equally_good() -> None:
    """Within 0.4 % the thriftiest wins, though its rounds show it slower; beyond it never does."""
    best = noisy_rounds(7.1, 1, noise=0.002)
    for slower, winner in ((1.003, 2), (1.006, 1)):
        rows = [
            trial("k1", timed(best), resources=smem(90_000)),
            trial("k2", timed([slower * us for us in best]), resources=smem(50_000)),
        ]
        frame = rank(rows, None)
        assert [row.config["ID"] for row in winners(frame)] == [winner]
        assert list(frame["rank"]) == ([1, 1] if winner == 2 else [1, 2])


def test_few_rounds_do_not_make_a_much_slower_one_win() -> None:
    """One round that favours it leaves open whether it is as good; 0.8 % is no tie for a winner."""
    best = [10.0] * 7
    for slower, winner in ((1.003, 2), (1.008, 1), (1.09, 1)):
        rounds = [slower * us for us in best[:-1]] + [9.95]
        rows = [trial("k1", timed(best), resources=smem(90_000)), trial("k2", timed(rounds), resources=smem(50_000))]
        frame = rank(rows, None)
        assert list(frame["rank"]) == [1, 1]
        assert [row.config["ID"] for row in winners(frame)] == [winner]


def test_a_warm_time_is_no_match_for_cold_rounds() -> None:
    cold = timed([9.0] * 8).model_copy(update={"l2": "cold"})
    rows = [trial("k1", cold, warm_us=7.0, cold_us=9.0), trial("k2", once(6.0))]
    assert places(*rows) == {"k1": 1, "k2": 2}
    assert list(rank(rows, None)["warm_us"]) == [7.0, 6.0]
    assert list(rank(rows, None)["timed_as"]) == ["cold", "warm"]


def test_rates_are_of_the_device_where_eager_is_ranked() -> None:
    eager = timed([3.0] * 8).model_copy(update={"l2": "eager"})
    row = rank([trial("k1", eager, warm_us=10.0, eager_us=3.0)], None).iloc[0]
    assert row["tflops"] == pytest.approx(PROBLEM.flops / 10.0 / 1e6)
    assert row["time_us"] == 3.0


@pytest.mark.parametrize(("number", "held"), [(2**63 - 1, True), (2**63, False), (-(2**200), False)])
def test_a_number_of_a_damaged_row_that_no_column_holds_is_left_out(number: int, held: bool) -> None:
    (found,) = rank([trial("a1", once(3.0), resources=smem(number))], None)["smem_bytes"].astype(object)
    assert (found == number) if held else isinstance(found, type(pandas.NA))


@st.composite
def runs(draw: st.DrawFn) -> list[Trial]:
    """Candidates and baselines, close enough to tie, some timed once, some not ok."""
    rows = []
    for number in range(draw(st.integers(1, 12))):
        name = f"b{number}" if draw(st.integers(0, 4)) == 0 else f"{draw(st.sampled_from('kf'))}{number}"
        median = draw(st.sampled_from([6.0, 6.5, 7.0, 7.01, 7.05, 8.0, 5556.0]))
        noise = draw(st.sampled_from([0.01, 0.2]))
        count = draw(st.sampled_from([8, 30]))
        rounds = noisy_rounds(median, draw(st.integers(0, 5)), noise, count)
        row = trial(name, timed(rounds) if draw(st.integers(0, 3)) else once(median))
        if not row.provider.startswith("b"):
            row = row.with_(resources=smem(draw(st.sampled_from([1024, 2048])), 64))
        status = draw(st.sampled_from([Status.OK] * 4 + [Status.WRONG, Status.PRUNED]))
        rows.append(row.with_(status=status))
    return rows


@given(runs(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(rows: list[Trial], generator: random.Random) -> None:
    before = rank(rows, H200)
    shuffled = rows[:]
    generator.shuffle(shuffled)
    after = rank(shuffled, H200)
    columns = [name for name in COLUMNS if name != "trial"]
    assert before[columns].equals(after[columns])
    assert [row.key for row in winners(before)] == [row.key for row in winners(after)]


@given(runs())
def test_every_row_is_there_and_ranks_are_what_they_say(rows: list[Trial]) -> None:
    frame = rank(rows, None)
    ok = frame[frame["status"] == "ok"]
    ranks = list(ok["rank"])
    assert len(frame) == len(rows)
    assert frame["rank"].notna().sum() == len(ok) == sum(row.status == "ok" for row in rows)
    assert ranks == sorted(ranks)
    for place in set(ranks):
        assert ranks.index(place) + 1 == place
        assert set(ok["tied"][ok["rank"] == place]) == {ranks.count(place) > 1}
    paced = at_pace(list(ok["trial"]))
    timed_ranks = zip(ranks, [paced[id(trial)] for trial in ok["trial"]], strict=True)
    for (first, time_us), (second, later_us) in itertools.combinations(timed_ranks, 2):
        assert first == second or time_us <= 1.1 * later_us * (1 + 1e-9)
    ours = ok[~ok["baseline"]]
    assert frame["winner"].sum() == (1 if len(ours) else 0)
    if len(ours):
        assert frame.loc[frame["winner"], "rank"].item() == ours["rank"].min()


# -- what is ok -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"accuracy": Accuracy(rel_err=NAN, limit=1.0)}, Status.WRONG),
        ({"accuracy": Accuracy(rel_err=None, limit=1.0)}, Status.WRONG),
        ({"accuracy": Accuracy(rel_err=1e-4, limit=NAN)}, Status.WRONG),
        ({"accuracy": Accuracy(rel_err=2e-3, limit=1e-3)}, Status.WRONG),
        ({"time_us": None}, Status.DAMAGED),
        ({"time_us": once(NAN)}, Status.DAMAGED),
        ({"time_us": once(INFINITY)}, Status.DAMAGED),
        ({"time_us": once(0.0)}, Status.DAMAGED),
        ({"time_us": once(-1.0)}, Status.DAMAGED),
        ({"time_us": timed([5.0, 5.0, 5.0]).model_copy(update={"low": NAN})}, Status.DAMAGED),
        ({"time_us": Measurement(median=5, low=5, high=5, samples=2, rounds=[5, NAN])}, Status.DAMAGED),
        ({"time_us": Measurement(median=5, low=5, high=5, samples=2, rounds=[5, 0])}, Status.DAMAGED),
        ({"cold_us": NAN}, Status.DAMAGED),
        ({"eager_us": NAN}, Status.DAMAGED),
        ({"stages_us": {"qk": NAN}}, Status.DAMAGED),
        ({"stages_us": {"qk": -1.0}}, Status.DAMAGED),
        ({"cold_us": 0.0}, Status.DAMAGED),
        ({"warm_us": INFINITY}, Status.DAMAGED),
        ({"first_us": NAN}, Status.DAMAGED),
    ],
)
def test_a_row_with_a_nan_never_ranks(changes: dict[str, object], status: Status) -> None:
    bad = trial("k1", timed([5.0] * 8), **changes)
    good = trial("k2", timed([7.0] * 8))
    assert judged(good)[0] is Status.OK
    assert judged(bad)[0] is status
    assert judged(bad)[1]
    assert places(bad, good) == {"k2": 1, "k1": None}
    assert [row.config["ID"] for row in winners(rank([bad, good], None))] == [2]


def test_a_later_row_of_the_same_candidate_counts() -> None:
    assert places(trial("k1", once(5.0)), trial("k1", once(9.0)), trial("k2", once(7.0))) == {"k2": 1, "k1": 2}


# -- figures --------------------------------------------------------------------------------


def test_figures_follow_from_the_time() -> None:
    rounds = [9.0, 9.5, 10.0, 10.5, 11.0]
    baseline, slow = trial("b1", timed([20.0] * 5)), trial("b2", timed([30.0] * 5))
    row = rank([trial("k1", timed(rounds)), baseline, slow], H200).iloc[0]
    assert row["time_us"] == 10
    assert row["spread_us"] == 0.5
    assert row["us_per_head"] == 10 / 32
    assert row["us_per_sequence"] == 5
    assert row["tflops"] == pytest.approx(4 * 2 * 16 * 1024 * 1024 * 64 / 10e-6 / 1e12)
    assert row["gbytes_per_s"] == pytest.approx(4 * 2 * 16 * 1024 * 64 * 2 / 10e-6 / 1e9)
    assert row["ratio_to_best_baseline"] == 2
    assert row["bound_us"] == pytest.approx(4 * 2 * 16 * 1024**2 * 64 / (4096 * 132 * 1.98e9) * 1e6)
    assert row["light"] == pytest.approx(row["bound_us"] / 10)
    assert (row["light_by"], row["light_mhz"]) == ("matrix", 1980)
    assert row["recorded"] is False or not row["recorded"]


def test_one_sample_has_no_spread_and_no_baseline_no_ratio() -> None:
    row = rank([trial("k1", once(7.0))], None).iloc[0]
    assert math.isnan(row["spread_us"])
    assert math.isnan(row["ratio_to_best_baseline"])
    assert math.isnan(row["light"])


def test_a_baseline_that_is_not_ok_is_not_the_best() -> None:
    wrong = trial("b1", timed([3.0] * 8), status=Status.WRONG)
    frame = rank([trial("k1", timed([7.0] * 8)), wrong, trial("b2", timed([14.0] * 8))], None)
    assert frame["ratio_to_best_baseline"].iloc[0] == 2


def test_problems_are_ranked_apart_in_order_of_appearance() -> None:
    other = Problem(1, 8, 8, 512, 512, 64, "bf16", causal=True)
    rows = [trial("k1", once(7.0)), trial("k1", once(3.0), problem=other), trial("k2", once(6.0))]
    frame = rank(rows, None)
    assert list(frame["problem"]) == [PROBLEM.label, PROBLEM.label, other.label]
    assert list(frame["rank"]) == [1, 2, 1]
    assert frame["winner"].sum() == 2


def test_no_rows_make_an_empty_frame_with_every_column() -> None:
    frame = rank([], None)
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == 0


# -- bounds ---------------------------------------------------------------------------------


def test_fp32_is_three_16_bit_products_for_one_or_multiply_adds_where_they_are_faster() -> None:
    single = Problem(1, 4, 4, 64, 64, 8192, "fp32")
    columns = counts.wide_bounds(single, H200, 1.0)
    assert columns["FFMA"] == pytest.approx(8.02, abs=0.01)
    assert columns["3×TF32"] == pytest.approx(3.01, abs=0.01)
    limits = bounds(single, ARCHS["sm_90a"], H200)
    assert limits["matrix"] == pytest.approx(columns["3×TF32"] / 2)  # 16-bit parts at twice the rate
    assert binding(limits, single, l2_bytes=50 << 20) == ("matrix", limits["matrix"])
    slow = replace(ARCHS["sm_90a"], tensor_flops_per_clock=512)
    assert bounds(single, slow, H200)["matrix"] == pytest.approx(columns["FFMA"])
    # The kernel that multiplies least per product, as docs/claims.md counts it.
    assert limits["matrix"] < 5 / 6 * columns["3×TF32"]


def test_of_an_unknown_clock_only_memory_is_left() -> None:
    no_clock = H200.model_copy(update={"clock_hz": 0.0})
    assert set(bounds(PROBLEM, ARCHS["sm_90a"], no_clock)) == {"memory"}


def test_memory_binds_only_what_must_come_from_it() -> None:
    decode = Problem(1, 16, 16, 16, 1024, 64)  # 4.3 MB: far below the L2's 50
    limits = bounds(decode, ARCHS["sm_90a"], H200)
    assert limits["memory"] > limits["matrix"]
    warm = binding(limits, decode, l2_bytes=50 << 20)
    assert warm is not None
    assert warm[0] == "matrix"
    assert binding(limits, decode, l2_bytes=50 << 20, l2="cold") == ("memory", limits["memory"])
    assert binding(limits, decode, l2_bytes=1 << 20) == ("memory", limits["memory"])
    no_clock = {"memory": 2.0}
    assert binding(no_clock, decode, l2_bytes=50 << 20) is None
    assert binding(no_clock, decode, l2_bytes=1 << 20) == ("memory", 2.0)


def test_none_wins_where_all_that_were_timed_in_rounds_were_noisy() -> None:
    noisy = [trial(f"k{n}", timed(noisy_rounds(7.0, n)), status=Status.NOISY) for n in (1, 2)]
    searched = trial("k3", once(8.0))
    assert [t.config["ID"] for t in winners(rank([searched], None))] == [3]
    assert winners(rank([*noisy, searched], None)) == []
    assert places(*noisy, searched) == {"k3": 1, "k1": None, "k2": None}
    quiet = trial("k4", timed(noisy_rounds(7.5, 4)))
    assert [t.config["ID"] for t in winners(rank([*noisy, searched, quiet], None))] == [4]


# ---- time against error: the candidates that none surpasses in both ----
def row(us: float, error: float | None, number: int = 0, **changes: object) -> Trial:
    accuracy = Accuracy(rel_err=0.02, limit=0.1, timed_err=error)
    return candidate("flash", us, ID=number).with_(accuracy=accuracy, **changes)


points = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=15)


@given(points)
def test_no_candidate_surpasses_one_of_the_frontier(pairs):
    rows = [row(float(us), float(error), n) for n, (us, error) in enumerate(pairs)]
    best = frontier(rows)
    errors = [trial.accuracy.error for trial in best]
    times = [trial.time_us.median for trial in best]
    assert times == sorted(times)
    assert errors == sorted(errors, reverse=True)
    for trial in rows:
        # Every candidate is there, or one at most as slow errs by no more than 2 % above it.
        assert trial in best or any(
            other.time_us.median <= trial.time_us.median and 0.98 * other.accuracy.error <= trial.accuracy.error
            for other in best
        )


def test_the_frontier_is_of_right_candidates():
    rows = [
        row(10.0, 0.06, 0),
        row(9.0, 0.001, 1, status=Status.WRONG),
        row(11.0, 0.02, 2),
        row(12.0, 0.0199, 3),  # as good
        candidate("flash", None, ID=4),
        baseline("torch_flash", 1.0),
    ]
    assert [trial.config["ID"] for trial in frontier(rows)] == [0, 2]


@pytest.mark.parametrize(
    ("clock", "bounds_taken", "light", "status"),
    [(1.0, 2.5, 0.4, "ok"), (0.5, 2.5, 0.8, "ok"), (0.5, 2.0, 1.0, "ok"), (0.5, 1.75, 1.14, "bad")],
)
def test_the_speed_of_light_is_that_of_the_clock_in_the_rounds(clock, bounds_taken, light, status):
    """A time below it is a fault and no win: something did not compute."""
    bound = bounds(PROBLEM, ARCHS[H200.arch], H200)["matrix"]
    mhz = round(clock * H200.clock_hz / 1e6)
    time = timed([bounds_taken * bound] * 6)
    (found,) = rank([trial("a1", time, conditions={"sm_mhz": mhz})], H200).to_dict("records")
    assert found["light"] == pytest.approx(light, rel=5e-3)
    assert (found["light_by"], found["light_mhz"]) == ("matrix", mhz)
    assert found["status"] == ("ok" if status == "ok" else "damaged")
    if status != "ok":
        assert f"faster than light: 114 % of the speed of light (matrix, {mhz} MHz)" in found["detail"]
        assert found["winner"] is False


def test_a_plain_read_may_take_less_time_than_to_compute():
    """Of many queries on few keys, which is no fault: it computes nothing. Memory binds it."""
    p = Problem.parse("(64,32/1,64x4096,128) bf16 causal paged(16)")
    least = bounds(p, ARCHS[H200.arch], H200)
    assert least["matrix"] > 2 * least["memory"]

    def read(us):
        facts = {"provider": "plain_read", "conditions": {"sm_mhz": round(H200.clock_hz / 1e6)}}
        (found,) = rank([trial("a1", timed([us] * 6), **facts).with_(problem=p)], H200).to_dict("records")
        return found

    found = read(1.25 * least["memory"])
    assert (found["status"], found["light_by"], found["light"]) == ("ok", "memory", pytest.approx(0.8))
    assert read(0.5 * least["memory"])["status"] == "damaged"
