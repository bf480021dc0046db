"""Makes a fork of the zygote what `python -u SCRIPT` would be at its start, and ends it as the interpreter would.

Called by `fork_server.py` in the new process. Knows nothing of sockets and of who asked for the rank. What a fork
cannot have is listed in `docs/warm_start.md`: the seed of string hashes is shared, and a warning that an import shows
once is shown by the launcher alone.

The end has the interpreter's order: threads, exit functions, the script's objects, streams. Only what was loaded after
the fork is taken down: torch's modules would take 0.4 s. The interpreter is not finalized: then a C++ thread that asks
for its lock would be made to exit, and its process with it (seen with gloo's threads, which release their last work
late). Exit functions of C and C++ are not called.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TextIO

from ft_launcher.node.processes import proc_view
from ft_launcher.node.zygote.first_import import imports
from rank_monitor.contract.processes import proc

# The dispositions that Python sets at its start; all others are the system's defaults.
_OF_PYTHON: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}
# For setvbuf(3).
_UNBUFFERED = 2  # _IONBF
# Run from C, which then shows the exception as it shows that of a main program.
_SHOW = b"raise __import__('sys').last_value"
# The second is multiprocessing's name for the main module of a child.
_MAIN = ("__main__", "__mp_main__")
_OURS = ("ft_client", "ft_launcher", "rank_monitor")
# Names in `sys` that keep the last traceback, and with it the frames and objects of the script.
_LAST = ("last_type", "last_value", "last_traceback", "last_exc")
# The code of Python where the standard streams cannot be flushed at the end.
_STREAM_FAILED = 120

_preloaded: set[str] = set()


@dataclass(frozen=True)
class ForkOrder:
    """What a rank becomes. `arguments` follow `python -u`; signals in `ignored` stay so, others are as at a start."""

    arguments: Sequence[str]
    environ: Mapping[str, str]
    cwd: str | None
    umask: int
    affinity: Sequence[int]
    ignored: Sequence[int]


def mark_preloaded() -> None:
    """Hides what is loaded now, for all ranks at once: each rank would take 4 ms for that. None takes it down.

    From here on this process imports nothing; the caches of the finders are cleared, so that ranks search again.
    """
    _preloaded.update(sys.modules.keys() - set(_MAIN))
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        # Their objects are torch's and stay; without this each rank would run them at its end.
        finalizer.atexit = False
    if "tempfile" in sys.modules:
        # An import may have asked for the folder (`torch._dynamo`); a script that sets TMPDIR later is to get its own.
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
    imports.take_back()
    importlib.invalidate_caches()
    # Collections in ranks then leave these objects alone, whose pages are shared.
    gc.freeze()
    gc.enable()


def become(order: ForkOrder, bootstrap: str, path: Sequence[str]) -> None:
    """Applies the order to this process. Descriptors 0 to 2 must be in place.

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
    sys.orig_argv[:] = [sys.executable, "-u", bootstrap, *order.arguments]
    sys.path[:] = path
    _renew_main()
    proc_view.show([sys.executable, "-u", *order.arguments], order.environ)
    proc.name_this_process(Path(sys.executable).name)
    # `threading` has the id of the zygote's main thread.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    _renew_seeds()
    _renew_streams()


