"""Kernels whose tensors are (batch, seqlen, heads, head_dim): right, and judged by that order."""

import math

import numpy as np
import pytest

from attnsweep.bench.gpu import WorkerError
from attnsweep.compile.candidate import Build
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.device.buffers import GUARD_BYTES
from attnsweep.family.discover import discover
from attnsweep.family.space import Space
from attnsweep.tools import inline as scaffold

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 4, 1, 16), (3, 2, 129, 64)])
@pytest.mark.parametrize("item", [1, 2, 4])
def test_a_tensor_is_turned_with_its_guards_and_back(shape, item):
    from attnsweep.device.buffers import Buffer

    batch, heads, rows, columns = shape
    given = np.random.default_rng(1).integers(0, 256, (*shape, item), np.uint8)
    buffer = Buffer(math.prod(shape) * item, guard=0xFF)
    buffer.upload(given)
    buffer.turn(shape, back=False)
    turned = np.empty((batch, rows, heads, columns, item), np.uint8)
    buffer.turned().download(turned)
    np.testing.assert_array_equal(turned, given.swapaxes(1, 2))
    other = np.ascontiguousarray(turned[::-1])
    buffer.turned().upload(other)
    first, last = (np.full(GUARD_BYTES, byte, np.uint8) for byte in (1, 2))
    buffer.turned()._all.copy_from_host(first.ctypes.data, GUARD_BYTES)
    (buffer.turned()._main + buffer.nbytes).copy_from_host(last.ctypes.data, GUARD_BYTES)
    buffer.turn(shape, back=True)
    back, all_of = np.empty_like(given), np.empty(buffer.nbytes + 2 * GUARD_BYTES, np.uint8)
    buffer.download(back)
    np.testing.assert_array_equal(back, other.swapaxes(1, 2))
    buffer._all.copy_to_host(all_of.ctypes.data, all_of.nbytes)
    np.testing.assert_array_equal(all_of[:GUARD_BYTES], first)
    np.testing.assert_array_equal(all_of[-GUARD_BYTES:], last)


def builds_of(tmp_path, compiler, problem, written):
    """The smallest family, declared to have seqlen before heads, and written for an order."""
    (tmp_path / "mine.cu").write_text(scaffold.template("mine", None, written))
    (tmp_path / "mine.py").write_text(scaffold.declaration("mine", "bshd"))
    mine = discover(tmp_path)["mine"]
    configs = Space.build(mine, problem, compiler.arch).configs
    builds = [Build(mine, config, problem, compiler) for config in configs]
    for build in builds:
        build.submit()
    return builds


PROBLEM = Problem.parse("2,4/2,512x640,64 bf16")


def test_a_kernel_in_its_order_is_right_and_timed(tmp_path, worker, compiler):
    worker.open(PROBLEM, replay_us=200, seed=1)
    plain, *_ = discover()["naive"], None
    same = Build(plain, next(iter(Space.build(plain, PROBLEM, compiler.arch).configs)), PROBLEM, compiler)
    same.submit()
    _, usual = worker.trial(same.candidate())
    for build in builds_of(tmp_path, compiler, PROBLEM, "bshd"):
        accuracy, first = worker.trial(build.candidate())
        assert accuracy.rel_err <= accuracy.limit
        assert accuracy.calls > 1
        # The copies of its tensors are in no time.
        assert first.time_us < 3 * usual.time_us
        worker.add(build.config.label, build.candidate(), cold=True)
        for kind in ("warm", "cold"):
            assert worker.replay(build.config.label, kind) > 0
        assert worker.eager_us(build.config.label) > 0
        assert worker.confirm(build.config.label, 50_000.0) > 0
        worker.drop(build.config.label)


def test_a_kernel_that_ignores_its_order_is_refused(tmp_path, worker, compiler):
    worker.open(PROBLEM, replay_us=200, seed=1)
    for build in builds_of(tmp_path, compiler, PROBLEM, "bhsd"):
        with pytest.raises(WorkerError, match="over the limit") as refused:
            worker.trial(build.candidate())
        assert refused.value.status is Status.WRONG
