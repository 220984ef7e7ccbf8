"""A CUDA driver that records what it is asked: stands in for cuda.bindings.driver in tests."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class Status(IntEnum):
    """Results of driver calls."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_IMAGE = 200


class TensorMap:
    """The 128 bytes of a tensor map: here a number, by which the driver knows what it encoded."""

    def __init__(self, _ptr: int = 0) -> None:
        self._bytes = ctypes.create_string_buffer(128)
        self._ptr = _ptr or ctypes.addressof(self._bytes)

    def getPtr(self) -> int:
        """Address of the bytes."""
        return self._ptr


# What the bytes say: which encoding made them, and the address. A real map's are not known.
_NUMBER_AND_ADDRESS = "=24xQ40xQ"
# Kinds of parameters: maps, int32, float32, and pointers by what is loaded through them at once: 16
# bytes, 8, a word of 4, or a byte.
_READ = {"m": _NUMBER_AND_ADDRESS, "i": "=i", "f": "=f"} | dict.fromkeys("pdwb", "=Q")
_AT_ONCE = {"m": 64, "p": 16, "d": 8, "w": 4}


class FakeDriver:
    """Records loaded modules, encoded maps and launches; `on_launch` may compute something.

    refuses: names of calls that return an error. Nothing that a launch says is kept by address: its
    parameters are read at once, as the driver does.
    """

    CUtensorMapDataType = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_UINT16=1)
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
    CUtensorMapSwizzle = SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_64B=2, CU_TENSOR_MAP_SWIZZLE_128B=3)
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_128B=2, CU_TENSOR_MAP_L2_PROMOTION_L2_256B=3)
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUlaunchConfig = SimpleNamespace
    CUtensorMap = TensorMap
    cuuint64_t = cuuint32_t = CUstream = staticmethod(int)

    def __init__(self, on_launch: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.modules: list[bytes] = []
        self.maps: list[dict[str, Any]] = []
        self.replaced = 0
        self.launches: list[dict[str, Any]] = []
        self.shared: dict[str, int] = {}
        self.capture_modes = [0]
        self.contexts = threading.local()
        self.retained = 0
        self.refuses: set[str] = set()
        self.on_launch = on_launch

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        """One attribute of a launch."""
        return SimpleNamespace(value=SimpleNamespace())

    def _status(self, name: str) -> Status:
        refused = name in self.refuses
        return Status.CUDA_ERROR_INVALID_VALUE if refused else Status.CUDA_SUCCESS

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Any, ...]:
        """The mode before."""
        self.capture_modes.append(mode)
        return Status.CUDA_SUCCESS, self.capture_modes[-2]

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        """The thread's context, 0 for none."""
        return Status.CUDA_SUCCESS, getattr(self.contexts, "current", 0)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        """A device."""
        return self._status("cuDeviceGet"), index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        """A device's context."""
        self.retained += 1
        return Status.CUDA_SUCCESS, 1000 + device

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        """Of this thread."""
        self.contexts.current = context
        return (Status.CUDA_SUCCESS,)

    def cuModuleLoadData(self, data: bytes) -> tuple[Any, ...]:
        """A module."""
        self.modules.append(data)
        return self._status("cuModuleLoadData"), len(self.modules) - 1

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:
        """A function, here the module's number and the name."""
        return self._status("cuModuleGetFunction"), (module, name.decode())

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> tuple[Any, ...]:
        """Shared memory is the only attribute asked for."""
        self.shared[function] = value
        return (self._status("cuFuncSetAttribute"),)

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[Any, ...]:
        """Checks what the driver checks of sizes, strides and addresses."""
        if not getattr(self.contexts, "current", 0):
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        _, rank, pointer, dims, strides, box, steps, _, swizzle, promotion, _ = arguments
        sound = pointer % 16 == 0 and all(stride % 16 == 0 for stride in strides)
        sound = sound and all(0 < stride < 2**40 for stride in strides) and all(dims)
        sound = sound and len(dims) == len(box) == len(steps) == rank == len(strides) + 1
        if not sound or "cuTensorMapEncodeTiled" in self.refuses:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        made = {"pointer": pointer, "dims": dims, "strides": strides, "box": box}
        made |= {"promotion": promotion}
        self.maps.append(made | {"swizzle": swizzle})
        encoded = TensorMap()
        alike = [made | {"pointer": 0, "swizzle": swizzle} == one | {"pointer": 0} for one in self.maps]
        content = struct.pack(_NUMBER_AND_ADDRESS, alike.index(True), pointer)
        ctypes.memmove(encoded.getPtr(), content, len(content))
        return Status.CUDA_SUCCESS, encoded

    def cuTensorMapReplaceAddress(self, tensor_map: Any, pointer: int) -> tuple[Any, ...]:
        """Writes the address, and nothing else."""
        if pointer % 16 or "cuTensorMapReplaceAddress" in self.refuses:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.replaced += 1
        at = tensor_map.getPtr() + struct.calcsize(_NUMBER_AND_ADDRESS) - 8
        ctypes.memmove(at, struct.pack("=Q", pointer), 8)
        return (Status.CUDA_SUCCESS,)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> Any:
        """Reads the parameters as the function's signature says."""
        if "cuLaunchKernelEx" in self.refuses or not getattr(self.contexts, "current", 0):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        kinds: Sequence[str] = "mmmmwp" + "iiiii" + "f" + "iiii"
        code = self.modules[function[0]]
        masked = re.search(rb" (boolean|window|padded|packed) ", code)
        scored = re.search(rb" (softcap|sinks|bias) ", code)
        of_window = "ii" if masked else ""
        of_window += "di" if b" padded " in code else ""
        if function[1] == "flash_bwd_wgmma_delta":
            kinds = "ppwppp" + "ii" + "f" + "i" + "iii" * 2
        elif function[1] == "flash_bwd_wgmma_queries":
            kinds = "mmmmm" + "ppwpp" + "iiiiii" + "ff" + of_window + "i" + "iii" * 2
        elif function[1] == "flash_bwd_wgmma_keys":
            kinds = "mmmmmm" + "ppp" + "iiiiii" + "ff" + of_window + "i"
        elif function[1] == "flash_bwd_wgmma_convert":
            kinds = "pp" + "ii" + "f" + "i" + "iii"
        elif function[1] == "flash_fwd_wide_wgmma":
            kinds = "mmmmm" + "wpwd" + "iiiiiii" + "f"
        elif function[1].endswith("_combine"):
            kinds = "pwpw" + "ii" + "iiii"
        elif b"ITEM_KEYS=1" in code and function[1].endswith("_mask"):
            kinds = ("bp" if b" boolean " in code else "dp") + "p" + "ii" + "iiii"
        elif b"ITEM_KEYS=1" in code:
            kinds = "mmmmwp" + "iiiii" + "f" + "pp" + "ii" + "iiii"
        elif function[1].endswith("_mask"):
            kinds = "bdww" + "ppp" + "iiiiii" + "iiiii"
        elif function[1].endswith("_order"):
            kinds = ("pp" if b" boolean " in code else "pw") + "iii" + "pw" + "iii"
        elif masked or scored:
            kinds = "mmmmwp" + "iiiii" + "f"
            kinds += "pppw" + "iii" if masked else ""
            kinds += "mfw" + "iiii" if scored else ""
            kinds += "iiii"
        elif function[1] == "flash_fwd_fp8_wgmma":
            kinds = "mmmm" + "wwww" + "iiiii" + "f"
        addresses = (ctypes.c_uint64 * len(kinds)).from_address(parameters)
        values: list[Any] = []
        for kind, address in zip(kinds, addresses, strict=True):
            how = _READ[kind]
            read = struct.unpack(how, ctypes.string_at(address, struct.calcsize(how)))
            if kind in _AT_ONCE:
                at = address if kind == "m" else read[0]
                assert at % _AT_ONCE[kind] == 0, f"{function[1]} reads {_AT_ONCE[kind]} bytes at {at:#x}"
            values.append(self.maps[read[0]] | {"pointer": read[1]} if kind == "m" else read[0])
        if isinstance(config, SimpleNamespace):
            config = SimpleNamespace(**vars(config))  # as it is now
        launch = {"function": function, "config": config, "values": values, "code": code}
        self.launches.append(launch)
        if self.on_launch is not None:
            self.on_launch(launch)
        return (Status.CUDA_SUCCESS,)
