"""Moved to attnsweep.family.family; this name goes with the next release."""

import warnings

from attnsweep.family.family import *  # noqa: F403
from attnsweep.family.family import Family

Kernel = Family

warnings.warn(
    "attnsweep.family.declare goes with the next release: use attnsweep.family.family",
    DeprecationWarning,
    stacklevel=2,
)
