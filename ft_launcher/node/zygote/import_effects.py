"""What an import does to its process that cannot be hidden from the forks of that process.

A module with such an effect is left out of what the zygote imports: a script would notice. Used in the child of the
zygote that tries modules. `ImportRecorder` calls an `ImportEffects` before and after the code of each module, and the
difference is charged to that module. There are three kinds of observation:

- readings of state, compared with the reading before (`_READINGS`, `_readings_of_now`),
- wrappers around functions whose effect cannot be read, or whose result is of this process alone (`_CALLS`),
- an audit hook, for files, processes and the network (`ImportEffects._audit`).

What can be hidden is the recorder's concern: modules, loggers, filters of warnings, exit functions, variables of the
environment. Each text completes the sentence "its import ...", which the journal's event `modules_preloaded` shows.

Where an observation is wrong, it should be wrong on one side: a module that is left out costs each rank the time of
its import, and a module whose effect was overlooked changes what a script sees.

The readings are taken before and after each of hundreds of modules, so each must be cheap. All of this runs on the main
thread of the child.
"""

from __future__ import annotations

import builtins
import codecs
import copyreg
import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from ft_launcher.node.zygote.start_again import all_limits
from rank_monitor.contract.processes import proc

_OF_KERNEL = (b"Threads", b"SigBlk", b"SigIgn", b"SigCgt", b"Cpus_allowed", b"Umask")
"""Lines of /proc/self/status: handlers of signals that C code sets are in no Python table."""


def _kernel() -> object:
    """Returns what the kernel says of threads, signals, processors and the umask."""
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123 (a Path costs more than the reading)
        return [line for line in file if line.startswith(_OF_KERNEL)]


def _printed() -> object:
    """Returns how much was printed so far: the streams of the child that tries modules go to a file."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return os.fstat(1).st_size


def _of_numpy() -> object:
    """Returns the state of numpy's random numbers; None: there is none to compare."""
    state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    # numpy is not imported yet, or its import has just begun. In the latter case the next reading is the first one, and
    # no change counts: each rank seeds numpy anew.
    if state is None:
        return None
    _, key, *others = state()
    return key.tobytes(), others


def _of_torch() -> object:
    """Returns the settings of torch and the state of its random numbers."""
    torch = sys.modules["torch"]
    generator = torch.default_generator.get_state().numpy().tobytes()
    numbers = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    cudnn = torch.backends.cudnn
    exact = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return generator, numbers, modes, exact, (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)


def _of_processes() -> object:
    """Returns how `multiprocessing` starts processes, and how torch shares tensors with them."""
    start = sys.modules["multiprocessing"].get_start_method(allow_none=True)
    return start, sys.modules["torch.multiprocessing"].get_sharing_strategy()


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
        *(sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile(), warnings.showwarning),
        *sys.get_asyncgen_hooks(),
    ),
    "a setting of sys": lambda: (
        *(sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags(), threading.stack_size()),
        sys.get_coroutine_origin_tracking_depth(),
    ),
    "how objects of Python are pickled": lambda: {
        kind: made for kind, made in copyreg.dispatch_table.items() if _root(kind.__module__) in sys.stdlib_module_names
    },
    "how processes are started": _of_processes,
    "a limit or the priority of the process": lambda: (all_limits(), os.nice(0)),
    "the time zone": lambda: (time.tzname, time.timezone),
    "what is printed": _printed,
    "a stream": lambda: (sys.stdin, sys.stdout, sys.stderr),
    "the garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug(), *gc.callbacks),
    "a builtin name": lambda: {name: id(found) for name, found in vars(builtins).items() if name != "__import__"},
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "the current folder": os.getcwd,
    "the timeout of sockets": socket.getdefaulttimeout,
}
"""What an import may change, in words -> the function that reads it. A change could be hidden from no fork.

To add a kind of effect, add a reading here where the effect can be read, or a function to `_CALLS` where it cannot. A
reading must not have an effect itself, such as an import."""


_CALLS = (
    (os, "register_at_fork", "registers a function for forks"),
    (os, "getpid", "asks for the process id"),
    (os, "urandom", "takes random bytes"),
    (random, "_urandom", "takes random bytes"),  # under this name for `secrets` and `random.SystemRandom`
    (codecs, "register", "registers a codec"),
    (codecs, "register_error", "registers a handler of coding errors"),
    (sys, "addaudithook", "adds an audit hook"),
)
"""Functions whose calls are noted, where this release of Python has them."""
_FOR_OTHERS = frozenset({"uuid", "secrets", "random"})
"""Modules of Python whose functions take random bytes for the module that calls them."""
_WRITES = frozenset(
    {"os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"}
    | {"tempfile.mkdtemp", "tempfile.mkstemp"}
)
"""Events of the audit hook for written files. Without `os.mkdir`: the rank that has imported the module has made its
folder before."""
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"})
"""Events of the audit hook for processes. A rank would not have this process as its child."""
_ASKS_NETWORK = frozenset({"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"})
"""Events of the audit hook for the network: the answer may be another one for each rank, or a minute later."""
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
"""Flags of open(2)."""


