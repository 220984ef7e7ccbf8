"""Cubins to launches through the CUDA driver, without a compiler: cuda.bindings.driver alone."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

from attnsweep.family.launch import Launch, TensorMap, l2_bytes_at_once

from .table import Code, Table

_MAP_BYTES = 128
_ALIGNMENT = 64
# Every kernel may have this much dynamic shared memory without asking.
_DEFAULT_SMEM = 48 * 1024
MOST_OF_A_KIND = 64
"""Launches that are remembered of one kind of call. More are met by calls whose addresses keep
changing: then the oldest are moved."""
MOST_READY = 4096
"""Launches that are remembered in all. More are met if shapes change: all are forgotten then."""


class DriverError(Exception):
    """The CUDA driver is missing, or refused a call."""


class Unaligned(Exception):
    """A tensor does not begin where a tensor map can."""


class StridedTensor(NamedTuple):
    """A tensor of 16 bits: (batch, heads, seqlen, head_dim), or pairs of bytes of another shape.

    strides: elements; the last one is 1.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


_Map = tuple[int, str, int, tuple[Any, ...], tuple[Any, ...]]
"""A tensor map: its offset, the name and place of its buffer among a call's addresses, and the
driver's arguments before and after the address."""


class Form(NamedTuple):
    """A launch but for addresses and stream. offsets: of each parameter in `constants`.

    pointers: offset and place.
    """

    launch: Launch
    function: Any
    constants: bytes
    offsets: list[int]
    maps: list[_Map]
    pointers: list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Ready:
    """Launches that only have to be issued, of one thread at a time: they can be moved.

    launches: config, function and address of the parameters. maps: the tensor maps among these,
    with what a Form says of them. words: 8 bytes of the parameters, and the place of the address
    that they hold. addresses, stream: where the launches are now. memory: kept alive.
    """

    launches: list[tuple[Any, Any, int]]
    maps: list[tuple[Any, _Map]]
    words: list[tuple[Any, int]]
    addresses: tuple[int, ...]
    stream: int
    memory: list[Any]


def unmapped(tensor: StridedTensor) -> tuple[str, str] | None:
    """Code and reason if no tensor map can describe a tensor of four dimensions, or None."""
    sizes, strides = tensor
    if 0 in sizes:
        return "empty", f"has no elements: {sizes}"
    if strides[3] != 1:
        return "layout", f"has no contiguous head_dim: strides {strides}"
    extent = 1
    for size, stride in zip(sizes[:3], strides[:3], strict=True):
        if size > 1 and (stride % 8 or stride < sizes[3]):
            return "layout", f"has strides {strides}: no multiples of 16 bytes, or overlapping"
        extent += (size - 1) * stride
    if extent + sizes[3] >= 2**31:
        return "too_large", "spans 2^31 elements or more"
    return None


