"""`--set` and `--problem` on top of a spec, and what answers to a wrong one."""

from pathlib import Path

import pytest

from attnsweep.core.errors import KernelError, SpecError
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec, with_problems
from attnsweep.specs.yaml_file import tag

FAMILIES = discover()
SPEC = """
name: base
problems:
  - {batch: 1, heads: 2, seqlen: 256, head_dim: 64, kernels: naive, slower: 0.05}
  - {batch: 1, heads: 2, seqlen: 512, head_dim: 64}
kernels:
  naive:
  flash_fwd_mma:
    BLOCK_M: [64, 128]
    variants:
      stages of copies:
        "1": {NUM_STAGES: 1}
        two: {NUM_STAGES: 2, SWIZZLE: 1}
measure: {replay_us: 500}
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(SPEC)
    return lambda *settings: load_spec(path, FAMILIES, settings)


def test_values_anywhere_in_a_spec(load):
    spec = load(
        "kernels.flash_fwd_mma.BLOCK_M=[128]",
        "kernels.flash_fwd_mma.NUM_WARPS = 4",
        "kernels.naive.THREADS=64",
        "kernels.flash_fwd_mma.variants.stages of copies.1.NUM_STAGES=2",
        'kernels.flash_fwd_mma.variants."stages of copies".two.SWIZZLE=0',
        "problems[1].causal=true",
        "problems.1.dtype=bf16",
        "measure.rounds=7",
        "search.seed=3",
        "limits.spill_bytes=0",
        "baselines=[]",
    )
    mma = spec.kernels["flash_fwd_mma"]
    assert mma.values == {"BLOCK_M": (128,), "NUM_WARPS": (4,)}
    assert mma.variants["stages of copies"] == {"1": {"NUM_STAGES": (2,)}, "two": {"NUM_STAGES": (2,), "SWIZZLE": (0,)}}
    assert spec.kernels["naive"].values == {"THREADS": (64,)}
    assert spec.problems[1].problem == Problem(1, 2, 2, 512, 512, 64, "bf16", causal=True)
    assert (spec.measure.rounds, spec.measure.replay_us) == (7, 500)
    assert (spec.search.seed, spec.limits.spill_bytes, spec.baselines) == (3, 0, ())


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("rounds", "is not PATH=VALUE\n  write the spec's keys and a value"),
        ("measure.rounds=", "is empty\n  write a value"),
        ("measure.rounds=[1", "not valid YAML"),
        ("measure.round=3", "unknown key 'round'\n  did you mean 'rounds'?"),
        ("kernels.naiv.THREADS=64", "kernels has no 'naiv'\n  did you mean 'naive'?"),
        ("problems[2].causal=true", "problems has no place 2\n  it has problems[0] to problems[1]"),
        ("problems.causal=true", "problems is a list\n  write problems[0].causal"),
        (
            "kernels.flash_fwd_mma.NUM_STAGES=2",
            "the variants of 'stages of copies' set NUM_STAGES, so that this would do nothing\n"
            "  set it in one: kernels.flash_fwd_mma.variants.stages of copies.1.NUM_STAGES=…",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_fits(load, setting, answer):
    with pytest.raises(SpecError) as caught:
        load("search.seed=3", setting)
    assert str(caught.value).startswith(f"--set {setting}: {answer}")


def test_two_settings_of_one_value_are_refused(load):
    with pytest.raises(SpecError, match="sets what --set"):
        load("measure.rounds=3", "measure.rounds=4")


def test_errors_of_the_file_keep_their_place(load):
    path = load().document.path
    path.write_text(SPEC.replace("seqlen: 512", "seqlen: x"))
    with pytest.raises(SpecError) as caught:
        load("measure.rounds=a")
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}:5:")
    assert second.startswith("--set measure.rounds=a: ")


def test_a_parameter_that_one_variant_sets_may_be_set_for_the_others(load):
    spec = load("kernels.flash_fwd_mma.SWIZZLE=0")
    groups = [values["SWIZZLE"] for _, values in spec.kernels["flash_fwd_mma"].groups()]
    assert groups == [(0,), (1,)]


def test_problems_are_replaced_and_a_known_one_keeps_its_entry(load):
    old, new = Problem(1, 2, 2, 256, 256, 64), Problem(4, 32, 8, 1024, 1024, 64, "bf16")
    spec = with_problems(load(), [new, old])
    assert [entry.problem for entry in spec.problems] == [new, old]
    assert [entry.kernels for entry in spec.problems] == [("naive", "flash_fwd_mma"), ("naive",)]
    assert [entry.slower for entry in spec.problems] == [None, 0.05]


def test_problems_and_a_setting_of_problems_exclude_each_other(load):
    with pytest.raises(SpecError, match=r"--set problems\[0\].causal=true: --problem replaces"):
        with_problems(load("problems[0].causal=true"), [Problem(1, 2, 2, 64, 64, 64)])


def test_the_tag_is_of_values_not_of_their_spelling():
    one = tag(["measure.rounds=7", "kernels.naive.THREADS=[32, 64]"], [])
    assert one == tag(["kernels.naive.THREADS=[32,64]", "measure.rounds= 7"], [])
    others = {tag(["measure.rounds=8"], []), tag([], ["a"]), tag([], ["b"]), tag([], ["a", "b"])}
    assert len(others | {one}) == 5


class TestKernelDirectory:
    def spec(self, tmp_path, line):
        path = tmp_path / "own.yaml"
        path.write_text(
            f"{line}\nproblems: [{{batch: 1, heads: 1, seqlen: 64, head_dim: 64}}]\nkernels: {{naive: {{}}}}\n"
        )
        return path

    def test_it_is_relative_to_the_spec(self, tmp_path):
        (tmp_path / "mine").mkdir()
        spec = load_spec(self.spec(tmp_path, "kernel_dir: mine"))
        assert spec.kernel_dir == tmp_path / "mine"
        (tmp_path / "results" / "run").mkdir(parents=True)
        kept = tmp_path / "results" / "run" / "spec.yaml"
        kept.write_text(spec.resolved(kept.parent))
        assert load_spec(kept) == spec

    def test_a_missing_one_is_named_with_its_place(self, tmp_path):
        path = self.spec(tmp_path, "kernel_dir: mine")
        load_spec(path)  # a stored run's spec is read where its kernels are not
        with pytest.raises(SpecError) as caught:
            load_spec(path, discover)
        assert str(caught.value).startswith(f"{path}:1:13: kernel_dir: no such directory: {tmp_path}/mine\n")
        mine = discover(Path(__file__).parent.parent / "families")
        assert "twice" in load_spec(path, mine).families

    def test_reading_a_spec_runs_no_code_of_it(self, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "bomb.py").write_text("raise RuntimeError('ran')\nkernel = 1\n")
        path = self.spec(tmp_path, "kernel_dir: mine")
        load_spec(path, FAMILIES)
        with pytest.raises(KernelError, match="ran"):
            load_spec(path, discover)
