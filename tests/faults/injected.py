"""The faults a rank can do to itself, by name. Runs inside a rank; knows no plan and no launcher."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from ft_client import WorkloadAction, WorkloadControlRequest
from tests.faults import hostile

FOREVER_S = 3600


class InjectedError(Exception):
    """The exception of the fault `exception`."""


def _exception(client: Any) -> None:
    raise InjectedError("injected on purpose")


def _gpu_fault(client: Any) -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def _exit_3(client: Any) -> None:
    sys.exit(3)


def _exit_16(client: Any) -> None:
    sys.exit(16)


def _exit_17(client: Any) -> None:
    sys.exit(17)


def _asks(action: WorkloadAction, then: Callable[[Any], None]) -> Callable[[Any], None]:
    def ask(client: Any) -> None:
        client.send_workload_control_request(WorkloadControlRequest(action, "injected on purpose"))
        then(client)

    return ask


def _sigkill(client: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sigsegv(client: Any) -> None:
    ctypes.string_at(0)


def _sigabrt(client: Any) -> None:
    os.abort()


def _sigstop(client: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(client: Any) -> None:
    time.sleep(FOREVER_S)


def _wait_with_gil(client: Any) -> None:
    """Inside one C call that no signal cuts short: sleep() would return when the stacks are asked for."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def _outer_overdue(client: Any) -> None:
    """A young inner section, and signs of life, while an outer one is open for too long."""
    client.start_section("outer")
    client.start_section("inner")
    while True:
        client.send_heartbeat()
        time.sleep(0.02)


def _inner_overdue(client: Any) -> None:
    client.start_section("outer")
    client.start_section("inner")
    _sleep(client)


def _flood(client: Any) -> None:
    hostile.flood()


def _nonsense(client: Any) -> None:
    hostile.send_nonsense()


def _strangers(client: Any) -> None:
    hostile.connect_again()


def _prints_8_mib(client: Any) -> None:
    for _ in range(8 << 10):
        print("x" * 1023)


def _hostile_files(client: Any) -> None:
    hostile.write_files()


def _hostile_files_and_exit(client: Any) -> None:
    hostile.write_files()
    os._exit(3)


FAULTS: dict[str, Callable[[Any], None]] = {
    "exception": _exception,
    "GPU fault": _gpu_fault,
    "exit 3": _exit_3,
    "exit 16": _exit_16,
    "exit 17": _exit_17,
    "SIGKILL": _sigkill,
    "SIGSEGV": _sigsegv,
    "SIGABRT": _sigabrt,
    "SIGSTOP": _sigstop,
    "sleep": _sleep,
    "wait with the GIL": _wait_with_gil,
    "outer overdue": _outer_overdue,
    "inner overdue": _inner_overdue,
    "nonsense": _nonsense,
    "flood": _flood,
    "strangers": _strangers,
    "prints 8 MiB": _prints_8_mib,
    "hostile files": _hostile_files,
    "hostile files and exit": _hostile_files_and_exit,
    "ask for a restart": _asks(WorkloadAction.Continue, _sleep),
    "ask for a restart and exit": _asks(WorkloadAction.Continue, _exit_3),
    "ask for the end": _asks(WorkloadAction.ShutdownWorkload, _sleep),
    "ask for the end and exit": _asks(WorkloadAction.ShutdownWorkload, _exit_3),
    "ask to leave": _asks(WorkloadAction.ExcludeThisNode, _sleep),
}


def no_core_files() -> None:
    """A fault on purpose leaves no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
