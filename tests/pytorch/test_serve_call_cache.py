"""Calls that are known from before: found by one question, unless something else has a say."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from operators import Watch, aten, close, make, tensors  # noqa: E402
from packages import shape, winner  # noqa: E402

from attnsweep.serve.runtime import call_cache, gradients  # noqa: E402
from attnsweep.serve.runtime.call import Call  # noqa: E402
from attnsweep.serve.runtime.table import PackageError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Own(torch.Tensor):
    """A subclass, as DTensor is one."""


@pytest.fixture
def known(operator, planned):
    """q, k and v of a call that is known, without gradients and with them."""
    q, k, v = tensors()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    for _ in range(2):
        operator.attention(q, k, v)
        operator.attention(*leaves)
    assert len(planned) == 4
    operator.attention(q, k, v)
    assert operator.attention(*leaves).requires_grad
    with torch.no_grad():
        operator.attention(q, k, v)
    assert len(planned) == 4, "not known"
    assert operator.counters() == {"kernel": 7}
    operator.counts.update(dict.fromkeys(operator.counts, 0))
    planned.clear()
    return q, k, v


def leaves_of(known):
    return [t.clone().requires_grad_() for t in known]


def test_a_known_call_is_launched_as_it_was(operator, driver, known):
    q, k, v = (t.flip(2) for t in known)
    out = operator.attention(q, k, v)
    assert close(out, F.scaled_dot_product_attention(q, k, v))
    assert [m["pointer"] for m in driver.maps[-4:]] == [t.data_ptr() for t in (q, k, v, out)]
    assert driver.launches[-1]["values"][4:6] == [0, 0]
    out = operator.attention(*leaves_of((q, k, v)))
    assert driver.launches[-1]["values"][4], "the log-sum-exp"
    assert close(out, F.scaled_dot_product_attention(q, k, v))


OTHER = {
    "layout": lambda q, k, v: (tensors(layout="bshd"), {}),
    "one layout": lambda q, k, v: ((q, k, tensors(layout="bshd")[2]), {}),
    "length": lambda q, k, v: (tensors(seqlen=250), {}),
    "keys": lambda q, k, v: ((q, k[:, :, :250].clone(), v[:, :, :250].clone()), {}),
    "heads of keys": lambda q, k, v: (tensors(heads_kv=2), {"enable_gqa": True}),
    "grouped": lambda q, k, v: ((q, k, v), {"enable_gqa": True}),
    "scale": lambda q, k, v: ((q, k, v), {"scale": 0.3}),
    "causal": lambda q, k, v: ((q, k, v), {"is_causal": True}),
    "one gradient": lambda q, k, v: ((q, k, v.clone().requires_grad_()), {}),
    "parameter": lambda q, k, v: ((torch.nn.Parameter(q), k, v), {}),
    "thrice": lambda q, k, v: ((q, q, q), {}),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_call_is_planned_anew(operator, driver, known, planned, what):
    given, options = OTHER[what](*known)
    out = operator.attention(*given, **options)
    assert planned, "taken for the known call"
    assert close(out, F.scaled_dot_product_attention(*given, **options))
    assert out.requires_grad == any(t.requires_grad for t in given)
    for _ in range(3):
        again = operator.attention(*given, **options)
        assert torch.equal(again, out)
    assert operator.counters() == {"kernel": 4}


def test_a_nested_value_raises_like_pytorchs(operator, known):
    """It has no strides, and to ask PyTorch whether it is like others would end the process."""
    q, k, _ = known
    value = torch.nested.nested_tensor([torch.ones(2, 8, 16, dtype=q.dtype)])
    with pytest.raises(RuntimeError, match="ested"):
        operator.attention(q, k, value)


def test_dispatch_modes_see_pytorchs_operators(operator, known):
    for given in (known, leaves_of(known)):
        with Watch() as own:
            F.scaled_dot_product_attention(*given)
        with Watch() as watch:
            operator.attention(*given)
        assert watch.seen == own.seen
    assert operator.counters() == {"subclass": 2}


def test_fake_tensors_are_never_launched(operator, driver, known):
    from torch._subclasses.fake_tensor import FakeTensorMode

    launched = len(driver.launches)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t) for t in known]
        for given in (fake, known, (known[0], *fake[1:])):
            assert type(operator.attention(*given)) is type(fake[0])
    assert len(driver.launches) == launched


def test_proxies_hold_pytorchs_operator(operator, known):
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda q, k, v: operator.attention(q, k, v))(*known)
    assert "aten._scaled_dot_product" in graph.code


def test_compiled_under_autocast(operator, known):
    compiled = torch.compile(lambda q, k, v: operator.attention(q, k, v), fullgraph=True, backend="aot_eager")
    for given in (known, [t.float() for t in known]):
        with torch.autocast("cpu", torch.bfloat16):
            assert close(compiled(*given), F.scaled_dot_product_attention(*known))
    assert operator.counters() == {"kernel": 2}


def test_transforms_are_pytorchs(operator, driver, known):
    """Also of tensors that stay as they are: only some are wrapped by a transform."""
    q, k, v = known
    launched = len(driver.launches)
    many = q.expand(2, *q.shape)
    right = F.scaled_dot_product_attention(q, k, v)
    assert close(torch.vmap(operator.attention, (0, None, None))(many, k, v)[1], right)
    assert close(torch.vmap(lambda one: operator.attention(q, k, v) + 0 * one)(many)[1], right)

    def total(q, k, v):
        return operator.attention(q, k, v).float().sum()

    def pytorchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).float().sum()

    got = torch.func.grad(total, (0, 1, 2))(q, k, v)
    expected = torch.func.grad(pytorchs, (0, 1, 2))(q, k, v)
    assert all(map(torch.equal, got, expected))
    with torch.autograd.forward_ad.dual_level():
        operator.attention(q, k, v)
    torch.jit.trace(operator.attention, (q, k, v), check_trace=False)
    assert len(driver.launches) == launched
    assert operator.counters() == {"transform": 5}


def test_a_wrapper_that_outlived_its_transform(operator, known, planned):
    kept = []
    torch.vmap(lambda one: kept.append(one) or one.sum())(known[0][0])
    _, k, v = known
    for _ in range(3):
        with pytest.raises(RuntimeError, match="escaped"):
            operator.attention(kept[0], k, v)
    torch.func.grad(lambda one: kept.append(one) or one.float().sum())(known[0])
    for _ in range(3):
        planned.clear()
        out = operator.attention(kept[1], k, v)
        assert close(out, F.scaled_dot_product_attention(*known))
        assert planned, "met again"


@pytest.mark.parametrize("grad", [False, True])
def test_autocast(operator, driver, known, planned, grad):
    kernel = driver.on_launch

    def on_launch(launch):
        with torch.autocast("cpu", enabled=False):
            kernel(launch)

    driver.on_launch = on_launch
    given = leaves_of(known) if grad else known
    halves = [t.detach().float() for t in known]
    with torch.autocast("cpu", torch.bfloat16):
        for each in (given, halves, given, halves, given, halves):
            out = operator.attention(*each)
            assert out.dtype == torch.bfloat16
            assert close(out, F.scaled_dot_product_attention(*known))
        assert operator.counters() == {"kernel": 6}
        planned.clear()
        operator.attention(*given)
        assert not planned, "known under autocast as well"
    with torch.autocast("cpu", torch.float16):
        assert operator.attention(*given).dtype == torch.float16
    assert operator.attention(*given).dtype == torch.bfloat16


def test_gradients_that_are_switched_off_and_on(operator, known, planned):
    leaves = leaves_of(known)
    for _ in range(8):
        with torch.no_grad():
            assert not operator.attention(*leaves).requires_grad
        with torch.inference_mode():
            out = operator.attention(*leaves)
            assert (out.requires_grad, out.is_inference()) == (False, True)
        assert operator.attention(*leaves).requires_grad
        assert not operator.attention(*(t.detach() for t in leaves)).requires_grad
    planned.clear()
    with torch.no_grad():
        operator.attention(*leaves)
    operator.attention(*leaves)
    assert not planned


def test_what_is_known_without_gradients_has_them_once_they_are_on(operator, driver):
    leaves = leaves_of(tensors())
    with torch.no_grad():
        for _ in range(4):
            operator.attention(*leaves)
    assert operator.attention(*leaves).requires_grad
    for _ in range(4):
        assert operator.attention(*leaves).requires_grad
    with torch.no_grad():
        operator.attention(*leaves)
    assert driver.launches[-1]["values"][4] == 0, "a log-sum-exp that nobody needs"


def test_inference_tensors(operator, known):
    with torch.inference_mode():
        given = [t.clone() for t in known]
    for _ in range(4):
        assert close(operator.attention(*given), F.scaled_dot_product_attention(*known))
        assert operator.attention(*leaves_of(known)).requires_grad
    assert operator.counters() == {"kernel": 8}


def test_lazy_negations_and_zeros_are_made_real(operator, known):
    q, k, v = known
    for _ in range(3):
        negated = operator.attention(q, k, torch._neg_view(v))
        assert close(negated, F.scaled_dot_product_attention(q, k, -v))
        zeros = torch._efficientzerotensor(v.shape, dtype=v.dtype)
        assert not operator.attention(q, k, zeros).any()
    assert operator.counters() == {"kernel": 3, "subclass": 3}


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_saved_and_profiled_stays(operator, known, planned, grad):
    """Hooks see what a gradient needs. A profile shows PyTorch's parts of a call, no operator."""
    fresh = tensors(seqlen=250)
    made = []
    for given in (fresh, known):
        given, packed = (leaves_of(given) if grad else given), []
        hooks = torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: None)
        with hooks, torch.profiler.profile() as profile:
            operator.attention(*given)
        names = {event.key for event in profile.key_averages() if "sdp" not in event.key}
        made.append((len(packed), names))
    assert len(planned) == 1, "the fresh one"
    assert made[0] == made[1]
    assert made[0][0] == (5 if grad else 0)
    assert ("Gradient" in made[0][1]) == grad
    assert not any(name.startswith("attnsweep") for name in made[0][1])


