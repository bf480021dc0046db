"""The state that is no tensor, as bytes: written by torch's pickler, and read only by its weights-only reader.

So no file can make a rank run anything: what torch does not admit by itself, the user admits by type
(`MemoryCheckpoint(safe_types=...)`). Reading is for the main thread: what torch admits is one set in the whole process,
to which a user's own `torch.load` looks, too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ft_client.memory.tensor_parts import CannotBeKept, OtherState, class_name


def dump(state: Any) -> bytes:
    """Returns the bytes of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def load(content: Any, safe_types: Sequence[Any]) -> Any:
    """Returns the state that `dump` wrote.

    Args:
        content: bytes.
        safe_types: types and functions that are admitted beside those that torch admits.

    Raises:
        OtherState: the bytes name a type that is not admitted.
    """
    try:
        with _admitted(safe_types):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as problem:
        raise OtherState(f"its plain state cannot be read: {str(problem).splitlines()[0]}") from None


def _admitted(safe_types: Sequence[Any]) -> Any:
    """Returns a context in which torch's reader admits these types too. Those that the user has admitted for the whole
    process stay admitted: torch's own context would take them away at its end."""
    known = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([kind for kind in safe_types if kind not in known])


def check_readable(content: bytes, others: Mapping[str, Any], safe_types: Sequence[Any]) -> None:
    """Reads back what `dump` has written, so that a save is not found useless only when it is needed.

    Args:
        content: as from `dump`.
        others: path -> each value of the state that may not be readable.
        safe_types: as for `load`.

    Raises:
        CannotBeKept: the state cannot be read back. The text names the value.
    """
    try:
        load(content, safe_types)
    except OtherState as problem:
        for path, value in others.items():
            try:
                load(dump(value), safe_types)
            except OtherState:
                text = f"{path} is a {class_name(type(value))}, which cannot be read back safely"
                raise CannotBeKept(f"{text}; {_advice(value, safe_types)}") from None
        raise CannotBeKept(str(problem)) from None


def _advice(value: Any, safe_types: Sequence[Any]) -> str:
    """Returns what the user can do about a value that cannot be read back."""
    names = _not_admitted(value, safe_types)
    if names and not _is_filled_by_items(value):
        return f"MemoryCheckpoint(safe_types=[{names}]) admits it, where you trust these names"
    return "no type that is admitted changes that: let state_dict() return a plain dict or list in its place"


def _not_admitted(value: Any, safe_types: Sequence[Any]) -> str:
    """Returns the names of all types and functions that torch's reader would have to admit for a value; an empty text
    where it cannot read the value whatever it admits."""
    with _admitted(safe_types):
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(dump(value)))
        except pickle.UnpicklingError:
            return ""
    return ", ".join(sorted(names))


def _is_filled_by_items(value: Any) -> bool:
    """Returns whether a pickle of the value makes an empty container and then adds its items, as that of a deque or a
    defaultdict. torch's reader does so for plain lists and dicts only."""
    reduced = value.__reduce_ex__(2)
    return isinstance(reduced, tuple) and any(items is not None for items in reduced[3:5])
