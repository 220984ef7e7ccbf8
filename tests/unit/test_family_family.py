"""Declarations: Config, rules, Space, stages, and the finding of families."""

import copy
import itertools
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.core.cases import TILE, served_cases, short_turns, small_cases
from attnsweep.core.errors import KernelError, SpaceError
from attnsweep.core.files import shipped
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover, load_kernel
from attnsweep.family.family import BLOCK_LIMITS, Config, Family, Launch, Param
from attnsweep.family.params import config_in
from attnsweep.family.space import Selection, Space

PROBLEM = Problem(1, 2, 2, 64, 64, 64)
H200 = ARCHS["sm_90a"]
values = st.dictionaries(
    st.text("ABC_", min_size=1, max_size=4), st.integers() | st.booleans() | st.sampled_from(["row", "column"])
)


def family(threads=128, smem_bytes=0, **params):
    """A family of one stage, whose launch is the same for every config."""
    declared = params or {"A": (1, 2), "B": (0, 1)}
    kernel = Family("toy", summary="", params=tuple(Param(name, of, "") for name, of in declared.items()))
    kernel.stage("fwd")(lambda *_: Launch("toy", (1, 1, 1), threads, (), smem_bytes))
    return kernel


class TestConfig:
    @given(values)
    def test_is_a_mapping_that_pickles_and_copies(self, mapping):
        config = Config(mapping)
        assert config == mapping
        assert list(config) == list(mapping)
        assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)

    @given(values)
    def test_equal_configs_have_equal_hashes(self, mapping):
        backwards = Config(dict(reversed(mapping.items())))
        assert Config(mapping) == backwards
        assert hash(Config(mapping)) == hash(backwards)

    def test_label_keeps_declaration_order_and_writes_bools_as_the_compiler_sees_them(self):
        config = Config({"B": True, "A": 64, "MODE": "row"})
        assert config.label == "B=1 A=64 MODE=row"


