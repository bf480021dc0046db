"""Has the states in memory of this node copied to other nodes, and brings copies back (`--ft-memory-buddies`).

`JobFolder` has one `CopyProcess` where the option is given and the job may have several nodes. The work is done by a
process, `rank_monitor/memory_copies.py`. Here are its start, its orders and its end.

The launcher's part in a cycle: `offer` goes with the request for a place. With the place comes a `CopyPlan`, which
`begin` passes on; it waits where a state is to be fetched. While ranks run, `news` returns what the process has said.
Nothing but `begin` and `offer` waits for anything.

**Where the process dies**, the cycle goes on without copies, and the next `offer` starts another one, `_STARTS` times.

Threads: none. `offer` is called in the thread that asks for a place, and everything else in the agent's: never at the
same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

from rank_monitor import contract
from rank_monitor.contract.copy_records import (
    COPIED,
    FETCHED,
    LISTENS,
    MOVED,
    NOT_COPIED,
    CopyNews,
    CopyOffer,
    CopyOrder,
    CopyPlan,
    CopySettings,
    held_states,
    is_copies_name,
)
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire.json_record import read_record, write_record

START = "import sys; sys.path.append({root!r}); from rank_monitor.memory_copies import main; main()"
_STARTS = 3
"""How often the process is started before it has copied or fetched something. One that dies again and again has a cause
that stays."""
_START_S = 10.0
"""Seconds in which the process must listen. It takes a tenth of one."""
STILL_S = 60.0
"""Seconds without a sign of a fetch after which the ranks start without: the time in which two nodes that do not answer
are given up (`rank_monitor/copy_transfer.py: STILL_S`), and some."""
LONGEST_S = 480.0
"""Seconds that a fetch may take in all. The ranks of the other nodes wait for it in `init_process_group`, whose timeout
is 600 s with NCCL."""
_END_S = 1.0


class CopyProcess:
    """The process for copies of this node.

    Args:
        settings: of the process.
        buddies: `--ft-memory-buddies`.
        still_s: seconds without a sign of a fetch after which the ranks start without.
        longest_s: seconds that a fetch may take in all.

    Attributes:
        refused: why nothing is copied, once the process could not be started; empty: it could.
        still_s: as the argument.
    """

    def __init__(
        self, settings: CopySettings, buddies: int, still_s: float = STILL_S, longest_s: float = LONGEST_S
    ) -> None:
        self.refused = ""
        self._settings = settings
        self._buddies = buddies
        self.still_s = still_s
        self._longest_s = longest_s
        self._child: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._port = 0
        self._text = b""
        """What the process has said, from the last whole line on."""

    def start(self) -> None:
        """Starts the process, without a wait. Where the system refuses, `refused` says so."""
        self._starts += 1
        self._port, self._text = 0, b""
        root = Path(contract.__file__).parents[2]
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", START.format(root=str(root)), write_record(self._settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
            )
        except OSError as problem:
            self.refused = f"the system refuses a process: {problem.strerror or problem}"
            return
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def offer(self) -> CopyOffer | None:
        """Returns what this node says of copies when it asks for a place; None: it has no process for copies. Blocks
        for a tenth of a second after a start of the process."""
        if not self._lives() and self._starts < _STARTS:
            self.start()
        if not self._lives():
            self.refused = self.refused or "its process has died, as others before it"
            return None
        deadline = time.monotonic() + _START_S
        while not self._port and self._lives() and time.monotonic() < deadline:
            self._wait(deadline)
        if not self._port:
            self.refused = "its process does not listen"
            self._kill()
            return None
        self._tell(CopyOrder(is_over=True))
        folder = Path(self._settings.folder)
        own = _names(folder)
        copies = {name: _names(folder / name) for name in own if is_copies_name(name)}
        return CopyOffer(self._port, self._buddies, held_states(own, copies))

    def begin(self, plan: CopyPlan, wakers: Set[int], why_not: Callable[[], str]) -> CopyNews | None:
        """Has the process work by a plan, and waits for what is to be fetched. Returns what became of that; None:
        nothing was to be fetched.

        Args:
            plan: of the cycle that begins.
            wakers: descriptors of which one is readable when `why_not` may have a reason.
            why_not: returns why the wait is to end, as after a signal to the launcher; empty: there is no reason.
        """
        if not self._lives() and self._starts < _STARTS:
            self.start()  # it died while this node waited for its place
        self._tell(CopyOrder(plan))
        if plan.fetch is None:
            return None
        began = moved_at = time.monotonic()
        while True:
            now = time.monotonic()
            reason = why_not()
            if not reason and not self._lives():
                reason = "the process that was to do it has died"
            elif not reason and now - moved_at >= self.still_s:
                reason = f"the other nodes have not answered for {self.still_s:g} s"
            elif not reason and now - began >= self._longest_s:
                reason = f"it was not done after {self._longest_s:g} s, and the ranks of the other nodes wait"
            if reason:
                self._kill()  # what it says later must not be taken for the answer to the next plan
                return CopyNews(FETCHED, reason=reason)
            for news in self._wait(min(moved_at + self.still_s, began + self._longest_s), wakers):
                if news.kind == FETCHED:
                    return news
                if news.kind == MOVED:
                    moved_at = time.monotonic()

    def set_aside(self, below: int) -> None:
        """Has copies of the states of a step and of later ones removed. Does not wait."""
        self._tell(CopyOrder(set_aside_from=below))

    def descriptors(self) -> set[int]:
        """Returns the descriptor that is readable when there is news, or when the process has died; else none."""
        if self._child is None or self._child.stdout is None or self._child.stdout.closed:
            return set()
        return {self._child.stdout.fileno()}

    def news(self) -> list[CopyNews]:
        """Returns what the process has said since the last call. Does not block."""
        found = self._read()
        if not self._lives():
            self._kill()
        return [news for news in found if news.kind in (COPIED, NOT_COPIED)]

    def pids(self) -> set[int]:
        """Returns the pid of the process; empty: there is none."""
        if self._child is None or self._child.poll() is not None:
            return set()
        return {self._child.pid}

    def close(self) -> None:
        """Ends the process. Blocks for a moment."""
        child = self._child
        if child is not None and child.stdin is not None:
            with suppress(OSError):
                child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
        self._kill()

    def _lives(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def _kill(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # it waits in the kernel
            self._child.wait(_END_S)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._child, self._port = None, 0

    def _tell(self, order: CopyOrder) -> None:
        """Tells the process something, if it lives. One that does not take a line is of no use any more."""
        if self._child is None or self._child.stdin is None:
            return
        line = write_record(order).encode() + b"\n"
        try:
            if os.write(self._child.stdin.fileno(), line) != len(line):
                self._kill()
        except OSError:
            self._kill()

    def _wait(self, deadline: float, wakers: Set[int] = frozenset()) -> list[CopyNews]:
        """Waits until the process says something, has died, or a waker is readable. Returns what it has said."""
        readable(self.descriptors() | wakers, max(0.0, deadline - time.monotonic()))
        return self._read()

    def _read(self) -> list[CopyNews]:
        """Returns what the process has said since the last call."""
        if self._child is None or self._child.stdout is None:
            return []
        with suppress(OSError):
            while part := os.read(self._child.stdout.fileno(), 1 << 16):
                self._text += part
        *lines, self._text = self._text.split(b"\n")
        found = []
        for line in lines:
            with suppress(ProtocolError):
                found.append(read_record(CopyNews, line))
        for news in found:
            if news.kind == LISTENS:
                self._port = news.port
            elif news.kind == COPIED or (news.kind == FETCHED and news.step is not None):
                self._starts = 1
        return found


def _names(folder: Path) -> list[str]:
    """Returns the listing of a folder; an empty one where it cannot be read: another process removes it."""
    with suppress(OSError):
        return os.listdir(folder)  # noqa: PTH208 - names, not paths
    return []
