"""Finds, among the ranks of a node, the one that failed first, and says what its failure was. Pure.

`agent/cycle/evidence.py` asks it after a failed cycle, and `ft_launcher replay` again. What a rank did after the
launcher began to stop it, or because a peer was gone, is not a cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ft_launcher.decide.attribution import collective, hints, known_errors, nccl_view, rank_view
from ft_launcher.decide.attribution.cycle_evidence import (
    CycleEvidence,
    RankEvidence,
    iteration,
    signal_name,
    state,
    where,
)
from ft_launcher.decide.attribution.error_text import excerpt, place
from ft_launcher.decide.attribution.fault import (
    HANGS,
    NO_CAUSE,
    Blame,
    Cause,
    Fault,
    FaultClass,
    FaultKind,
    HangKind,
    doubt_text,
)
from ft_launcher.decide.attribution.hints import NodeEvidence
from ft_launcher.decide.attribution.rank_view import RankView
from ft_launcher.decide.attribution.scene import Activity, numbered
from ft_launcher.decide.attribution.wrapped_errors import errors_inside
from rank_monitor.contract.exit_codes import AGREED
from rank_monitor.contract.same_error import digest
from rank_monitor.contract.wire.launcher_messages import HANG
from rank_monitor.contract.wire.messages import NO_ITERATION, RankException

# The hint is one line on the console, and a node can have many ranks.
_MAX_NAMED = 4
_HEARD_WITHIN_S = 1.0
"""An exception of a peer may be read before the verdict of the rank that it lost: both come within milliseconds, and on
a busy machine together."""
_IN_C_CODE = (
    "a call of C code that waits for another thread: torch's work.wait() of a send, a receive or a collective, or a "
    "lock of the program"
)
_IN_OWN_LOCK = "it waits for a lock of its own program, and no other thread of it is at work"
_LOST_AT_ONCE_S = 2.0
"""What a rank loses within this time after another returned is the connection to that one. The others wait for it, or
come to a collective with it soon; and the launcher sees the end of the first on a busy machine."""
_LOST_WITHIN_S = 60.0
"""A rank notices that another is gone when it next waits for it, in a step of a minute at most. What is lost later may
be a third rank: some programs have ranks that return at different times."""
_RAISED_BY_TORCH = re.compile(r"raised (RuntimeError|(torch\.distributed\.)?Dist\w{0,40}Error): ")
"""The begin of what `_what` says of an exception of torch's groups and stores. Where a connection to a service ends
libraries raise types of their own, or Python's OSError."""
_OF_PROGRAM = {FaultClass.USER_ERROR, FaultClass.MEMORY, FaultClass.UNKNOWN}
"""Classes of exceptions that may be raised again wherever the program runs: these count as the same error."""


def find(evidence: CycleEvidence, on_error: Callable[[Exception], object]) -> Fault | None:
    """Returns the fault of the rank that failed first; None when no rank failed.

    Args:
        on_error: gets the error where what the ranks wrote makes that fail; exit codes and verdicts alone decide then.
    """
    try:
        return attribute(evidence)
    except Exception as error:
        on_error(error)
    return attribute(evidence.without_texts())


def attribute(evidence: CycleEvidence) -> Fault | None:
    """As `find`; an error in what the ranks wrote is raised."""
    fault = _of_first(evidence) or evidence.otherwise
    if fault is None:
        return None
    fault = _about_suspect_result(fault, evidence)
    return replace(fault, hint=evidence.on_purpose.get(fault.local_rank, fault.hint))


