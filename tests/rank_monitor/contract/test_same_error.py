"""Which errors are the same one: type, place with masked folders, and text."""

from __future__ import annotations

import pytest

from rank_monitor.contract.same_error import comparable, digest


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("ValueError at /job/attempt_1/train.py:7", "ValueError at /job/attempt_23/train.py:7", True),
        ("ValueError at /job/1/2/train.py:7", "ValueError at /job/3/45/train.py:7", True),
        ("ValueError at /job/train.py:7", "ValueError at /job/train.py:8", False),
        ("ValueError at /job/train1.py:7", "ValueError at /job/train2.py:7", False),
        ("ValueError at train1.py:7", "ValueError at train2.py:7", False),
        ("ValueError at /job/train.py:7", "KeyError at /job/train.py:7", False),
        ("ValueError at /job/train.py:7 at iteration 3", "ValueError at /job/train.py:7 at iteration 4", False),
        ("ValueError", "ValueError", True),
    ],
)
def test_the_numbers_of_folders_do_not_count(one: str, other: str, same: bool) -> None:
    assert (comparable(one) == comparable(other)) == same


def test_a_text_counts_as_it_is() -> None:
    assert digest("step 1") == digest("step 1") != digest("step 2")
    assert digest("\udc80") and "secret" not in digest("secret")
