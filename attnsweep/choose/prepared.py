"""What is prepared before anything can be timed, told to whoever shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from attnsweep.build.observer import Observer
from attnsweep.gpu.worker import Gpu


@contextmanager
def prepared(what: str, gpu: Gpu, observer: Observer) -> Iterator[None]:
    """Tell what was prepared inside: its seconds, and those of the GPU process's steps."""
    began = time.monotonic()
    try:
        yield
    finally:
        steps_s = dict(gpu.steps_s)
        gpu.steps_s.clear()
        observer.prepared(what, time.monotonic() - began, steps_s)
