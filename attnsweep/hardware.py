"""Moved to attnsweep.core.hardware; this name goes with the next release."""

import warnings

from attnsweep.core.hardware import *  # noqa: F403

warnings.warn(
    "attnsweep.hardware goes with the next release: use attnsweep.core.hardware",
    DeprecationWarning,
    stacklevel=2,
)
