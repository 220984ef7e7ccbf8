"""Masks in PyTorch, with a fake driver and kernels of NumPy's: right, and never stale."""

import contextlib
import functools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from operators import alive, close, compiled, exact, make, tensors  # noqa: E402
from packages import shape, winner  # noqa: E402

from attnsweep.serve.runtime import mask_lists  # noqa: E402
from attnsweep.serve.runtime.table import Guard  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, HEADS, ROWS = 2, 4, 256


@pytest.fixture
def operator(tmp_path, driver, kernel):
    """An operator that has a kernel for each form of a mask, with as many heads, and grouped."""
    owns = ((), ("item",), ("head",), ("item", "head"))
    kinds = [{kind: own, "heads_kv": kv} for kind in ("boolean", "bias") for own in owns for kv in (HEADS, 2)]
    return make(tmp_path, driver, *(winner(shape(BATCH, HEADS, ROWS, **kind)) for kind in kinds))


def random_mask(*sizes, seed=0):
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(seed)) < 0.5


def numbers(*sizes):
    """To add to scores."""
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(1)).bfloat16()
    return made.masked_fill(made > 1.5, float("-inf"))


FORMS = {
    "one": (ROWS, ROWS),
    "of three dimensions": (HEADS, ROWS, ROWS),
    "of four": (1, 1, ROWS, ROWS),
    "of items": (BATCH, 1, ROWS, ROWS),
    "of heads": (1, HEADS, ROWS, ROWS),
    "of both": (BATCH, HEADS, ROWS, ROWS),
    "of keys": (BATCH, 1, 1, ROWS),
    "of keys and heads": (BATCH, HEADS, 1, ROWS),
    "of queries": (BATCH, 1, ROWS, 1),
}


def test_calls_of_the_same_sizes_that_differ_take_turns(operator):
    """Found again by sizes alone, one would get the plan of another."""
    q, k, v = tensors(BATCH, HEADS, ROWS)
    mask = random_mask(*FORMS["of items"])
    grouped = tensors(BATCH, HEADS, ROWS, 2)
    calls = [
        ((q, k, v), mask, {}),
        ((q, k, v), mask.mT, {}),
        ((q, k, v), mask[:, :, :1].expand_as(mask), {}),
        ((q, k, v), mask.logical_not().to(q.dtype) * -9, {}),  # numbers to add
        ((q, k.mT.contiguous().mT, v), mask, {}),  # which no map describes
        ((q, k, v), mask, {"scale": 0.5}),
        ((torch._neg_view(-q), k, v), mask, {}),
        ((q.clone().requires_grad_(), k, v), mask, {}),
        (grouped, mask, {"enable_gqa": True}),
        ((q, k, v), random_mask(*FORMS["of heads"]), {}),
    ]
    wanted = []
    for qkv, each, how in calls:
        wanted.append(exact(*qkv, each, scale=how.get("scale")))
    for _ in range(4):
        for number, (qkv, each, how) in enumerate(calls):
            assert close(operator.attention(*qkv, each, **how), wanted[number]), number
    served = operator.counters()["kernel"]
    with torch.no_grad():
        operator.attention(*calls[7][0], mask)
    assert operator.counters()["kernel"] == served + 1


def right(operator, mask, by="kernel", heads_kv=HEADS):
    given = tensors(BATCH, HEADS, ROWS, heads_kv)
    out = operator.attention(*given, mask, enable_gqa=heads_kv != HEADS)
    assert close(out, exact(*given, mask))
    assert operator.counters() == {by: 1}


@pytest.mark.nightly(push=12)
@pytest.mark.parametrize("drawn", [random_mask, numbers])
@pytest.mark.parametrize("heads_kv", [HEADS, 2])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_broadcasts(operator, form, heads_kv, drawn):
    by = "mask" if drawn is numbers and form == "of queries" else "kernel"
    right(operator, drawn(*FORMS[form]), by, heads_kv)


