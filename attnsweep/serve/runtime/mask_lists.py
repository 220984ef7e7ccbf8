"""Lists of tiles that kernels read of masks, kept while the mask lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Masks = tuple[torch.Tensor, ...]
MOST_LISTS, MOST_BYTES = 64, 2**29
"""A model makes one or two masks in a forward. Past this count or these bytes, the oldest go."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskList:
    """addresses: of what a call reads. memory: keeps it alive."""

    addresses: tuple[int, ...]
    memory: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps alive."""
        return sum(each.untyped_storage().nbytes() for each in self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    # A weak reference to each, where it was, and how often PyTorch knew that it was written to.
    masks: tuple[tuple[Callable[[], Any], int, int], ...]
    plan: Any  # kept, so that no other has its number
    stream: int
    capture: int
    made: MaskList


class MaskLists:
    """The lists of masks that are alive, by mask and by plan: what a kernel needs of one.

    A mask is met again if the very tensor is alive, at its address, and PyTorch's version counter
    says that nobody has written to it: autograd's own criterion. It misses writes through `.data`,
    DLPack, raw kernels and replays of CUDA graphs that fill a mask from outside: `cache=False` of a
    call is for those. While a CUDA graph is captured, only what the same capture has scanned is met
    again: a replay must scan what it is given then. The list of a mask that follows from sizes
    alone has no tensor to be met by: its plan stands for it.

    capture_of: the number of the CUDA graph that a stream is capturing, 0 if none, None if unknown.
    """

    def __init__(self, capture_of: Callable[[int], int | None]) -> None:
        self._capture_of = capture_of
        self._kept: dict[tuple[int, ...], _Kept] = {}

    def find(self, masks: Masks, plan: Any, stream: int) -> MaskList | None:
        """The list of an unchanged mask that `keep` got in this stream, or None.

        masks: the tensors that say it: a mask, lengths, or where sequences begin. None of them: the
        plan alone says it.
        """
        kept = self._kept.get((*map(id, masks), id(plan)))
        if kept is None or kept.stream != stream or kept.capture != self._capture_of(stream):
            return None
        # In a model every layer asks so; as a generator in `any` it took twice as long.
        for mask, (own, address, version) in zip(masks, kept.masks, strict=True):
            if own() is not mask or mask.data_ptr() != address or mask._version != version:
                return None
        return kept.made

    def keep(self, masks: Masks, plan: Any, stream: int, made: MaskList) -> None:
        """Remember what was made of a mask in a stream, if a change of it would show."""
        capture = self._capture_of(stream)
        inference = any(mask.is_inference() for mask in masks)  # it has no version
        if inference or capture is None:  # or nothing would show
            return
        what = (*map(id, masks), id(plan))

        def gone(_: Any, what: tuple[int, ...] = what) -> None:
            self._kept.pop(what, None)

        room = MOST_BYTES - made.nbytes
        if room < 0:
            return
        while (
            len(self._kept) >= MOST_LISTS
            or sum(each.made.nbytes for each in [*self._kept.values()]) > room
        ):
            self._kept.pop(next(iter(self._kept)), None)
        own = tuple((weakref.ref(m, gone), m.data_ptr(), m._version) for m in masks)
        self._kept[what] = _Kept(own, plan, stream, capture, made)

    def forget(self) -> None:
        """Scan each mask anew from now on."""
        self._kept.clear()
