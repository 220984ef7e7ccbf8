"""Plans: how calls of one kind are served, and the launches by which a forward is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnsweep.family.launch import Launch

from .call import Call, CuSeqlens, bias_copied, tensors_of
from .dispatch import Choice
from .driver import BoundLaunches, Device, DriverError, StridedTensor, Unaligned
from .gradients import like
from .intervals import Diagonals, scanned
from .launcher import Launcher
from .mask_lists import MaskList
from .table import Code, PackageError

UNALIGNED = Choice(None, "alignment", "a tensor does not begin at a multiple of 16 bytes")
_empty_like, _FLOAT = torch.empty_like, torch.float32


@dataclass(slots=True, eq=False, kw_only=True)
class ServingPlan:
    """All of a kind of call that does not depend on addresses, and how its launches are made.

    calls is empty if PyTorch serves it, as it does the calls of this class: those of others have
    kernels. index: the device's, -1 for the CPU's. names: of the buffers. floats: elements of the
    workspaces. lse: whether the log-sum-exp is an output. launches: once the kernels are loaded.
    met: how often it was looked up by shapes and strides.
    """

    choice: Choice
    launcher: Any = None
    calls: Mapping[str, Launch] = field(default_factory=dict)
    stages: Mapping[str, Code] = field(default_factory=dict)
    tensors: Mapping[str, StridedTensor] = field(default_factory=dict)
    index: int = -1
    names: tuple[str, ...] = ()
    floats: tuple[int, ...] = ()
    lse: bool = False
    launches: BoundLaunches | None = None
    met: int = 0

    def run(self, _: Call) -> Any:
        """The outputs of a call; None, which is counted, if PyTorch gets it."""
        return self.launched()

    def launched(self, *_: Any) -> Any:
        """The same, of what a ForwardPlan takes of a call."""
        self.launcher.fell_back(self.choice)

    def load(self, device: Device, calls: Mapping[str, Launch]) -> BoundLaunches:
        """Load the kernels of the plan's calls. Raises DriverError or PackageError."""
        made = self.launches = device.launches(calls, self.stages, self.tensors, self.names)
        return made


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardPlan(ServingPlan):
    """The plan of a forward.

    backward: the BackwardOperator, which records the gradients of a call whose plan has the
    log-sum-exp. causal, scale: as PyTorch's own attention would get them. grouped: whether heads
    share keys. rows: sizes of the log-sum-exp. by_pytorch: PyTorch's own backward: the settings on
    which it depends, its function, causal and scale; once asked. scan: the launches that make the
    list of a mask, with names of what they write, and its places and end in memory of 32-bit words;
    scans: once they are loaded. scan_reads: the names of what they read. ranges: whether
    a call reads the keys of its items themselves. biased: whether it reads its mask itself, as
    numbers that are added to scores. copied: whether it reads a copy of that, since no tensor map
    can describe the mask. of_rows: the plan of the call with a contiguous
    query, by which it is served, if the rows of its groups are not equally far apart. short_scan:
    whether the scan of its mask outlasts the call. limits: the mask by diagonals, if the call has
    it so. out: sizes and strides of the output, if it is not like q.
    """

    launcher: Launcher
    backward: Any
    causal: bool
    scale: float
    grouped: bool
    rows: tuple[int, ...]
    by_pytorch: tuple[Any, ...] | None = None
    scan: Mapping[str, Launch] = field(default_factory=dict)
    scan_names: tuple[str, ...] = ()
    scan_places: tuple[int, ...] = ()
    scan_reads: tuple[str, ...] = ()
    scans: BoundLaunches | None = None
    ranges: bool = False
    biased: bool = False
    copied: bool = False
    of_rows: ForwardPlan | None = None
    short_scan: bool = False
    limits: Diagonals | None = None
    out: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def run(self, call: Call) -> tuple[torch.Tensor, ...] | None:
        """The output, and the log-sum-exp if it is wanted; None, which is counted, if none."""
        query, key, value, mask = call[:4]
        if self.lse and call.lse is None and self.calls:
            return (self.backward.recorded(call, self),)
        return self.launched(query, key, value, mask, call.keep, call.sinks)

    def launched(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        keep: bool = True,
        sinks: Any = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """All outputs that the plan has; None, which is counted, if nothing could be launched."""
        launcher, index = self.launcher, self.index
        if index >= 0 and index != launcher.current_device():
            with torch.cuda.device(index):
                return self.launched(query, key, value, mask, keep, sinks)
        if not self.calls or (self.short_scan and launcher.is_scanned_alone(mask, keep)):
            launcher.fell_back(SHORT_SCAN if self.calls else self.choice)
            return None
        if self.of_rows is not None:
            done = self.of_rows.launched(query.contiguous(), key, value, mask, keep, sinks)
            return None if done is None else (like(done[0], query, value), *done[1:])
        out = _empty_like(query) if self.out is None else query.new_empty_strided(*self.out)
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if not (q and k and v):  # lazy zeros have no memory
            given = (query.clone(), key.clone(), value.clone(), mask, keep, sinks)
            return self.launched(*given)
        made: tuple[torch.Tensor, ...] = (out,)
        addresses: tuple[int, ...] = (q, k, v, out.data_ptr())
        if self.lse:
            lse = query.new_empty(*self.rows, dtype=_FLOAT)  # a tuple is slow
            made, addresses = (out, lse), (*addresses, lse.data_ptr())
        if self.floats:
            spaces = [query.new_empty(count, dtype=_FLOAT) for count in self.floats]
            addresses += tuple([each.data_ptr() for each in spaces])
        stream = launcher.stream(index)
        try:
            launches = self.launches
            if launches is None:
                launches = launcher.bound(self)
            if launches is None:  # another thread has tried it in vain since this one asked
                launcher.fell_back(self.choice)
                return None
            if self.scan:
                masks = tensors_of(mask)
                listed = launcher.masks.find(masks, self, stream) if keep else None
                if listed is None:
                    listed = self._listed(query, key, mask, keep, stream)
                addresses += listed.addresses
            elif self.copied or self.ranges:
                listed = launcher.masks.find((mask,), self, stream) if keep else None
                if listed is None:
                    copy = self._ranges(query, key, mask) if self.ranges else bias_copied(mask)
                    listed = MaskList((copy.data_ptr(),), (copy,))
                    if keep:
                        launcher.masks.keep((mask,), self, stream, listed)
                addresses += listed.addresses
            elif self.biased:
                if mask.data_ptr() & 15:
                    raise Unaligned
                addresses += (mask.data_ptr(),)
            if sinks is not None:
                addresses += (sinks.data_ptr(),)
            launches.issue(addresses, stream)
        except Unaligned:
            launcher.fell_back(UNALIGNED)
            return None
        except (DriverError, PackageError) as error:
            launcher.gave_up(self, error)
            return None
        launcher.counts["kernel"] += 1
        return made

    def load(self, device: Device, calls: Mapping[str, Launch]) -> BoundLaunches:
        """Load the plan's kernels, and the scan's. Raises DriverError or PackageError."""
        if self.scan:
            names = (*self.scan_names, *self.scan_reads)
            self.scans = device.launches(self.scan, self.stages, self.tensors, names)
        return super(ForwardPlan, self).load(device, calls)  # slots make the class anew

    def _ranges(self, query: Any, key: Any, lengths: Any) -> torch.Tensor:
        """The keys of each item, as a kernel reads them."""
        return scanned("key_range", self.limits or (None, None), query, key, lengths)

    def _listed(self, query: Any, key: Any, mask: Any, keep: bool, stream: int) -> MaskList:
        """The lists of a call's mask, made in this stream now. Raises DriverError."""
        if self.scans is None:
            raise DriverError("the scan of a mask is not loaded")
        read = masks = tensors_of(mask)
        if isinstance(mask, CuSeqlens):
            read = tuple([each.to(torch.int32).contiguous() for each in masks])
        elif self.limits is not None and self.scan_reads:
            read = (scanned(self.scan_reads[0], self.limits, query, key, mask),)
        # One piece: on an H100's host each costs 2 us, a tenth of what a new mask does.
        *places, words = self.scan_places
        memory = query.new_empty(words, dtype=torch.int32)
        begin = memory.data_ptr()
        addresses = tuple([begin + 4 * place for place in places])
        self.scans.issue((*addresses, *[each.data_ptr() for each in read]), stream)
        made = MaskList(addresses, (memory,))
        if keep:
            self.launcher.masks.keep(masks, self, stream, made)
        return made

    def refused(self, call: Call) -> Choice | None:
        """Why a call goes to PyTorch though its plan has launches; None if it may be launched."""
        mapped = call[:4] if self.biased and not self.copied else call[:3]
        if any(each.data_ptr() & 15 for each in mapped):
            return UNALIGNED
        return (
            SHORT_SCAN
            if self.short_scan and self.launcher.is_scanned_alone(call.mask, call.keep)
            else None
        )


SHORT_SCAN = Choice(
    None, "short_scan", "to scan a mask that is not kept takes the host longer than the call"
)
MOST_PLANS = 4096
"""Entries of a cache: more are met only by calls whose shapes keep changing, and then the cache
starts anew, so that it never grows."""
FORKED = Choice(None, "fork", "this process was forked after CUDA was used")
TRANSFORMED = Choice(
    None, "transform", "in torch.func, torch.jit.trace, or with forward derivatives"
)
SUBCLASS = Choice(None, "subclass", "an argument is no plain tensor, or a dispatch mode is on")