def _of_first(evidence: CycleEvidence) -> Fault | None:
    """Returns the fault of the rank that failed first; None when no rank failed by itself."""
    stop_began, node = evidence.stop_began, evidence.node
    ranks = [rank.by_itself(stop_began) for rank in evidence.ranks]
    own = [rank for rank in ranks if rank.failed_by_itself(stop_began)]
    failed = earliest(ranks, stop_began)
    if failed is None:
        return None
    blame: Blame | None = None
    views: list[RankView] = []
    if failed.fault_kind is FaultKind.HANG or cause_of(failed, ranks, node).fault_class is FaultClass.HANG:
        views = rank_view.views(ranks, stop_began)
        blame = _blame(failed, ranks, views, evidence)
    first, kind = failed, failed.fault_kind
    # Of several that are to blame, the one that its own limit ended first says most.
    if blame is not None and failed.rank not in blame.ranks:
        first = next((rank for rank in ranks if rank.rank in blame.ranks), failed)
    if blame is not None and first.rank in blame.ranks:
        kind, cause = FaultKind.HANG, _of_hang(first, ranks, blame)
    else:
        cause = cause_of(first, ranks, node, blame)
    hint = cause.hint
    # Where all are in one collective, none of them is one that the others may have waited for.
    is_transport = blame is not None and blame.finding is HangKind.TRANSPORT
    if hint and first.collateral == 1 and not is_transport:
        hint += _to_look_at(ranks, own)
    error, text, before_group, exceeded = _error(kind, first, cause), "", False, ""
    if kind is FaultKind.HANG:
        exceeded = _exceeded(first)
    if error and first.exception is not None:
        text, before_group = digest(first.exception.message), first.exception.before_group
    fault = Fault(
        kind=kind,
        rank=first.rank,
        local_rank=first.local_rank,
        pid=first.pid,
        exit_code=first.exit_code if first.exit_code is not None else 1,
        what=_what(kind, first, blame),
        where=where(first),
        hint=hint,
        iteration=iteration(first),
        limit=failed.verdict.limit if failed.verdict else "",
        learned_limit=bool(failed.verdict and failed.verdict.learned),
        detail=_detail(kind, first),
        others=(*in_consequence(_lost(first, ranks)), *_others(first, ranks)),
        agreed_exit_code=_agreed_code([rank for rank in own if rank.collateral < 1] or own),
        error=error,
        error_text=text,
        before_group=before_group,
        collateral=first.collateral == 1,
        fault_class=cause.fault_class,
        failed=tuple(sorted({first.rank, *(rank.rank for rank in own)})),
        exceeded=exceeded,
    )
    if blame is None:
        if evidence.all_ranks:
            return with_returned(fault, returned(ranks, stop_began))
        return fault
    # By the recorder it may wait although its stack is in the program: for a GPU, in `loss.item()`.
    collateral = fault.collateral or first.rank in blame.waiting
    if is_transport and first.rank in blame.ranks:
        collateral = False  # it is in the collective as the others are, and NCCL cannot reach it
    if blame.finding is not HangKind.UNKNOWN:
        # Of those that are stopped now, what their monitors saw before says more.
        seen = [replace(view, scene=rank.scene) for view, rank in zip(views, ranks, strict=True)]
        places = rank_view.others(seen, first.rank)
        fault = replace(fault, others=(*in_consequence(_lost(first, ranks)), *places))
    waiting = len(blame.waiting)
    return replace(fault, collateral=collateral, finding=blame.finding.value, blamed=blame.ranks, waiting=waiting)


def earliest(ranks: Sequence[RankEvidence], stop_began: float | None = None) -> RankEvidence | None:
    """Returns the rank that failed first and by itself; None: none did.

    Args:
        stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
    """
    own = [rank for rank in ranks if rank.failed_by_itself(stop_began)]
    order = partial(_order, first_verdict=rank_view.first_verdict(ranks))
    return min(own, key=order, default=None)


def _blame(
    failed: RankEvidence, ranks: Sequence[RankEvidence], views: Sequence[RankView], evidence: CycleEvidence
) -> Blame | None:
    """Returns who holds up the ranks that failed by a hang; None where they did not fail by waiting.

    Such a rank shows no failure itself: the limits or timeouts of those that wait for it pass first.
    """
    blame = collective.find(views, evidence.all_ranks)
    stopped = [rank for rank in ranks if rank.was_stopped]
    named = [rank for rank in stopped if blame.finding is HangKind.GONE and rank.rank in blame.ranks]
    if named:
        faulty = named[0]
        if failed in named:
            faulty = failed
        return Blame(HangKind.GONE, (faulty.rank,), "", tuple(rank.rank for rank in ranks if rank not in stopped))
    if failed.collateral < 1 and failed.rank not in (*blame.ranks, *blame.waiting):
        # It exceeded its own limit outside of any collective; that others are behind at this moment may mean nothing.
        if not (evidence.all_ranks and failed.condemned and blame.finding is HangKind.UNKNOWN):
            return None
        inside = collective.all_inside(views)
        if inside is None:
            return None
        blame = inside
    if evidence.nccl is None:
        return blame
    answered_at = evidence.nccl.answered_at
    ended = [rank.rank for rank in ranks if rank.died_at is not None and rank.died_at <= answered_at]
    return nccl_view.refined(blame, [evidence.nccl], {rank.rank: rank.pid for rank in ranks}, ended=ended)


