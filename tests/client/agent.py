"""The agent of one rank, as the tests of the client play it, with the real monitor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from rank_monitor.contract.processes.spawn import Template
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.launcher_messages import CycleStart
from rank_monitor.contract.wire.messages import Message
from tests.patience import until

M = TypeVar("M", bound=Message)


class Agent:
    """Owns the socket of one rank and its monitor, and takes down what the monitor says."""

    def __init__(self, folder: Path, settings: MonitorSettings) -> None:
        self.folder, self.settings = folder, settings
        self.path = folder / "m0"
        self.listener = channel.listen(self.path)
        runtime = folder / "runtime"
        runtime.mkdir()
        self.template = Template.start(f"test-{os.getpid()}", runtime)
        self.monitor = self.template.fork_monitor(self.listener, settings, 0)
        self.heard: list[Message] = []
        self.started_ns = time.monotonic_ns()

    def begin(self, rank: subprocess.Popen[str], reconnect: bool = False, attached: bool = False) -> None:
        stacks = str(self.folder / "stacks.txt")
        start = CycleStart(0, 34, rank.pid, self.started_ns, stacks, reconnect=reconnect, attached=attached)
        channel.send(self.monitor.channel, codec.encode(start, 1, time.monotonic_ns()))

    def replace_monitor(self, rank: subprocess.Popen[str], attached: bool) -> None:
        os.kill(self.monitor.pid, signal.SIGKILL)
        self.monitor.close(0)
        self.monitor = self.template.fork_monitor(self.listener, self.settings, 0)
        self.begin(rank, reconnect=True, attached=attached)

    def wait_for(self, kind: type[M], count: int = 1) -> list[M]:
        def came() -> bool:
            with contextlib.suppress(OSError):
                while taken := channel.receive(self.monitor.channel):
                    if not taken[0]:
                        break
                    self.heard.append(codec.decode(taken[0]).message)
            return sum(isinstance(one, kind) for one in self.heard) >= count

        until(came, f"{count} {kind.__name__}")
        return [one for one in self.heard if isinstance(one, kind)]

    def close(self) -> None:
        self.monitor.close()
        self.template.close()
        self.listener.close()


@contextlib.contextmanager
def agent_of(folder: Path, settings: MonitorSettings) -> Iterator[Agent]:
    agent = Agent(folder, settings)
    try:
        yield agent
    finally:
        agent.close()
