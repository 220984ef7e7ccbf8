"""What PyTorch's attention is kept from: calls and gradients that its backends get wrong."""

import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from operators import close, exact, gradients_of, make, shifted, tensors  # noqa: E402
from packages import shape, winner  # noqa: E402

import attnsweep  # noqa: E402
from attnsweep.core.scores import Scores  # noqa: E402
from attnsweep.serve.runtime import operator as serve_operator  # noqa: E402
from attnsweep.serve.runtime import pytorch_calls, sdpa_patch  # noqa: E402
from attnsweep.serve.runtime.pytorch_calls import Layout, Steps, aligned, attend, watched  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def backend(monkeypatch):
    """Calls of PyTorch's attention: their tensors, mask, dropout and whether cuDNN was allowed."""
    calls = []

    def watched(*given, **how):
        calls.append((*given, torch._C._get_cudnn_sdp_enabled()))
        return sdpa_patch.sdpa(*given, **how)

    monkeypatch.setattr(pytorch_calls, "sdpa", watched)
    return calls


def leaves(*given):
    return [t.detach().requires_grad_() for t in given]


# ---- tensors ----
ODD = {
    "address": shifted,
    "rows 65 apart": lambda t: torch.nn.functional.pad(t, (0, 1))[..., :64],
    "rows 68 apart": lambda t: torch.nn.functional.pad(t, (0, 4))[..., :64],
}


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("odd", ODD)
def test_backends_get_rows_at_multiples_of_16_bytes(backend, odd, which):
    given = list(tensors())
    given[which] = ODD[odd](given[which])
    out = attend(*given)
    (got,) = backend
    assert all(t.data_ptr() % 16 == 0 and not any(n % 8 for n in t.stride()[:-1]) for t in got[:3])
    assert [t is own for t, own in zip(got[:3], given, strict=True)] == [n != which for n in range(3)]
    assert close(out, exact(*given))


SHARED = {
    "one item": lambda t: t[:1].expand_as(t),
    "one head": lambda t: t[:, :1].expand_as(t),
    "one row": lambda t: t[:, :, :1].expand_as(t),
}


@pytest.mark.parametrize("records", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("shared", SHARED)
def test_backends_get_expanded_queries_as_they_are_unless_v_has_other_columns(backend, shared, records):
    """cuDNN makes the output's strides of those, which ended the process the second time."""
    q, k, v = tensors(2)
    q = SHARED[shared](q).requires_grad_(records)
    for _ in range(2):  # strides that are known by then are no others
        assert 0 in (attend(q, k, v), backend.pop())[1][0].stride()
        out = attend(q, k, v[..., :48].contiguous())
        assert 0 not in backend.pop()[0].stride()
        assert close(out, exact(q, k, v[..., :48]))


def test_what_needs_no_copy_is_not_copied():
    for t in (*tensors(), *tensors(layout="packed"), tensors(head_dim=36)[0], shifted(tensors(head_dim=36)[0])):
        assert aligned(t) is t


BIASES = {"keys apart": lambda m: m.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), "address": shifted}


@pytest.mark.parametrize("own", BIASES)
def test_backends_get_rows_of_a_bias(backend, own):
    q, k, v = tensors(2)
    mask = BIASES[own](torch.randn(1, 4, 256, 256).bfloat16()).expand(2, 4, 256, 256)
    assert close(attend(q, k, v, mask), exact(q, k, v, mask))
    given = backend[0][3]
    assert given.stride(-1) == 1
    assert given.data_ptr() % 16 == 0
    assert given.untyped_storage().nbytes() == 4 * 256 * 256 * 2, "one of all items"


@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_backends_get_a_mask_of_queries_for_all_keys(backend, kind):
    mask = torch.randn(2, 1, 256, 1, generator=torch.manual_seed(6)).bfloat16()
    mask = mask > -1 if kind == "boolean" else mask
    given = tensors(2)
    assert close(attend(*given, mask, fill=True), exact(*given, mask.expand(2, 1, 256, 256)))
    assert backend[0][3].shape == (2, 1, 256, 256)
    assert kind == "boolean" or backend[0][3].stride(-1) == 1


