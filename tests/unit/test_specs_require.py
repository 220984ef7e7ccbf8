"""What a spec may require of compiled code: how it is written, and what breaks it."""

from __future__ import annotations

import jsonschema
import pytest
import yaml

from attnsweep.core.errors import SpecError
from attnsweep.specs import require as policy
from attnsweep.specs.load import json_schema, load_spec

MINIMAL = "problems: [{batch: 1, heads: 16, seqlen: 1024, head_dim: 64}]\nkernels: {naive: {}}\n"
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
        ("{}", {}),
        ("{spill_bytes: 0}", {"spill_bytes": ("== 0",)}),
        ("{predicated_branches: '<= 4'}", {"predicated_branches": ("<= 4",)}),
        ("{predicated_branches: '<=4'}", {"predicated_branches": ("<= 4",)}),
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
        (
            "{predicated_branch: 0}",
            "sweep.yaml:3:11: unknown key 'predicated_branch'\n"
            "  did you mean 'predicated_branches'? there are: registers",
        ),
        (
            "{registers: few}",
            "sweep.yaml:3:22: registers must be a number or a comparison, not few\n"
            "  write a number, or one of <=, >=, ==, <, > and a number: '<= 4'",
        ),
        ("{registers: -1}", "sweep.yaml:3:22: registers must be a number or a comparison"),
        ("{registers: true}", "sweep.yaml:3:22: registers must be a number or a comparison"),
        ("{registers: ['<= 4', '=< 4']}", "sweep.yaml:3:31: registers[1] must be a number or"),
        ("{registers: []}", "sweep.yaml:3:22: registers must not be empty"),
        ("4", "sweep.yaml:3:10: require must be a mapping, not 4"),
    ],
)
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
        ({"registers": ("< 169", "< 9")}, "registers: 168 (qk 168, pv 96), the spec requires < 9"),
        ({"occupancy": (">= 0.5",)}, "occupancy: 0.25 (qk 0.25, pv 0.5), the spec requires >= 0.5"),
        (
            {"predicated_branches": ("<= 4",)},
            "predicated_branches: 5 (qk 2, pv 3), the spec requires <= 4",
        ),
        ({"predicated_branches": ("<= 5",), "registers": ("< 169",)}, None),
    ],
)  # fmt: skip
def test_the_first_broken_requirement_is_named_with_its_values(asked, said):
    assert policy.broken(asked, STAGES) == said


def test_one_stage_alone_is_not_listed():
    said = policy.broken({"registers": ("< 100",)}, {"qk": STAGES["qk"]})
    assert said == "registers: 168, the spec requires < 100"


def test_only_instructions_need_a_disassembler():
    assert not policy.needs_sass({"spill_bytes": ("== 0",), "cubin_bytes": ("< 99",)})
    assert policy.needs_sass({"spill_bytes": ("== 0",), "hmma": ("> 0",)})
