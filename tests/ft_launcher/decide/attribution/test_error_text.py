"""Tracebacks that Python itself wrote, and torch's error files."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.decide.attribution.error_text import (
    chain,
    excerpt,
    location,
    of_error_file,
    of_output,
    raised_by_program,
)
from rank_monitor.contract.wire.messages import RankException


def bad() -> None:
    raise ValueError("bad\nluck")


def plain() -> None:
    bad()


def caused() -> None:
    try:
        bad()
    except ValueError as error:
        raise RuntimeError("training failed") from error


def meanwhile() -> None:
    try:
        bad()
    finally:
        json.loads("{")


def noted() -> None:
    error = KeyError("n")
    error.__notes__ = ["a note"]  # type: ignore[attr-defined]  # as add_note() of Python 3.11 does
    raise error


def cannot_be_read() -> None:
    compile("x = (", "/a/train.py", "exec")


def raised(fault: Callable[[], None]) -> RankException:
    try:
        fault()
    except Exception as error:
        return RankException(type(error).__name__, str(error), traceback.format_exc(), 0.0)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("fault", "links"),
    [
        (plain, [("ValueError: bad\nluck", False)]),
        (caused, [("ValueError: bad\nluck", True), ("RuntimeError: training failed", False)]),
        (meanwhile, [("ValueError: bad\nluck", False), ("JSONDecodeError: Expecting property name", False)]),
    ],
)
def test_a_chain(fault: Callable[[], None], links: list[tuple[str, bool]]) -> None:
    found = chain(raised(fault))
    assert [link.caused_next for link in found] == [caused_next for _, caused_next in links]
    assert all(link.text.startswith(text) for link, (text, _) in zip(found, links, strict=True))


def test_argparse_refuses_a_command_line() -> None:
    said = "usage: train.py [-h] [--lr LR]\ntrain.py: error: argument --lr: invalid float value: 'x'\n"
    found = of_output("some other line\n" + said)
    assert found is not None
    assert (found.type, found.message) == ("argparse.ArgumentError", "argument --lr: invalid float value: 'x'")
    assert of_output("ld: error: no such file\n") is None


@pytest.mark.parametrize("text", ["", "Traceback", "\n\n", "no frames at all"])
def test_what_is_no_traceback_is_read_all_the_same(text: str) -> None:
    exception = RankException("ValueError", "bad", text, 0.0)
    assert chain(exception)[-1].text == "ValueError: bad"
    assert location(text) == "" and not raised_by_program(text) and len(excerpt(text)) <= 5


def line_of(source: str) -> int:
    return Path(__file__).read_text().splitlines().index(source) + 1


def test_the_place_is_the_innermost_frame() -> None:
    here = line_of('    raise ValueError("bad\\nluck")')
    assert location(raised(plain).traceback) == f"{__file__}:{here}"
    assert location(raised(cannot_be_read).traceback) == "/a/train.py:1"


@pytest.mark.parametrize(("fault", "by_program"), [(plain, True), (meanwhile, False), (cannot_be_read, False)])
def test_who_raised_it(fault: Callable[[], None], by_program: bool) -> None:
    assert raised_by_program(raised(fault).traceback) is by_program


def test_an_excerpt_shows_the_line_of_the_program_and_the_words() -> None:
    frame, source, *words = excerpt(raised(plain).traceback)
    assert frame.endswith("in bad") and source.strip().startswith("raise ValueError")
    assert words == ["ValueError: bad", "luck"]


def test_an_excerpt_shows_the_program_and_where_a_library_raised() -> None:
    frame, source, innermost, *words = excerpt(raised(meanwhile).traceback)
    assert frame.endswith("in meanwhile") and source.strip() == 'json.loads("{")'
    assert "decoder.py" in innermost and words[0].startswith("json.decoder.JSONDecodeError")


def test_an_excerpt_is_short_and_has_the_last_of_a_chain() -> None:
    assert excerpt(raised(caused).traceback)[-1] == "RuntimeError: training failed"
    long = RankException("E", "", raised(plain).traceback + "more\n" * 99, 0.0)
    assert len(excerpt(long.traceback)) == 5


def test_an_excerpt_of_a_syntax_error_and_of_a_note() -> None:
    assert excerpt(raised(cannot_be_read).traceback)[0].strip().startswith('File "')
    assert excerpt(raised(cannot_be_read).traceback)[-1].startswith("SyntaxError")
    assert excerpt(raised(noted).traceback)[-2:] == ("KeyError: 'n'", "a note")


def torchs(message: str) -> dict[str, Any]:
    return {"message": {"message": message, "extraInfo": {"py_callstack": "Traceback", "timestamp": "12"}}}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (torchs("ValueError: bad: luck"), RankException("ValueError", "bad: luck", "Traceback", 12.0)),
        (torchs("torch.OutOfMemoryError: full"), RankException("torch.OutOfMemoryError", "full", "Traceback", 12.0)),
        (torchs("no type in it"), RankException("Exception", "no type in it", "Traceback", 12.0)),
        ({"message": "ValueError: bad"}, RankException("ValueError", "bad", "", 0.0)),
        ({"message": {"message": "a"}}, RankException("Exception", "a", "", 0.0)),
        ({"message": {}}, None),
        ({"message": {"message": "a", "extraInfo": {"timestamp": "noon"}}}, None),
        ({"message": {"message": "a", "extraInfo": 5}}, None),
        ({}, None),
        ([], None),
        (5, None),
    ],
)
def test_error_files(told: object, expected: RankException | None) -> None:
    assert of_error_file(json.dumps(told)) == expected


def test_a_file_that_is_cut_short_tells_nothing() -> None:
    assert of_error_file(json.dumps(torchs("ValueError: bad"))[:-5]) is None


TRACE = """Traceback (most recent call last):
  File "/job/train.py", line 7, in main
    load()
  File "/job/train.py", line 3, in load
    raise ValueError("bad sample")
