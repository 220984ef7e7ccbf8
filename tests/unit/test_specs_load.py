"""The sweep spec: what it becomes, and that it is read back equal."""

import json

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specs import MINIMAL, PROBLEM, SCHEMA, with_problem

from attnsweep.core.errors import SpecError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import DTYPE_BYTES, Problem
from attnsweep.family.space import Selection
from attnsweep.specs import require as policy
from attnsweep.specs.load import json_schema, load_spec
from attnsweep.specs.model import BASELINES, KNOWN_BASELINES


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

    @pytest.mark.parametrize(
        ("field", "of_each"),
        [
            ("window: [[256, 0], [128, 128], null]", ["window(256,0)", "window(128,128)", "full"]),
            ("boolean: [[blocks, 30], [documents, 4]]", ["boolean(blocks,30)", "boolean(documents,4)"]),
            ("boolean: []", ["boolean(full)"]),
            ("bias: [[item], []]", ["full bias(item)", "full bias()"]),
            ("padding: [[right, 40], null]", ["full padded(right,40)", "full"]),
            ("scale: [1.0, 0.0722, null]", ["full scale(1)", "full scale(0.0722)", "full"]),
            ("softcap: [50, null]", ["full softcap(50)", "full"]),
            ("sinks: [true, false]", ["full sinks", "full"]),
        ],
    )
    def test_any_value_of_a_problem_may_be_a_list(self, load, field, of_each):
        text = with_problem(f"batch: 2, heads: 4, seqlen: 256, head_dim: 64, {field}")
        spec = load(text)
        assert [entry.problem.label for entry in spec.problems] == [f"(2,4,256,64) fp16 {each}" for each in of_each]
        assert load(spec.resolved()).problems == spec.problems
        jsonschema.validate(yaml.safe_load(text), json_schema())

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
        [("0", 0), ("1000", 1000), ("2 GiB", 2 << 30), ("1.5MiB", 3 << 19), ("'3 KB'", 3000), ("7 B", 7)],
    )
    def test_workspace_bytes(self, load, written, size):
        spec = load(f"{MINIMAL}limits: {{workspace_bytes: {written}}}\n")
        assert spec.limits.workspace_bytes == size

    def test_a_recording_is_relative_to_the_spec(self, load, tmp_path, monkeypatch):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        spec = load(f"{MINIMAL}device: replay\nrecording: ../runs/h200\n")
        assert spec.recording == tmp_path.parent / "runs" / "h200"

    def test_merged_keys_are_those_of_the_mapping_but_for_its_own(self, load):
        spec = load(
            """
            problems:
              - &long {batch: 1, heads: 2, seqlen: 1024, head_dim: 64}
              - &wide {<<: *long, seqlen: 2048}
              - {<<: [{batch: 3}, *wide], heads: 4}
              - {heads: 8, <<: [*wide, {seqlen: 1, causal: true}]}
            kernels: {a: }
            """
        )
        assert [entry.problem.label for entry in spec.problems] == [
            "(1,2,1024,64) fp16 full",
            "(1,2,2048,64) fp16 full",
            "(3,4,2048,64) fp16 full",
            "(1,8,2048,64) fp16 causal",
        ]

    def test_a_byte_order_mark_and_windows_lines_are_read(self, load):
        text = b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()
        assert load(text) == load(MINIMAL)


def test_keys_that_are_gone_are_ignored_with_a_sentence(load, tmp_path):
    gone = "search: {seed: 3, skip_by_bound: false}\nmeasure: {max_error: 0.1}\n"
    spec = load(MINIMAL + gone, name="old.yaml")
    line, path = len(MINIMAL.splitlines()) + 1, tmp_path / "old.yaml"
    assert spec.ignored == (
        f"{path}:{line}:19: search: skip_by_bound is ignored: attnsweep no longer has it",
        f"{path}:{line + 1}:11: measure: max_error is ignored: attnsweep no longer has it",
    )
    assert spec == load(f"{MINIMAL}search: {{seed: 3}}\n", name="old.yaml")


# Specs as text, for the properties below.
TRAPS = ["yes", "no", "on", "null", "true", "1e3", "1e+3", "1.e3", "010", "0x1", "1:30", "~"]
TRAPS += ["=", "<<", "2001-01-01", "1_0", ".5", ".inf", "é"]
words = st.text("ab1_e-", min_size=1, max_size=5) | st.sampled_from(TRAPS)
sizes = st.integers(1, 2**31 - 1)
fits = st.integers(1, 1000)  # q, k, v and o of the largest entry take 275 GiB
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
        "batch": field("batch", fits),
        "heads": field("heads", st.integers(1, 9).map(lambda n: n * heads_kv)),
        "head_dim": field("head_dim", st.integers(1, 32).map(lambda n: 16 * n) if scaled else st.integers(1, 512)),
    }
    if draw(st.booleans()):
        entry["heads_kv"] = heads_kv
    if draw(st.booleans()):
        entry["seqlen"] = field("seqlen", fits)
    else:
        entry["seqlen_q"] = field("seqlen", st.integers(1, 99))
        entry["seqlen_k"] = field("seqlen", st.integers(99, 999))
    if draw(st.booleans()):
        known = (name for name in DTYPE_BYTES if scaled or not name.startswith("e4m3"))
        entry["dtype"] = field("dtype", st.sampled_from(sorted(known)))
    if draw(st.booleans()):
        entry["causal"] = field("causal", st.booleans())
    if draw(st.booleans()):
        entry["kernels"] = field("kernels", st.sampled_from(families))
    return entry


