"""Evidence of a failed cycle in, a fault out: who failed first, what, where, why, and a hint. Pure.

Knows no process and no file; `agent.py` gathers the evidence. What a rank did after the launcher began to stop it, or
because a peer was gone, is not a cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ft_launcher import hints
from ft_launcher.hints import NodeEvidence
from rank_monitor.contract.messages import NO_ITERATION, RankException, Snapshot, Verdict


class FaultKind(Enum):
    """What happened to the rank that failed first."""

    HANG = "hang"
    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank. Moments are seconds of this node's monotonic clock; `exit_code` as from subprocess."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None = None
    died_at: float | None = None
    verdict: Verdict | None = None
    verdict_at: float | None = None
    exception: RankException | None = None
    exception_at: float | None = None
    snapshot: Snapshot | None = None
    was_stopped: bool = False
    killed_by_us: bool = False

    @property
    def failed_at(self) -> float | None:
        """The first sign of its failure; None while there is none."""
        died_badly = self.died_at if self.exit_code not in (0, None) else None
        condemned_at = self.verdict_at if self.verdict and self.verdict.condemned else None
        signs = [at for at in (died_badly, condemned_at, self.exception_at) if at is not None]
        return min(signs, default=None)


@dataclass(frozen=True)
class Fault:
    """Who failed first (`rank`), what, where, and the likely cause with its evidence; `collateral`: by another's.

    `error` is type and place of the exception of an error of its own, the same whenever the same line raises it.
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
    detail: tuple[str, ...] = field(default=())
    others: tuple[str, ...] = field(default=())
    agreed_exit_code: int | None = None
    error: str = ""
    collateral: bool = False


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_IN_COLLECTIVE = ("distributed_c10d.py", "_engine_run_backward", "all_reduce", "barrier")
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|peer|remote process|remote side|NCCL.*abort",
    re.IGNORECASE,
)


def attribute(ranks: Sequence[RankEvidence], node: NodeEvidence, stop_began: float | None = None) -> Fault | None:
    """The fault that ended a cycle.

    Args:
        ranks: evidence of every local rank.
        node: evidence of the node.
        stop_began: when the launcher began to stop the ranks; what came later is no cause.

    Returns:
        The fault of the rank that failed first; None when no rank failed by itself.
    """
    own = [rank for rank in ranks if _failed_by_itself(rank, stop_began)]
    if not own:
        return None
    first = min(own, key=lambda rank: (_collateral(rank), rank.failed_at, rank.rank))
    if _kind(first) is FaultKind.HANG:
        first = next((rank for rank in ranks if rank.was_stopped), first)
    kind = _kind(first)
    others = tuple(_other(rank) for rank in ranks if rank.rank != first.rank)
    return Fault(
        kind=kind,
        rank=first.rank,
        local_rank=first.local_rank,
        pid=first.pid,
        exit_code=first.exit_code if first.exit_code is not None else 1,
        what=_what(kind, first),
        where=where(first),
        hint=_hint(kind, first, node),
        iteration=iteration(first),
        limit=first.verdict.limit if first.verdict else "",
        learned_limit=bool(first.verdict and first.verdict.learned),
        detail=_detail(kind, first),
        others=others,
        agreed_exit_code=_agreed_code([rank for rank in own if not _collateral(rank)] or own),
        collateral=_collateral(first),
        error=_error(kind, first),
    )


def _failed_by_itself(rank: RankEvidence, stop_began: float | None) -> bool:
    if rank.failed_at is None:
        return False
    return stop_began is None or rank.failed_at <= stop_began or _died_of_no_stop(rank)


def _died_of_no_stop(rank: RankEvidence) -> bool:
    """Whether it died of a signal that the stop did not send: its end was only seen late."""
    number = -(rank.exit_code or 0)
    return number > 0 and number not in _STOP_SIGNALS and not rank.killed_by_us


def _collateral(rank: RankEvidence) -> bool:
    """Whether what the rank did looks like the consequence of another's failure.

    A rank that dies closes its connections some 20 ms before its end is seen, so a peer's exception comes first.
    """
    if rank.verdict and rank.verdict.condemned:
        return any(mark in frame for frame in rank.verdict.frames[:4] for mark in _IN_COLLECTIVE)
    return rank.exception is not None and bool(_PEER_LOST.search(rank.exception.message))


