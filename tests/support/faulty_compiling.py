"""A Dask preload for workers that compile: what happens to stages there, as files of a folder say.

ATTNSWEEP_TEST_FAULTS names the folder. `<worker's name>.fault` holds a fault, which happens to its
stages; `once` in a second line: to the first one alone, also after the worker is started again.
`<name>.began` gets a line for each stage that the worker begins.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from faults import happen

from attnsweep.sweep import dask_compile

_lock = threading.Lock()


def dask_setup(worker: Any) -> None:
    """Stand in front of the worker's compiling."""
    place, name = Path(os.environ["ATTNSWEEP_TEST_FAULTS"]), str(worker.name)
    compiled = dask_compile._compiled

    def faulty(source: Path, asked: Any) -> dict[str, Any]:
        with _lock, (place / f"{name}.began").open("a") as began:
            began.write(asked["key"] + "\n")
        said = place / f"{name}.fault"
        fault, *once = said.read_text().split() if said.exists() else [""]
        if once:
            said.unlink()
        happen(fault)
        match fault:
            case "slow":
                time.sleep(0.5)
            case "full":
                raise OSError(28, "No space left on device")
        answer = compiled(source, asked)
        return answer | {"digest": "0" * 64} if fault == "damaged" else answer

    dask_compile._compiled = faulty
