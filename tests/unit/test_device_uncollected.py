"""No garbage is collected while a graph is captured, whatever another thread imports meanwhile."""

import gc
import threading

import pytest

from attnsweep.device.cuda_graph import uncollected


def test_a_thread_that_ends_first_lets_nothing_be_collected_in_a_capture():
    inside, captured = threading.Event(), threading.Event()

    def imports():
        with uncollected():
            inside.set()
            captured.wait(10)

    thread = threading.Thread(target=imports)
    thread.start()
    inside.wait(10)
    with uncollected():
        captured.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_off_stays_off_and_what_raises_leaves_it_as_it_was():
    with pytest.raises(ValueError, match="within"), uncollected(), uncollected():
        raise ValueError("within")
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