def _about_suspect_result(fault: Fault, evidence: CycleEvidence) -> Fault:
    """Returns the fault of ranks that agreed to exit: about the rank with the suspect result, whichever ended first.

    Unchanged where they did not agree, or none reported a suspect result.
    """
    if fault.exit_code not in AGREED or not evidence.suspect_results:
        return fault
    local_rank, result = min(evidence.suspect_results.items())
    rank = next(rank for rank in evidence.ranks if rank.local_rank == local_rank)
    what = f"exited with code {fault.exit_code}: {doubt_text(result)}"
    mine = {"rank": rank.rank, "local_rank": local_rank, "pid": rank.pid, "iteration": result.iteration, "where": ""}
    return replace(fault, kind=FaultKind.EXIT, what=what, doubt=result, detail=(), hint="", collateral=False, **mine)  # type: ignore[arg-type]


def returned(ranks: Sequence[RankEvidence], stop_began: float | None) -> dict[int, float]:
    """Returns how many seconds before the stop ranks returned from their program, by rank; without those of the stop.

    A rank that ends closes its connections some 20 ms before its end is seen: the exception of a peer may come first.
    So what it says before that counts, also where the stop ended it meanwhile.
    """
    if stop_began is None:
        return {}
    ended = {rank.rank: stop_began - rank.left_at for rank in ranks if rank.left_at is not None}
    return {rank: ago_s for rank, ago_s in ended.items() if ago_s >= 0}


def with_returned(fault: Fault, ranks: Mapping[int, float]) -> Fault:
    """Returns the fault of a rank that lost a connection, with the one rank that had returned shortly before.

    Args:
        ranks: all of the job that had returned, with the seconds since. With more than one it is not known which.
    """
    is_loss = fault.collateral and fault.fault_class is not FaultClass.HANG and _RAISED_BY_TORCH.match(fault.what)
    if not is_loss or len(ranks) != 1:
        return fault
    ((rank, ago_s),) = ranks.items()
    if ago_s > _LOST_WITHIN_S:
        return fault
    if ago_s > _LOST_AT_ONCE_S:
        return replace(fault, hint=f"rank {rank} had returned {ago_s:.0f} s before: others may have needed it still")
    hint = f"rank {rank} had returned from its program, while others still needed it"
    lost = tuple(number for number in fault.failed if number != rank)
    return replace(fault, hint=hint, finding=HangKind.RETURNED.value, blamed=(rank,), waiting=len(lost))


def _order(rank: RankEvidence, first_verdict: float | None) -> tuple[float, bool, float, int]:
    """Returns by what ranks are told of: those that failed of themselves, then those that hang, then those that lost
    another when a monitor ended it.

    An error of the program is no such loss, however near to a verdict: a rank that waited for the GPU outside of any
    collective may exceed its limit while the one that it waits for is still exiting with that error.
    """
    failed_at = rank.failed_at or 0.0
    collateral = rank.collateral
    is_near = first_verdict is not None and failed_at > first_verdict - _HEARD_WITHIN_S
    lost_another = is_near and collateral > 0 and not rank.condemned
    return collateral, lost_another, failed_at, rank.rank


def _agreed_code(own: list[RankEvidence]) -> int | None:
    """Returns the exit code if all ranks that failed by themselves have the same one; else None."""
    codes = {rank.exit_code for rank in own if rank.exit_code}
    if len(codes) == 1:
        return codes.pop()
    return None


def _what(kind: FaultKind, rank: RankEvidence, blame: Blame | None) -> str:
    if rank.exception:
        raised = what_was_raised(rank.exception)
    else:
        raised = ""
    match kind:
        case FaultKind.HANG:
            return _what_hangs(rank, blame)
        case FaultKind.SIGNAL if raised:
            return f"died of {signal_name(rank.signal_number)}, after it {raised}"
        case FaultKind.SIGNAL:
            return f"died of {signal_name(rank.signal_number)}"
        case FaultKind.EXCEPTION if (rank.exit_code or 0) > 1:
            return f"{raised}, and exited with code {rank.exit_code}"
        case FaultKind.EXCEPTION:
            return raised
        case FaultKind.EXIT:
            return f"exited with code {rank.exit_code}"


