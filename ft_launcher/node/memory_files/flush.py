"""Has the state in memory written to shared storage at the end, and brought back at a start (`--ft-memory-flush`).

`JobFolder` has one `Flush` where the option is given. The work is done by a process of its own,
`rank_monitor/memory_flush.py`: nothing that touches the storage is called in the launcher. The launcher waits for that
process as long as it makes progress, and within the time that a signal leaves; then it kills the process and goes on.
One that the kernel does not let go, as on a server that is gone, is left behind.

Threads: none. A removal is not waited for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rank_monitor import contract
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.flush_order import BRING_BACK, REMOVE, WRITE, FlushOrder, FlushResult
from rank_monitor.contract.memory_files import UNFINISHED, folder_name
from rank_monitor.contract.memory_room import size_in_words
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire.json_record import read_record, write_record

START_STILL_S = 10.0
"""Seconds without progress after which a start goes on without what is on the storage. Such a start is mostly one after
a failure, whose user waits for it."""
END_STILL_S = 30.0
"""The same at the end, which nobody waits for: a busy server may stop for so long."""
_LOOK_S = 0.2
"""Seconds from one look whether a signal has shortened the time to the next."""
_START = "import sys; sys.path.append({root!r}); from rank_monitor.memory_flush import main; main()"


class Flush:
    """What a job has on the storage.

    Args:
        storage: the folder of `--ft-memory-flush`.
        key: tells the job from others (`adoption.job_key`), without the number of the node: nodes may share the
            storage.
        command: tells the command of the job from others, also where `key` is made of `--rdzv-id` alone.
        memory: the job's folder in memory.
        limit: bytes that all files in it may have.
        still_s: seconds without progress after which the storage counts as standing still, at a start and at the end.
    """

    def __init__(
        self,
        storage: Path,
        key: str,
        command: str,
        memory: Path,
        limit: int,
        still_s: tuple[float, float] = (START_STILL_S, END_STILL_S),
    ) -> None:
        host = socket.gethostname()
        self._order = FlushOrder(
            *("", str(storage), str(memory), folder_name(key), os.geteuid(), command, host), limit=limit
        )
        self._start_still_s, self._end_still_s = still_s

    def bring_back(self, world: int, ranks: Sequence[int], interrupt: int) -> FlushResult:
        """Copies the newest state of this node's ranks from the storage into memory. Called before the first ranks
        start. Blocks while the storage gives bytes.

        Args:
            world: how many ranks the job has.
            ranks: of this node.
            interrupt: a descriptor that is readable when the launcher has got a signal, which ends the wait.
        """
        order = replace(self._order, work=BRING_BACK, world=world, ranks=sorted(ranks))
        result = _run(order, self._start_still_s, lambda: float("inf"), interrupt)
        if result.step is None:
            self._remove_half()
        return result

    def write(self, below: int, deadline: Callable[[], float]) -> FlushResult:
        """Writes the newest generation of this node to the storage. Blocks while the storage takes bytes.

        Args:
            below: states of this step and later ones are set aside, on the storage too; 0: none is.
            deadline: called again and again; returns until when this may take (monotonic seconds).
        """
        return _run(replace(self._order, work=WRITE, below=below), self._end_still_s, deadline)

    def forget(self) -> str:
        """Removes what the job has on the storage, after a success: a later start must not go on from it. Blocks for
        10 s at most; returns why it may be there still, or an empty text."""
        until = time.monotonic() + self._start_still_s
        return _run(replace(self._order, work=REMOVE), self._start_still_s, lambda: until).reason

    def remove(self, below: int) -> None:
        """Has the states of a step and of later ones removed from the storage. Does not wait for it: what a server that
        stands still keeps is removed at the end, or set aside again."""
        with suppress(OSError):
            _start(replace(self._order, work=REMOVE, below=below), subprocess.DEVNULL)

    def _remove_half(self) -> None:
        """Removes what a process that was killed has left in memory."""
        memory = Path(self._order.memory)
        with suppress(OSError):
            for path in memory.glob(f"*.safetensors{UNFINISHED}"):
                path.unlink(missing_ok=True)


class EndTime:
    """Until when a launcher may take for its end (monotonic seconds), as its signals say. Called again and again.

    Args:
        ends_at: when the time is over that a signal has left; infinity: there was none.
        arrived: returns the signals that have arrived so far.
        left_s: of these signals, how long the end may take after the last of them (seconds).
    """

    def __init__(
        self, ends_at: float, arrived: Callable[[], Sequence[int]], left_s: Callable[[Sequence[int]], float]
    ) -> None:
        self._ends_at = ends_at
        self._arrived = arrived
        self._left_s = left_s
        self._counted = 0

    def __call__(self) -> float:
        arrived = self._arrived()
        if len(arrived) > self._counted:
            self._counted = len(arrived)
            self._ends_at = min(self._ends_at, time.monotonic() + self._left_s(arrived))
        return self._ends_at


def _start(order: FlushOrder, output: int) -> subprocess.Popen[bytes]:
    """Starts the process. Raises OSError: the system refuses one."""
    root = Path(contract.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START.format(root=str(root)), write_record(order)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _run(order: FlushOrder, still_s: float, deadline: Callable[[], float], interrupt: int | None = None) -> FlushResult:
    """Runs the process; returns what became of it. Blocks until the process has ended, stands still for `still_s`
    seconds, `deadline` has passed, or `interrupt` is readable."""
    if time.monotonic() >= deadline():
        return FlushResult(reason="no time was left")
    try:
        process = _start(order, subprocess.PIPE)
    except OSError as error:
        return FlushResult(reason=f"the system refuses a process: {error.strerror}")
    assert process.stdout is not None
    output, text, moved_at, reason = process.stdout.fileno(), b"", time.monotonic(), ""
    os.set_blocking(output, False)
    descriptors = {output}
    if interrupt is not None:
        descriptors.add(interrupt)
    while not reason:
        now = time.monotonic()
        ready = readable(descriptors, _LOOK_S)
        if output in ready:
            moved_at = time.monotonic()
            part = os.read(output, 1 << 16)
            text += part
            if not part:
                break
        elif interrupt in ready:
            reason = "this launcher got a signal"
        elif now >= deadline():
            reason = f"the time was over, with {_done(text)} done"
        elif now - moved_at >= still_s:
            reason = f"{order.storage} has not answered for {now - moved_at:.0f} s, with {_done(text)} done"
    if reason:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    process.poll()
    if reason:
        return FlushResult(reason=reason)
    try:
        return read_record(FlushResult, text.splitlines()[-1].decode())
    except (IndexError, ProtocolError, ValueError):
        return FlushResult(reason="the process that was to do it has died")


def _done(text: bytes) -> str:
    """Returns how many bytes are done, by the process' output so far."""
    whole_lines = [line for line in text.split(b"\n")[:-1] if line.isdigit()]
    if not whole_lines:
        return "nothing"
    return size_in_words(int(whole_lines[-1]))
