"""The messages between agents and coordinator, as JSON with a version. Pure data: knows no store and no clock.

    agent       --JoinRequest, Ended, Left-->  coordinator    in the inbox, in one order for all
    coordinator --RankAssigned or JobOver-->   one agent      the answer to its JoinRequest
    coordinator --CycleEnd-->                  all members    the end of a cycle, or of the job
    coordinator --RanksEnded-->                store host     in the place of a member that does not say it
    coordinator --Formed-->                    a successor    the record by which it takes over
    coordinator --Members-->                   any agent      whom it can ask something (`link/questions.py`)

`link/` writes and reads the messages, each at its key of the job's store. Field names are part of the protocol between
the nodes of one job; a change of meaning needs another `VERSION`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from ft_launcher.decide.policy.case import FaultReport, PolicyJudgement, RankRequest
from rank_monitor.contract.copy_records import CopyOffer, CopyPlan
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.wire.json_record import from_json, to_json

# Nodes of one job may run different releases of the launcher by mistake. A record of another version is refused with
# both numbers, and not read with fields that are missing.
VERSION = 7
# Cycles and ranks are numbered from 0.
NO_CYCLE = -1
NO_RANK = -1
# Bytes. Any program can write to the store. The largest record, `Formed`, contains an arrival of each node.
MAX_BYTES = 1 << 24


class EndReason(str, Enum):
    """How a cycle ended, or a node's part in it. The values are in messages; they are part of the protocol."""

    SUCCEEDED = "succeeded"
    """All ranks returned without an error: those of a node (`Ended`), or of all nodes (`CycleEnd`)."""
    FAILED = "failed"
    """A rank exited with an error, or the node could not reach the cycle's store."""
    HUNG = "hung"
    """The cycle failed by a hang: every node keeps the stacks of its ranks before it stops them."""
    STOOD_STILL = "stood still"
    """As `HUNG`, by `hang_timeout`: on every node what counts is where its ranks were when that was decided."""
    AGREED = "agreed"
    """The ranks exit after the same step, each when it has saved, with a code that the launcher acts on."""
    PREEMPTED = "preempted"
    """The node got a signal to end: the ranks of all nodes stop after the same step, each when it has saved."""
    ASKED = "asked"
    """A rank of the node asks for a restart, for the end of the job, or for its node to leave (`Ended.request`)."""
    LEFT = "left"
    """A node leaves for good."""
    LOST = "lost"
    """A node has made no beat for the node timeout; or, in `Ended`, its launcher stood still for so long."""
    GREW = "grew"
    """More nodes are there, and the next cycle is to have them."""
    RESTART = "restart"
    """A rank asked for a restart and the policy allowed it."""
    STOP = "stop"
    """The job ends without success, whatever the cause."""


@dataclass(frozen=True)
class JoinRequest:
    """A node asks to take part in the next cycle: an arrival.

    Attributes:
        node: the node's id: host name, pid of the launcher, and a random part.
        seq: the number of this arrival among those of the node. The answer has it in its key.
        name: the host name, for texts.
        address: where the other nodes reach this one, if it hosts the store of a cycle.
        nprocs: how many ranks it has.
        order: what nodes are sorted by before they have node ranks: numbers as text of equal length, then names.
        rank: the node rank that it insists on (static rendezvous); NO_RANK: any.
        group: nodes of one group are near each other (`--ft-node-group`, Slurm's topology). See `Size.segment`.
        cycle: number of the cycle that it left; NO_CYCLE: it is new.
        report: the fault of its ranks in that cycle; None: none of them failed by itself.
        views: what it saw of its ranks there. After a hang `ranks`, where each of its ranks was before the first was
            ended, and `nccl`, what NCCL said of the job, if it was asked there. After any fault `returned`: rank, as
            text, -> how many seconds before the stop it had returned from the program.
        role: the role of its ranks (`--role`).
        copies: what it says of copies of states in memory; None: it makes and keeps none.
    """

    node: str
    seq: int
    name: str
    address: str
    nprocs: int
    order: str = ""
    rank: int = NO_RANK
    group: str = ""
    cycle: int = NO_CYCLE
    report: FaultReport | None = None
    views: dict[str, Any] = field(default_factory=dict)
    role: str = ""
    copies: CopyOffer | None = None


