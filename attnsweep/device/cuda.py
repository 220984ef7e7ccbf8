"""The GPU of this process: guarded buffers, modules, launches, graphs and event timing (CuPy).

Only the worker process imports CuPy, through this module. Everything here may raise a CUDA error,
which `worker` turns into a row.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnsweep.compile.launches import CompiledStage
from attnsweep.core import files
from attnsweep.core.errors import NoGpuError
from attnsweep.core.hardware import CardFacts, arch_of
from attnsweep.device.buffers import _cupy
from attnsweep.device.cards import hashed, text
from attnsweep.device.cuda_graph import uncollected
from attnsweep.family.family import Launch, TensorMap
from attnsweep.family.launch import l2_bytes_at_once

if TYPE_CHECKING:
    from attnsweep.device.buffers import Buffer

# Every GPU with clusters has room for clusters of this many blocks.
_PORTABLE_CLUSTER = 8

# Reasons among NVML's clock events for a clock below the requested one (nvml.h).
_THROTTLE = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x20: "thermal_software",
    0x40: "thermal_hardware",
    0x80: "power_brake",
}


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports; None without a driver, or if it does not answer."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) or not version.value:
        return None
    return version.value // 1000, version.value % 1000 // 10


class CudaSession:
    """The GPU that this process owns. Raises NoGpuError if there is no usable one."""

    def __init__(self) -> None:
        if driver_cuda() is None:  # first, because no package fixes a missing driver
            raise NoGpuError(
                "no NVIDIA driver (libcuda.so.1 cannot be loaded), so no GPU can be used here"
            )
        cupy = _cupy()
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise NoGpuError(_no_gpu(error)) from error
        if count == 0:
            raise NoGpuError("no CUDA GPU found")
        self._cupy = cupy
        cupy.cuda.Device(0).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._streams = [self.stream]
        self._events = (cupy.cuda.Event(), cupy.cuda.Event())
        self._marks: list[Any] = []
        self._functions: dict[tuple[str, str], Any] = {}
        self.gpu = self._describe()

    def _describe(self) -> CardFacts:
        runtime = self._cupy.cuda.runtime
        facts = runtime.getDeviceProperties(0)
        capability = (int(facts["major"]), int(facts["minor"]))
        arch = arch_of(capability)
        if arch is None:
            raise NoGpuError(
                f"{facts['name'].decode()} has compute capability {capability[0]}.{capability[1]}, "
                "which attnsweep does not support",
                hint="attnsweep/core/hardware.py lists the supported ones",
            )
        attribute = runtime.deviceGetAttribute  # CUDA 13 has no clocks among the properties
        rates = (runtime.cudaDevAttrClockRate, runtime.cudaDevAttrMemoryClockRate)
        clock_khz, memory_khz = (attribute(rate, 0) for rate in rates)
        bus_bits = attribute(runtime.cudaDevAttrGlobalMemoryBusWidth, 0)
        return CardFacts(
            name=facts["name"].decode(),
            arch=arch.name,
            sm_count=int(facts["multiProcessorCount"]),
            clock_hz=clock_khz * 1e3,
            memory_bytes=int(facts["totalGlobalMem"]),
            memory_bytes_per_second=2.0 * memory_khz * 1e3 * bus_bits / 8,
            l2_bytes=int(facts["l2CacheSize"]),
        )

    @property
    def free_bytes(self) -> int:
        """Device memory that can still be allocated, with the unused blocks of CuPy's pool."""
        free, _ = self._cupy.cuda.runtime.memGetInfo()
        return int(free) + int(self._cupy.get_default_memory_pool().free_bytes())

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the driver (the newest CUDA that it supports), the runtime, and CuPy."""
        runtime = self._cupy.cuda.runtime
        return {
            "cuda_driver": _dotted(runtime.driverGetVersion()),
            "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
            "cupy": str(self._cupy.__version__),
        }

    def release(self) -> None:
        """Free the pool's unused blocks, so that other libraries can use the memory."""
        self._cupy.get_default_memory_pool().free_all_blocks()

    def marks(self, count: int) -> list[Any]:
        """`count` events that only order work."""
        return [self._cupy.cuda.Event(disable_timing=True) for _ in range(count)]

    def function(self, cubin: str, launch: Launch) -> Any:
        """The loaded function of a stage. CuPy keeps modules by path; a path means one content."""
        key = cubin, launch.function
        if key not in self._functions:  # a trial binds a dozen launches of the same code
            self._functions[key] = self._loaded(cubin, launch.function)
            self._allow_cluster(self._functions[key])
        function = self._functions[key]
        # Never lower it: another launch of the same code may be bound to more.
        if launch.smem_bytes > max(48 * 1024, function.max_dynamic_shared_size_bytes):
            function.max_dynamic_shared_size_bytes = launch.smem_bytes
        if launch.carveout >= 0:
            function.preferred_shared_memory_carveout = launch.carveout
        return function

    def _loaded(self, cubin: str, name: str) -> Any:
        if not cubin.endswith(".xz"):
            return self._cupy.RawModule(path=cubin).get_function(name)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(files.read_code(cubin))
            file.flush()
            return self._cupy.RawModule(path=file.name).get_function(name)

    def kernel(self, cubin: str, name: str, smem_bytes: int = 0) -> Any:
        """A function of a cubin, allowed to have smem_bytes of dynamic shared memory."""
        function = self._cupy.RawModule(path=cubin).get_function(name)
        if smem_bytes > max(48 * 1024, function.max_dynamic_shared_size_bytes):
            function.max_dynamic_shared_size_bytes = smem_bytes
        return function

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        """A function that replays a graph of what `issue` enqueues on the stream."""
        with self.stream, uncollected():
            self.stream.begin_capture()
            try:
                issue()
            finally:
                graph = self.stream.end_capture()
        graph.upload(self.stream)
        return lambda: graph.launch(self.stream)

    def _allow_cluster(self, function: Any) -> None:
        """Let the function have clusters of more blocks than every GPU with clusters promises.

        The driver is asked how many blocks `__cluster_dims__` gave: a stored cubin does not say it.
        """
        from cuda.bindings import driver

        names, handle = driver.CUfunction_attribute, driver.CUfunction(function.kernel.ptr)
        width = names.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
        status, blocks = driver.cuFuncGetAttribute(width, handle)
        if int(status) or blocks <= _PORTABLE_CLUSTER:  # a driver without clusters knows no width
            return
        allowed = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        (status,) = driver.cuFuncSetAttribute(handle, allowed, 1)
        if int(status):
            raise self._cupy.cuda.driver.CUDADriverError(int(status))

    def streams(self, count: int) -> list[Any]:
        """The session's stream, and as many more as make `count`, to which a call may fork."""
        while len(self._streams) < count:
            self._streams.append(self._cupy.cuda.Stream(non_blocking=True))
        return self._streams[:count]

    def blocks_per_sm(self, stage: CompiledStage) -> int:
        """Resident blocks of one SM, as the driver counts them."""
        function = self.function(stage.cubin, stage.launch)
        return int(
            self._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                function.kernel.ptr, stage.launch.threads, stage.launch.smem_bytes
            )
        )

    def bind(self, stage: CompiledStage, buffers: Mapping[str, Buffer]) -> Callable[[], None]:
        """A function that launches the stage with these buffers on the current stream."""
        launch = stage.launch
        function = self.function(stage.cubin, launch)

        def pointer(name: str) -> int:
            return buffers[name].pointer + stage.offsets.get(name, 0)

        args: list[Any] = []
        for arg in launch.args:
            if isinstance(arg, TensorMap):
                args.append(_encode(arg, pointer(arg.buffer)))
            elif isinstance(arg, str):
                args.append(np.uint64(pointer(arg)))
            elif isinstance(arg, float):
                args.append(np.float32(arg))
            else:
                args.append(np.int32(arg))
        grid, block, packed = launch.grid, (launch.threads, 1, 1), tuple(args)
        smem_bytes = launch.smem_bytes

        if launch.programmatic:
            return self._programmatic(function, stage, packed)

        def run() -> None:
            function(grid, block, packed, shared_mem=smem_bytes)

        return run

    def _programmatic(
        self, function: Any, stage: CompiledStage, packed: tuple[Any, ...]
    ) -> Callable[[], None]:
        """Launch through the driver, because CuPy's own launch takes no attributes."""
        from cuda.bindings import driver

        launch = stage.launch
        values = [np.ascontiguousarray(value) for value in packed]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        attribute, ids = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
        config.sharedMemBytes = launch.smem_bytes
        config.hStream = driver.CUstream(self.streams(stage.stream + 1)[-1].ptr)
        config.numAttrs, config.attrs = 1, [attribute]
        handle = function.kernel.ptr

        def run(keep: object = values) -> None:
            (status,) = driver.cuLaunchKernelEx(config, handle, int(pointers.ctypes.data), 0)
            if int(status):
                raise self._cupy.cuda.driver.CUDADriverError(int(status))

        return run

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """A host array in page-locked memory."""
        memory = self._cupy.cuda.alloc_pinned_memory(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, math.prod(shape)).reshape(tuple(shape))

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Let a profiler that waits for a start see the launches inside this context."""
        runtime = self._cupy.cuda.runtime
        runtime.profilerStart()
        try:
            yield
            self.synchronize()
        finally:
            runtime.profilerStop()

    def synchronize(self) -> None:
        """Wait for the stream. Raises the error of any earlier launch."""
        self.stream.synchronize()

    def settle(self) -> None:
        """Wait for all work of the device, such as copies that the host only began."""
        self._cupy.cuda.runtime.deviceSynchronize()

    def time_us(self, work: Callable[[], None], then: Callable[[], None] | None = None) -> float:
        """Device time of the work that `work` enqueues on the stream. then: enqueues more work."""
        begin, end = self._events
        begin.record(self.stream)
        work()
        end.record(self.stream)
        if then is not None:
            then()
        return self.elapsed_us(begin, end)

    def record(self) -> Any:
        """An event that is recorded on the stream now."""
        event = self._cupy.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        """Wait until the device has come to a recorded event."""
        event.synchronize()

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Device time between two recorded events; waits for the second."""
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) * 1e3

    def spans_us(self, work: Sequence[Callable[[], None]]) -> list[float]:
        """Device time of each in turn; they are enqueued at once, with nothing between them."""
        while len(self._marks) <= len(work):
            self._marks.append(self._cupy.cuda.Event())
        self._marks[0].record(self.stream)
        for each, mark in zip(work, self._marks[1:], strict=False):
            each()
            mark.record(self.stream)
        self._marks[len(work)].synchronize()
        elapsed = self._cupy.cuda.get_elapsed_time
        return [
            float(elapsed(begin, end)) * 1e3
            for begin, end in itertools.pairwise(self._marks[: len(work) + 1])
        ]

    def nvml(self) -> tuple[Any, Any]:
        """NVML and its handle of this card. Raises ImportError or an NVMLError."""
        import pynvml

        pynvml.nvmlInit()
        bus = self._cupy.cuda.runtime.deviceGetPCIBusId(0)
        return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())

    def sm_mhz(self) -> float | None:
        """The SM clock now; None without nvidia-ml-py, or if the driver refuses."""
        try:
            pynvml, card = self.nvml()
            return float(pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM))
        except Exception:  # ImportError, or any of NVML's own errors
            return None

    def identity(self) -> dict[str, Any]:
        """This card's hashed uuid, sku and power_limit_w, without what NVML does not know."""
        try:
            pynvml, card = self.nvml()
        except Exception:  # as above
            return {}
        found: dict[str, Any] = {}
        with contextlib.suppress(pynvml.NVMLError):
            pci = pynvml.nvmlDeviceGetPciInfo(card)
            found["sku"] = f"{pci.pciDeviceId:08x}:{pci.pciSubSystemId:08x}"
            found["sku"] += f" {text(pynvml.nvmlDeviceGetBoardPartNumber(card))}"
        with contextlib.suppress(pynvml.NVMLError):
            found["uuid"] = hashed(text(pynvml.nvmlDeviceGetUUID(card)))
        with contextlib.suppress(pynvml.NVMLError):
            found["power_limit_w"] = pynvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1e3
        return found

    def settings(self) -> dict[str, Any]:
        """The settings of this card that NVML reports, by name and unit."""
        try:
            nvml, card = self.nvml()
        except Exception:  # as above
            return {}
        clock = nvml.nvmlDeviceGetApplicationsClock
        asked: dict[str, tuple[Any, ...]] = {
            "power limit (mW)": (nvml.nvmlDeviceGetEnforcedPowerLimit, card),
            "SM clock for programs (MHz)": (clock, card, nvml.NVML_CLOCK_SM),
            "memory clock for programs (MHz)": (clock, card, nvml.NVML_CLOCK_MEM),
            "compute mode": (nvml.nvmlDeviceGetComputeMode, card),
        }
        found: dict[str, Any] = {}
        for name, (ask, *of) in asked.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = ask(*of)
        return found

    def conditions(self) -> dict[str, Any]:
        """Clocks, power, temperature, throttle reasons and other processes on the GPU, now.

        Empty without nvidia-ml-py, or if the driver refuses. NVML lists this process too, in a
        container perhaps under another id, so one process is subtracted.
        """
        try:
            pynvml, card = self.nvml()
            reasons = int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(card))
            return {
                "sm_mhz": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
                "memory_mhz": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM),
                "power_w": pynvml.nvmlDeviceGetPowerUsage(card) / 1e3,
                "temperature_c": pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU),
                "throttle": [name for bit, name in _THROTTLE.items() if reasons & bit],
                "other_processes": max(
                    0, len(pynvml.nvmlDeviceGetComputeRunningProcesses(card)) - 1
                ),
            }
        except Exception:  # as above
            return {}

    def reset_l2(self) -> None:
        """Reset persisting lines of the L2 to normal."""
        from cuda.bindings import driver

        driver.cuCtxResetPersistingL2Cache()  # cards without such lines refuse: nothing is lost

    def poisoned(self, error: BaseException) -> bool:
        """Whether `error` left this context unusable; the process must then end."""
        if not isinstance(error, cuda_errors()):
            return False
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError:
            return True
        return False


