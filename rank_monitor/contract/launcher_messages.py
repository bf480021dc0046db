"""What the launcher tells a monitor and the template of the monitors, and hears from them: one frozen dataclass each.

Knows no bytes (`codec.py`), no socket and no clock. What a rank sends comes through its monitor as in `messages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rank_monitor.contract.messages import Message

# Agent to monitor.


@dataclass(frozen=True)
class CycleStart(Message):
    """A rank was started; `started_ns` is from before its start, and a hello sent earlier is of another cycle.

    `reconnect`: the monitor replaces a lost one under a rank that runs already, watched (`attached`) or not, with
    `limits`: the fields of the last `LimitsSet`. The agent may also send that message itself, and the last `Guard`.
    """

    cycle: int
    rank: int
    rank_pid: int
    started_ns: int
    stack_file: str
    reconnect: bool = False
    attached: bool = False
    limits: dict[str, Any] | None = None


@dataclass(frozen=True)
class CycleEnd(Message):
    """The launcher stops the ranks: nothing is judged until the next `CycleStart`."""


@dataclass(frozen=True)
class SnapshotRequest(Message):
    """Asks for a `Snapshot`; with `stacks`, for one with frames: the rank writes its stacks to its file."""

    token: int
    stacks: bool = False


@dataclass(frozen=True)
class Bye(Message):
    """An orderly end. A channel that closes without it means that the launcher was killed."""


# Monitor to agent.


@dataclass(frozen=True)
class Ready(Message):
    """The monitor watches its socket."""

    pid: int


@dataclass(frozen=True)
class Connected(Message):
    """A rank's client connected, or its watch began or ended; `attached`: it is judged now."""

    pid: int
    attached: bool


@dataclass(frozen=True)
class Snapshot(Message):
    """Where a rank is. Ages are seconds at `token`'s answer; `sections` maps name to age. Everything the rank sent
    before was forwarded before. After its exit: where it was, with `connected` and `attached` false. `frames` of the
    main thread, innermost first (a library's have a slash in their path, the program's own have none), and `process`,
    what /proc says, are there when stacks were asked for and the process lives."""

    token: int
    connected: bool
    attached: bool
    iteration: int
    sections: dict[str, Any]
    last_sign_age_s: float | None
    detached: bool = False
    frames: list[str] = field(default_factory=list)
    process: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict(Message):
    """What a monitor found.

    `limit` is `initial`, `subsequent`, `section:NAME`, `out_of_section`, `connect`, `reconnect`, `teardown`,
    `soft_timeout`, `hard_timeout` or `stall`. Not `condemned`: a stall, or what an in-process wrapper was asked to
    restart for. `line` is the well-known one-line form that people grep.
    """

    cycle: int
    rank: int
    pid: int
    limit: str
    limit_s: float
    waited_s: float
    learned: bool
    iteration: int
    sections: dict[str, Any]
    reason: str
    line: str
    frames: list[str]
    process: dict[str, Any]
    condemned: bool


@dataclass(frozen=True)
class Fenced(Message):
    """The node's lease has run out, and the monitor ends its rank: other nodes may have gone on without this one."""

    cycle: int
    rank: int


# Launcher to template, template to launcher.


@dataclass(frozen=True)
class ForkMonitor(Message):
    """Fork one monitor; carries the listening socket, the monitor's end of its agent channel, and the node's lease
    where it has one: a timer that can be read once the ranks may run no longer."""

    local_rank: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Forked(Message):
    """The monitor runs; carries its pidfd."""

    pid: int


@dataclass(frozen=True)
class MonitorChanged(Message):
    """A monitor `ended`, `stopped` or `continued`; `status`: its exit code, or minus the signal that did it."""

    pid: int
    change: str
    status: int
