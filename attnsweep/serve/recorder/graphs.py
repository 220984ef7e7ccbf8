"""Calls in CUDA graphs."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from .log import Log


class Graphs:
    """Counts calls in CUDA graphs: those of a capture do not run, and each replay runs them all."""

    def __init__(self, log: Log, graph_class: Any) -> None:
        self._log, self._class = log, graph_class
        self._of: weakref.WeakKeyDictionary[Any, Counter[int]] = weakref.WeakKeyDictionary()
        self.capturing: Counter[int] | None = None
        """Slots of the capture that is under way."""
        names = ("capture_begin", "capture_end", "replay")
        self._own = {name: getattr(graph_class, name) for name in names}
        self._inherited = [name for name in names if name not in vars(graph_class)]
        graphs, own = self, self._own

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            done = own["capture_begin"](graph, *args, **kwargs)
            graphs.capturing = graphs._of[graph] = Counter()
            return done

        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            graphs.capturing = None
            return own["capture_end"](graph, *args, **kwargs)

        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            for slot, calls in graphs._of.get(graph, {}).items():
                log.add(slot, calls)
            return own["replay"](graph, *args, **kwargs)

        for function in (capture_begin, capture_end, replay):
            setattr(graph_class, function.__name__, function)

    def add(self, slot: int, on_gpu: bool) -> None:
        """Count a call: now, or with each replay if it is being captured."""
        captured = self.capturing
        if captured is not None and on_gpu and _stream_captures():
            captured[slot] += 1
        else:
            self._log.add(slot)

    def stop(self) -> None:
        """Give the class its own methods back."""
        for name, own in self._own.items():
            if name in self._inherited:
                delattr(self._class, name)
            else:
                setattr(self._class, name, own)


def _stream_captures() -> bool:
    import torch

    return bool(torch.cuda.is_current_stream_capturing())
