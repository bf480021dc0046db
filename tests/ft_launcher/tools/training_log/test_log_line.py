"""Lines of what a rank prints: whichever way it is cut into reads, whatever it holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.tools.training_log.rank_log import MAX_LINE, Lines


def test_both_ends_end_a_line() -> None:
    lines = Lines()
    assert lines.split(b"one\ntwo\r\nthr") == ["one", "two"]
    assert lines.open_line == "thr"
    assert lines.split(b"ee\r 50%\r\r") == ["three", "50%"]
    assert lines.open_line == ""


def test_a_long_line_is_cut_and_the_next_one_is_whole() -> None:
    lines = Lines()
    for _ in range(100):
        assert lines.split(b"x" * 1000) == []
    assert len(lines.open_line) == MAX_LINE
    assert lines.split(b"y\nnext\n") == ["x" * MAX_LINE, "next"]


def test_the_rest_of_a_line_is_left_out() -> None:
    lines = Lines(within_a_line=True)
    assert lines.split(b"step 1") == [] and lines.open_line == ""
    assert lines.split(b"00\nstep 101\nst") == ["step 101"]
    assert lines.open_line == "st"


def test_colours_and_movements_are_removed() -> None:
    assert Lines().split(b"\x1b[31mstep: \x1b[0m 1\x1b[A\n") == ["step:  1"]


def test_what_is_no_text_is_no_error() -> None:
    assert Lines().split(b"\xff\xfe\x00 a\n") == ["\ufffd\ufffd\x00 a"]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_the_same_lines_however_they_are_read(parts: list[bytes]) -> None:
    whole, piecewise = Lines(), Lines()
    found = [line for part in parts for line in piecewise.split(part)]
    assert whole.split(b"".join(parts)) == found
    assert whole.open_line == piecewise.open_line
