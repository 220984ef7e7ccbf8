"""What the hints say of outputs that are wrong in a known way."""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.masks import CAUSAL
from attnsweep.core.problem import Problem, Scores
from attnsweep.verify.hints import hints

FULL = Problem(1, 4, 2, 150, 200, 16, "fp32")
MASKED = replace(FULL, mask=CAUSAL)
TOP_LEFT = replace(MASKED, mask=replace(CAUSAL, top_left=True))


def inputs_of(problem, seed=7):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(problem.shape_of(name), np.float32) for name in "qkv"}


def attend(q, k, v, scale, seen=None, exp=np.exp):
    """Attention by NumPy. seen: (queries, keys), or all."""
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    weights = exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), v)


def diagonal(shift):
    return np.arange(200)[None] <= np.arange(150)[:, None] + shift


SCALE = 16**-0.5
BY_GROUP, IN_TURNS = [0, 0, 1, 1], [0, 1, 0, 1]
MISTAKES = {
    "no scale": (FULL, {"scale": 1.0}),
    "the scale taken twice": (FULL, {"scale": SCALE**2}),
    "1 / sqrt(head_dim) as the scale": (replace(FULL, scores=Scores(scale=1.0)), {"scale": SCALE}),
    "exp2 in the place of exp": (FULL, {"exp": np.exp2}),
    "a causal mask": (FULL, {"seen": diagonal(50)}),
    "the first 192 keys": (FULL, {"seen": np.arange(200)[None] < 192}),
    "key head h % heads_kv": (FULL, {"heads": IN_TURNS}),
    "no mask": (MASKED, {}),
    "a mask aligned top-left": (MASKED, {"seen": diagonal(0)}),
    "a mask aligned bottom-right": (TOP_LEFT, {"seen": diagonal(50)}),
    "a mask that hides the diagonal": (MASKED, {"seen": diagonal(49)}),
}


def made_by(given, heads=BY_GROUP, scale=SCALE, **how):
    return attend(given["q"], given["k"][:, heads], given["v"][:, heads], scale, **how)


@pytest.mark.parametrize("words", MISTAKES)
def test_a_common_mistake_is_named_and_no_other(words):
    problem, how = MISTAKES[words]
    given = inputs_of(problem)
    (found,) = hints(made_by(given, **how).astype(np.float32), given, problem, 1e-2)
    assert found.startswith(f"it is what {words}")


def test_an_output_in_the_other_order_is_named():
    given = inputs_of(FULL)
    made = np.ascontiguousarray(made_by(given).swapaxes(1, 2)).reshape(1, 4, 150, 16)
    assert "(batch, seqlen, heads, head_dim)" in hints(made, given, FULL, 1e-2)[0]


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (np.s_[:, :, 128:], ["only rows from 128 on are wrong: the last tile, which is not full"]),
        (np.s_[:, :, 5::64], ["only row 5 of each 64 is wrong"]),
        (np.s_[:, :, 70:75], ["only rows of 64 to 127 are wrong"]),
        (np.s_[:, 1::2], ["of the first item only these heads are wrong, in the rows looked at: 1, 3"]),
        (np.s_[:, :, ::7], []),
        (np.s_[:], []),
    ],
)
def test_rows_that_are_wrong_are_told_by_what_they_share(at, said):
    given = inputs_of(FULL)
    made = made_by(given)
    made[at] = np.nan
    assert hints(made.astype(np.float32), given, FULL, 1e-2) == said
    made[at] = 3.0
    assert hints(made.astype(np.float32), given, FULL, 1e-2) == said