def rows_of_group(tensor: StridedTensor, group: int) -> StridedTensor | None:
    """The queries of all heads of a group as those of one head, if they are equally far apart."""
    (batch, heads, rows, head_dim), (of_item, of_head, of_row, one) = tensor
    if rows > 1 and of_head != rows * of_row:
        return None
    sizes = (batch, heads // group, group * rows, head_dim)
    return StridedTensor(sizes, (of_item, group * of_head, of_head // rows, one))


def cuda_driver() -> Any:
    """cuda.bindings.driver. Raises DriverError without it."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"pip install cuda-bindings ({error})") from error
    return driver


class Device:
    """One device's modules and launches. No other device's context may be current in a call.

    cuda: cuda.bindings.driver, or a fake of it. index: the device's, as PyTorch counts.
    """

    def __init__(self, table: Table, cuda: Any, index: int = 0) -> None:
        self._table, self._cuda, self._index = table, cuda, index
        self._threads = threading.local()
        self._functions: dict[str, Any] = {}
        self._modules: list[Any] = []
        # Whether cuTensorMapReplaceAddress does what it should: None until it was tried.
        self._replaces: bool | None = None
        self._kept: WeakSet[BoundLaunches] = WeakSet()
        self._readied = 0
        self._lock = threading.Lock()

    def _call(self, result: tuple[Any, ...], doing: str) -> Any:
        status, *values = result
        if int(status):
            name = getattr(status, "name", str(status))
            raise DriverError(f"the CUDA driver refused {doing}: {name}")
        return values[0] if values else None

    def _enter(self) -> None:
        """Make the primary context current in a thread that has none: PyTorch may not have yet."""
        cuda = self._cuda
        context = self._call(cuda.cuCtxGetCurrent(), "to say its context")
        if not int(context):
            device = self._call(cuda.cuDeviceGet(self._index), f"device {self._index}")
            context = self._call(cuda.cuDevicePrimaryCtxRetain(device), "its primary context")
            self._call(cuda.cuCtxSetCurrent(context), "its primary context")
        self._threads.entered = True

    def function(self, code: Code, smem_bytes: int) -> Any:
        """The loaded function of a stage, allowed to have its shared memory.

        Raises PackageError for a damaged cubin, DriverError if the driver refuses it.
        """
        found = self._functions.get(code.sha256)
        if found is not None:
            return found
        with self._lock:
            if code.sha256 not in self._functions:
                self._functions[code.sha256] = self._load(code, smem_bytes)
            return self._functions[code.sha256]

    def _load(self, code: Code, smem_bytes: int) -> Any:
        cuda, data = self._cuda, self._table.code(code)
        # A stream of this thread may be capturing a graph; loading is no part of it.
        relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._call(cuda.cuThreadExchangeStreamCaptureMode(relaxed), "a capture mode")
        try:
            module = self._call(cuda.cuModuleLoadData(data), f"to load {code.file}")
            self._modules.append(module)
            name = code.function.encode()
            function = self._call(cuda.cuModuleGetFunction(module, name), f"{code.function}")
            if smem_bytes > _DEFAULT_SMEM:
                most = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                doing = f"{smem_bytes} bytes of shared memory"
                self._call(cuda.cuFuncSetAttribute(function, most, smem_bytes), doing)
        finally:
            cuda.cuThreadExchangeStreamCaptureMode(before)
        return function

    def launches(
        self,
        calls: Mapping[str, Launch],
        stages: Mapping[str, Code],
        tensors: Mapping[str, StridedTensor],
        names: Sequence[str],
    ) -> BoundLaunches:
        """Launches on tensors of these sizes and strides, which `issue` enqueues anywhere.

        names: of the buffers, in the order in which `issue` gets their addresses. Raises
        PackageError or DriverError.
        """
        self._enter()
        places = {name: place for place, name in enumerate(names)}
        forms = [self._form(call, stages[name], tensors, places) for name, call in calls.items()]
        made = BoundLaunches(self, tuple(forms))
        with self._lock:
            self._kept.add(made)
        return made

    def _form(
        self,
        launch: Launch,
        code: Code,
        tensors: Mapping[str, StridedTensor],
        places: Mapping[str, int],
    ) -> Form:
        offsets: list[int] = []
        maps: list[_Map] = []
        pointers: list[tuple[int, int]] = []
        # Maps first: they are aligned, and everything after them to 8 bytes.
        count = sum(isinstance(arg, TensorMap) for arg in launch.args)
        constants = bytearray(count * _MAP_BYTES)
        for arg in launch.args:
            if isinstance(arg, TensorMap):
                offsets.append(len(maps) * _MAP_BYTES)
                name = arg.buffer
                told = self._described(arg, tensors[name])
                maps.append((offsets[-1], name, places[name], *told))
                continue
            offsets.append(len(constants))
            if isinstance(arg, str):
                constants += struct.pack("=Q", 0)
                if arg:
                    pointers.append((offsets[-1], places[arg]))
            else:
                constants += struct.pack("=f4x" if isinstance(arg, float) else "=i4x", arg)
        function = self.function(code, launch.smem_bytes)
        return Form(launch, function, bytes(constants), offsets, maps, pointers)

    def ready(self, forms: Sequence[Form], addresses: tuple[int, ...], stream: int) -> Ready:
        """The launches at these addresses and on this stream. Raises DriverError."""
        if not getattr(self._threads, "entered", False):
            self._enter()  # encoding a tensor map needs a context too
        self._readied += 1
        if self._readied > MOST_READY:
            with self._lock:
                self._readied = 1
                for each in self._kept:
                    each.forget()
        made = Ready([], [], [], addresses, stream, [])
        for form in forms:
            self._add(made, form)
        return made

    def _add(self, made: Ready, form: Form) -> None:
        cuda, call = self._cuda, form.launch
        memory = (ctypes.c_uint8 * (len(form.constants) + _ALIGNMENT))()
        at = ctypes.addressof(memory) + -ctypes.addressof(memory) % _ALIGNMENT
        ctypes.memmove(at, form.constants, len(form.constants))
        for told in form.maps:
            own = cuda.CUtensorMap(_ptr=at + told[0])
            self._encode(own, told, made.addresses[told[2]])
            made.maps.append((own, told))
        for offset, place in form.pointers:
            word = ctypes.c_uint64.from_address(at + offset)
            word.value = made.addresses[place]
            made.words.append((word, place))
        parameters = (ctypes.c_uint64 * len(form.offsets))(*[at + o for o in form.offsets])
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = call.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = call.threads, 1, 1
        config.sharedMemBytes = call.smem_bytes
        config.hStream = cuda.CUstream(made.stream)
        if call.programmatic:
            attribute = cuda.CUlaunchAttribute()
            ids = cuda.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.numAttrs, config.attrs = 1, [attribute]
        else:
            config.numAttrs = 0
        made.launches.append((config, form.function, ctypes.addressof(parameters)))
        made.memory += (memory, parameters)

    def move(self, ready: Ready, addresses: tuple[int, ...], stream: int) -> None:
        """Take launches to other addresses of tensors that are alike, and to another stream.

        This costs a fraction of `ready`: a launch copies its parameters, so that they are free to
        change once it is enqueued. Raises DriverError; the launches are of no use then.
        """
        if not getattr(self._threads, "entered", False):
            self._enter()
        if self._replaces is None:
            self._replaces = self._can_replace(ready, addresses)
        replace, before = self._cuda.cuTensorMapReplaceAddress, ready.addresses
        for own, told in ready.maps:
            address = addresses[told[2]]
            if address == before[told[2]]:
                continue
            if not self._replaces:
                self._encode(own, told, address)
                continue
            (status,) = replace(own, address)
            if status:
                self._call((status,), f"the tensor map of {told[1]}, at {address:#x}")
        for word, place in ready.words:
            word.value = addresses[place]
        if stream != ready.stream:
            own_stream = self._cuda.CUstream(stream)
            for config, _, _ in ready.launches:
                config.hStream = own_stream
        ready.addresses, ready.stream = addresses, stream

    def _encode(self, own: Any, told: tuple[Any, ...], address: int) -> None:
        """Write the tensor map of a buffer at an address."""
        _, name, _, before, after = told
        status, encoded = self._cuda.cuTensorMapEncodeTiled(*before, address, *after)
        if int(status):
            self._call((status,), f"the tensor map of {name}, at {address:#x}")
        ctypes.memmove(own.getPtr(), encoded.getPtr(), _MAP_BYTES)

    def _can_replace(self, ready: Ready, addresses: tuple[int, ...]) -> bool | None:
        """Whether a map whose address is replaced has the bytes of one that is encoded there.

        None if no tensor is elsewhere, so that nothing can be compared.
        """
        memory = (ctypes.c_uint8 * (2 * _MAP_BYTES + _ALIGNMENT))()
        at = ctypes.addressof(memory) + -ctypes.addressof(memory) % _ALIGNMENT
        replaced, encoded = (self._cuda.CUtensorMap(_ptr=at + n * _MAP_BYTES) for n in (0, 1))
        alike = None
        for _, told in ready.maps:
            before, after = ready.addresses[told[2]], addresses[told[2]]
            if before == after:
                continue
            self._encode(replaced, told, before)
            self._encode(encoded, told, after)
            (status,) = self._cuda.cuTensorMapReplaceAddress(replaced, after)
            both = ctypes.string_at(at, 2 * _MAP_BYTES)
            if int(status) or both[:_MAP_BYTES] != both[_MAP_BYTES:]:
                return False
            alike = True
        return alike

    def _described(
        self, box: TensorMap, tensor: StridedTensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments of cuTensorMapEncodeTiled before and after the address."""
        cuda, rank = self._cuda, len(tensor.sizes)
        columns, *outer = tensor.sizes[::-1]
        # The stride of a dimension of one element is never used, but must be one that could be.
        unused = -(-columns // 8) * 8
        strides = [
            2 * (stride if size > 1 else unused)
            for size, stride in zip(outer, tensor.strides[-2::-1], strict=True)
        ]
        of_64 = cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B
        of_128 = cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
        of_l2 = cuda.CUtensorMapL2promotion
        # A sweep's map may have panels where a model's has heads: then a box is of one head. A box
        # that lacks bytes is waited for without end.
        own = box.box if columns == box.dims[0] else box.box[:2]
        before = (cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, rank)
        after = (
            [cuda.cuuint64_t(size) for size in (columns, *outer)],
            [cuda.cuuint64_t(stride) for stride in strides],
            [cuda.cuuint32_t(size) for size in (*own, *[1] * rank)[:rank]],
            [cuda.cuuint32_t(1)] * rank,
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            {64: of_64, 128: of_128}[box.swizzle_bytes],
            {
                128: of_l2.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                256: of_l2.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            }[l2_bytes_at_once(strides)],
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return before, after

    def issue(self, ready: Ready) -> None:
        """Enqueue launches; nothing waits. Raises DriverError."""
        if not getattr(self._threads, "entered", False):
            self._enter()
        launch = self._cuda.cuLaunchKernelEx
        for config, function, parameters in ready.launches:
            (status,) = launch(config, function, parameters, 0)
            if status:
                self._call((status,), "a launch")


class BoundLaunches:
    """The launches of one kind of call on a device, remembered by addresses and stream."""

    def __init__(self, device: Device, forms: tuple[Form, ...]) -> None:
        self._device, self._forms = device, forms
        self._mapped = any(form.maps for form in forms)  # a scan takes bytes wherever they begin
        # The least recently used first. What a thread uses is not in here, so it has it alone.
        self._ready: dict[tuple[tuple[int, ...], int], Ready] = {}

    def forget(self) -> None:
        """Free what is remembered."""
        self._ready.clear()

    def issue(self, addresses: tuple[int, ...], stream: int) -> None:
        """Enqueue the launches; nothing waits. Raises DriverError, or Unaligned.

        addresses: in the order of the names that Device.launches got; those of q, k and v first, if
        there are tensor maps.
        """
        what = (addresses, stream)
        ready = self._ready.pop(what, None)
        if ready is None:
            ready = self._at(addresses, stream)
        self._device.issue(ready)
        self._ready[what] = ready

    def _at(self, addresses: tuple[int, ...], stream: int) -> Ready:
        if self._mapped:
            q, k, v = addresses[:3]
            if (q | k | v) & 15 or not (q and k and v):
                raise Unaligned
        if len(self._ready) >= MOST_OF_A_KIND:
            try:
                ready = self._ready.pop(next(iter(self._ready)))
            except (KeyError, RuntimeError, StopIteration):  # another thread was faster
                pass
            else:
                self._device.move(ready, addresses, stream)
                return ready
        return self._device.ready(self._forms, addresses, stream)
