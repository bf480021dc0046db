"""Events of a cycle and of the end of its processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.record.events.event import ABSENT, Absent, Event, OfCycle


@dataclass(frozen=True)
class CycleStart(Event, name="cycle_start"):
    """The ranks of a cycle run on this node."""

    cycle: int
    """The number of the cycle, the same on all nodes; from 0."""
    node_rank: int
    """This node's rank among the nodes."""
    nodes: int
    """How many nodes take part."""
    master: str
    """Address and port of the ranks' store."""
    ranks: Sequence[Mapping[str, int]]
    """The ranks of this node, each with `rank`, `local_rank`, `pid`."""


@dataclass(frozen=True)
class SaveInterval(Event, name="save_interval"):
    """How often the ranks of the next cycle are to save (`--ft-save-interval auto`), as the node of rank 0 chose it."""

    cycle: int
    """The cycle that begins now."""
    interval_s: float
    """Seconds of training between two saves."""
    reason: str
    """Why, in words."""
    faults: int
    """How many faults the job had so far, as far as the journals say."""
    save_s: float | None
    """For how long the training waited for a save, in the mean (seconds); null: none was measured."""
    mtbf_s: float | None
    """The time of the job so far for each of its faults (seconds); null: it had none."""


@dataclass(frozen=True)
class CycleEnd(Event, name="cycle_end"):
    """The cycle is over on this node."""

    cycle: int
    """The cycle that ended."""
    how: str
    """`succeeded`, `failed`, `failed elsewhere` (on another node), `membership changed`, `asked for: ACTION` or
    `job over`."""
    why: str | Absent = ABSENT
    """What ended it, where neither a fault nor a request of this node did."""
    next: str | Absent = ABSENT
    """After `failed elsewhere`: the decision in words."""
    lived_s: float | Absent = ABSENT
    """After `failed`: for how many seconds its ranks ran."""
    iteration: int | Absent | None = ABSENT
    """After `failed`: the iteration that they reached; -1: none was reported, null: it is unknown."""


@dataclass(frozen=True)
class Fault(Event, name="fault"):
    """The cycle failed by a rank of this node. The decision follows in the next line."""

    cycle: int
    """The cycle that failed."""
    kind: str
    """How the rank failed: `exception`, `signal`, `exit` or `hang`."""
    rank: int
    """The rank that failed first."""
    local_rank: int
    """Its number on this node."""
    pid: int
    """Its process."""
    exit_code: int
    """Its exit code; minus the number of the signal that ended it."""
    what: str
    """What happened, in words."""
    where: str
    """Where the rank was in its training: its section and iteration."""
    hint: str
    """The likely cause; empty: none is known."""
    iteration: int
    """The iteration it had reported; -1: none."""
    limit: str
    """The limit that it exceeded; empty: none."""
    learned_limit: bool
    """Whether that limit was learned."""
    detail: Sequence[str]
    """Lines for the console: of the traceback, or the frames of a hang."""
    others: Sequence[str]
    """What the other ranks did, a line for each."""
    agreed_exit_code: int | None
    """The exit code that all ranks agreed on (16 or 17); null: none."""
    error: str
    """Type and place of an exception of the program: equal when the same line raises the same type."""
    error_text: str
    """A digest of the text of that exception: equal when the text is."""
    before_group: bool
    """Whether the rank certainly had made no process group when it raised that exception."""
    collateral: bool
    """Whether the failure is the consequence of another rank's."""
    fault_class: str
    """The class of the fault; docs/restart_policy.md lists them."""
    doubt: Mapping[str, Any] | None
    """The suspect result because of which all ranks agreed to exit, with the fields of `result_in_doubt`."""
    failed: Sequence[int]
    """All ranks of this node that failed by themselves."""
    finding: str
    """Of a hang in which ranks wait for others: `gone`, `behind`, `deadlock`, `mismatch`, `transport` or `unknown`
    (docs/hangs.md); `returned`: it lost a rank that had returned from the program; else empty."""
    blamed: Sequence[int]
    """The ranks that hold up the others then: several for a deadlock or a mismatch, none if it is not known."""
    waiting: int
    """How many ranks of this node waited then."""