# ---- queries that see no key ----
def rows_without_a_key(kind):
    mask = torch.rand(2, 1, 256, 256, generator=torch.manual_seed(3)) < 0.5
    mask[1, :, :100] = False
    return mask if kind == "boolean" else torch.zeros(mask.shape).bfloat16().masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize("kind", ["boolean", "added"])
@pytest.mark.parametrize("call", [attnsweep.attention, "flash_attn_func", "compiled"])
def test_a_query_that_sees_no_key_is_0_and_so_are_its_gradients(tmp_path, driver, monkeypatch, call, kind):
    """Whatever a backend makes of it: here a mean of v, as cuDNN does."""
    if call == "flash_attn_func":
        q, k, v = (t.transpose(1, 2) for t in tensors(2))
        k, v = k[:, :100], v[:, :100]
        given = leaves(q, k, v)
        out = attnsweep.flash_attn_func(*given, causal=True)
        empty = torch.arange(256) < 156
        assert not out[:, empty].any()
        dq, dk, dv = torch.autograd.grad(out, given, torch.randn_like(out))
        assert not dq[:, empty].any()
        assert all(bool(g.isfinite().all()) for g in (dq, dk, dv))
        return

    def mixture(query, key, value, attn_mask=None, *rest, **how):
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -1e4).to(query.dtype)
        return sdpa_patch.sdpa(query, key, value, attn_mask.clamp_min(-1e4), *rest, **how)

    monkeypatch.setattr(pytorch_calls, "sdpa", mixture)
    monkeypatch.setattr(pytorch_calls, "_ADDED_ROWS_RIGHT", False)
    mask, given = rows_without_a_key(kind), tensors(2)
    attention = attnsweep.attention
    if call == "compiled":
        operator = make(tmp_path, driver)
        attention = torch.compile(operator.attention, fullgraph=True, backend="eager")
    empty = (~mask if kind == "boolean" else mask == -torch.inf).all(-1).expand(2, 4, 256)
    own = leaves(*given)
    out = attention(*own, mask)
    assert close(out, exact(*given, mask))
    assert not out[empty].any()
    direction = torch.randn(out.shape).bfloat16()
    dq, dk, dv = torch.autograd.grad(out, own, direction)
    assert not dq[empty].any()
    shown = direction.masked_fill(empty[..., None], 0)
    wanted = gradients_of(lambda q, k, v: exact(q, k, v, mask), [t.double() for t in given], shown.double())
    assert all(close(a, b) for a, b in zip((dq, dk, dv), wanted, strict=True))


def test_a_query_of_pytorchs_own_name_costs_no_more(backend):
    """While a package stands in its place, such a query has what PyTorch's backend makes of it."""
    mask = rows_without_a_key("boolean")
    with attnsweep.enable():
        F.scaled_dot_product_attention(*tensors(2), mask)
    assert backend[0][3] is mask


# ---- gradients ----
def test_gradients_of_one_layout_are_what_plans_are_made_for():
    """cuDNN's plan of a shape is made for the first one's layout; an expanded one is none."""
    for first, others in (("bhsd", ("bshd", "row")), ("bshd", ("bhsd", "row")), ("row", ("bhsd", "bshd"))):
        made = {
            "bhsd": torch.randn(2, 4, 8, 16),
            "bshd": torch.randn(2, 8, 4, 16).transpose(1, 2),
            "row": torch.randn(1, 1, 1, 16).expand(2, 4, 8, 16),
        }
        layout = Layout(made["bhsd"].stride())
        kept = layout.copied(made[first])
        assert (kept is None) == (first != "row")
        wanted = made["bhsd" if first == "row" else first].stride()
        for name in (first, *others, first):
            got = layout.copied(made[name])
            got = made[name] if got is None else got
            assert torch.equal(got, made[name])
            assert got.stride() == wanted
        off = shifted(made["bhsd"].as_strided((2, 4, 8, 16), made["bhsd"].stride()))
        assert layout.copied(off).data_ptr() % 16 == 0


