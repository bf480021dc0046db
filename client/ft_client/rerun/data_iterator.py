"""The data of a step, kept until the step is done, so that a rerun gets the same microbatches.

Knows nothing of states: the machine says when to rewind and when to advance, and whether anything is to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_keeps = True


def keep_microbatches(on: bool) -> None:
    """Sets whether all iterators keep what they give: a disabled machine computes nothing again."""
    global _keeps
    _keeps = on


class SupportsNext(Protocol[T_co]):
    """All that is asked of an iterator."""

    def __next__(self) -> T_co: ...


class RerunDataIterator(Generic[T]):
    """An iterator that can give the microbatches of the present step once more. They are kept as they are, not copied.

    Args:
        iterable: where fresh microbatches come from; what is an iterator already is used as it is.
        skip_replayed: after a checkpoint's microbatches were replayed, draw and drop as many fresh ones: for a loader
            that, when the job resumes, begins again with the step in doubt. False: it goes on after that step.

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
        """Forgets the microbatches of a step that is done. Those that a shorter replay did not use come next."""
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
    """Returns the iterators in `data_iterator`: one, a list of them (None in it: a stage without data), or none.

    Args:
        must_replay: others than `RerunDataIterator` are an error; False: they are left out.

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