def _what_hangs(rank: RankEvidence, blame: Blame | None) -> str:
    """Returns the cause first, as far as one is known, and then which limit was exceeded."""
    cause = _cause_of_hang(rank, blame)
    if cause:
        return of_cause(cause, _exceeded(rank))
    if rank.verdict is not None and rank.condemned:
        return of_cause(rank.verdict.reason, _raised_before(rank))
    return of_cause(f"it {rank.scene.activity.value}, and the others waited for it", _raised_before(rank))


def of_cause(cause: str, exceeded: str = "") -> str:
    """Returns what is said of a rank that hangs, by its cause; `exceeded`: as `Fault` has it.

    The node of the rank calls it, and the coordinator where all nodes together know more of the cause.
    """
    return f"{HANGS}{cause}{exceeded}"


def _exceeded(rank: RankEvidence) -> str:
    """Returns what is said of the limit that a rank exceeded, behind the cause of its hang."""
    verdict = rank.verdict
    if verdict is None or not rank.condemned:
        return _raised_before(rank)
    if verdict.limit == HANG:  # the reason of the verdict repeats the cause
        numbers = f", for {verdict.waited_s:.2f} s; the limit is {verdict.limit_s:g} s (hang_timeout)"
    else:
        numbers = f"; {verdict.reason}"
    return numbers + _raised_before(rank)


def _raised_before(rank: RankEvidence) -> str:
    if rank.exception is None:
        return ""
    return f", after it {what_was_raised(rank.exception)}"


def _cause_of_hang(rank: RankEvidence, blame: Blame | None) -> str:
    waiting = ""
    if blame is not None and rank.rank in blame.ranks:
        if blame.text:
            return f"it {collective.sentence(blame, rank.scene)}"
        if blame.waiting:
            waiting = collective.waiting_text(len(blame.waiting))
    if rank.was_stopped or rank.scene.activity is Activity.STOPPED:
        return f"it is stopped{waiting}"
    return ""


def _others(first: RankEvidence, ranks: Sequence[RankEvidence]) -> tuple[str, ...]:
    """Describes the end of each other rank but those that lost `first`, in this order:

    1. those without an exception, whose stacks say more;
    2. those with the same error as `first`, in one line;
    3. the others.
    """
    lost = _lost(first, ranks)
    others = [rank for rank in ranks if rank is not first and rank.rank not in lost]
    same = [rank.rank for rank in others if _is_same_error(first, rank)]
    told = [state(rank) for rank in others if rank.exception is None]
    if same:
        told.append(f"{numbered(same)} raised the same error")
    told += [state(rank) for rank in others if rank.exception is not None and rank.rank not in same]
    return tuple(told)


def _is_same_error(first: RankEvidence, other: RankEvidence) -> bool:
    if first.exception is None or other.exception is None or first.condemned or other.condemned:
        return False
    mine, others = first.exception, other.exception
    return (mine.type, digest(mine.message), place(mine.traceback)) == (
        others.type,
        digest(others.message),
        place(others.traceback),
    )


def _lost(first: RankEvidence, ranks: Sequence[RankEvidence]) -> list[int]:
    """Returns the ranks whose error is the consequence of the end of `first`; none where that one may itself have
    failed since it lost another."""
    if first.collateral == 1 and not first.condemned:
        return []
    return [rank for rank in lost_a_peer(ranks) if rank != first.rank]


def lost_a_peer(ranks: Sequence[RankEvidence]) -> list[int]:
    """Returns the ranks whose exception only says that another one is gone."""
    return [rank.rank for rank in ranks if rank.exception and known_errors.is_about_peers(rank.exception) == 1]


def in_consequence(ranks: Sequence[int]) -> tuple[str, ...]:
    """Returns a line that says of these ranks that another fault is the cause of their errors; none without ranks.

    It comes before what else is said of other ranks: the tracebacks of these stand on the console before it.
    """
    if not ranks:
        return ()
    if len(ranks) == 1:
        return (f"{numbered(ranks)} failed in consequence: its traceback is not the cause",)
    return (f"{numbered(ranks)} failed in consequence: their tracebacks are not the cause",)


def with_lost(fault: Fault, lost: Sequence[int]) -> Fault:
    """Returns a fault that the coordinator found, with the line about the ranks of this node that lost a peer.

    The coordinator does not know which ranks of a node printed errors, so that node adds the line.
    """
    return replace(fault, others=(*in_consequence([rank for rank in lost if rank != fault.rank]), *fault.others))


