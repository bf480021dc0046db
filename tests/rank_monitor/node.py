"""A launcher of one rank, as the tests play it: a template, a monitor, and a rank that does as it is told."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from rank_monitor.contract import env
from rank_monitor.contract.processes.spawn import Monitor, Template
from rank_monitor.contract.processes.sweep import processes_of
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.launcher_messages import Connected, CycleStart, Ready
from rank_monitor.contract.wire.messages import Attach, Hello, Message
from tests.patience import patient

PATIENCE_S = patient(30.0)
STACK_SIGNAL = MonitorSettings().stack_signal
TAG = f"tag-of-the-monitor-tests-{secrets.token_hex(8)}"  # other tests run beside these
_M = TypeVar("_M")


def bytes_of(message: Message) -> bytes:
    """A message as it goes over the wire now."""
    return codec.encode(message, 1, time.monotonic_ns())


def ended(descriptor: int, timeout_s: float = PATIENCE_S) -> bool:
    """Whether a descriptor became readable: for a pidfd, whether its process ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class Puppet:
    """A rank's process on strings; see `puppet.py`."""

    def __init__(self, tag: str = TAG, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).with_name("puppet.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ, **{env.JOB_TAG: tag}, **environment),
            text=True,
            bufsize=1,
        )
        self.pid = self.process.pid

    def order(self, *words: object) -> None:
        """Tells it to do something, not waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")

    def do(self, *words: object) -> str:
        """Has it do something; returns its answer."""
        assert self.process.stdout is not None
        self.order(*words)
        return self.process.stdout.readline().strip()

    def say(self, message: Message | bytes) -> str:
        """Has it send a message to its monitor."""
        data = message if isinstance(message, bytes) else bytes_of(message)
        return self.do("send", data.hex())

    def hear(self) -> Message | str:
        """What its monitor answered; a word when the connection is gone."""
        answer = self.do("receive")
        return (
            answer
            if answer.isalpha() and not set(answer) <= set("abcdef")
            else codec.decode(bytes.fromhex(answer)).message
        )

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Node:
    """The launcher's side."""

    def __init__(self, folder: Path, template: Template) -> None:
        self.folder = folder
        self.template = template
        self.monitors: list[Monitor] = []
        self.puppets: list[Puppet] = []
        self.path = folder / "m0"
        self.listener = channel.listen(self.path)
        self.stack_file = folder / "stacks0"
        self.cycle = 0

    def monitor(self, settings: MonitorSettings, local_rank: int = 0) -> Monitor:
        """One more monitor, ready, on the one socket."""
        monitor = self.template.fork_monitor(self.listener, settings, local_rank)
        self.monitors.append(monitor)
        assert self.hear(Ready).pid == monitor.pid
        return monitor

    def say(self, message: Message) -> None:
        """To the last monitor."""
        assert channel.send(self.monitors[-1].channel, bytes_of(message))

    def hear(self, kind: type[_M]) -> _M:
        """The next message of this kind from the last monitor; others are passed over."""
        deadline = time.monotonic() + PATIENCE_S
        end = self.monitors[-1].channel
        while True:
            assert ended(end.fileno(), deadline - time.monotonic()), f"no {kind.__name__} came"
            taken = channel.receive(end)
            assert taken is not None and taken[0], "the monitor is gone"
            message = codec.decode(taken[0]).message
            if isinstance(message, kind):
                return message

    def comes(self, kind: type[Message], limit_s: float) -> bool:
        """Whether the last monitor sends a message of this kind within a limit; others are passed over."""
        end, deadline = self.monitors[-1].channel, time.monotonic() + limit_s
        while ended(end.fileno(), max(0.0, deadline - time.monotonic())):
            taken = channel.receive(end)
            assert taken is not None and taken[0], "the monitor is gone"
            if isinstance(codec.decode(taken[0]).message, kind):
                return True
        return False

    def puppet(self) -> Puppet:
        """A process of the job that is not a rank yet."""
        puppet = Puppet()
        self.puppets.append(puppet)
        return puppet

    def start(self, rank: Puppet | None = None, **start: object) -> Puppet:
        """A cycle begins with a new rank, not connected yet."""
        self.cycle += 1
        began = time.monotonic_ns()
        rank = rank or self.puppet()
        values = {"cycle": self.cycle, "rank": 5, "rank_pid": rank.pid, "started_ns": began} | start
        self.say(CycleStart(stack_file=str(self.stack_file), **values))  # type: ignore[arg-type]
        return rank

    def watched(self, rank: Puppet | None = None) -> Puppet:
        """A cycle begins with a rank that can dump its stacks, is connected and watched."""
        rank = self.start(rank)
        rank.do("register", STACK_SIGNAL, self.stack_file)
        rank.do("connect", self.path)
        rank.say(Hello(rank.pid))
        rank.say(Attach())
        while not self.hear(Connected).attached:
            pass
        rank.hear()
        return rank

    def end(self) -> None:
        """Ends everything but the template."""
        for monitor in self.monitors:
            monitor.close()
        for puppet in self.puppets:
            puppet.end()
        self.listener.close()


@contextlib.contextmanager
def playing(template: Template | None = None) -> Iterator[Node]:
    """A node in a folder of its own, with a template of its own if none is given; nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="ft-", ignore_cleanup_errors=True) as name:
        played = Node(Path(name), template or Template.start(TAG, Path(name)))
        try:
            yield played
        finally:
            played.end()
            if template is None:
                played.template.close()
        assert processes_of(TAG) == []
