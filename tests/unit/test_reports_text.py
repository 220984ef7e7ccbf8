"""The sentence at the end of `tune`: which is faster, by how much, and where nothing is known."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import H200, baseline, candidate, failed

from attnsweep.core.trial import Accuracy, Status
from attnsweep.reports.sections import Sections
from attnsweep.reports.text import plus_minus, sentence


def rounds(trial, each):
    return trial.with_(time_us=trial.time_us.model_copy(update={"rounds": each}))


def cold(trial):
    return trial.with_(time_us=trial.time_us.model_copy(update={"l2": "cold"}), warm_us=1.0)


OURS, SLOWER = candidate("flash", 20.0), baseline("cudnn", 30.0)
IN_FP8 = baseline("flash_attn_3_fp8", 15.0)
WHERE = {"recorded": True, "recorded_on": "NVIDIA H100, 2026-11-22"}
# @ stands for "on" and the problem.
SENTENCES = {
    "flash is 1.101 ± 0.001 times as fast as FlashAttention-3 (398 against 438 µs) @.":
        (candidate("flash", 398.0, N=1), candidate("flash", 401.0, N=2), baseline("flash_attn_3", 438.0)),
    "PyTorch's cuDNN attention is 1.250 ± 0.001 times as fast as flash, the best of ours (20.0 against 25.0 µs) @.":
        (candidate("flash", 25.0), baseline("torch_cudnn", 20.0), baseline("cudnn", 21.0)),
    "No difference between flash and FlashAttention-3 was shown (20.0 against 20.0 µs, a ratio of 1.00 ± 0.03) @.":
        (rounds(OURS, [20 + 0.5 * (-1) ** i for i in range(12)]), baseline("flash_attn_3", 20.0)),
    "flash is about 1.50 times as fast as cuDNN (20.0 against 30.0 µs, not in the same rounds) @.":
        (OURS, rounds(SLOWER, [])),
    "flash is at least 1.49 times as fast as cuDNN, which was noisy (20.0 against 30.0 µs in its fastest round) @.":
        (OURS, SLOWER.with_(status=Status.NOISY)),
    "cuDNN was too noisy to compare with flash (20.0 against 18.0 µs in its fastest round) @.":
        (OURS, baseline("cudnn", 18.0).with_(status=Status.NOISY)),
    "flash takes 20.0 µs @; no baseline was timed with it.": (OURS, IN_FP8),
    "No candidate is right and timed @.": (failed("flash", Status.WRONG, "error"), baseline("cudnn", 20.0)),
    "flash is 1.500 ± 0.001 times as fast as cuDNN (20.0 against 30.0 µs) @; the error of cuDNN is over the limit.":
        (OURS, SLOWER.with_(accuracy=Accuracy(rel_err=0.1, limit=0.01))),
    "flash is 1.500 ± 0.001 times as fast as cuDNN (20.0 against 30.0 µs) @.": (OURS, IN_FP8, SLOWER),
    "flash is 1.500 ± 0.001 times as fast as cuDNN (20.0 against 30.0 µs cold) @.": (cold(OURS), cold(SLOWER)),
    "flash is 1.500 ± 0.001 times as fast as cuDNN (20.0 against 30.0 µs) @, recorded on NVIDIA H100, 2026-11-22.":
        (OURS.with_(**WHERE), SLOWER.with_(**WHERE)),
}  # fmt: skip


@pytest.mark.parametrize("told", SENTENCES)
def test_the_sentence_says_what_was_shown_and_no_more(told):
    (section,) = Sections(SENTENCES[told], H200)
    assert sentence(section) == told.replace("@", "on (4,16,1024,64) fp16 full")


@given(st.floats(0.01, 100), st.floats(0, 0.5), st.floats(0, 0.5))
def test_the_printed_interval_holds_the_one_that_was_found(ratio, below, above):
    low, high = ratio * (1 - below), ratio * (1 + above)
    middle, half = map(float, re.fullmatch(r"([\d.]+) ± ([\d.]+)", plus_minus(ratio, low, high)).groups())
    assert middle - half <= low + 1e-6
    assert middle + half >= high - 1e-6
