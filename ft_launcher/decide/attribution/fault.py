"""The fault that ended a cycle, its class, and who holds up the others in a hang: what attribution finds. Pure.

Policy, journal and console read these values; docs/restart_policy.md says what each class changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rank_monitor.contract.wire.messages import NO_ITERATION, ResultInDoubt


class FaultClass(str, Enum):
    """Who has to act: on the program, on the node, on nothing."""

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
    """The class of a fault, and the likely cause as text; the text is empty where the fault itself says enough."""

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
    """The kind of a hang."""

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


NETWORK_OR_DEVICE = ", and it does not end: the network, or a device"
"""The end of what TRANSPORT says."""


HANGS = "hangs: "
"""The beginning of what is said of a rank that hangs. The cause follows, then the limit that was exceeded."""


@dataclass(frozen=True)
class Blame:
    """Who holds up the others.

    Attributes:
        ranks: the faulty ranks, in order; empty where none can be named.
        text: what they did, without the subject: "never entered ..."; empty where only their stacks say it. A sentence
            of its own for UNKNOWN, and for TRANSPORT where no rank is named.
        waiting: the ranks that wait, directly or not, or may do so, without those.
    """

    finding: HangKind
    ranks: tuple[int, ...] = ()
    text: str = ""
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fault:
    """Which rank failed first, how and where, and the likely cause with its evidence.

    Attributes:
        collateral: the failure is the consequence of another rank's.
        error: type and place of an exception of the program; equal whenever the same line raises the same type.
        error_text: digest of the text of that exception (`contract/same_error.py`); empty where `error` is.
        before_group: the rank raised it before it had made any process group, as far as that is certain.
        doubt: the suspect result because of which all ranks agreed to exit.
        failed: all ranks of the node that failed by themselves, without those that the launcher ended.
        finding: of a hang in which ranks wait for others, or of a rank that lost one that had returned: a value of
            `HangKind`; else empty.
        blamed: the ranks that hold up the others then; several for a deadlock or a mismatch, none if it is not known.
        waiting: how many ranks of the node wait then.
        exceeded: of a hang, what `what` says behind the cause where one is known: which limit was exceeded.
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
    """Describes which device is suspected, and of what. Whether a result is wrong is decided in the ranks
    (`ft_client.rerun`)."""
    place, step = f"node {result.node}, device {result.device}", f"iteration {result.iteration} of rank {result.rank}"
    if result.finding == _PERSISTENT:
        return f"{place} computed {step} wrongly; another device did not"
    return f"{step} came out unexpected again on {place}; another device has to compute it"
