"""Call an autotuned function once, as a program without attnsweep does, and print what was chosen.

A process of calls_reach.py, whose seconds from start to end are `triton.autotune`'s. Argument: JSON of the file, the
function, the shapes of its tensors in order with their dtypes, and its keywords.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner


def values_of(config: Any) -> dict[str, Any]:
    """A config as attnsweep names its values."""
    options = {name: getattr(config, name) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
    return {**config.kwargs, **options}


def main() -> None:
    """Print the chosen config, and the median of each one's times in milliseconds."""
    asked = json.loads(sys.argv[1])
    sys.path.insert(0, ".")
    module = importlib.import_module(asked["file"])
    tensors = [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape, dtype in asked["tensors"]]
    getattr(module, asked["function"])(*tensors, **asked["keywords"])
    torch.cuda.synchronize()
    (tuner,) = (each for each in vars(module).values() if isinstance(each, Autotuner))
    timings = getattr(tuner, "configs_timings", None) or {}  # none if a config alone was left
    times_ms = [(values_of(c), t[0] if isinstance(t, (list, tuple)) else t) for c, t in timings.items()]
    found = {"chosen": values_of(tuner.best_config), "times_ms": times_ms, "triton": triton.__version__}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
