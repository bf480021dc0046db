"""Injects a fault: reports it on the console and to the launcher, then makes it happen, now or later from a thread.

`requested_faults.py` makes one `InjectedFault` for each fault that is meant for this rank, and says when it is due.
`EFFECTS` is what each kind of fault does to this process. This file does not know when a fault is due, nor which
ranks get one.

Threads: `inject` runs the fault in the thread that calls it. `inject_later` starts a hidden thread that sleeps until
the fault is due. A kind that happens to the training's code (`IN_MAIN_THREAD`) must happen in the main thread: the
hidden thread puts it into `_due` and sends the signal `_TO_MAIN_THREAD`, whose handler carries it out there. For all
other kinds the hidden thread starts an ordinary one: the user's callback may log, which a hidden thread must not do
(`hidden_thread.py`).
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ft_client.inject import steps
from ft_client.inject.this_rank import ThisRank
from ft_client.rank.monitoring import hidden_thread
from rank_monitor.contract import env
from rank_monitor.contract.settings import injection
from rank_monitor.contract.settings.injection import IN_MAIN_THREAD, OF_SYSTEM, SIGNALS, Injection
from rank_monitor.contract.wire import channel

_TO_MAIN_THREAD = signal.SIGRTMIN + 9
"""The signal whose handler carries out what is in `_due`. Another one than the monitor's for stacks (SIGRTMIN+7)."""
_SEND_TIMEOUT_S = 1.0
"""The fault is to happen although the launcher does not read."""
_FOREVER_S = 1e9
"""About 32 years: longer than any training."""
_MUTEX_BYTES = 64
"""Room for a pthread_mutex_t, which has 40 bytes on Linux. All zeros is a mutex that is free."""
_MORE_THAN_THERE_IS = 1 << 62
"""Bytes. No device and no address space has as many, so the allocation fails at once and takes nothing."""
_FAR_OUTSIDE = 1_000_000_000
"""An index into a tensor of one element. The kernel's check of the index makes the device fail."""
_due: deque[Callable[[], None]] = deque()
"""Faults that wait for the main thread."""


class FaultOnPurpose(Exception):
    """Raised by the fault `exception`, in the training's code."""


class BaseFaultOnPurpose(BaseException):
    """Raised by the fault `base_exception`. No `except Exception` catches it, so it ends the rank."""


class Straggle:
    """Slows the training: after each step it sleeps until the step has taken `factor` times as long.

    Args:
        fault: the fault, of kind `straggle`: its factor, and for how long it lasts from now on.
    """

    def __init__(self, fault: Injection) -> None:
        self._fault = fault
        self._since = time.monotonic()
        if fault.for_s is None:
            self._until = None
        else:
            self._until = self._since + fault.for_s

    def on_step(self, steps: range) -> None:
        """Sleeps after a step of the training, while the fault lasts."""
        now = time.monotonic()
        if self._until is None or now < self._until:
            time.sleep((self._fault.factor - 1) * (now - self._since))
        self._since = time.monotonic()


def _exception(fault: Injection) -> NoReturn:
    raise FaultOnPurpose(f"a fault on purpose: {fault}")


def _base_exception(fault: Injection) -> NoReturn:
    raise BaseFaultOnPurpose(f"a fault on purpose: {fault}")


def _signal(number: int, fault: Injection) -> None:
    """Sends a signal to this process. No core file is written: it would fill the user's disk."""
    if number in (signal.SIGSEGV, signal.SIGABRT):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.kill(os.getpid(), number)


def _exit(fault: Injection) -> NoReturn:
    """Ends this process with the fault's code. By `os._exit`, since the script could catch a SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(fault.code)


def _sleep(fault: Injection) -> None:
    time.sleep(_lasting(fault))


def _gil_sleep(fault: Injection) -> None:
    """Waits in C with the GIL held, so that no thread of Python runs, and no handler of a signal.

    The wait is for a mutex that is locked: a signal would end a `sleep`, and does not end this wait.
    """
    until = time.time() + _lasting(fault)
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9)))


def _livelock(fault: Injection) -> None:
    """Runs Python code without progress: the main thread is alive by all signs but those of the training."""
    until = time.monotonic() + _lasting(fault)
    while time.monotonic() < until:
        pass


def _oom(fault: Injection) -> None:
    """Asks for more memory than there is, of the CUDA device where this process uses one, else of the host.

    The error is torch's or Python's own. No memory is taken, so no other process suffers.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.empty(_MORE_THAN_THERE_IS, dtype=torch.uint8, device="cuda")
    bytearray(_MORE_THAN_THERE_IS)


