"""`ft_launcher top`: what a job on this host does, live in the terminal.

`cli.py` runs it. `live_view.py` draws, `running_jobs.py` finds and asks the job, and `status.py` makes the lines.

Threads: the main thread draws, and waits for keys and answers. `ft_launcher top` asks the launcher's socket once a
second, and at once for what a key wants. So keys act at once, also while a launcher that stands still gives no answer.
An eventfd tells the main thread of an answer; a condition protects the paths that are wanted and the answers that have
come.

A job that has ended is told from one that does not answer by its socket: nobody listens there any more. The command
then prints the last sentence about the job, since the alternate screen and all on it are gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ft_launcher.record.console.console_text import printable
from ft_launcher.settings.options import UsageError
from ft_launcher.tools.commands.running_jobs import ALL_NODES_S, RunningJob, running_job
from ft_launcher.tools.commands.status import RUN, collective_lines, missing_lines, stack_lines

if TYPE_CHECKING:
    from ft_launcher.tools.commands.live_view import Show

_EVERY_S = 1.0
"""Seconds between two requests for the status."""
_SILENT_S = 3.0
"""Seconds without an answer after which the screen says so. A launcher answers within a third of a second, so it stands
still, or the host does."""
_STATUS, _STACKS, _ALL_STACKS = "/status.json", "/stacks", "/stacks?all=1"
"""What the launcher is asked for; `tools/status/status_server.py` answers."""


@click.command(
    help="Shows live what a job on this host does: its ranks as a strip of characters, its faults, by the key s where "
    "each rank is, by a where those of all nodes are; q leaves. RUN is its name or run id, or a beginning; none is "
    "needed where one job runs. It needs rich: pip install 'ft-launcher[observe]'."
)
@RUN
def top(run: str | None) -> None:
    """Shows the job until the key q, or until it is over; then prints how the job was when it was last asked.

    Raises:
        UsageError: several jobs run here, this is no terminal, or rich is not installed.
        SystemExit: with 4 where there is no such job, with 5 where its launcher does not answer.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal", "ft_launcher status prints the same once")
    try:
        from ft_launcher.tools.commands.live_view import live_view
    except ImportError as error:
        raise UsageError(
            f"top needs rich, which cannot be imported: {error}", "pip install 'ft-launcher[observe]'"
        ) from None
    job = running_job(run)
    with _keys_at_once(), live_view() as show:
        last = _Screen(job, show).run()
    if last:
        print(printable(last))


class _Screen:
    """The screen: the last status of one job, and what keys asked for. Lives on the main thread.

    Args:
        job: the job.
        show: draws the screen.
    """

    def __init__(self, job: RunningJob, show: Show) -> None:
        self._show = show
        self._found = job.status
        self._asking = _Asking(job)
        self._stacks: list[str] = []
        self._note = ""

    def run(self) -> str:
        """Shows the job until its end or the key q. Blocks until then. Returns what to print then; empty: nothing.

        Draws at each wake-up: after a second, after a key, and after an answer.
        """
        self._asking.start()
        self._asking.ask(_STATUS)
        while not self._asking.is_over:
            self._show(self._found, self._note or self._silence(), self._stacks)
            ready, _, _ = select.select([sys.stdin, self._asking.event], [], [], _EVERY_S)
            if sys.stdin in ready:
                key = os.read(sys.stdin.fileno(), 1)
                if key in (b"q", b"Q", b""):
                    return ""
                self._press(key)
            if self._asking.event in ready:
                self._drain()
        return f"{self._found['job_name']}: the launcher has ended; when it was last asked: {self._found['sentence']}"

    def _press(self, key: bytes) -> None:
        """Acts on a key, without waiting for an answer. A key without a meaning does nothing."""
        if key in (b"s", b"S"):
            self._note = "asks the ranks for their stacks"
            self._asking.ask(_STACKS)
        elif key in (b"a", b"A"):
            self._note = "asks the ranks of all nodes for their stacks"
            self._asking.ask(_ALL_STACKS)
        elif key == b"\x1b":
            self._stacks = []

    def _drain(self) -> None:
        """Takes over the answers that have come. Stacks take the place of the note that they were asked for.

        A status that did not come changes nothing here: `_silence` says so after a while.
        """
        for path, found, problem in self._asking.drain():
            if path == _STATUS and found is not None:
                self._found = found
            elif path != _STATUS:
                self._note = ""
                self._stacks = [f"no stacks: {problem}"]
                if found is not None:
                    self._stacks = [line for group in found.get("groups", []) for line in stack_lines(group)]
                    self._stacks += collective_lines(found.get("collectives"))
                    self._stacks += missing_lines(found)

    def _silence(self) -> str:
        """Returns for how long the launcher has not answered, in words; empty while it answers.

        What is on the screen may be old then, and the user must not take it for the present.
        """
        silent_s = time.monotonic() - self._asking.answered_at
        if silent_s < _SILENT_S:
            return ""
        return f"the launcher has not answered for {silent_s:.0f} s"


class _Asking(threading.Thread):
    """The thread that asks the launcher: for its status once a second, and at once for what `ask` names.

    Attributes:
        event: a descriptor that is readable when an answer has come, or when the launcher has ended.
        answered_at: when the last answer came (monotonic seconds).
        is_over: nobody listens at the launcher's socket any more.
    """

    def __init__(self, job: RunningJob) -> None:
        super().__init__(name="ft_launcher top", daemon=True)
        self.event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.answered_at = time.monotonic()
        self.is_over = False
        self._job = job
        self._condition = threading.Condition()
        self._wanted: set[str] = set()
        self._answers: list[tuple[str, dict[str, Any] | None, str]] = []

    def ask(self, path: str) -> None:
        """Has the thread ask for a path at once. Does not block."""
        with self._condition:
            self._wanted.add(path)
            self._condition.notify()

    def drain(self) -> list[tuple[str, dict[str, Any] | None, str]]:
        """Returns the answers since the last call: path, answer or None, and why there is none."""
        with self._condition, contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event)
            answers, self._answers = self._answers, []
            return answers
        return []

    def run(self) -> None:
        """The thread's function: asks until the launcher has ended. Blocks in one request at a time.

        The status is asked for in each round, too, so that stacks which take long do not look like silence afterwards.
        An error other than that nobody listens is an answer like any other.
        """
        while not self.is_over:
            with self._condition:
                self._condition.wait_for(lambda: self._wanted, _EVERY_S)
                paths, self._wanted = self._wanted | {_STATUS}, set()
            for path in sorted(paths):
                found, problem = None, ""
                try:
                    if path == _ALL_STACKS:
                        found = self._job.ask(path, ALL_NODES_S)
                    else:
                        found = self._job.ask(path)
                    self.answered_at = time.monotonic()
                except (ConnectionRefusedError, FileNotFoundError):
                    self.is_over = True
                except OSError as error:
                    problem = str(error)
                with self._condition:
                    self._answers.append((path, found, problem))
                    os.eventfd_write(self.event, 1)


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Returns a context in which each key is read at once, and is not echoed. Ctrl-C still interrupts."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
