"""Every way to get a sweep spec wrong, with the words that answer."""

import re

import pytest
from specs import MINIMAL, PROBLEM, toy, with_problem

from attnsweep.core.errors import SpaceError
from attnsweep.core.hardware import ARCHS
from attnsweep.family.discover import discover
from attnsweep.family.space import Selection
from attnsweep.specs.load import load_spec
from attnsweep.specs.model import KNOWN_BASELINES, ProblemSpec
from attnsweep.specs.plan import plan


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: [1, 2\nb: 3", "2:2: not valid YAML: expected ',' or ']', but got ':'\n"
             "  while parsing a flow sequence that begins in line 1"),
            ("a:\n\tb: c", "2:1: not valid YAML: found character '\\t' that cannot start any token\n"
             "  write spaces in place of the tab"),
            ("a: b\nc: d\x01", "2:5: not valid YAML: character U+0001 is not allowed"),
            (b"a: 1\nb: \xff", "2:4: not UTF-8: byte 0xff\n  save the file as UTF-8"),
            ("name: a\nname: b", "2:1: duplicate key 'name'\n  first in line 1: drop one"),
            ("? [a]\n: 1", "1:3: a key must be text, not a list or a mapping"),
            ("a: &x [1, *x]", "1:4: this alias contains itself\n  write the values out"),
            ("a: &x {<<: *x}", "1:4: this alias contains itself\n  write the values out"),
            ("name: !!python/name:os.system x",
             "1:7: a spec cannot use tag tag:yaml.org,2002:python/name:os.system\n  remove the tag"),
        ],
    )  # fmt: skip
    def test_not_yaml(self, error_of, text, message):
        assert error_of(text) == f"sweep.yaml:{message}"

    @pytest.mark.parametrize("text", ["", "\n# nothing yet\n", "---\n", "--- # no\n..."])
    def test_empty(self, error_of, text):
        assert error_of(text) == (
            "sweep.yaml: is empty\n  attnsweep list --specs: those that there are; attnsweep init: write one"
        )

    def test_a_spec_nested_without_end_is_refused_quickly(self, error_of):
        assert error_of("[" * 5000) == "sweep.yaml: nested too deeply"
        aliases = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 12)]
        said = error_of("x0: &x0 [1]\n" + "".join(aliases))
        assert "too many values: at most 100000, and aliases repeat them" in said
        assert "contains itself" not in said

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            ("'8'", "3:13: batch must be a whole number, not '8'\n  write 8"),
            ("1e3", "3:13: batch must be a whole number, not 1e3\n  write 1000"),
            # Numbers to YAML 1.1, where these are 8, 90, 1000 and 16; each is a trap.
            ("010", "3:13: batch must be a whole number, not 010\n  write 10"),
            (
                "1:8:*2",
                "3:13: batch must be a whole number, not 1:8:*2\n  write a list, [1024, 2048]; --problem takes ranges",
            ),
            ("0", "3:13: batch must be at least 1, not 0"),
            ("3000000000", "3:13: batch must be at most 2147483647, not 3000000000"),
            ("[1, [2]]", "3:17: batch[1] must be a whole number, not a list"),
            (
                "[1, x, 2, true]",
                "3:17: batch[1] must be a whole number, not x\n"
                "sweep.yaml:3:23: batch[3] must be a whole number, not true",
            ),
        ],
    )
    def test_not_a_whole_number(self, error_of, batch, message):
        text = "# a spec\n" + with_problem(f"batch: {batch}, heads: 1, seqlen: 8, head_dim: 64")
        assert error_of(text) == f"sweep.yaml:{message}"

    @pytest.mark.parametrize(
        ("causal", "message"),
        [
            ("1", "59: causal must be true or false, not 1\n  write true"),
            ("[true, no]", "66: causal[1] must be true or false, not no\n  write false"),
        ],
    )
    def test_not_a_bool(self, error_of, causal, message):
        text = with_problem(f"batch: 1, heads: 1, seqlen: 8, head_dim: 64, causal: {causal}")
        assert error_of(text) == f"sweep.yaml:2:{message}"

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ("batch: 1, heads: 1, head_dim: 64, seqlen_q: 8",
             "5: seqlen_k is missing\n  give seqlen, or both seqlen_q and seqlen_k"),
            ("batch: 1, heads: 1, seqlen: 8", "5: 'head_dim' is missing\n  Elements per head and row."),
            ("batch: 1, heads: 1, seqlen: 8, head_dim: 64, dtype: bf61",
             "58: dtype cannot be bf61\n  did you mean 'bf16'? there are: fp16, bf16, fp32, "
             "e4m3, e4m3_tensor, e4m3_block"),
            ("batch: 1, heads: 1, seqlen: 8, head_dim: 64, kernels: [naive, naiv]",
             "68: kernel 'naiv' is not among this spec's kernels\n  did you mean 'naive'? there are: naive"),
            (f"batch: {list(range(1, 1002))}, heads: 1, seqlen: 8, head_dim: 64",
             "5: this entry has 1001 problems; a spec may have 1000"),
            ("batch: 1, heads: 1, seqlen: 8, head_dim: 64, window: [1, 2, 3]",
             "59: window must have at most 2 values, not 3"),
            ("batch: 1, heads: 1, seqlen: 8, head_dim: 64, window: [[1, 0], [2]]",
             "68: window[1] must have at least 2 values, not 1"),
            ("batch: 1, heads: 1, seqlen: 8, head_dim: 64, window: [[1, 0], [2, a]]",
             "72: window[1] must be a whole number, not a"),
            ("batch: 1, heads: 1, seqlen: 8, head_dim: 64, boolean: [blocks, 3.5]",
             "69: boolean[1] must be text or a whole number, not 3.5"),
            ("b\u0430tch: 1, batch: 1, heads: 1, seqlen: 8, head_dim: 64",
             "6: unknown key 'b\u0430tch'\n  did you mean 'batch'? '\u0430' is U+0430, CYRILLIC SMALL LETTER A; "
             "there are: " + ", ".join(ProblemSpec.model_fields)),
        ],
    )  # fmt: skip
    def test_core_problem(self, error_of, fields, message):
        assert error_of(with_problem(fields)) == f"sweep.yaml:2:{message}"

    def test_the_error_is_at_its_own_entry_and_two_are_shown_at_once(self, error_of):
        bad = PROBLEM.replace("heads: 16", "heads: 16, heads_kv: 5")
        text = f"problems:\n  - {PROBLEM}\n  - {bad}\n  -   {bad}\nkernels: {{naive: }}\n"
        what = "heads_kv must divide heads: 16 is not a multiple of 5"
        assert error_of(text) == f"sweep.yaml:3:5: {what}\nsweep.yaml:4:7: {what}"

    @pytest.mark.parametrize("call", ["f.py:f?factory=maybe", "f.py:f?graph=true", "f.py"])
    def test_what_is_no_launcher(self, error_of, call):
        text = f"problems: [{PROBLEM}]\nkernels: {{mine: {{call: '{call}'}}}}\n"
        hint = "write a launcher as FILE.py:FUNCTION, with ?layout=bshd, ?factory=true or both"
        assert error_of(text) == f"sweep.yaml:2:24: call cannot be '{call}'\n  {hint}"

    def test_entries_together_may_not_be_too_many(self, error_of):
        entry = "{batch: [%s], heads: 1, seqlen: 8, head_dim: 64}"
        halves = [entry % ", ".join(map(str, range(n, n + 600))) for n in (1, 700)]
        text = f"kernels: {{naive: }}\nproblems: [{', '.join(halves)}]\n"
        assert error_of(text) == "sweep.yaml:2:11: 1200 problems; a spec may have 1000"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("device: gpu", "9: device cannot be gpu\n  there are: cuda, replay"),
            ("device: replay",
             "9: device replay needs a recording\n  add recording: the run to replay, relative to this file"),
            ("recording: runs", "1: recording is for device replay\n  add device: replay, or drop recording"),
            ("name: a/b", "7: name must be of a-z, 0-9, _ and - only, not a/b"),
            ("baseline: all", "1: unknown key 'baseline'\n  did you mean 'baselines'? there are: name, device, "
             "recording, arch, kernel_dir, problems, kernels, baselines, candidates, search, "
             "measure, limits, require, check, unserved"),
            ("<<: 3",
             "5: << takes the keys of a mapping\n  name one mapping, or a list of them: {<<: *a} or {<<: [*a, *b]}"),
            ("baselines: [unfused, torch_flsh]", "22: baselines[1] cannot be torch_flsh\n"
             f"  did you mean 'torch_flash'? there are: {', '.join(KNOWN_BASELINES)}, or a "
             "callable of yours as MODULE:FUNCTION"),
            ("baselines:", "11: baselines cannot be null\n  write [] for none, or all"),
            ("search: {strategy: random}", "9: search: strategy random needs candidates\n"
             "  set the number per kernel and problem, or budget_s: {strategy: random, candidates: 100}"),
            ("search: {strategy: randm, seed: -1}", "20: strategy cannot be randm\n"
             "  did you mean 'random'? there are: exhaustive, gp, random, staged\n"
             "sweep.yaml:3:33: seed must be at least 0, not -1"),
            ("search: {budget_s: 5 min}", "20: budget_s must be a whole number, not 5 min\n  write seconds: 300"),
            ("measure: {timeout_s: 2h}", "22: timeout_s must be a number, not 2h\n  write seconds: 7200"),
            ("measure: {timeout_s: 0}", "22: timeout_s must be more than 0, not 0"),
            ("measure: {timeout_s: 1e999}", "22: timeout_s must be a finite number, not 1e999"),
        ],
    )  # fmt: skip
    def test_key(self, error_of, line, message):
        assert error_of(f"{MINIMAL}{line}\n") == f"sweep.yaml:3:{message}"

    def test_five_are_shown_in_order_and_the_rest_counted(self, error_of):
        lines = error_of("".join(f"k{n}: 1\n" for n in range(8)) + MINIMAL).splitlines()
        assert [line for line in lines if not line.startswith("  ")] == [
            *(f"sweep.yaml:{n + 1}:1: unknown key 'k{n}'" for n in range(5)),
            "sweep.yaml: and 3 more",
        ]

    def test_a_stem_that_cannot_name_a_run(self, load, error_of):
        assert error_of(MINIMAL, name="My sweep.yaml") == (
            "My sweep.yaml:1:1: the file's stem 'My sweep' cannot name a run\n  add name: of a-z, 0-9, _ and - only"
        )
        assert load(MINIMAL + "name: mine\n", name="My sweep.yaml").name == "mine"