class ForkedRank:
    """The main program of a forked rank as a context: an exception that ends it is shown as the interpreter would.

    For the outermost frame of the process: `with rank: rank.prepare_program()()`, then `rank.end()`. So no frame keeps
    objects of the script alive when the process ends.

    Args:
        make: makes the program, which reports how it ends.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._program: Any = None
        self._code = 0
        self._interrupted = False

    def __enter__(self) -> ForkedRank:
        return self

    def prepare_program(self) -> Callable[[], object]:
        """Makes the program; returns what to call."""
        self._program = self._make()
        main: Callable[[], object] = self._program.prepare_program()
        return main

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        imports.over = True
        if self._program is not None:
            self._program.__exit__(kind, error, trace)
        if isinstance(error, SystemExit):
            self._code = _code_of(error)
        elif error is not None:
            self._code = 1
            self._interrupted = isinstance(error, KeyboardInterrupt)
            _show(error)
        return True

    def end(self) -> NoReturn:
        """Ends the process; one interrupted by Ctrl-C dies of SIGINT, as Python's does."""
        _join_threads()
        atexit._run_exitfuncs()
        # Destructors and libraries ask this to learn that the interpreter ends.
        sys.is_finalizing = lambda: True
        # Twice, as Python does: destructors of the script's objects may print.
        flushed = _flush()
        _let_go()
        if not (_flush() and flushed):
            self._code = _STREAM_FAILED
        if self._interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        # `os._exit` does not write the buffers of C's own streams.
        ctypes.CDLL(None).fflush(None)
        os._exit(self._code & 0xFF)


def _show(error: BaseException) -> None:
    """Shows an exception as for a main program: by `sys.excepthook`, with the interpreter's own fallbacks."""
    sys.last_value = error
    ctypes.pythonapi.PyRun_SimpleStringFlags(_SHOW, None)


def _take_signals(ignored: Sequence[int]) -> None:
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        if number in ignored:
            wanted = signal.SIG_IGN
        else:
            wanted = _OF_PYTHON.get(number, signal.SIG_DFL)
        if signal.getsignal(number) is not wanted:
            signal.signal(number, wanted)


def _renew_main() -> None:
    """Replaces `__main__` by a module without other references: its contents are destroyed with its last name."""
    former, fresh = sys.modules["__main__"], ModuleType("__main__")
    if "__annotations__" in vars(former):
        fresh.__annotations__ = {}
    sys.modules["__main__"] = fresh
    if "__mp_main__" in sys.modules:  # multiprocessing's name for it
        sys.modules["__mp_main__"] = fresh


def _renew_seeds() -> None:
    """Draws new seeds where a module drew its own at its import; `random` does so itself at a fork."""
    of_numpy, torch = imports.loaded("numpy.random"), imports.loaded("torch")
    if of_numpy is not None:
        of_numpy.seed()
    if torch is not None:
        torch.default_generator.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        # Two ranks must not share the key by which multiprocessing's connections trust each other.
        process.current_process().authkey = os.urandom(32)


def _renew_streams() -> None:
    """Makes the streams those of `python -u`, in the same objects, since modules may hold references to them."""
    libc = ctypes.CDLL(None)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _UNBUFFERED, 0)
        stream = _renewed(descriptor, name, getattr(sys, f"__{name}__"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _renewed(descriptor: int, name: str, stream: TextIO | None) -> TextIO | None:
    writes = descriptor > 0
    try:
        if writes:
            raw = io.FileIO(descriptor, "wb", closefd=False)
        else:
            raw = io.FileIO(descriptor, "rb", closefd=False)
    except OSError:
        return None
    raw.name = f"<{name}>"
    binary: Any = raw
    if not writes:
        binary = io.BufferedReader(raw)
    if stream:
        encoding, errors = stream.encoding, stream.errors
    elif name == "stderr":
        encoding, errors = None, "backslashreplace"
    else:
        encoding, errors = None, "strict"
    again: Any = stream
    if not isinstance(stream, io.TextIOWrapper):
        again = io.TextIOWrapper.__new__(io.TextIOWrapper)
    io.TextIOWrapper.__init__(again, binary, encoding, errors, "\n", False, True)
    if writes:
        again.mode = "w"
    else:
        again.mode = "r"
    return again  # type: ignore[no-any-return]


def _code_of(wish: SystemExit) -> int:
    """Returns the exit code as the interpreter does: None is 0, a number itself, anything else is printed and is 1."""
    if wish.code is None:
        return 0
    if isinstance(wish.code, int):
        if abs(wish.code) < 1 << 63:
            return ctypes.c_int(wish.code).value
        return -1
    print(wish.code, file=sys.stderr)
    return 1


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