class ImportEffects:
    """A context in which a call of the object returns, in words, what was changed since the last call.

    For a process that ends soon, since an audit hook cannot be removed. Each kind of call (`_CALLS`) is reported once;
    calls by modules of Python itself are not reported.

    An example:

        with ImportEffects() as effects:
            effects()                       # what was done before does not count
            importlib.import_module("a_module")
            print(effects())                # ["changes sys.path"]
    """

    def __init__(self) -> None:
        self._before: dict[str, object] = {}
        self._called: list[str] = []
        self._usual: list[tuple[Any, str, Any, Any]] = []
        self._active = False
        self._readings = _READINGS | _readings_of_now()

    def __enter__(self) -> ImportEffects:
        for module, name, what in _CALLS:
            usual = getattr(module, name, None)
            if usual is not None:
                noting = self._noting(usual, what)
                self._usual.append((module, name, usual, noting))
                setattr(module, name, noting)
        sys.addaudithook(self._audit)
        self._called.clear()  # Adding the hook above was a call of `sys.addaudithook`, and counts for no module.
        self._before = {what: read() for what, read in self._readings.items()}
        self._active = True
        return self

    def __exit__(self, *failure: object) -> None:
        self._active = False
        for module, name, usual, _ in self._usual:
            setattr(module, name, usual)
        self._usual = []

    def _noting(self, usual: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Returns a wrapper around a function, which notes `what` at each call by a module that is not Python's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not _is_of_python(sys._getframe(1)):
                self._called.append(what)
            return usual(*args, **kwargs)

        return call

    def _audit(self, event: str, words: tuple[Any, ...]) -> None:
        """The audit hook: the interpreter calls it before it opens a file, starts a process or uses the network.

        Must not raise: the interpreter would then refuse what it was about to do. `words` are the event's arguments.
        """
        if not self._active:
            return
        if event == "open":
            if _opens_to_write(*words):
                self._called.append("writes a file")
        elif event in _WRITES:
            if not _looks_for_folder():
                self._called.append("writes a file")
        elif event in _STARTS:
            self._called.append("starts a process")
        elif event in _ASKS_NETWORK:
            self._called.append("uses the network")

    def __call__(self) -> list[str]:
        """Returns what was changed since the last call, and what was called. Puts the wrappers back where needed."""
        now = {what: read() for what, read in self._readings.items()}
        was_there = [what for what in now if self._before[what] is not None]
        found = [f"changes {what}" for what in was_there if now[what] != self._before[what]]
        found += dict.fromkeys(self._called)
        for module, name, _, noting in self._usual:
            # The module has put its own function here. That value would be lost at the end of this context.
            if getattr(module, name) is not noting:
                setattr(module, name, noting)
                found.append(f"exchanges {module.__name__}.{name}")
        self._before, self._called = now, []
        return found


def _readings_of_now() -> dict[str, Callable[[], object]]:
    """Returns readings of what is there now: modules, loggers, filters of warnings.

    What an import adds to these can be hidden from a script. Only a change of what was there before counts.
    """
    modules = dict(sys.modules)
    known = logging.root.manager.loggerDict
    loggers = [logging.root, *(found for found in known.values() if isinstance(found, logging.Logger))]
    rules = list(warnings.filters)

    def of_loggers() -> object:
        states = [
            (found.level, found.propagate, found.disabled, [*found.handlers], [*found.filters]) for found in loggers
        ]
        return states, logging.root.manager.disable, dict(logging._levelToName)

    return {
        "a module that is loaded already": lambda: [
            name for name, module in modules.items() if sys.modules.get(name) is not module
        ],
        "a logger that is there already": of_loggers,
        "the filters of warnings that are there already": lambda: [
            id(rule) for rule in warnings.filters if any(rule is other for other in rules)
        ],
    }


def _root(name: str) -> str:
    """Returns the name of the top-level package of a module."""
    return name.partition(".")[0]


def _opens_to_write(path: object, mode: object, flags: object) -> bool:
    """Returns whether the event "open" is that of a file which is written. /dev/null and descriptors do not count."""
    if path == os.devnull or isinstance(path, int):
        return False
    writes = isinstance(flags, int) and flags & _TO_WRITE
    return bool(writes) and not _looks_for_folder()


def _looks_for_folder() -> bool:
    """Returns whether `tempfile` is looking for its folder, for which it writes a file and removes it at once."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "_get_default_tempdir" and frame.f_globals.get("__name__") == "tempfile":
            return True
        frame = frame.f_back
    return False


def _is_of_python(frame: FrameType) -> bool:
    """Returns whether a call is made by a module of Python for itself, and not on behalf of another module.

    Follows the callers outwards, until a module is found that answers for the call. `uuid`, `secrets` and `random` ask
    for random bytes on behalf of their callers, except at their own import. Any other module of Python asks for itself.

    Args:
        frame: of the function that has called the wrapper.
    """
    found: FrameType | None = frame
    while found is not None:
        name = _root(found.f_globals.get("__name__") or "")
        if name not in sys.stdlib_module_names:
            # Modules of torch take random keys for attributes of their own (`torch.distributed._composable`).
            return found is not frame and name == "torch"
        if name not in _FOR_OTHERS or found.f_code.co_name == "<module>":
            return True
        found = found.f_back
    return True
