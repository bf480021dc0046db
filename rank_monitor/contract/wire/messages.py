"""Messages between a rank and its monitor, and the base class of all messages: each is a frozen dataclass.

Knows no bytes (`codec.py`), no socket and no clock. All moments are nanoseconds of the sender's CLOCK_MONOTONIC, which
is one clock for a whole machine. The monitor passes on to the launcher what is meant for it (`FROM_RANK_TO_LAUNCHER`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

# Iterations are numbered from 0.
NO_ITERATION = -1


class Message:
    """Base class of all messages. Each subclass has its number on the wire, `kind`, which is never given to another.

    Below 16: records that `codec.py` packs; from 16 and from 96: client to monitor, 32: monitor to client, 48: agent to
    monitor, 64: monitor to agent, 80: the template.
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
    """The rank is alive."""


@dataclass(frozen=True)
class Sections(Message, kind=2):
    """The whole set of open sections, each with the moment it was opened. A sign of life too."""

    open: tuple[tuple[str, int], ...]
    iteration: int = NO_ITERATION


@dataclass(frozen=True)
class IterationReached(Message, kind=3):
    """The training reports its iteration."""

    iteration: int


FIRST_PERIOD_S = 5.0
"""From one `Progress` to the next while the rank does not know the monitor's settings."""


@dataclass(frozen=True)
class Progress(Message, kind=4):
    """The main thread last executed bytecode at `stamp_ns`. Not a sign of life of the training, only of the process."""

    stamp_ns: int


# Client to monitor.


@dataclass(frozen=True)
class Hello(Message, kind=16):
    """First message of a connection. `attached`: the training is watched already (the client reconnected). `guarded`:
    an in-process wrapper is in force; its `Guard` follows."""

    pid: int
    attached: bool = False
    last_sign_ns: int = 0
    got_first_sign: bool = False
    num_warmup_iterations: int | None = None
    guarded: bool = False


@dataclass(frozen=True)
class Attach(Message, kind=17):
    """`init_workload_monitoring()`: judge from now on. Answered by `Welcome`."""

    num_warmup_iterations: int | None = None


@dataclass(frozen=True)
class LimitsSet(Message, kind=18):
    """Limits in force from now on, in seconds (None: no limit). `learned` names those that were learned, as
    `initial`, `subsequent`, `out_of_section` or `section:NAME`."""

    initial: float | None
    subsequent: float | None
    sections: dict[str, Any]
    out_of_section: float | None
    learned: list[str] = dataclasses.field(default_factory=list)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Detach(Message, kind=19):
    """`shutdown_workload_monitoring()`: stop judging."""


@dataclass(frozen=True)
class RankException(Message, kind=20):
    """An uncaught exception ends the rank. `before_group`: the rank has certainly made no process group until then."""

    type: str
    message: str
    traceback: str
    wall_time: float
    before_group: bool = False


@dataclass(frozen=True)
class ProgramFailed(Message, kind=96):
    """The rank's program has ended with an error, and its threads and exit functions are about to end. Sent before the
    exception's text is made, which is the program's own code. `type`: of the exception; empty: none is known."""

    type: str
    traceback: str
    exit_code: int
    wall_time: float


@dataclass(frozen=True)
class LastOutput(Message, kind=29):
    """The rank exits with an error and without an uncaught exception. `text`: the end of its standard error;
    `before_group` as in `RankException`."""

    text: str
    before_group: bool = False


@dataclass(frozen=True)
class Returned(Message, kind=31):
    """The rank's program has returned, its threads and exit functions too: now its connections to other ranks end."""


@dataclass(frozen=True)
class ControlRequest(Message, kind=21):
    """A request of the training to the launcher: `exclude_this_node`, `stop_job` or `restart`."""

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


class _Text(str, Enum):
    """Base of enums that are sent as text: each member is equal to its text and has the same hash."""

    __hash__ = str.__hash__
    __str__ = str.__str__


class WrapperPhase(_Text):
    """The phase of an in-process wrapper, which decides what the monitor judges. Sent in `Guard`."""

    RUNNING = "running"
    """Its function runs: no progress of the main thread for `soft_timeout_s` interrupts it, for `hard_timeout_s` kills
    it."""
    UNGUARDED = "unguarded"
    """Its function runs, and only limits of heartbeats and sections apply."""
    FINALIZING = "finalizing"
    """A callback runs outside of the function, after an interruption for instance, and must end within
    `hard_timeout_s`, else the rank is killed."""
    RESTARTING = "restarting"
    """The wrapper restarts, with deadlines of its own: nothing is judged, and open sections are closed."""
    OVER = "over"
    """No call is under way."""


