"""The simulator of `attnsweep verify`, by the name that these tests have for it."""

import sys

from attnsweep.tools import simulator

sys.modules[__name__] = simulator