WHOLE = (BATCH, 1, ROWS, ROWS)
STRIDES = {
    "sliced": lambda: random_mask(BATCH, 1, ROWS, ROWS + 3)[..., 3:],
    "every second key": lambda: random_mask(BATCH, 1, ROWS, 2 * ROWS)[..., ::2],
    "of one key": lambda: random_mask(*WHOLE)[..., :1].expand(WHOLE),
    "numbers, expanded": lambda: numbers(1, 1, ROWS, ROWS).expand(BATCH, HEADS, ROWS, ROWS),
    "numbers, transposed heads": lambda: numbers(BATCH, ROWS, HEADS, ROWS).transpose(1, 2),
    "numbers, sliced": lambda: numbers(BATCH, 1, ROWS, ROWS + 8)[..., 8:],
    "numbers, an expanded row": lambda: numbers(BATCH, 1, 1, ROWS).expand(WHOLE),
}
# What TMA cannot read, but a copy of it.
OTHERS = {
    "numbers, transposed": lambda: numbers(ROWS, ROWS).mT,
    "numbers, every second key": lambda: numbers(ROWS, 2 * ROWS)[:, ::2],
    "numbers, rows of no 16 bytes": lambda: numbers(ROWS, ROWS + 1)[:, :ROWS],
    "numbers that begin elsewhere": lambda: numbers(BATCH, 1, ROWS, ROWS + 8)[..., 1 : 1 + ROWS],
}


@pytest.mark.parametrize("how", [*STRIDES, *OTHERS])
def test_strides(operator, how):
    right(operator, (STRIDES | OTHERS)[how](), "alignment" if "begin" in how else "kernel")


def bias_of_t5(heads=HEADS):
    """As transformers makes it: a table's rows by their distance, heads next to each other."""
    return numbers(ROWS, ROWS, heads).permute(2, 0, 1)[None]


def test_a_bias_that_no_map_describes_is_copied_once_a_version(operator, driver):
    q, k, v = tensors(BATCH, HEADS, ROWS)
    mask = bias_of_t5()

    def read():
        assert close(operator.attention(q, k, v, mask), exact(q, k, v, mask))
        return [launch["values"][12]["pointer"] for launch in driver.launches if len(launch["values"]) > 15][-1]

    first = read()
    assert first != mask.data_ptr()
    assert {read() for _ in range(3)} == {first}
    mask.mul_(2)
    assert close(operator.attention(q, k, v, mask), exact(q, k, v, mask)), "written to"
    with torch.inference_mode():  # whose tensors have no version
        mask = bias_of_t5()
        for _ in range(3):
            assert close(operator.attention(q, k, v, mask), exact(q, k, v, mask))
            mask.mul_(1.5)
    assert operator.counters() == {"kernel": 8}


def test_copies_of_biases_are_bounded_in_bytes(operator, monkeypatch):
    """The oldest go; one that is larger than all may be is copied in each call."""
    q, k, v = tensors(BATCH, HEADS, ROWS)
    one = bias_of_t5().numel() * 2
    for most, kept in ((3 * one, 3), (one - 1, 0)):
        monkeypatch.setattr(mask_lists, "MOST_BYTES", most)
        operator.launcher.masks.forget()
        masks = [bias_of_t5() for _ in range(5)]
        for mask in masks:
            assert close(operator.attention(q, k, v, mask), exact(q, k, v, mask))
        before = alive(mask_lists.MaskList)
        operator.launcher.masks.forget()
        assert before - alive(mask_lists.MaskList) == kept


def test_another_dtype_and_gradients_of_the_mask_are_pytorchs(operator):
    q, k, v = tensors(BATCH, HEADS, ROWS)
    assert operator.explain(q, k, v, numbers(ROWS, ROWS).float()).code == "mask"
    mask = numbers(ROWS, ROWS).clamp(min=-5).requires_grad_()
    operator.attention(q, k, v, mask).float().sum().backward()
    assert mask.grad is not None
    assert operator.counters() == {"mask": 1}


