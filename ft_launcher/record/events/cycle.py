"""Events of a cycle and of the end of its processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.record.events.event import ABSENT, Absent, Event, OfCycle
from ft_launcher.record.events.sharing import FreeText, InPart, InPartOrText, Private, Shared


@dataclass(frozen=True)
class CycleStartEvent(Event, name="cycle_start"):
    """The ranks of a cycle run on this node."""

    cycle: Shared[int]
    """The number of the cycle, the same on all nodes; from 0."""
    node_rank: Shared[int]
    """This node's rank among the nodes."""
    nodes: Shared[int]
    """How many nodes take part."""
    master: Shared[str]
    """Address and port of the ranks' store."""
    ranks: InPart[Sequence[Mapping[str, int]]]
    """The ranks of this node, each with `rank`, `local_rank`, `pid`."""


@dataclass(frozen=True)
class SaveIntervalEvent(Event, name="save_interval"):
    """How often the ranks of the next cycle are to save (`--ft-save-interval auto`), as the node of rank 0 chose it."""

    cycle: Shared[int]
    """The cycle that begins now."""
    interval_s: Shared[float]
    """Seconds of training between two saves."""
    reason: Shared[str]
    """Why, in words."""
    faults: Shared[int]
    """How many faults the job had so far, as far as the journals say."""
    save_s: Shared[float | None]
    """For how long the training waited for a save, in the mean (seconds); null: none was measured."""
    mtbf_s: Shared[float | None]
    """The time of the job so far for each of its faults (seconds); null: it had none."""


@dataclass(frozen=True)
class CycleEndEvent(Event, name="cycle_end"):
    """The cycle is over on this node."""

    cycle: Shared[int]
    """The cycle that ended."""
    how: Shared[str]
    """`succeeded`, `failed`, `failed elsewhere` (on another node), `membership changed`, `asked for: ACTION` or
    `job over`."""
    why: FreeText[str | Absent] = ABSENT
    """What ended it, where neither a fault nor a request of this node did."""
    next: FreeText[str | Absent] = ABSENT
    """After `failed elsewhere`: the decision in words."""
    lived_s: Shared[float | Absent] = ABSENT
    """After `failed`: for how many seconds its ranks ran."""
    iteration: Shared[int | Absent | None] = ABSENT
    """After `failed`: the iteration that they reached; -1: none was reported, null: it is unknown."""
    loaded_step: Shared[int | Absent | None] = ABSENT
    """After `failed`: the step of the state in memory that they went on from; 0: none, null: they looked for none."""
    loaded_series: Shared[str | Absent] = ABSENT
    """After `failed`: the series of that state, as in `memory_loaded`."""
    step: Shared[int | Absent | None] = ABSENT
    """After `failed`: how many steps the rank of the fault had done, as counted for the state in memory; null: it
    counts none."""
    last_step: Shared[int | Absent] = ABSENT
    """After `failed`: the largest such count of the ranks of this node."""
    saved_step: Shared[int | Absent] = ABSENT
    """After `failed`: the newest step that the ranks of this node had saved in memory since they went on; 0: none."""


@dataclass(frozen=True)
class FaultEvent(Event, name="fault"):
    """The cycle failed by a rank of this node. The decision follows in the next line."""

    cycle: Shared[int]
    """The cycle that failed."""
    kind: Shared[str]
    """How the rank failed: `exception`, `signal`, `exit` or `hang`."""
    rank: Shared[int]
    """The rank that failed first."""
    local_rank: Shared[int]
    """Its number on this node."""
    pid: Shared[int]
    """Its process."""
    exit_code: Shared[int]
    """Its exit code; minus the number of the signal that ended it."""
    what: InPartOrText[str]
    """What happened, in words."""
    exceeded: FreeText[str]
    """Of a hang: what is said of the limit that was exceeded, as `what` has it behind a cause; else empty."""
    where: Shared[str]
    """Where the rank was in its training: its section and iteration."""
    hint: Shared[str]
    """The likely cause; empty: none is known."""
    iteration: Shared[int]
    """The iteration it had reported; -1: none."""
    limit: Shared[str]
    """The limit that it exceeded; empty: none."""
    learned_limit: Shared[bool]
    """Whether that limit was learned."""
    detail: InPartOrText[Sequence[str]]
    """Lines for the console: of the traceback, or the frames of a hang."""
    others: FreeText[Sequence[str]]
    """What the other ranks did, a line for each."""
    agreed_exit_code: Shared[int | None]
    """The exit code that all ranks agreed on (16 or 17); null: none."""
    error: InPart[str]
    """Type and place of an exception of the program: equal when the same line raises the same type."""
    error_text: Shared[str]
    """A digest of the text of that exception: equal when the text is."""
    before_group: Shared[bool]
    """Whether the rank certainly had made no process group when it raised that exception."""
    collateral: Shared[bool]
    """Whether the failure is the consequence of another rank's."""
    fault_class: Shared[str]
    """The class of the fault; docs/restart_policy.md lists them."""
    doubt: Shared[Mapping[str, Any] | None]
    """The suspect result because of which all ranks agreed to exit, with the fields of `result_in_doubt`."""
    failed: Shared[Sequence[int]]
    """All ranks of this node that failed by themselves."""
    finding: Shared[str]
    """Of a hang in which ranks wait for others: `gone`, `behind`, `deadlock`, `mismatch`, `transport` or `unknown`
    (docs/hangs.md); `returned`: it lost a rank that had returned from the program; else empty."""
    blamed: Shared[Sequence[int]]
    """The ranks that hold up the others then: several for a deadlock or a mismatch, none if it is not known."""
    waiting: Shared[int]
    """How many ranks of this node waited then."""


