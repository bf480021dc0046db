"""Has a forked rank start again by exec if its script changed, before it imports torch, what that import reads.

A rank that is a fork of the zygote has torch imported already, in the environment of the launcher. A script may set a
variable such as CUDA_VISIBLE_DEVICES in its first lines, and then import torch. In a fork the variable would have no
effect. So at the script's first import of torch, or of a preloaded module, `FirstImport` compares the process with its
state at the start (`Beginning`). If the script has changed something that the import reads:

- The rank reports to the agent, which starts all later ranks by exec.
- It replaces itself by a new interpreter (exec), which runs the script from its first line and imports torch itself.
  Pid, streams and the connection to the agent stay.
- It does not do this where others would see something happen twice: the script has opened sockets, started processes or
  redirected its streams. It then goes on as a fork, and prints a warning.

Called in the rank, by `fork_server.py`. Runs on the thread that imports, which may be any thread of the script.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ft_launcher.node.zygote.first_import import imports
from ft_launcher.node.zygote.forked_rank import ForkOrder
from ft_launcher.settings import rank_program, warm_start
from rank_monitor.contract import env
from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.processes import proc
from rank_monitor.contract.wire import sealed_pickle

_DEFAULT, _IGNORE = 0, 1
"""SIG_DFL and SIG_IGN of C."""
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
"""All timers that setitimer(2) has."""
_LIMITS = range(16)
"""The numbers of all limits of setrlimit(2) in Linux."""
_MAX_REPORT = 1000
"""Bytes of a report to the agent. Ranks share one pipe, which takes up to 4096 bytes as a whole (PIPE_BUF)."""
_NO_EFFECT = (
    "This has no effect on what the rank was forked with, and the rank cannot start again by exec: {}. "
    "Use --ft-warm-start=off, or set it before the job starts"
)
_KEPT = (
    "The import would exchange these as well: the script's values stay, since the rank cannot start again by exec: {}. "
    "Use --ft-preload=none"
)


@dataclass(frozen=True)
class Beginning:
    """The state of the process before the script's first line, as far as an exec does not restore it.

    Attributes:
        order: what the rank was made by.
        environ: the environment as C has it.
        files: device and inode of the three standard streams; None: not open.
        flags: their flags of open(2).
        read_from: the position of stdin; None: it is no file.
        sockets: the open sockets, as links of /proc/self/fd.
        blocked: the blocked signals.
        limits: number of a limit -> its value, as C has it.
    """

    order: ForkOrder
    environ: Mapping[bytes, bytes]
    files: tuple[tuple[int, int] | None, ...]
    flags: tuple[int | None, ...]
    read_from: int | None
    sockets: frozenset[str]
    blocked: Collection[int]
    limits: Mapping[int, bytes]

    @classmethod
    def of_now(cls, order: ForkOrder) -> Beginning:
        """Returns the present state of this process."""
        return cls(
            order,
            c_environment(),
            tuple(map(_identity, range(3))),
            tuple(map(_flags, range(3))),
            _position(),
            frozenset(_sockets().values()),
            signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            all_limits(),
        )

    def changed(self) -> set[str]:
        """Returns the names of the variables that were set, changed or removed since."""
        now = c_environment()
        return {
            os.fsdecode(name) for name in now.keys() | self.environ.keys() if now.get(name) != self.environ.get(name)
        }

    def against_another(self) -> str:
        """Returns why the script must not be run a second time; empty: it can, since nothing outside has seen it."""
        if any(link not in self.sockets and not self._is_of_monitor(number) for number, link in _sockets().items()):
            return "it has opened sockets"
        if _has_children():
            return "it has started processes"
        if tuple(map(_identity, range(3))) != self.files:
            return "it has redirected its standard streams"
        return ""

    def _is_of_monitor(self, descriptor: int) -> bool:
        """Returns whether a socket belongs to the watch of the rank, and not to the script.

        There are two: the client's connection to its monitor, which may be newer than this record, and the socket on
        which torch answers the monitor since `torch.distributed` was imported.
        """
        monitor, recorder = map(self.order.environ.get, (env.RANK_MONITOR_SOCKET, env.FLIGHT_RECORDER_SOCKET))
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as other:
            if other.family != socket.AF_UNIX:
                return False
            if recorder and other.getsockname() == recorder:
                return True
            # Where the path is long, the address names the folder by a descriptor that is closed by now.
            return bool(monitor) and Path(other.getpeername()).name == Path(monitor or "").name
        return False

    def restore(self, kept: Collection[int]) -> None:
        """Restores what an exec would keep as the script has left it: timers, signals, limits, flags, folder, umask.

        Works on any thread. The process must call exec next: signal handlers are changed behind Python's back.

        Args:
            kept: descriptors that the next program gets, beside its standard streams.
        """
        libc = ctypes.CDLL(None)
        # Python sets handlers in the main thread only, and an import may happen in any thread.
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        # Timers survive an exec, and their signals would end the new program.
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number in map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}):
            if number in self.order.ignored:
                wanted = _IGNORE
            else:
                wanted = _DEFAULT
            libc.signal(number, wanted)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        for number, limits in self.limits.items():
            libc.setrlimit(number, limits)
        for descriptor, flags in enumerate(self.flags):
            if flags is not None:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        if self.read_from is not None:
            os.lseek(0, self.read_from, os.SEEK_SET)
        for descriptor in proc.own_descriptors():
            if descriptor > 2:
                with suppress(OSError):
                    os.set_inheritable(descriptor, descriptor in kept)
        if self.order.cwd is not None:
            os.chdir(self.order.cwd)
        os.umask(self.order.umask)
        if self.order.affinity:
            os.sched_setaffinity(0, self.order.affinity)


class FirstImport:
    """Decides at the script's first import of torch, or of a preloaded module, whether the rank starts again.

    Args:
        order: what the rank was made by.
        report_to: descriptor of the pipe to the agent.
        kept: the descriptor of a function's channel to the agent; empty for a script.
        given_back: called when hidden modules were given to the script: the client then acts on what is loaded.
    """

    def __init__(self, order: ForkOrder, report_to: int, kept: Collection[int], given_back: Callable[[], None]) -> None:
        self._given_back = given_back
        self._beginning = Beginning.of_now(order)
        self._report_to, self._kept, self._pid = report_to, kept, os.getpid()
        self._decided = False

    def begin(self) -> None:
        """Begins to watch for the script's first import of a hidden module, and for forks, until the script ends."""
        if self._kept:
            sealed_pickle.hold()
        imports.watch(asks=self._decide, given_back=self._given_back)
        os.register_at_fork(before=self._before_fork)

    def _before_fork(self) -> None:
        """Decides before a fork of the script: the child has the imports of its parent, and cannot start again
        itself."""
        if imports.hides("torch"):
            self._decide("torch", imports.read, True, "forks")

    def _decide(self, name: str, read: Collection[str], in_c: bool, what: str = "") -> None:
        """Decides whether the rank starts again. Does not return if it does.

        Args:
            name: the hidden module that the script imports.
            read: variables that Python code read when the module was imported in the zygote.
            in_c: whether C code of the module may have read others.
            what: what the script does, in words; empty: it imports the module.
        """
        # Once a reason was found nothing more is to be decided, and exit functions are not the script.
        if self._decided or imports.over:
            return
        what = what or f"imports {name}"
        by_script = {variable for variable in self._beginning.changed() if not imports.parts.have_set(variable)}
        changed = warm_start.read_by_imports(by_script, read, in_c)
        if changed:
            self._start_again(f"the script changes {', '.join(changed)} before it {what}")
        elif imports.leads_elsewhere(name):
            self._start_again(f"another {name} comes first in sys.path when the script {what}")
        else:
            exchanged = imports.parts.exchanged_by_script(imports.parts.needed_by(name))
            if exchanged:
                self._start_again(f"the script exchanges {', '.join(exchanged)} before it {what}", _KEPT)
        if name == "torch":
            sealed_pickle.drop_held()

    def _start_again(self, reason: str, otherwise: str = _NO_EFFECT) -> None:
        """Reports to the agent, and starts again by exec where that is possible; else prints a warning and returns.

        Args:
            reason: what the script has changed.
            otherwise: what the user has to know where an exec is not possible, with `{}` for the reason.
        """
        self._decided = True
        order = self._beginning.order
        refusal = self._beginning.against_another()
        if os.getpid() != self._pid:
            refusal = "this is a child of the rank"
        self._report(reason)
        if not refusal:
            command = [sys.executable, "-u", rank_program.bootstrap(), *order.arguments]
            try:
                if self._kept:
                    pickles = [sealed_pickle.resend()]
                else:
                    pickles = []
                self._beginning.restore({*self._kept, *pickles})
                os.execve(sys.executable, [*command, *map(str, pickles)], dict(order.environ))
            except OSError as error:
                refusal = f"the system refuses ({error.strerror})"
        print(console_line(f"{reason}. {otherwise.format(refusal)}", time.time()), file=sys.stderr)

    def _report(self, reason: str) -> None:
        """Reports the reason to the agent, which starts all ranks by exec from then on. One line, cut to fit a pipe."""
        with suppress(OSError):
            os.write(self._report_to, reason.encode(errors="replace")[:_MAX_REPORT] + b"\n")