MODE_NAMES = "LAUNCH, STREAMS, CHUNK_HEADS, CHUNK_ROWS"


class TestAgainstFamilies:
    FAMILIES = toy(BLOCK_M=(64, 128), SPLIT=(0, 1), FAST=(True,), LAYOUT=("row", "column"))

    @pytest.mark.parametrize(
        ("kernels", "message"),
        [
            ("{tyo: {}}", "11: unknown kernel 'tyo'\n  did you mean 'toy'? there are: toy"),
            ("{toy: {BLOCKM: 64}}", "17: toy has no parameter 'BLOCKM'\n"
             "  did you mean 'BLOCK_M'? there are: BLOCK_M, SPLIT, FAST, LAYOUT, " + MODE_NAMES),
            (
                "{toy: {BLOCK_M: [1, true]}}",  # equal to Python
                "30: toy: BLOCK_M cannot be true\n  its own values: 64, 128",
            ),
            ("{toy: {LAYOUT: colunm}}",
             "25: toy: LAYOUT cannot be 'colunm'\n  did you mean 'column'? there are: row, column"),
        ],
    )  # fmt: skip
    def test_refused(self, error_of, kernels, message):
        text = MINIMAL.replace("{naive: {}}", kernels)
        assert error_of(text, self.FAMILIES) == f"sweep.yaml:2:{message}"

    def test_a_mode_is_a_parameter_of_every_family(self, load):
        kernels = "{toy: {BLOCK_M: 32, STREAMS: [1, 4], LAUNCH: eager}}"
        values = load(MINIMAL.replace("{naive: {}}", kernels), self.FAMILIES).kernels["toy"].values
        assert values == {"BLOCK_M": (32,), "STREAMS": (1, 4), "LAUNCH": ("eager",)}

    @pytest.mark.parametrize(
        ("kernels", "message"),
        [
            ("{toy: {variant: {tile: {small: {BLOCK_M: 64}}}}}",
             "26: variant must be a whole number, true or false, or text, not a mapping\n  did you mean 'variants'?"),
            ("{toy: {variants: {a: {x: {SPLIT: 1}}, b: {y: {SPLIT: 0}}}}}",
             "56: SPLIT is in the variants of 'a' and of 'b'\n  a parameter belongs to one axis"),
            (f"{{toy: {{variants: {{{', '.join(f'a{n}: {{x: {{}}, y: {{}}}}' for n in range(40))}}}}}}}",
             f"17: 40 axes of variants have {2**40} choices, more than 10000\n  use fewer axes, or fewer variants"),
            (f"{{toy: {{SPLIT: [0, '{'x' * 9000}']}}}}",
             f"28: toy: SPLIT cannot be '{'x' * 378}…\n  its own values: 0, 1"),
            ("{toy: {variants: {tile: {}}}}", "28: axis 'tile' has no variant"),
        ],
    )  # fmt: skip
    def test_variants_refused(self, error_of, kernels, message):
        text = MINIMAL.replace("{naive: {}}", kernels)
        assert error_of(text, self.FAMILIES) == f"sweep.yaml:2:{message}"

    def test_variants_survive_being_resolved(self, load):
        kernels = "{toy: {FAST: true, variants: {tile: {s: {BLOCK_M: 64}, l: {BLOCK_M: [64, 128]}}}}}"
        spec = load(MINIMAL.replace("{naive: {}}", kernels), self.FAMILIES)
        assert spec.kernels["toy"] == Selection(
            {"FAST": (True,)}, {"tile": {"s": {"BLOCK_M": (64,)}, "l": {"BLOCK_M": (64, 128)}}}
        )
        again = load(spec.resolved(), self.FAMILIES, name="again.yaml")
        assert again.kernels == spec.kernels


