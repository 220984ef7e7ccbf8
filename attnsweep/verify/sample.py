"""Which tiles of queries are judged, where float64 on all of them would outlast the sweep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnsweep.core.cases import TILE
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.verify.reference import rows_with_keys

# FLOPs of the device's float64 reference on a problem and its opposite.
_MOST_FLOPS = 2e13


@dataclass(frozen=True, slots=True)
class Sample:
    """Tiles of 64 queries that are judged, of every head: the first, the last, each `every`-th.

    Of the others it is only known that each element is a finite number, and the same in all calls.
    """

    every: int = 1
    phase: int = 0

    @classmethod
    def of(cls, problem: Problem, seed: int) -> Sample:
        """The sample of a timed problem: all tiles, if they cost 2e13 FLOPs at most.

        Where none stand for others it is all: plan() takes no such problem that is long.
        """
        if not problem.op.sampled:
            return cls()
        every = max(1, ceil_div(2 * problem.flops, int(_MOST_FLOPS)))
        return cls(every, int(np.random.default_rng((seed, 3)).integers(every)))

    def tiles(self, problem: Problem) -> npt.NDArray[np.int64]:
        """Numbers of the judged tiles of a head."""
        last = ceil_div(problem.seqlen_q, TILE) - 1
        chosen = np.arange(self.phase, last + 1, self.every)
        return np.unique([0, *chosen.tolist(), last])

    def moved(self, rows: npt.NDArray[np.int64], problem: Problem) -> npt.NDArray[np.int64]:
        """Rows of a head, each in the next tile that is judged."""
        tiles = self.tiles(problem)
        to = tiles[np.searchsorted(tiles, rows // TILE)]
        return np.unique(np.minimum(to * TILE + rows % TILE, problem.seqlen_q - 1))

    def rows(self, problem: Problem) -> int:
        """How many rows that see a key are judged, of all heads."""
        judged = np.isin(np.arange(problem.seqlen_q) // TILE, self.tiles(problem))
        return problem.heads * int((rows_with_keys(problem) & judged).sum())


ALL = Sample()
