"""Keys that no query sees may hold NaN: padding of an item, slots of a cache that is not yet full.

A weight of 0 takes no NaN away, so that kernels clear such rows in shared memory.
"""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.ops import BACKWARD
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.verify import measures
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.reference import exact_rows

from .harness import COMPILER, config_of
from .test_boolean_masks import CONFIGS as OF_MASKS
from .test_item_keys import CONFIGS as OF_ITEMS
from .test_masked_reference import of_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FORWARD, GRADIENTS = discover()["flash_fwd_wgmma"], discover()["flash_bwd_wgmma"]
# By head_dim.
PREFILL = (
    "(3,2/1,130x321,{}) bf16 full padded(right,0)",
    "(3,2/1,130x321,{}) fp16 causal padded(left,0)",
    "(3,2/1,130x321,{}) bf16 window(60,20) padded(right,10)",
    "(3,2/1,130x321,{}) bf16 boolean(padding,0)",
)
DECODE = (
    "(3,4/2,1x321,64) bf16 full padded(right,0)",
    "(3,4/2,1x321,64) bf16 full padded(left,0)",
    "(3,4/2,1x321,64) bf16 boolean(padding,0)",
)
OF_GRADIENTS = (
    "AHEAD=0",
    "AHEAD=1 KV_WARPGROUPS=1",
    "AHEAD=2 BLOCK_M=64 STATISTICS=2",
    "AHEAD=3 DQ_ADD=1 STATISTICS=1",
    "DQ_RING=3",
    "RECOMPUTE=1",
    "RECOMPUTE=1 Q_STAGES=1 Q_BLOCK_N=96",
    "DKV_WARPGROUPS=2 KV_WARPGROUPS=1 BLOCK_M=64",
    "DKV_WARPGROUPS=2 KV_WARPGROUPS=1 AHEAD=1 CLUSTER=2",
)
RUNS = (
    *((FORWARD, words, tuple(each.format(dim) for each in PREFILL)) for words, dim in OF_MASKS.items()),
    (FORWARD, "BLOCK_N=64 WARPGROUPS=3 OVERLAP=0 MAXIMA=1", tuple(each.format(64) for each in PREFILL)),
    *((FORWARD, f"{words} ITEM_KEYS=1", DECODE) for words in OF_ITEMS),
    *((GRADIENTS, words, tuple(each.format(64) for each in PREFILL[:3])) for words in OF_GRADIENTS),
)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(("family", "words", "labels"), RUNS, ids=lambda x: str(x) if isinstance(x, str) else "")
def test_hidden_keys_are_as_if_they_were_not_there(simulator, family, words, labels):
    for number, label in enumerate(labels):
        problem = replace(Problem.parse(label), op=BACKWARD) if family is GRADIENTS else Problem.parse(label)
        case = Case(problem, "nan_padding")
        assert any(np.isnan(from_bits(make_inputs(case, 1)[name], problem.dtype)).any() for name in "kv")
        result = simulator.check(family, config_of(family, words), case, schedules=(number % 3,))
        assert result.ok, (label, str(result))


@pytest.mark.parametrize("label", [PREFILL[0].format(64), PREFILL[1].format(24), PREFILL[3].format(64), *DECODE[:2]])
def test_the_device_reference_is_that_of_numpy(label, device):
    problem = Problem.parse(label)
    inputs = make_inputs(Case(problem, "nan_padding"), 1)
    out, lse = of_device(device, problem, inputs)
    ((expected, log_sums),) = exact_rows(inputs, problem, np.arange(problem.seqlen_q))
    assert np.isfinite(out).all()
    assert measures.row_error(out, expected) <= 1e-12
    assert measures.apart(lse, log_sums).max() <= 1e-12


@pytest.mark.parametrize("hidden", [slice(270, 300), slice(100, 170)], ids=["behind the last", "of another"])
@pytest.mark.parametrize(
    "words", ["BLOCK_N=64 WARPGROUPS=2 MAXIMA=1", "BLOCK_N=128 WARPGROUPS=2 MAXIMA=2 PERSISTENT=1"]
)
def test_a_packed_sequence_does_not_meet_what_is_beside_it(simulator, words, hidden):
    """Tensors may be longer than all sequences, and another's values are none of its own."""
    problem, config = Problem.parse("(1,2,300,64) bf16 causal packed(4)"), config_of(FORWARD, words)
    begins = np.array([0, 100, 170, 200, 270], np.int32)
    given = make_inputs(Case(problem), 1) | {"cu_seqlens_q": begins, "cu_seqlens_k": begins}
    stages, sizes = simulator.build(FORWARD, config, Case(problem)), FORWARD.workspaces(config, problem)

    def attended():
        left = simulator.run(stages, given, {"o": problem.bytes_of("o")}, sizes)
        bits = left["o"].view(np.uint16).reshape(2, 300, 64)
        return np.delete(bits, np.r_[hidden, 270:300], axis=1)

    expected = attended()
    for name in "kv":
        given[name] = given[name].copy()
        given[name][:, :, hidden] = 0x7FC0  # NaN
    found = attended()
    assert np.isfinite(from_bits(found, "bf16")).all()
    assert (found == expected).all()
