"""Every message that crosses a process: one frozen dataclass each.

Knows no bytes (`codec.py`), no socket and no clock. All moments are nanoseconds of the sender's CLOCK_MONOTONIC, which
is one clock for a whole machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeAlias

NO_ITERATION = -1


@dataclass(frozen=True)
class Heartbeat:
    """The rank is alive."""


@dataclass(frozen=True)
class Sections:
    """The whole set of open sections, each with the moment it was opened. A sign of life too."""

    open: tuple[tuple[str, int], ...]
    iteration: int = NO_ITERATION


@dataclass(frozen=True)
class IterationReached:
    """The training reports its iteration."""

    iteration: int


@dataclass(frozen=True)
class Progress:
    """The main thread last executed bytecode at `stamp_ns`. Not a sign of life of the training, only of the process."""

    stamp_ns: int


# Client to monitor.


@dataclass(frozen=True)
class Hello:
    """First message of a connection. `attached`: the training is watched already (the client came back)."""

    pid: int
    attached: bool = False
    last_sign_ns: int = 0
    got_first_sign: bool = False
    num_warmup_iterations: int | None = None


@dataclass(frozen=True)
class Attach:
    """`init_workload_monitoring()`: judge from now on. Answered by `Welcome`."""

    num_warmup_iterations: int | None = None


@dataclass(frozen=True)
class LimitsSet:
    """Limits in force from now on, in seconds (None: no limit). `learned` names those that were learned, as
    `initial`, `subsequent`, `out_of_section` or `section:NAME`."""

    initial: float | None
    subsequent: float | None
    sections: dict[str, Any]
    out_of_section: float | None
    learned: list[str] = dataclasses.field(default_factory=list)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Detach:
    """`shutdown_workload_monitoring()`: stop judging."""


@dataclass(frozen=True)
class RankException:
    """An uncaught exception ends the rank."""

    type: str
    message: str
    traceback: str
    wall_time: float


@dataclass(frozen=True)
class ControlRequest:
    """What the training asks of the launcher: `exclude_this_node`, `stop_job` or `restart`."""

    action: str
    description: str


# Monitor to client.


@dataclass(frozen=True)
class Welcome:
    """The settings in force, as JSON of `MonitorSettings`, and the cycle."""

    settings: dict[str, Any]
    cycle: int


@dataclass(frozen=True)
class Refused:
    """An error record: why a message or a connection was not taken."""

    reason: str


# Agent to monitor.


@dataclass(frozen=True)
class CycleStart:
    """A rank was started; `started_ns` is from before its start, and a hello sent earlier is of another cycle.

    `reconnect`: the monitor replaces a lost one under a rank that runs already, watched (`attached`) or not, with
    `limits`: the fields of the last `LimitsSet`. The agent may also send that message itself.
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
class CycleEnd:
    """The launcher stops the ranks: nothing is judged until the next `CycleStart`."""


@dataclass(frozen=True)
class SnapshotRequest:
    """Asks for a `Snapshot`."""

    token: int


@dataclass(frozen=True)
class Bye:
    """An orderly end. A channel that closes without it means that the launcher was killed."""


# Monitor to agent.


@dataclass(frozen=True)
class Ready:
    """The monitor watches its socket."""

    pid: int


@dataclass(frozen=True)
class Connected:
    """A rank's client connected, or its watch began or ended; `attached`: it is judged now."""

    pid: int
    attached: bool


@dataclass(frozen=True)
class Snapshot:
    """Where a rank is. Ages are seconds at `token`'s answer; `sections` maps name to age. Everything the rank sent
    before was forwarded before. After its exit: where it was, with `connected` and `attached` false."""

    token: int
    connected: bool
    attached: bool
    iteration: int
    sections: dict[str, Any]
    last_sign_age_s: float | None
    detached: bool = False


@dataclass(frozen=True)
class Verdict:
    """What a monitor found.

    `limit` is `initial`, `subsequent`, `section:NAME`, `out_of_section`, `connect`, `reconnect`, `teardown` or `stall`;
    only `stall` does not condemn the rank. `line` is the well-known one-line form that people grep.
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


# Launcher to template, template to launcher.


@dataclass(frozen=True)
class ForkMonitor:
    """Fork one monitor; carries two descriptors: the listening socket and the monitor's end of its agent channel."""

    local_rank: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Forked:
    """The monitor runs; carries its pidfd."""

    pid: int


@dataclass(frozen=True)
class MonitorChanged:
    """A monitor `ended`, `stopped` or `continued`; `status`: its exit code, or minus the signal that did it."""

    pid: int
    change: str
    status: int


Message: TypeAlias = (
    Heartbeat
    | Sections
    | IterationReached
    | Progress
    | Hello
    | Attach
    | LimitsSet
    | Detach
    | RankException
    | ControlRequest
    | Welcome
    | Refused
    | CycleStart
    | CycleEnd
    | SnapshotRequest
    | Bye
    | Ready
    | Connected
    | Snapshot
    | Verdict
    | ForkMonitor
    | Forked
    | MonitorChanged
)
