"""Several fake cards with the real compiler: it is in one process, and compiles each stage once."""

from cuda.bindings import nvrtc
from fake_cards import FakeCards

from attnsweep.core.trial import Status
from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.sweep import session
from attnsweep.sweep.fleet import Fleet

SPEC = """
problems:
  - {batch: [1, 2], heads: 2, seqlen: [256, 512], head_dim: 64}
kernels: {naive: {THREADS: [32, 64, 128]}}
baselines: []
measure: {rounds: 4}
"""


def test_a_stage_that_two_cards_need_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    times = {f"THREADS={threads}": 10.0 + threads for threads in (32, 64, 128)}
    cards = FakeCards(tmp_path, times=times, together=2, nvrtc=True)
    programs, create = [], nvrtc.nvrtcCreateProgram
    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", lambda *of: programs.append(of) or create(*of))
    path = tmp_path / "test.yaml"
    path.write_text(SPEC)
    asked = {"results": tmp_path / "results", "cache_dir": tmp_path / "cache"}
    fleet = Fleet(cards.cards, start_child=cards.start_child)
    outcome = session.run(load_spec(path, discover()), fleet, **asked)
    assert outcome.exit_code == 0
    assert len(outcome.run.trials) == 12
    assert {t.status for t in outcome.run.trials} == {Status.OK}
    assert {t.resources.registers > 0 for t in outcome.run.trials} == {True}
    assert len({t.machine["uuid"] for t in outcome.run.trials}) == 2
    assert programs
    assert len(list((tmp_path / "cache").rglob("stage.cubin"))) == len(programs)