@dataclass(frozen=True)
class Ended:
    """A member's part in a cycle has ended, or it wants the cycle to end.

    Attributes:
        cycle: the number of that cycle. A report about an earlier cycle changes nothing.
        text: why, for the other nodes.
        request: what a rank of this node asks for, if the reason is `ASKED`; the coordinator decides what follows.
        signal: the number of the signal that preempts this node; 0: none does.
    """

    node: str
    cycle: int
    reason: EndReason
    text: str
    request: RankRequest | None = None
    signal: int = 0


@dataclass(frozen=True)
class Left:
    """A node leaves and will not come back under this id.

    Attributes:
        reason: why, for the other nodes.
        signal: the number of the signal that preempts it; 0: none does.
    """

    node: str
    reason: str
    signal: int = 0


@dataclass(frozen=True)
class RankAssigned:
    """A node's place in a cycle.

    The agent numbers its ranks by `first_rank` and the three fields after it, so the agents of a cycle need nothing of
    each other.

    Attributes:
        cycle: the number of the cycle.
        rank: the node rank.
        nodes: how many nodes take part.
        reason: why the cycle was formed: as a rule, how the cycle before ended.
        first_rank: number of the node's first rank in the job; its others follow.
        world_size: how many ranks the job has.
        first_role_rank: number of the node's first rank among the ranks of its role; its others follow.
        role_world_size: how many ranks of that role the job has.
        deputy: whether the node watches the coordinator as closely as the coordinator watches it.
        judgement: what was decided about the fault that ended the cycle before; None: there was none.
        active: the names of the cycle's nodes by node rank; only in the answer to node rank 0, empty elsewhere.
        standby: likewise, the names of the nodes that wait.
        copies: what the node does about copies of states in memory; None: nothing.
    """

    cycle: int
    rank: int
    nodes: int
    reason: str
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int
    deputy: bool = False
    judgement: PolicyJudgement | None = None
    active: list[str] = field(default_factory=list)
    standby: list[str] = field(default_factory=list)
    copies: CopyPlan | None = None


@dataclass(frozen=True)
class JobOver:
    """The job is over for this node.

    Attributes:
        exit_code: with which its launcher exits.
        reason: why, in words.
        judgement: what was decided about the fault of this node or of another, or about a request of a rank; None:
            nothing was.
    """

    exit_code: int
    reason: str
    judgement: PolicyJudgement | None = None

    @property
    def end_reason(self) -> EndReason:
        """How the last cycle ended, for a member that has not received the end of that cycle."""
        if self.exit_code == ExitCode.OK:
            return EndReason.SUCCEEDED
        return EndReason.STOP


@dataclass(frozen=True)
class CycleEnd:
    """A cycle ended for all its members. All of them await its key.

    Attributes:
        text: why, in words.
        exit_code: with which the job ends; None: another cycle follows.
        signal: the number of the signal that preempts a member; 0: none does.
    """

    cycle: int
    reason: EndReason
    text: str
    exit_code: int | None = None
    signal: int = 0


