"""What must hold while a CUDA graph is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: a finalizer that waits for the device ends the capture.

    On an H100 cuDNN's handle of the problem before was destroyed in a capture: the process died.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
