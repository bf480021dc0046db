"""What attribution finds: the fault that ended a cycle, its class, and who holds up the others in a hang. Pure.

`first_failure.py` makes a `Fault`, `collective.py` a `HangFinding`. The restart policy, the journal and the console
read these values. docs/restart_policy.md says what each class changes. The field names of `Fault` and the values of
the enums stand in journals: none may be renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rank_monitor.contract.wire.messages import NO_ITERATION, ResultInDoubt


class FaultClass(str, Enum):
    """The class of a fault: who has to act, the author of the program, the owner of the node, or nobody. The restart
    policy treats some classes apart."""

    USER_ERROR = "user error"
    """The program: it fails in the same way on any node."""

    HANG = "hang"
    """A rank, or what it waits for, makes no progress."""

    HARDWARE = "hardware suspected"
    """The node or one of its devices: a restart on other hardware may succeed."""

    MEMORY = "memory"
    """Host, GPU or shared memory was too small."""

    PREEMPTION = "preemption"
    """A signal from outside the launcher ended the rank."""

    INFRASTRUCTURE = "infrastructure"
    """Network, storage, a service or a limit of the system: a later attempt may succeed."""

    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cause:
    """The class of a fault, and a hint: its likely cause in words. The hint is empty where the fault says enough."""

    fault_class: FaultClass = FaultClass.UNKNOWN
    hint: str = ""


NO_CAUSE = Cause()


class FaultKind(Enum):
    """What happened to the rank that failed first."""

    HANG = "hang"
    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"


class HangKind(Enum):
    """The kind of a hang; docs/hangs.md has the conditions of each. The value stands in the journal as `finding`."""

    GONE = "gone"
    """A rank is stopped or has ended, and others wait for it."""
    BEHIND = "behind"
    """A rank never entered the collective that others wait in, and waits in none."""
    DEADLOCK = "deadlock"
    """Ranks wait for each other in collectives of different groups."""
    MISMATCH = "mismatch"
    """Members of a group are in the same collective by number, but not by name, sizes or types."""
    TRANSPORT = "transport"
    """All members entered the collective, and none has finished it: the network or a device."""
    RETURNED = "returned"
    """No hang: a rank has returned from its program, and others lost their connection to it."""
    UNKNOWN = "unknown"
    """The evidence leaves more than one answer, so nobody is named."""


NETWORK_OR_DEVICE = ", and it does not end: the network, or a device"
"""The end of the text of a TRANSPORT finding. `nccl_view.py` replaces it where NCCL knows more."""


HANGS = "hangs: "
"""The beginning of `Fault.what` of a rank that hangs. The cause follows, then the limit that was exceeded."""


@dataclass(frozen=True)
class HangFinding:
    """Who holds up the other ranks in a hang.

    Attributes:
        culprits: the ranks that hold up the others, in order; empty where none can be named. Several for a deadlock or
            a mismatch.
        text: what the culprits did, without the subject: `never entered ...`; empty where only their stacks show it.
            Without culprits a sentence of its own: which evidence is missing, or what all ranks are in.
        waiting: the ranks that wait or may wait for the culprits, directly or through others.
    """

    kind: HangKind
    culprits: tuple[int, ...] = ()
    text: str = ""
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fault:
    """Which rank failed first, how and where, and the likely cause with its evidence. One for each failed cycle.

    Attributes:
        rank, local_rank, pid: the rank that failed first, or the culprit of a hang; `local_rank` and `pid` are 0 where
            the coordinator names a rank of another node without knowing them.
        exit_code: as in `subprocess`; 1 where the process had not ended.
        what: what happened, without the subject; the headline puts `rank N on NODE` before it.
        where: the section and iteration of the rank; may be empty.
        hint: the likely cause; may be empty.
        iteration: the last step that the rank reported; NO_ITERATION: none.
        limit: the name of the limit that passed; empty: none did. `learned_limit`: that limit was learned.
        detail: lines below the headline: of the traceback, or the innermost frames of a hang.
        others: lines about the other ranks.
        agreed_exit_code: the exit code that all failed ranks have in common; None: they have several.
        error: `TYPE at FILE:LINE` of an exception of the program; equal whenever the same line raises the same type.
        collateral: the failure is the consequence of another rank's: its `RankEvidence.consequence_score` is 1, or the
            finding of a hang shows that the rank waits for others.
        doubt: the suspect result because of which all ranks agreed to exit.
        failed: all ranks of the node that failed by themselves, without those that the launcher ended.
        finding: a value of `HangKind` where ranks wait for others, or lost a rank that had returned; else empty.
        blamed: the culprits of that finding: several for a deadlock or a mismatch, none if the culprit is not known.
        waiting: how many ranks of the node wait for the culprits.
        error_text: digest of the text of the exception in `error` (`contract/same_error.py`); empty where `error` is.
        before_group: the rank certainly raised that exception before it had made any process group.
        exceeded: of a hang, the end of `what`: which limit was exceeded. Kept apart, so that the coordinator can put
            another cause before it.
    """

    kind: FaultKind
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    what: str
    where: str
    hint: str
    iteration: int = NO_ITERATION
    limit: str = ""
    learned_limit: bool = False
    detail: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    agreed_exit_code: int | None = None
    error: str = ""
    collateral: bool = False
    fault_class: FaultClass = FaultClass.UNKNOWN
    doubt: ResultInDoubt | None = None
    failed: tuple[int, ...] = ()
    finding: str = ""
    blamed: tuple[int, ...] = ()
    waiting: int = 0
    error_text: str = ""
    before_group: bool = False
    exceeded: str = ""


_PERSISTENT = "persistent_error"


def doubt_text(result: ResultInDoubt) -> str:
    """Returns one line about a suspect result: which device is suspected, and of what. The ranks decide whether a
    result is wrong (`ft_client.rerun`), not the launcher."""
    where, step = f"node {result.node}, device {result.device}", f"iteration {result.iteration} of rank {result.rank}"
    if result.finding == _PERSISTENT:
        return f"{where} computed {step} wrongly; another device did not"
    return f"{step} came out unexpected again on {where}; another device has to compute it"
