"""What a rank and its monitor tell each other, and what every message that crosses a process is: a frozen dataclass.

Knows no bytes (`codec.py`), no socket and no clock. All moments are nanoseconds of the sender's CLOCK_MONOTONIC, which
is one clock for a whole machine. What concerns the launcher the monitor hands on as it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

NO_ITERATION = -1


class Message:
    """Any message. Each class of one has its kind in `codec.py`."""


# Client to monitor, small and often.


@dataclass(frozen=True)
class Heartbeat(Message):
    """The rank is alive."""


@dataclass(frozen=True)
class Sections(Message):
    """The whole set of open sections, each with the moment it was opened. A sign of life too."""

    open: tuple[tuple[str, int], ...]
    iteration: int = NO_ITERATION


@dataclass(frozen=True)
class IterationReached(Message):
    """The training reports its iteration."""

    iteration: int


FIRST_PERIOD_S = 5.0
"""From one `Progress` to the next while the rank does not know the monitor's settings."""


@dataclass(frozen=True)
class Progress(Message):
    """The main thread last executed bytecode at `stamp_ns`. Not a sign of life of the training, only of the process."""

    stamp_ns: int


# Client to monitor.


@dataclass(frozen=True)
class Hello(Message):
    """First message of a connection. `attached`: the training is watched already (the client came back). `guarded`:
    by an in-process wrapper, which says more next."""

    pid: int
    attached: bool = False
    last_sign_ns: int = 0
    got_first_sign: bool = False
    num_warmup_iterations: int | None = None
    guarded: bool = False


@dataclass(frozen=True)
class Attach(Message):
    """`init_workload_monitoring()`: judge from now on. Answered by `Welcome`."""

    num_warmup_iterations: int | None = None


@dataclass(frozen=True)
class LimitsSet(Message):
    """Limits in force from now on, in seconds (None: no limit). `learned` names those that were learned, as
    `initial`, `subsequent`, `out_of_section` or `section:NAME`."""

    initial: float | None
    subsequent: float | None
    sections: dict[str, Any]
    out_of_section: float | None
    learned: list[str] = dataclasses.field(default_factory=list)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Detach(Message):
    """`shutdown_workload_monitoring()`: stop judging."""


@dataclass(frozen=True)
class RankException(Message):
    """An uncaught exception ends the rank."""

    type: str
    message: str
    traceback: str
    wall_time: float


@dataclass(frozen=True)
class LastOutput(Message):
    """The rank exits with an error of which it knows no exception: the end of what it printed to its stderr."""

    text: str


@dataclass(frozen=True)
class ControlRequest(Message):
    """What the training asks of the launcher: `exclude_this_node`, `stop_job` or `restart`."""

    action: str
    description: str


@dataclass(frozen=True)
class Guard(Message):
    """An in-process wrapper guards the training from now on.

    `phase`: `running` (its function runs: no progress of the main thread for `soft_timeout_s` interrupts it, for
    `hard_timeout_s` kills it), `unguarded` (it runs, and only limits of heartbeats and sections apply), `finalizing`
    (it was interrupted, and what is called then must end within `hard_timeout_s`, else the rank is killed),
    `restarting` (the wrapper is at work and waits with deadlines of its own: nothing is judged; what was open is
    closed), or `over`.
    """

    phase: str
    soft_timeout_s: float
    hard_timeout_s: float
    grace_s: float


@dataclass(frozen=True)
class Ping(Message):
    """The training reports progress by itself; the first one of an iteration makes the next ones expected."""


@dataclass(frozen=True)
class InterruptedAgain(Message):
    """An in-process wrapper interrupted its function again, although that may cut off a cleanup: it has not ended,
    `waited_s` after it was interrupted, or was to be. `why`: what held that back; `stack`: of the main thread."""

    iteration: int
    waited_s: float
    why: str
    stack: str


@dataclass(frozen=True)
class GroupMade(Message):
    """The training made its default process group; `backends` as torch has them, `cpu:gloo,cuda:nccl` for example."""

    backends: str


@dataclass(frozen=True)
class Restarter(Message):
    """What the in-process wrapper of a rank is doing.

    `state`: `joining` (respawned, and not let in yet), `initialized`, `handling_starting` (a fault is dealt with),
    `handling_completed`, `finalized` (the function is done on all ranks), `left` (this rank leaves and has told the
    others), `aborted` (this rank gives up). `member`: its rank at entry. `prefix`: of its keys in the cycle's store,
    empty when it uses another. `limit_s`: from `handling_starting` to `handling_completed` at most. `reason`: why it
    gives up.
    """

    state: str
    member: int
    iteration: int
    prefix: str
    limit_s: float
    reason: str = ""


@dataclass(frozen=True)
class LogTo(Message):
    """The file in which an in-process wrapper wants what the monitor sees of this rank."""

    path: str


@dataclass(frozen=True)
class SectionTimes(Message):
    """What straggler detection timed in this rank since its last report.

    `sections`: by name `med_ms`, `num`, and the scores `relative` and `individual`; `gpu`: these two for the kernels.
    A score is in (0, 1], or None where there is none.
    """

    sections: dict[str, Any]
    gpu: dict[str, Any]


@dataclass(frozen=True)
class ResultInDoubt(Message):
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
class InterruptAsked(Message):
    """The training shows no progress: the in-process wrapper is to restart it. `limit`: as in `Verdict`."""

    limit: str
    reason: str


@dataclass(frozen=True)
class Welcome(Message):
    """The settings in force, as JSON of `MonitorSettings`, and the cycle."""

    settings: dict[str, Any]
    cycle: int


@dataclass(frozen=True)
class Refused(Message):
    """An error record: why a message or a connection was not taken."""

    reason: str
