"""Messages between a rank and its monitor, and the base class of all messages: each is a frozen dataclass.

Knows no bytes (`codec.py`), no socket and no clock. All moments are nanoseconds of the sender's CLOCK_MONOTONIC, which
is one clock for a whole machine.

**A connection** begins with `Hello`. The rank then sends what it has to report, and gets four messages at most:
`Welcome` in answer to one that asks for the settings, `Refused` to one that cannot be used, `InterruptAsked` when its
wrapper is to restart, and `StacksAsked` when it is to write its stacks. Nothing is acknowledged: after a loss or a
reconnection the rank sends its whole state again, so each message must say what is so, not what has changed.

**To the launcher** the monitor passes on, unchanged, the messages of `FROM_RANK_TO_LAUNCHER`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from rank_monitor.contract.memory_files import StateTier
from rank_monitor.contract.restart_phase import RestartPhase

NO_ITERATION = -1
"""In the place of an iteration that is not known: iterations are numbered from 0."""


class Message:
    """Base class of all messages. Each subclass has its number on the wire, `kind`, which is never given to another.

    - below 16: records that `codec.py` packs
    - from 16 and from 96: client to monitor
    - from 32: monitor to client
    - from 48: agent to monitor
    - from 64: monitor to agent
    - from 80: launcher and template

    22 and 24 were the numbers of messages that are gone.
    """

    kind: ClassVar[int]

    def __init_subclass__(cls, kind: int) -> None:
        cls.kind = kind
        KINDS[kind] = cls


KINDS: dict[int, type[Message]] = {}
"""Number -> class, of all modules with messages that were imported."""
FROM_RANK = frozenset({*range(32), *range(96, 112)})
"""Numbers of the messages that a rank may send: the packed records, and those from client to monitor."""


# Client to monitor, small and often.


@dataclass(frozen=True)
class Heartbeat(Message, kind=1):
    """A sign of life of the training. Most frequent of all messages: 16 bytes, no body."""


@dataclass(frozen=True)
class Sections(Message, kind=2):
    """The whole set of open sections, each with the moment of its opening. A sign of life too. Sent when a section is
    opened or closed, so it also says that all other sections are closed."""

    open: tuple[tuple[str, int], ...]
    iteration: int = NO_ITERATION


@dataclass(frozen=True)
class IterationReached(Message, kind=3):
    """The training reports its iteration. Postpones the limit of heartbeats as a heartbeat does."""

    iteration: int


FIRST_PERIOD_S = 5.0
"""Seconds from one `Progress` to the next while the rank does not know the monitor's settings."""


@dataclass(frozen=True)
class Progress(Message, kind=4):
    """The main thread last executed bytecode at `stamp_ns`. Sent by the watchdog's thread, so it is not a sign of life
    of the training, only of the process. The same stamp again says that the main thread stands still."""

    stamp_ns: int


# Client to monitor.


@dataclass(frozen=True)
class RestartReport(Message, kind=98):
    """A rank's report of its phase and its limits in an in-process restart. Sent at every change of phase, and again
    after a reconnection, each time with the moment at which the phase began.

    Monitor and agent keep the last report alone, and read it by the tables of `contract/restart_phase.py`.

    Attributes:
        phase: where the rank is.
        round: the round that the rank is in, or on its way to.
        began_ns: when the present call of the function began, or a phase without one. What the rank opened or reported
            before belongs to an earlier call.
        is_timed: progress of the function is expected, as long as it runs.
        soft_timeout_s: without progress for so long the rank is asked to restart.
        hard_timeout_s: without an end of a callback, or of the function after that request, the rank is killed.
        grace_s: from SIGTERM to SIGKILL.
        entry_rank: the rank's number at entry of the call, which it keeps for the whole call.
        call_prefix: of the keys of the call in the cycle's store; empty where the call uses another store.
        limit_s: the longest time from a fault to the next start.
        reason: why the rank gives up; empty in other phases.
    """

    phase: RestartPhase
    round: int
    began_ns: int
    is_timed: bool
    soft_timeout_s: float
    hard_timeout_s: float
    grace_s: float
    entry_rank: int
    call_prefix: str
    limit_s: float
    reason: str = ""


