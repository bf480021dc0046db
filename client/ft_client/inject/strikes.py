"""What each kind of fault does to this process. Acts at once, in the thread that calls; knows nothing of when."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from rank_monitor.contract.injection import SIGNALS, Injection

_AGES_S = 1e9
_MUTEX_BYTES = 64  # pthread_mutex_t has 40 on Linux; all zeros is one that is free
_MORE_THAN_THERE_IS = 1 << 62


class FaultOnPurpose(Exception):
    """The fault `exception`."""


class BaseFaultOnPurpose(BaseException):
    """The fault `base_exception`: passes every `except Exception`."""


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
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(_MUTEX_BYTES)
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
    torch.zeros(1, device="cuda")[torch.tensor([_AGES_S], device="cuda").long()].cpu()
    torch.cuda.synchronize()


def _nan(fault: Injection) -> None:
    from ft_client.rerun import injector

    injector.spoil_next()


def _straggle(fault: Injection) -> None:
    from ft_client.inject import steps
    from ft_client.inject.straggle import Straggle

    steps.listen(Straggle(fault))


def _lasting(fault: Injection) -> float:
    return _AGES_S if fault.for_s is None else fault.for_s


STRIKES: dict[str, Callable[[Injection], None]] = {
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
"""Kind -> what it does; what is of the system, the launcher does."""
