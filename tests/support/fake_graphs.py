"""Captured graphs without a driver."""

from __future__ import annotations

from attnsweep.device.graph_audit import Driver


class FakeGraphs(Driver):
    """Nodes are numbered from 1 on; each new one follows `last`, the nodes that the stream follows.

    `add` is what streams do in a capture. early: it may begin before those that it follows end.
    inside: the kinds of a node that is a graph.
    """

    def __init__(self) -> None:
        self.last: list[int] = []
        self._kinds: list[int] = []
        self._edges: list[tuple[int, int, bool]] = []
        self._inside: dict[int, list[int]] = {}

    def add(
        self, kind: int = 0, after: list[int] | None = None, *, early: bool = False, inside: tuple[int, ...] = ()
    ) -> int:
        """A node after these, or on the stream after its last ones, whose next one follows it."""
        self._kinds.append(kind)
        node = len(self._kinds)
        self._edges += [(one, node, early) for one in (self.last if after is None else after)]
        if after is None:
            self.last = [node]
        if inside:
            self._inside[-node] = [*inside]
        return node

    def captured(self, stream: int) -> tuple[int, list[int]]:
        return 0, [*self.last]

    def count(self, graph: int) -> int:
        return len(self._kinds)

    def nodes(self, graph: int) -> list[int]:
        if graph:
            return [10**6 * graph - kind for kind in self._inside[graph]]
        return [*range(1, len(self._kinds) + 1)]

    def kind(self, node: int) -> int:
        return self._kinds[node - 1] if node > 0 else -node % 10**6

    def inside(self, node: int) -> int:
        return -node

    def edges(self, graph: int) -> list[tuple[int, int, bool]]:
        return self._edges