class TestSpace:
    @given(
        st.dictionaries(
            st.sampled_from(["A", "B", "C"]),
            st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True).map(tuple),
            min_size=1,
        ),
        st.lists(st.tuples(st.integers(2, 5), st.integers(0, 4)), max_size=3),
    )
    def test_what_is_kept_and_what_each_rule_removed_is_everything(self, params, moduli):
        kernel = family(**params)

        def breaks(config, rule):
            modulus, rest = rule
            return sum(config.values()) % modulus == rest

        for number, rule in enumerate(moduli):

            def keeps(config, problem, arch, rule=rule):
                return not breaks(config, rule)

            keeps.__name__ = f"rule{number}"
            kernel.rule("")(keeps)
        space = Space.build(kernel, PROBLEM, H200)
        combinations = [
            dict(zip(params, combination, strict=True)) for combination in itertools.product(*params.values())
        ]
        kept = [c for c in combinations if not any(breaks(c, rule) for rule in moduli)]
        assert list(space.configs) == kept
        assert space.total == len(combinations) == len(kept) + sum(space.removed.values())
        # A config that several rules refuse is counted for the first alone.
        for number, rule in enumerate(moduli):
            first = [
                c for c in combinations if breaks(c, rule) and not any(breaks(c, before) for before in moduli[:number])
            ]
            assert space.removed[f"rule{number}"] == len(first)

    def test_a_spec_replaces_values_one_parameter_at_a_time(self):
        space = Space.build(family(), PROBLEM, H200, Selection({"A": (7,)}))
        assert [config.label for config in space.configs] == ["A=7 B=0", "A=7 B=1"]

    @pytest.mark.parametrize(
        ("threads", "smem_bytes", "kept"),
        [(1024, 0, True), (1056, 0, False), (128, H200.smem_per_block, True), (128, H200.smem_per_block + 1, False)],
    )
    def test_every_family_obeys_the_block_limits(self, threads, smem_bytes, kept):
        space = Space.build(family(threads, smem_bytes), PROBLEM, H200)
        assert space.removed == {BLOCK_LIMITS: 0 if kept else 4}
        assert len(space.configs) == (4 if kept else 0)

    def test_a_launch_is_only_built_for_what_the_rules_keep(self):
        """So that a stage may divide by what a rule guarantees."""
        kernel = Family("toy", summary="", params=(Param("A", (0, 4), ""),))
        kernel.rule("")(lambda config, problem, arch: config.A > 0)
        kernel.stage("fwd")(lambda c, p, a: Launch("toy", (64 // c.A, 1, 1), 32, ()))
        assert [config.A for config in Space.build(kernel, PROBLEM, H200).configs] == [4]


@pytest.mark.parametrize(
    ("min_arch", "arch", "refusal"),
    [
        ("sm_80", "sm_80", None),
        ("sm_80", "sm_120a", None),
        ("sm_90a", "sm_90a", None),
        ("sm_90a", "sm_89", "needs sm_90a, not sm_89"),
        ("sm_90a", "sm_100a", "needs sm_90a, not sm_100a"),  # `a` code runs nowhere else
        ("sm_89", "sm_86", "needs sm_89, not sm_86"),
        ("sm_100a", "sm_90a", "needs sm_100a, not sm_90a"),
    ],
)
def test_a_family_is_refused_where_it_cannot_run(min_arch, arch, refusal):
    kernel = Family("toy", summary="", params=(), min_arch=min_arch)
    assert kernel.refusal(PROBLEM, ARCHS[arch]) == refusal


def test_a_family_is_refused_for_dtypes_and_head_dims_it_does_not_have():
    kernel = Family("toy", summary="", params=(), dtypes=("fp16",), head_dims=(64, 128))
    bf16, wide = Problem(1, 1, 1, 1, 1, 64, "bf16"), Problem(1, 1, 1, 1, 1, 80)
    assert kernel.refusal(PROBLEM, H200) is None
    assert kernel.refusal(bf16, H200) == "dtype bf16 is not one of fp16"
    assert kernel.refusal(wide, H200) == "head_dim 80 is not one of 64, 128; the nearest is 64"
    ranged = Family("toy", summary="", params=(), head_dims=range(64, 81, 8))
    assert ranged.refusal(wide, H200) is None
    assert ranged.some_head_dims == (64, 72, 80)
    some = Family("toy", summary="", params=(), head_dims=range(64, 81, 8), usual_head_dims=(72,))
    assert some.some_head_dims == (72,)
    for head_dim, nearest in ((76, 80), (1, 64), (69, 72), (10_000, 80)):  # a tie can be padded
        odd, own = Problem(1, 1, 1, 1, 1, head_dim), "64 to 80 in steps of 8"
        said = f"head_dim {head_dim} is not one of {own}; the nearest is {nearest}"
        assert ranged.refusal(odd, H200) == said


def test_a_stage_is_launched_when_its_config_needs_it():
    kernel = Family("toy", summary="", params=(Param("A", (1, 2), "one or two"),))
    kernel.stage("fwd")(lambda *_: Launch("f", (1, 1, 1), 32, ("q",)))
    kernel.stage("join")(lambda c, p, a: Launch("j", (1, 1, 1), 32, ("o",)) if c.A > 1 else None)
    problem, arch = Problem(1, 2, 2, 64, 64, 64), ARCHS["sm_90a"]
    assert [*kernel.launches(Config({"A": 1}), problem, arch)] == ["fwd"]
    assert [*kernel.launches(Config({"A": 2}), problem, arch)] == ["fwd", "join"]


def test_a_stage_sees_its_own_parameters_and_constants_only():
    kernel = family(A=(4,), B=(True,), MODE=("row",))

    @kernel.stage("qk", params=("B", "MODE"), constants=("CAUSAL", "IS_BF16"))
    def qk(config, problem, arch):
        return Launch("toy", (1, 1, 1), 32, (), defines={"KEYS": 96})

    problem = Problem(1, 1, 1, 8, 8, 64, "bf16")
    config = Config({"A": 4, "B": True, "MODE": "row"})
    launches = kernel.launches(config, problem, H200)
    assert list(launches) == ["fwd", "qk"]
    assert kernel.stages["qk"].defines(config, problem, launches["qk"]) == {
        "STAGE_QK": "1",
        "B": "1",
        "MODE_ROW": "1",
        "CAUSAL": "0",
        "IS_BF16": "1",
        "KEYS": "96",
    }


class TestDiscovery:
    GOOD = (
        "from attnsweep.family.family import Family, Launch, Param\n"
        "kernel = Family('mine', summary='', params=(Param('A', (1,), ''),))\n"
        "kernel.stage('fwd')(lambda c, p, a: Launch('mine', (1, 1, 1), 32, ()))\n"
    )

    def write(self, directory: Path, text: str, name: str = "mine") -> Path:
        (directory / f"{name}.cu").touch()
        path = directory / f"{name}.py"
        path.write_text(text)
        return path

    def test_shipped_families_and_a_user_s_own_are_found_by_name(self, tmp_path):
        self.write(tmp_path, self.GOOD)
        (tmp_path / "_helper.py").write_text("raise RuntimeError('not a family')")
        found = discover(tmp_path)
        ours = {path.stem for path in shipped("kernels").glob("*.cu")}
        assert set(found) == ours | {"mine"}
        assert list(found) == sorted(found)
        assert found["mine"].source == tmp_path / "mine.cu"

    @pytest.mark.parametrize(
        ("text", "where", "what"),
        [
            ("\n1 / 0\n", ":2", "ZeroDivisionError: division by zero"),
            ("\nx = (\n", ":2", "SyntaxError: '(' was never closed"),
        ],
        ids=["raises", "syntax"],
    )
    def test_a_broken_declaration_says_where_and_what(self, tmp_path, text, where, what):
        path = self.write(tmp_path, text)
        with pytest.raises(KernelError) as caught:
            load_kernel(path)
        assert str(caught.value).startswith(f"{path}{where}")
        assert what in str(caught.value)
        assert str(caught.value).count(path.name) == 1  # Python's own text has it too

    def test_a_name_is_taken_once(self, tmp_path):
        text = self.GOOD.replace("mine", "naive")
        self.write(tmp_path, text, "naive")
        with pytest.raises(KernelError, match="family 'naive' is") as caught:
            discover(tmp_path)
        assert caught.value.where == str(tmp_path / "naive.py")


@pytest.mark.parametrize("kernel", discover().values(), ids=str)
def test_a_shipped_family_says_what_everything_is(kernel):
    assert kernel.summary
    assert all(param.help and param.values for param in kernel.params)
    assert all(len(set(param.values)) == len(param.values) for param in kernel.params)
    assert all(description for description, _ in kernel.rules.values())


def test_a_space_too_large_to_enumerate_is_refused_at_once():
    params = tuple(Param(name, tuple(range(1, 101)), "") for name in "ABCD")
    kernel = Family("toy", summary="", params=params)
    kernel.stage("fwd")(lambda *_: Launch("f", (1, 1, 1), 32, ("q",)))
    with pytest.raises(SpaceError, match="100000000 combinations") as caught:
        Space.build(kernel, Problem(1, 1, 1, 1, 1, 64), ARCHS["sm_90a"])
    assert "name fewer" in caught.value.hint


# ---- a family that serves some problems only: its cases, and what a user reads of it ----
WHOLE = Problem(4, 32, 32, 4096, 4096, 128, causal=True)
RULES = {
    "no groups": lambda p: p.heads == p.heads_kv,
    "one length": lambda p: p.seqlen_q == p.seqlen_k,
    "whole tiles": lambda p: p.seqlen_q % TILE == 0 == p.seqlen_k % TILE,
    "its heads": lambda p: p.heads == 32,
    "its batch": lambda p: p.batch == 4,
    "all": lambda p: p.heads == p.heads_kv and p.seqlen_q == p.seqlen_k and p.seqlen_q % 128 == 0,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("causal", [True, False])
def test_each_small_case_has_one_that_is_served(name, causal):
    whole, serves = replace(WHOLE, causal=causal), RULES[name]
    cases = small_cases(whole)
    served = served_cases(cases, whole, serves)
    assert all(serves(case.problem) for case in served)
    assert {case.inputs for case in served} == {case.inputs for case in cases}
    kept = [case for case in cases if serves(case.problem)]
    assert set(kept) <= set(served)
    for case in served:
        assert case.problem.seqlen_k <= whole.seqlen_k
        assert (case.problem.head_dim, case.problem.causal) == (128, causal)
        assert not case.problem.has_empty_rows
        assert case.problem.bytes_of("q") < 2**26
    (turns,) = served_cases([short_turns(whole, 132)], whole, serves)
    assert serves(turns.problem)


def test_what_no_small_case_can_be_has_none():
    only = {WHOLE}.__contains__
    assert served_cases(small_cases(WHOLE), WHOLE, only) == ()


DECLARED = """
from attnsweep.family.family import Family, Launch, Param

kernel = Family(
    "mine",
    summary="for squares",
    params=(Param("A", (1, 2), ""),),
    supports=(("one length", lambda p: p.seqlen_q == p.seqlen_k),),
)


@kernel.stage("fwd")
def fwd(config, problem, arch):
    return Launch("mine", (1, 1, 1), 32, ("o",))
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.cu").write_text('extern "C" __global__ void mine(short* o) {}')
    (tmp_path / "mine.py").write_text(DECLARED)
    return tmp_path


def test_a_problem_that_is_not_served_is_refused_with_the_sentence(mine, attnsweep):
    shape = "{batch: 1, heads: 2, seqlen_q: 64, seqlen_k: 128, head_dim: 64}"
    (mine / "s.yaml").write_text(f"arch: sm_90a\nproblems:\n  - {shape}\nkernels:\n  mine: {{}}\n")
    asked = ("run", mine / "s.yaml", "--kernels", mine, "--dry-run")
    result = attnsweep(*asked)
    assert result.returncode == 2
    assert "mine: serves only one length" in result.stderr
    assert "one length" in attnsweep("list", "mine", "--kernels", mine).stdout


def test_a_rule_that_raises_names_itself_and_the_problem(mine, attnsweep):
    (mine / "mine.py").write_text(DECLARED.replace("p.seqlen_q ==", "p.length =="))
    shape = "{batch: 1, heads: 2, seqlen: 64, head_dim: 64}"
    (mine / "s.yaml").write_text(f"arch: sm_90a\nproblems:\n  - {shape}\nkernels:\n  mine: {{}}\n")
    result = attnsweep("run", mine / "s.yaml", "--kernels", mine, "--dry-run")
    assert result.returncode == 2
    assert "supports 'one length' of mine raised AttributeError" in result.stderr
    assert "(1,2,64,64) fp16 full" in result.stderr


def test_chunks_that_are_not_served_are_no_candidates(mine):
    from attnsweep.family.discover import load_kernel

    kernel, problem = load_kernel(mine / "mine.py"), Problem(1, 2, 2, 256, 256, 64)
    chosen = Selection({"CHUNK_ROWS": (0, 64), "CHUNK_HEADS": (0, 1)})
    configs = Space.build(kernel, problem, ARCHS["sm_90a"], chosen).configs
    assert {(c["CHUNK_ROWS"], c["CHUNK_HEADS"]) for c in configs} == {(0, 0), (0, 1)}
    assert all(isinstance(config, Config) for config in configs)


def test_an_order_that_no_kernel_has_is_refused_with_the_orders_there_are(mine, attnsweep):
    (mine / "mine.py").write_text(DECLARED.replace("supports", 'order="sbhd",\n    supports'))
    result = attnsweep("list", "--kernels", mine)
    assert result.returncode == 2
    assert "order is one of bhsd, bshd, not 'sbhd'" in result.stderr


def test_a_text_that_is_no_whole_number_is_a_value_as_it_stands():
    config = config_in("SPLITS=-4 MODE=--5 SIZE=² FLAG=true NONE=null")
    assert dict(config) == {"SPLITS": -4, "MODE": "--5", "SIZE": "²", "FLAG": True, "NONE": None}


def test_a_parameter_that_is_given_twice_is_refused_by_its_name(attnsweep):
    refused = "BLOCK_M is given twice: 64, then 128\n  drop one of the two"
    with pytest.raises(KernelError, match=re.escape(f"--config: {refused}")):
        config_in("BLOCK_M=64 BLOCK_N=64 BLOCK_M=128", "--config")
    for command in ("verify", "inspect"):
        done = attnsweep(command, "flash_fwd_mma", "BLOCK_M=64 BLOCK_M=128")
        assert (done.returncode, refused in done.stderr) == (2, True), done.stderr
