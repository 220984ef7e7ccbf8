"""A share by which a kernel may be slower: one rule for the option, the spec's keys and Python."""

import re
from pathlib import Path

import pytest
from specs import MINIMAL, PROBLEM

import attnsweep as public
from attnsweep.core.errors import SpecError
from attnsweep.core.share import ShareError, share_of_text
from attnsweep.specs.load import load_spec

RUN = Path(__file__).parent.parent.parent / "results" / "h200" / "mma_h200"
RIGHT = {"3%": 0.03, "3 %": 0.03, "0.03": 0.03, "0.5": 0.5, "50%": 0.5, "0.1%": 0.001, "0.001": 0.001, ".5%": 0.005}
# `3` meant 3 %, and was 300 %: an 8 % regression passed.
MEANT = {"3": "3%, which is 0.03", "2": "2%, which is 0.02", "0.6": "0.6%, which is 0.006"}
WRONG = ("0", "0%", "0.0005", "-0.03", "60%", "100", "nan", "inf", "abc", "3%%", "%", "")


def own(share: str) -> str:
    """A spec whose problem has a threshold of its own."""
    return MINIMAL.replace(PROBLEM, f"{PROBLEM[:-1]}, slower: {share}}}")


@pytest.mark.parametrize("text", RIGHT)
def test_a_share_is_a_number_or_percent(text):
    assert share_of_text(text) == RIGHT[text]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_share_is_refused(text):
    with pytest.raises(ShareError) as caught:
        share_of_text(text)
    assert caught.value.hint == "0.03 or 3% is 3 %"


@pytest.mark.parametrize("text", MEANT)
def test_a_number_that_meant_percent_is_refused_with_what_was_meant(text, attnsweep, tmp_path):
    done = attnsweep("check", "--recorded", RUN, RUN, "--slower", text)
    assert done.returncode == 2
    assert f"did you mean {MEANT[text]}?" in re.sub(r"[\s│]+", " ", done.stderr)
    for place in (own(text), f"{MINIMAL}check: {{slower: {text}}}\n"):
        (tmp_path / "s.yaml").write_text(place)
        with pytest.raises(SpecError, match=re.escape(f"between 0.1% and 50%, not {text}")) as caught:
            load_spec(tmp_path / "s.yaml")
        assert caught.value.hint == f"did you mean {MEANT[text]}?"
    run = public.open_run(RUN)
    with pytest.raises(SpecError) as caught:
        public.compare_runs(run, run, slower=float(text))
    assert caught.value.hint == f"did you mean {MEANT[text]}?"


def test_the_option_and_the_spec_take_percent_and_agree_on_the_least(attnsweep, tmp_path):
    done = attnsweep("check", "--recorded", RUN, RUN, "--slower", "3%")
    assert done.returncode == 0, done.stderr
    assert "slower means more than 3 %" in done.stdout.replace("\N{NO-BREAK SPACE}", " ")
    path = tmp_path / "s.yaml"
    path.write_text(own("1.5%") + "check: {slower: 4%}\n")
    spec = load_spec(path)
    assert (spec.problems[0].slower, spec.check.slower) == (0.015, 0.04)
    path.write_text(spec.resolved())
    assert load_spec(path) == spec
    assert attnsweep("check", "--recorded", RUN, RUN, "--slower", "0").returncode == 2
    path.write_text(own("0"))
    with pytest.raises(SpecError, match=r"slower must be between 0\.1% and 50%, not 0"):
        load_spec(path)
