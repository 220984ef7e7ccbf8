"""Who is skipped by bound: on recorded exhaustive runs nobody who could win, in whatever order."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnsweep.choose.lower_bound import SHARE, Skips, stage_codes
from attnsweep.choose.ranking import rank
from attnsweep.compile.candidate import Build
from attnsweep.core.hardware import ARCHS, arch_named, bounds
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Measurement, Status, Trial
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family, Launch, Param
from attnsweep.store.run import open_run

RECORDED = Path(__file__).parent.parent.parent / "results" / "h200"
RUNS = (
    *("three_kernel", "three_kernel_stages", "three_kernel_h200", "ladder"),
    *("flash_training", "flash_short", "batched"),
)
FINALISTS, ENTRY = 12, 1.25  # as most specs have


def timed_rows(run):
    """The rows that were timed, by problem and family, with their builds. Nothing is compiled."""
    kernels, card, spaces = discover(), run.environment, defaultdict(list)
    compiler = SimpleNamespace(
        arch=arch_named(card.arch), key=lambda source, defines: repr((source.name, sorted(defines.items())))
    )
    for trial in run.trials:
        if trial.provider == OURS and trial.status is Status.OK:
            kernel = kernels[trial.kernel]
            # A parameter newer than the run has its first value, which changes nothing.
            config = Config({p.name: p.values[0] for p in kernel.params} | trial.config)
            build = Build.of(kernel, config, trial.problem, compiler, workspace_limit=card.memory_bytes // 4)
            spaces[trial.problem, trial.kernel].append((build, trial))
    return list(spaces.values())


def skipped_of(rows):
    """The rows that a sweep that meets the candidates in this order leaves unrun."""
    skips, skipped = Skips(finalists=FINALISTS, entry=ENTRY), []
    for build, trial in rows:
        if skips.verdict(build) is None:
            skips.learn(build, trial)
        else:
            skipped.append(trial)
    return skipped


@lru_cache
def recorded(name):
    """Of each problem and family: the rows that were timed, with their builds; and who is best."""
    run = open_run(RECORDED / name)
    ranking = rank(run.trials, run.environment).dropna(subset="rank")
    first = ranking[ranking["winner"]].set_index("problem")["rank"]
    best = {
        trial.key
        for trial, place in zip(ranking["trial"], ranking["rank"], strict=True)
        if trial.provider == OURS and place == first[trial.problem.label]
    }
    return timed_rows(run), best


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("name", RUNS)
def test_nobody_of_the_best_is_ever_skipped(name):
    """Order does not matter: a stage is never taken to be slower than its slowest recorded time,
    the limit never to be less than where all are known, and fewer known stages skip fewer.
    """
    spaces, best = recorded(name)
    seen = 0
    for rows in spaces:
        slowest = defaultdict(float)
        for build, trial in rows:
            for stage, code in stage_codes(build).items():
                slowest[code] = max(slowest[code], trial.stages_us.get(stage, 0.0))
        skips = Skips(finalists=FINALISTS, entry=ENTRY)
        for build, trial in rows:
            codes = stage_codes(build)
            stages_us = {stage: slowest[code] for stage, code in codes.items() if slowest[code]}
            skips.learn(build, trial.with_(stages_us=stages_us))
        for build, trial in rows:
            if trial.key in best:
                seen += 1
                assert skips.verdict(build) is None, trial
    assert seen == len(best) > 0


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_who_is_skipped_would_not_have_raced(name, backwards):
    for rows in recorded(name)[0]:
        skipped = skipped_of(rows[::-1] if backwards else rows)
        best = min(trial.time_us.median for _, trial in rows)
        assert all(trial.time_us.median > ENTRY * best for trial in skipped)


def test_the_bound_is_worth_having_and_a_roofline_is_not():
    """The roofline: matrix FLOPs at peak on the busiest SM, if blocks are equal."""
    card = open_run(RECORDED / "three_kernel").environment
    for rows in recorded("three_kernel")[0]:
        assert len(skipped_of(rows)) > 0.15 * len(rows)
        limit_us = ENTRY * min(trial.time_us.median for _, trial in rows)
        for build, _ in rows:
            blocks = max(math.prod(launch.grid) for launch in build.launches.values())
            waves = math.ceil(blocks / card.sm_count)
            matrix_us = bounds(build.problem, build.arch, card)["matrix"]
            assert matrix_us * card.sm_count * waves / blocks <= limit_us


@pytest.mark.nightly(push=0)
def test_the_page_says_what_pipelines_took_of_their_stages():
    rows = [row for name in RUNS for rows in recorded(name)[0] for row in rows]
    shares = [
        trial.time_us.median / sum(trial.stages_us.values())
        for build, trial in rows
        if len(trial.stages_us) > 1 and build.schedule.streams == 1
    ]
    less = [share for share in shares if share < SHARE]
    page = " ".join((RECORDED.parent.parent / "docs" / "measuring.md").read_text().split())
    assert len(less) == 2
    assert f"of {len(shares):,} recorded pipelines two took less: {min(less):.2f}" in page


# -- a family made for it -------------------------------------------------------------------

PROBLEM = Problem(1, 2, 2, 64, 64, 64)


def build_of(kernel, config, problem):
    compiler = SimpleNamespace(arch=ARCHS["sm_90a"], key=lambda path, d: str(sorted(d.items())))
    return Build.of(kernel, config, problem, compiler)


@pytest.fixture
def family():
    kernel = Family("toy", summary="", params=(Param("A", tuple(range(9)), ""), Param("B", (0, 1, 2), "")))
    kernel.source = Path("toy.cu")
    for stage in "AB":
        kernel.stage(stage, params=(stage,))(lambda *_: Launch("f", (1, 1, 1), 32, ()))
    return kernel


def row(build, stages_us):
    total = sum(stages_us.values())
    return Trial(
        kernel="toy",
        provider=OURS,
        config=dict(build.config),
        problem=build.problem,
        status=Status.OK,
        time_us=Measurement(median=total, low=total, high=total, samples=1),
        stages_us=stages_us,
    )


def taught(family, *times, finalists=2, entry=1.25):
    """Skips that learned of configs (A, B) with their stages' times."""
    skips = Skips(finalists=finalists, entry=entry)
    for a, b, of_a, of_b in times:
        build = build_of(family, Config({"A": a, "B": b}), PROBLEM)
        skips.learn(build, row(build, {"A": of_a, "B": of_b}))
        skips.learn(build, row(build, {"A": of_a, "B": of_b}))  # as a resumed sweep does
    return skips


