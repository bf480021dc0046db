"""Has the states in memory written to shared storage at the end, and brought back at a start (`--ft-memory-flush`).

`JobFolder` has one `Flush` where the option is given. The work is done by a process of its own,
`rank_monitor/memory_flush.py`: nothing that touches the storage is called in the launcher. The launcher waits for that
process as long as it makes progress, and within the time that a signal leaves; then it kills the process and goes on.
One that the kernel does not let go, as on a server that is gone, is left behind; `pids` tells these from the processes
of the ranks.

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
from rank_monitor.contract.memory_files import UNFINISHED, complete_generations, folder_name, state_file
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
START = "import sys; sys.path.append({root!r}); from rank_monitor.memory_flush import main; main()"


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
        self._children: list[subprocess.Popen[bytes]] = []
        """The processes that were started and may still run."""

    def pids(self) -> set[int]:
        """Returns the pids of the processes that still run. Takes the exit codes of those that have ended."""
        self._children = [child for child in self._children if child.poll() is None]
        return {child.pid for child in self._children}

    def bring_back(self, world: int, ranks: Sequence[int], interrupt: int) -> FlushResult:
        """Copies the states of this node's ranks from the storage into memory, the newest first. Called before the
        first ranks start. Blocks while the storage gives bytes. Returns what became of the newest.

        Args:
            world: how many ranks the job has.
            ranks: of this node.
            interrupt: a descriptor that is readable when the launcher has got a signal, which ends the wait.
        """
        order = replace(self._order, work=BRING_BACK, world=world, ranks=sorted(ranks))
        result = self._run(order, self._start_still_s, lambda: float("inf"), interrupt)
        self._remove_half()
        return result

    def write(self, below: int, deadline: Callable[[], float]) -> FlushResult:
        """Writes the generations of this node to the storage, the newest first. Blocks while the storage takes bytes.
        Returns what became of the newest.

        Args:
            below: states of this step and later ones were set aside, those of this node's ranks that are on the storage
                before this, too; 0: none was.
            deadline: called again and again; returns until when this may take (monotonic seconds).
        """
        self._end_removals()
        order = self._for_own_ranks(replace(self._order, work=WRITE, below=below))
        return self._run(order, self._end_still_s, deadline)

    def forget(self) -> str:
        """Removes what the job has on the storage, after a success: a later start must not go on from it. Blocks for
        10 s at most; returns why it may be there still, or an empty text."""
        self._end_removals()
        until = time.monotonic() + self._start_still_s
        return self._run(replace(self._order, work=REMOVE), self._start_still_s, lambda: until).reason

    def remove(self, below: int) -> None:
        """Has the states of a step and of later ones removed from the storage, as far as they are of the ranks that
        this node has in memory. Does not wait for it: what a server that stands still keeps is removed at the end, or
        set aside again."""
        order = self._for_own_ranks(replace(self._order, work=REMOVE, below=below))
        with suppress(OSError):
            self._start(order, subprocess.DEVNULL)

    def _for_own_ranks(self, order: FlushOrder) -> FlushOrder:
        """Returns an order for the ranks whose states are in memory, also where these are set aside."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(order.memory)  # noqa: PTH208 - names, not paths
        for newest in complete_generations([name for name in names if state_file(name) is not None])[:1]:
            return replace(order, world=newest.world, ranks=list(newest.ranks))
        return order

    def _end_removals(self) -> None:
        """Kills the removals that still run: one that wakes up late must not remove what is written now."""
        self.pids()
        for child in self._children:
            _kill(child)

    def _start(self, order: FlushOrder, output: int) -> subprocess.Popen[bytes]:
        """Starts the process. Raises OSError: the system refuses one."""
        root = Path(contract.__file__).parents[2]
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START.format(root=str(root)), write_record(order)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        self._children.append(child)
        return child

    def _run(
        self, order: FlushOrder, still_s: float, deadline: Callable[[], float], interrupt: int | None = None
    ) -> FlushResult:
        """Runs the process; returns what became of it. Blocks until the process has ended, stands still for `still_s`
        seconds, `deadline` has passed, or `interrupt` is readable. What was done by then counts."""
        if time.monotonic() >= deadline():
            return FlushResult(reason="no time was left")
        try:
            process = self._start(order, subprocess.PIPE)
        except OSError as error:
            return FlushResult(reason=f"the system refuses a process: {error.strerror}")
        assert process.stdout is not None
        output, text, moved_at, reason = process.stdout.fileno(), b"", time.monotonic(), ""
        os.set_blocking(output, False)
        descriptors = {output} if interrupt is None else {output, interrupt}
        while not reason:
            ready = readable(descriptors, _LOOK_S)
            now = time.monotonic()
            if output in ready:
                moved_at = now
                part = os.read(output, 1 << 16)
                text += part
                if not part:
                    break
            if now >= deadline():
                reason = f"the time was over, with {_done(text)} done"
            elif interrupt in ready:
                reason = "this launcher got a signal"
            elif now - moved_at >= still_s:
                reason = f"{order.storage} has not answered for {now - moved_at:.0f} s, with {_done(text)} done"
        if reason:
            _kill(process)
            with suppress(BlockingIOError):
                text += os.read(output, 1 << 16)
        process.stdout.close()
        process.poll()
        return _result(text, reason or "the process that was to do it has died")

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


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _result(text: bytes, reason: str) -> FlushResult:
    """Returns the last result in the process' output. `reason`: why there may be none."""
    for line in reversed(text.split(b"\n")[:-1]):
        if not line.isdigit():
            with suppress(ProtocolError, ValueError):
                return read_record(FlushResult, line.decode())
    return FlushResult(reason=reason)


def _done(text: bytes) -> str:
    """Returns how many bytes are done, by the process' output so far."""
    whole_lines = [line for line in text.split(b"\n")[:-1] if line.isdigit()]
    if not whole_lines:
        return "nothing"
    return size_in_words(int(whole_lines[-1]))