@dataclass(frozen=True)
class Evidence(Event, name="evidence"):
    """What the fault of a cycle is found by, on this node; `ft_launcher replay` finds it again.

    Written before `fault` and `in_process_fault`, and at a hang also where no rank of this node failed.
    """

    cycle: int
    """The cycle."""
    of_rank: int | None
    """The rank that ended while the others went on in process; null: the cycle has ended, this is of all its ranks."""
    ranks: Sequence[Mapping[str, Any]]
    """Each with `rank`, `local_rank`, `pid`, and what is known of `exit_code`, `died_at`, `verdict`, `verdict_at`,
    `exception`, `exception_at`, `snapshot` (its last state by its monitor), `was_stopped`, `killed_by_us`. Times are
    seconds of this node's monotonic clock."""
    node_evidence: Mapping[str, Any]
    """Of this node: `oom_kills` in this cycle, and `shm_free`, bytes; null: unknown."""
    stop_began: float | None
    """When the launcher began to stop the ranks (monotonic seconds); null: it has not."""
    all_ranks: bool
    """Whether these are all ranks of the job."""
    otherwise: Mapping[str, Any] | None
    """The fault where no rank failed by itself: a restart in process failed, or all ranks are zombies."""
    suspect_results: Mapping[str, Any]
    """Local rank -> its suspect result, with the fields of `result_in_doubt`."""
    on_purpose: Mapping[str, str]
    """Local rank -> the fault on purpose that struck it in this cycle."""
    nccl: Mapping[str, Any] | None
    """After a hang, what NCCL's RAS said of the job ([hangs.md](hangs.md)): `processes` it knows, of which `missing`
    (`missing_count` in all) it did not reach, each with `host`, `pid`, `is_dead` (it has given it up), and `rank` in a
    communicator of `size`; and ranks that have launched fewer operations than others, `late`. null: it said nothing."""


@dataclass(frozen=True)
class Stacks(Event, name="stacks"):
    """Where each rank of this node was before the stop of a cycle that failed by a hang."""

    cycle: int
    """The cycle that failed."""
    ranks: Sequence[Mapping[str, Any]]
    """Each with `rank`, `place` (`stopped`, `in_kernel`, `collective`, `wrapper`, `blocked`, `locked`, `outside` or
    `unknown`), `frames` of its main thread (the innermost first), `process` as /proc has it, with the path of the
    innermost frame's `file` and where its `other_threads` are, `stacks`, the file with all of them (empty: none), and
    `groups`: how far it was in each process group, by torch's flight recorder."""


@dataclass(frozen=True)
class Stall(OfCycle, Event, name="stall"):
    """Ranks stand still for longer than `--ft-stall-warning`. They are not stopped."""

    what: str
    """What is known of it, in words."""
    ranks: Sequence[Mapping[str, Any]]
    """Where each rank of this node is, with the fields of `stacks` but the file."""


@dataclass(frozen=True)
class LimitsCannotAct(OfCycle, Event, name="limits_cannot_act"):
    """The user set limits, and the training has not asked to be watched."""

    why: str
    """Which ranks, and what is missing."""


@dataclass(frozen=True)
class LimitDoubled(Event, name="limit_doubled"):
    """A learned limit ended a rank; a longer one applies from the next cycle on."""

    limit: str
    """The name of the limit."""
    factor: float
    """How many times the learned limit applies then."""


@dataclass(frozen=True)
class FaultOnPurpose(OfCycle, Event, name="fault_on_purpose"):
    """A fault on purpose (`--ft-inject`) strikes a rank. Written before it happens."""

    fault: str
    """The fault, as `--ft-inject` names it."""
    rank: int
    """The rank that it strikes."""
    local_rank: int
    """Its number on this node."""
    at: str
    """The place in the training."""


@dataclass(frozen=True)
class Killed(Event, name="killed"):
    """Processes of the cycle did not end by SIGTERM in time and got SIGKILL."""

    cycle: int
    """The cycle that was stopped."""
    pids: list[int]
    """Their pids."""


@dataclass(frozen=True)
class LeftOver(Event, name="left_over"):
    """Processes that even SIGKILL did not end."""

    cycle: int
    """The cycle that was stopped."""
    pids: list[int]
    """Their pids."""


@dataclass(frozen=True)
class Lingers(Event, name="lingers"):
    """All ranks succeeded, and background processes that they started still run (`--ft-linger`)."""

    cycle: int
    """The cycle that succeeded."""
    processes: Mapping[str, str]
    """Pid -> command."""


@dataclass(frozen=True)
class BackgroundEnded(Event, name="background_ended"):
    """Background processes of successful ranks are ended."""

    cycle: int
    """The cycle that succeeded."""
    pids: list[int]
    """Their pids."""
    signal: int | None
    """The signal to the launcher because of which they are ended; null: their time was over."""