@dataclass(frozen=True)
class Hello(Message, kind=16):
    """First message of a connection.

    Attributes:
        pid: of the sender. The monitor goes by the credentials that the kernel reports.
        attached: the training is watched already: the client reconnected, or the monitor was replaced.
        last_sign_ns: the last sign of life, where the training is watched.
        got_first_sign: whether there was a sign of life since the watch began.
        num_warmup_iterations: as in `Attach`.
        restart: the last report of an in-process wrapper, which follows again as a message with its moment; None: there
            was none.
    """

    pid: int
    attached: bool = False
    last_sign_ns: int = 0
    got_first_sign: bool = False
    num_warmup_iterations: int | None = None
    restart: RestartReport | None = None


@dataclass(frozen=True)
class Attach(Message, kind=17):
    """`init_workload_monitoring()`: judge from now on. Answered by `Welcome`. `num_warmup_iterations`: first steps that
    no learned limit judges; None: as configured."""

    num_warmup_iterations: int | None = None


@dataclass(frozen=True)
class LimitsSet(Message, kind=18):
    """Limits in force from now on, in seconds (None: no limit). Sent when limits were learned or loaded.

    `learned` names the limits that were learned: `initial`, `subsequent`, `out_of_section` or `section:NAME`. `state`
    is the client's `state_dict`, for the journal.
    """

    initial: float | None
    subsequent: float | None
    sections: dict[str, Any]
    out_of_section: float | None
    learned: list[str] = dataclasses.field(default_factory=list)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Detach(Message, kind=19):
    """`shutdown_workload_monitoring()`: judge nothing any more, except that the rank exits (`teardown_timeout`)."""


@dataclass(frozen=True)
class RankException(Message, kind=20):
    """An uncaught exception ends the rank. By it the launcher finds who failed first, and why.

    `before_group`: the rank has certainly made no process group before the exception, so it cannot have lost a peer.
    """

    type: str
    message: str
    traceback: str
    wall_time: float
    before_group: bool = False


@dataclass(frozen=True)
class ProgramFailed(Message, kind=96):
    """The rank's program has ended with an error, and its threads and exit functions are about to end. The launcher
    limits these from now on.

    Sent before the text of the exception is made: that is the program's own code, and may never return. `type`: of the
    exception; empty: none is known.
    """

    type: str
    traceback: str
    exit_code: int
    wall_time: float


@dataclass(frozen=True)
class LastOutput(Message, kind=29):
    """The rank exits with an error and without an uncaught exception: it may have printed its error itself. `text`: the
    end of its standard error; `before_group` as in `RankException`."""

    text: str
    before_group: bool = False


@dataclass(frozen=True)
class Returned(Message, kind=31):
    """The rank's program has returned, its threads and exit functions too. Its connections to other ranks end now: an
    error of another rank about a lost peer may be a consequence, although this rank's process has not ended yet."""


@dataclass(frozen=True)
class ControlRequest(Message, kind=21):
    """A request of the training to the launcher. `action`: `exclude_this_node`, `stop_job` or `restart`; `description`:
    the reason, for log and journal."""

    action: str
    description: str


@dataclass(frozen=True)
class ModulesImported(Message, kind=97):
    """The modules of installed packages that the rank has imported after torch, in the order in which their imports
    ended, and the variables of the environment that have changed since its start, with their values (None: removed).
    Sent once, by the one rank of a node that was asked for it at its start. The launcher may import them before it
    forks the ranks of the next cycle."""

    names: list[str]
    changed: dict[str, Any]


@dataclass(frozen=True)
class Ping(Message, kind=23):
    """The wrapped function has called `ping()`: it reports progress by itself. The first one in a round makes further
    ones expected."""


@dataclass(frozen=True)
class InterruptedAgain(Message, kind=28):
    """An in-process wrapper interrupted its function again, although that may cut off a cleanup: the function had not
    ended `waited_s` seconds after the interruption was due. `iteration`: the round (NVIDIA's word). `why`: what held
    the interruption back. `stack`: of the main thread. The names are those of the journal's event."""

    iteration: int
    waited_s: float
    why: str
    stack: str


@dataclass(frozen=True)
class GroupMade(Message, kind=27):
    """The training made its default process group. `backends`: as torch has them, `cpu:gloo,cuda:nccl` for example.
    The launcher takes it for the beginning of the training: it warns if nobody asks to be watched within a while, and
    says once how long NCCL itself waits in a hang."""

    backends: str