def test_the_choice_of_a_backward_is_asked_anew_when_a_setting_changes(operator, pytorchs, constants):
    given = leaves_of(tensors())

    def called(name):
        return lambda grad, q, k, v, *_, **how: (q, k, v, backwards.append(name))[:3]

    def by_cudnn():
        with aten(**{f"_scaled_dot_product_{n}_attention_backward": called(n) for n in ("flash", "cudnn")}):
            torch.autograd.grad(operator.attention(*given).sum(), given)
        return backwards.pop() == "cudnn"

    backwards = []
    assert [by_cudnn() for _ in range(4)] == [True] * 4
    assert pytorchs.asked == 1
    pytorchs.backend = 1
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
        assert not by_cudnn()
    assert pytorchs.asked == 2
    pytorchs.backend = 3
    assert by_cudnn()
    torch.use_deterministic_algorithms(True)
    pytorchs.backend = 1
    try:
        assert not by_cudnn()
    finally:
        torch.use_deterministic_algorithms(False)
    assert pytorchs.asked == 4
    constants(gradients, SETTINGS=[*gradients.SETTINGS, object])
    by_cudnn(), by_cudnn()
    assert pytorchs.asked == 6, "a setting that this PyTorch cannot tell"


def test_a_kernel_that_fails_is_forgotten(operator, driver, known):
    driver.refuses = {"cuLaunchKernelEx"}
    for _ in range(3):
        got = operator.attention(*known)
        assert torch.equal(got, F.scaled_dot_product_attention(*known))
    assert operator.counters() == {"driver": 3}


