"""What a console gets of the streams of ranks, and when: a table, and what holds for any pieces."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.record.console.console_lines import PARTIAL_S, ConsoleLines, Screen

NOW, LATER = 100.0, 100.0 + PARTIAL_S


def shown(*steps: tuple[str, bytes, float]) -> list[str]:
    """What each step shows: a stream's name, what came, and when."""
    screen = Screen()
    streams = {name: ConsoleLines(f"[{name}]: ", screen) for name, _, _ in steps}
    return [streams[name].feed(content, at) for name, content, at in steps]


@pytest.mark.parametrize(
    ("steps", "texts"),
    [
        pytest.param([("a", b"one\ntwo\n", NOW)], ["[a]: one\n[a]: two\n"], id="whole lines"),
        pytest.param([("a", b"10%\r", NOW), ("a", b"20%\r", NOW)], ["[a]: 10%\r", "[a]: 20%\r"], id="at once"),
        pytest.param(
            [("a", b"\r 10%", NOW), ("a", b"\r 20%", NOW), ("a", b"\n", NOW)],
            ["", "[a]:  10%\r", "[a]:  20%\n"],
            id="tqdm",
        ),
        pytest.param(
            [("a", b"\r 10%", NOW), ("a", b"", LATER), ("a", b"\r 20%", LATER), ("a", b"", LATER + 1)],
            ["", "[a]:  10%", "\r", "[a]:  20%"],
            id="slow tqdm",
        ),
        pytest.param([("a", b"dos\r\n", NOW)], ["[a]: dos\r\n"], id="both ends"),
        pytest.param([("a", b"dos\r", NOW), ("a", b"\nx\n", NOW)], ["[a]: dos\r", "\n[a]: x\n"], id="ends apart"),
        pytest.param(
            [("a", b"load", NOW), ("a", b"ing", NOW + 0.1), ("a", b"", LATER), ("a", b" done\n", LATER)],
            ["", "", "[a]: loading", " done\n"],
            id="no second prefix",
        ),
        pytest.param(
            [("a", b"x\nload", NOW), ("a", b"", LATER), ("b", b"one\n", LATER), ("a", b"ed\n", LATER)],
            ["[a]: x\n", "[a]: load", "\n[b]: one\n", "[a]: ed\n"],
            id="another stream in between",
        ),
        pytest.param(
            [("a", b"load", NOW), ("a", b"", LATER), ("b", b"one\n", LATER), ("a", b"\n", LATER), ("a", b"\n", LATER)],
            ["", "[a]: load", "\n[b]: one\n", "", "[a]: \n"],
            id="an end that was shown already",
        ),
        pytest.param([("a", b"\xc3", NOW), ("a", b"\xa4\n", NOW)], ["", "[a]: \u00e4\n"], id="half a character"),
        pytest.param([("a", b"\xff\n", NOW)], ["[a]: \ufffd\n"], id="no text"),
        pytest.param([("a", b"a\x0bb\x85\n", NOW)], ["[a]: a\x0bb\ufffd\n"], id="other separators"),
        pytest.param([("a", b"x" * 70_000, NOW)], [f"[a]: {'x' * 70_000}"], id="a very long line"),
    ],
)
def test_what_is_shown(steps: list[tuple[str, bytes, float]], texts: list[str]) -> None:
    assert shown(*steps) == texts


def test_when_it_is_due_and_how_it_ends() -> None:
    screen = Screen()
    lines = ConsoleLines("", screen)
    assert lines.due() == float("inf")
    lines.feed(b"a", NOW)
    lines.feed(b"b", NOW + 0.1)
    assert lines.due() == LATER, "since the first of what is held, or one dot after the other would show nothing"
    assert lines.feed(b"", LATER) == "ab"
    assert lines.due() == float("inf")
    assert lines.feed(b"", LATER, last=True) == "\n" and screen.open_line is None
    assert lines.feed(b"", LATER, last=True) == ""


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text("x\r\n \u00e4", max_size=6), st.sampled_from([0.0, 1.0]))))
def test_nothing_is_lost_and_every_line_has_its_prefix(written: list[tuple[str, str, float]]) -> None:
    screen, now, said = Screen(), 0.0, {"a": "", "b": ""}
    streams = {name: ConsoleLines(f"<{name}>", screen) for name in said}
    text = ""
    for name, content, wait_s in written:
        now += wait_s
        text += "".join(stream.feed(b"", now) for stream in streams.values())
        text += streams[name].feed(content.encode(), now)
        said[name] += content
    text += "".join(stream.feed(b"", now, last=True) for stream in streams.values())
    owner = {name: "" for name in said}
    for line in filter(None, re.split(r"[\r\n]", text)):
        name, rest = line[1], line[3:]
        assert line[:3] == f"<{name}>" and "<" not in rest
        owner[name] += rest
    assert owner == {name: re.sub(r"[\r\n]", "", content) for name, content in said.items()}
