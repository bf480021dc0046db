"""The state that is no tensor, as bytes: written by torch's pickler, and read only by its weights-only reader.

So no file can make a rank run anything: what torch does not admit by itself, the user admits by type
(`MemoryCheckpoint(safe_types=...)`).
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


def load(content: Any, safe_types: Sequence[type]) -> Any:
    """Returns the state that `dump` wrote.

    Args:
        content: bytes.
        safe_types: types that are admitted beside those that torch admits.

    Raises:
        OtherState: the bytes name a type that is not admitted.
    """
    try:
        with torch.serialization.safe_globals(list(safe_types)):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as problem:
        raise OtherState(f"its plain state cannot be read: {str(problem).splitlines()[0]}") from None


def check_readable(content: bytes, others: Mapping[str, Any], safe_types: Sequence[type]) -> None:
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
                kind = class_name(type(value))
                advice = f"MemoryCheckpoint(safe_types=[...]) admits it where you trust {kind}"
                raise CannotBeKept(f"{path} is a {kind}, which cannot be read back safely; {advice}") from None
        raise CannotBeKept(str(problem)) from None
