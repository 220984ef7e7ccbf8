"""A process that calls callables for the strict judge, and owns nothing that counts.

It answers lines of JSON. Inputs and outputs lie in memory of the judge, which draws the former and
judges the latter; what this process says of times is a claim. Code of a stranger runs here: nothing
that is known or decided here may matter.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from attnsweep.baselines import prepare
from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.callable import DOES_NOT, says_what_it_supports
from attnsweep.core.errors import in_short
from attnsweep.core.ops import DTYPE_BYTES
from attnsweep.core.problem import Problem
from attnsweep.device import process
from attnsweep.device.buffers import Buffer
from attnsweep.device.cuda import CudaSession
from attnsweep.device.shared import Arena, CudaIpc, Span
from attnsweep.verify.compare import Comparer
from attnsweep.verify.device_case import regions_to_redraw

# The device is given this much to do before a chain, so that the host has enqueued the chain when
# its time begins: as often as the L2 is read, for 10 to 15 µs each, where a call of the chain takes
# the host up to 4 µs.
_READS_BEFORE, _READS_A_CALL = 8, 0.5


class Card:
    """The card of this process. Tests have another one, on the CPU."""

    buffer = Buffer
    """Memory of this process alone."""

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):  # now, while the judge opens the problem
            importlib.import_module("torch")
        self.session, self.transport = CudaSession(), CudaIpc()

    def comparer(self, dtype: str, cache_dir: Path) -> Comparer:
        """The judge's kernels, which draw inputs and digest outputs."""
        return Comparer(self.session, dtype, cache_dir)


def sealed_of(problem: Problem) -> tuple[str, ...]:
    """Names of the tensors that are sealed of a call: outputs, and any log-sum-exp."""
    return tuple(tensor.name for tensor in problem.op.written(problem))


class Callables:
    """One problem's callables, by name, and chains of their calls; None is a call of nothing."""

    def __init__(self, card: Card) -> None:
        self._card, self._session = card, card.session
        self._bound: dict[str | None, prepare.BoundBaseline] = {}
        self._replays: dict[tuple[str | None, int], Callable[[], None]] = {}
        self._reads: dict[int, Callable[[], None]] = {}
        """By calls of a chain: what the device does before it, in one launch."""

    def open(self, problem: str, handle: str, spans: Sequence[Span], cache: str) -> None:
        """Open the judge's memory. cache: the directory of its compiled kernels."""
        self._problem = shape = Problem.parse(problem)
        self._arena = arena = Arena(self._card.transport, spans, handle)
        self._kernels = self._card.comparer(shape.dtype, Path(cache))
        self._regions = regions_to_redraw(self._kernels, shape, [arena.buffers])
        self._calls = sum(name.startswith(f"{shape.outputs[0]} ") for name, _, _ in spans)
        self._sealed = [
            [arena[f"{one} {call}"] for one in sealed_of(shape)] for call in range(self._calls)
        ]
        self._nothing = [self._card.buffer(shape.bytes_of(one)) for one in shape.outputs]
        self._before = self._card.buffer(self._session.gpu.l2_bytes)
        self._sum = self._card.buffer(8)
        self._session.settle()

    def add(self, name: str) -> str | None:
        """Import, prepare and bind a callable or a library; returns why no graph holds it."""
        self._bound[name] = bound = self._bind(name, self._problem, self._arena, self._calls)
        return bound.issued

    def _bind(self, name: str, shape: Problem, arena: Arena, calls: int) -> prepare.BoundBaseline:
        inputs = prepare.arrays_of(shape, arena)
        bound = prepare.prepare(name, shape, [inputs], self._session, converts=False)
        bits, each = prepare.STORAGE[DTYPE_BYTES[shape.out_dtype]], []
        for call in range(calls):
            outputs = [arena[f"{o} {call}"].view(shape.shape_of(o), bits) for o in shape.outputs]
            beside = [
                arena[f"{tensor.name} {call}"].view(tensor.shape, np.int32)
                for tensor in shape.op.optional(shape)
            ]
            each.append((outputs, *(beside or [None])))
        bound.seals_in(each)
        return bound

    def case(self, name: str, problem: str, handle: str, spans: Sequence[Span]) -> bool:
        """One call on another problem, if a callable says that it supports it."""
        if not says_what_it_supports(name):
            return False
        arena = Arena(self._card.transport, spans, handle)
        try:
            bound = self._bind(name, Problem.parse(problem), arena, 1)
        except Unavailable as error:
            if DOES_NOT in str(error):
                return False
            raise Unavailable(f"it supports {problem}, but {error}") from error
        with self._session.stream:
            bound.seal(0)
        self._session.synchronize()
        return True

    def call(self, name: str) -> bool:
        """One call on the inputs as they are; returns whether a log-sum-exp was there."""
        with self._session.stream:
            lse = self._bound[name].seal(0)
        self._session.synchronize()
        return lse

    def ready(self, name: str | None, calls: int) -> None:
        """Prepare a chain of `calls` calls for `run` to replay. name: None is a call of nothing."""

        def issue() -> None:
            self._issue(name, calls)

        def read() -> None:
            with self._session.stream:
                for _ in range(max(_READS_BEFORE, int(_READS_A_CALL * calls))):
                    self._kernels.digest_parts(self._before, self._sum, 0, 1)

        bound = self._bound.get(name)
        issue()  # which loads what no graph may load
        self._session.synchronize()
        if calls not in self._reads:
            self._reads[calls] = self._session.capture(read)
        if bound is None:
            self._replays[name, calls] = self._session.capture(issue)
        else:
            self._replays[name, calls] = issue if bound.issued else bound.graph_of(issue)[0]

    def _issue(self, name: str | None, calls: int) -> None:
        """Enqueue a chain of calls: each one's inputs follow from the output before it."""
        bound = self._bound.get(name)
        contents, digests = self._arena["contents"], self._arena["digests"]
        with self._session.stream:
            digests.fill(0)
            for call in range(calls):
                self._kernels.chain(self._regions, contents, digests, call)
                written, lse = self._sealed[call], bound is not None and bound.seal(call)
                for number, to in enumerate(written[: None if lse else len(self._nothing)]):
                    if bound is None:
                        to.copy_from(self._nothing[number], self._session.stream)
                    self._kernels.digest_parts(to, digests, call, 1)

    def run(self, name: str | None, calls: int) -> float:
        """Replay a chain; returns its microseconds."""
        with self._session.stream:
            self._reads[calls]()
            return float(self._session.time_us(self._replays[name, calls]))


def answers(requests: IO[str], replies: IO[str], callables: Callables) -> None:
    """Answer until there are no more requests."""
    for line in requests:
        request = json.loads(line)
        reply: dict[str, Any] = {"number": request.pop("number")}
        try:
            reply["value"] = getattr(callables, request.pop("do"))(**request)
        except Unavailable as error:
            reply["refused"] = str(error)
        except Exception as error:
            reply["failed"] = in_short(error)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    """Arguments: the parent's id, and `module:name` of the card."""
    process.die_with(int(sys.argv[1]))
    requests, replies = (
        os.fdopen(os.dup(0), encoding="utf-8"),
        os.fdopen(os.dup(1), "w", encoding="utf-8"),
    )
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    process.gain_nothing()
    process.stand_alone()  # which gives what is printed another place
    module, _, name = sys.argv[2].partition(":")
    answers(requests, replies, Callables(getattr(importlib.import_module(module), name)()))
    os._exit(0)
