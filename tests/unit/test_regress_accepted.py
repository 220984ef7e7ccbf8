"""Every recorded run as the next baseline of `check`: accepted, or why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnsweep.core.trial import PROTOCOL
from attnsweep.store.run import open_run

RESULTS = Path(__file__).parent.parent.parent / "results"
RUNS = sorted(path.parent for path in RESULTS.glob("*/*/trials.jsonl.gz"))


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("directory", RUNS, ids=lambda path: path.name)
def test_a_recorded_run_is_accepted_or_is_an_older_version_s(accept, directory, tmp_path):
    """Those that an older version wrote say so, and how to go on; nothing else is refused."""
    code, out, err = accept(directory, tmp_path / "baseline")
    if code == 0:
        assert err == ""
        assert "is now" in out
    else:
        assert open_run(directory).environment.protocol != PROTOCOL
        assert code == 2
        assert "not accepted: recorded by an older version of attnsweep" in err
        assert f"record it anew: attnsweep run {directory}/spec.yaml --fresh" in err
        assert not (tmp_path / "baseline").exists()


def test_a_place_that_cannot_be_written_is_named_with_the_remedy(accept, tmp_path):
    (tmp_path / "taken").touch()
    code, _, err = accept(RESULTS / "h200" / "flash_short", tmp_path / "taken" / "baseline")
    assert code == 2
    assert "Errno" not in err
    assert f"{tmp_path}/taken must be a writable directory with room for a copy" in err
