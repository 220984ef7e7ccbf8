"""Looks into a CUDA graph of a stranger's calls while it is captured.

It may have kernels, copies and fills, on the device and one call after the other: no work of a call
may begin before the call before it has ended.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

# Kinds of nodes by their numbers in cuda.h: kernel, copy, fill, none (where streams meet), memory
# taken and given back. _GRAPH is a graph of its own.
_MAY, _GRAPH = {0, 1, 2, 5, 10, 11}, 4
_KINDS = {3: "a host function", 6: "a wait for an event", 7: "a record of an event"}


class Driver:
    """The CUDA driver's calls that read a captured graph and its nodes.

    Raises OSError or AttributeError without a driver, or with an old one.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        names = ["StreamGetCaptureInfo_v2", "GraphGetNodes", "GraphNodeGetType"]
        names += ["GraphChildGraphNodeGetGraph", "GraphGetEdges_v2"]
        self._calls = {name: getattr(library, f"cu{name}") for name in names}

    def _call(self, name: str, of: int, *to: Any) -> None:
        if status := self._calls[name](ctypes.c_void_p(of), *to):
            raise RuntimeError(f"cu{name} gave the error {status}")

    def captured(self, stream: int) -> tuple[int, list[int]]:
        """The graph that a stream captures, and the nodes that its next one would follow."""
        graph, count, last = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.POINTER(ctypes.c_void_p)()
        every = (ctypes.c_int(), ctypes.c_uint64(), graph, last, count)
        self._call("StreamGetCaptureInfo_v2", stream, *map(ctypes.byref, every))
        return graph.value or 0, [last[i] or 0 for i in range(count.value)]

    def count(self, graph: int) -> int:
        """Nodes of a graph."""
        count = ctypes.c_size_t()
        self._call("GraphGetNodes", graph, None, ctypes.byref(count))
        return count.value

    def nodes(self, graph: int) -> list[int]:
        """All nodes of a CUDA graph."""
        count = ctypes.c_size_t(self.count(graph))
        found = (ctypes.c_void_p * count.value)()
        self._call("GraphGetNodes", graph, found, ctypes.byref(count))
        return [one or 0 for one in found]

    def kind(self, node: int) -> int:
        """The node's type, as a number of cuda.h."""
        kind = ctypes.c_int(-1)
        self._call("GraphNodeGetType", node, ctypes.byref(kind))
        return kind.value

    def inside(self, node: int) -> int:
        """The graph inside a child-graph node."""
        graph = ctypes.c_void_p()
        self._call("GraphChildGraphNodeGetGraph", node, ctypes.byref(graph))
        return graph.value or 0

    def edges(self, graph: int) -> list[tuple[int, int, bool]]:
        """A node, one after it, and whether that may begin before it ends: a programmatic edge."""
        count = ctypes.c_size_t()
        self._call("GraphGetEdges_v2", graph, None, None, None, ctypes.byref(count))
        if not count.value:  # the driver calls it an error to ask for none
            return []
        one, other = ((ctypes.c_void_p * count.value)() for _ in range(2))
        data = (ctypes.c_uint8 * 8 * count.value)()
        self._call("GraphGetEdges_v2", graph, one, other, data, ctypes.byref(count))
        every = zip(one, other, data, strict=True)
        return [(before or 0, after or 0, bytes(how)[2] == 1) for before, after, how in every]


@functools.cache
def driver() -> Driver | None:
    """This machine's; None without one that tells all of it, as before CUDA 12.3."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


class Audit:
    """The audit of one capture. Call `mark` before and after each of a stranger's calls."""

    def __init__(self, graphs: Driver, stream: int) -> None:
        self._graphs, self._stream = graphs, stream
        self._marks: list[tuple[int, list[int]]] = []

    def mark(self) -> None:
        """A call begins or ends here."""
        graph, last = self._graphs.captured(self._stream)
        self._marks.append((self._graphs.count(graph), last))

    def why_not(self) -> str:
        """Why the graph is refused, before its capture ends; empty if it is not."""
        graph, _ = self._graphs.captured(self._stream)
        return self._of_kinds(graph) or self._of_order(graph)

    def _of_kinds(self, graph: int) -> str:
        for node in self._graphs.nodes(graph):
            kind = self._graphs.kind(node)
            if kind == _GRAPH:
                if why := self._of_kinds(self._graphs.inside(node)):
                    return why
            elif kind not in _MAY:
                return f"its graph holds {_KINDS.get(kind, f'a node of kind {kind}')}"
        return ""

    def _of_order(self, graph: int) -> str:
        before: dict[int, list[tuple[int, bool]]] = {}
        for node, after, early in self._graphs.edges(graph):
            before.setdefault(after, []).append((node, early))
        done: set[int] = set()  # nodes before the mark before
        last: set[int] = set()  # those of them that what follows must follow
        for count, ends in self._marks:
            new: set[int] = set()
            left = list(ends)
            while left:
                if (node := left.pop()) not in done and node not in new:
                    new.add(node)
                    left += [one for one, _ in before.get(node, ())]
            if len(done) + len(new) != count:
                return "work of one of its calls goes on beside the next"
            for node in new:
                follows = before.get(node, [])
                beside = any(one in done and one not in last for one, _ in follows)
                if beside or (last and not follows):
                    return "work of one of its calls begins before the one before it ends"
                if any(early and one in last for one, early in follows):
                    return "one of its calls may begin before the one before it ends"
            done |= new
            last = set(ends)
        return ""
