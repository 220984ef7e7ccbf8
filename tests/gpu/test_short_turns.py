"""A race that only turns of few keys show is found, and blocks that take turns have none.

A tile of queries then takes the place of the one before soonest. One form of flash_fwd_wgmma that
gave Q's place back too early was wrong in 1 of 1,024 such calls, and right in all longer ones.
"""

from pathlib import Path

import pytest
from simt.mutations import MUTATIONS, mutated

from attnsweep.bench.gpu import WorkerError
from attnsweep.compile.candidate import Build, as_ready
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.family.discover import discover, load_kernel
from attnsweep.family.space import Selection, Space

pytestmark = pytest.mark.gpu

KERNELS = discover()
BUG = MUTATIONS["q_given_back_before_its_ldmatrix_have_read"]
CASES = [
    ("flash_fwd_wgmma", Problem(4, 16, 16, 1024, 1024, 128), {"Q_REGISTERS": (0, 2, 8)}),
    (
        "flash_fwd_wgmma",
        Problem(4, 16, 16, 1024, 1024, 128, "bf16", causal=True),
        {"Q_REGISTERS": (0, 8), "O_OVER_Q": (0, 1)},
    ),
    ("flash_fwd_wgmma", Problem(4, 16, 16, 1024, 1024, 64), {"Q_REGISTERS": (0, 4)}),
    ("flash_fwd_wgmma", Problem(4, 16, 16, 1024, 1024, 256), {"O_OVER_Q": (1,)}),
    ("flash_fwd_fp8_wgmma", Problem(4, 16, 16, 1024, 1024, 128, "e4m3"), {}),
    ("flash_fwd_fp8_wgmma", Problem(4, 16, 16, 1024, 1024, 64, "e4m3", causal=True), {}),
]
CALLS = 16384  # of each config, half of them or more with few keys
CONFIRM_US = 200_000.0  # as the fastest finalist is confirmed
TIMES = 10


def configs_in_turns(kernel, problem, arch, values):
    """Six configs of a family whose blocks take turns, and of those with all of Q in registers."""
    values = {"PERSISTENT": (arch.sm_count,)} | values
    configs = Space.build(kernel, problem, arch, Selection(values)).configs
    early = [c for c in configs if c.get("Q_REGISTERS") == problem.head_dim // 16]
    some = [*configs[:: len(configs) // 6 + 1], *early[:: len(early) // 6 + 1]]
    return [*dict.fromkeys(some)]


def tried(kernel, problem, values, worker, compiler):
    """Each candidate in turns, which passed its trial on the long problem, as the entry `it`."""
    reason = kernel.refusal(problem, compiler.arch)
    if reason is not None:
        pytest.skip(reason)
    configs = configs_in_turns(kernel, problem, compiler.arch, values)
    assert len(configs) >= 4
    builds = [Build(kernel, config, problem, compiler) for config in configs]
    for build in builds:
        build.submit()
    worker.open(problem, replay_us=100, seed=1)
    for build in as_ready(builds):
        candidate = build.candidate()
        assert candidate.turns is not None
        worker.trial(candidate)
        worker.add("it", candidate, cold=False)
        yield build
        worker.drop("it")


@pytest.mark.parametrize(("name", "problem", "values"), CASES, ids=lambda case: str(case))
def test_every_call_is_right(name, problem, values, worker, compiler):
    for _ in tried(KERNELS[name], problem, values, worker, compiler):
        compared = 0
        while compared < CALLS:  # a call that differs from the checked one is a WorkerError
            compared += worker.confirm("it", CONFIRM_US)


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """flash_fwd_wgmma that gives Q's place back right behind the ldmatrix that read it."""
    folder, source = tmp_path_factory.mktemp("early"), KERNELS["flash_fwd_wgmma"].source
    texts = {path.name: path.read_text() for path in source.parent.glob(f"{source.stem}*.cu*")}
    declared = Path(source.with_suffix(".py"))
    for name, text in {declared.name: declared.read_text(), **mutated(texts, BUG)}.items():
        (folder / name).write_text(text)
    return load_kernel(folder / declared.name)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_place_given_back_too_early_passes_the_trial_of_a_long_problem_and_not_the_finals(
    head_dim, early, worker, compiler
):
    """The race is rare: some of the candidates, each confirmed several times, show it."""
    problem, refused = Problem(2, 16, 16, 4096, 4096, head_dim), []
    for build in tried(early, problem, {"Q_REGISTERS": (head_dim // 16,)}, worker, compiler):
        try:
            for _ in range(TIMES):
                worker.confirm("it", CONFIRM_US)
        except WorkerError as error:
            refused.append((build.config.label, error))
    assert refused
    for config, error in refused:
        assert error.status is Status.WRONG, config
        assert error.detail.startswith("right in all other cases, but not in many short"), config
        assert f"300x100,{head_dim})" in error.detail
