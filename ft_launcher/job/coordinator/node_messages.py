"""The messages between agents and coordinator, as JSON with a version. Knows no store and no clock.

An agent sends `JoinRequest`, `Ended` and `Left` to the inbox; the coordinator answers a request by `RankAssigned` or
`JobOver`, and notifies all members of a cycle of its end by `CycleEnd`. `Formed` is its record for a node that takes
over from it, `Members` its record for nodes that ask each other something.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from ft_launcher.decide.policy.case import FaultReport, PolicyJudgement, RankRequest
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.wire.json_record import from_json, to_json

# Nodes of one job may run different releases of the launcher; a record of another version is refused.
VERSION = 5
# Cycles and ranks are numbered from 0.
NO_CYCLE = -1
NO_RANK = -1
# Any program can write to the store. The largest record, `Formed`, contains an arrival of each node.
MAX_BYTES = 1 << 24


class EndReason(str, Enum):
    """How a cycle ended, or a node's part in it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    HUNG = "hung"
    """It failed by a hang: every node keeps the stacks of its ranks before it stops them."""
    STOOD_STILL = "stood still"
    """As `HUNG`, by `hang_timeout`: on every node what counts is where its ranks were when that was decided."""
    AGREED = "agreed"
    """Its ranks exit after the same step, each when it has saved, with a code that the launcher acts on."""
    PREEMPTED = "preempted"
    """It got a signal to end: all ranks stop after the same step, each when it has saved."""
    ASKED = "asked"
    """A rank of the node asks for a restart, for the end of the job, or for its node to leave."""
    LEFT = "left"
    LOST = "lost"
    GREW = "grew"
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True)
class JoinRequest:
    """A node asks to take part. `seq` counts its arrivals; `cycle` is the one it left, and `report` its fault there.
    `views`: after a hang, `ranks` with where each of its ranks was before the first was ended, and `nccl` if NCCL was
    asked there: what it said of the job. After any fault `returned`: by rank, as text, how many seconds before the stop
    it had returned from the program.

    `rank` is the node rank it insists on; `order` sorts nodes at first: numbers as text of equal length, then names.
    `role` is the role of its `nprocs` ranks (`--role`).
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


@dataclass(frozen=True)
class Ended:
    """A member's part in a cycle ended, or it wants the cycle to end. `text`: why, for other nodes.

    `request`: of a rank of this node, if the reason is `ASKED`; the coordinator decides what follows. `signal`: the one
    that preempts this node.
    """

    node: str
    cycle: int
    reason: EndReason
    text: str
    request: RankRequest | None = None
    signal: int = 0


@dataclass(frozen=True)
class Left:
    """A node leaves and will not come back under this id. `signal`: the one that preempts it; 0: none does."""

    node: str
    reason: str
    signal: int = 0


@dataclass(frozen=True)
class RankAssigned:
    """A node's place in a cycle. `judgement`: what was decided about the fault that ended the last one.

    The ranks of the node follow each other from `first_rank` on, in a job of `world_size` ranks. Among the
    `role_world_size` ranks of their role they follow each other from `first_role_rank` on. The agent numbers its ranks
    by these four, so the agents of a cycle need nothing of each other.

    Only the message to rank 0 contains the names of all: `active` by rank, and `standby`, those that wait.
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


@dataclass(frozen=True)
class JobOver:
    """The job is over for this node. `judgement`: what was decided about its fault, or about that of another node."""

    exit_code: int
    reason: str
    judgement: PolicyJudgement | None = None

    @property
    def end_reason(self) -> EndReason:
        """How the last cycle ended for a node that has not heard that."""
        if self.exit_code == ExitCode.OK:
            return EndReason.SUCCEEDED
        return EndReason.STOP


@dataclass(frozen=True)
class CycleEnd:
    """A cycle ended for all its members. With an exit code, the job is over. `text`, `signal`: see `Ended`."""

    cycle: int
    reason: EndReason
    text: str
    exit_code: int | None = None
    signal: int = 0


@dataclass(frozen=True)
class Formed:
    """What a coordinator must know to take over: the cycle, its members by rank, and what was charged so far.

    `arrivals` holds those of the members and of the nodes that wait; `read` counts the messages of the inbox taken.
    `over` is the answer to all once the job is over; None: it is not. `judgement` is that of the cycle's places; `owed`
    are the judgements that nodes which wait have still to receive. `deposed` are the coordinators before, whose
    messages may still come. `attempt` names this launch of the job in its keys; `before` is the `over` of the attempt
    before it, by name, for nodes of that one which have not heard it.
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


@dataclass(frozen=True)
class Members:
    """The nodes of a cycle that runs: names by node rank, and the names of those that wait for a place.

    `gone`: the node ranks of those that failed or were lost, where the cycle goes on without them.
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
    """Answers a node's arrival number `seq`."""

    node: str
    seq: int
    answer: Answer


ToCoordinator: TypeAlias = "JoinRequest | Ended | Left"
Answer: TypeAlias = "RankAssigned | JobOver"
Work: TypeAlias = "Formed | Reply | CycleEnd | RanksEnded"
"""What the coordinator wants done, in order. `Formed` must be agreed on before anything after it is done."""
NodeMessage: TypeAlias = "JoinRequest | Ended | Left | RankAssigned | JobOver | CycleEnd | Formed | Members"

_M = TypeVar("_M")
_CLASSES = (JoinRequest, Ended, Left, RankAssigned, JobOver, CycleEnd, Formed, Members)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in _CLASSES}


def encode(message: NodeMessage) -> str:
    """Returns the message as JSON text."""
    return json.dumps({"v": VERSION, "kind": type(message).__name__, **to_json(message)}, separators=(",", ":"))


def decode(text: bytes) -> NodeMessage:
    """Parses a message.

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
