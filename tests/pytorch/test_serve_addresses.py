"""Calls whose addresses and shapes keep changing: what is remembered, and by which thread."""

import gc
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from operators import alive, close, make, tensors  # noqa: E402
from packages import shape, winner  # noqa: E402

from attnsweep.core import problem  # noqa: E402
from attnsweep.family import hopper  # noqa: E402
from attnsweep.serve.runtime import cost_model  # noqa: E402
from attnsweep.serve.runtime.call import Call  # noqa: E402
from attnsweep.serve.runtime.driver import Ready  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Forgetful(FakeDriver):
    """Keeps no record, which would grow with the calls."""

    def cuTensorMapEncodeTiled(self, *arguments):
        self.maps.clear()
        return super().cuTensorMapEncodeTiled(*arguments)

    def cuLaunchKernelEx(self, *arguments):
        self.counted = getattr(self, "counted", 0) + 1
        return (0,)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("grad", [False, True])
def test_no_memory_grows_with_the_calls(tmp_path, remember, grad):
    """With changing shapes and addresses. Ten times the caches' sizes, which are smaller here."""
    remember(plans=64, ready=64)
    for each in [each for module in (cost_model, hopper, problem) for each in vars(module).values()]:
        getattr(each, "cache_clear", int)()  # else what ran before decides how it grows
    driver, launches = Forgetful(), alive(Ready)
    made = make(tmp_path, driver, winner(shape()), winner(shape(seqlen=1000)))
    memory = torch.zeros(1 << 20, dtype=torch.bfloat16)

    def some(calls):
        for n in calls:
            seqlen, offset = 130 + n % 1307, 8 * (n % 977)  # in step after a million calls
            q = memory[offset : offset + 256 * seqlen].view(1, 4, seqlen, 64)
            made.served(Call(q, q, q, scale=0.125, lse=grad))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        some(range(640))
        before = some(range(640, 1280))
        after = some(range(1280, 3200))
    finally:
        tracemalloc.stop()
    assert made.counters() == {"kernel": 3200}
    assert driver.counted == 3200
    assert alive(Ready) - launches <= 64
    assert after - before < 2**18, "what the contents of the caches may differ by"


def test_all_kinds_of_calls_share_one_limit(operator, driver, remember):
    """Few kinds, each at more addresses than are remembered."""
    driver.on_launch = None
    remember(ready=10, of_a_kind=4)
    kinds = [[tensors(seqlen=250 + kind) for _ in range(5)] for kind in range(6)]
    before = alive(Ready)
    for n in range(5):
        for kind in kinds:
            operator.attention(*kind[n])
        assert alive(Ready) - before <= 10
    assert operator.counters() == {"kernel": 30}


def test_addresses_that_keep_changing(operator, driver, remember):
    remember(of_a_kind=4)
    given = [[t * (n + 1) / 9 for t in tensors()] for n in range(9)]
    for n in (*range(9), 8, 7, 0, 0, 3, 8):
        assert close(operator.attention(*given[n]), F.scaled_dot_product_attention(*given[n]))
    assert operator.counters() == {"kernel": 15}
    assert driver.replaced


def test_threads_do_not_share_launches(tmp_path, remember):
    """All at once, of one kind of call, at addresses that are met again and at new ones."""
    remember(of_a_kind=3)
    wrong, began = [], threading.local()

    class Slow(FakeDriver):
        def cuTensorMapReplaceAddress(self, *arguments):
            done = super().cuTensorMapReplaceAddress(*arguments)
            time.sleep(1e-5)  # lets another thread go on
            return done

    def look(launch):
        if [m["pointer"] for m in launch["values"][:3]] != began.addresses:
            wrong.append(launch["values"])

    made = make(tmp_path, Slow(look), winner(shape()))
    shared = [tensors() for _ in range(2)]

    def work(number):
        for n in range(60):
            given = shared[n % 4] if n % 4 < 2 else tensors()
            began.addresses = [t.data_ptr() for t in given]
            made.attention(*given)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong
    assert made.counters() == {"kernel": 240}