@dataclass(frozen=True)
class LogTo(Message, kind=30):
    """The file to which the monitor is also to write its log of this rank. An in-process wrapper asks for it
    (`monitor_process_logfile`); the path is a rank's word."""

    path: str


@dataclass(frozen=True)
class SectionTimes(Message, kind=25):
    """The timings of straggler detection in this rank since its last report.

    `sections`: by name, the median `med_ms`, the number `num`, and the scores `relative` (to other ranks) and
    `individual` (to this rank's own past). `gpu`: these two scores for the kernels. A score is in (0, 1]; None: there
    is none.
    """

    sections: dict[str, Any]
    gpu: dict[str, Any]


@dataclass(frozen=True)
class ResultInDoubt(Message, kind=26):
    """A step of this rank gave an unexpected result, possibly because of its device; the job is about to end for it.

    `finding`: `reproducible` (another device has to compute the step), `same_device` (the process that was to compute
    the step again ran on the same device), or `persistent_error` (another device computed something else). `rank` had
    the result, on `device` of `node`.
    """

    finding: str
    rank: int
    iteration: int
    node: str
    device: str


MAX_REFUSED = 16
"""Entries of `StateLoaded.refused`. A node keeps two or three generations."""
MAX_REASON = 300
"""Characters of a reason: with 16 of them a message has 30 KB at most, as JSON."""


@dataclass(frozen=True)
class StateRefused:
    """Why a generation in memory was not used.

    `step` names the generation. `rank` could not use it, for a reason of its own; -1: the reason holds for all ranks.
    """

    step: int
    rank: int
    reason: str


@dataclass(frozen=True)
class StateLoaded(Message, kind=99):
    """What a look for state in memory came to: `MemoryCheckpoint.load()` or `latest_memory_folder()`. It is a decision
    of all ranks, and each of them sends the same message. Saves send none: the launcher reads these off the names of
    the files, and off `processes/rank_progress.py`.

    Attributes:
        load: tells this look from others: the series of the saves that follow, or digits of its own.
        tier: where the training goes on from.
        step: how many steps the loaded state has; 0: none was loaded.
        series: of the loaded generation, which step and series name; empty: none was loaded.
        newer_than: the step of the checkpoint on disk, as the program says; 0: it named none.
        reached: the last step that a rank of the job had reported before; 0: none had.
        refused: generations that were not used, the newest first, at most `MAX_REFUSED`.
        world: how many ranks the job has; 0: the look does not say it.
        saved_world: how many the job had that saved the loaded state; 0: none was loaded, or the look does not say it.
    """

    load: str
    tier: StateTier
    step: int
    series: str
    newer_than: int
    reached: int
    refused: list[StateRefused] = dataclasses.field(default_factory=list)
    world: int = 0
    saved_world: int = 0


FROM_RANK_TO_LAUNCHER = (
    ProgramFailed,
    RankException,
    LastOutput,
    Returned,
    ControlRequest,
    LimitsSet,
    GroupMade,
    ModulesImported,
    InterruptedAgain,
    RestartReport,
    SectionTimes,
    ResultInDoubt,
    StateLoaded,
)
"""Messages of a rank that its monitor passes on to the launcher unchanged."""


# Monitor to client.


@dataclass(frozen=True)
class InterruptAsked(Message, kind=34):
    """Asks the in-process wrapper to restart the training, which makes no progress. `limit`: the limit that was
    exceeded, as in `Verdict`; `reason`: the text of the verdict."""

    limit: str
    reason: str


@dataclass(frozen=True)
class Welcome(Message, kind=32):
    """The answer to `Attach`, and to the report that a wrapped function begins: the settings in force, as JSON of
    `MonitorSettings`, and the cycle."""

    settings: dict[str, Any]
    cycle: int


END_OF_STACKS = "End of stacks.\n"
"""The line with which a rank ends a dump of its stacks: by it the monitor knows that the dump is complete."""


@dataclass(frozen=True)
class StacksAsked(Message, kind=35):
    """Asks the rank to append the stacks of all its threads to its stack file, in the format of faulthandler and with
    `END_OF_STACKS` as the last line. The file is the answer: no message follows."""


@dataclass(frozen=True)
class Refused(Message, kind=33):
    """The reason why a message or a connection was refused. The connection is closed where it is not the rank's."""

    reason: str
