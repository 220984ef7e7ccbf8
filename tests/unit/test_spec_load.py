"""The sweep spec: what it becomes, and every way to get it wrong with the words that answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spaces import candidates

from attnsweep.errors import SpecError
from attnsweep.family.declare import Kernel, Launch, Param, discover
from attnsweep.family.space import Selection
from attnsweep.files import shipped
from attnsweep.hardware import ARCHS, arch_named
from attnsweep.problem import DTYPE_BYTES, Problem
from attnsweep.spec.load import (
    BASELINES,
    check_against,
    load_spec,
)
from attnsweep.spec.model import KNOWN_BASELINES
from attnsweep.spec.plan import plan
from attnsweep.spec.schema import json_schema, schema_text
from attnsweep.spec.shipped import shipped_specs

ROOT = shipped("configs").parent
PROBLEM = "{batch: 1, heads: 16, seqlen: 1024, head_dim: 64}"
SCHEMA = jsonschema.Draft202012Validator(json_schema())
MINIMAL = f"problems: [{PROBLEM}]\nkernels: {{naive: {{}}}}\n"


@pytest.fixture
def load(tmp_path):
    """Loads a spec given as text (or bytes) from sweep.yaml."""

    def load(text, kernels=None, name="sweep.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_spec(path, kernels)

    return load


@pytest.fixture
def error_of(load, tmp_path):
    """The message for a wrong spec, with the directory left out."""

    def error_of(text, kernels=None, name="sweep.yaml"):
        with pytest.raises(SpecError) as caught:
            load(text, kernels, name)
        assert caught.value.exit_code == 2
        return str(caught.value).replace(f"{tmp_path}/", "")

    return error_of


def with_problem(fields):
    return f"problems:\n  - {{{fields}}}\nkernels: {{naive: {{}}}}\n"


def toy(**params):
    kernel = Kernel("toy", summary="", params=tuple(Param(n, v, "") for n, v in params.items()))
    kernel.stage("fwd")(lambda *_: Launch("toy", (1, 1, 1), 32, ()))
    return {"toy": kernel}


class TestWhatItBecomes:
    def test_defaults(self, load, tmp_path):
        spec = load(MINIMAL)
        assert spec.name == "sweep"
        assert (spec.device, spec.recording, spec.arch) == ("cuda", None, None)
        (entry,) = spec.problems
        assert entry.problem == Problem(1, 16, 16, 1024, 1024, 64, "fp16", causal=False)
        assert entry.kernels == ("naive",)
        assert spec.kernels == {"naive": Selection()}
        assert spec.baselines == BASELINES
        search, measure, limits = spec.search, spec.measure, spec.limits
        assert (search.strategy, search.candidates, search.seed) == ("exhaustive", None, 0)
        assert (measure.rounds, measure.finalists, measure.replay_us) == (15, 12, 1000)
        assert (measure.cold, measure.eager, measure.timeout_s) == (True, True, 30)
        assert (limits.workspace_bytes, limits.spill_bytes) == (None, None)

    def test_lists_of_a_problem_are_a_product_in_order_without_repeats(self, load):
        fields = "batch: [2, 1, 2], heads: 4, seqlen: [8, 16], head_dim: 64, causal: [false, true]"
        labels = [entry.problem.label for entry in load(with_problem(fields)).problems]
        assert labels == [
            *("(2,4,8,64) fp16 full", "(2,4,8,64) fp16 causal"),
            *("(2,4,16,64) fp16 full", "(2,4,16,64) fp16 causal"),
            *("(1,4,8,64) fp16 full", "(1,4,8,64) fp16 causal"),
            *("(1,4,16,64) fp16 full", "(1,4,16,64) fp16 causal"),
        ]

    def test_heads_kv_follow_heads_and_seqlens_may_differ(self, load):
        fields = "batch: 1, heads: [4, 8], seqlen_q: 5, seqlen_k: [7, 9], head_dim: 64"
        found = [entry.problem for entry in load(with_problem(fields)).problems]
        assert [(p.heads_kv, p.seqlen_q, p.seqlen_k) for p in found] == [
            *((4, 5, 7), (4, 5, 9)),
            *((8, 5, 7), (8, 5, 9)),
        ]

    def test_a_problem_named_twice_is_swept_once_with_the_kernels_of_both(self, load):
        text = (
            f"problems:\n  - {PROBLEM[:-1]}, kernels: c}}\n  - {PROBLEM[:-1]}, kernels: [a, c]}}\n"
            "kernels: {a: , b: {}, c: {}}\n"
        )
        (entry,) = load(text).problems
        assert entry.kernels == ("a", "c")  # in the order of the spec's kernels

    def test_values_may_be_one_or_many_and_repeats_are_dropped(self, load):
        kernels = "{a: {X: 1, Y: [64, 32, 64], Z: [true, 1], W: row}, b: null}"
        spec = load(MINIMAL.replace("{naive: {}}", kernels))
        assert spec.kernels == {
            "a": Selection({"X": (1,), "Y": (64, 32), "Z": (True, 1), "W": ("row",)}),
            "b": Selection(),
        }
        assert [type(value) for value in spec.kernels["a"].values["Z"]] == [bool, int]

    @pytest.mark.parametrize(
        ("written", "baselines"),
        [
            ("all", BASELINES),
            ("[]", ()),
            ("unfused", ("unfused",)),
            ("[unfused, torch_flash, unfused]", ("unfused", "torch_flash")),
        ],
    )
    def test_baselines(self, load, written, baselines):
        assert load(f"{MINIMAL}baselines: {written}\n").baselines == baselines

    @pytest.mark.parametrize(
        ("written", "size"),
        [
            ("0", 0),
            ("1000", 1000),
            ("2 GiB", 2 << 30),
            ("1.5MiB", 3 << 19),
            ("'3 KB'", 3000),
            ("7 B", 7),
        ],
    )
    def test_workspace_bytes(self, load, written, size):
        spec = load(f"{MINIMAL}limits: {{workspace_bytes: {written}}}\n")
        assert spec.limits.workspace_bytes == size

    def test_arch_is_the_full_name(self, load):
        assert load(f"{MINIMAL}arch: sm_90\n").arch == "sm_90a"

    def test_a_recording_is_relative_to_the_spec(self, load, tmp_path, monkeypatch):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        spec = load(f"{MINIMAL}device: replay\nrecording: ../runs/h200\n")
        assert spec.recording == tmp_path.parent / "runs" / "h200"

    def test_aliases_are_expanded(self, load):
        text = (
            "problems: [&p {batch: &n 2, heads: *n, seqlen: 8, head_dim: 64}, *p]\nkernels: {a: }"
        )
        (entry,) = load(text).problems
        assert (entry.problem.batch, entry.problem.heads) == (2, 2)

    def test_a_byte_order_mark_and_windows_lines_are_read(self, load):
        text = b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()
        assert load(text) == load(MINIMAL)


# Specs as text, for the properties below.
TRAPS = ["yes", "no", "on", "null", "true", "1e3", "1e+3", "1.e3", "010", "0x1", "1:30", "~"]
TRAPS += ["=", "<<", "2001-01-01", "1_0", ".5", ".inf", "é"]
words = st.text("ab1_e-", min_size=1, max_size=5) | st.sampled_from(TRAPS)
sizes = st.integers(1, 2**31 - 1)
flow = json.dumps  # JSON is YAML, whatever the text


def one_or_many(of, most=2):
    return of | st.lists(of, min_size=1, max_size=most)


FIELDS = ("batch", "heads", "head_dim", "seqlen", "dtype", "causal", "kernels")


@st.composite
def problem_entries(draw, families):
    """At most three fields are lists: their product is problems, and each takes its time."""
    lists = draw(st.sets(st.sampled_from(FIELDS), max_size=3))

    def field(name, of):
        return draw(one_or_many(of) if name in lists else of)

    heads_kv, scaled = draw(st.integers(1, 4)), draw(st.booleans())
    entry = {
        "batch": field("batch", sizes),
        "heads": field("heads", st.integers(1, 9).map(lambda n: n * heads_kv)),
        "head_dim": field(
            "head_dim", st.integers(1, 32).map(lambda n: 16 * n) if scaled else st.integers(1, 512)
        ),
    }
    if draw(st.booleans()):
        entry["heads_kv"] = heads_kv
    if draw(st.booleans()):
        entry["seqlen"] = field("seqlen", sizes)
    else:
        entry["seqlen_q"] = field("seqlen", st.integers(1, 99))
        entry["seqlen_k"] = field("seqlen", st.integers(99, 999))
    if draw(st.booleans()):
        fits = (name for name in DTYPE_BYTES if scaled or not name.startswith("e4m3"))
        entry["dtype"] = field("dtype", st.sampled_from(sorted(fits)))
    if draw(st.booleans()):
        entry["causal"] = field("causal", st.booleans())
    if draw(st.booleans()):
        entry["kernels"] = field("kernels", st.sampled_from(families))
    return entry


@st.composite
def specs(draw):
    parameter_values = one_or_many(st.integers() | st.booleans() | words, 4)
    kernels = draw(
        st.dictionaries(
            words, st.none() | st.dictionaries(words, parameter_values, max_size=3), min_size=1
        )
    )
    entries = st.lists(problem_entries(sorted(kernels)), min_size=1, max_size=3)
    data = {"problems": draw(entries), "kernels": kernels}
    data |= draw(st.sampled_from([{}, {"device": "replay", "recording": "../a/1e3"}]))
    random = st.fixed_dictionaries({"strategy": st.just("random"), "candidates": sizes})
    optional = {
        "name": st.text("abz09_-", min_size=1),
        "arch": st.sampled_from([*ARCHS, "sm_90"]),
        "baselines": st.just("all") | st.lists(st.sampled_from(KNOWN_BASELINES)),
        "search": random | st.fixed_dictionaries({"seed": st.integers(0)}),
        "measure": st.fixed_dictionaries(
            {"timeout_s": st.floats(1e-3, 1e30) | st.integers(1, 10**6)},
            optional={"rounds": sizes, "cold": st.booleans()},
        ),
        "limits": st.fixed_dictionaries(
            {}, optional={"workspace_bytes": st.none() | st.just("3 GiB"), "spill_bytes": sizes}
        ),
    }
    return data | draw(st.fixed_dictionaries({}, optional=optional))


one_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class TestRoundTrip:
    @one_folder
    @given(specs(), st.booleans())
    def test_a_resolved_spec_is_read_back_equal(self, tmp_path, data, relative):
        (tmp_path / "given.yaml").write_text(flow(data))
        spec = load_spec(tmp_path / "given.yaml")
        run = tmp_path / "results" / "run"
        run.mkdir(parents=True, exist_ok=True)
        text = spec.resolved(run if relative else None)
        (run / "spec.yaml").write_text(text, encoding="utf-8")
        again = load_spec(run / "spec.yaml")
        assert again == spec
        assert again.resolved(run if relative else None) == text
        if spec.recording is not None:
            assert (str(spec.recording) in text) == (not relative)
        SCHEMA.validate(yaml.safe_load(text))

    @one_folder
    @given(specs())
    def test_what_loads_is_what_the_editor_s_schema_accepts(self, tmp_path, data):
        (tmp_path / "given.yaml").write_text(flow(data))
        assert load_spec(tmp_path / "given.yaml").problems
        SCHEMA.validate(data)

    @pytest.mark.parametrize("text", [*TRAPS, "", " ", "a: b", "#", "- a", "'", "*a"])
    def test_text_stays_text_here_and_for_readers_of_yaml_1_1(self, load, text):
        spec = load(MINIMAL.replace("{naive: {}}", flow({"a": {text: text}})))
        assert load(spec.resolved(), name="again.yaml").kernels == spec.kernels
        assert yaml.safe_load(spec.resolved())["kernels"] == {"a": {text: [text]}}

    def test_specs_that_differ_are_not_equal(self, load):
        assert load(MINIMAL) != load(MINIMAL.replace("1024", "1023"))
        assert load(MINIMAL) != load(MINIMAL + "measure: {cold: false}\n")

    def test_resolved_text_leaves_nothing_to_default(self, load, tmp_path):
        text = load(f"{MINIMAL}device: replay\nrecording: runs\n").resolved(tmp_path / "a")
        assert text == (
            "name: sweep\ndevice: replay\nrecording: ../runs\nproblems:\n"
            "- {batch: 1, heads: 16, heads_kv: 16, seqlen_q: 1024, seqlen_k: 1024, head_dim: 64, "
            "dtype: fp16, causal: false}\n"
            "kernels:\n  naive: {}\nbaselines:\n"
            + "".join(f"- {name}\n" for name in BASELINES)
            + "search: {strategy: exhaustive, candidates: null, budget_s: null, seed: 0, "
            "skip_by_bound: true}\n"
            "measure: {rank_by: warm, rounds: 15, finalists: 12, replay_us: 1000, cold: true, "
            "eager: true, energy: false, max_error: null, input_seed: null, timeout_s: 30.0}\n"
            "limits: {workspace_bytes: null, spill_bytes: null}\n"
            "check: {slower: 0.02, budget_s: 60.0}\n"
        )

    def test_a_problem_keeps_the_least_threshold_that_any_entry_gives_it(self, load, tmp_path):
        entry = "{batch: 1, heads: 1, seqlen: [8, 16], head_dim: 64"
        again = "{batch: 1, heads: 1, seqlen: 16, head_dim: 64"
        text = f"problems:\n- {entry}, slower: 0.1}}\n- {again}, slower: 0.05}}\n- {again}}}\n"
        spec = load(f"{text}kernels: {{naive: {{}}}}\ncheck: {{slower: 0.03}}\n")
        assert [entry.slower for entry in spec.problems] == [0.1, 0.05]
        assert spec.check.slower == 0.03
        assert load(spec.resolved(tmp_path)) == spec


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "a: [1, 2\nb: 3",
                "2:2: not valid YAML: expected ',' or ']', but got ':'\n"
                "  while parsing a flow sequence that begins in line 1",
            ),
            ("a: b: c", "1:5: not valid YAML: mapping values are not allowed here"),
            (
                "a:\n\tb: c",
                "2:1: not valid YAML: found character '\\t' that cannot start any token\n"
                "  while scanning for the next token",
            ),
            ("a: *b", "1:4: not valid YAML: found undefined alias 'b'"),
            (
                f"{MINIMAL}---\na: 1\n",
                "3:1: not valid YAML: expected a single document in the stream, "
                "but found another document",
            ),
            ("a: b\nc: d\x01", "2:5: not valid YAML: character U+0001 is not allowed"),
            ("name: caf\u00e9\nb: \x02", "2:4: not valid YAML: character U+0002 is not allowed"),
            (
                b"a: 1\nb: \xff",
                "2:4: not UTF-8: byte 0xff\n  save the file as UTF-8",
            ),
            ("name: a\nname: b", "2:1: duplicate key 'name'\n  first in line 1: drop one"),
            (
                "problems: [{batch: 1,\n 'batch': 2}]",
                "2:2: duplicate key 'batch'\n  first in line 1: drop one",
            ),
            ("? [a]\n: 1", "1:3: a key must be text, not a list or a mapping"),
            ("a: &x [1, *x]", "1:4: this alias contains itself\n  write the values out"),
            (
                "name: !!python/name:os.system x",
                "1:7: a spec cannot use tag tag:yaml.org,2002:python/name:os.system\n"
                "  remove the tag",
            ),
            ("name: !!int x", "1:7: a spec cannot use tag tag:yaml.org,2002:int\n  remove the tag"),
        ],
    )
    def test_not_yaml(self, error_of, text, message):
        assert error_of(text) == f"sweep.yaml:{message}"

    @pytest.mark.parametrize("text", ["", "\n# nothing yet\n", "---\n", "--- # no\n..."])
    def test_empty(self, error_of, text):
        assert error_of(text) == f"sweep.yaml: is empty\n  shipped specs: {', '.join(NAMES)}"

    @pytest.mark.parametrize(
        ("text", "what"),
        [("[1, 2]", "a list"), ("naive", "naive"), ("null", "null"), ("3", "3")],
    )
    def test_wrong_top_level(self, error_of, text, what):
        assert (
            error_of(f"# a comment\n{text}")
            == f"sweep.yaml:2:1: a spec must be a mapping, not {what}"
        )

    def test_a_spec_nested_without_end_is_refused_quickly(self, error_of):
        assert error_of("[" * 5000) == "sweep.yaml: nested too deeply"
        aliases = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 12)]
        assert "this alias contains itsel" in error_of("x0: &x0 [1]\n" + "".join(aliases))

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            ("'8'", "3:13: batch must be a whole number, not '8'\n  write 8"),
            ("true", "3:13: batch must be a whole number, not true"),
            ("yes", "3:13: batch must be a whole number, not yes"),
            ("1e3", "3:13: batch must be a whole number, not 1e3\n  write 1000"),
            ("2.0", "3:13: batch must be a whole number, not 2.0\n  write 2"),
            ("2.5", "3:13: batch must be a whole number, not 2.5"),
            # Numbers to YAML 1.1, where these are 8, 90, 1000 and 16; each is a trap.
            ("010", "3:13: batch must be a whole number, not 010\n  write 10"),
            ("1:30", "3:13: batch must be a whole number, not 1:30"),
            ("1_000", "3:13: batch must be a whole number, not 1_000\n  write 1000"),
            ("0x10", "3:13: batch must be a whole number, not 0x10"),
            ("0", "3:13: batch must be at least 1, not 0"),
            ("-3", "3:13: batch must be at least 1, not -3"),
            ("3000000000", "3:13: batch must be at most 2.14748e+09, not 3000000000"),
            ("9" * 5000, f"3:13: batch must be a whole number, not {'9' * 60}…"),
            ("[]", "3:13: batch must not be empty"),
            ("null", "3:13: batch must be a whole number, not null"),
            ("{a: 1}", "3:13: batch must be a whole number, not a mapping"),
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
            ("0", "59: causal must be true or false, not 0\n  write false"),
            ("yes", "59: causal must be true or false, not yes\n  write true"),
            ("Off", "59: causal must be true or false, not Off\n  write false"),
            ("'true'", "59: causal must be true or false, not 'true'\n  write true"),
            ("maybe", "59: causal must be true or false, not maybe"),
            ("null", "59: causal must be true or false, not null"),
            ("[true, no]", "66: causal[1] must be true or false, not no\n  write false"),
        ],
    )
    def test_not_a_bool(self, error_of, causal, message):
        text = with_problem(f"batch: 1, heads: 1, seqlen: 8, head_dim: 64, causal: {causal}")
        assert error_of(text) == f"sweep.yaml:2:{message}"

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                "batch: 1, heads: 16, heads_kv: 3, seqlen: 8, head_dim: 64",
                "5: heads_kv must divide heads: 16 is not a multiple of 3",
            ),
            (
                "batch: 1, heads: 1, seqlen_q: 9, seqlen_k: 8, head_dim: 64, causal: true",
                "5: causal with seqlen_q 9 > seqlen_k 8: the first 1 queries would see no key at "
                "all\n  make seqlen_k at least seqlen_q, or drop causal",
            ),
            (
                "batch: 1, heads: 1, head_dim: 64, seqlen_q: 8",
                "5: seqlen_k is missing\n  give seqlen, or both seqlen_q and seqlen_k",
            ),
            (
                "batch: 1, heads: 1, head_dim: 64, seqlen: 8, seqlen_k: 8",
                "5: seqlen already sets both seqlen_q and seqlen_k\n"
                "  give seqlen alone, or seqlen_q and seqlen_k",
            ),
            (
                "batch: 1, heads: 1, seqlen: 8",
                "5: 'head_dim' is missing\n  Elements per head and row.",
            ),
            (
                "batch: 1, heads: 1, seqlen: 8, head_dim: 64, dtype: bf61",
                "58: dtype cannot be bf61\n  did you mean 'bf16'? there are: fp16, bf16, fp32, "
                "e4m3, e4m3_tensor, e4m3_block",
            ),
            (
                "batch: 1, heads: 1, seqlen: 8, head_dim: 64, head_kv: 1",
                "51: unknown key 'head_kv'\n  did you mean 'heads_kv'? there are: batch, heads, "
                "heads_kv, seqlen, seqlen_q, seqlen_k, head_dim, dtype, causal, kernels, "
                "slower, calls",
            ),
            (
                "batch: 1, heads: 1, seqlen: 8, head_dim: 64, kernels: [naive, naiv]",
                "68: kernel 'naiv' is not among this spec's kernels\n"
                "  did you mean 'naive'? there are: naive",
            ),
            (
                f"batch: {list(range(1, 1002))}, heads: 1, seqlen: 8, head_dim: 64",
                "5: this entry has 1001 problems; a spec may have 1000",
            ),
        ],
    )
    def test_problem(self, error_of, fields, message):
        assert error_of(with_problem(fields)) == f"sweep.yaml:2:{message}"

    def test_the_error_is_at_its_own_entry_and_two_are_shown_at_once(self, error_of):
        bad = PROBLEM.replace("heads: 16", "heads: 16, heads_kv: 5")
        text = f"problems:\n  - {PROBLEM}\n  - {bad}\n  -   {bad}\nkernels: {{naive: }}\n"
        what = "heads_kv must divide heads: 16 is not a multiple of 5"
        assert error_of(text) == f"sweep.yaml:3:5: {what}\nsweep.yaml:4:7: {what}"

    def test_entries_together_may_not_be_too_many(self, error_of):
        entry = "{batch: [%s], heads: 1, seqlen: 8, head_dim: 64}"
        halves = [entry % ", ".join(map(str, range(n, n + 600))) for n in (1, 700)]
        text = f"kernels: {{naive: }}\nproblems: [{', '.join(halves)}]\n"
        assert error_of(text) == "sweep.yaml:2:11: 1200 problems; a spec may have 1000"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("device: gpu", "9: device cannot be gpu\n  there are: cuda, replay"),
            (
                "device: replay",
                "9: device replay needs a recording\n"
                "  add recording: the run to replay, relative to this file",
            ),
            (
                "recording: runs",
                "1: recording is for device replay\n  add device: replay, or drop recording",
            ),
            ("recording: ''", "12: recording must not be empty"),
            (
                "arch: sm_91a",
                "7: unknown architecture 'sm_91a'\n"
                f"  did you mean 'sm_90a'? there are: {', '.join(ARCHS)}",
            ),
            ("arch: 90", "7: arch must be text, not 90\n  write it in quotes"),
            ("name: a/b", "7: name must match ^[a-z0-9_-]+$, not a/b"),
            ("name: ..", "7: name must match ^[a-z0-9_-]+$, not .."),
            ("name: 200", "7: name must be text, not 200\n  write it in quotes"),
            (
                "baseline: all",
                "1: unknown key 'baseline'\n  did you mean 'baselines'? there are: name, device, "
                "recording, arch, kernel_dir, problems, kernels, baselines, search, measure, "
                "limits, require, check, unserved",
            ),
            (
                "<<: {a: 1}",
                "1: merge keys (<<) are not supported\n  write the keys out, or give a whole value "
                "an anchor: {a: &x [1, 2], b: *x}",
            ),
            (
                "baselines: [unfused, torch_flsh]",
                "22: baselines[1] cannot be torch_flsh\n"
                f"  did you mean 'torch_flash'? there are: {', '.join(KNOWN_BASELINES)}",
            ),
            (
                "baselines: none",
                "12: baselines cannot be none\n  write [] for none, or all",
            ),
            (
                "baselines:",
                "11: baselines cannot be null\n  write [] for none, or all",
            ),
            (
                "search: {strategy: random}",
                "9: search: strategy random needs candidates\n"
                "  set the number per kernel and problem, or budget_s: "
                "{strategy: random, candidates: 100}",
            ),
            (
                "search: random",
                "9: search must be a mapping, not random\n  Which candidates are tried.",
            ),
            (
                "search: {strategy: randm, seed: -1}",
                "20: strategy cannot be randm\n"
                "  did you mean 'random'? there are: exhaustive, gp, random, staged, tpe\n"
                "sweep.yaml:3:33: seed must be at least 0, not -1",
            ),
            (
                "measure: {round: 3}",
                "11: unknown key 'round'\n  did you mean 'rounds'? there are: rank_by, rounds, "
                "finalists, replay_us, cold, eager, energy, max_error, input_seed, timeout_s",
            ),
            ("measure: {timeout_s: 0}", "22: timeout_s must be more than 0, not 0"),
            ("measure: {timeout_s: true}", "22: timeout_s must be a number, not true"),
            ("measure: {timeout_s: 1e999}", "22: timeout_s must be a finite number, not 1e999"),
            ("measure: {timeout_s: .inf}", "22: timeout_s must be a number, not .inf"),
            (
                "limits: {workspace_bytes: 2 gigs}",
                "27: workspace_bytes must be a number of bytes or a size, not 2 gigs\n"
                "  write an int, or a number and one of B, KB, MB, GB, KiB, MiB, GiB: '2 GiB'",
            ),
            (
                "limits: {workspace_bytes: true}",
                "27: workspace_bytes must be a whole number, not true",
            ),
            ("limits: {spill_bytes: -1}", "23: spill_bytes must be at least 0, not -1"),
            ("check: {slower: 2 %}", "17: slower must be a number, not 2 %"),
            ("check: {slower: 0}", "17: slower must be at least 0.001, not 0"),
            ("check: {budget_s: 0}", "19: budget_s must be more than 0, not 0"),
        ],
    )
    def test_key(self, error_of, line, message):
        assert error_of(f"{MINIMAL}{line}\n") == f"sweep.yaml:3:{message}"

    @pytest.mark.parametrize(
        ("kernels", "message"),
        [
            (
                "[naive]",
                "10: kernels must be a mapping, not a list\n"
                "  Family name to parameter values that replace its own; {} keeps its own.",
            ),
            ("{}", "10: kernels must not be empty"),
            ("{naive: {THREADS: []}}", "28: THREADS must not be empty"),
            (
                "{naive: {THREADS: }}",
                "27: THREADS must be a whole number, true or false, or text, not null",
            ),
            (
                "{naive: {THREADS: [1, 0.5]}}",
                "32: THREADS[1] must be a whole number, true or false, or text, not 0.5",
            ),
            ("{naive: 64}", "18: naive must be a mapping, not 64"),
        ],
    )
    def test_kernels(self, error_of, kernels, message):
        text = MINIMAL.replace("{naive: {}}", kernels)
        assert error_of(text) == f"sweep.yaml:2:{message}"

    def test_errors_come_in_the_file_s_order(self, error_of):
        text = "limits: 1\nkernels: 2\nproblems: 3\ndevice: 4\n"
        found = re.findall(r"^sweep\.yaml:(\d)", error_of(text), re.MULTILINE)
        assert found == ["1", "2", "3", "4"]

    def test_five_are_shown_in_order_and_the_rest_counted(self, error_of):
        lines = error_of("".join(f"k{n}: 1\n" for n in range(8)) + MINIMAL).splitlines()
        assert [line for line in lines if not line.startswith("  ")] == [
            *(f"sweep.yaml:{n + 1}:1: unknown key 'k{n}'" for n in range(5)),
            "sweep.yaml: and 3 more",
        ]

    def test_a_stem_that_cannot_name_a_run(self, load, error_of):
        assert error_of(MINIMAL, name="My sweep.yaml") == (
            "My sweep.yaml:1:1: the file's stem 'My sweep' cannot name a run\n"
            "  add name: of a-z, 0-9, _ and - only"
        )
        assert load(MINIMAL + "name: mine\n", name="My sweep.yaml").name == "mine"


MODE_NAMES = "LAUNCH, STREAMS, CHUNK_HEADS, CHUNK_ROWS"


class TestAgainstFamilies:
    FAMILIES = toy(BLOCK_M=(64, 128), SPLIT=(0, 1), FAST=(True,), LAYOUT=("row", "column"))

    @pytest.mark.parametrize(
        ("kernels", "message"),
        [
            ("{tyo: {}}", "11: unknown kernel 'tyo'\n  did you mean 'toy'? there are: toy"),
            (
                "{toy: {BLOCKM: 64}}",
                "17: toy has no parameter 'BLOCKM'\n"
                "  did you mean 'BLOCK_M'? there are: BLOCK_M, SPLIT, FAST, LAYOUT, " + MODE_NAMES,
            ),
            (
                "{toy: {BLOCK_M: [64, big]}}",
                "31: toy: BLOCK_M cannot be 'big'\n  its own values: 64, 128",
            ),
            (
                "{toy: {BLOCK_M: [64, 64, true]}}",  # the repeat does not move the position
                "35: toy: BLOCK_M cannot be true\n  its own values: 64, 128",
            ),
            (
                "{toy: {BLOCK_M: [1, true]}}",  # equal to Python
                "30: toy: BLOCK_M cannot be true\n  its own values: 64, 128",
            ),
            (
                "{toy: {BLOCK_M: 0}}",
                "26: toy: BLOCK_M must be at least 1, not 0\n  its own values: 64, 128",
            ),
            (
                "{toy: {SPLIT: -1}}",
                "24: toy: SPLIT must be at least 0, not -1\n  its own values: 0, 1",
            ),
            ("{toy: {FAST: 1}}", "23: toy: FAST cannot be 1\n  its own values: true"),
            (
                "{toy: {LAYOUT: colunm}}",
                "25: toy: LAYOUT cannot be 'colunm'\n"
                "  did you mean 'column'? there are: row, column",
            ),
            (
                "{a: {}, toy: {X: 1}}",
                "11: unknown kernel 'a'\n  there are: toy\n"
                "sweep.yaml:2:24: toy has no parameter 'X'\n"
                "  there are: BLOCK_M, SPLIT, FAST, LAYOUT, " + MODE_NAMES,
            ),
        ],
    )
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
            (
                "{toy: {variants: {tile: {small: {BLOCKM: 64}}}}}",
                "43: toy has no parameter 'BLOCKM'\n  did you mean 'BLOCK_M'? there are: "
                "BLOCK_M, SPLIT, FAST, LAYOUT, " + MODE_NAMES,
            ),
            (
                "{toy: {variants: {tile: {small: {BLOCK_M: big}}}}}",
                "52: toy: BLOCK_M cannot be 'big'\n  its own values: 64, 128",
            ),
            (
                "{toy: {variants: {a: {x: {SPLIT: 1}}, b: {y: {SPLIT: 0}}}}}",
                "56: SPLIT is in the variants of 'a' and of 'b'\n  a parameter belongs to one axis",
            ),
            ("{toy: {variants: {tile: {}}}}", "28: axis 'tile' has no variant"),
            ("{toy: {variants: 3}}", "27: variants must be a mapping, not 3"),
            ("{toy: {variants: {tile: [1]}}}", "34: tile must be a mapping, not a list"),
        ],
    )
    def test_variants_refused(self, error_of, kernels, message):
        text = MINIMAL.replace("{naive: {}}", kernels)
        assert error_of(text, self.FAMILIES) == f"sweep.yaml:2:{message}"

    def test_variants_survive_being_resolved(self, load):
        kernels = (
            "{toy: {FAST: true, variants: {tile: {s: {BLOCK_M: 64}, l: {BLOCK_M: [64, 128]}}}}}"
        )
        spec = load(MINIMAL.replace("{naive: {}}", kernels), self.FAMILIES)
        assert spec.kernels["toy"] == Selection(
            {"FAST": (True,)}, {"tile": {"s": {"BLOCK_M": (64,)}, "l": {"BLOCK_M": (64, 128)}}}
        )
        again = load(spec.resolved(), self.FAMILIES, name="again.yaml")
        assert again.kernels == spec.kernels

    def test_accepted(self, load):
        kernels = "{toy: {BLOCK_M: [32, 1], SPLIT: 0, FAST: [true, false], LAYOUT: row}}"
        spec = load(MINIMAL.replace("{naive: {}}", kernels))
        check_against(spec, self.FAMILIES)


class TestWhichFile:
    def test_missing(self, tmp_path):
        with pytest.raises(SpecError) as caught:
            load_spec(tmp_path / "h20.yaml")
        assert str(caught.value) == (
            f"{tmp_path}/h20.yaml: no such file\n"
            f"  did you mean 'h200'? shipped specs: {', '.join(NAMES)}"
        )

    def test_a_directory(self, tmp_path):
        with pytest.raises(SpecError, match="is a directory, not a spec") as caught:
            load_spec(tmp_path)
        assert caught.value.hint == f"shipped specs: {', '.join(NAMES)}"
        (tmp_path / "spec.yaml").touch()
        with pytest.raises(SpecError) as caught:
            load_spec(tmp_path)
        assert caught.value.hint == f"its spec is {tmp_path}/spec.yaml"

    @pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
    def test_a_shipped_spec_is_found_from_anywhere(self, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        spec = load_spec(Path(name))
        assert spec.name == "quickstart"
        assert spec.recording == ROOT / "results" / "h100-80gb-hbm3" / "h100"

    @pytest.mark.parametrize("name", ["other/quickstart.yaml", "/quickstart", "../quickstart"])
    def test_but_not_where_another_directory_is_named(self, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SpecError, match="no such file"):
            load_spec(Path(name))

    def test_a_file_of_the_user_s_comes_first(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("quickstart.yaml").write_text(MINIMAL)
        assert load_spec(Path("quickstart.yaml")).device == "cuda"


NAMES = list(shipped_specs())


class TestShipped:
    def test_these(self):
        assert {"a100", "h100", "h200", "l4", "quickstart"} <= set(NAMES)

    def test_the_committed_schema_is_current(self):
        assert (ROOT / "docs" / "spec.schema.json").read_text(encoding="utf-8") == schema_text()

    def test_the_schema_is_one_and_describes_every_key(self):
        schema = json_schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        for name, model in ({"": schema} | schema["$defs"]).items():
            if name != "KernelSpec":  # where any other key is a parameter
                assert model["additionalProperties"] is False
            assert all(field["description"] for field in model["properties"].values())

    @pytest.mark.parametrize(
        "wrong",
        [
            {"kernels": {}},
            {"device": "gpu"},
            {"problems": [{"batch": 1, "heads": 1, "head_dim": 64}]},
            {"problems": [{"batch": True, "heads": 1, "head_dim": 64, "seqlen": 8}]},
            {"kernels": {"naive": {"THREADS": 1.5}}},
            {"limits": {"workspace_bytes": "2 gigs"}},
            {"extra": 1},
        ],
        ids=str,
    )
    def test_an_editor_would_see(self, wrong):
        with pytest.raises(jsonschema.ValidationError):
            SCHEMA.validate({**yaml.safe_load(MINIMAL), **wrong})

    @pytest.mark.parametrize("name", NAMES)
    def test_it_loads_against_the_families_and_the_schema(self, name):
        path = shipped_specs()[name]
        first, second = path.read_text(encoding="utf-8").splitlines()[:2]
        assert first == "# yaml-language-server: $schema=../docs/spec.schema.json"
        assert re.match("# [A-Z]", second)
        assert name.startswith(load_spec(path, discover()).name)
        SCHEMA.validate(yaml.safe_load(path.read_text(encoding="utf-8")))

    def test_each_has_a_run_directory_of_its_own(self):
        named = [load_spec(path).name for path in shipped_specs().values()]
        assert len(set(named)) == len(named)

    @pytest.mark.parametrize("name", NAMES)
    def test_every_family_has_candidates_on_every_problem(self, name):
        spec, kernels = load_spec(Path(name)), discover()
        arch = arch_named(spec.arch or "sm_90a")
        for entry in spec.problems:
            for family in entry.kernels:
                kernel, selection = kernels[family], spec.kernels[family]
                assert kernel.refusal(entry.problem, arch) is None
                found = next(candidates(kernel, entry.problem, arch, selection), None)
                assert found is not None, f"{family} on {entry.problem.label}"

    def test_the_quickstart_asks_for_what_the_h100_spec_measures(self):
        recorded = load_spec(Path("h100"))
        quickstart = load_spec(Path("quickstart"))
        assert quickstart.recording == ROOT / "results" / "h100-80gb-hbm3" / recorded.name
        assert quickstart.kernels == recorded.kernels
        assert set(quickstart.baselines) <= set(recorded.baselines)  # those that it recorded
        assert set(quickstart.problems) <= set(recorded.problems)

    @pytest.mark.parametrize(
        "name", ["flash_training", "flash_short", "flash_dims", "flash_long", "batched"]
    )
    def test_the_fused_kernel_meets_the_peers_that_a_user_would_pick(self, name):
        spec = load_spec(Path(name))
        peers = ("torch_cudnn", "cudnn", "torch_flash", "triton_flash", "flash_attn_3")
        assert spec.baselines == peers

    def test_decoding_packs_grouped_heads_and_sweeps_them_apart_too(self):
        kernels = discover()
        spec = load_spec(Path("decode"), kernels)
        assert spec.baselines == ("flash_attn_3", "torch_flash", "torch_cudnn", "cudnn")
        for item in plan(spec, kernels, arch_named("sm_90a")):
            p, (space,) = item.problem, item.spaces
            assert p.heads == 8 * p.heads_kv
            most = [max(c.SPLITS for c in space.configs if c.PACK_GQA == n) for n in (0, 1)]
            if p.seqlen_q == 64:  # which fill a tile of 64 rows alone
                assert {c.WARPGROUPS for c in space.configs if c.PACK_GQA} == {2}
            elif p.batch == 1:  # eight times fewer tiles, so that more splits fit
                assert most == ([8, 32] if p.heads_kv == 4 else [2, 32])
            else:
                assert most == ([1, 2] if p.heads_kv == 4 else [1, 1])

    @pytest.mark.parametrize("name", ["flash_short", "batched"])
    def test_one_tile_of_short_calls_may_be_chained(self, name):
        kernels = discover()
        for item in plan(load_spec(Path(name), kernels), kernels, arch_named("sm_90a")):
            (space,) = item.spaces
            chained = [config for config in space.configs if config.PDL]
            assert 0 < len(chained) < 0.4 * len(space.configs)
            assert len({(config.BLOCK_N, config.P_SHARED) for config in chained}) == 1
