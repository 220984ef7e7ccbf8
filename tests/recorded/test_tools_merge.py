"""Parts of a spec, and the whole run that they make."""

import json
import lzma
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import PROBLEM, TEST_GPU, candidate, once
from sweeping import FAMILIES
from typer.testing import CliRunner

from attnsweep.cli import app
from attnsweep.core.errors import SpecError, StoreError
from attnsweep.core.files import read_code, shipped
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.space import Space
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import PlannedProblem, Shard
from attnsweep.store.run import open_run, pack
from attnsweep.store.store import Store
from attnsweep.sweep import session
from attnsweep.tools.merge import merge

OTHER = Problem.parse("1,2,128,64 fp16 full")
SPEC = f"""
kernel_dir: {FAMILIES}
name: mine
problems:
  - {{batch: 1, heads: 2, seqlen: 128, head_dim: 64}}
  - {{batch: %d, heads: %d, seqlen: %d, head_dim: %d}}
kernels: {{simple: {{THREADS: [32, 64]}}}}
baselines: []
"""
ONCE = once(10.0)


def planned_of(flops: list[int]) -> tuple[PlannedProblem, ...]:
    """Problems of these sizes, each with a space of one config of `simple`."""
    kernel = discover(FAMILIES)["simple"]
    found = []
    for heads in flops:
        problem = Problem(1, heads, heads, 64, 64, 64)
        space = Space.build(kernel, problem, ARCHS["sm_90a"])
        found.append(PlannedProblem(problem, (space,), {}))
    return tuple(found)


def written(directory: Path, *problems: Problem, spec: str | None = None, **facts: object):
    """A run of these problems."""
    p = PROBLEM
    text = spec or SPEC % (p.batch, p.heads, p.seqlen_q, p.head_dim)
    with Store.open(directory) as store:
        store.describe(text, TEST_GPU.model_copy(update=facts))
        for number, problem in enumerate(problems, 1):
            store.append(candidate("simple", 10.0 * number, THREADS=32).with_(problem=problem))
        store.keep(f"{directory.name}.cubin.xz", lzma.compress(directory.name.encode()))
        return store.finish()


# -- parts ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9, unique=True), st.integers(1, 6))
def test_every_problem_is_in_exactly_one_part(heads, of):
    planned = planned_of(heads)
    parts = [Shard(number, of).take(planned) for number in range(1, min(of, len(planned)) + 1)]
    together = [item for part in parts for item in part]
    assert sorted(map(planned.index, together)) == sorted(map(planned.index, planned))
    for part in parts:
        assert [planned.index(item) for item in part] == sorted(map(planned.index, part))
        assert part  # no part is empty while there are problems left


