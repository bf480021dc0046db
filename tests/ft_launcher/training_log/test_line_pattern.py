"""The search in linear time: it finds what `re.search` finds, also where that would take years."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.training_log.line_pattern import LinePattern
from ft_launcher.training_log.rank_log import MAX_LINE

LITERALS = st.sampled_from(["a", "b", "1", " ", ".", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[a-b1]", "[^\\s1]", r"\."])
TIMES = st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{2,}"])
PIECE = st.builds(lambda what, times: what + times, LITERALS, TIMES)
FLAT = st.lists(PIECE, max_size=4).map("".join)
CHOICE = st.lists(FLAT, min_size=2, max_size=3).map("|".join)
GROUP = st.builds(
    lambda name, inner: f"(?P<{name}>{inner})", st.sampled_from(["loss", "step_time"]), st.one_of(FLAT, CHOICE)
)
OTHER = st.one_of(
    st.sampled_from(["^", "$", r"\b", r"\B", "(?:ab)+", "(?:a1)*?"]), st.builds(lambda c: f"(?:{c})", CHOICE)
)
LINES = st.text("ab1 .é", max_size=12)


@given(st.lists(st.one_of(FLAT, OTHER), max_size=3), GROUP, st.lists(st.one_of(FLAT, OTHER), max_size=3), LINES)
def test_finds_what_re_finds(before: list[str], group: str, after: list[str], line: str) -> None:
    text = "".join([*before, group, *after])
    match = re.search(text, line)
    assert LinePattern(text).search(line) == (None if match is None else match.groupdict())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (r"(?i)LOSS (?P<loss>\w+)", "the loss NaN"),
        (r"(?x) loss \s (?P<loss> \d+ )  # the loss", "loss 12"),
        (r"(?P<iteration>\d+)|(?P<loss>x)", "ax1"),
        (r"a(?P<loss>b)?(?P<iteration>1)?", "a1"),
        (r"[]\^-](?P<loss>[\d\-]+)", "]-12"),
    ],
)
def test_forms(text: str, line: str) -> None:
    match = re.search(text, line)
    assert match is not None and LinePattern(text).search(line) == match.groupdict()


def test_a_line_that_would_stop_the_launcher() -> None:
    """`re` takes the fifth power of the length: for this line longer than any job runs."""
    pattern = LinePattern(r"(?P<iteration>\d+).*(?P<loss>\d+).*(?P<step_time>\d+)x")
    assert pattern.search("1" * MAX_LINE) is None
    assert pattern.search("1" * (MAX_LINE - 1) + "x") == {
        "iteration": "1" * (MAX_LINE - 3),
        "loss": "1",
        "step_time": "1",
    }