@st.composite
def specs(draw):
    parameter_values = one_or_many(st.integers() | st.booleans() | words, 4)
    kernels = draw(st.dictionaries(words, st.none() | st.dictionaries(words, parameter_values, max_size=3), min_size=1))
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


one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


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

    def test_a_problem_keeps_the_least_threshold_that_any_entry_gives_it(self, load, tmp_path):
        entry = "{batch: 1, heads: 1, seqlen: [8, 16], head_dim: 64"
        again = "{batch: 1, heads: 1, seqlen: 16, head_dim: 64"
        text = f"problems:\n- {entry}, slower: 0.1}}\n- {again}, slower: 0.05}}\n- {again}}}\n"
        spec = load(f"{text}kernels: {{naive: {{}}}}\ncheck: {{slower: 0.03}}\n")
        assert [entry.slower for entry in spec.problems] == [0.1, 0.05]
        assert spec.check.slower == 0.03
        assert load(spec.resolved(tmp_path)) == spec


# ---- what a spec may require of compiled code: how it is written, and what breaks it ----
STAGES = {
    "qk": {"registers": 168, "spill_bytes": 0, "occupancy": 0.25, "predicated_branches": 2},
    "pv": {"registers": 96, "spill_bytes": 8, "occupancy": 0.5, "predicated_branches": 3},
}


@pytest.fixture
def required(tmp_path):
    def load(text, name="sweep.yaml"):
        (tmp_path / name).write_text(f"{MINIMAL}require: {text}\n")
        return load_spec(tmp_path / name)

    return load


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("{spill_bytes: 0}", {"spill_bytes": ("== 0",)}),
        ("{predicated_branches: '<= 4'}", {"predicated_branches": ("<= 4",)}),
        ("{registers: ['> 32', <= 128]}", {"registers": ("> 32", "<= 128")}),
        ("{occupancy: '>= 0.25', hgmma: 2.0}", {"occupancy": (">= 0.25",), "hgmma": ("== 2.0",)}),
    ],
)
def test_requirements_are_read_and_written_back_equal(required, tmp_path, text, read):
    spec = required(text)
    assert dict(spec.require) == read
    (tmp_path / "again.yaml").write_text(spec.resolved())
    assert load_spec(tmp_path / "again.yaml") == spec
    jsonschema.validate(yaml.safe_load(f"{MINIMAL}require: {text}"), json_schema())
    jsonschema.validate(yaml.safe_load(spec.resolved()), json_schema())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{predicated_branch: 0}", "sweep.yaml:3:11: unknown key 'predicated_branch'\n"
         "  did you mean 'predicated_branches'? there are: registers"),
        ("{registers: true}", "sweep.yaml:3:22: registers must be a number or a comparison"),
        ("{registers: ['<= 4', '=< 4']}", "sweep.yaml:3:31: registers[1] must be a number or"),
        ("{registers: []}", "sweep.yaml:3:22: registers must not be empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(required, tmp_path, text, said):
    with pytest.raises(SpecError) as caught:
        required(text)
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(said)


def test_a_replay_has_no_code_to_require_anything_of(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(f"{MINIMAL}device: replay\nrecording: runs\nrequire: {{spill_bytes: 0}}\n")
    with pytest.raises(SpecError, match=r"sweep\.yaml:5:1: require is for device cuda"):
        load_spec(path)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"spill_bytes": ("== 0",)}, "spill_bytes: 8 (qk 0, pv 8), the spec requires == 0"),
        ({"spill_bytes": ("<= 8",)}, None),
        ({"registers": ("<= 128",)}, "registers: 168 (qk 168, pv 96), the spec requires <= 128"),
        ({"occupancy": (">= 0.5",)}, "occupancy: 0.25 (qk 0.25, pv 0.5), the spec requires >= 0.5"),
        ({"predicated_branches": ("<= 5",), "registers": ("< 169",)}, None),
    ],
)  # fmt: skip
def test_the_first_broken_requirement_is_named_with_its_values(asked, said):
    assert policy.broken(asked, STAGES) == said