KNOWN = ((0, 0, 10.0, 10.0), (1, 0, 11.0, 10.0), (2, 0, 30.0, 10.0), (0, 1, 10.0, 30.0))


def test_a_pipeline_of_slow_stages_is_skipped_with_its_reason(family):
    skip = taught(family, *KNOWN).verdict(build_of(family, Config({"A": 2, "B": 1}), PROBLEM))
    assert skip["at_least_us"] == pytest.approx(SHARE * 60)
    assert skip["detail"] == (
        "stages too slow in other configs: at least 48.0 us (A 30.0, B 30.0); the best of toy takes 20.0"
    )


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"A": 1, "B": 1}, {"entry": 2.0}),  # near enough to race
        ({"A": 2, "B": 2}, {}),  # B=2 was never timed
        ({"A": 2, "B": 1}, {"finalists": 5}),  # all are finalists
    ],
)
def test_others_are_run(family, config, changes):
    skips = taught(family, *KNOWN, **changes)
    assert skips.verdict(build_of(family, Config(config), PROBLEM)) is None


def test_nothing_is_told_of_another_problem(family):
    other = replace(PROBLEM, seqlen_k=128)
    skips = taught(family, *KNOWN)
    assert skips.verdict(build_of(family, Config({"A": 2, "B": 1}), other)) is None


def test_stages_on_several_streams_may_run_beside_each_other(family):
    config = Config({"A": 2, "B": 1, "STREAMS": 2})
    skips = taught(family, *KNOWN)
    for a, b in ((2, 0), (0, 1)):
        build = build_of(family, Config({"A": a, "B": b, "STREAMS": 2}), PROBLEM)
        skips.learn(build, row(build, {"A": 1.0 + 29 * (a == 2), "B": 1.0 + 29 * (b == 1)}))
    assert skips.verdict(build_of(family, config, PROBLEM)) is None


def test_one_skipped_before_stays_so_while_the_best_drifts(family):
    slow = build_of(family, Config({"A": 2, "B": 1}), PROBLEM)
    drifted = taught(family, *((a, b, 2 * x, 2 * y) for a, b, x, y in KNOWN[:2]), *KNOWN[2:])
    assert drifted.verdict(slow) is None
    assert drifted.verdict(slow, skipped_before=True) is not None
