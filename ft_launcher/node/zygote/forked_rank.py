"""Makes a fork of the zygote what `python -u SCRIPT` would be at its start, and ends it as the interpreter would.

Called by `fork_server.py` in the new process. Knows nothing of sockets, nor of who asked for the rank.
`docs/warm_start.md` lists what a fork cannot have: for example, the seed of string hashes is the same in all ranks, and
a warning that an import shows once is shown by the launcher alone.

At the start everything that differs between a fork and a new process is set anew (`become`): signal handlers,
environment, folder, umask, processors, command line, `__main__`, seeds of random generators, streams.

At the end this file does what the interpreter does, in its order (`ForkedRank.end`): threads, exit functions, objects
of the script, streams. Two things differ:
- Modules that were loaded before the fork are not taken down: torch's would take 0.4 s.
- The interpreter is not finalized. A C++ thread that asks for the interpreter's lock then would be made to exit, and
  the whole process with it. This was seen with gloo's threads, which release their last work late.

Exit functions of C and C++ are not called either.
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

_OF_PYTHON: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}
"""The dispositions that Python sets at its start. All others are the system's defaults."""
_UNBUFFERED = 2
"""_IONBF of setvbuf(3)."""
_SHOW = b"raise __import__('sys').last_value"
"""Run from C, which then shows the exception as it shows that of a main program."""
_MAIN = ("__main__", "__mp_main__")
"""The second name is multiprocessing's, for the main module of a child."""
_OURS = ("ft_client", "ft_launcher", "rank_monitor")
"""Packages of this project, which `_drop_script_modules` leaves as they are."""
_LAST = ("last_type", "last_value", "last_traceback", "last_exc")
"""Names in `sys` that keep the last traceback, and with it the frames and objects of the script."""
_STREAM_FAILED = 120
"""The exit code of Python where the standard streams cannot be flushed at the end."""

_preloaded: set[str] = set()
"""Names of the modules that this process had before it was a rank: these are not taken down at the rank's end."""


@dataclass(frozen=True)
class ForkOrder:
    """What a fork is to become.

    Attributes:
        arguments: of the command line, after `python -u`.
        environ: the whole environment.
        cwd: the current folder; None: the launcher's folder is gone, and the rank stays where it is.
        umask: of the launcher.
        affinity: numbers of the processors that the rank may use; empty: as they are.
        ignored: signals that are ignored in the rank. All others have the handlers of a new interpreter.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    cwd: str | None
    umask: int
    affinity: Sequence[int]
    ignored: Sequence[int]


def mark_preloaded() -> None:
    """Hides what is loaded now from the scripts of all later ranks. Called once, in the zygote, after its imports.

    Done here for all ranks at once, since each rank would take 4 ms for it. No rank takes these modules down at its
    end. From here on the zygote imports nothing. The caches of the finders are cleared, so that ranks search folders
    again.
    """
    _preloaded.update(sys.modules.keys() - set(_MAIN))
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        # These finalizers belong to objects of torch, which stay. Without this line each rank would run them at its
        # end.
        finalizer.atexit = False
    if "tempfile" in sys.modules:
        # An import may have asked for the folder (`torch._dynamo` does). A script that sets TMPDIR later must get its
        # own.
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
    imports.undo()
    importlib.invalidate_caches()
    # Garbage collections in ranks then leave these objects alone: a write to one would copy its page of memory.
    gc.freeze()
    gc.enable()


def become(order: ForkOrder, bootstrap: str, path: Sequence[str]) -> None:
    """Applies the order to this process. Descriptors 0 to 2 must be in place. Called by `Zygote._become_rank`.

    Args:
        order: what the process is to become.
        bootstrap: the file that would run the script, were this an interpreter of its own.
        path: `sys.path` of an interpreter that does not know its script yet.

    Raises:
        OSError: the system refuses something.
    """
    _reset_signals(order.ignored)
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
    """The main program of a forked rank as a context. An exception that ends the program is shown as Python shows it.

    To be used in the outermost frame of the process, so that no frame keeps objects of the script alive at the end:

        with rank:
            rank.prepare_program()()
        rank.end()

    Args:
        make: called at the beginning; returns the client's program (`ft_client.bootstrap.Rank`), which reports to the
            monitor how it ends.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._program: Any = None
        self._code = 0
        self._interrupted = False

    def __enter__(self) -> ForkedRank:
        return self

    def prepare_program(self) -> Callable[[], object]:
        """Makes the program, and has it prepare itself (`prepare_program` of the client's `Rank`). Returns the callable
        that runs the user's script."""
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
        """Ends the process with the program's exit code; one interrupted by Ctrl-C dies of SIGINT, as under Python."""
        _join_threads()
        atexit._run_exitfuncs()
        # Destructors and libraries call this function in order to learn whether the interpreter ends.
        sys.is_finalizing = lambda: True
        # Flushed twice, as Python does: destructors of the script's objects may print.
        flushed = _flush()
        _drop_script_modules()
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


