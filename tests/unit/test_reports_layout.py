"""Layout of text: columns that give way, and lines that break between words."""

from __future__ import annotations

from attnsweep.reports.terminal import aligned, cut, wrap


def test_cells_are_aligned_and_only_named_columns_give_way() -> None:
    lines = [["name", "µs"], ["a-long-kernel-name", "1.5"], ["b", "123.5"]]
    assert aligned(lines, "lr", 40) == [
        "name                   µs",
        "a-long-kernel-name    1.5",
        "b                   123.5",
    ]
    assert aligned(lines, "lr", 17, shrink=(0,)) == [
        "name           µs",
        "a-long-ke…    1.5",
        "b           123.5",
    ]


def test_wrap_breaks_between_words_but_not_before_a_unit() -> None:
    assert wrap("it took 12.5\u00a0µs in all", 16) == ["it took 12.5 µs", "    in all"]
    assert wrap("it took 12.5\u00a0µs in all", 14) == ["it took", "    12.5 µs in", "    all"]
    assert cut("abcdef", 4) == "abc…"
    assert cut("abcd", 4) == "abcd"
