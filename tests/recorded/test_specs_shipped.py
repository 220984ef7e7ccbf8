"""Which file a spec's name stands for, and the specs that attnsweep ships."""

import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from spaces import candidates
from specs import MINIMAL, ROOT, SCHEMA

from attnsweep.core.errors import SpecError
from attnsweep.core.hardware import arch_named
from attnsweep.family.discover import discover
from attnsweep.specs.load import json_schema, load_spec, schema_text
from attnsweep.specs.shipped import shipped_specs


class TestWhichFile:
    def test_missing(self, tmp_path):
        with pytest.raises(SpecError) as caught:
            load_spec(tmp_path / "h20.yaml")
        assert str(caught.value) == (f"{tmp_path}/h20.yaml: no such file\n  did you mean 'h200'? {HINT}")

    def test_a_directory(self, tmp_path):
        with pytest.raises(SpecError, match="is a directory, not a spec") as caught:
            load_spec(tmp_path)
        assert caught.value.hint == HINT
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
HINT = "attnsweep list --specs: those that there are; attnsweep init: write one"


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
            {"problems": [{"batch": 1, "heads": 1, "head_dim": 64}]},
            {"problems": [{"batch": True, "heads": 1, "head_dim": 64, "seqlen": 8}]},
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

    def test_the_quickstart_asks_for_what_was_measured(self):
        quickstart = load_spec(Path("quickstart"))
        assert quickstart.recording == ROOT / "results" / "h100-80gb-hbm3" / "h100"
        recorded = load_spec(quickstart.recording / "spec.yaml")
        assert quickstart.kernels == recorded.kernels
        assert set(quickstart.baselines) <= set(recorded.baselines)  # those that it recorded
        assert set(quickstart.problems) <= set(recorded.problems)
