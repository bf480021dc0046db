"""Tells the launcher of the exception that ends this rank: by the monitor, and by torch's error file.

The file has the form of torch's `record` decorator and is left alone when that wrote it already; torch is not needed.
Knows no frames of ours: the traceback comes without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from pathlib import Path
from types import TracebackType

from ft_client import process, stderr_tail
from rank_monitor.contract.messages import LastOutput, RankException

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MAX_MESSAGE, _MAX_TRACEBACK = 1000, 8000  # what JSON may make of it, times six, still fits in one message
_PATIENCE_S = 0.2


def report(error: BaseException | None, trace: TracebackType | None) -> None:
    """Reports an uncaught exception; Ctrl-C is none. In a forked child nothing: it is not the rank.

    Args:
        error: None: the rank exits with an error, and nobody knows of an exception; what it printed last is reported.
    """
    if process.is_forked() or isinstance(error, KeyboardInterrupt):
        return
    if error is None:
        _report_output(stderr_tail.text())
        return
    text = "".join(traceback.format_exception(type(error), error, trace))
    message = _words(error)
    with contextlib.suppress(OSError):
        _write_error_file(f"{type(error).__name__}: {message}", text)
    link = process.current()
    if link is not None:
        told = RankException(_name(type(error)), message[:_MAX_MESSAGE], text[-_MAX_TRACEBACK:], time.time())
        link.post(told, time.monotonic_ns(), _PATIENCE_S)


def _report_output(text: str) -> None:
    link = process.current()
    if link is not None and text:
        link.post(LastOutput(text), time.monotonic_ns(), _PATIENCE_S)


def _write_error_file(message: str, text: str) -> None:
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with Path(path).open("x") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"<no words: str() raised {type(problem).__name__}>"


def _name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