def _reset_signals(ignored: Sequence[int]) -> None:
    """Gives every signal the handler that it has at the start of an interpreter; those in `ignored` are ignored."""
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
    """Replaces `__main__` by a new module that nothing else refers to, so that its contents are destroyed at the
    end."""
    previous, fresh = sys.modules["__main__"], ModuleType("__main__")
    if "__annotations__" in vars(previous):
        fresh.__annotations__ = {}
    sys.modules["__main__"] = fresh
    if "__mp_main__" in sys.modules:  # multiprocessing's name for the same module
        sys.modules["__mp_main__"] = fresh


def _renew_seeds() -> None:
    """Draws new seeds for numpy and torch, which drew theirs when they were imported. `random` does so at each fork.

    Without this all ranks would draw the same numbers until their script sets a seed.
    """
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
    """Makes the streams those of `python -u`. The objects stay the same, since modules may hold references to them."""
    libc = ctypes.CDLL(None)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _UNBUFFERED, 0)
        stream = _renewed(descriptor, name, getattr(sys, f"__{name}__"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _renewed(descriptor: int, name: str, stream: TextIO | None) -> TextIO | None:
    """Returns a standard stream as a new interpreter makes it; None: the descriptor is not open.

    Args:
        descriptor: 0, 1 or 2.
        name: "stdin", "stdout" or "stderr".
        stream: the present object, which is initialised again where it is an ordinary text stream.
    """
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
    """Returns the exit code for a SystemExit, by the interpreter's rules: None is 0, a number is itself (cut to a C
    int), and anything else is printed and is 1."""
    if wish.code is None:
        return 0
    if isinstance(wish.code, int):
        if abs(wish.code) < 1 << 63:
            return ctypes.c_int(wish.code).value
        return -1
    print(wish.code, file=sys.stderr)
    return 1


def _join_threads() -> None:
    """Waits for threads of the script that are no daemons, as the interpreter does."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        print(f"Exception ignored in: {threading!r}", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)


def _flush() -> bool:
    """Flushes the standard streams; returns whether that worked. Reports an error to stderr, as the interpreter
    does."""
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


def _drop_script_modules() -> None:
    """Removes the modules that were loaded after the fork, so that objects which only these modules hold are destroyed.

    Destructors of such objects may do work that users count on: a file of results is flushed, a process is ended. If
    threads still run Python, only `__main__` is removed: the interpreter would have stopped such threads by now, and
    here they may still use the other modules.
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
    """Returns whether a module was loaded by the script, and not before the fork or by this project."""
    return name not in _preloaded and name.partition(".")[0] not in _OURS


def _reference(module: Any) -> Any:
    """Returns a weak reference to what is in `sys.modules` under a name, which need not be a module."""
    try:
        return weakref.ref(module)
    except TypeError:
        return lambda: None


def _clear(module: Any) -> None:
    """Clears a module that is still referenced, as the interpreter does: private names first, `__builtins__` never."""
    if not isinstance(module, ModuleType):
        return
    names = vars(module)
    for private in (True, False):
        for name in [name for name in names if isinstance(name, str)]:
            if (name[:1] == "_" and name[1:2] != "_") == private and name != "__builtins__":
                names[name] = None
