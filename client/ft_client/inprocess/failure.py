"""What the user's function raised: where it came from, and what it keeps alive. Knows nothing of restarts."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from rank_monitor.contract.lost_peer import is_lost_peer

_HERE = Path(__file__).parent


def below_ours(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in code of the user's; the whole of it where there is none."""
    found = trace
    while found is not None and _is_ours(found):
        found = found.tb_next
    return found or trace


def was_never_called(error: Exception) -> bool:
    """Whether arguments did not fit: the call failed before any line of the user's, and would each time."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, TypeError) and trace is not None and _is_ours(trace)


def is_about_lost_peer(error: BaseException) -> bool:
    """Whether an exception of torch's only says that the connection to another rank broke: that rank is the cause.

    An exception is what the first of those is that caused it.
    """
    seen = set[int]()
    while error.__cause__ is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__
    is_torchs = type(error) is RuntimeError or type(error).__module__.startswith("torch")
    return is_torchs and is_lost_peer(f"{type(error).__name__}: {in_words(error)}")


def place_of(error: BaseException) -> str:
    """Type and innermost line of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"


def in_words(error: BaseException) -> str:
    """The text of an exception, whatever its `__str__` does."""
    try:
        return str(error)
    except Exception as problem:
        return f"<no words: str() raised {type(problem).__name__}>"


def let_go(error: BaseException | None) -> None:
    """Frees what the frames of an exception hold, such as a model, before the next call makes another. Lines stay."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_ours(trace: TracebackType) -> bool:
    return Path(trace.tb_frame.f_code.co_filename).parent == _HERE