def test_gradients_of_calls_that_cudnn_serves_have_the_layout_of_the_first(monkeypatch):
    """Whoever makes them, in any order, and hooks of the caller's own stay."""
    seen = []

    class Plan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return sdpa_patch.sdpa(q, k, v)

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.stride())
            return grad, grad, grad

    def cudnn(q, k, v, *_, **__):
        return Plan.apply(q, k, v)

    monkeypatch.setattr(pytorch_calls, "sdpa", cudnn)
    monkeypatch.setattr(pytorch_calls, "_OF_CUDNN", "PlanBackward")
    told = []
    for number, layout in enumerate(("bshd", "bhsd", "packed", "bshd")):
        given = leaves(*tensors(3, 4, 40, layout="bhsd"))
        out = attend(*given)
        out.register_hook(lambda g: told.append(g.stride()))
        direction = tensors(3, 4, 40, layout=layout)[0]
        got = torch.autograd.grad(out, given, direction)
        assert torch.equal(got[0], direction), number
    assert len({*seen}) == 1
    assert seen[0] == tensors(3, 4, 40, layout="bshd")[0].stride()
    assert told == seen


def test_steps_are_watched_until_their_gradients_were_alike_so_often():
    steps, layout = Steps(), tensors(3, 2, 24)[0]
    q = leaves(*tensors(3, 2, 24))[0]
    for left in range(Steps.WATCHED, 0, -1):
        assert steps.left == left
        out = q * 1
        steps.watch(out, Layout(layout.stride()).copied)
        out.backward(layout)
    assert steps.left == 0
    out = q * 1
    steps.watch(out, Layout(layout.stride()).copied)
    seen = []
    out.register_hook(lambda g: seen.append(g.stride()))
    out.backward(layout.transpose(1, 2).contiguous().transpose(1, 2))
    assert seen != [layout.stride()], "not watched any more"

    steps.watch(q + 1, Layout(layout.stride()).copied)
    assert steps.left == Steps.WATCHED, "another backend begins anew"

    other, own = Steps(), Layout(layout.stride())
    for each in (layout, layout.transpose(1, 2).contiguous().transpose(1, 2), layout):
        out = q * 1
        other.watch(out, own.copied)
        out.backward(each)
    assert other.left > sys.maxsize // 2, "watched for ever"


def test_gradients_of_two_backends_are_copied_each_as_its_own_needs():
    steps, (q, *_), seen = Steps(), leaves(*tensors()), []
    outs = q * 1, q + 1
    for number, out in enumerate(outs):
        steps.watch(out, lambda _, number=number: seen.append(number))
    for out in outs:
        out.backward(torch.ones_like(out))
    assert seen == [0, 1]


@pytest.fixture
def places(monkeypatch):
    """An enabled package that serves tensors on the CPU, and has met no place yet."""
    from attnsweep.serve.runtime import package

    monkeypatch.setattr(package._operator, "device_types", ("cpu",))
    for met in (package._operator.short_steps.settled, package._operator.short_steps._kinds):
        met.clear()
    with attnsweep.enable():
        yield package


@pytest.mark.parametrize("by_cudnn", [True, False])
def test_a_place_of_short_steps_that_were_alike_is_pytorchs_at_once(monkeypatch, places, by_cudnn):
    """Other places, sizes and layouts are watched anew."""
    watched = []

    def watch(self, out, _):
        if self.left:
            watched.append(self)
            self.left, self.backend = self.left - 1, type(out.grad_fn)

    monkeypatch.setattr(Steps, "watch", watch)
    if by_cudnn:
        monkeypatch.setattr(pytorch_calls, "_OF_CUDNN", type((leaves(*tensors())[0] * 1).grad_fn).__name__)
    real = sdpa_patch.sdpa
    for module in (places, pytorch_calls):
        monkeypatch.setattr(module, "sdpa", lambda q, k, v, *a, **b: real(q, k, v, *a, **b) * 1)
    for count in range(Steps.WATCHED + 3):
        F.scaled_dot_product_attention(*leaves(*tensors(seqlen=48)))
        assert len(watched) == min(count + 1, Steps.WATCHED)
    F.scaled_dot_product_attention(*leaves(*tensors(seqlen=48)))
    assert len(watched) == Steps.WATCHED + 1, "another place"


