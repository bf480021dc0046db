"""Messages between the launcher and a monitor, and between the launcher and the template: one frozen dataclass each.

Knows no bytes (`codec.py`), no socket and no clock. A rank's messages, which its monitor passes on, are in
`messages.py`.

A monitor's channel begins with `Ready`. For each cycle the agent sends `CycleStart`, during the cycle what it has found
itself and what it wants to know, and `StopJudging` before it ends the ranks. `Bye` ends the monitor. The monitor sends
its verdicts and what the rank does without being asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rank_monitor.contract.wire.messages import Message

STALL = "stall"
"""The name of the limit that only warns. A `Verdict` of any other limit that does not condemn says that the rank was
asked to restart in process."""
HANG = "hang"
"""The name of the limit of a hang that the launcher has found (`HangOverdue`)."""
NOTHING_LEFT = b"!"
"""The launcher's goodbye to the sweeper, which then ends. Any other goodbye is the path of a folder that the sweeper
removes."""
MAX_GOODBYE = 4096
"""Bytes: no path is longer (PATH_MAX)."""

# Agent to monitor.


@dataclass(frozen=True)
class CycleStart(Message, kind=48):
    """A rank was started. The monitor begins a cycle with fresh facts.

    Where the monitor replaces a lost one, the agent adds what that one knew; it may also send the last `LimitsSet` and
    `RestartReport` of the rank itself.

    Attributes:
        cycle: number of the cycle.
        rank: global rank.
        rank_pid: the process that was started; the training may run in a child of it.
        started_ns: a moment before the start. A hello sent earlier belongs to another cycle.
        stack_file: the file to which the rank appends its stacks.
        reconnect: the monitor replaces a lost one of a rank that runs already.
        attached: that rank is watched.
        limits: the fields of that rank's last `LimitsSet`; None: it sent none.
        times: the last time ledger that the lost monitor sent; None: none.
        recorder_socket: where torch's worker server of the rank listens; empty: nowhere.
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
    """Asks for a `Snapshot` that carries the same `token`.

    With `stacks`, also for the frames of the main thread: the rank is asked to write its stacks to its file. With
    `stacks` or `collectives`, also for `groups`. Either takes up to half a second.

    `before_stop`: the rank is stopped after that, whatever it does. A rank that does not answer then gets the signal
    for its stacks in any case (`rank_monitor/stack_signal.py`).
    """

    token: int
    stacks: bool = False
    collectives: bool = False
    before_stop: bool = False


@dataclass(frozen=True)
class TimesRequest(Message, kind=52):
    """Asks for `Times` while the cycle runs."""


@dataclass(frozen=True)
class LogStep(Message, kind=53):
    """What the rank printed of its steps, as the launcher has read it (`--ft-watch-log`).

    Attributes:
        iteration: the last one printed; NO_ITERATION where the lines name none.
        steps: how many steps were done since the message before; 0: not known.
        step_ns: how long a step takes, as printed; 0: not printed.
        at_ns: when the line was read.
    """

    iteration: int
    steps: int
    step_ns: int
    at_ns: int


@dataclass(frozen=True)
class LogOverdue(Message, kind=54):
    """The rank has printed no step since `since_ns`, for longer than `watch_log_timeout`. The next `LogStep` ends that.

    The launcher finds this, and not the monitor: the launcher reads the output. While the launcher stands still, or has
    not read yet, no rank may be judged by what it printed.
    """

    since_ns: int


@dataclass(frozen=True)
class HangOverdue(Message, kind=55):
    """The rank is to be ended for a hang.

    The launcher finds this, and not the monitor: who waits for whom only the monitors of all ranks know together.

    Attributes:
        limit_s: the limit in force: `hang_timeout`, or a longer one where the ranks are given more time.
        waited_s: how long the hang has lasted, without pauses.
        reason: who waits for whom, or what stands still, in words for the verdict.
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
    """A rank's client connected, or its watch began or ended. `pid`: the process that is the rank now; `attached`: the
    rank is judged now."""

    pid: int
    attached: bool


@dataclass(frozen=True)
class Snapshot(Message, kind=66):
    """The state of a rank, in answer to a `SnapshotRequest`. What the rank sent before was forwarded before.

    After the rank's exit this is its last state, with `connected` and `attached` false. All ages are seconds.

    Attributes:
        token: of the request.
        connected, attached, detached: whether the rank's client is connected, is watched, and has ended its watch.
        iteration: the last iteration of the training that is known; -1: none.
        sections: the open sections, by name with their age.
        last_sign_age_s: since the last sign of life; None: there was none.
        frames: of the main thread, innermost first, if stacks were asked for and the process lives. Those of libraries
            have a slash in their path, the program's own have none.
        process: the state of the process in /proc (`rank_process.py: facts`), together with `frames`.
        groups: how far the rank is in each process group (`flight_recorder.py: groups_of`), also of a rank that has
            just ended.
        idle_s: since the last stamp or report, without pauses of the machine; None: not known.
        report_age_s: since the last report or printed step, without pauses of the machine; None: there was none.
        has_own_limit: a section with a limit of its own is open: that limit judges the rank, and not `hang_timeout`.
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

    It is no part of `Snapshot`: an old ledger is of use, while an old snapshot would be taken for where the rank is
    now. And a snapshot with stacks fills a message.
    """

    cycle: int
    pid: int
    times: dict[str, Any]


@dataclass(frozen=True)
class Verdict(Message, kind=67):
    """The finding of a monitor: a limit was exceeded. The field names are those of the journal's event.

    Attributes:
        cycle, rank, pid: which process of which cycle.
        limit: `initial`, `subsequent`, `section:NAME`, `out_of_section`, `connect`, `reconnect`, `teardown`, `log`,
            `hang`, `soft_timeout`, `hard_timeout` or `stall`.
        limit_s, waited_s: its length, and how long the rank had not done what was expected, in seconds.
        learned: whether the limit was learned from earlier steps.
        iteration, sections: the state of the training, as in `Snapshot`.
        reason: what was missed and by how much, for people.
        line: one line for the log, worded so that searches for NVIDIA's lines find it.
        frames, process: as in `Snapshot`.
        condemned: the rank is ended for it. False: a stall, or the rank was asked to restart in process.
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
    """A rank is about to exceed a limit. The agent now asks what can be asked only as long as all ranks run.

    `is_wrapped`: the rank is in an in-process wrapper. Once it is asked to restart, all ranks are interrupted, and no
    stack shows any more who waited for whom.
    """

    cycle: int
    rank: int
    is_wrapped: bool = False


@dataclass(frozen=True)
class StandsStill(Message, kind=71):
    """The rank has sent neither stamp nor report for a quarter of `hang_timeout`: the launcher is to find out whether
    that is a hang. Sent once, until the next stamp or report begins another standstill."""

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
    """Asks to fork one monitor. Passes descriptors: the listening socket, the monitor's end of its agent channel, and
    the node's lease where there is one, a timer that is readable once the ranks must not run any longer.

    `settings`: JSON of `MonitorSettings`.
    """

    local_rank: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Forked(Message, kind=81):
    """The answer to `ForkMonitor`: the monitor runs. Passes its pidfd."""

    pid: int


@dataclass(frozen=True)
class MonitorChanged(Message, kind=82):
    """The state of a monitor's process has changed. `change`: `ended`, `stopped` or `continued`; `status`: the exit
    code, or minus the number of the signal."""

    pid: int
    change: str
    status: int
