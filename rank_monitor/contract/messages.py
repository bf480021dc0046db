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
    """First message of a connection. `attached`: the training is watched already (the client came back). `guarded`:
    by an in-process wrapper, which says more next."""

    pid: int
    attached: bool = False
    last_sign_ns: int = 0
    got_first_sign: bool = False
    num_warmup_iterations: int | None = None
    guarded: bool = False


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


@dataclass(frozen=True)
class Guard:
    """An in-process wrapper guards the training from now on.

    `phase`: `running` (its function runs: no progress of the main thread for `soft_timeout_s` interrupts it, for
    `hard_timeout_s` kills it), `unguarded` (it runs, and only limits of heartbeats and sections apply), `restarting`
    (the wrapper is at work and waits with deadlines of its own: nothing is judged; what was open is closed), or `over`.
    """

    phase: str
    soft_timeout_s: float
    hard_timeout_s: float
    grace_s: float


@dataclass(frozen=True)
class Ping:
    """The training reports progress by itself; the first one of an iteration makes the next ones expected."""


@dataclass(frozen=True)
class Restarter:
    """What the in-process wrapper of a rank is doing.

    `state`: `joining` (respawned, and not let in yet), `initialized`, `handling_starting` (a fault is dealt with),
    `handling_completed`, `finalized` (the function is done on all ranks), `left` (this rank leaves and has told the
    others), `aborted` (this rank gives up). `member`: its rank at entry. `prefix`: of its keys in the cycle's store,
    empty when it uses another. `limit_s`: from `handling_starting` to `handling_completed` at most.
    """

    state: str
    member: int
    iteration: int
    prefix: str
    limit_s: float


@dataclass(frozen=True)
class SectionTimes:
    """What straggler detection timed in this rank since its last report.

    `sections`: by name `med_ms`, `num`, and the scores `relative` and `individual`; `gpu`: these two for the kernels.
    A score is in (0, 1], or None where there is none.
    """

    sections: dict[str, Any]
    gpu: dict[str, Any]


@dataclass(frozen=True)
class ResultInDoubt:
    """A step of this rank gave an unexpected result, and its device may be why: the job is about to end for it.

    `finding`: `reproducible` (another device has to compute the step), `same_device` (the next one was the same), or
    `persistent_error` (another device computed something else). `rank` had it, on `device` of `node`.
    """

    finding: str
    rank: int
    iteration: int
    node: str
    device: str


# Monitor to client.


@dataclass(frozen=True)
class InterruptAsked:
    """The training shows no progress: the in-process wrapper is to restart it. `limit`: as in `Verdict`."""

    limit: str
    reason: str


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
    | Guard
    | Ping
    | Restarter
    | InterruptAsked
    | SectionTimes
    | ResultInDoubt
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
