"""The queue: how far it asks ahead, and what it gives once a problem's time is up."""

import pytest
from fake_compiler import FakeCompiler

from attnsweep.core.hardware import arch_named
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan
from attnsweep.sweep.candidates import Candidates

SPEC = """
problems:
  - {batch: 1, heads: 2, seqlen: 256, head_dim: 64}
kernels: {naive: {THREADS: [32, 64, 96, 128, 160]}}
baselines: []
"""


@pytest.fixture
def queue_of(tmp_path, clock):
    def made(search="{}"):
        (tmp_path / "test.yaml").write_text(f"{SPEC}search: {search}\n")
        kernels, arch = discover(), arch_named("sm_90a")
        spec = load_spec(tmp_path / "test.yaml", kernels)
        (item,) = plan(spec, arch)
        return Candidates(item, spec, FakeCompiler(arch, tmp_path), None)

    return made


def threads(builds):
    return [build.config["THREADS"] for build in builds]


def ignore(done, total):
    pass


@pytest.mark.parametrize("search", ["{}", "{budget_s: 5}"])
def test_it_asks_so_far_ahead_and_no_further(queue_of, lookahead, search):
    lookahead(2)
    queue = queue_of(search)
    batches = [threads(queue.ask()) for _ in range(4)]
    assert batches == [[32, 64], [96, 128], [160], []]
    assert queue.builds == []


def test_after_the_deadline_it_gives_the_measured_ones_and_asks_for_no_more(queue_of, clock):
    queue = queue_of("{budget_s: 5}")
    queue.start()
    builds = queue.ask()
    given = []
    for build in queue.compiled({id(builds[0]), id(builds[3])}, ignore):
        given.append(build.config["THREADS"])
        clock.now_s += 3.0
    assert given == [32, 64, 128]
    assert queue.ask() == []


def test_compiling_past_the_deadline_leaves_one_candidate_to_the_problem(queue_of, clock):
    queue = queue_of("{budget_s: 5}")
    queue.start()
    queue.ask()
    clock.now_s = 6.0
    assert threads(queue.compiled((), ignore)) == [32]


def test_compiling_a_later_batch_past_the_deadline_leaves_none(queue_of, clock, lookahead):
    lookahead(2)
    queue = queue_of("{budget_s: 5}")
    queue.start()
    queue.ask()
    assert threads(queue.compiled((), ignore)) == [32, 64]
    queue.ask()
    clock.now_s = 6.0
    assert threads(queue.compiled((), ignore)) == []


def test_time_starts_anew_with_each_problem(queue_of, clock):
    first, second = queue_of("{budget_s: 5}"), queue_of("{budget_s: 5}")
    first.start()
    clock.now_s = 6.0
    assert first.ask() == []
    second.start()
    assert len(second.ask()) == 5


def test_progress_comes_at_the_start_now_and_then_and_at_the_end(queue_of, clock):
    queue = queue_of()
    queue.ask()
    queue.submit()
    seen = []
    for _ in queue.compiled((), lambda done, total: seen.append((clock.now_s, done, total))):
        clock.now_s += 0.06
    assert [(round(now, 2), done, total) for now, done, total in seen] == [
        (0.0, 5, 5),
        (0.12, 5, 5),
        (0.24, 5, 5),
        (0.3, 5, 5),
    ]


def test_progress_counts_the_candidates_of_all_batches(queue_of, lookahead):
    lookahead(2)
    queue, seen = queue_of(), []
    while queue.ask():
        queue.submit()
        list(queue.compiled((), lambda done, total: seen.append((done, total))))
    assert seen == [(2, 2), (2, 2), (4, 4), (4, 4), (5, 5), (5, 5)]


def test_a_queue_that_is_left_some_configs_asks_for_them_alone_also_when_time_is_up(queue_of, clock):
    queue = queue_of("{budget_s: 5}")
    queue.start()
    queue.ask()
    clock.now_s = 6.0
    queue.only([("naive", Config({"THREADS": n})) for n in (96, 64)])
    assert threads(queue.builds) == [96, 64]
    queue.submit()
    assert threads(queue.compiled((), ignore)) == [96, 64]
    assert queue.ask() == []
    queue.only([])
    assert queue.builds == []
