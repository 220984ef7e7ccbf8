"""What the GPU tests of packages ask for is served on each card: its table is asked, no GPU."""

import json
from pathlib import Path

import pytest
import recorded

from attnsweep.family.discover import discover
from attnsweep.serve import export, shipped
from attnsweep.serve.runtime import dispatch
from attnsweep.serve.runtime.table import TABLE, GpuKey, read_table
from attnsweep.serve.runtime.table import known as known_to

H100, H200 = (GpuKey((9, 0), 132, mib << 20) for mib in (50, 60))
H100_PCIE, A100 = GpuKey((9, 0), 114, 50 << 20), GpuKey((8, 0), 108, 40 << 20)
SHIPPED = Path(shipped.__file__).parent / "runtime"
CARDS = {"H100": H100, "H200": H200, "H100 PCIe": H100_PCIE}
CALLS = {
    *(*recorded.OUTPUTS, *recorded.GRADIENTS, *recorded.MAPPED),
    *(recorded.PLAIN, recorded.COMPILED, *map(recorded.changing, recorded.CHANGING)),
}


@pytest.fixture(scope="module", params=CARDS.values(), ids=CARDS)
def card(request):
    return request.param


@pytest.fixture(scope="module")
def known(card, tmp_path_factory):
    """The GPU as the package of test_export.py knows it."""
    place, runs = tmp_path_factory.mktemp("table"), recorded.runs_for(card, recorded.RUNS)
    raw = recorded.taken_for(export.outline(runs, discover()), card)
    (place / TABLE).write_text(json.dumps(raw))
    return read_table(place).gpus[card]


# ---- which runs ----
def test_each_card_has_its_own_runs():
    assert set(recorded.cards(recorded.RUNS)) == {H100, H200}, "name a new one in CARDS too"
    for key, folder in ((H100, "h100-80gb-hbm3"), (H200, "h200"), (H100_PCIE, "h100-80gb-hbm3")):
        runs = recorded.runs_for(key, recorded.RUNS)
        assert {run.parent.name for run in runs} == {folder}
        assert {run.name for run in runs} == recorded.RUNS
        assert recorded.runs_for(key, recorded.FP8_RUNS)
    assert recorded.runs_for(A100, recorded.FP8_RUNS) == recorded.runs_for(A100, recorded.RUNS) == []


# ---- 16 bits ----
def test_every_call_of_the_gpu_tests_is_served(known):
    """Else test_export.py compares PyTorch's attention with itself."""
    free = recorded.unguarded(known)
    choices = {shape.label: dispatch.choose(free, shape) for shape in CALLS}
    assert len(choices) > 700
    assert {label: c.reason for label, c in choices.items() if c.kernel is None} == {}
    choice = dispatch.choose(known, recorded.PLAIN)
    assert choice.kernel, "test_a_first_call_in_a_capture has the package's own guard"


@pytest.mark.parametrize("shape", recorded.SHIPPED, ids=lambda shape: shape.label)
def test_what_comes_with_attnsweep_serves_the_calls_of_its_gpu_test(shape):
    gpus = read_table(SHIPPED).gpus
    assert {*gpus} == {H100, H200}
    for gpu in gpus.values():
        assert dispatch.choose(gpu, shape).kernel, gpu.key.label


@pytest.mark.parametrize(("key", "name"), [(H100, "H100"), (H200, "H200")])
def test_the_page_says_which_lengths_are_near_enough(key, name):
    gpus = read_table(SHIPPED).gpus
    gpu = known_to(gpus, key)
    page = " ".join((recorded.RESULTS.parent / "docs/how-to/use.md").read_text().split())
    assert f" {len(gpu.winners)} " in page[: page.index("both of 132 SMs")]

    def far(head_dim, seqlen):
        shapes = [recorded.call(1, 32, 32, seqlen, head_dim, "bf16", c) for c in recorded.BOTH]
        return any(dispatch.choose(gpu, s).code in ("far", "not_tuned") for s in shapes)

    row = page[page.index(f"| {name} |") :].split("|")[2:7]
    for head_dim, shortest in zip((64, 96, 128, 192, 256), map(int, row), strict=True):
        assert [far(head_dim, shortest + more) for more in (-1, 0, 1, 100)] == [True, *3 * [False]]
