"""What the user's function raised: where it came from, and what it keeps alive. Knows nothing of restarts."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

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


def let_go(error: BaseException | None) -> None:
    """Frees what the frames of an exception hold, such as a model, before the next call makes another. Lines stay."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_ours(trace: TracebackType) -> bool:
    return Path(trace.tb_frame.f_code.co_filename).parent == _HERE
