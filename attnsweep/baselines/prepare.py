"""A baseline bound to inputs: the fastest way to call it on this problem."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from attnsweep.baselines.backend import NotInstalled, OtherCode, Unavailable, Way, why_not
from attnsweep.baselines.callable import flags_of, restore_flags
from attnsweep.baselines.registry import BACKENDS, backend_of
from attnsweep.baselines.torch_sdpa import import_torch
from attnsweep.baselines.triton_precompile import TritonPrecompile
from attnsweep.core.callables import Asked
from attnsweep.core.long_problems import has_shorter, shorter
from attnsweep.core.problem import DTYPE_BYTES, Problem
from attnsweep.core.timings import step
from attnsweep.core.user_code import breach, memory_of, type_of
from attnsweep.device import graph_audit
from attnsweep.device.cuda_graph import lasting, uncollected

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

T = TypeVar("T")
# The ways to call a baseline are compared in graphs of about this length, with at most this many
# calls.
_SCREEN_US, _SCREEN_CALLS = 1_500.0, 50
# The fastest few are timed again, because the first time is of three replays only.
_FINALISTS = 3
# Fewer calls than this are made before a sample of a callable. A graph of 64 calls keeps few
# outputs, those of the same calls in each replay: on an H100 a kernel that counted its calls, and
# did nothing in each eighth, was confirmed.
_OUT_OF_STEP = 8
_MOST_TAKEN = 100  # outputs, of memory that PyTorch has in reserve
# Outputs that are kept of a callable's calls, where they are larger than the L2.
_KEPT_BYTES = 1 << 30


class BadGraph(Unavailable):
    """Raised when the CUDA graph of a callable holds a forbidden node."""


class BoundBaseline:
    """A baseline bound to inputs; it is timed exactly as a candidate is."""

    stage_names: tuple[str, ...] = ()
    once_names: tuple[str, ...] = ()

    def __init__(
        self,
        way: Way,
        copies: Sequence[tuple[Any, ...]],
        session: CudaSession,
        *,
        rounds_scores: int,
        dtype: Any = None,
        held: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        """dtype: the problem's output's (default: q's).

        held: it is a callable of the user's, whose outputs must be as `user_code.breach` says, and
        which is issued call by call if no graph can hold it. flags: settings that it must leave.
        """
        self._torch = import_torch()
        self._dtype = copies[0][0].dtype if dtype is None else dtype
        self._way, self._copies, self._held, self._flags = way, copies, held, flags
        self._stream = self._torch.cuda.ExternalStream(session.stream.ptr)
        self._inputs: list[tuple[Any, ...]] = [*copies]
        self.rounds_scores = rounds_scores
        self.issued: str | None = None
        """Why no graph holds its calls; None if one does."""
        self.room = 2
        """Calls of a graph whose outputs are kept."""
        self._made: dict[int, list[tuple[Any, ...]]] = {}
        self._pointer: int = session.stream.ptr
        self._audit: graph_audit.Audit | None = None
        self._alone: Callable[[], None] | None = None
        self._seals: list[tuple[list[Any], Any]] = []
        self._blocks: tuple[Any, dict[int, list[tuple[int, int]]]] = None, {}
        self.refresh()

    def refresh(self, copies: int | None = None) -> None:
        """Convert q, k, v anew, in place; call it when the contents of the first copies change."""
        if self._way.convert is None:
            return
        with self._torch.cuda.stream(self._stream):
            fresh = [self._way.convert(*copy) for copy in self._copies[:copies]]
            if self._inputs[0] is self._copies[0]:
                self._inputs = fresh
            for kept, new in zip(self._inputs, fresh, strict=False):  # graphs hold their addresses
                for into, tensor in zip(kept, new, strict=True):
                    if into is not tensor:
                        into.copy_(tensor)

    def enqueue(self, copy: int = 0, stage: str | None = None) -> None:  # noqa: ARG002
        """Issue one call eagerly; does not wait. A baseline has no stages."""
        with self._torch.cuda.stream(self._stream):
            self._made = {copy: [self._call(copy)]}

    issue = enqueue

    def _call(self, copy: int) -> tuple[Any, ...]:
        """One call's outputs. Raises Unavailable if they are not what the problem has."""
        if self._audit:
            self._audit.mark()
        out = self._way.forward(*self._inputs[copy % len(self._inputs)])
        if self._audit:
            self._audit.mark()
        return out if isinstance(out, tuple) else (out,)

    def out_of_step(self, calls: int) -> None:
        """Make a random number of calls: no callable can count to those that a replay times."""
        if not self._held:
            return
        if self._alone is None and self.issued is None:
            # Not by `capture`, whose function has this object: a cycle would outlast the entry.
            self._alone, _ = self.graph_of(lambda: self._call(0))
        alone = self._alone or self.enqueue
        for _ in range(secrets.randbelow(min(_OUT_OF_STEP, calls))):
            alone()

    def _taken(self, like: tuple[Any, ...]) -> list[Any]:
        """Use up PyTorch's cached blocks of this size, so that it asks for another next time."""
        taken: list[Any] = []
        for one in like:
            if type(one) is not self._torch.Tensor:  # which `kept` refuses
                continue
            before = self._torch.cuda.memory_reserved()
            for _ in range(_MOST_TAKEN):
                taken.append(self._torch.empty_like(one))
                if self._torch.cuda.memory_reserved() > before:  # a new piece: give it back
                    taken.pop()
                    break
        return taken

    def capture(
        self, calls: int, *, rotate: bool = False, stage: str | None = None
    ) -> Callable[[], None]:
        """A function that replays a graph of back-to-back calls; a baseline has no stages.

        The outputs of the last call on each copy are kept for `collect`, and those of others at
        random, as many as `room` has: no kernel can know which. In a graph of a callable the last
        one and up to two of these lie where nothing was written before. In memory that another call
        had, on the same inputs, they would be right without being written.
        """
        if stage is not None:
            raise ValueError(f"a baseline has no stage {stage!r}")
        chosen = _chosen(calls, self.room)
        apart = {calls - 1, *chosen[:2]} if self._held and self.issued is None else ()

        def issue() -> dict[int, list[tuple[Any, ...]]]:
            made: dict[int, list[tuple[Any, ...]]] = {}
            number: dict[int, int] = {}
            out: tuple[Any, ...] = ()
            for call in range(calls):
                copy = call % len(self._inputs) if rotate else 0
                kept = made.get(copy, [])
                taken = self._taken(out) if call in apart else []
                out = self._call(copy)
                del taken
                made[copy] = [*(kept if number.get(copy) in chosen else kept[:-1]), out]
                number[copy] = call
            return made

        graph, made = (None, {}) if self.issued is not None else self.graph_of(issue)

        def replay() -> None:
            if graph is not None:
                graph()
            with self._torch.cuda.stream(self._stream):
                self._made = made if graph is not None else issue()

        return replay

    def graph_of(self, issue: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A function that replays a graph of what `issue` enqueues, and what that returned."""
        graph, driver = self._torch.cuda.CUDAGraph(), graph_audit.driver() if self._held else None
        with self._torch.cuda.graph(graph, stream=self._stream), uncollected():
            self._audit = graph_audit.Audit(driver, self._pointer) if driver else None
            try:
                made = issue()
                why = self._audit.why_not() if self._audit else ""
            finally:
                self._audit = None
        if why:
            raise BadGraph(why)

        torch, stream = self._torch, self._stream

        def replay() -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return replay, made

    def seals_in(self, every: Sequence[tuple[Sequence[Any], Any]]) -> None:
        """Set the arrays, as `collect` takes them, to which `seal` copies each call's outputs."""
        self._seals = [self._tensors(*each) for each in every]

    def seal(self, call: int) -> bool:
        """Make a call, and copy what it returned; returns whether a log-sum-exp was there."""
        self._made = {}  # their memory is free again, as it is where nothing keeps them
        self.enqueue()
        return self._copy(0, 0, *self._seals[call])

    def try_graph(self, asked: bool | None) -> None:
        """Issue calls one by one from now on if a graph cannot hold one, or must not.

        asked: whether one must; None if either will do. Raises Unavailable.
        """
        if asked is False:
            self.issued = "graph: false was asked for"
            return
        try:
            self.capture(1)
        except (BadGraph, OtherCode):
            raise
        except Exception as error:
            self._stream.synchronize()
            self.issued = f"no CUDA graph holds its calls: {why_not('', error, [])}"
            if asked:
                raise Unavailable(self.issued) from error

    def keep(self, nbytes: int, session: CudaSession) -> None:
        """Keep more outputs of a graph, for all to be judged; nbytes: of those of one call.

        Those that L2 holds may take a quarter of it, so that calls take as long as if they wrote
        to the same memory; larger ones are not in L2 either way.
        """
        l2, most = session.gpu.l2_bytes, min(_KEPT_BYTES, session.free_bytes // 8)
        self.room = max(self.room, (most if nbytes > l2 else min(most, l2 // 4)) // nbytes)

    @property
    def gives_lse(self) -> bool:
        """Whether the last call of a forward returned a log-sum-exp beside its output."""
        return self._held and any(len(kept[-1]) == 2 for kept in self._made.values())

    def kept(self, copy: int) -> list[tuple[int, int]]:
        """Address and bytes of each output o that is kept of a callable's calls on a copy.

        None of them if one is no single block of memory. Raises Unavailable for what it may not
        return. Those of a graph are looked at once, as they lie where they lay.
        """
        if not self._held:
            return []
        if self._blocks[0] is not self._made:
            self._blocks = self._made, {}
        if copy not in self._blocks[1]:
            self._blocks[1][copy] = self._blocks_of(self._made[copy], self._inputs[copy])
        return self._blocks[1][copy]

    def _blocks_of(
        self, kept: Sequence[tuple[Any, ...]], given: Sequence[Any]
    ) -> list[tuple[int, int]]:
        if not all(kept):
            raise Unavailable("returned an empty tuple")
        if len({len(outs) for outs in kept}) > 1:
            raise Unavailable("returned more outputs in some calls than in others")
        memory = [memory_of(out) for outs in kept for out in outs]
        if len({*memory}) < len(memory):
            raise Unavailable("returned the same memory for two outputs")
        like, whole, found = kept[-1][0], True, []
        for out, *_ in reversed(kept):
            if why := breach(self._torch, out, getattr(like, "shape", ()), like, given):
                raise Unavailable(why)
            steps = zip(out.shape, out.stride(), strict=True)
            whole &= out.numel() == 1 + sum((size - 1) * step for size, step in steps)
            found.append((out.data_ptr(), out.nbytes))
        return found[::-1] if whole else []

    def collect(
        self, copy: int, into: Sequence[Any], lse: Any = None, which: int | None = None
    ) -> int:
        """Enqueue copies of a call's outputs to CuPy arrays of int16, or int32 for fp32.

        Of the calls before, it takes one on this copy whose outputs are kept, at random or as
        `which` says, and returns which. lse: the array of a callable's log-sum-exp. An output of
        another type, as FP8's may have, is converted to the problem's. Raises ValueError if it has
        another shape, and Unavailable for what else a callable may not return.
        """
        if self._flags and (changed := restore_flags(self._torch, self._flags)):
            raise Unavailable(f"changed settings of PyTorch: {', '.join(changed)}")
        which = secrets.randbelow(len(self._made[copy])) if which is None else which
        self._copy(copy, which, *self._tensors(into, lse))
        return which

    def _tensors(self, into: Sequence[Any], lse: Any) -> tuple[list[Any], Any]:
        """Arrays of CuPy as tensors of outputs, and of a log-sum-exp, if there is one."""
        of_array = self._torch.from_dlpack
        own = None if lse is None else of_array(lse).view(self._torch.float32)
        return [of_array(array).view(self._dtype) for array in into], own

    def _copy(self, copy: int, which: int, into: Sequence[Any], lse: Any) -> bool:
        """Enqueue copies of what a call returned; returns whether a log-sum-exp was there."""
        made, given = self._made[copy][which], self._inputs[copy % len(self._inputs)]
        self.kept(copy)  # which looks at all of them
        with self._torch.cuda.stream(self._stream):
            if gives_lse := self._held and lse is not None and len(made) == 2:
                self._take(made[1], lse, given)
                made = made[:1]
            if self._way.finish is not None:
                made = (self._way.finish(*made, *given),)
            if len(made) != len(into):
                kind = Unavailable if self._held else ValueError
                raise kind(f"returned {len(made)} outputs, not {len(into)}")
            for one, to in zip(made, into, strict=True):
                self._take(one, to, given)
        return gives_lse

    def _take(self, one: Any, to: Any, given: Sequence[Any]) -> None:
        if self._held and (why := breach(self._torch, one, to.shape, to, given)):
            raise Unavailable(why)
        if tuple(one.shape) != tuple(to.shape):
            raise ValueError(f"its output has the shape {tuple(one.shape)}")
        to.copy_(one)  # which converts it


def _chosen(calls: int, room: int) -> list[int]:
    """The calls of a graph, beside the last, whose outputs are kept."""
    return secrets.SystemRandom().sample(range(calls), min(calls, room - 1))


STORAGE: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32}
"""The integer type, by bytes, in which numbers go through DLPack: CuPy and PyTorch both know it."""


def arrays_of(problem: Problem, buffers: Any) -> dict[str, Any]:
    """The inputs that a baseline is called with, by name, as CuPy arrays of their storage."""
    made = {}
    for name in problem.values:
        dtype = problem.tensor(name).dtype
        kind = np.float32 if _beside(problem, name) else STORAGE[DTYPE_BYTES[dtype]]
        made[name] = buffers[name].view(problem.shape_of(name), kind)
    return made


def _beside(problem: Problem, name: str) -> bool:
    """Whether an input is float32 beside q, k and v: a scale or a sink."""
    return name not in ("q", "k", "v") and problem.tensor(name).dtype != problem.dtype


def tensors_of(
    torch: Any, problem: Problem, copies: Sequence[Mapping[str, Any]]
) -> list[tuple[Any, ...]]:
    """Copies of a problem's inputs, as `arrays_of` gives them, as tensors."""
    torch.set_float32_matmul_precision("highest")  # fp32 calls must not use TF32

    def tensor(name: str, array: Any) -> Any:
        if _beside(problem, name):
            return torch.from_dlpack(array)
        dtype = problem.tensor(name).dtype
        bits = STORAGE[DTYPE_BYTES[dtype]].__name__
        return torch.from_dlpack(array.view(bits)).view(type_of(torch, dtype))

    return [tuple(tensor(*each) for each in copy.items()) for copy in copies]


def prepare(
    name: str,
    problem: Problem,
    copies: Sequence[Mapping[str, Any]],
    session: CudaSession,
    triton: TritonPrecompile | None = None,
    *,
    converts: bool = True,
) -> BoundBaseline:
    """The baseline called `name`, after one run. copies: CuPy arrays of its inputs, as storage.

    They are q, k, v, and of their scales, a bias and sinks those that there are; of a backward also
    o, lse and do.

    triton: waited for if it has begun what the baseline needs. converts: whether a way will do that
    needs its inputs converted before it is timed, or its output after that. Raises Unavailable with
    the reason if anything goes wrong inside the baseline.
    """
    with step("PyTorch"):
        torch = import_torch()
    backend = backend_of(name)
    if (reason := backend.supports(problem)) is not None:
        raise Unavailable(reason)
    own, out = (type_of(torch, dtype) for dtype in (problem.dtype, problem.out_dtype))
    tensors = tensors_of(torch, problem, copies)
    made: list[BoundBaseline] = []
    failed: list[Unavailable] = []
    held = name not in BACKENDS
    asked = Asked.of(name) if held else None
    flags = flags_of(torch) if held else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if triton is not None and name == "triton_flash":
                with step("wait for Triton's process"):
                    triton.wait(problem)
            with step("set up"):
                ways = backend.ways(torch, problem, session)
        except NotInstalled as error:
            raise Unavailable(f"{error}: {backend.package.fix}") from error
        except Unavailable:
            raise
        except Exception as error:
            raise Unavailable(why_not(name, error, [])) from error
        if not converts:
            ways = [way for way in ways if way.convert is way.finish is None]
            if not ways:
                raise Unavailable("it needs inputs that are converted before each call")
        if has_shorter(problem) and len(ways) > 1 and problem.values == ("q", "k", "v"):
            ways = _best_on_shorter(name, torch, problem, ways, own, session)
        for way in ways:
            if way.spare and made:
                continue
            try:
                how = {
                    "rounds_scores": backend.rounds_scores,
                    "dtype": out,
                    "held": held,
                    "flags": flags,
                }
                with step("first calls"):
                    baseline = BoundBaseline(way, tensors, session, **how)
                    nbytes = sum(map(problem.bytes_of, problem.outputs))
                    first_call(baseline, torch, session, asked, nbytes)
                made.append(baseline)
            except Exception as error:  # a baseline may raise anything; the reason becomes a row
                said = [str(warning.message) for warning in caught]
                reason = str(error) if isinstance(error, Unavailable) else ""
                failed.append(Unavailable(reason or why_not(name, error, said)))
    if held and (changed := restore_flags(torch, flags)):
        raise Unavailable(f"{name} changed settings of PyTorch: {', '.join(changed)}")
    if not made:
        raise failed[0]
    if len(made) == 1:
        return made[0]
    with step(f"choose of {len(made)} ways"):
        return _fastest(made, session)


def first_call(
    baseline: BoundBaseline, torch: Any, session: CudaSession, asked: Asked | None, nbytes: int
) -> None:
    """Call a baseline once, and look at a callable's memory and graphs. Raises Unavailable.

    nbytes: of its outputs.
    """
    most = None if asked is None else asked.workspace
    if most is not None:
        session.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    baseline.enqueue()
    session.synchronize()
    if asked is None:
        return
    if most is not None:
        peak = torch.cuda.max_memory_allocated() - before
        if peak > most + nbytes:
            own = f"{peak - nbytes} bytes beside its outputs"
            raise Unavailable(f"a call takes {own}, over its workspace of {most}")
    baseline.try_graph(asked.graph)


def _best_on_shorter(
    name: str, torch: Any, problem: Problem, ways: list[Way], dtype: Any, session: CudaSession
) -> list[Way]:
    """The fastest way on a shorter problem, and spare ones; or all ways: Triton alone has 30."""
    short = shorter(problem)
    tensors = tuple(torch.randn(short.shape_of(t), device="cuda").to(dtype) for t in "qkv")
    alike = backend_of(name).ways(torch, short, session)
    made: dict[int, BoundBaseline] = {}
    for number, way in enumerate(alike if len(alike) == len(ways) else ()):
        with contextlib.suppress(Exception):  # the problem itself tells why
            if not way.spare:
                made[number] = BoundBaseline(way, [tensors], session, rounds_scores=0)
                made[number].enqueue()
                session.synchronize()
    try:
        best = _fastest([*made.values()], session)
    except Unavailable:
        return ways
    first = next(number for number, baseline in made.items() if baseline is best)
    return [ways[first], *(way for way in ways if way.spare)]


def _fastest(baselines: Sequence[BoundBaseline], session: CudaSession) -> BoundBaseline:
    """The fastest of several ways to call it. Raises Unavailable if none can be captured."""
    times: dict[int, float] = {}
    reason: Exception = Unavailable("no way to call it was timed")
    for number, baseline in enumerate(baselines):
        try:
            times[number] = _screen_us(baseline, session, replays=3)
        except Exception as error:  # as above: one that cannot be captured is no way
            reason = error
    if not times:
        raise Unavailable(f"cannot be captured: {why_not('', reason, [])}") from reason
    finalists = sorted(times, key=lambda number: times[number])[:_FINALISTS]
    again = {n: _screen_us(baselines[n], session, replays=12) for n in finalists}
    return baselines[min(again, key=lambda number: again[number])]


def _screen_us(baseline: BoundBaseline, session: CudaSession, *, replays: int) -> float:
    """Microseconds of a call from a graph, with a warm L2: the least of some replays."""

    def time_us(replay: Callable[[], None]) -> float:
        replay()
        return session.time_us(replay)

    with session.stream:
        baseline.enqueue()
        once = session.time_us(baseline.enqueue)
        replay, calls, _ = lasting(baseline.capture, time_us, once, _SCREEN_US, _SCREEN_CALLS)
        return min(session.time_us(replay) for _ in range(replays)) / calls