@dataclass(frozen=True)
class Formed:
    """The job's record: what a coordinator must know to take over. Written when a cycle forms and when the job ends.

    Attributes:
        cycle: number of the current or last cycle.
        coordinator: the id of the coordinator's node.
        term: how many coordinators the attempt has had, this one included.
        read: how many messages of the inbox are included. A successor reads on from there.
        members: the ids of the cycle's nodes, by node rank.
        reason: why the cycle was formed, as in `RankAssigned`.
        arrivals: node -> its arrival, of the members and of the nodes that wait.
        history: the history of restarts: what was charged so far.
        over: the answer to all nodes once the job is over; None: it is not.
        judgement: what the places of the cycle contain: about the fault that ended the cycle before.
        owed: node -> a judgement about its fault or request that it has still to receive.
        deposed: the ids of the coordinators before. They arrive again under other ids, and messages under the old ones
            may still come.
        attempt: name of this launch of the job, in its keys.
        set_aside: cycle -> the step from which on states in memory were bad when it was formed.
        before: name of the attempt before -> how it ended. A node of that attempt that missed the end reads it here.
    """

    cycle: int
    coordinator: str
    term: int
    read: int
    members: list[str]
    reason: str = ""
    arrivals: dict[str, JoinRequest] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    over: JobOver | None = None
    judgement: PolicyJudgement | None = None
    owed: dict[str, PolicyJudgement] = field(default_factory=dict)
    deposed: list[str] = field(default_factory=list)
    attempt: str = ""
    before: dict[str, JobOver] = field(default_factory=dict)
    set_aside: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Members:
    """The nodes of a cycle that runs, for nodes that ask each other something.

    Attributes:
        active: the names of the members by node rank.
        waiting: the names of the nodes that wait for a place.
        gone: the node ranks of members that failed or were lost, where the cycle goes on without them.
    """

    cycle: int
    active: list[str]
    waiting: list[str] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RanksEnded:
    """The ranks of a member of a cycle have ended. A preempted node that hosts a store waits for this of all others."""

    cycle: int
    rank: int
    """The member's node rank."""


@dataclass(frozen=True)
class Reply:
    """The coordinator's answer to a node's arrival number `seq`. Not a message itself: `answer` is written."""

    node: str
    seq: int
    answer: Answer


ToCoordinator: TypeAlias = "JoinRequest | Ended | Left"
Answer: TypeAlias = "RankAssigned | JobOver"
Work: TypeAlias = "Formed | Reply | CycleEnd | RanksEnded"
"""What the coordinator wants done, in order. `Formed` must be agreed on before anything after it is done: where another
coordinator has taken over, the record cannot be written, and no node may act on what follows."""
NodeMessage: TypeAlias = "JoinRequest | Ended | Left | RankAssigned | JobOver | CycleEnd | Formed | Members"

_M = TypeVar("_M")
_CLASSES = (JoinRequest, Ended, Left, RankAssigned, JobOver, CycleEnd, Formed, Members)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in _CLASSES}


def encode(message: NodeMessage) -> str:
    """Returns the message as JSON text, with its kind and the version."""
    return json.dumps({"v": VERSION, "kind": type(message).__name__, **to_json(message)}, separators=(",", ":"))


def decode(text: bytes) -> NodeMessage:
    """Parses a message that any program may have written.

    Raises:
        ProtocolError: not a message of ours, one of another version, or too large.
    """
    if len(text) > MAX_BYTES:
        raise ProtocolError(f"a record of {len(text)} bytes is above {MAX_BYTES}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ProtocolError("not an object")
    version = values.pop("v", None)
    if version != VERSION:
        raise ProtocolError(f"record of version {version!r}; this launcher speaks {VERSION}")
    kind = _KINDS.get(str(values.pop("kind", None)))
    if kind is None:
        raise ProtocolError("unknown kind of record")
    message: NodeMessage = from_json(kind, values)
    if isinstance(message, Formed) and not message.arrivals.keys() >= set(message.members):
        raise ProtocolError("Formed: no arrival of a member")
    return message


def decode_as(kind: type[_M], text: bytes) -> _M:
    """Parses a message of one kind. Raises ProtocolError as `decode`, and for a message of another kind."""
    message = decode(text)
    if not isinstance(message, kind):
        raise ProtocolError(f"it is a {type(message).__name__}")
    return message