def _device_error(fault: Injection) -> None:
    """Reads outside of a tensor on the CUDA device: all CUDA calls of this process fail from now on."""
    import torch

    if not torch.cuda.is_available():
        print(f"FT: {fault}: there is no CUDA device here, so nothing happens", file=sys.stderr, flush=True)
        return
    torch.zeros(1, device="cuda")[torch.tensor([_FAR_OUTSIDE], device="cuda").long()].cpu()
    torch.cuda.synchronize()


def _nan(fault: Injection) -> None:
    """Makes the next result that the rerun machine checks a NaN."""
    from ft_client.rerun import injector

    injector.spoil_next()


def _straggle(fault: Injection) -> None:
    """Slows this rank from now on."""
    steps.listen(Straggle(fault).on_step)


def _lasting(fault: Injection) -> float:
    """Returns for how long a fault lasts, in seconds."""
    if fault.for_s is None:
        return _FOREVER_S
    return fault.for_s


EFFECTS: dict[str, Callable[[Injection], None]] = {
    **{kind: partial(_signal, signal.Signals[kind.upper()]) for kind in SIGNALS},
    "exit": _exit,
    "exception": _exception,
    "base_exception": _base_exception,
    "sleep": _sleep,
    "gil_sleep": _gil_sleep,
    "livelock": _livelock,
    "oom": _oom,
    "device_error": _device_error,
    "nan": _nan,
    "straggle": _straggle,
}
"""Kind -> what it does to this process. The launcher carries out the kinds of `OF_SYSTEM`."""


@dataclass(frozen=True)
class InjectedFault:
    """A fault that is meant for this rank.

    Attributes:
        fault: what happens.
        rank: the rank that it is injected into: this one.
        callback: called right before the fault happens; None: nothing.
        unless: the name of a module: nothing happens where it is loaded by then.
    """

    fault: Injection
    rank: ThisRank
    callback: Callable[[], object] | None = None
    unless: str = ""

    def inject(self, at: str = "") -> None:
        """Makes the fault happen in this thread, after it was reported on stderr and to the launcher.

        A fault of the system, such as the end of the monitor, is carried out by the launcher when it has the report;
        without a launcher nothing happens then.

        Args:
            at: where the training is, for the console and the journal, such as `at step 60`.

        Raises:
            FaultOnPurpose, BaseFaultOnPurpose, MemoryError, RuntimeError: the fault itself, of some kinds.
        """
        if self.unless in sys.modules:
            return
        kind = self.rank.kind_of(self.fault)
        if self.callback is not None:
            self.callback()
        if at:
            where = f"; {at}"
        else:
            where = ""
        line = f"FT: Simulating fault: {self.fault.name_of(kind)}; rank to fail: {self.rank.rank}{where}"
        print(line, file=sys.stderr, flush=True)
        reported = self._report(at)
        if kind not in OF_SYSTEM:
            EFFECTS[kind](self.fault)
        elif not reported:
            print(f"FT: {kind} needs ft_launcher; nothing happens", file=sys.stderr, flush=True)

    def inject_later(self, delay_s: float) -> None:
        """Makes the fault happen after `delay_s` seconds, wherever the training is then. Does not wait.

        Raises:
            ValueError: a kind that happens to the main thread was asked for in another.
        """
        in_main = self.rank.kind_of(self.fault) in IN_MAIN_THREAD
        main = _thread.get_ident()
        if in_main:
            signal.signal(_TO_MAIN_THREAD, _inject_due)

        def wait() -> None:
            time.sleep(delay_s)
            inject = partial(self.inject, f"after {delay_s:.3g} s")
            if in_main:
                _due.append(inject)
                signal.pthread_kill(main, _TO_MAIN_THREAD)
            else:
                hidden_thread.run_in_ordinary(inject, "ft_client fault on purpose")

        hidden_thread.start(wait)

    def _report(self, at: str) -> bool:
        """Sends a report of the fault to the launcher before it happens. Returns whether a launcher listens.

        One datagram, to a socket beside that of the rank's monitor: a rank that dies of SIGKILL next has sent all of
        it. Waits a second at most.
        """
        monitor_socket = os.environ.get(env.RANK_MONITOR_SOCKET)
        if not monitor_socket:
            return False
        message = injection.InjectionReport(str(self.fault), self.rank.rank, self.rank.local_rank, at)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one_way:
            one_way.settimeout(_SEND_TIMEOUT_S)
            with channel.short_address(injection.socket_beside(Path(monitor_socket))) as name:
                one_way.sendto(message.encode(), name)
            return True
        return False


def _inject_due(number: int, frame: FrameType | None) -> None:
    """Makes the faults in `_due` happen. The handler of the signal `_TO_MAIN_THREAD`, so it runs in the main thread."""
    while _due:
        _due.popleft()()
