"""Cubins to launches through the CUDA driver, without a compiler: cuda.bindings.driver alone."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .launch import Call, Map, Pointer
from .table import Code, Table

_MAP_BYTES = 128
_ALIGNMENT = 64
# Every kernel may have this much dynamic shared memory without asking.
_DEFAULT_SMEM = 48 * 1024


class DriverError(Exception):
    """The CUDA driver is missing, or refused a call."""


class Tensor(NamedTuple):
    """A tensor of 16 bits: (batch, heads, seqlen, head_dim), or pairs of bytes of another shape.

    strides: elements; the last one is 1.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Form(NamedTuple):
    """A launch but for addresses and stream. offsets: of each parameter in `constants`.

    maps: offset, buffer, and what the driver is told before and after the address. pointers: offset
    and buffer.
    """

    call: Call
    function: Any
    constants: bytes
    offsets: list[int]
    maps: list[tuple[int, str, tuple[Any, ...], tuple[Any, ...]]]
    pointers: list[tuple[int, str]]


class Ready(NamedTuple):
    """A launch that only has to be issued. memory: what its addresses point to, kept alive."""

    config: Any
    function: Any
    parameters: int
    memory: tuple[Any, ...]


def unmapped(tensor: Tensor) -> tuple[str, str] | None:
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

    def prepare(
        self, calls: Sequence[Call], stages: Mapping[str, Code], tensors: Mapping[str, Tensor]
    ) -> tuple[Form, ...]:
        """Launches on tensors of these sizes and strides. Raises PackageError or DriverError."""
        self._enter()
        return tuple(self._form(call, stages[call.stage], tensors) for call in calls)

    def _form(self, call: Call, code: Code, tensors: Mapping[str, Tensor]) -> Form:
        offsets: list[int] = []
        maps: list[tuple[int, str, tuple[Any, ...], tuple[Any, ...]]] = []
        pointers: list[tuple[int, str]] = []
        # Maps first: they are aligned, and everything after them to 8 bytes.
        count = sum(isinstance(arg, Map) for arg in call.args)
        constants = bytearray(count * _MAP_BYTES)
        for arg in call.args:
            if isinstance(arg, Map):
                offsets.append(len(maps) * _MAP_BYTES)
                maps.append((offsets[-1], arg.buffer, *self._described(arg, tensors[arg.buffer])))
                continue
            offsets.append(len(constants))
            if isinstance(arg, Pointer):
                constants += struct.pack("=Q", 0)
                if arg.buffer:
                    pointers.append((offsets[-1], arg.buffer))
            else:
                constants += struct.pack("=f4x" if isinstance(arg, float) else "=i4x", arg)
        function = self.function(code, call.smem_bytes)
        return Form(call, function, bytes(constants), offsets, maps, pointers)

    def ready(
        self, forms: Sequence[Form], pointers: Mapping[str, int], stream: int
    ) -> tuple[Ready, ...]:
        """The launches at these addresses and on this stream. Raises DriverError."""
        if not getattr(self._threads, "entered", False):
            self._enter()  # encoding a tensor map needs a context too
        return tuple(self._ready(form, pointers, stream) for form in forms)

    def _ready(self, form: Form, pointers: Mapping[str, int], stream: int) -> Ready:
        cuda, call = self._cuda, form.call
        memory = (ctypes.c_uint8 * (len(form.constants) + _ALIGNMENT))()
        at = ctypes.addressof(memory) + -ctypes.addressof(memory) % _ALIGNMENT
        ctypes.memmove(at, form.constants, len(form.constants))
        for offset, buffer, before, after in form.maps:
            status, encoded = cuda.cuTensorMapEncodeTiled(*before, pointers[buffer], *after)
            if int(status):
                self._call((status,), f"the tensor map of {buffer}, at {pointers[buffer]:#x}")
            ctypes.memmove(at + offset, encoded.getPtr(), _MAP_BYTES)
        for offset, buffer in form.pointers:
            ctypes.c_uint64.from_address(at + offset).value = pointers[buffer]
        addresses = (ctypes.c_uint64 * len(form.offsets))(*[at + o for o in form.offsets])
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = call.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = call.threads, 1, 1
        config.sharedMemBytes = call.smem_bytes
        config.hStream = cuda.CUstream(stream)
        if call.programmatic:
            attribute = cuda.CUlaunchAttribute()
            ids = cuda.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.numAttrs, config.attrs = 1, [attribute]
        else:
            config.numAttrs = 0
        return Ready(config, form.function, ctypes.addressof(addresses), (memory, addresses))

    def _described(self, box: Map, tensor: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments of cuTensorMapEncodeTiled before and after the address."""
        cuda, rank = self._cuda, len(tensor.sizes)
        columns, *outer = tensor.sizes[::-1]
        # The stride of a dimension of one element is never used, but must be one that could be.
        strides = [
            2 * (stride if size > 1 else columns)
            for size, stride in zip(outer, tensor.strides[-2::-1], strict=True)
        ]
        of_64 = cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B
        of_128 = cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
        before = (cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, rank)
        after = (
            [cuda.cuuint64_t(size) for size in (columns, *outer)],
            [cuda.cuuint64_t(stride) for stride in strides],
            [cuda.cuuint32_t(size) for size in (*box.box, *[1] * (rank - 2))],
            [cuda.cuuint32_t(1)] * rank,
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            {32: of_64, 64: of_128}[box.box[0]],
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return before, after

    def issue(self, launches: Sequence[Ready]) -> None:
        """Enqueue launches; nothing waits. Raises DriverError."""
        if not getattr(self._threads, "entered", False):
            self._enter()
        launch = self._cuda.cuLaunchKernelEx
        for ready in launches:
            (status,) = launch(ready.config, ready.function, ready.parameters, 0)
            if int(status):
                self._call((status,), "a launch")
