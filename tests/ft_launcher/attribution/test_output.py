"""Exceptions that a program printed by itself before it exited: read from the end of what it wrote."""

from __future__ import annotations

import pytest

from ft_launcher.attribution.error_text import of_output, place

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
    assert (found.type, found.message, place(found.traceback)) == (kind, message, at)


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
