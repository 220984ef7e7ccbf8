"""Specs that ship, changed at random: each is refused with a place and words, or means the same when read again."""

from pathlib import Path

import changes
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specs import ROOT

from attnsweep.core.errors import AttnsweepError
from attnsweep.core.hardware import arch_named
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan, plan_facts

SPECS = [*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "examples" / "factories.yaml"]
TEXTS = [path.read_text() for path in SPECS if path.stem != "three_kernel_tuned"]  # 30,000 candidates
one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def families():
    return discover()


@one_folder
@given(st.randoms(), st.sampled_from(TEXTS))
def test_a_changed_spec_is_refused_in_words_or_read_again_as_it_is(tmp_path, families, rng, text):
    path, again = tmp_path / "changed.yaml", tmp_path / "again.yaml"
    changed = changes.of_spec(rng, text)
    path.write_text(changed, encoding="utf-8", newline="")

    def read(path: Path):
        spec = load_spec(path, lambda own: families if own is None else discover(own))
        called = any(selection.call for selection in spec.kernels.values())
        return spec, [] if called else plan_facts(plan(spec, arch_named("sm_90a")), None)

    try:
        spec, planned = read(path)
    except AttnsweepError as error:
        said = error.render()
        assert (len(said) < 10_000, said.count("\n") < 50) == (True, True), said
        return
    again.write_text(spec.resolved(tmp_path), encoding="utf-8")
    assert read(again) == (spec, planned)
