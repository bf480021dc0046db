"""What an import does to its process that cannot be hidden from the forks of that process, observed reading by reading.

Used in the child of the zygote that tries modules: `ImportRecorder` calls an `ImportEffects` before and after the code
of each module. What can be hidden is the recorder's concern: modules, loggers, filters of warnings, exit functions,
variables of the environment.
"""

from __future__ import annotations

import builtins
import gc
import locale
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from rank_monitor.contract.processes import proc

_OF_KERNEL = (b"Threads", b"SigBlk", b"SigIgn", b"SigCgt", b"Cpus_allowed", b"Umask")
"""Lines of /proc/self/status: handlers of signals that C code sets are in no Python table."""


def _kernel() -> object:
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123 (a Path costs more than the reading)
        return [line for line in file if line.startswith(_OF_KERNEL)]


def _printed() -> object:
    """What was printed so far, where the child that tries modules has its streams."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return os.fstat(1).st_size


def _of_numpy() -> object:
    state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if state is None:  # not imported yet, or just now: each rank seeds it anew
        return None
    _, key, *others = state()
    return key.tobytes(), others


def _of_torch() -> object:
    torch = sys.modules["torch"]
    generator = torch.default_generator.get_state().numpy().tobytes()
    numbers = torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    return generator, numbers, torch.is_grad_enabled(), torch.get_float32_matmul_precision()


_READINGS: dict[str, Callable[[], object]] = {
    "the threads or signals of the process": _kernel,
    "a signal handler": lambda: [signal.getsignal(number) for number in signal.valid_signals()],
    "an open file or socket": lambda: sorted(proc.own_descriptors()),
    "the state of random": lambda: hash(random.getstate()),
    "the state of numpy.random": _of_numpy,
    "the state of torch": _of_torch,
    "sys.path": lambda: list(sys.path),
    "the finders of modules": lambda: [*sys.meta_path, *sys.path_hooks],
    "a hook of sys": lambda: (
        *(sys.excepthook, sys.displayhook, sys.unraisablehook, sys.breakpointhook, threading.excepthook),
        *(sys.gettrace(), sys.getprofile(), warnings.showwarning),
    ),
    "a setting of sys": lambda: (sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags()),
    "what is printed": _printed,
    "a stream": lambda: (sys.stdin, sys.stdout, sys.stderr),
    "the garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug(), *gc.callbacks),
    "a builtin name": lambda: {name: id(found) for name, found in vars(builtins).items() if name != "__import__"},
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "the current folder": os.getcwd,
    "the timeout of sockets": socket.getdefaulttimeout,
}
"""What an import may change -> what is compared: each is hidden from nobody once it is changed."""


class ImportEffects:
    """A context in which a call returns what was changed since the call before, in words.

    Of the calls of functions that cannot be undone, and of those whose result is of this process alone, the first of
    each kind is told; calls by modules of Python itself are not.
    """

    def __init__(self) -> None:
        self._before: dict[str, object] = {}
        self._called: list[str] = []
        self._usual: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> ImportEffects:
        for module, name, what in (
            (os, "register_at_fork", "registers a function for forks"),
            (os, "getpid", "asks for the process id"),
            (os, "urandom", "takes random bytes"),
        ):
            usual = getattr(module, name)
            self._usual.append((module, name, usual))
            setattr(module, name, self._noting(usual, what))
        self._before = {what: read() for what, read in _READINGS.items()}
        return self

    def __exit__(self, *failure: object) -> None:
        for module, name, usual in self._usual:
            setattr(module, name, usual)
        self._usual = []

    def _noting(self, usual: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _is_of_python(sys._getframe(1)):
                self._called.append(what)
            return usual(*args, **kwargs)

        return call

    def __call__(self) -> list[str]:
        now = {what: read() for what, read in _READINGS.items()}
        was_there = [what for what in now if self._before[what] is not None]
        found = [f"changes {what}" for what in was_there if now[what] != self._before[what]]
        found += dict.fromkeys(self._called)
        self._before, self._called = now, []
        return found


def _is_of_python(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0] in sys.stdlib_module_names
