"""The state of a rank: its fields, its copies, and the environment that it makes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from ft_client.inprocess.state import FrozenState, Mode, State, environment


class Uncopyable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__()

    def __deepcopy__(self, memo: object) -> object:
        raise RuntimeError("not to be copied")

    __copy__ = None


def test_the_frozen_state_has_the_same_fields() -> None:
    assert [one.name for one in fields(FrozenState)] == [one.name for one in fields(State)]


def test_the_first_numbers_are_those_of_the_entry() -> None:
    state = State(3, 8)
    assert (state.initial_rank, state.initial_world_size, state.iteration, state.mode) == (3, 8, 0, Mode.INITIALIZED)
    state.rank = 1
    assert state.initial_rank == 3


def test_freeze_keeps_the_exception_itself() -> None:
    error = Uncopyable(1, 2)
    state = State(3, 8, fn_exception=error)
    frozen, copy = state.freeze(), replace(state)
    assert frozen.fn_exception is error and copy.fn_exception is error
    state.rank, copy.world_size = 5, 7
    assert (frozen.rank, copy.rank, state.world_size) == (3, 3, 8)
    with pytest.raises(FrozenInstanceError):
        frozen.rank = 1  # type: ignore[misc]


def test_from_env() -> None:
    assert State.from_env({"RANK": "3", "WORLD_SIZE": "8"}) == State(3, 8)


@pytest.mark.parametrize(
    ("rank", "world_size", "words"),
    [
        (None, "8", "RANK is not in the environment"),
        ("0", None, "WORLD_SIZE is not in the environment"),
        ("None", "8", "RANK='None'"),
        ("", "8", "RANK=''"),
        ("1.5", "8", "RANK='1.5'"),
        ("-1", "8", "RANK='-1'"),
        ("0", "0", "WORLD_SIZE='0'"),
        ("8", "8", "RANK=8 must be below WORLD_SIZE=8"),
    ],
)
def test_silly_environment(rank: str | None, world_size: str | None, words: str) -> None:
    given = {name: text for name, text in (("RANK", rank), ("WORLD_SIZE", world_size)) if text is not None}
    with pytest.raises(ValueError, match=words):
        State.from_env(given)


@pytest.mark.parametrize(
    ("state", "rank", "world_size"),
    [
        (State(5, 8, active_rank=2, active_world_size=4, mode=Mode.ACTIVE), "2", "4"),
        (State(0, 8, active_rank=0, active_world_size=4, mode=Mode.ACTIVE), "0", "4"),
        (State(5, 8, active_world_size=4, mode=Mode.INACTIVE), "5", "8"),
        (State(5, 8), "5", "8"),
        (State(None, 7, initial_rank=5, initial_world_size=8, mode=Mode.TERMINATED), "5", "8"),
        (State(None, 7), "0", "7"),
    ],
)
def test_environment(state: State, rank: str, world_size: str) -> None:
    assert environment(state) == environment(state.freeze()) == {"RANK": rank, "WORLD_SIZE": world_size}
