"""A card that is not there: tensors without memory, and what launchers ask of a card."""

from __future__ import annotations

import ctypes
import dis
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnsweep.compile.traced import warm
from attnsweep.core.hardware import ARCHS, Arch
from attnsweep.core.problem import Problem
from attnsweep.core.user_code import type_of

_TORCH, _COMPILER = (os.path.dirname(of.__file__) + os.sep for of in (torch, triton.compiler))


class NoCard(Exception):
    """A call asks for what only a card, or a process that has one, can do."""


_RAISE = dis.opmap["RAISE_VARARGS"]


def cannot_be_traced(error: BaseException | None) -> bool:
    """Whether a call ended since there is no card, or no value of a tensor: that is no fault of it.

    That is what PyTorch raises, whatever it is: on a card PyTorch raises it again if it is another
    fault. What Triton's compiler or a `raise` of other code raises is a fault.
    """
    is_fault = True
    while error is not None:
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, NoCard)):
            return True
        raised_at, compiles = error.__traceback__, False
        while raised_at is not None and raised_at.tb_next is not None:
            raised_at = raised_at.tb_next
            compiles |= raised_at.tb_frame.f_code.co_filename.startswith(_COMPILER)
        if compiles or raised_at is None:
            return False
        code = raised_at.tb_frame.f_code
        of_torch = code.co_filename.startswith(_TORCH)
        is_fault = not of_torch and (
            not isinstance(error, RuntimeError) or code.co_code[raised_at.tb_lasti] == _RAISE
        )
        error = error.__cause__ or error.__context__
    return not is_fault


def _plain(mode: type[Any]) -> type[Any]:
    """A mode without what keeps torch.compile, which a trace has none of, out of it."""
    mode.__torch_dispatch__ = inspect.unwrap(mode.__torch_dispatch__)
    return mode


@_plain
class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Digests the tensor operations of a call: what the host does beside launching."""

    def __init__(self) -> None:
        super().__init__()
        self._digest = hashlib.sha256()
        self.unseen = ""
        """An operator that may launch kernels, which no trace sees; empty if there is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take an operation down, and do it."""
        if func.namespace not in ("aten", "prim", "prims"):
            self.unseen = func.name()
        said = [
            func.name(),
            *map(_said, args),
            *(f"{n}={_said(v)}" for n, v in (kwargs or {}).items()),
        ]
        self._digest.update("\0".join(said).encode())
        return func(*args, **(kwargs or {}))

    @property
    def digest(self) -> str:
        """SHA-256 of the operations so far."""
        return self._digest.hexdigest()


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_said, value))}]"
    return repr(value)


@_plain
class _NoCard(FakeTensorMode):  # type: ignore[misc]
    """FakeTensorMode as it is without a card, though `is_available` says that there is one.

    Indexing and `contiguous` ask CUDA for the current device otherwise.
    """

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # of outputs, whose keys need SymPy


@contextmanager
def no_card(arch: Arch, *, real: bool = False) -> Iterator[None]:
    """PyTorch as it is on a card of this architecture, as far as launchers ask before a launch.

    real: tensors have memory, of the host.
    """
    major, minor = arch.compute_capability
    facts = _Facts(
        name=f"a card of {arch.name}",
        major=major,
        minor=minor,
        multi_processor_count=arch.sm_count,
        max_threads_per_multi_processor=arch.max_threads_per_sm,
        max_threads_per_block=1024,
        regs_per_multiprocessor=arch.registers_per_sm,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=arch.smem_per_block,
        shared_memory_per_multiprocessor=arch.smem_per_sm,
        warp_size=32,
        total_memory=1 << 36,
    )

    def stream(device: Any = None) -> _Facts:
        return _Facts(cuda_stream=0)

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: facts,  # noqa: ARG005
        "get_device_capability": lambda device=None: (major, minor),  # noqa: ARG005
        "get_device_name": lambda device=None: facts.name,  # noqa: ARG005
        "current_stream": stream,
        "default_stream": stream,
        "synchronize": lambda device=None: None,  # noqa: ARG005
        "set_device": lambda device: None,  # noqa: ARG005
        "_exchange_device": lambda device: 0,  # noqa: ARG005
        "_maybe_exchange_device": lambda device: 0,  # noqa: ARG005
        "_lazy_init": lambda: None,
        "cudart": _Facts,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # Which has a build for CUDA ask for a tensor of the card's own memory.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        if not real:
            stack.enter_context(mock.patch.object(torch, "compile", _compiles))
            of_compiled = partial(_compile_nothing, stack)
            of_compiled()
            stack.enter_context(mock.patch.object(warm, "after_dynamo", of_compiled))
            stack.enter_context(mock.patch.object(FakeTensor, "__dlpack__", _exported))
            on_host = mock.patch.object(FakeTensor, "__dlpack_device__", return_value=_HOST)
            stack.enter_context(on_host)
            stack.enter_context(_NoCard())
        yield


_HOST = (1, 0)
"""A device as DLPack has it."""


def _exported(tensor: FakeTensor, **_: Any) -> Any:
    """A tensor as other libraries take it: of the host's memory, which nothing reads."""
    with fake_tensor.unset_fake_temporarily():
        real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return real.__dlpack__()


class _Facts(SimpleNamespace):
    """What launchers ask of a card's properties, or of a stream."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoCard(f"{name} of a card, or of a stream, is known on a card alone")


def _compile_nothing(stack: ExitStack) -> None:
    """Patch what functions call that torch.compile has made, if its modules are there."""
    if dynamo := sys.modules.get("torch._dynamo.convert_frame"):
        stack.enter_context(mock.patch.object(dynamo.CatchErrorsWrapper, "__call__", _compiles))


def _compiles(*_: Any, **__: Any) -> Any:
    raise NoCard("what torch.compile makes of it launches other kernels")


def inputs_of(problem: Problem) -> list[FakeTensor]:
    """A call's inputs in the order of `problem.values`: contiguous, without memory."""
    tensors = {tensor.name: tensor for tensor in problem.op.inputs(problem)}
    kinds = {name: type_of(torch, tensors[name].dtype) for name in problem.values}
    return [
        torch.empty(problem.shape_of(name), dtype=kind, device="cuda")
        for name, kind in kinds.items()
    ]


def warm_up() -> None:
    """Prepare this process, which has no card, to make tensors of one.

    PyTorch imports what it needs for the first, which each fork spares.
    """
    with suppress(OSError, ValueError):  # slices and iterations ask what guards a device in C++
        library = ctypes.CDLL(os.path.join(_TORCH, "lib", "libc10.so"))
        guards = (ctypes.c_void_p * 2).in_dll(library, _GUARDS)
        guards[1] = guards[0]  # of the host, which does nothing
    with no_card(next(iter(ARCHS.values()))):
        torch.empty_like(
            torch.empty(1, 2, 3, 4, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        )


_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""c10::impl::device_guard_impl_registry: an entry for each type of device, CPU and CUDA first."""