def what_was_raised(exception: RankException) -> str:
    """Returns the words about an exception in the headline: type, first line, and the same of an error inside it."""
    lines = exception.message.strip().splitlines() or [""]
    if exception.type == known_errors.BAD_LOSS:
        return lines[0][:200]
    raised = f"raised {exception.type}: {lines[0][:200]}"
    for inside in errors_inside(exception.message)[-1:]:
        raised += f" (the error inside: {inside.splitlines()[0][:200]})"
    return raised


def cause_of(
    rank: RankEvidence, ranks: Sequence[RankEvidence], node: NodeEvidence, blame: Blame | None = None
) -> Cause:
    """Returns class and hint of the failure of `rank`, one of `ranks`.

    An exception counts most, also when the rank hung or died of a signal after it.
    """
    if rank.exception is not None:
        cause = known_errors.of_exception(rank.exception, node)
        if cause != NO_CAUSE:
            return cause
        by_code = hints.of_exit(rank.exit_code or 0, node)
        if by_code.fault_class is FaultClass.UNKNOWN:
            return cause
        return by_code
    if rank.fault_kind is FaultKind.HANG:
        return _of_hang(rank, ranks, blame)
    if not rank.signal_number:
        return hints.of_exit(rank.exit_code or 0, node)
    # NCCL's watchdog aborts each rank of a collective that timed out.
    if len(ranks) > 1 and all(other.signal_number == signal.SIGABRT for other in ranks):
        return hints.ALL_ABORTED
    return hints.of_signal(rank.signal_number, node)


def _of_hang(rank: RankEvidence, ranks: Sequence[RankEvidence], blame: Blame | None = None) -> Cause:
    if rank.was_stopped:
        return hints.of_hang((), "T")
    scene = rank.scene
    cause = hints.of_hang(scene.frames, str((scene.process or {}).get("state", "")))
    if not cause.hint and scene.activity is Activity.LOCKED:
        return Cause(FaultClass.HANG, _IN_OWN_LOCK)
    waits = rank.collateral == 1 or (blame is not None and rank.rank in blame.waiting)
    if not cause.hint and waits and len(ranks) > 1:
        if blame is not None and blame.finding is HangKind.TRANSPORT and not blame.ranks:
            return Cause(FaultClass.HANG, blame.text)
        if blame is not None and rank.rank in blame.ranks:
            return Cause(FaultClass.HANG)
        if scene.activity is Activity.BLOCKED:
            return Cause(FaultClass.HANG, _IN_C_CODE)
        hint = "every rank that hangs here waits in a collective: they are out of step, a rank of another node"
        return Cause(FaultClass.HANG, f"{hint} is gone, or the network is")
    return cause


def _to_look_at(ranks: Sequence[RankEvidence], own: Sequence[RankEvidence]) -> str:
    """Names the ranks that others may have waited for or lost: those at an earlier iteration, else the few without a
    failure. Empty when there are none."""
    reached = {rank.rank: iteration(rank) for rank in ranks if iteration(rank) != NO_ITERATION}
    late = [f"rank {rank} at iteration {at}" for rank, at in reached.items() if at < max(reached.values())]
    if late:
        return f"; behind the others: {', '.join(late[:_MAX_NAMED])}"
    silent = [f"rank {rank.rank}" for rank in ranks if rank not in own]
    if 0 < len(silent) <= len(own):
        return f"; without an error: {', '.join(silent[:_MAX_NAMED])}"
    return ""


def _detail(kind: FaultKind, rank: RankEvidence) -> tuple[str, ...]:
    if kind is FaultKind.HANG and rank.scene.frames:
        return tuple(rank.scene.frames[:4])
    if rank.exception:
        return excerpt(rank.exception.traceback)
    return ()


def _error(kind: FaultKind, rank: RankEvidence, cause: Cause) -> str:
    """Returns type and innermost frame of an exception of the program; empty for any other failure, for instance
    an exception that only reports a lost peer."""
    if kind is not FaultKind.EXCEPTION or rank.collateral == 1 or cause.fault_class not in _OF_PROGRAM:
        return ""
    assert rank.exception is not None
    at = place(rank.exception.traceback)
    if at:
        return f"{rank.exception.type} at {at}"
    return rank.exception.type