def test_a_batch_of_calls_with_a_float32_mask_is_pytorchs(operator):
    """`torch.vmap` cannot be asked which of its kernels PyTorch would take."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():  # whose tensors are on a card
        each = torch.empty(3, 2, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
        mask = torch.empty(8, 8, device="cuda")
        out = torch.vmap(lambda q: operator.attention(q, q, q, mask))(each)
    assert (out.shape, out.dtype) == (each.shape, torch.bfloat16)


@pytest.mark.parametrize(("drawn", "hidden"), [(random_mask, False), (numbers, float("-inf"))])
def test_queries_without_a_key_are_zeros(operator, drawn, hidden):
    q, k, v = tensors(BATCH, HEADS, ROWS)
    mask = drawn(BATCH, 1, ROWS, ROWS)
    mask[:, :, 5:9] = hidden
    out = operator.attention(q, k, v, mask)
    assert (out[:, :, 5:9] == 0).all()
    assert close(out, exact(q, k, v, mask))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_masks_at_random(operator, data):
    heads_kv = data.draw(st.sampled_from([HEADS, 2]))
    sizes = [data.draw(st.sampled_from([1, n])) for n in (BATCH, HEADS, ROWS, ROWS)]
    mask = random_mask(*sizes, seed=data.draw(st.integers(0, 99)))
    if data.draw(st.booleans()):
        mask = mask.mT.contiguous().mT
    layout = data.draw(st.sampled_from(["bhsd", "bshd", "packed"]))
    q, k, v = tensors(BATCH, HEADS, ROWS, heads_kv, layout)
    scale = data.draw(st.sampled_from([None, 0.3]))
    out = operator.attention(q, k, v, mask, scale=scale, enable_gqa=heads_kv != HEADS)
    assert close(out, exact(q, k, v, mask, scale=scale))


REFUSED = {
    "with dropout": lambda q, k, v: ((q, k, v, random_mask(ROWS, ROWS), 0.5), {}),
    "with gradients": lambda q, k, v: ((q.requires_grad_(), k, v, random_mask(ROWS, ROWS)), {}),
    "negated": lambda q, k, v: ((torch._neg_view(q), k, v, random_mask(ROWS, ROWS)), {}),
    "not tuned": lambda q, k, v: ((q[:, :, :3], k, v, random_mask(3, ROWS)), {}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_served_is_pytorchs(operator, driver, why):
    arguments, options = REFUSED[why](*tensors(BATCH, HEADS, ROWS))
    assert operator.explain(*arguments, **options).kernel is None
    torch.manual_seed(1)
    got = operator.attention(*arguments, **options)
    torch.manual_seed(1)
    assert torch.equal(got, F.scaled_dot_product_attention(*arguments, **options))
    assert driver.launches == []


WRONG = {
    "numbers": lambda q: torch.ones(ROWS, ROWS, dtype=torch.uint8),
    "another length": lambda q: random_mask(ROWS, ROWS - 1),
    "five dimensions": lambda q: random_mask(1, 1, 1, ROWS, ROWS),
    "of more items": lambda q: random_mask(3, 1, ROWS, ROWS),
}


@pytest.mark.parametrize("what", WRONG)
def test_pytorchs_errors_stay(operator, driver, what):
    q, k, v = tensors(BATCH, HEADS, ROWS)
    with pytest.raises((RuntimeError, ValueError)):
        operator.attention(q, k, v, WRONG[what](q))
    assert driver.launches == []


def test_a_mask_and_is_causal_are_pytorchs(operator, driver):
    q, k, v = tensors(BATCH, HEADS, ROWS)
    mask = random_mask(ROWS, ROWS)
    try:
        expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            operator.attention(q, k, v, mask, is_causal=True)
    else:
        assert torch.equal(operator.attention(q, k, v, mask, is_causal=True), expected)
    assert driver.launches == []


# ---- never a stale answer ----
def same(operator, given, mask):
    return close(operator.attention(*given, mask), exact(*given, mask))


CHANGES = {
    "in place": lambda m: m.logical_not_(),
    "one element": lambda m: m.__setitem__((0, 0, 3, 3), ~m[0, 0, 3, 3]),
    "through a view": lambda m: m[1, 0].zero_(),
    "by copy_": lambda m: m.copy_(~m),
    "another memory": lambda m: m.set_(~m),
    "another memory behind autograd": lambda m: setattr(m, "data", ~m),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_mask_is_scanned_again(operator, how):
    given = tensors(BATCH, HEADS, ROWS)
    mask = random_mask(BATCH, 1, ROWS, ROWS)
    assert same(operator, given, mask)
    CHANGES[how](mask)
    assert same(operator, given, mask)


def test_a_mask_at_the_address_of_one_that_is_gone(operator):
    given, there = tensors(BATCH, HEADS, ROWS), []
    memory = torch.empty(BATCH, 1, ROWS, ROWS, dtype=torch.bool)
    for seed in range(6):  # views of the same memory: new objects, at one address, of one version
        memory.data.copy_(random_mask(BATCH, 1, ROWS, ROWS, seed=seed))
        mask = memory.view(BATCH, 1, ROWS, ROWS)
        assert same(operator, given, mask)
        del mask
        there.append(alive())
    assert there[1:] == there[:-1], "what was made of a mask goes with it"


def test_under_inference_mode_nothing_is_kept(operator, kernel):
    given = tensors(BATCH, HEADS, ROWS)
    with torch.inference_mode():
        mask = random_mask(BATCH, 1, ROWS, ROWS)
        for _ in range(2):
            assert same(operator, given, mask)
            mask.logical_not_()
    assert kernel.scans == 2


@pytest.mark.parametrize("write", ["data", "memory"])
def test_without_the_cache_a_mask_is_scanned_anew(operator, kernel, write):
    given, mask = tensors(BATCH, HEADS, ROWS), random_mask(BATCH, 1, ROWS, ROWS)
    assert same(operator, given, mask)
    before = operator.attention(*given, mask)
    if write == "data":
        mask.data.logical_not_()
    else:
        memory = mask.numpy()
        memory[:] = ~memory
    assert torch.equal(operator.attention(*given, mask), before), "PyTorch says that nothing was written"
    out = operator.attention(*given, mask, cache=False)
    assert close(out, exact(*given, mask))
    assert kernel.scans == 2
    assert operator.explain(*given, mask, cache=False).kernel is not None


@pytest.mark.parametrize("how", ["without the cache", "inference mode", "compiled"])
@pytest.mark.parametrize(
    ("sdpa_us", "heads_kv", "by"), [(39, HEADS, "short_scan"), (41, HEADS, "kernel"), (39, 2, "kernel")]
)
def test_what_is_shorter_than_a_scan_that_is_not_kept_is_pytorchs(tmp_path, driver, kernel, how, sdpa_us, heads_kv, by):
    own = winner(shape(BATCH, HEADS, ROWS, heads_kv=heads_kv, boolean=("item",)))
    operator = make(tmp_path, driver, replace(own, sdpa_us=float(sdpa_us)))
    operator.planner.gpus[0] = replace(operator.planner.gpus[0], guard=Guard())
    given = tensors(BATCH, HEADS, ROWS, heads_kv)
    call = functools.partial(operator.attention, cache=how != "without the cache", enable_gqa=heads_kv != HEADS)
    with torch.inference_mode(how == "inference mode"):
        mask = random_mask(BATCH, 1, ROWS, ROWS)
        out = (compiled(call)[0] if how == "compiled" else call)(*given, mask)
        assert close(out, exact(*given, mask))
        assert operator.counters() == {by: 1}
        operator.attention(*given, mask, enable_gqa=heads_kv != HEADS)
    kept = how != "inference mode" and by == "short_scan"
    assert operator.counters() == ({by: 1, "kernel": 1} if kept else {by: 2})


def test_lengths_that_are_not_kept_are_a_kernels_in_a_short_call_too(tmp_path, driver, kernel):
    """PyTorch's own would take longer to make a mask of them than their scan does."""
    operator = make(tmp_path, driver, replace(winner(shape(BATCH, HEADS, ROWS, padded=True)), sdpa_us=12.0))
    operator.planner.gpus[0] = replace(operator.planner.gpus[0], guard=Guard())
    given, lengths = tensors(BATCH, HEADS, ROWS), torch.tensor([100, ROWS])
    seen = torch.arange(ROWS) < lengths[:, None, None, None]
    assert close(operator.attention(*given, key_lengths=lengths, cache=False), exact(*given, seen))
    with torch.inference_mode():
        operator.attention(*given, key_lengths=lengths.clone())
    assert operator.counters() == {"kernel": 2}


