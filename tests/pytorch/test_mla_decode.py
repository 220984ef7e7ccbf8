"""`mla_decode`: what calls mean, what is refused, the answer without a kernel, and what the kernel gets."""

from dataclasses import replace

import numpy as np
import pytest

import attnsweep
from attnsweep.core.cases import Case
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.family import TensorMap
from attnsweep.tools.simulator import COMPILER, Simulator, sources
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.rounded import log_sum_exp

torch = pytest.importorskip("torch")
mla = pytest.importorskip("attnsweep.serve.mla")

PROBLEM = Problem.parse("(4,20/1,3x150,576/512) bf16 causal paged(64,1x150+1x64+1x0+1x2) value_in_key")


def tensor(bits):
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def arguments(problem=PROBLEM):
    """The inputs of a problem; and as an engine has them: a table in a wider one, pages that lie apart."""
    inputs = make_inputs(Case(problem), 1)
    pages = tensor(inputs["k"])
    pool = torch.full((len(pages), 2, 64, 1, 576), float("nan"), dtype=torch.bfloat16)
    pool[:, 1] = pages
    table = torch.full((problem.batch, 7), -5, dtype=torch.int32)
    blocks = inputs["block_table"].shape[1]
    table[:, :blocks] = torch.from_numpy(np.array(inputs["block_table"]))
    q = tensor(inputs["q"]).transpose(1, 2)
    lengths = torch.from_numpy(np.array(inputs["seqused_k"]))
    return inputs, [q, pool[:, 1], table[:, :blocks], lengths]


def check(out, lse, inputs, problem=PROBLEM):
    exact, _ = oracle_of(problem).exact(inputs, problem)
    right = log_sum_exp(inputs, problem, np.arange(problem.seqlen_q))
    found = out.transpose(1, 2).double().numpy()
    np.testing.assert_allclose(found, exact["o"], rtol=0, atol=2.0**-7 * np.abs(exact["o"]).max())
    np.testing.assert_allclose(lse.double().numpy(), right, rtol=1e-5, atol=1e-4)


def test_the_answer_behind_a_gather_is_right():
    inputs, given = arguments()
    out, lse = attnsweep.mla_decode(*given, softmax_scale=PROBLEM.scale, return_lse=True)
    check(out, lse, inputs)
    alone = attnsweep.mla_decode(given[0], given[1][:, :, 0], *given[2:], softmax_scale=PROBLEM.scale)
    assert torch.equal(alone, out)
    assert attnsweep.mla_plan(given[3], 60) is None
    how = {"softmax_scale": PROBLEM.scale, "return_lse": True}
    compiled = torch.compile(lambda *x: attnsweep.mla_decode(*x, **how), backend="eager", fullgraph=True)
    assert all(torch.equal(*each) for each in zip(compiled(*given), (out, lse), strict=True))


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("sms", [132, 5])
def test_the_kernel_gets_what_an_engine_has(monkeypatch, sms, planned):
    """The launches that a card would get run in the simulator."""
    monkeypatch.setattr(mla, "arch_of", lambda _: replace(ARCHS["sm_90a"], sm_count=sms))
    made = []
    monkeypatch.setattr(mla, "bound", lambda kernels, *_: made.extend(kernels))
    inputs, given = arguments()
    q, cache, table, lengths = given
    call = mla._understood(*given, 512, PROBLEM.scale)._replace(lse=True)
    sizes = {}
    if planned:
        mla._of_plan.cache_clear()
        _, spaces = mla._of_plan(4, 60, 0)
        mla._of_plan.cache_clear()
        sizes = dict(zip(("shares", "first_slot"), spaces, strict=True))
        call = call._replace(shares=lengths, first_slot=lengths)
    kernels, spaces = mla._of_call(call, 0)
    sizes |= {name: size for name, size in spaces.items() if "partial" in name} | {"lse": 4 * 4 * 60}
    tensors = mla._in_maps(call)

    def run_as(launch):
        def of(arg):
            if not isinstance(arg, TensorMap):
                return arg
            told = tensors[arg.buffer]
            box = (*arg.box[: 4 if told.sizes[-1] == arg.dims[0] else 2], 1)[: len(told.sizes)]  # as the driver
            return TensorMap(arg.buffer, told.sizes[::-1], tuple(2 * s for s in told.strides[-2::-1]), box)

        return replace(launch, args=tuple(map(of, launch.args)))

    family, made = mla._family(), [*made, *kernels]
    with Simulator() as simulator:
        stages = {
            kernel.launch.function: (
                run_as(kernel.launch),
                simulator.stage(family, sources(family), kernel.launch.function, kernel.defines, asan=False),
            )
            for kernel in made
        }
        pool = torch.as_strided(cache, (len(cache) * 2 * 64 * 576 - 64 * 576,), (1,), cache.storage_offset())
        bits = {"q": q.contiguous(), "k": pool}
        bits = {name: x.view(torch.int16).numpy() for name, x in bits.items()}
        bits |= {
            "block_table": table.as_strided((table.stride(0) * 4 - 4,), (1,)).numpy(),
            "seqused_k": lengths.numpy(),
        }
        left = simulator.run(stages, bits, {"o": 2 * 4 * 60 * 512}, sizes)
    out = torch.from_numpy(left["o"].view(np.int16)).view(torch.bfloat16).view(4, 3, 20, 512)
    check(out, torch.from_numpy(left["lse"].view(np.float32)).view(4, 20, 3), inputs)


