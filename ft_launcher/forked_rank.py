"""Makes a fork of the zygote what `python -u SCRIPT` would be at its start; its end is `forked_end.py`'s.

Knows nothing of sockets and of who asked for the rank. What cannot be had in a fork is listed in the guide: the seed of
string hashes is shared, and a warning that an import shows once is shown by the launcher alone.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TextIO

from ft_launcher import forked_end, proc_view
from ft_launcher.first_import import imports

_OF_PYTHON: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}
_UNBUFFERED = 2  # _IONBF
_SHOW = b"raise __import__('sys').last_value"


@dataclass(frozen=True)
class Order:
    """What a rank gets. `words` follow `python -u`; signals in `ignored` stay so, all others are as at a start."""

    words: Sequence[str]
    environ: Mapping[str, str]
    cwd: str | None
    umask: int
    affinity: Sequence[int]
    ignored: Sequence[int]


def mark_preloaded() -> None:
    """What is loaded now is shared by all ranks, and taken back for all of them at once: each would take 4 ms for that.

    From here on this process imports nothing: ranks search anew.
    """
    forked_end.mark_preloaded()
    imports.take_back()
    importlib.invalidate_caches()
    gc.freeze()
    gc.enable()


def become(order: Order, bootstrap: str, path: Sequence[str]) -> None:
    """Takes on the order; descriptors 0 to 2 are in place.

    Args:
        bootstrap: the file that would run the script, were this an interpreter of its own.
        path: `sys.path` of an interpreter that does not know its script yet.

    Raises:
        OSError: the system refuses something.
    """
    _take_signals(order.ignored)
    os.environ.clear()
    os.environ.update(order.environ)
    if order.cwd is not None:
        os.chdir(order.cwd)
    os.umask(order.umask)
    if order.affinity:
        os.sched_setaffinity(0, order.affinity)
    sys.orig_argv[:] = [sys.executable, "-u", bootstrap, *order.words]
    sys.path[:] = path
    _renew_main()
    proc_view.show([sys.executable, "-u", *order.words], order.environ)
    proc_view.name(Path(sys.executable).name)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    _renew_seeds()
    _renew_streams()


class ForkedRank:
    """The main program of a forked rank as a context: what ends it is shown as the interpreter would show it.

    For the outermost frame of the process: `with rank: rank.take()()`, then `rank.end()`. What is in between has let go
    of all that the script left by the time that the process ends.

    Args:
        make: makes the program, which reports the exception that ends it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._program: Any = None
        self._code = 0
        self._interrupted = False

    def __enter__(self) -> ForkedRank:
        return self

    def take(self) -> Callable[[], object]:
        """What to call."""
        self._program = self._make()
        main: Callable[[], object] = self._program.take()
        return main

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        imports.over = True
        if error is None:
            return True
        if self._program is not None:
            self._program.__exit__(kind, error, trace)
        if isinstance(error, SystemExit):
            self._code = _code_of(error)
        else:
            self._code = 1
            self._interrupted = isinstance(error, KeyboardInterrupt)
            _show(error)
        return True

    def end(self) -> NoReturn:
        """Ends the process."""
        forked_end.end(self._code, self._interrupted)


def _show(error: BaseException) -> None:
    """In C, as for a main program: by sys.excepthook and all that stands behind it."""
    sys.last_value = error
    ctypes.pythonapi.PyRun_SimpleStringFlags(_SHOW, None)


def _take_signals(ignored: Sequence[int]) -> None:
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        wanted = signal.SIG_IGN if number in ignored else _OF_PYTHON.get(number, signal.SIG_DFL)
        if signal.getsignal(number) is not wanted:
            signal.signal(number, wanted)


def _renew_main() -> None:
    """A module that nobody else holds: it dies with its last name, and with it what the script left in it."""
    former, fresh = sys.modules["__main__"], ModuleType("__main__")
    if "__annotations__" in vars(former):
        fresh.__annotations__ = {}
    sys.modules["__main__"] = fresh
    if "__mp_main__" in sys.modules:  # multiprocessing's name for it
        sys.modules["__mp_main__"] = fresh


def _renew_seeds() -> None:
    """Those that were drawn when their module was imported; `random` renews its own at a fork."""
    of_numpy, torch = imports.loaded("numpy.random"), imports.loaded("torch")
    if of_numpy is not None:
        of_numpy.seed()
    if torch is not None:
        torch.default_generator.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def _renew_streams() -> None:
    """The three streams of `python -u`, in the same objects: modules that hold one of them write through it too."""
    libc = ctypes.CDLL(None)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _UNBUFFERED, 0)
        stream = _renewed(descriptor, name, getattr(sys, f"__{name}__"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _renewed(descriptor: int, name: str, stream: TextIO | None) -> TextIO | None:
    writes = descriptor > 0
    try:
        raw = io.FileIO(descriptor, "wb" if writes else "rb", closefd=False)
    except OSError:
        return None
    raw.name = f"<{name}>"
    binary: Any = raw if writes else io.BufferedReader(raw)
    usual = "backslashreplace" if name == "stderr" else "strict"
    encoding, errors = (stream.encoding, stream.errors) if stream else (None, usual)
    again: Any = stream if isinstance(stream, io.TextIOWrapper) else io.TextIOWrapper.__new__(io.TextIOWrapper)
    io.TextIOWrapper.__init__(again, binary, encoding, errors, "\n", False, True)
    again.mode = "w" if writes else "r"
    return again  # type: ignore[no-any-return]


def _code_of(wish: SystemExit) -> int:
    """As the interpreter reads it: none is 0, a number itself, anything else is shown and is 1."""
    if wish.code is None:
        return 0
    if isinstance(wish.code, int):
        return ctypes.c_int(wish.code).value if abs(wish.code) < 1 << 63 else -1
    print(wish.code, file=sys.stderr)
    return 1
