"""The warm-up of the template: it runs a monitor through one cycle, on sockets of its own, before any is forked.

What the interpreter writes into its memory at first use (specialised code, caches of types) is then written once, in
pages that all monitors share, rather than in each of them: a quarter of a MiB less per monitor.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import time
from pathlib import Path

from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.launcher_messages import Bye, CycleEnd, CycleStart, SnapshotRequest
from rank_monitor.contract.wire.messages import Attach, Heartbeat, Hello, Message, Progress, Sections
from rank_monitor.job import MonitoredJob
from rank_monitor.log import Log
from rank_monitor.server import RankMonitorServer

_ROUNDS = 10  # CPython specialises a function in its eighth call


def rehearse(job: MonitoredJob, log: Log) -> None:
    """Runs one cycle, with this process as the rank. Where that fails, monitors start without it. Leaves no file.

    The socket is in the runtime folder: at an abstract name any user of the machine could connect, and fill its queue.
    """
    path = Path(job.runtime_dir, "rehearsal")
    with contextlib.suppress(OSError), channel.listen(path) as listener, channel.connect(path) as rank:
        path.unlink()
        _play(listener, rank, job, log)


def _play(listener: socket.socket, rank: socket.socket, job: MonitoredJob, log: Log) -> None:
    agent, monitor = channel.pair()
    with agent, monitor:
        now_ns = time.monotonic_ns()
        beats = [message for _ in range(_ROUNDS) for message in (Heartbeat(), Sections((("step", now_ns),)))]
        _say(rank, [Hello(os.getpid()), Attach(), *beats, Progress(now_ns)])
        asked = [SnapshotRequest(number) for number in range(_ROUNDS)]
        _say(agent, [CycleStart(0, 0, os.getpid(), 0, ""), *asked])
        server = RankMonitorServer(listener, monitor, MonitorSettings(), 0, job, copy.copy(log))
        server.serve_once()
        server.serve_once()
        _say(agent, [*asked, CycleEnd(), Bye()])
        server.run()


def _say(end: socket.socket, messages: list[Message]) -> None:
    for message in messages:
        channel.send(end, codec.encode(message, 0, time.monotonic_ns()))