def test_where_rules_leave_no_candidate_the_values_that_are_to_blame_are_named(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "problems: [{batch: 1, heads: 2, seqlen: 256, head_dim: 64}]\n"
        "kernels:\n  flash_fwd_wgmma:\n    BLOCK_N:\n      63\n    WARPGROUPS: 2\n"
    )
    with pytest.raises(SpaceError) as refused:
        plan(load_spec(path, discover()), ARCHS["sm_90a"])
    assert refused.value.where == f"{path}:5:7"
    first, *rest = refused.value.hint.splitlines()
    assert re.fullmatch(r"with the family's own values of BLOCK_N, [1-9]\d* candidates", first)
    assert "groups removed" in " ".join(rest)
    set_ = load_spec(path, discover(), ["kernels.flash_fwd_wgmma.BLOCK_N=65"])
    with pytest.raises(SpaceError) as refused:
        plan(set_, ARCHS["sm_90a"])
    assert refused.value.where == "--set kernels.flash_fwd_wgmma.BLOCK_N=65"


@pytest.mark.parametrize(
    ("entry", "kernels", "where"),
    [
        ("{batch: 1, heads: 16, seqlen: 64, head_dim: 63}", "  flash_fwd_wgmma: {}", "4:5"),
        ("{batch: 1, heads: 16, seqlen: 64, head_dim: 64, op: backward}", "  naive: {}", "4:5"),
        (
            "{batch: 1, heads: 16, seqlen: 64, head_dim: 64}",
            "  naive: {}\n  flash_fwd_wgmma:\n    "
            + "\n    ".join(
                f"{n}: [0, 1]" for n in ("OVERLAP", "PINGPONG", "PERSISTENT", "SPLIT_CLUSTER", "PDL", "PACK_GQA")
            )
            + "\n    BLOCK_N: [64, 80, 96, 112, 128, 144, 160, 176, 192]\n    WARPGROUPS: [1, 2, 3, 4]"
            "\n    NUM_STAGES: [1, 2, 3, 4]\n    PRODUCER_WARPS: [1, 2, 4]\n    BLOCKS_PER_SM: [1, 2, 3, 4]"
            "\n    P_SHARED: [0, 1]\n    Q_REGISTERS: [0, 1]\n    EXP2_POLY: [0, 1]\n    MAXIMA: [1, 2]",
            "7:3",
        ),
    ],
    ids=["head_dim", "op", "combinations"],
)
def test_what_no_family_can_do_is_said_at_its_place(tmp_path, entry, kernels, where):
    path = tmp_path / "mine.yaml"
    other = "{batch: 1, heads: 16, seqlen: 64, head_dim: 64}"
    path.write_text(f"arch: sm_90a\nproblems:\n  - {other}\n  - {entry}\nkernels:\n{kernels}\n")
    with pytest.raises(SpaceError) as refused:
        plan(load_spec(path, discover()), ARCHS["sm_90a"])
    assert refused.value.where == f"{path}:{where}"
