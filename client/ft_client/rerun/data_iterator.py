"""The data of a step, kept until the step is done, so that a rerun gets the same microbatches.

The script wraps its data iterator in a `RerunDataIterator`. `state_machine.py` says when to rewind and when to advance,
and whether anything is to be kept: this file knows nothing of states. The kept microbatches are part of a checkpoint
when a step is in doubt, so that a job on other hardware computes the step from the same data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_keeps = True
"""Whether all iterators of this process keep what they give."""


def keep_microbatches(on: bool) -> None:
    """Sets whether all iterators keep what they give: a disabled machine computes nothing again."""
    global _keeps
    _keeps = on


class SupportsNext(Protocol[T_co]):
    """What is asked of an iterator: nothing but `next`."""

    def __next__(self) -> T_co: ...


class RerunDataIterator(Generic[T]):
    """An iterator that can give the microbatches of the present step once more. They are kept as they are, not copied.

    Args:
        iterable: where fresh microbatches come from; what is an iterator already is used as it is.
        skip_replayed: where the loader is, when the job resumes from a checkpoint with a step in doubt. True: it begins
            again with that step, so after the replay as many fresh microbatches are drawn and dropped. False: it goes
            on after that step.

    Raises:
        TypeError: naming `iterable`.
    """

    def __init__(self, iterable: Iterable[T] | SupportsNext[T], *, skip_replayed: bool = False) -> None:
        source: Any = iterable
        try:
            if hasattr(source, "__next__"):
                self._fresh: SupportsNext[T] = source
            else:
                self._fresh = iter(source)
        except TypeError:
            raise TypeError(f"iterable={iterable!r:.100} gives no microbatches") from None
        self.iterable = source
        self._skip_replayed = skip_replayed
        self._to_skip = 0
        self.saved_microbatches: list[T] = []
        self.replaying = False
        self.replay_pos = 0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self.replaying:
            if self.replay_pos < len(self.saved_microbatches):
                self.replay_pos += 1
                return self.saved_microbatches[self.replay_pos - 1]
            self.replaying = False
        while self._to_skip:
            next(self._fresh)
            self._to_skip -= 1
        microbatch = next(self._fresh)
        if _keeps:
            self.saved_microbatches.append(microbatch)
        return microbatch

    def rewind(self) -> None:
        """Starts to give the microbatches of this step once more."""
        self.replaying = True
        self.replay_pos = 0

    def advance(self) -> None:
        """Drops the microbatches of a step that is done. Those that a shorter replay did not use come next."""
        if self.replaying:
            self.saved_microbatches = self.saved_microbatches[self.replay_pos :]
        else:
            self.saved_microbatches = []
        self.replaying = bool(self.saved_microbatches)
        self.replay_pos = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the microbatches of this step, as the loader made them, and where a replay is."""
        return {
            "saved_microbatches": list(self.saved_microbatches),
            "replaying": self.replaying,
            "replay_pos": self.replay_pos,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on as the iterator that wrote `state_dict`; `rewind` then replays its step.

        Raises:
            ValueError: `state_dict` is not of such an iterator.
        """
        if not isinstance(state_dict, dict) or not {"saved_microbatches", "replaying", "replay_pos"} <= set(state_dict):
            raise ValueError(f"state_dict={state_dict!r:.200} was not written by RerunDataIterator.state_dict()")
        self.saved_microbatches = list(state_dict["saved_microbatches"])
        self.replaying = bool(state_dict["replaying"])
        self.replay_pos = int(state_dict["replay_pos"])
        if self._skip_replayed:
            self._to_skip = len(self.saved_microbatches)
        else:
            self._to_skip = 0


def as_iterators(data_iterator: Any, must_replay: bool = True) -> list[RerunDataIterator[Any]]:
    """Returns the iterators that a script gave: one, a list of them, or none.

    Args:
        data_iterator: an iterator, None, or a list of these: None in it stands for a pipeline's stage without data.
        must_replay: whether an iterator of another class than `RerunDataIterator` is an error; if not, it is left out.

    Raises:
        TypeError: naming `data_iterator`.
    """
    if isinstance(data_iterator, (list, tuple)):
        several = data_iterator
    else:
        several = [data_iterator]
    found = [item for item in several if isinstance(item, RerunDataIterator)]
    other = next((item for item in several if item is not None and not isinstance(item, RerunDataIterator)), None)
    if must_replay and other is not None:
        kind = type(other).__name__
        raise TypeError(f"data_iterator: {kind} is not a RerunDataIterator; wrap it: RerunDataIterator(iterator)")
    return found
