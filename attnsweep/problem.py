"""Moved to attnsweep.core.problem; this name goes with the next release."""

import warnings

from attnsweep.core.problem import *  # noqa: F403

warnings.warn(
    "attnsweep.problem goes with the next release: use attnsweep.core.problem",
    DeprecationWarning,
    stacklevel=2,
)
