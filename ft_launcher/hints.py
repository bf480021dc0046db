"""The likely cause of a death in words, with the node's evidence where there is some. Pure; knows no rank."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_SHM_LOW = 64 << 20


@dataclass(frozen=True)
class NodeEvidence:
    """What is known of the node: memory kills counted by its cgroup in this cycle, free bytes of /dev/shm.

    None: that cannot be read here.
    """

    oom_kills: int | None = 0
    shm_free: int | None = None


_OF_SIGNALS = {
    signal.SIGABRT: "a collective that timed out or ranks out of step (NCCL's watchdog), or a failed assertion; "
    "look for 'collective operation timeout' and 'out of memory' in the ranks' output",
    signal.SIGBUS: "shared memory is full or a mapped file was cut; look at /dev/shm",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGILL: "native code built for another processor",
    signal.SIGFPE: "an arithmetic fault in native code",
    signal.SIGTERM: "somebody outside the launcher ended it",
    signal.SIGINT: "somebody outside the launcher interrupted it",
    signal.SIGHUP: "its terminal went away",
}

_GPU_MEMORY = re.compile(r"(CUDA|HIP) out of memory|CUDA error: out of memory")
_LOADER = re.compile(r"DataLoader worker .*killed by signal: (.+?)\.")
_SHARED_MEMORY = re.compile(r"(/torch_\w+|/dev/shm|shared memory).*No space left|No space left.*/dev/shm", re.DOTALL)
_WATCHDOG = re.compile(r"collective operation timeout", re.IGNORECASE)


def of_signal(number: int, node: NodeEvidence) -> str:
    """Why a process may have died of a signal that the launcher did not send; empty when nothing is known."""
    if number == signal.SIGKILL:
        return _of_kill(node)
    if number == signal.SIGBUS and _is_full(node):
        return _full(node)
    return _OF_SIGNALS.get(signal.Signals(number), "") if number in set(signal.Signals) else ""


def of_exit(code: int, node: NodeEvidence) -> str:
    """The same of an exit code that a shell makes of a signal (128 + n); empty for another."""
    number = code - 128
    if number not in set(signal.Signals) or not (hint := of_signal(number, node)):
        return ""
    return f"by its code a command in it died of {signal.Signals(number).name}: {hint}"


def of_exception(kind: str, message: str, node: NodeEvidence) -> str:
    """Why an exception may have been raised, beyond what it says; empty when it says it all.

    Args:
        kind: its type's name.
    """
    if kind.rpartition(".")[2] == "OutOfMemoryError" or _GPU_MEMORY.search(message):
        return "the GPU's memory is full: the batch is too large, or another process has memory on this GPU"
    if worker := _LOADER.search(message):
        number = _number_of(worker[1])
        hint = of_signal(number, node) if number else ""
        return f"a loader worker died: {hint}" if hint else ""
    if _SHARED_MEMORY.search(message):
        return _full(node) if _is_full(node) else "shared memory was full; look at /dev/shm, and at a container's limit"
    if _WATCHDOG.search(message):
        return "a rank did not take part in the collective in time: it died, hangs, or is out of step"
    return ""


def _of_kill(node: NodeEvidence) -> str:
    if node.oom_kills:
        return f"out of memory: the kernel killed {node.oom_kills} process(es) of this group in this cycle"
    counted = "its kills cannot be read here" if node.oom_kills is None else "no kill counted here"
    return f"not by us: the kernel's memory killer ({counted}), the scheduler, or a person"


def _is_full(node: NodeEvidence) -> bool:
    return node.shm_free is not None and node.shm_free < _SHM_LOW


def _full(node: NodeEvidence) -> str:
    return f"/dev/shm is full ({(node.shm_free or 0) >> 20} MiB free)"


def _number_of(description: str) -> int:
    """The signal that the C library describes in these words; 0 for none."""
    found = (number for number in signal.Signals if (signal.strsignal(number) or "").startswith(description))
    return next(found, 0)