@pytest.mark.parametrize("gone", ["fwd", "mask", "order"])
def test_a_kernel_without_the_code_of_a_stage_is_not_called(operator, driver, gone):
    gpu = operator.planner.gpus[0]
    kernels = [replace(w.kernel, stages={k: v for k, v in w.kernel.stages.items() if k != gone}) for w in gpu.winners]
    winners = [replace(w, kernel=kernel) for w, kernel in zip(gpu.winners, kernels, strict=True)]
    operator.planner.gpus[0] = replace(gpu, winners=tuple(winners))
    given, mask = tensors(BATCH, HEADS, ROWS), random_mask(BATCH, 1, ROWS, ROWS)
    assert close(operator.attention(*given, mask), exact(*given, mask))
    assert operator.counters() == {"no_code": 1}
    assert driver.launches == []


def test_many_masks_that_live_are_not_all_kept(operator, constants):
    constants(mask_lists, MOST_LISTS=4)
    given, there = tensors(BATCH, HEADS, ROWS), []
    masks = [random_mask(BATCH, 1, ROWS, ROWS, seed=n) for n in range(7)]
    for mask in masks:
        assert same(operator, given, mask)
        there.append(alive())
    assert there[2] < there[3] == there[6]
    assert same(operator, given, masks[0])


# ---- compiled code ----
@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16])
def test_compiled_code_takes_another_mask_in_each_call(tmp_path, driver, kernel, kind):
    """One graph of one operator, which keeps no mask: a compiler uses its memory for others unseen."""
    torch._dynamo.reset()
    operator = make(
        tmp_path,
        driver,
        winner(shape(BATCH, HEADS, ROWS, boolean=("item",))),
        winner(shape(BATCH, HEADS, ROWS, bias=("item",))),
    )
    call, graphs = compiled(lambda q, k, v, m: operator.attention(q, k, v, m) * 1.0)
    given, mask = tensors(BATCH, HEADS, ROWS), torch.zeros(BATCH, 1, ROWS, ROWS, dtype=kind)

    def drawn(seed):
        seen = random_mask(BATCH, 1, ROWS, ROWS, seed=seed)
        return seen if kind is torch.bool else (~seen).to(kind) * -3.0

    for seed in range(3):
        mask.data.copy_(drawn(seed))  # as a replay of a graph writes: PyTorch sees nothing
        for each in (mask, drawn(seed + 9)):
            assert close(call(*given, each), exact(*given, each))
    assert [graph.code.count(".attention_sdpa.") for graph in graphs] == [1]
    assert operator.counters() == {"kernel": 6}
    assert kernel.scans == (6 if kind is torch.bool else 0)


@pytest.mark.parametrize("says", ["also where it traces operators", "where it reads itself alone"])
def test_masks_that_compiled_code_makes_itself(operator, says, monkeypatch):
    """Three of one size and version, whose memory may be one.

    says: where the compiler has torch.compiler.is_compiling true; earlier PyTorch in less of it.
    """
    if says == "where it reads itself alone":
        monkeypatch.setattr(torch.compiler, "_compile_session_context", contextlib.nullcontext, raising=False)
    torch._dynamo.reset()
    lengths = torch.tensor([3, ROWS])

    def layers(q, k, v, lengths):
        keys = torch.arange(ROWS)
        padding = (keys < lengths[:, None])[:, None, None].expand(-1, 1, ROWS, ROWS)
        causal = (keys <= keys[:, None]).expand(BATCH, 1, ROWS, ROWS)
        out = operator.attention(q, k, v, padding & causal)
        out = operator.attention(out, k, v, padding & ~causal.mT)
        return operator.attention(out, k, v, (padding & causal).logical_xor(padding))

    call = torch.compile(layers, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for step in range(3):
            given = (*tensors(BATCH, HEADS, ROWS), lengths - step)
            assert close(call(*given), layers(*given))
    assert operator.counters() == {"kernel": 18}
