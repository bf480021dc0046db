"""The likely cause of a death by signal or exit code, and of a hang by its stack, with the node's evidence where there
is some. Pure; knows no rank. What exceptions say stands in `attribution/known_errors.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ft_launcher.fault_class import NO_CAUSE, Cause, FaultClass
from rank_monitor.contract.exit_codes import ExitCode

_SHM_LOW = 64 << 20


@dataclass(frozen=True)
class NodeEvidence:
    """What is known of the node: memory kills counted by its cgroup in this cycle, free bytes of /dev/shm.

    None: that cannot be read here.
    """

    oom_kills: int | None = 0
    shm_free: int | None = None


_UNKNOWN, _TOLD = FaultClass.UNKNOWN, FaultClass.PREEMPTION

_OF_SIGNALS: dict[int, Cause] = {
    signal.SIGABRT: Cause(
        _UNKNOWN,
        "a collective that timed out or ranks out of step (NCCL's watchdog), or a failed assertion; "
        "look for 'collective operation timeout' and 'out of memory' in the ranks' output",
    ),
    signal.SIGBUS: Cause(_UNKNOWN, "shared memory is full or a mapped file was cut; look at /dev/shm"),
    signal.SIGSEGV: Cause(_UNKNOWN, "a fault in native code"),
    signal.SIGILL: Cause(_UNKNOWN, "native code built for another processor"),
    signal.SIGFPE: Cause(_UNKNOWN, "an arithmetic fault in native code"),
    signal.SIGTERM: Cause(_TOLD, "somebody outside the launcher ended it"),
    signal.SIGINT: Cause(_TOLD, "somebody outside the launcher interrupted it"),
    signal.SIGHUP: Cause(_TOLD, "its terminal went away"),
    signal.SIGUSR1: Cause(_TOLD, "a scheduler's warning, which the rank has no handler for"),
    signal.SIGUSR2: Cause(_TOLD, "a scheduler's warning, which the rank has no handler for"),
    signal.SIGXCPU: Cause(_TOLD, "its limit of processor time passed"),
    signal.SIGXFSZ: Cause(FaultClass.INFRASTRUCTURE, "a file came to the limit of its size (ulimit -f)"),
    signal.SIGSYS: Cause(FaultClass.INFRASTRUCTURE, "a system call that this container or service forbids"),
}

ALL_ABORTED = Cause(FaultClass.HANG, f"all ranks aborted: {_OF_SIGNALS[signal.SIGABRT].hint}")

_NESTED = "by its code a launcher inside it "
_OF_CODES = {
    ExitCode.BAD_CONFIG: Cause(FaultClass.USER_ERROR, "by its code wrong arguments, or a script that is not there"),
    ExitCode.RESUME_TO_DISAMBIGUATE: Cause(
        FaultClass.HARDWARE, "a result came out the same twice here; other hardware is to tell whether it is right"
    ),
    ExitCode.FAILED_ON_RESULT_VALIDATION: Cause(
        FaultClass.HARDWARE,
        "17: result could not be validated; the rank's log says whether the error was transient or persistent",
    ),
    ExitCode.LAUNCHER_ERROR: Cause(FaultClass.INFRASTRUCTURE, _NESTED + "failed"),
    ExitCode.RENDEZVOUS_FAILED: Cause(FaultClass.INFRASTRUCTURE, _NESTED + "had no rendezvous"),
    ExitCode.STORE_HOST_LOST: Cause(FaultClass.INFRASTRUCTURE, _NESTED + "lost its store"),
    ExitCode.NODE_UNHEALTHY: Cause(FaultClass.HARDWARE, _NESTED + "found the node unhealthy"),
    ExitCode.BELOW_MINIMUM: Cause(FaultClass.INFRASTRUCTURE, _NESTED + "had too few nodes"),
    ExitCode.HANG: Cause(FaultClass.HANG, _NESTED + "gave up after a hang"),
    ExitCode.PREEMPTED: Cause(_TOLD, _NESTED + "was told to end"),
    ExitCode.PREEMPTED_KILLED: Cause(_TOLD, _NESTED + "was told to end"),
    ExitCode.NOT_RESTARTABLE: Cause(FaultClass.USER_ERROR, _NESTED + "found that a restart would not help"),
    ExitCode.NODE_EXCLUDED: Cause(FaultClass.HARDWARE, _NESTED + "was asked to exclude this node"),
    ExitCode.JOB_STOPPED: Cause(FaultClass.USER_ERROR, _NESTED + "was asked to end the job"),
    120: Cause(FaultClass.INFRASTRUCTURE, "by its code Python could not write out what it had printed"),
    124: Cause(FaultClass.HANG, "by its code a command in it was ended by timeout(1)"),
    126: Cause(FaultClass.USER_ERROR, "by its code a command cannot be executed"),
    127: Cause(FaultClass.USER_ERROR, "by its code a command was not found"),
}

_OF_STACKS = (
    (("dataloader.py", "queue.py", "_try_get_data", "_next_data"), "it waits for its data loader"),
    (("_store_based_barrier", "init_process_group", "rendezvous.py"), "it waits for peers that did not come"),
    (("serialization.py", "filesystem.py", "shutil.py", "checkpoint"), "it reads or writes a checkpoint"),
)


def of_signal(number: int, node: NodeEvidence) -> Cause:
    """Why a process may have died of a signal that the launcher did not send."""
    if number == signal.SIGKILL:
        return _of_kill(node)
    if number == signal.SIGBUS and is_full(node):
        return Cause(FaultClass.MEMORY, full(node))
    return _OF_SIGNALS.get(number, NO_CAUSE)


def of_exit(code: int, node: NodeEvidence) -> Cause:
    """Why a process may have ended with a code, which a shell makes of a signal, too (128 + n)."""
    if (known := _OF_CODES.get(code)) is not None:
        return known
    number = code - 128
    if not (cause := of_signal(number, node)).hint:
        return NO_CAUSE
    words = f"by its code a command in it died of {signal.Signals(number).name}: {cause.hint}"
    return Cause(cause.fault_class, words)


def of_hang(frames: Sequence[str], state: str) -> Cause:
    """Why a process may hang.

    Args:
        frames: of its main thread, the innermost first.
        state: its state in `/proc`, as `S`.
    """
    if state.startswith("T"):
        return Cause(FaultClass.HANG, "the process is stopped (SIGSTOP or a debugger)")
    if state.startswith("D"):
        return Cause(FaultClass.HANG, "the process waits in the kernel (storage, GPU or NIC)")
    hints = (hint for marks, hint in _OF_STACKS if any(mark in frame for frame in frames[:4] for mark in marks))
    return Cause(FaultClass.HANG, next(hints, ""))


def is_full(node: NodeEvidence) -> bool:
    """Whether /dev/shm has no room worth naming."""
    return node.shm_free is not None and node.shm_free < _SHM_LOW


def full(node: NodeEvidence) -> str:
    """That in words."""
    return f"/dev/shm is full ({(node.shm_free or 0) >> 20} MiB free)"


def number_of(description: str) -> int:
    """The signal that the C library describes in these words; 0 for none."""
    found = (number for number in signal.Signals if (signal.strsignal(number) or "").startswith(description))
    return next(found, 0)


def _of_kill(node: NodeEvidence) -> Cause:
    if node.oom_kills:
        words = f"out of memory: the kernel killed {node.oom_kills} process(es) of this group in this cycle"
        return Cause(FaultClass.MEMORY, words)
    counted = "its kills cannot be read here" if node.oom_kills is None else "no kill counted here"
    return Cause(_UNKNOWN, f"not by us: the kernel's memory killer ({counted}), the scheduler, or a person")
