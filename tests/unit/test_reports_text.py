"""The sentence at the end of `tune`: which is faster, by how much, and where nothing is known."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import H200, baseline, candidate, failed, rounds_of

from attnsweep.core.trial import Accuracy, Status
from attnsweep.reports.text import by_problem, plus_minus, sentence

LABEL = "(4,16,1024,64) fp16 full"


def said(*trials):
    (section,) = by_problem(trials, H200)
    return sentence(section)


def test_ours_is_faster():
    text = said(candidate("flash", 398.0, N=1), candidate("flash", 401.0, N=2), baseline("flash_attn_3", 438.0))
    assert text == (f"flash is 1.101 ± 0.001 times as fast as FlashAttention-3 (398 against 438 µs) on {LABEL}.")


def test_a_faster_baseline_is_said_to_be_faster():
    text = said(candidate("flash", 25.0), baseline("torch_cudnn", 20.0), baseline("cudnn", 21.0))
    assert text.startswith("PyTorch's cuDNN attention is 1.25")
    assert text.endswith(f"times as fast as flash, the best of ours (20.0 against 25.0 µs) on {LABEL}.")


def test_no_difference_is_claimed_where_the_interval_holds_one():
    ours, other = candidate("flash", 20.0), baseline("flash_attn_3", 20.0)
    rounds = [20 + 0.5 * (-1) ** i for i in range(12)]
    time = ours.time_us.model_copy(update={"rounds": rounds})
    text = said(ours.with_(time_us=time), other)
    assert text.startswith("No difference between flash and FlashAttention-3 was shown (20.0 against")
    assert "a ratio of 1.00 ± 0.0" in text


def test_times_of_different_rounds_are_only_about():
    once = rounds_of(30.0).model_copy(update={"rounds": []})
    text = said(candidate("flash", 20.0), baseline("cudnn", 30.0).with_(time_us=once))
    assert text == (
        f"flash is about 1.50 times as fast as cuDNN (20.0 against 30.0 µs, not in the same rounds) on {LABEL}."
    )


@pytest.mark.parametrize(
    ("us", "words"),
    [
        (30.0, "flash is at least 1.49 times as fast as cuDNN, which was noisy"),
        (18.0, "cuDNN was too noisy to compare with flash"),
    ],
)
def test_a_noisy_baseline_gives_no_more_than_a_bound(us, words):
    text = said(candidate("flash", 20.0), baseline("cudnn", us).with_(status=Status.NOISY))
    assert text.startswith(words)
    assert "in its fastest round" in text


def test_without_a_baseline_and_without_a_winner():
    assert said(candidate("flash", 20.0)) == f"flash takes 20.0 µs on {LABEL}; no baseline was timed with it."
    wrong = failed("flash", Status.WRONG, "error")
    assert said(wrong, baseline("cudnn", 20.0)) == f"No candidate is right and timed on {LABEL}."


def test_a_baseline_over_the_limit_of_error_is_said_to_be():
    wrong = Accuracy(rel_err=0.1, limit=0.01)
    text = said(candidate("flash", 20.0), baseline("cudnn", 30.0).with_(accuracy=wrong))
    assert text.endswith(f"on {LABEL}; the error of cuDNN is over the limit.")


def test_no_sentence_compares_with_a_baseline_in_another_format():
    ours, other = candidate("flash", 20.0), baseline("flash_attn_3_fp8", 15.0)
    assert said(ours, other) == f"flash takes 20.0 µs on {LABEL}; no baseline was timed with it."
    assert "cuDNN" in said(ours, other, baseline("cudnn", 30.0))


def test_another_kind_of_time_is_named():
    def cold(trial, us):
        time = trial.time_us.model_copy(update={"l2": "cold"})
        return trial.with_(time_us=time, warm_us=us)

    text = said(cold(candidate("flash", 20.0), 19.0), cold(baseline("cudnn", 30.0), 29.0))
    assert "(20.0 against 30.0 µs cold)" in text


def test_a_recorded_time_says_so():
    where = {"recorded": True, "recorded_on": "NVIDIA H100, 2026-11-22"}
    text = said(candidate("flash", 20.0).with_(**where), baseline("cudnn", 30.0).with_(**where))
    assert text.endswith(f"on {LABEL}, recorded on NVIDIA H100, 2026-11-22.")


@given(st.floats(0.01, 100), st.floats(0, 0.5), st.floats(0, 0.5))
def test_the_printed_interval_holds_the_one_that_was_found(ratio, below, above):
    low, high = ratio * (1 - below), ratio * (1 + above)
    middle, half = map(float, re.fullmatch(r"([\d.]+) ± ([\d.]+)", plus_minus(ratio, low, high)).groups())
    assert middle - half <= low + 1e-6
    assert middle + half >= high - 1e-6
