"""Tensors of a call in Triton's interpreter: inputs between guards, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from attnsweep.compile.traced.fake import no_card
from attnsweep.compile.traced.triton import AskedTooMuch, Recorder, on_card
from attnsweep.core.errors import Unavailable
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.core.user_code import BoundFunction, breach, split, type_of

# Bytes on each side of an input: all of its bits are set, which is NaN, or -1.
_GUARD = 1 << 16


class Inputs:
    """The inputs of a call, of files in a folder."""

    def __init__(self, problem: Problem, folder: Path) -> None:
        # Memory that a call takes is NaN until it writes to it.
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.problem, self.tensors, self._whole = problem, [], dict[str, Any]()
        tensors = {tensor.name: tensor for tensor in problem.op.inputs(problem)}
        for name in problem.values:
            bits = np.ascontiguousarray(np.load(folder / f"{name}.npy"))
            memory = torch.full((bits.nbytes + 2 * _GUARD,), 255, dtype=torch.uint8)
            inside = memory[_GUARD : _GUARD + bits.nbytes]
            inside.copy_(torch.from_numpy(bits.reshape(-1).view(np.uint8)))
            self.tensors.append(inside.view(type_of(torch, tensors[name].dtype)).view(bits.shape))
            self._whole[name] = memory, memory.clone()

    def check(self) -> None:
        """Raises Unavailable if a call wrote to one, or next to it."""
        for name, (memory, before) in self._whole.items():
            if not torch.equal(memory, before):
                raise Unavailable(f"wrote to its input {name}, or next to it")


class _Interpreted(Recorder):
    """Gives the autotuner of a call its config; launches run."""

    @contextmanager
    def recording(self, arch: Arch) -> Iterator[None]:
        """See Recorder."""
        with (
            on_card(arch, "cpu"),
            mock.patch.object(Autotuner, "run", self.autotuner()),
            mock.patch.object(interpreter, "_patch_lang_tensor", _with_index),
        ):
            yield


_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """Tensors of one number as bounds of loops: Triton 3.6 fails on them from NumPy 2.4 on."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def called(call: str, function: Any, given: Inputs, values: Mapping[str, Any], arch: Arch) -> Any:
    """Call a callable, and return its output. Raises Unavailable with what it raised."""
    own, left = split(function, values)
    bound = BoundFunction(torch, given.problem, call, function, values=own)
    recorder = _Interpreted(left)
    with no_card(arch, real=True), recorder.recording(arch):
        try:
            made = bound(*given.tensors)
            recorder.check()
        except AskedTooMuch as error:
            raise Unavailable(str(error)) from None
    return made


def keep(given: Inputs, made: Any, folder: Path) -> None:
    """Write what a call returned to a folder. Raises Unavailable if it is not as it should be."""
    problem, returned = given.problem, made if isinstance(made, tuple) else (made,)
    for tensor, output in zip(problem.op.written(problem), returned, strict=False):
        like = torch.empty(0, dtype=type_of(torch, tensor.dtype))
        if why := breach(torch, output, tensor.shape, like, given.tensors):
            raise Unavailable(f"{tensor.name}: {why}")
        np.save(folder / f"{tensor.name}.npy", output.detach().contiguous().numpy())
    if len(returned) < len(problem.outputs):
        raise Unavailable(f"returned {len(returned)} of {', '.join(problem.outputs)}")
