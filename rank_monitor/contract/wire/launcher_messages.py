"""Messages between the launcher and a monitor, and between the launcher and the template: one frozen dataclass each.

Knows no bytes (`codec.py`), no socket and no clock. A rank's messages, which its monitor passes on, are in
`messages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rank_monitor.contract.wire.messages import Message

STALL = "stall"
"""The limit that only warns. A `Verdict` of another limit that does not condemn asks for a restart in process."""
HANG = "hang"
"""The limit of a hang that the launcher has found (`HangOverdue`)."""

# Agent to monitor.


@dataclass(frozen=True)
class CycleStart(Message, kind=48):
    """A rank was started; `started_ns` precedes its start, and a hello sent earlier belongs to another cycle.

    `reconnect`: the monitor replaces a lost one of a rank that runs already. `attached`: that rank is watched.
    `recorder_socket`: where torch's worker server of the rank listens; empty: nowhere.
    `limits`: the fields of the last `LimitsSet`. The agent may also send that message itself, and the last
    `RestartReport`. `times`: the last time ledger that the lost monitor sent.
    """

    cycle: int
    rank: int
    rank_pid: int
    started_ns: int
    stack_file: str
    reconnect: bool = False
    attached: bool = False
    limits: dict[str, Any] | None = None
    times: dict[str, Any] | None = None
    recorder_socket: str = ""


@dataclass(frozen=True)
class StopJudging(Message, kind=49):
    """The launcher stops the ranks: nothing is judged until the next `CycleStart`. Answered by `Times`."""


@dataclass(frozen=True)
class SnapshotRequest(Message, kind=50):
    """Asks for a `Snapshot`; with `stacks`, for one with frames: the rank writes its stacks to its file. With `stacks`
    or `collectives`, for one with `groups`."""

    token: int
    stacks: bool = False
    collectives: bool = False


@dataclass(frozen=True)
class TimesRequest(Message, kind=52):
    """Asks for `Times`."""


@dataclass(frozen=True)
class LogStep(Message, kind=53):
    """What the rank printed of its steps, as the launcher has read it.

    `iteration`: the last one, or NO_ITERATION where its lines name none. `steps`: how many were done since the message
    before; 0: unknown. `step_ns`: how long one takes, as printed; 0: not printed. `at_ns`: when the line was read.
    """

    iteration: int
    steps: int
    step_ns: int
    at_ns: int


@dataclass(frozen=True)
class LogOverdue(Message, kind=54):
    """The rank has printed no step since `since_ns`, for longer than `watch_log_timeout`; the next `LogStep` ends it.

    The launcher finds this, and not the monitor: while it stands still, or has not read yet, no rank is judged.
    """

    since_ns: int


@dataclass(frozen=True)
class HangOverdue(Message, kind=55):
    """The rank is to be ended for a hang, which has lasted `waited_s`: longer than `hang_timeout`, or than `limit_s`
    where that is longer. `why`: who waits for whom, or what stands still, in words.

    The launcher finds this, and not the monitor: who waits for whom only the monitors of all ranks know together.
    """

    limit_s: float
    waited_s: float
    reason: str


@dataclass(frozen=True)
class Bye(Message, kind=51):
    """An orderly end. A channel that closes without it means that the launcher was killed."""


# Monitor to agent.


@dataclass(frozen=True)
class Ready(Message, kind=64):
    """The monitor runs and listens on its sockets."""

    pid: int


@dataclass(frozen=True)
class Connected(Message, kind=65):
    """A rank's client connected, or its watch began or ended. `attached`: the rank is judged now."""

    pid: int
    attached: bool


@dataclass(frozen=True)
class Snapshot(Message, kind=66):
    """The state of a rank, in answer to the request with this `token`. Ages are seconds; `sections` maps name to age.

    What the rank sent before was forwarded before. After its exit it is the last state, with `connected` and `attached`
    false. When stacks were asked for and the process lives, `frames` are those of the main thread, innermost first (a
    library's have a slash in their path, the program's own have none), and `process` is its state in /proc. `groups`:
    how far it is in each process group (`rank_monitor/flight_recorder.py: groups_of`), also of one that has just ended.
    Without pauses of the machine: `idle_s` since its last stamp or report (None: not known), `report_age_s` since its
    last report or printed step (None: none). `has_own_limit`: a section with a limit of its own is open.
    """

    token: int
    connected: bool
    attached: bool
    iteration: int
    sections: dict[str, Any]
    last_sign_age_s: float | None
    detached: bool = False
    frames: list[str] = field(default_factory=list)
    process: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    idle_s: float | None = None
    report_age_s: float | None = None
    has_own_limit: bool = False


@dataclass(frozen=True)
class Times(Message, kind=69):
    """The time ledger of a rank, as `rank_times.py` has it: on request, at the end of its cycle and when it has ended.

    Apart from `Snapshot`: an old one would be taken for where the rank is, and with stacks one fills a message.
    """

    cycle: int
    pid: int
    times: dict[str, Any]


@dataclass(frozen=True)
class Verdict(Message, kind=67):
    """The finding of a monitor: a limit was exceeded.

    `limit` is `initial`, `subsequent`, `section:NAME`, `out_of_section`, `connect`, `reconnect`, `teardown`, `log`,
    `hang`, `soft_timeout`, `hard_timeout` or `stall`. Not `condemned`: a stall, or what an in-process wrapper was asked
    to restart for. `line` is one line for the log, worded so that searches for NVIDIA's lines find it.
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
class Suspected(Message, kind=70):
    """A rank is about to exceed a limit: what can be asked of ranks only as long as all run is to be asked now.

    `is_wrapped`: it is in an in-process wrapper. Once it is asked to restart, all ranks are interrupted, and no stack
    says any more who waited for whom.
    """

    cycle: int
    rank: int
    is_wrapped: bool = False


@dataclass(frozen=True)
class StandsStill(Message, kind=71):
    """The rank has sent neither stamp nor report for a quarter of `hang_timeout`: the launcher is to look whether that
    is a hang. Told once, until the next stamp or report."""

    cycle: int
    rank: int


@dataclass(frozen=True)
class Fenced(Message, kind=68):
    """The node's lease has run out, and the monitor ends its rank: other nodes may have gone on without this one."""

    cycle: int
    rank: int


# Launcher to template, template to launcher.


@dataclass(frozen=True)
class ForkMonitor(Message, kind=80):
    """Asks to fork one monitor. Passes the listening socket, the monitor's end of its agent channel, and the node's
    lease where it has one: a timer that is readable once the ranks must not run any longer."""

    local_rank: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Forked(Message, kind=81):
    """The monitor runs. Passes its pidfd."""

    pid: int


@dataclass(frozen=True)
class MonitorChanged(Message, kind=82):
    """A monitor `ended`, `stopped` or `continued`; `status`: its exit code, or minus the signal that did it."""

    pid: int
    change: str
    status: int