ValueError: bad sample
"""
NO_MESSAGE = TRACE.replace("ValueError: bad sample\n", "AssertionError\n")
HYDRA = f"""Error executing job with overrides: ['lr=1']
{TRACE}
Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""
CHAIN = f"""step 1
{TRACE}
The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/job/train.py", line 9, in main
    raise Failed("training") from error
job.Failed: training
"""
CLICK = "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --lrate\n"
RANKED = "".join(f"[rank1]: {line}\n" for line in TRACE.splitlines())
HEAD, TAIL = "\u256d\u2500 Traceback (most recent call last) \u2500\u256e", "\u2570\u2500\u2500\u256f"
RICH = f"{HEAD}\n{TAIL}\nmypkg.errors.BadError: no data\n"


@pytest.mark.parametrize(
    ("text", "kind", "message", "at"),
    [
        (TRACE, "ValueError", "bad sample", "/job/train.py:3"),
        (HYDRA, "ValueError", "bad sample", "/job/train.py:3"),
        (RANKED, "ValueError", "bad sample", "/job/train.py:3"),
        (CHAIN, "job.Failed", "training", "/job/train.py:9"),
        (TRACE + "  of two\nlines\n", "ValueError", "bad sample\n  of two\nlines", "/job/train.py:3"),
        (f"{NO_MESSAGE}saved to /x\n", "AssertionError", "saved to /x", "/job/train.py:3"),
        (NO_MESSAGE, "AssertionError", "", "/job/train.py:3"),
        (CLICK, "Error", "No such option: --lrate", ""),
        (RICH, "mypkg.errors.BadError", "no data", ""),
        ("cut off in a line\n  File \"/job/a.py\", line 1, in f\nKeyError: 'x'\n", "KeyError", "'x'", ""),
    ],
)  # fmt: skip
def test_what_it_printed_last(text: str, kind: str, message: str, at: str) -> None:
    found = of_output(text)
    assert found is not None
    assert (found.type, found.message, location(found.traceback)) == (kind, message, at)


def test_what_led_to_it_is_part_of_it() -> None:
    found = of_output(TRACE + "\nthat was another error\n\n" + CHAIN)
    assert found is not None
    assert found.traceback.startswith("Traceback") and found.traceback.count("Traceback") == 2


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "done\n", TRACE + "step\n" * 20, "Traceback (most recent call last):\n", "Error:\n", "an Error: no\n"],
)
def test_nothing_that_ended_it(text: str) -> None:
    assert of_output(text) is None
