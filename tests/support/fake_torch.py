"""The part of PyTorch that timing baselines needs, with NumPy arrays for tensors."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np


class Tensor:
    """The part of a torch tensor that baselines use, on NumPy."""

    def __init__(self, array: Any, dtype: str = "float16") -> None:
        self.array, self.dtype, self.device = np.asarray(array), dtype, "cuda"

    shape = property(lambda self: self.array.shape)

    def view(self, *shape: Any) -> Tensor:
        return self if isinstance(shape[0], str) else Tensor(self.array.reshape(shape), self.dtype)

    def transpose(self, one: int, other: int) -> Tensor:
        return Tensor(np.swapaxes(self.array, one, other), self.dtype)

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array), self.dtype)

    def to(self, dtype: str) -> Tensor:
        return Tensor(self.array, dtype)

    def float(self) -> Tensor:
        return Tensor(self.array.astype(np.float32), "float32")

    def abs(self) -> Tensor:
        return Tensor(np.abs(self.array), self.dtype)

    def amax(self, dim: Any) -> Tensor:
        return Tensor(self.array.max(axis=dim), self.dtype)

    def clamp(self, min: Any) -> Tensor:
        return Tensor(np.maximum(self.array, min), self.dtype)

    def repeat_interleave(self, count: int, dim: int) -> Tensor:
        return Tensor(np.repeat(self.array, count, axis=dim), self.dtype)

    def copy_(self, other: Tensor) -> None:
        self.array[...] = other.array

    def reshape(self, *shape: int) -> Tensor:
        return Tensor(self.array.reshape(shape), self.dtype)

    def unsqueeze(self, axis: int) -> Tensor:
        return Tensor(np.expand_dims(self.array, axis), self.dtype)

    def __rtruediv__(self, value: Any) -> Tensor:
        return Tensor(value / self.array, self.dtype)

    def __mul__(self, other: Tensor) -> Tensor:
        return Tensor(self.array * other.array, self.dtype)

    def __truediv__(self, other: Any) -> Tensor:
        value = other.array if isinstance(other, Tensor) else other
        return Tensor(self.array / value, self.dtype)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index], self.dtype)


def torch_of() -> Any:
    """A PyTorch whose graphs replay what they hold."""
    names = ("float16", "bfloat16", "float32", "float8_e4m3fn", "int16", "int32", "int64", "uint8")
    torch: Any = SimpleNamespace(**{name: name for name in names})
    torch.from_dlpack = lambda array: array
    torch.set_float32_matmul_precision = lambda precision: None
    torch.empty = lambda size, dtype, device: (
        SimpleNamespace(size=size, dtype=dtype) if isinstance(size, int) else Tensor(np.zeros(size), dtype)
    )
    torch.tensor = lambda numbers, dtype, device: Tensor(np.array(numbers), dtype)
    torch.full = lambda shape, value, dtype, device: Tensor(np.full(shape, value), dtype)
    torch.empty_like = lambda tensor: tensor
    torch.empty_strided = lambda shape, strides, dtype, device: SimpleNamespace(strides=strides, dtype=dtype)
    torch.backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900))
    torch.cuda = SimpleNamespace(
        is_available=lambda: True,
        ExternalStream=lambda pointer: SimpleNamespace(pointer=pointer, synchronize=lambda: None),
        stream=lambda stream: nullcontext(),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
        graph=lambda graph, stream: nullcontext(),
    )
    return torch