def _kind(rank: RankEvidence) -> FaultKind:
    if rank.was_stopped:
        return FaultKind.HANG
    if rank.verdict and rank.verdict.condemned:
        return FaultKind.HANG
    if rank.exit_code is not None and rank.exit_code < 0:
        return FaultKind.SIGNAL
    return FaultKind.EXCEPTION if rank.exception else FaultKind.EXIT


def _agreed_code(own: list[RankEvidence]) -> int | None:
    """The exit code all ranks that failed by themselves agree on; None when they differ."""
    codes = {rank.exit_code for rank in own if rank.exit_code}
    return codes.pop() if len(codes) == 1 else None


def _what(kind: FaultKind, rank: RankEvidence) -> str:
    match kind:
        case FaultKind.HANG:
            return (
                f"hangs: {rank.verdict.reason}" if rank.verdict else "hangs: it is stopped, and the others wait for it"
            )
        case FaultKind.EXCEPTION:
            assert rank.exception is not None
            return f"raised {rank.exception.type}: {_first_line(rank.exception.message)}"
        case FaultKind.SIGNAL:
            return f"died of {signal_name(-(rank.exit_code or 0))}"
        case FaultKind.EXIT:
            return f"exited with code {rank.exit_code}"


def _hint(kind: FaultKind, rank: RankEvidence, node: NodeEvidence) -> str:
    if kind is FaultKind.HANG:
        state = rank.verdict.process.get("state", "") if rank.verdict else ""
        if rank.was_stopped or str(state).startswith("T"):
            return "the process is stopped (SIGSTOP or a debugger)"
        if str(state).startswith("D"):
            return "the process waits in the kernel (storage, GPU or NIC)"
        return ""
    if kind is FaultKind.EXCEPTION:
        assert rank.exception is not None
        return hints.of_exception(rank.exception.type, rank.exception.message, node)
    code = rank.exit_code or 0
    return hints.of_signal(-code, node) if kind is FaultKind.SIGNAL else hints.of_exit(code, node)


def _detail(kind: FaultKind, rank: RankEvidence) -> tuple[str, ...]:
    if kind is FaultKind.HANG and rank.verdict:
        return tuple(rank.verdict.frames[:4])
    if rank.exception:
        return tuple(rank.exception.traceback.rstrip().splitlines()[-5:])
    return ()


def _error(kind: FaultKind, rank: RankEvidence) -> str:
    """Type and innermost frame of its exception; empty where that only says that a peer is gone."""
    if kind is not FaultKind.EXCEPTION or rank.exception is None or _collateral(rank):
        return ""
    frames = _FRAME.findall(rank.exception.traceback)
    return rank.exception.type + (" at {}:{}".format(*frames[-1]) if frames else "")


def where(rank: RankEvidence) -> str:
    """In which sections and at which iteration the rank was, in words; empty when nothing is known."""
    sections: dict[str, float] = {}
    if rank.verdict:
        sections = rank.verdict.sections
    elif rank.snapshot:
        sections = rank.snapshot.sections
    parts = []
    if sections:
        parts.append("in section " + ", ".join(f"{name} ({age:.1f} s)" for name, age in sections.items()))
    if iteration(rank) != NO_ITERATION:
        parts.append(f"at iteration {iteration(rank)}")
    return " ".join(parts)


def iteration(rank: RankEvidence) -> int:
    """The last iteration that the rank reported in this cycle; NO_ITERATION when it reported none."""
    if rank.verdict and rank.verdict.iteration != NO_ITERATION:
        return rank.verdict.iteration
    return rank.snapshot.iteration if rank.snapshot else NO_ITERATION


def _other(rank: RankEvidence) -> str:
    if rank.exit_code is None:
        state = "was running"
    elif rank.exit_code == 0:
        state = "had finished"
    elif rank.exit_code < 0:
        state = f"ended by {signal_name(-rank.exit_code)}"
    else:
        state = f"ended with code {rank.exit_code}"
    place = where(rank)
    return f"rank {rank.rank} {state} {place}".rstrip()


def signal_name(number: int) -> str:
    """SIGKILL for 9; `signal 41` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else ""
