"""The parent of several cards compiles for them: fake cards, real NVRTC."""

from collections import Counter

from fake_cards import FakeCards
from fleets import TIMES, is_whole, swept

from attnsweep.compile import nvrtc
from attnsweep.device.lock import LOCK_VARIABLE


def test_each_stage_is_compiled_once_for_all_cards(tmp_path, monkeypatch):
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    compiled, compile_ = Counter(), nvrtc._compile

    def counted(source, flags):
        compiled[source.name, *flags] += 1
        return compile_(source, flags)

    monkeypatch.setattr(nvrtc, "_compile", counted)
    outcome, _ = swept(tmp_path, FakeCards(tmp_path, times=TIMES, nvrtc=True))
    assert is_whole(outcome)
    assert len([name for name, *_ in compiled if name == "simple.cu"]) == 3
    assert set(compiled.values()) == {1}