@dataclass(frozen=True)
class Guard(Message, kind=22):
    """The phase and the limits of an in-process wrapper from now on.

    `phase`: a value of `WrapperPhase`. `callback`: which one runs in the phase `finalizing`, for the verdict.
    """

    phase: str
    soft_timeout_s: float
    hard_timeout_s: float
    grace_s: float
    callback: str = ""


@dataclass(frozen=True)
class Ping(Message, kind=23):
    """The training reports progress by itself; the first one of an iteration makes the next ones expected."""


@dataclass(frozen=True)
class InterruptedAgain(Message, kind=28):
    """An in-process wrapper interrupted its function again, although that may cut off a cleanup: the function had not
    ended `waited_s` seconds after the interruption was due. `why`: what held it back; `stack`: of the main thread."""

    iteration: int
    waited_s: float
    why: str
    stack: str


@dataclass(frozen=True)
class GroupMade(Message, kind=27):
    """The training made its default process group; `backends` as torch has them, `cpu:gloo,cuda:nccl` for example."""

    backends: str


class WrapperState(_Text):
    """The state of a rank's in-process restart. Sent to the launcher in `Restarter`."""

    JOINING = "joining"
    """It was started again, and the others have not let it in yet."""
    INITIALIZED = "initialized"
    HANDLING_STARTING = "handling_starting"
    """A fault is being dealt with."""
    HANDLING_COMPLETED = "handling_completed"
    FINALIZED = "finalized"
    """The function is done on all ranks."""
    LEFT = "left"
    """This rank leaves and has reported that to the others."""
    ABORTED = "aborted"
    """This rank gives up."""


@dataclass(frozen=True)
class Restarter(Message, kind=24):
    """The state of a rank's in-process restart.

    `state`: a value of `WrapperState`. `member`: its rank at entry. `prefix`: of its keys in the cycle's store, empty
    when it uses another store. `limit_s`: the longest time from `handling_starting` to `handling_completed`. `reason`:
    why it gives up.
    """

    state: str
    member: int
    iteration: int
    prefix: str
    limit_s: float
    reason: str = ""


@dataclass(frozen=True)
class LogTo(Message, kind=30):
    """The file to which the monitor also writes its log of this rank; an in-process wrapper asks for it."""

    path: str


@dataclass(frozen=True)
class SectionTimes(Message, kind=25):
    """The timings of straggler detection in this rank since its last report.

    `sections`: by name `med_ms`, `num`, and the scores `relative` and `individual`; `gpu`: these two for the kernels.
    A score is in (0, 1], or None where there is none.
    """

    sections: dict[str, Any]
    gpu: dict[str, Any]


@dataclass(frozen=True)
class ResultInDoubt(Message, kind=26):
    """A step of this rank gave an unexpected result, possibly because of its device; the job is about to end for it.

    `finding`: `reproducible` (another device has to compute the step), `same_device` (the next one was the same), or
    `persistent_error` (another device computed something else). `rank` had it, on `device` of `node`.
    """

    finding: str
    rank: int
    iteration: int
    node: str
    device: str


FROM_RANK_TO_LAUNCHER = (
    ProgramFailed,
    RankException,
    LastOutput,
    Returned,
    ControlRequest,
    LimitsSet,
    Guard,
    GroupMade,
    ModulesImported,
    InterruptedAgain,
    Restarter,
    SectionTimes,
    ResultInDoubt,
)
"""Messages of a rank that its monitor passes on to the launcher unchanged."""


# Monitor to client.


@dataclass(frozen=True)
class InterruptAsked(Message, kind=34):
    """Asks the in-process wrapper to restart the training, which makes no progress. `limit`: as in `Verdict`."""

    limit: str
    reason: str


@dataclass(frozen=True)
class Welcome(Message, kind=32):
    """The settings in force, as JSON of `MonitorSettings`, and the cycle."""

    settings: dict[str, Any]
    cycle: int


@dataclass(frozen=True)
class Refused(Message, kind=33):
    """The reason why a message or a connection was refused."""

    reason: str