@functools.lru_cache(maxsize=4096)
def _encode(tensor_map: TensorMap, pointer: int) -> np.ndarray[Any, Any]:
    """The 128 bytes of a tensor map, as an array that CuPy passes by value.

    They say where a tensor lies and in what boxes it is moved, so that most are asked for again:
    by the next candidate with such boxes, on the same case.
    """
    from cuda.bindings import driver

    rank = len(tensor_map.dims)
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[tensor_map.swizzle_bytes]
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        rank,
        pointer,
        [driver.cuuint64_t(size) for size in tensor_map.dims],
        [driver.cuuint64_t(stride) for stride in tensor_map.strides],
        [driver.cuuint32_t(size) for size in tensor_map.box],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(swizzle),
        driver.CUtensorMapL2promotion({128: 2, 256: 3}[l2_bytes_at_once(tensor_map.strides)]),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise ValueError(f"the driver refuses the tensor map {tensor_map}: {status.name}")
    # Copy it to an aligned array: objects of the binding lie at 48 modulo 64.
    raw = np.zeros(128 + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    raw[begin : begin + 128] = np.frombuffer(ctypes.string_at(encoded.getPtr(), 128), np.uint8)
    return raw[begin : begin + 128].view("V128")


def cuda_errors() -> tuple[type[Exception], ...]:
    """The exceptions that CuPy raises when CUDA refuses or faults."""
    cupy = _cupy()
    return (
        cupy.cuda.runtime.CUDARuntimeError,
        cupy.cuda.driver.CUDADriverError,
        cupy.cuda.memory.OutOfMemoryError,
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _no_gpu(error: Exception) -> str:
    said = str(error).split(":")[0]
    if "InsufficientDriver" in str(error):
        return f"no NVIDIA driver, or one too old for this CuPy's CUDA ({said})"
    return f"no CUDA GPU found ({said})"
