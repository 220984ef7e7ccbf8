"""What baselines are called through: a session, FlashAttention's packages, and cuDNN's frontend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Stream(nullcontext[None]):
    ptr = 77


class Session:
    """Its clock is moved by the calls that it times."""

    free_bytes = 1 << 40

    def __init__(self, clock: list[float]) -> None:
        self.stream, self.clock = Stream(), clock

    def synchronize(self) -> None:
        pass

    def time_us(self, work: Callable[[], None]) -> float:
        before = self.clock[0]
        work()
        return self.clock[0] - before


class Attention(ModuleType):
    """A package whose functions keep what they were called with; flash_attn_func may raise."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, Any]] = []
        self.error = error

    def flash_attn_func(self, *tensors: Any, **options: Any) -> tuple[Any, str]:
        if self.error:
            raise self.error
        self.calls.append((tensors, options))
        return tensors[0], "lse"

    def flash_attn_with_kvcache(self, *tensors: Any, cache_seqlens: Any, **options: Any) -> Any:
        self.calls.append((tensors, options | {"cache_seqlens": cache_seqlens}))
        return tensors[0]  # alone, unless it is asked for the log-sum-exp


def installed(monkeypatch: pytest.MonkeyPatch, *packages: ModuleType) -> None:
    """Let these packages of FlashAttention-3 be the ones that are there."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for package in packages:
        monkeypatch.setitem(sys.modules, package.__name__, package)


class Cudnn(ModuleType):
    """cuDNN's frontend: the methods that attention needs, with the names of their arguments.

    unsupported: strides of q's heads, and types of the output, that no engine does.
    """

    def __init__(self, version: int = 91900, unsupported: Collection[object] = ()) -> None:
        super().__init__("cudnn")
        self.graphs: list[Graph] = []
        self.streams: dict[int, int] = {}
        self.destroyed: list[int] = []
        self.version, self.unsupported = version, unsupported
        names = {"HALF": "half", "BFLOAT16": "bf16", "FLOAT": "float", "FP8_E4M3": "e4m3"}
        names |= {"INT32": "int32", "INT64": "int64"}
        self.data_type = SimpleNamespace(**names)
        self.diagonal_alignment = SimpleNamespace(TOP_LEFT="top", BOTTOM_RIGHT="bottom")
        self.heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")

    def backend_version(self) -> int:
        return self.version

    def create_handle(self) -> int:
        return 1000 + len(self.graphs)

    def destroy_handle(self, handle: int) -> None:
        self.destroyed.append(handle)

    def set_stream(self, handle: int, stream: int) -> None:
        self.streams[handle] = stream

    def pygraph(self, *, handle: int, io_data_type: str, intermediate_data_type: str, compute_data_type: str) -> Graph:
        graph = Graph(self, handle, (io_data_type, intermediate_data_type, compute_data_type))
        self.graphs.append(graph)
        return graph


class Named(str):
    """A tensor of a graph."""

    ragged: str | None = None

    def set_ragged_offset(self, offsets: str) -> None:
        self.ragged = offsets


class Graph:
    def __init__(self, cudnn: Cudnn, handle: int, types: tuple[str, ...]) -> None:
        self.cudnn, self.handle, self.types = cudnn, handle, types
        self.tensors: dict[str, dict[str, Any]] = {}
        self.steps: list[Any] = []
        self.executed: list[Any] = []

    def tensor(
        self, dim: list[int], stride: list[int], data_type: str | None = None, name: str = "", uid: int = -1
    ) -> Named:
        self.tensors[name] = {"dim": dim, "stride": stride, "type": data_type, "uid": uid}
        return Named(name)

    def sdpa(
        self, q: str, k: str, v: str, attn_scale: Any = None, generate_stats: Any = None,
        diagonal_alignment: str = "top", diagonal_band_right_bound: Any = None,
        diagonal_band_left_bound: Any = None, use_padding_mask: bool = False,
        seq_len_q: str | None = None, seq_len_kv: str | None = None,
        compute_data_type: Any = None, name: str = "",
    ) -> tuple[Output, None]:  # fmt: skip
        self.options = dict(locals())
        self.out = Output()
        return self.out, None

    def sdpa_fp8(
        self, q: str, k: str, v: str, descale_q: str, descale_k: str, descale_v: str,
        descale_s: str, scale_s: str, scale_o: str, attn_scale: Any = None,
        diagonal_alignment: str = "top", right_bound: Any = None, compute_data_type: Any = None,
        name: str = "", generate_stats: Any = None,
    ) -> tuple[Output | None, ...]:  # fmt: skip
        self.options = dict(locals())
        self.out, self.largest = Output(), (Output(), Output())
        return self.out, None, *self.largest

    def sdpa_backward(
        self, q: str, k: str, v: str, o: str, dO: str, stats: str, attn_scale: Any = None,
        diagonal_alignment: str = "top", diagonal_band_left_bound: Any = None,
        diagonal_band_right_bound: Any = None, use_deterministic_algorithm: bool = False,
        use_padding_mask: bool = False, seq_len_q: str | None = None, seq_len_kv: str | None = None,
        compute_data_type: Any = None, name: str = "",
    ) -> tuple[Output, ...]:  # fmt: skip
        self.options = dict(locals())
        self.grads = (Output(), Output(), Output())
        self.out = self.grads[0]
        return self.grads

    def check_support(self) -> None:
        self.steps.append("check_support")
        if self.out.told["data_type"] in self.cudnn.unsupported:
            raise RuntimeError("No bf16 output\nhere")
        if self.tensors["q"]["stride"][1] in self.cudnn.unsupported:
            raise RuntimeError("No valid engine configs\nfor this graph")

    def validate(self) -> None:
        self.steps.append("validate")

    def build_operation_graph(self) -> None:
        self.steps.append("build_operation_graph")

    def create_execution_plans(self, modes: list[str]) -> None:
        self.steps.append(tuple(modes))

    def build_plans(self) -> None:
        self.steps.append("build_plans")

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, buffers: dict[int, Any], workspace: Any, handle: int | None = None) -> None:
        self.executed.append((buffers, workspace, handle))


class Output:
    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[[Any], Output]:
        def tell(value: Any) -> Output:
            self.told[name.removeprefix("set_")] = value
            return self

        return tell