@pytest.mark.parametrize("text", ["3/2", "0/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(SpecError, match="not a part"):
        Shard.parse(text)
    assert Shard.parse(" 2 / 4 ") == Shard(2, 4)


# -- merging --------------------------------------------------------------------------------------


def test_parts_make_the_whole_run(tmp_path):
    notes: list[str] = []
    two = [written(tmp_path / "b", PROBLEM), written(tmp_path / "a", OTHER)]
    pack(tmp_path / "a")
    whole = merge([two[0], open_run(tmp_path / "a")], tmp_path / "whole", notes.append)
    assert notes == []
    assert [trial.problem for trial in whole.trials] == [OTHER, PROBLEM]  # as in the spec
    for name in "ab":
        assert read_code(tmp_path / f"whole/cubins/{name}.cubin.xz") == name.encode()
    assert (tmp_path / "whole/ranking.md").is_file()
    assert open_run(tmp_path / "whole").environment == TEST_GPU


def test_cards_may_differ_and_then_the_run_names_none(tmp_path):
    two = [written(tmp_path / "a", OTHER, uuid="x"), written(tmp_path / "b", PROBLEM, uuid="y")]
    assert merge(two, tmp_path / "whole", print).environment.uuid is None


def test_what_is_missing_is_told(tmp_path):
    notes: list[str] = []
    merge([written(tmp_path / "a", OTHER)], tmp_path / "whole", notes.append)
    assert notes == [f"not measured in any of them: {PROBLEM.label}"]


def test_what_was_interrupted_is_told(tmp_path):
    """Its best candidate has one time only, and another might have come."""
    run = written(tmp_path / "a", OTHER, PROBLEM)
    rows = [t if t.problem == OTHER else t.with_(time_us=ONCE) for t in run.trials]
    notes: list[str] = []
    merge([replace(run, trials=rows)], tmp_path / "whole", notes.append)
    [note] = notes
    assert note.startswith(f"begun and not finished in {tmp_path / 'a'}: {PROBLEM.label}; ")


def test_where_the_whole_run_cannot_be_the_option_that_helps_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError) as caught:
        merge([written(tmp_path / "a", OTHER, PROBLEM)], tmp_path / "file", print)
    assert caught.value.hint == "the name is taken: move that file away, or use --out"


@pytest.mark.parametrize("lost", ["environment.json", "spec.yaml"])
def test_a_part_that_was_not_copied_whole_says_what_to_do(lost, tmp_path):
    written(tmp_path / "a", OTHER, PROBLEM)
    (tmp_path / "a" / lost).unlink()
    with pytest.raises(StoreError) as caught:
        merge([open_run(tmp_path / "a")], tmp_path / "whole", print)
    assert "whole, or sweep it again" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "NVIDIA X"}, "another gpu: NVIDIA X"),
        ({"driver": "1.2"}, "another driver: 1.2"),
        ({"sm_count": 66}, "another sm_count: 66"),
        ({"protocol": 1}, "another protocol: 1"),
        ({"packages": {"torch": "9.9"}}, "another"),
        ({"spec": "name: x\nproblems: [{batch: 1, heads: 1, seqlen: 64, head_dim: 64}]\n"
                  "kernels: {naive: {}}\n"}, "its spec is another"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused(changes, said, tmp_path):
    two = [written(tmp_path / "a", OTHER), written(tmp_path / "b", PROBLEM, **changes)]
    with pytest.raises(StoreError) as caught:
        merge(two, tmp_path / "whole", print)
    assert said in caught.value.render()
    assert str(tmp_path / "b") in caught.value.render()
    assert not (tmp_path / "whole").exists()


def test_one_problem_of_two_cards_is_refused(tmp_path):
    two = [written(tmp_path / "a", OTHER, PROBLEM), written(tmp_path / "b", PROBLEM)]
    with pytest.raises(StoreError, match="is in two of the runs"):
        merge(two, tmp_path / "whole", print)


def test_one_problem_of_two_cards_in_one_run_is_refused(tmp_path):
    run = written(tmp_path / "a", OTHER)

    def on(*uuids):
        rows = [run.trials[0].with_(config={"THREADS": n}) for n in range(len(uuids))]
        pairs = zip(rows, uuids, strict=True)
        return [replace(run, trials=[t.with_(machine={"uuid": uuid}) for t, uuid in pairs])]

    with pytest.raises(StoreError, match=r"has rows of 2 cards \(x, y\)"):
        merge(on("x", "y", "x"), tmp_path / "mixed", print)
    assert not (tmp_path / "mixed").exists()
    assert len(merge(on("x", "x"), tmp_path / "whole", print).trials) == 2


def test_a_run_that_is_there_is_not_overwritten(tmp_path):
    one = written(tmp_path / "a", OTHER)
    with pytest.raises(StoreError, match="a run is there already"):
        merge([one], tmp_path / "a", print)


def test_files_of_others_are_no_place_for_a_run(tmp_path):
    """They stood beside a run then, as part of a directory that `accept` refuses."""
    part, out = written(tmp_path / "a", PROBLEM, OTHER), tmp_path / "precious"
    out.mkdir()
    for number in range(7):
        (out / f"thesis{number}.txt").write_text("years")
    with pytest.raises(StoreError, match=r"it holds other files: thesis0\.txt, .*, thesis4\.txt and 2 more"):
        merge([part], out, lambda _: None)
    assert len([*out.iterdir()]) == 7
    (tmp_path / "empty").mkdir()
    assert len(merge([part], tmp_path / "empty", lambda _: None).trials) == 2


def test_what_a_full_disk_ends_is_no_run_and_can_be_made_again(tmp_path):
    parts = [written(tmp_path / "1of2", PROBLEM), written(tmp_path / "2of2", OTHER)]
    whole = merge(parts, tmp_path / "first", print).directory / "trials.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.stat().st_size - 1, hard))
    try:
        with pytest.raises(StoreError, match="cannot store a row") as raised:
            merge(parts, tmp_path / "whole", print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.hint == "once this is fixed, run the same command again"
    with pytest.raises(StoreError, match="not a run directory"):
        open_run(tmp_path / "whole")
    assert len(merge(parts, tmp_path / "whole", print).trials) == 2


def test_a_replay_in_parts_is_the_replay(tmp_path):
    spec = load_spec(shipped("configs") / "quickstart.yaml", discover())
    for part in (None, Shard(1, 2), Shard(2, 2)):
        session.run(spec, results=tmp_path, shard=part)
    parts = [str(tmp_path / f"replay/quickstart-{n}of2") for n in (1, 2)]
    done = CliRunner().invoke(app, ["merge", *parts, "--out", str(tmp_path / "replay/whole"), "--json"])
    assert done.exit_code == 0, done.output
    whole, once = open_run(tmp_path / "replay/whole"), open_run(tmp_path / "replay/quickstart")
    assert {t.key: t for t in whole.trials} == {t.key: t for t in once.trials}
    assert (whole.spec_text, whole.spaces) == (once.spec_text, once.spaces)
    assert json.loads(done.stdout)["problems"]


def test_a_damaged_part_is_refused(tmp_path):
    written(tmp_path / "a", OTHER)
    with (tmp_path / "a/trials.jsonl").open("a") as file:
        file.write('{"kernel": "na\n{}\n')
    with pytest.raises(StoreError, match="rows of it are damaged"):
        merge([open_run(tmp_path / "a")], tmp_path / "whole", print)
    assert not (tmp_path / "whole").exists()
