"""Ends a forked rank as the interpreter would, in its order: threads, exit functions, the script's objects, streams.

Called by `forked_rank.py`. Only what was loaded after the fork is taken down: torch's modules would take 0.4 s. The
interpreter is not finalized: then a C++ thread that asks for its lock would be made to exit, and its process with it
(seen with gloo's threads, which release their last work late). Exit functions of C and C++ are not called.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import weakref
from types import ModuleType
from typing import Any, NoReturn

# The second is multiprocessing's name for the main module of a child.
_MAIN = ("__main__", "__mp_main__")
_OURS = ("ft_client", "ft_launcher", "rank_monitor")
# Names in `sys` that keep the last traceback, and with it the frames and objects of the script.
_LAST = ("last_type", "last_value", "last_traceback", "last_exc")
# The code of Python where the standard streams cannot be flushed at the end.
_STREAM_FAILED = 120

_preloaded: set[str] = set()


def mark_preloaded() -> None:
    """Marks what is loaded now as shared by all ranks: none of them takes it down."""
    _preloaded.update(sys.modules.keys() - set(_MAIN))
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        # Their objects are torch's and stay; without this each rank would run them at its end.
        finalizer.atexit = False


def end(code: int, interrupted: bool) -> NoReturn:
    """Ends this process.

    Args:
        code: the exit code.
        interrupted: by Ctrl-C; the process then dies of SIGINT, as Python's does.
    """
    _join_threads()
    atexit._run_exitfuncs()
    # Destructors and libraries ask this to learn that the interpreter ends.
    sys.is_finalizing = lambda: True
    # Twice, as Python does: destructors of the script's objects may print.
    flushed = _flush()
    _let_go()
    if not (_flush() and flushed):
        code = _STREAM_FAILED
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    # `os._exit` does not write the buffers of C's own streams.
    ctypes.CDLL(None).fflush(None)
    os._exit(code & 0xFF)


def _join_threads() -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        print(f"Exception ignored in: {threading!r}", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)


def _flush() -> bool:
    """Flushes the standard streams; returns whether that worked."""
    worked = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException as error:
            worked = False
            with contextlib.suppress(BaseException):
                print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.__stderr__)
    return worked


def _let_go() -> None:
    """Removes the modules that were loaded after the fork, so that objects that only they hold are destroyed.

    If threads still run Python, which the interpreter would have stopped, only `__main__` is removed.
    """
    for name in _LAST:
        if hasattr(sys, name):
            setattr(sys, name, None)
    gc.collect()
    alone = threading.active_count() == 1
    names = [name for name in sys.modules if _is_the_scripts(name) and (alone or name in _MAIN)]
    references = [_reference(sys.modules[name]) for name in names]
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]
    gc.collect()
    if not alone:
        references = []
    for reference in reversed(references):
        module = reference()
        if module is not None:
            _clear(module)
    gc.collect()


def _is_the_scripts(name: str) -> bool:
    return name not in _preloaded and name.partition(".")[0] not in _OURS


def _reference(module: Any) -> Any:
    try:
        return weakref.ref(module)
    except TypeError:
        return lambda: None


def _clear(module: Any) -> None:
    """Clears a module that is still referenced, as the interpreter does: private names first."""
    if not isinstance(module, ModuleType):
        return
    names = vars(module)
    for private in (True, False):
        for name in [name for name in names if isinstance(name, str)]:
            if (name[:1] == "_" and name[1:2] != "_") == private and name != "__builtins__":
                names[name] = None
