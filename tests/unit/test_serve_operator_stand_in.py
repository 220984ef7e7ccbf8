"""The operator on a GPU that another one's runs stand in for, with a fake driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from operators import NUMBERS, close, tensors  # noqa: E402
from packages import H100, PLAIN, SPLIT, imported, on_cpu, shape, table, winner, with_config  # noqa: E402

from attnsweep.serve.runtime.operator import Operator  # noqa: E402
from attnsweep.serve.runtime.table import GpuKey  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
H200 = GpuKey((9, 0), 132, 60 << 20)
ASKED = shape(1, 4, 256)


@pytest.fixture
def on(has, tmp_path, driver):
    """Makes an operator on a GPU, of a table with an H100 that has these winners."""

    def made(key, *winners, own=()):
        has(key)
        known = table(tmp_path, *(winners or (winner(ASKED),)))
        if own:
            of_own = replace(table(tmp_path, *own).gpus[H100], key=key, names=("own",))
            known = replace(known, gpus={**known.gpus, key: of_own})
        return Operator(known, f"s{next(NUMBERS)}", driver, devices=("cpu",))

    return made


def test_a_call_is_served_counted_and_explained(on, driver):
    operator = on(H200)
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


@pytest.mark.parametrize("key", [GpuKey((9, 0), 114, 50 << 20), GpuKey((10, 0), 132, 60 << 20)], ids=lambda k: k.label)
def test_other_gpus_stay_with_pytorch(on, driver, key):
    operator = on(key)
    q, k, v = tensors()
    assert torch.equal(operator.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"gpu": 1}
    assert operator.explain(q, k, v).gpu is None
    assert driver.launches == []


def test_own_rows_that_say_pytorch_is_as_fast_hold(on, driver):
    operator = on(H200, winner(ASKED, gain=9.0), own=[winner(ASKED, gain=1.0, low=0.99)])
    q, k, v = tensors()
    assert torch.equal(operator.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"not_faster": 1}
    assert driver.launches == []


def test_own_rows_of_other_calls_are_no_hindrance(on):
    operator = on(H200, own=[winner(shape(causal=True))])
    q, k, v = tensors()
    assert operator.explain(q, k, v).code == "stand_in"
    assert operator.explain(q, k, v, is_causal=True).code == "tuned"
    operator.attention(q, k, v)
    operator.attention(q[:, :, :3], k, v)
    assert operator.counters() == {"kernel": 1, "not_tuned": 1}


@pytest.mark.parametrize("kernel", [PLAIN, SPLIT], ids=["whole", "split"])
def test_calls_with_gradients_and_without_have_one_code(on, driver, kernel):
    operator = on(H200, winner(ASKED, kernel))
    if kernel is SPLIT:
        driver.on_launch = None
    q, k, v = (each.requires_grad_() for each in tensors())
    out = operator.attention(q, k, v)
    assert out.grad_fn is not None
    assert operator.explain(q, k, v).code == "stand_in"
    assert operator.counters() == {"kernel": 1}
    if kernel is PLAIN:
        assert close(out, F.scaled_dot_product_attention(q, k, v))
    loaded = [*driver.modules]
    with torch.no_grad():
        operator.attention(q, k, v)
    assert driver.modules == loaded


def test_masks_dropout_and_dtypes_go_where_they_went(on, driver):
    operator = on(H200, winner(ASKED), winner(replace(ASKED, dtype="fp16")))
    q, k, v = tensors()
    assert operator.explain(q, k, v, torch.zeros(256, 256)).code == "mask"
    assert operator.explain(q, k, v, dropout_p=0.1).code == "dropout"
    assert operator.explain(q.float(), k.float(), v.float()).code == "dtype"
    assert operator.explain(q, k, v, is_causal=True).code == "not_tuned"
    assert operator.explain(q.half(), k.half(), v.half()).code == "stand_in"
    out = operator.attention(q.half(), k.half(), v.half())
    assert out.dtype == torch.float16
    assert b"fp16" in driver.modules[0]


def test_a_kernel_that_does_not_fit_the_device_is_pytorchs_call(on, driver, caplog):
    """The driver refuses shared memory that the device does not have."""
    driver.refuses.add("cuFuncSetAttribute")
    operator = on(H200, winner(ASKED, with_config(PLAIN, NUM_STAGES=8)))
    q, k, v = tensors()
    for _ in range(2):
        assert close(operator.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"driver": 2}
    assert driver.launches == []
    assert operator.explain(q, k, v).code == "driver"
    assert "cuFuncSetAttribute" in caplog.text or "shared memory" in caplog.text


def test_compiled_calls_are_served(on):
    operator = on(H200)
    compiled = torch.compile(lambda q, k, v: operator.attention(q, k, v), fullgraph=True, backend="aot_eager")
    q, k, v = tensors()
    assert close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"kernel": 1}


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
