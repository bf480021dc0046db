"""Examines an exception of the user's function: its origin, its cause, and the objects that it keeps alive.

`user_function.py` calls it, and `call.py` for the text. Knows nothing of restarts.
"""

from __future__ import annotations

import traceback
from types import TracebackType

from rank_monitor.contract.errors import text_of
from rank_monitor.contract.lost_peer import is_lost_peer

_OURS = "ft_client.inprocess"


def below_ours(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the first frame of the user's code on; all of it where there is no such frame."""
    found = trace
    while found is not None and _is_ours(found):
        found = found.tb_next
    return found or trace


def was_never_called(error: Exception) -> bool:
    """Whether the arguments did not fit: the call failed before any line of the user's code, and would each time."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, TypeError) and trace is not None and _is_ours(trace)


def is_about_lost_peer(error: BaseException) -> bool:
    """Whether an exception of torch only reports that the connection to another rank broke: that rank is the cause.

    The first exception in the chain of `__cause__` is examined.
    """
    seen = set[int]()
    while error.__cause__ is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__
    is_torchs = type(error) is RuntimeError or type(error).__module__.startswith("torch")
    return is_torchs and is_lost_peer(f"{type(error).__name__}: {text_of(error)}")


def place_of(error: BaseException) -> str:
    """The type of an exception and its innermost line, as text."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        where = f" at {frames[-1].filename}:{frames[-1].lineno}"
    else:
        where = ""
    return f"{type(error).__name__}{where}"


def release_frames(error: BaseException | None) -> None:
    """Frees what the frames of an exception refer to, such as a model, before the next call makes another one.

    The traceback keeps its lines.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_ours(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__"))
    return name == _OURS or name.startswith(f"{_OURS}.")