def c_environment() -> dict[bytes, bytes]:
    """Returns the environment as C has it. `os.environ` does not show changes by `os.putenv` and by libraries."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[bytes, bytes] = {}
    place = 0
    while entries and entries[place] is not None:
        entry = entries[place]
        name, _, value = entry.partition(b"=")
        found[name] = value
        place += 1
    return found


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Returns device and inode of an open file; None: the descriptor is not open."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _flags(descriptor: int) -> int | None:
    """Returns the flags of an open file (O_NONBLOCK, ...); None: the descriptor is not open."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL)
    except OSError:
        return None


def all_limits() -> dict[int, bytes]:
    """Returns each limit by its number, as C has it. Without the module `resource`: a fresh interpreter has not loaded
    it, and a script must not find it loaded."""
    getrlimit = ctypes.CDLL(None).getrlimit
    found = {}
    for number in _LIMITS:
        # `struct rlimit`: two numbers of 64 bits.
        limits = ctypes.create_string_buffer(16)
        getrlimit(number, limits)
        found[number] = limits.raw
    return found


def _position() -> int | None:
    """Returns the position of stdin; None where it is not a file."""
    try:
        return os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        return None


def _sockets() -> dict[int, str]:
    """Returns the sockets of this process except its streams: inode links by descriptor."""
    found = {}
    for descriptor in proc.own_descriptors():
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 (it is not a path)
            if link.startswith("socket:") and descriptor > 2:
                found[descriptor] = link
    return found


def _has_children() -> bool:
    """Returns whether this process has children, also ended ones whose exit code was not taken."""
    try:
        # WNOWAIT: the script may still want the exit codes.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
