"""Hints: the class and likely cause of a death by signal or exit code, and of a hang by its stack. Pure.

A signal number says little to a user: SIGKILL may be the kernel's memory killer, a scheduler or a person. The tables
here say what each usually means in a training, with what the node counted (`NodeEvidence`). One end is looked at alone:
the module knows no ranks. Called by `first_failure.py`, and by `known_errors.py`, which reads exceptions, for the
signals and exit codes that messages of exceptions name.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ft_launcher.decide.attribution.fault import NO_CAUSE, Cause, FaultClass
from rank_monitor.contract.exit_codes import ExitCode

_SHM_LOW = 64 << 20
"""Bytes free in /dev/shm below which a full /dev/shm is the likely cause. Docker gives a container 64 MiB in all unless
`--shm-size` says more."""


@dataclass(frozen=True)
class NodeEvidence:
    """Evidence of the node itself, read when the cycle ended.

    Attributes:
        oom_kills: how many processes the kernel's memory killer ended in the launcher's cgroup during this cycle; None:
            the counter cannot be read here.
        shm_free: free bytes of /dev/shm; None: it cannot be read here.
    """

    oom_kills: int | None = 0
    shm_free: int | None = None


_UNKNOWN, _PREEMPTION = FaultClass.UNKNOWN, FaultClass.PREEMPTION

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
    signal.SIGTERM: Cause(_PREEMPTION, "somebody outside the launcher ended it"),
    signal.SIGINT: Cause(_PREEMPTION, "somebody outside the launcher interrupted it"),
    signal.SIGHUP: Cause(_PREEMPTION, "its terminal went away"),
    signal.SIGUSR1: Cause(_PREEMPTION, "a scheduler's warning, which the rank has no handler for"),
    signal.SIGUSR2: Cause(_PREEMPTION, "a scheduler's warning, which the rank has no handler for"),
    signal.SIGXCPU: Cause(_PREEMPTION, "its limit of processor time passed"),
    signal.SIGXFSZ: Cause(FaultClass.INFRASTRUCTURE, "a file came to the limit of its size (ulimit -f)"),
    signal.SIGSYS: Cause(FaultClass.INFRASTRUCTURE, "a system call that this container or service forbids"),
}

ALL_ABORTED = Cause(FaultClass.HANG, f"all ranks aborted: {_OF_SIGNALS[signal.SIGABRT].hint}")

# A script may start ft_launcher itself. The exit codes of that launcher (docs/exit_codes.md) then reach this one as the
# exit code of a rank.
_NESTED = "by its code a launcher inside it "
_OF_CODES = {
    ExitCode.BAD_CONFIG: Cause(FaultClass.USER_ERROR, "by its code wrong arguments, or a script that is not there"),
    ExitCode.RESUME_TO_DISAMBIGUATE: Cause(
        FaultClass.HARDWARE, "a result came out the same twice here; other hardware has to show whether it is right"
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
    ExitCode.PREEMPTED: Cause(_PREEMPTION, _NESTED + "was told to end"),
    ExitCode.PREEMPTED_KILLED: Cause(_PREEMPTION, _NESTED + "was told to end"),
    ExitCode.NOT_RESTARTABLE: Cause(FaultClass.USER_ERROR, _NESTED + "found that a restart would not help"),
    ExitCode.NODE_EXCLUDED: Cause(FaultClass.HARDWARE, _NESTED + "was asked to exclude this node"),
    ExitCode.JOB_STOPPED: Cause(FaultClass.USER_ERROR, _NESTED + "was asked to end the job"),
    # Python exits with 120 when it fails to flush stdout at the end; 126 and 127 are those of a POSIX shell.
    120: Cause(FaultClass.INFRASTRUCTURE, "by its code Python could not write out what it had printed"),
    124: Cause(FaultClass.HANG, "by its code a command in it was ended by timeout(1)"),
    126: Cause(FaultClass.USER_ERROR, "by its code a command cannot be executed"),
    127: Cause(FaultClass.USER_ERROR, "by its code a command was not found"),
}

# Files and functions in the innermost frames of a hang -> the hint. They are those of torch's data loader, of its
# rendezvous, and of its checkpoints.
_OF_STACKS = (
    (("dataloader.py", "queue.py", "_try_get_data", "_next_data"), "it waits for its data loader"),
    (("_store_based_barrier", "init_process_group", "rendezvous.py"), "it waits for peers that did not come"),
    (("serialization.py", "filesystem.py", "shutil.py", "checkpoint"), "it reads or writes a checkpoint"),
)


def of_signal(number: int, node: NodeEvidence) -> Cause:
    """Returns class and likely cause of a death by a signal that the launcher did not send; NO_CAUSE for a signal that
    says nothing."""
    if number == signal.SIGKILL:
        return _of_kill(node)
    if number == signal.SIGBUS and full(node):
        return Cause(FaultClass.MEMORY, full(node))
    return _OF_SIGNALS.get(number, NO_CAUSE)


def of_exit(code: int, node: NodeEvidence) -> Cause:
    """Returns class and likely cause of an exit code; NO_CAUSE for a code that says nothing, such as 1.

    A code above 128 may be a shell's: it reports a command that died of signal n as 128 + n.
    """
    known = _OF_CODES.get(code)
    if known is not None:
        return known
    number = code - 128
    cause = of_signal(number, node)
    if not cause.hint:
        return NO_CAUSE
    hint = f"by its code a command in it died of {signal.Signals(number).name}: {cause.hint}"
    return Cause(cause.fault_class, hint)


def of_hang(frames: Sequence[str], state: str) -> Cause:
    """Returns the likely cause of a hang by the rank alone; its class is always HANG, its hint may be empty.

    Args:
        frames: of the main thread, the innermost first; the first four count.
        state: of the process, as `/proc/PID/status` has it, for instance `S (sleeping)`.
    """
    if state.startswith("T"):
        return Cause(FaultClass.HANG, "the process is stopped (SIGSTOP or a debugger)")
    if state.startswith("D"):
        return Cause(FaultClass.HANG, "the process waits in the kernel (storage, GPU or NIC)")
    hints = (hint for marks, hint in _OF_STACKS if any(mark in frame for frame in frames[:4] for mark in marks))
    return Cause(FaultClass.HANG, next(hints, ""))


def full(node: NodeEvidence) -> str:
    """Returns the message about a full /dev/shm (less than 64 MiB free); empty: it has more free, or cannot be read."""
    if node.shm_free is None or node.shm_free >= _SHM_LOW:
        return ""
    return f"/dev/shm is full ({node.shm_free >> 20} MiB free)"


def number_of(description: str) -> int:
    """Returns the number of the signal whose description in the C library (`strsignal`) begins with this text; 0: none.

    torch's data loader writes the description of a worker's signal into its message, and not the number.
    """
    found = (number for number in signal.Signals if (signal.strsignal(number) or "").startswith(description))
    return next(found, 0)


def _of_kill(node: NodeEvidence) -> Cause:
    """Returns class and likely cause of a SIGKILL that the launcher did not send. Only the counter of the cgroup can
    prove that it was the kernel's memory killer."""
    if node.oom_kills:
        hint = f"out of memory: the kernel killed {node.oom_kills} process(es) of this group in this cycle"
        return Cause(FaultClass.MEMORY, hint)
    if node.oom_kills is None:
        counted = "its kills cannot be read here"
    else:
        counted = "no kill counted here"
    return Cause(_UNKNOWN, f"not by us: the kernel's memory killer ({counted}), the scheduler, or a person")
