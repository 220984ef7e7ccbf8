"""Which problems a callable of the user's can be called on, by its parameters and `supports`."""

from types import ModuleType

import pytest

from attnsweep.compile.traced.server import Traced
from attnsweep.core.callables import Asked
from attnsweep.core.errors import Unavailable

WINDOW, CAUSAL, FULL = ("(2,8,1024,16) fp16 " + mask for mask in ("window(256,128)", "causal", "full"))


def of(function, **beside):
    made = Traced.__new__(Traced)
    made.module, made.function, made.asked = ModuleType("mine"), function, Asked("mine:f")
    vars(made.module).update(beside)
    return made


@pytest.mark.parametrize(
    ("function", "beside", "problem", "why"),
    [
        (lambda q, k, v, is_causal: 0, {}, CAUSAL, None),
        (lambda q, k, v, causal=False, sm_scale=None, BLOCK=64: 0, {}, CAUSAL, None),
        (lambda q, k, v, *, problem, out, lse: 0, {}, CAUSAL, None),
        (lambda *tensors: 0, {}, FULL, None),
        (lambda q, k, v: 0, {}, FULL, None),
        (lambda q, k, v: 0, {}, CAUSAL, "it has no parameter causal"),
        (lambda q, k, v, scale: 0, {}, CAUSAL, "it has no parameter causal"),
        (lambda q, k: 0, {}, FULL, "it takes 2 tensors, q, k, and a call has 3, q, k, v"),
        (lambda q, k, v, problem: 0, {}, WINDOW, "no supports(problem) beside it says that it can"),
        (lambda q, k, v, problem: 0, {"supports": lambda problem: True}, WINDOW, None),
        (lambda q, k, v, problem: 0, {"supports": lambda problem: "no such mask"}, FULL, "no such mask"),
        (lambda q, k, v, problem: 0, {"supports": lambda problem: False}, FULL, "supports returned False"),
        (lambda q, k, v, o, lse, do, causal: 0, {}, f"{CAUSAL} backward", None),
        (lambda q, k, v, o, lse, do, causal: 0, {}, CAUSAL, "it takes the tensors of a backward"),
        (lambda q, k, v, causal: 0, {}, f"{CAUSAL} backward", "it takes no tensors of a backward: q, k, v, o, lse, do"),
        (
            lambda q, k, v, do: 0,
            {},
            f"{FULL} backward",
            "it takes 4 tensors, q, k, v, do, and a call has 6, q, k, v, o, lse, do",
        ),
        (max, {}, FULL, None),
    ],
)
def test_what_a_callable_can_be_called_on(function, beside, problem, why):
    assert of(function, **beside).refusals([problem], unless_said=False) == [why]


def test_a_supports_that_raises_is_a_reason():
    with pytest.raises(Unavailable, match="supports raised ZeroDivisionError"):
        of(lambda q, k, v: 0, supports=lambda problem: 1 / 0).refusals([FULL], unless_said=False)
