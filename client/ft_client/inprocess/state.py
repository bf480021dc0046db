"""The state of a rank in the present round: its numbers, its mode, and what its function raised.

`wrapper.py` makes a `State` for each call of a wrapped function. `restart/assigning.py` changes it from round to round,
in the main thread, by the user's rank assignment. Callbacks of users, in whatever thread, get a frozen copy. Pure: this
file does not set the environment, and does not decide on the next round.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields


class Mode(enum.Enum):
    """The mode of a rank."""

    INITIALIZED = enum.auto()
    """No rank assignment has been made yet."""
    ACTIVE = enum.auto()
    """The rank calls the function."""
    INACTIVE = enum.auto()
    """The rank waits as a warm spare."""
    TERMINATED = enum.auto()
    """The rank has left and does not return by itself."""


@dataclass
class State:
    """The state of a rank. The rank assignment and the wrapper change it.

    Attributes:
        rank: the number of this rank among all ranks that are left; None when the rank is terminated.
        world_size: how many ranks are left, spares included.
        active_rank: the number of this rank among those that call the function; None when it is not active.
        active_world_size: how many ranks call the function; None: not decided yet.
        initial_rank: the number of this rank at entry of the call: RANK of the environment.
        initial_world_size: how many ranks there were at entry.
        iteration: the number of our round, from 0. The name is NVIDIA's.
        mode: active, spare or terminated.
        fn_exception: what the function raised on this rank in this round; None where it did not fail, or failed in
            consequence of a fault that was known already.
    """

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> State:
        """Returns the state at entry, from RANK and WORLD_SIZE of the environment.

        Raises:
            ValueError: one of them is missing or no such number; the text names it and its value.
        """
        world_size = _number(environment, "WORLD_SIZE", 1)
        rank = _number(environment, "RANK", 0)
        if rank >= world_size:
            raise ValueError(f"RANK={rank} must be below WORLD_SIZE={world_size}")
        return cls(rank, world_size)

    def freeze(self) -> FrozenState:
        """Returns the same values, read-only. The exception is the same object: not every exception can be copied."""
        return FrozenState(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class FrozenState:
    """A read-only `State`, which callbacks get and return."""

    rank: int | None
    world_size: int
    active_rank: int | None
    active_world_size: int | None
    initial_rank: int | None
    initial_world_size: int | None
    iteration: int
    mode: Mode
    fn_exception: Exception | None


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
    """Returns the whole number in a variable, at least `least`."""
    text = environment.get(name)
    if text is None:
        raise ValueError(f"{name} is not in the environment: start the script with ft_launcher, torchrun or srun")
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name}={text!r} is not a whole number of at least {least}")
    return number


def environment(state: State | FrozenState) -> dict[str, str]:
    """Returns RANK and WORLD_SIZE as the environment is to have them in a round.

    An active rank gets its number among the active ranks, by which its function makes process groups. A spare gets its
    number among all ranks. A terminated rank keeps its number at entry: a library that reads RANK in the callback
    `terminate` must find a number there.
    """
    if state.active_rank is not None:
        rank, world_size = state.active_rank, state.active_world_size
    elif state.rank is not None:
        rank, world_size = state.rank, state.world_size
    else:
        rank, world_size = state.initial_rank or 0, state.initial_world_size
    return {"RANK": str(rank), "WORLD_SIZE": str(state.world_size if world_size is None else world_size)}
