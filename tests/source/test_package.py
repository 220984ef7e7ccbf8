"""What is packed: the version from one place, metadata, and what the quickstart replays."""

import tomllib
from pathlib import Path

import pytest
import yaml

import attnsweep

ROOT = Path(__file__).parent.parent.parent
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = DECLARED["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]


def test_the_version_is_in_one_place():
    assert "version" in DECLARED["project"]["dynamic"]
    assert DECLARED["tool"]["hatch"]["version"]["path"] == "attnsweep/__init__.py"
    named = [
        path.name
        for path in [*ROOT.glob("*.toml"), *ROOT.glob("*.yml"), *(ROOT / "attnsweep").rglob("*.py")]
        if f'"{attnsweep.__version__}"' in path.read_text()
    ]
    assert named == ["__init__.py"]


def test_every_supported_python_is_declared_and_tested():
    declared = {
        word.rpartition(" :: ")[2]
        for word in DECLARED["project"]["classifiers"]
        if word.startswith("Programming Language :: Python :: 3.")
    }
    workflows = ROOT / ".github" / "workflows"
    if not workflows.is_dir():
        pytest.skip("the source distribution has no workflows")
    tested = set()
    for name in ("tests", "nightly"):
        jobs = yaml.safe_load((workflows / f"{name}.yml").read_text())["jobs"]
        for job in jobs.values():
            tested |= set(job.get("strategy", {}).get("matrix", {}).get("python", []))
    assert declared == tested
    assert DECLARED["project"]["requires-python"] == f">={min(declared)}"


def test_the_wheel_has_the_run_that_the_quickstart_replays_and_no_other():
    spec = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    runs = {str(Path(source).parent) for source in WHEEL if source.startswith("results/")}
    assert runs == {spec["recording"].removeprefix("../")}
    for source, target in WHEEL.items():
        assert (ROOT / source).exists()
        assert target.startswith("attnsweep/")