def test_steps_that_call_the_package_settle_by_their_place_too(monkeypatch, places):
    operator = places._operator
    monkeypatch.setattr(operator, "_on_cuda", False)
    monkeypatch.setattr(operator, "short_work", 1e9)
    asked, given = [], leaves(*tensors(seqlen=48))
    for own in (attend, watched):  # of the first such step, and of the next ones
        monkeypatch.setattr(serve_operator, own.__name__, lambda *a, own=own, **b: asked.append(own) or own(*a, **b))

    def steps(count):
        for _ in range(count):
            out = attnsweep.attention(*given)
            out.backward(torch.ones_like(out))
            yield out

    *_, first = steps(Steps.WATCHED + 1)
    settled = len(asked)
    *_, last = steps(3)
    assert asked == [attend, *[watched] * Steps.WATCHED]
    assert len(asked) == settled
    assert torch.equal(last, first)
    assert attnsweep.attention(*given).requires_grad
    assert len(asked) == settled + 1, "another place"
    for other in (off_16_bytes(), leaves(*tensors(seqlen=80))):
        given[:] = other
        [*steps(1)]
    assert len(asked) == settled + 3, "other rows, and another length"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_place_that_gets_a_nested_tensor_ends_in_pytorchs_error(monkeypatch, places, which, direct):
    """It ended the process: a nested tensor has no strides to compare."""
    monkeypatch.setattr(places._operator, "_on_cuda", False)
    monkeypatch.setattr(places._operator, "short_work", 1e9)
    given, call = leaves(*tensors(seqlen=48)), attnsweep.attention if direct else F.scaled_dot_product_attention
    nested = [*given]
    nested[which] = torch.nested.nested_tensor([*given[which].detach()], requires_grad=True)

    def step(tensors):
        out = call(*tensors)
        out.backward(torch.ones_like(out))

    for _ in range(Steps.WATCHED + 2):
        step(given)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected both to be nested"):
            step(nested)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dropout_p": None},
        {"dropout_p": []},
        {"enable_gqa": 0},
        {"enable_gqa": None},
        {"is_causal": None},
        {"is_causal": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("direct", [True, False])
def test_a_place_refuses_what_pytorch_refuses_before_it_settled_and_after(monkeypatch, places, direct, wrong):
    """What is false is no number, and not False."""
    monkeypatch.setattr(places._operator, "_on_cuda", False)
    monkeypatch.setattr(places._operator, "short_work", 1e9)
    given, call = leaves(*tensors(seqlen=48)), attnsweep.attention if direct else F.scaled_dot_product_attention
    raised = []
    for number in range(Steps.WATCHED + 3):
        try:
            out = call(*given, **({} if 0 < number < Steps.WATCHED + 2 else wrong))
            out.backward(torch.ones_like(out))
        except TypeError as error:
            raised.append((number, str(error)))
    assert [number for number, _ in raised] == [0, Steps.WATCHED + 2]
    with torch.no_grad(), pytest.raises(TypeError, match=next(iter(wrong))):
        call(*given, **wrong)


def test_a_call_that_no_frame_makes_has_no_place(monkeypatch, places):
    """As where C calls in a thread of its own."""
    monkeypatch.setattr(places, "_frame", lambda _: sys._getframe(10**6))
    given = leaves(*tensors(seqlen=48))
    assert close(F.scaled_dot_product_attention(*given), exact(*given))


def off_16_bytes():
    """q, k and v whose rows are 68 elements apart."""
    return leaves(*(torch.cat([t, t[..., :4]], -1)[..., :64] for t in tensors(seqlen=48)))


@pytest.mark.parametrize("given", [off_16_bytes, lambda: leaves(*tensors(seqlen=64))], ids=["rows", "NaN"])
def test_a_place_whose_calls_are_not_pytorchs_as_they_are_is_protected_for_ever(monkeypatch, places, given):
    """Copies of what cuDNN misreads, and other backends where its gradients may be NaN: after many steps too."""
    real, calls = sdpa_patch.sdpa, []
    monkeypatch.setattr(pytorch_calls, "_OF_CUDNN", type(real(*given()).grad_fn).__name__)

    def noted(q, k, v, *args, **options):
        calls.append((q.stride()[2] % 8, torch._C._get_cudnn_sdp_enabled()))
        return real(q, k, v, *args, **options)

    for module in (places, pytorch_calls):
        monkeypatch.setattr(module, "sdpa", noted)
    for _ in range(2 * Steps.WATCHED):
        out = F.scaled_dot_product_attention(*given())
        out.backward(torch.ones_like(out))
    assert len(calls) == 2 * Steps.WATCHED
    assert {*calls} in ({(0, True)}, {(0, False)})
    assert given is off_16_bytes or calls[0] == (0, False)


@pytest.mark.parametrize("cudnn", ["AddBackward0", "MulBackward0"])
def test_a_settled_place_that_gets_cudnn_is_watched_and_one_that_had_it_is_not(monkeypatch, places, cudnn):
    real, backend, seen = sdpa_patch.sdpa, [1], []

    def chosen(q, k, v, *args, **options):
        out = real(q, k, v, *args, **options)
        return out * 1 if backend == [1] else out + 1

    for module in (places, pytorch_calls):
        monkeypatch.setattr(module, "sdpa", chosen)
    monkeypatch.setattr(pytorch_calls, "_OF_CUDNN", cudnn)
    given = leaves(*tensors(seqlen=48))
    of_out = torch.ones(given[0].shape, dtype=given[0].dtype)
    other = of_out.transpose(1, 2).contiguous().transpose(1, 2)
    for number in range(Steps.WATCHED + 4):
        if number == Steps.WATCHED + 2:
            backend[:] = [2]
        out = F.scaled_dot_product_attention(*given)
        out.register_hook(lambda grad: seen.append(grad.stride()))
        out.backward(of_out if number < Steps.WATCHED + 3 else other)
    assert seen[-2] == of_out.stride()
    assert seen[-1] == (of_out if cudnn == "AddBackward0" else other).stride()


def test_a_mask_alone_has_gradients():
    q, k, v = tensors(2)
    mask = torch.randn(2, 4, 256, 256).bfloat16().requires_grad_()
    (got,) = torch.autograd.grad(attend(q, k, v, mask), mask, torch.ones_like(q))
    double = mask.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(exact(q, k, v, double), double, torch.ones_like(q).double())
    assert close(got, want)


@pytest.mark.parametrize(
    ("keys", "masked", "causal", "allowed"),
    [(64, False, False, False), (192, True, False, False), (192, False, True, True), (128, True, False, True)],
)
def test_cudnn_computes_no_gradients_that_may_be_nan(backend, keys, masked, causal, allowed):
    """At seqlen_k % 128 == 64, unless is_causal alone hides keys."""
    given = leaves(*tensors(seqlen=keys))
    mask = torch.ones(keys, keys, dtype=torch.bool) if masked else None
    attend(*given, mask, is_causal=causal)
    attend(*(t.detach() for t in given), mask, is_causal=causal)
    assert [call[-1] for call in backend] == [allowed, True]
    assert torch._C._get_cudnn_sdp_enabled()


@pytest.mark.parametrize("most", [3, 2])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("own", [None, (7, 1, 16, 16), (1, 4, 16, 16), (7, 4, 1, 16), (16, 16)])
def test_gradients_of_more_items_or_heads_than_a_backward_takes(backend, monkeypatch, own, heads_kv, most):
    monkeypatch.setattr(pytorch_calls, "MOST_IN_GRID", most)
    given = tensors(7, 4, 16, heads_kv)
    mask = None if own is None else torch.rand(own, generator=torch.manual_seed(4)) < 0.7
    if mask is not None:
        mask[..., 0] = True
    direction = torch.randn(7, 4, 16, 64).bfloat16()

    def double(q, k, v):
        return exact(q, k, v, mask)

    got = gradients_of(lambda q, k, v: attend(q, k, v, mask, enable_gqa=True), given, direction)
    want = gradients_of(double, [t.double() for t in given], direction.double())
    assert all(close(a, b) for a, b in zip(got, want, strict=True))
    assert all(max(call[0].shape[:2]) <= most for call in backend)


# ---- packed sequences ----
@pytest.mark.parametrize(("of_q", "longest"), [((1, 0, 1), 2), ((1, 1, 1), 1), ((1, 0, 3), 3)])
def test_an_idle_sequence_is_no_query_of_another(monkeypatch, of_q, longest):
    """PyTorch's flash attention counts a query for each if the longest has one."""
    told = []

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, *rest, scale=None, **_):
        told.append(max_q)
        return q.clone(), None, None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    q, k, v = torch.randn(sum(of_q), 4, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    begins = [torch.tensor([0, *n]).cumsum(0) for n in (of_q, (3, 3, 3))]
    pytorch_calls.flash_varlen(q, k, v, begins, (max(of_q), 3), (None, 0), 0.0, None)
    assert told == [longest]


def test_an_output_that_records_no_gradient_has_gradients_of_0():
    given = leaves(*tensors())
    out = pytorch_calls.connected(torch.zeros_like(given[0]), *given)
    assert all(
        not g.any() and g.shape == t.shape for g, t in zip(torch.autograd.grad(out.sum(), given), given, strict=True)
    )
    assert pytorch_calls.connected(given[0] * 1, *given).grad_fn.name() == "MulBackward0"


def test_packed_queries_that_see_no_key_have_gradients_of_0():
    q, k, v = leaves(torch.randn(1, 4, 64), torch.randn(2, 4, 64), torch.randn(2, 4, 64))
    begins = [torch.tensor(each, dtype=torch.int32) for each in ((0, 1, 1), (0, 0, 2))]
    out = attnsweep.flash_attn_varlen_func(q, k, v, *begins, 1, 2, causal=True)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


# ---- nothing hidden ----
@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"sinks": torch.zeros(4)}])
def test_a_scan_of_a_mask_that_hides_nothing(tmp_path, driver, kernel, options):
    """Where the only kernel with a softcap reads a boolean mask, it gets one of all keys."""
    scores = Scores(options.get("softcap", 0.0), "sinks" in options)
    made = make(tmp_path, driver, winner(replace(shape(boolean=()), scores=scores)))
    q, k, v = tensors()
    out = made.attention(q, k, v, **options)
    assert made.counters() == {"kernel": 1}
    assert close(out, exact(q, k, v, **options))


