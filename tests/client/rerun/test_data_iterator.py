"""Microbatches of a step come again until the step is done."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.rerun import RerunDataIterator
from ft_client.rerun.data_iterator import as_iterators


def take(iterator: RerunDataIterator[int], count: int) -> list[int]:
    return list(itertools.islice(iterator, count))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20))
def test_reruns_change_nothing_in_the_stream(steps: list[tuple[int, bool]]) -> None:
    iterator, plain = RerunDataIterator(itertools.count()), itertools.count()
    for size, is_rerun in steps:
        expected = list(itertools.islice(plain, size))
        assert take(iterator, size) == expected
        if is_rerun:
            iterator.rewind()
            assert iterator.replaying and iterator.replay_pos == 0
            assert take(iterator, size) == expected
        assert iterator.saved_microbatches == expected
        iterator.advance()
        assert iterator.saved_microbatches == []


@pytest.mark.parametrize(("skip", "fresh_from"), [(False, 2), (True, 0)])
def test_a_resumed_step(skip: bool, fresh_from: int) -> None:
    """A loader goes on after the step, or begins with it once more."""
    first = RerunDataIterator(itertools.count())
    assert take(first, 2) == [0, 1]
    state = json.loads(json.dumps(first.state_dict()))
    again = RerunDataIterator(itertools.count(fresh_from), skip_replayed=skip)
    again.load_state_dict(state)
    again.rewind()
    assert take(again, 3) == [0, 1, 2]
    again.rewind()
    assert take(again, 3) == [0, 1, 2]
    again.advance()
    assert take(again, 2) == [3, 4]


def test_where_a_replay_was_is_kept() -> None:
    first = RerunDataIterator(range(5))
    take(first, 3)
    first.rewind()
    take(first, 1)
    again = RerunDataIterator([3, 4])
    again.load_state_dict(first.state_dict())
    assert (again.saved_microbatches, again.replaying, again.replay_pos) == ([0, 1, 2], True, 1)
    assert list(again) == [1, 2, 3, 4]


def test_what_a_shorter_rerun_left_is_not_lost() -> None:
    iterator = RerunDataIterator(range(5))
    take(iterator, 3)
    iterator.rewind()
    take(iterator, 2)
    iterator.advance()
    assert list(iterator) == [2, 3, 4]


class Loader:
    """All that some loaders have: the next batch, and methods of their own."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __next__(self) -> int:
        return next(self._numbers)

    def save_state(self) -> str:
        return "a loader's own state"


def test_what_was_given_can_be_had_back() -> None:
    iterator = RerunDataIterator(Loader())
    assert take(iterator, 2) == [0, 1]
    assert iterator.iterable.save_state() == "a loader's own state"


@pytest.mark.parametrize("nothing", [None, 3, object()])
def test_what_gives_no_microbatches(nothing: Any) -> None:
    with pytest.raises(TypeError, match=r"^iterable=.* gives no microbatches"):
        RerunDataIterator(nothing)


def test_the_end() -> None:
    iterator = RerunDataIterator([1, 2])
    assert list(iterator) == [1, 2]
    iterator.rewind()
    assert list(iterator) == [1, 2]


@pytest.mark.parametrize("state", [None, {}, {"saved_microbatches": []}, [1]])
def test_no_state(state: Any) -> None:
    with pytest.raises(ValueError, match="state_dict"):
        RerunDataIterator([]).load_state_dict(state)


def test_what_a_step_may_be_given() -> None:
    one, other = RerunDataIterator([]), RerunDataIterator([])
    assert as_iterators(None) == []
    assert as_iterators(one) == [one]
    assert as_iterators([one, None, other]) == [one, other]
    for wrong in (iter([1]), [one, iter([1])], "text"):
        with pytest.raises(TypeError, match=r"data_iterator: .* is not a RerunDataIterator"):
            as_iterators(wrong)
    assert as_iterators([one, iter([1])], must_replay=False) == [one]
    assert as_iterators(iter([1]), must_replay=False) == []