def test_a_known_plan_that_another_thread_found_damaged(operator, known):
    leaves = leaves_of(known)
    operator.launcher.gave_up(operator.planner.plan(Call(*leaves, enable_gqa=False)), PackageError("it is"))
    for _ in range(3):
        out = operator.attention(*leaves)
        assert torch.equal(out, F.scaled_dot_product_attention(*leaves))
        assert out.requires_grad
    assert operator.counters() == {"damaged": 1 + 3}


def refuse(*_, **options):
    raise TypeError


@pytest.mark.parametrize("guards", [None, refuse], ids=["none", "refuse"])
def test_without_pytorchs_guards_every_call_is_planned(operator, planned, monkeypatch, guards):
    monkeypatch.setattr(call_cache, "TensorGuards", guards)
    given = tensors()
    for _ in range(4):
        assert close(operator.attention(*given), F.scaled_dot_product_attention(*given))
    assert (len(planned), operator.counters()) == (4, {"kernel": 4})


def test_what_is_known_is_bounded(operator, driver, planned, constants):
    driver.on_launch = None
    constants(call_cache, MOST_SIZES=5)
    kinds = [tensors(seqlen=250 + n) for n in range(12)]
    for _ in range(3):
        planned.clear()
        for given in kinds:
            operator.attention(*given)
        assert len(planned) >= 12 - 5
    planned.clear()
    for _ in range(3):
        operator.attention(*kinds[0])
    assert len(planned) <= 1


def test_no_tensor_is_kept(operator, driver, planned):
    driver.on_launch = None
    given = leaves_of(tensors())
    for _ in range(3):
        operator.attention(*given)
    assert len(planned) == 2, "known from then on"
    planned.clear()
    left = [weakref.ref(t) for t in given]
    del given
    gc.collect()
    assert [each() for each in left] == [None] * 3


def test_two_packages_and_many_threads(tmp_path, driver):
    driver.on_launch = None
    one = make(tmp_path / "one", driver, winner(shape()))
    other = make(tmp_path / "other", driver, winner(shape()), winner(shape(causal=True)))
    kinds = [tensors(), tensors(seqlen=250), leaves_of(tensors())]
    wrong = []

    def work(number):
        for n in range(100):
            given = kinds[(n + number) % 3]
            for made in (one, other):
                out = made.attention(*given, is_causal=made is other)
                if out.shape != given[0].shape or out.requires_grad != given[0].requires_grad:
                    wrong.append((n, number))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong
    assert one.counters() == other.counters() == {"kernel": 400}
