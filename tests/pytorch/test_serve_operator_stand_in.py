"""The operator on a GPU that another one's runs stand in for, with a fake driver."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from operators import NUMBERS, close, tensors  # noqa: E402
from packages import PLAIN, imported, on_cpu, shape, table, winner, with_config  # noqa: E402

from attnsweep.serve.runtime.operator import Operator  # noqa: E402
from attnsweep.serve.runtime.table import GpuKey  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
H200 = GpuKey((9, 0), 132, 60 << 20)
ASKED = shape(1, 4, 256)


@pytest.fixture
def on(has, tmp_path, driver):
    """Makes an operator on an H200, of a table with an H100 that has this winner."""

    def made(won):
        has(H200)
        return Operator(table(tmp_path, won), f"s{next(NUMBERS)}", driver, devices=("cpu",))

    return made


def test_a_call_is_served_counted_and_explained(on, driver):
    operator = on(winner(ASKED))
    q, k, v = tensors()
    assert close(operator.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"kernel": 1}
    explained = operator.explain(q, k, v)
    assert (explained.code, explained.gain) == ("stand_in", 1.2)
    assert str(explained) == (
        f"{PLAIN.config}: by the runs of NVIDIA H100 80GB HBM3, which stand in for this "
        "GPU's: this shape was tuned, expected gain 1.200 [sm_90, 132 SMs, 60 MiB of L2]"
    )
    assert len(driver.launches) == 1


def test_a_kernel_that_does_not_fit_the_device_is_pytorchs_call(on, driver, caplog):
    """The driver refuses shared memory that the device does not have."""
    driver.refuses.add("cuFuncSetAttribute")
    operator = on(winner(ASKED, with_config(PLAIN, NUM_STAGES=8)))
    q, k, v = tensors()
    for _ in range(2):
        assert close(operator.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"driver": 2}
    assert driver.launches == []
    assert operator.explain(q, k, v).code == "driver"
    assert "cuFuncSetAttribute" in caplog.text or "shared memory" in caplog.text


def test_an_exported_package_has_the_rule(has, tmp_path, driver):
    """Its runtime is a copy, and its table has the format that it always had."""
    module = imported(tmp_path, "stands_in", driver, winner(ASKED))
    has(H200)
    on_cpu(module, driver).planner.gpus.clear()
    q, k, v = tensors()
    with module.enable():
        assert close(F.scaled_dot_product_attention(q, k, v), module.attention(q, k, v))
    assert module.counters()["kernel"] == 2
    assert module.explain(q, k, v).code == "stand_in"
