"""No right output is over a limit of error: a thousand of them, made in NumPy as kernels make them.

They differ in all that a kernel is free to choose: the tiles of keys and their order, what the
exponents refer to, keys split over blocks, whether the sum is of rounded probabilities, an
approximate exp. `pytest tests/simt/test_limits.py -m nightly -s` says how near the nearest came.
"""

from dataclasses import fields, replace

import numpy as np
import pytest

from attnsweep.core import cases as verify_cases
from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.verify import encoding, limits, measures
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify import rounded as verify_rounded
from attnsweep.verify.measures import Measures

# Thin, wide, grouped, causal, one of many rows, whose largest error is the largest, and some of few
# keys, where one weight counts.
TIMED = (
    "1,4,512,64",
    "2,8/2,256x384,128",
    "1,3,700x1000,64 {} causal",
    "8,8,1x2048,128",
    "1,2,300,256",
    "3,5,129,40",
    "1,4,1024,32 {} causal",
    "1,2,4096x512,64",
    "1,4,200x87,64",
    "1,4,130x3,128",
    "1,4,300x2,32",
    "2,8,600x161,8",
    "1,4,512,16 {} causal",
)
# Relative errors of P's exp: of ex2.approx, of a polynomial, and half of what rounding P costs.
# Factors that rescale sums have that of ex2.approx: an error in them meets a whole tile alike.
EXP_ERRORS = {"fp16": (2e-7, 2e-5, 2.0**-13), "bf16": (2e-7, 2e-5, 2.0**-10), "fp32": (0.0, 6e-8, 2e-7)}
EACH, ROUNDS = 10, 100


def right_output(inputs, problem, rounds_scores, rng):
    """An output in storage form, by one of many right ways; sums are in float32."""
    one = np.float32
    group = problem.heads // problem.heads_kv
    tile = int(rng.choice([16, 32, 64, 128, 256]))
    parts = int(rng.choice([1, 1, 2, 3]))
    refers = rng.choice(["largest", "running", "first"])
    sums_rounded, exp_error = bool(rng.integers(2)), rng.choice(EXP_ERRORS[problem.dtype])
    backwards, steps = bool(rng.integers(2)), one(rng.uniform(5e3, 1e4))
    out = np.empty(problem.shape_of("o"), one)
    last = np.arange(problem.seqlen_q) + problem.seqlen_k - problem.seqlen_q
    for batch, head in np.ndindex(problem.batch, problem.heads):
        q, k, v = (
            encoding.from_bits(inputs[name][batch, number], problem.dtype)
            for name, number in (("q", head), ("k", head // group), ("v", head // group))
        )
        scores = q @ k.T
        if rounds_scores > 1:
            scores = encoding.round_to(scores, problem.dtype)
        scores = scores * one(problem.scale)
        if rounds_scores:
            scores = encoding.round_to(scores, problem.dtype)
        if problem.causal:
            scores[np.arange(problem.seqlen_k) > last[:, None]] = -np.inf
        whole = scores.max(1, keepdims=True)

        def exp(x, error=exp_error):  # which errs alike where arguments are alike, and not at 0
            off = np.modf(np.abs(x) * steps + one(0.5))[0] * 2 - 1
            return np.exp(x) * (1 + one(error) * np.where(np.isfinite(x), off, one(0)))

        if rounds_scores:  # probabilities are stored, so they are normalised before the product
            p = exp(scores - whole)
            p = encoding.round_to(p / p.sum(1, keepdims=True), problem.dtype)
            out[batch, head] = p @ v
            continue
        done = []
        for keys in np.array_split(np.arange(problem.seqlen_k), parts):
            largest = np.full((problem.seqlen_q, 1), -np.inf, one)
            total, acc = np.zeros_like(largest), np.zeros(q.shape, one)
            begins = range(0, len(keys), tile)
            for begin in reversed(begins) if backwards else begins:
                some = keys[begin : begin + tile]
                grown = np.maximum(largest, scores[:, some].max(1, keepdims=True))
                if refers == "largest":
                    grown = whole
                elif refers == "first":  # within what half precision holds
                    grown = np.maximum(whole - one(9), scores[:, :1])
                known = np.where(np.isfinite(grown), grown, one(0))
                shrink = np.where(np.isfinite(largest), exp(largest - known, 2e-7), one(0))
                p = exp(scores[:, some] - known)
                rounded = encoding.round_to(p, problem.dtype)
                total = total * shrink + (rounded if sums_rounded else p).sum(1, keepdims=True)
                acc, largest = acc * shrink + rounded @ v[some], grown
            done.append((largest, total, acc))
        top = np.max([largest for largest, _, _ in done], axis=0)
        weights = [np.where(np.isfinite(m), np.exp(m - top), one(0)) for m, _, _ in done]
        total = sum(weight * t for weight, (_, t, _) in zip(weights, done, strict=True))
        acc = sum(weight * a for weight, (_, _, a) in zip(weights, done, strict=True))
        out[batch, head] = acc / total
    return encoding.round_to(out, problem.dtype)


def cases_of(dtype, rng):
    """A timed problem and its small cases, at random."""
    text = str(rng.choice(TIMED))
    problem = Problem.parse(text.format(dtype) if "{}" in text else f"{text} {dtype} full")
    return (Case(problem), *verify_cases.small_cases(problem))


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_no_right_output_is_over_a_limit(number):
    rng = np.random.default_rng(number)
    dtype = ("fp16", "bf16", "bf16", "fp32")[number % 4]
    nearest = dict.fromkeys((f.name for f in fields(Measures)), (0.0, ""))
    cases = cases_of(dtype, rng)
    # The timed problem is the largest and has every limit.
    drawn = [cases[0]] * 2 + [cases[n] for n in rng.integers(1, len(cases), EACH - 2)]
    for case in drawn:
        problem, rows = case.problem, np.arange(case.problem.seqlen_q)
        seed = int(rng.integers(2**31))
        inputs = verify_inputs.make_inputs(case, seed)
        exact = verify_rounded.reference(inputs, problem, rows)
        rounds_scores = int(rng.choice([0, 0, 1, 2])) if dtype != "fp32" else 0
        out = right_output(inputs, problem, rounds_scores, rng)
        tilted = None
        if case.inputs == "normal" and case is not cases[0]:
            tilted = verify_rounded.reference(inputs, problem, rows, verify_rounded.ForwardMaths(tilted=True))
        taken = measures.measures(out, exact, dtype, tilted)
        if tilted is not None:  # as verify/compare.py takes it
            usual = limits.scale_of_rounding(case, seed, rounds_scores)
            off = abs(measures.fitted_scale(out - exact, tilted - exact) - usual)
            taken = replace(taken, scale=off)
        shares = taken.shares(limits.limits(case, rounds_scores))
        for name, share in shares.items():
            nearest[name] = max(nearest[name], (share, f"{case.label}, {rounds_scores}"))
        assert all(share <= 1 for share in shares.values()), (case.label, rounds_scores, shares)
    for name, (share, where) in nearest.items():
        print(f"\n{dtype} {name:9} {share:.2f} of its limit: {where}", end="")
