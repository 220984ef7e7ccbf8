"""A Dask preload for workers that compile: what happens to stages there, as files of a folder say.

ATTNSWEEP_TEST_FAULTS names the folder. `<worker's name>.fault` holds a fault, which happens to its
stages; `once` in a second line: to the first one alone, also after the worker is started again.
`<name>.began` gets a line for each stage that the worker begins.
"""

from __future__ import annotations

import json
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
    compile_stage = dask_compile.compile_stage

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    def faulty(task: str) -> str:
        with _lock, (place / f"{name}.began").open("a") as began:
            began.write(json.loads(task)["key"] + "\n")
        said = place / f"{name}.fault"
        fault, *once = said.read_text().split() if said.exists() else [""]
        if once:
            said.unlink()
        happen(fault)
        match fault:
            case "slow":
                time.sleep(0.5)
            case "full":
                os.fsync = full  # type: ignore[assignment]
        answer = compile_stage(task)
        return json.dumps(json.loads(answer) | {"digest": "0" * 64}) if fault == "damaged" else answer

    dask_compile.compile_stage = faulty