@pytest.mark.parametrize(
    ("window", "told"),
    [
        ((None, None), (9, {})),
        ((None, 0), (9, {})),
        ((127, 200), (201, {"window_size_left": 127, "window_size_right": 200})),
        ((4, None), (50, {"window_size_left": 4, "window_size_right": 49})),
        ((None, 3), (50, {"window_size_left": 49, "window_size_right": 3})),
    ],
)
def test_a_window_longer_than_the_keys_is_no_open_one(monkeypatch, window, told):
    """PyTorch's flash attention takes it for one, which it is not where queries are more than keys."""
    longest = []

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, *rest, scale=None, **of_window):
        longest.append((max_k, of_window))
        return q.clone(), None, None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    q, k, v = torch.randn(40, 4, 64), torch.randn(9, 4, 64), torch.randn(9, 4, 64)
    begins = [torch.tensor([0, n]) for n in (40, 9)]
    pytorch_calls.flash_varlen(q, k, v, begins, (40, 9), window, 0.0, None)
    assert longest == [told]


def test_gradients_of_other_backends_begin_where_they_are_read(backend):
    given = leaves(*tensors(seqlen=40))
    out, seen = attend(*given), []
    out.register_hook(seen.append)
    torch.autograd.grad(out, given, shifted(torch.randn_like(out)))
    assert seen[0].data_ptr() % 16 == 0


def test_a_window_of_flash_attn_may_be_a_tensor():
    q, k, v = (t.transpose(1, 2) for t in tensors())
    wanted = attnsweep.flash_attn_func(q, k, v, window_size=(5, 9))
    assert torch.equal(attnsweep.flash_attn_func(q, k, v, window_size=torch.tensor([5, 9])), wanted)
    begins = torch.tensor([0, 256], dtype=torch.int32)
    given = (q[0], k[0], v[0], begins, begins, 256, 256)
    packed = attnsweep.flash_attn_varlen_func(*given, window_size=torch.tensor([5, 9]))
    assert close(packed, wanted[0])
