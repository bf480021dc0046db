"""A fault strikes: it is reported on the console and to the launcher, then it happens, now or later from a thread.

`Strike` is one fault of this rank; `EFFECTS` is what each kind does to this process. What happens to the training's
code must happen in the main thread: a signal of our own, with a handler that strikes, brings it there.
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

# A real-time signal other than the monitor's for stacks (SIGRTMIN+7).
_TO_MAIN_THREAD = signal.SIGRTMIN + 9
# The fault is to happen although the launcher does not read.
_SEND_TIMEOUT_S = 1.0
# About 32 years: longer than any training.
_FOREVER_S = 1e9
_MUTEX_BYTES = 64  # pthread_mutex_t has 40 on Linux; all zeros is one that is free
# Bytes: no device and no address space has as many, so the allocation fails at once.
_MORE_THAN_THERE_IS = 1 << 62
# An index into a tensor of one element: the kernel's check of it makes the device fail.
_FAR_OUTSIDE = 1_000_000_000
_due: deque[Callable[[], None]] = deque()
"""Strikes that wait for the main thread."""


class FaultOnPurpose(Exception):
    """Is raised by the fault `exception`."""


class BaseFaultOnPurpose(BaseException):
    """Is raised by the fault `base_exception`. No `except Exception` catches it."""


class Straggle:
    """Slows the training: after each step it sleeps until the step has taken `factor` times as long."""

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
    if number in (signal.SIGSEGV, signal.SIGABRT):  # no core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.kill(os.getpid(), number)


def _exit(fault: Injection) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(fault.code)  # SystemExit could be caught


def _sleep(fault: Injection) -> None:
    time.sleep(_lasting(fault))


def _gil_sleep(fault: Injection) -> None:
    """Waits in C with the interpreter's lock held. A signal would end `sleep` there; it does not end this wait."""
    until = time.time() + _lasting(fault)
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9)))


def _livelock(fault: Injection) -> None:
    until = time.monotonic() + _lasting(fault)
    while time.monotonic() < until:
        pass


def _oom(fault: Injection) -> None:
    """Asks for more than there is, of the device where this process uses one: the error is real, the memory safe."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.empty(_MORE_THAN_THERE_IS, dtype=torch.uint8, device="cuda")
    bytearray(_MORE_THAN_THERE_IS)


def _device_error(fault: Injection) -> None:
    """An index outside of a tensor on the device: CUDA calls of this process fail from now on."""
    import torch

    if not torch.cuda.is_available():
        print(f"FT: {fault}: there is no CUDA device here, so nothing happens", file=sys.stderr, flush=True)
        return
    torch.zeros(1, device="cuda")[torch.tensor([_FAR_OUTSIDE], device="cuda").long()].cpu()
    torch.cuda.synchronize()


def _nan(fault: Injection) -> None:
    from ft_client.rerun import injector

    injector.spoil_next()


def _straggle(fault: Injection) -> None:
    steps.listen(Straggle(fault).on_step)


def _lasting(fault: Injection) -> float:
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
class Strike:
    """A fault, the rank it strikes, and what is called before it happens.

    Nothing happens where a module named `unless` is loaded.
    """

    fault: Injection
    rank: ThisRank
    callback: Callable[[], object] | None = None
    unless: str = ""

    def now(self, at: str = "") -> None:
        """Strikes in this thread.

        Args:
            at: the place in the training, for the console and the journal.

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

    def later(self, delay_s: float) -> None:
        """Strikes after `delay_s` seconds, wherever the training is then. Does not wait.

        Raises:
            ValueError: a kind that happens to the main thread was asked for in another.
        """
        in_main = self.rank.kind_of(self.fault) in IN_MAIN_THREAD
        main = _thread.get_ident()
        if in_main:
            signal.signal(_TO_MAIN_THREAD, _strike_due)

        def strike() -> None:
            time.sleep(delay_s)
            now = partial(self.now, f"after {delay_s:.3g} s")
            if in_main:
                _due.append(now)
                signal.pthread_kill(main, _TO_MAIN_THREAD)
            else:
                now()

        hidden_thread.start(strike)

    def _report(self, at: str) -> bool:
        """Sends the fault to the launcher before it happens; returns whether a launcher listens."""
        monitor_socket = os.environ.get(env.RANK_MONITOR_SOCKET)
        if not monitor_socket:
            return False
        message = injection.StrikeReport(str(self.fault), self.rank.rank, self.rank.local_rank, at)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one_way:
            one_way.settimeout(_SEND_TIMEOUT_S)
            with channel.short_address(injection.socket_beside(Path(monitor_socket))) as name:
                one_way.sendto(message.encode(), name)
            return True
        return False


def _strike_due(number: int, frame: FrameType | None) -> None:
    """Carries out what waits for the main thread; the handler of `_TO_MAIN_THREAD`."""
    while _due:
        _due.popleft()()
