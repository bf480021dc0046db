"""Reports the exception that ends this rank to the launcher: through the monitor, and in torch's error file.

`bootstrap.py` calls it, with a traceback without our frames. The file has the form of torch's `record` decorator, and
is left as it is when that has written it; torch is not needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from pathlib import Path
from types import TracebackType

from ft_client.monitoring import process, stderr_tail
from rank_monitor.contract.wire.messages import LastOutput, RankException

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# A character has at most six in JSON (a control character, as \u0007); so both fit into a message of 60,000 bytes.
_MAX_MESSAGE, _MAX_TRACEBACK = 1000, 8000
# The rank is about to exit: a monitor that does not read must not hold that up.
_PATIENCE_S = 0.2


def report(error: BaseException | None, trace: TracebackType | None) -> None:
    """Reports an uncaught exception other than KeyboardInterrupt. Does nothing in a forked child: it is not the rank.

    Args:
        error: None: the rank exits with an error and without a known exception; the end of its stderr is reported.
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
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