def changed(at, value):
    def of(given, options):
        if isinstance(at, int):
            given = [*given[:at], value(given[at]), *given[at + 1 :]]
        else:
            options = options | {at: value}
        return given, options

    return of


WRONG = [
    (changed(0, lambda q: q.float()), TypeError, "both are float16 or bfloat16"),
    (changed(0, lambda q: q[..., :512]), ValueError, r"it is \(batch, seqlen_q, heads, 576\)"),
    (changed(0, lambda _: [1]), TypeError, "q is list|list"),
    (changed(1, lambda k: k.half()), TypeError, "both are float16 or bfloat16"),
    (changed(1, lambda k: k[:, :32]), ValueError, "pages of 64 keys"),
    (changed(1, lambda k: k.expand(-1, -1, 2, -1)), ValueError, "one key head"),
    (changed(1, lambda k: k[:1].expand(len(k), -1, -1, -1)), ValueError, "rows overlap"),
    (changed(1, lambda k: k[..., :512]), ValueError, "kv_cache is"),
    (changed(2, lambda t: t.long()), TypeError, "block_table is an int32"),
    (changed(2, lambda t: t[:2]), ValueError, "it has a row of each of 4"),
    (changed(3, lambda t: t.long()), TypeError, "cache_seqlens is an int32"),
    (changed(3, lambda t: t[:2]), ValueError, "it has 4 numbers"),
    (changed("softmax_scale", 0.0), ValueError, "softmax_scale is a number above 0"),
    (changed("softmax_scale", float("nan")), ValueError, "softmax_scale is a number above 0"),
    (changed("head_dim_v", 576), ValueError, "head_dim_v is 512"),
    (changed("plan", 3), TypeError, "plan is what mla_plan returned"),
    (changed("plan", mla.MlaPlan(torch.zeros(8), torch.zeros(5), 59)), ValueError, "4 requests of 59 rows"),
    (changed("plan", mla.MlaPlan(torch.zeros(8), torch.zeros(4), 60)), ValueError, "3 requests of 60 rows"),
]


@pytest.mark.parametrize(("change", "kind", "said"), WRONG, ids=[f"{n} {said}" for n, (_, _, said) in enumerate(WRONG)])
def test_what_the_host_sees_is_refused_in_words(change, kind, said):
    given, options = change(arguments()[1], {"softmax_scale": PROBLEM.scale})
    with pytest.raises(kind, match=said):
        attnsweep.mla_decode(*given, **options)


def test_a_plan_has_rows():
    with pytest.raises(ValueError, match="heads times queries"):
        attnsweep.mla_plan(torch.zeros(3, dtype=torch.int32), 0)