@dataclass(frozen=True)
class EvidenceEvent(Event, name="evidence"):
    """What the fault of a cycle is found by, on this node; `ft_launcher replay` finds it again.

    Written before `fault` and `in_process_fault`, and at a hang also where no rank of this node failed.
    """

    cycle: Shared[int]
    """The cycle."""
    of_rank: Shared[int | None]
    """The rank that ended while the others went on in process; null: the cycle has ended, this is of all its ranks."""
    ranks: InPart[Sequence[Mapping[str, Any]]]
    """Each with `rank`, `local_rank`, `pid`, and what is known of `exit_code`, `died_at`, `verdict`, `verdict_at`,
    `exception`, `exception_at`, `snapshot` (its last state by its monitor), `was_stopped`, `killed_by_us`. Times are
    seconds of this node's monotonic clock."""
    node_evidence: Shared[Mapping[str, Any]]
    """Of this node: `oom_kills` in this cycle, and `shm_free`, bytes; null: unknown."""
    stop_began: Shared[float | None]
    """When the launcher began to stop the ranks (monotonic seconds); null: it has not."""
    all_ranks: Shared[bool]
    """Whether these are all ranks of the job."""
    otherwise: Private[Mapping[str, Any] | None]
    """The fault where no rank failed by itself: a restart in process failed, or all ranks are zombies."""
    suspect_results: Private[Mapping[str, Any]]
    """Local rank -> its suspect result, with the fields of `result_in_doubt`."""
    on_purpose: Private[Mapping[str, str]]
    """Local rank -> the fault that was injected into the rank in this cycle."""
    nccl: Private[Mapping[str, Any] | None]
    """After a hang, what NCCL's RAS said of the job ([hangs.md](hangs.md)): `processes` it knows, of which `missing`
    (`missing_count` in all) it did not reach, each with `host`, `pid`, `is_dead` (it has given it up), and `rank` in a
    communicator of `size`; and ranks that have launched fewer operations than others, `late`. null: it said nothing."""


@dataclass(frozen=True)
class StacksEvent(Event, name="stacks"):
    """Where each rank of this node was before the stop of a cycle that failed by a hang."""

    cycle: Shared[int]
    """The cycle that failed."""
    ranks: InPart[Sequence[Mapping[str, Any]]]
    """Each with `rank`, `place` (`stopped`, `in_kernel`, `collective`, `wrapper`, `blocked`, `locked`, `outside` or
    `unknown`), `frames` of its main thread (the innermost first), `process` as /proc has it, with the path of the
    innermost frame's `file` and where its `other_threads` are, `silent` (it computed and did not answer, since a thread
    held the GIL) and `signalled` (it got the signal for its stacks, of which it may die), `stacks`, the file with all
    of them (empty: none), and `groups`: how far it was in each process group, by torch's flight recorder."""


@dataclass(frozen=True)
class StallEvent(OfCycle, Event, name="stall"):
    """Ranks stand still for longer than `--ft-stall-warning`. They are not stopped."""

    what: FreeText[str]
    """What is known of it, in words."""
    ranks: InPart[Sequence[Mapping[str, Any]]]
    """Where each rank of this node is, with the fields of `stacks` but the file."""


@dataclass(frozen=True)
class LimitsCannotActEvent(OfCycle, Event, name="limits_cannot_act"):
    """The user set limits, and the training has not asked to be watched."""

    why: FreeText[str]
    """Which ranks, and what is missing."""


@dataclass(frozen=True)
class LimitDoubledEvent(Event, name="limit_doubled"):
    """A learned limit ended a rank; a longer one applies from the next cycle on."""

    limit: Shared[str]
    """The name of the limit."""
    factor: Shared[float]
    """How many times the learned limit applies then."""


@dataclass(frozen=True)
class FaultOnPurposeEvent(OfCycle, Event, name="fault_on_purpose"):
    """A fault is injected into a rank (`--ft-inject`, or a call in the script). Written before the fault happens."""

    fault: Shared[str]
    """The fault, as `--ft-inject` names it."""
    rank: Shared[int]
    """The rank into which the fault is injected."""
    local_rank: Shared[int]
    """Its number on this node."""
    at: Shared[str]
    """The place in the training."""


@dataclass(frozen=True)
class KilledEvent(Event, name="killed"):
    """Processes of the cycle did not end by SIGTERM in time and got SIGKILL."""

    cycle: Shared[int]
    """The cycle that was stopped."""
    pids: Shared[list[int]]
    """Their pids."""


@dataclass(frozen=True)
class LeftOverEvent(Event, name="left_over"):
    """Processes that even SIGKILL did not end."""

    cycle: Shared[int]
    """The cycle that was stopped."""
    pids: Shared[list[int]]
    """Their pids."""


@dataclass(frozen=True)
class LingersEvent(Event, name="lingers"):
    """All ranks succeeded, and background processes that they started still run (`--ft-linger`)."""

    cycle: Shared[int]
    """The cycle that succeeded."""
    processes: Private[Mapping[str, str]]
    """Pid -> command."""


@dataclass(frozen=True)
class BackgroundEndedEvent(Event, name="background_ended"):
    """Background processes of successful ranks are ended."""

    cycle: Shared[int]
    """The cycle that succeeded."""
    pids: Shared[list[int]]
    """Their pids."""
    signal: Shared[int | None]
    """The signal to the launcher because of which they are ended; null: their time was over."""
