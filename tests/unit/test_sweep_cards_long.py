"""A long problem on one of several fake cards: what is tried on a shorter one is told as well."""

from __future__ import annotations

import pytest
from fleets import SPEC, is_whole, swept

pytestmark = pytest.mark.usefixtures("cards")
LONG, SHORT, OTHER = (f"(1,2,{seqlen},64) fp16 full" for seqlen in (262144, 65536, 256))


def test_what_is_tried_on_a_shorter_problem_is_told_before_a_row_is_stored(tmp_path, cards):
    text = SPEC.replace("[256, 512, 1024, 2048]", "[256, 262144]")
    outcome, heard = swept(tmp_path, cards, text)
    assert is_whole(outcome, [LONG, OTHER])
    told = heard.tried
    first = told.index((SHORT, 3))
    second = told.index((LONG, 3))
    assert told[first:second].count(LONG) == 3
    assert told[second:].count(LONG) >= 3
    assert sorted(label for _, label, *_ in heard.opened_on) == sorted([LONG, OTHER])
