"""Finds, among the ranks of a node, the rank that failed first, and says what its failure was. Pure.

One rank that dies takes all others with it: within milliseconds each of them reports a lost connection, a timeout or an
abort. Sorting by time alone would name any of them. `attribute` goes through these steps:

1. Leave out what is no cause: what a rank did after the launcher began to stop it (`RankEvidence.failed_by_itself`).
2. Of the remaining failures take the first one that is not the consequence of another rank's (`_order`).
3. Where that failure is a wait (a limit exceeded, NCCL's timeout), look for the rank that was awaited
   (`collective.py`): the fault is that rank's, although it shows no failure itself.
4. Put kind, class, text, hint and the lines about the other ranks into a `Fault`.

`agent/fault_finding.py` calls `find_fault` once after each failed cycle, when all ranks have ended;
`agent/in_process/in_process.py` after the death of a rank that level 1 handles. `ft_launcher replay` calls it again
with the evidence from the journal. On several nodes the coordinator may correct the result by what all nodes saw
(`decide/policy/job_policy.py`).
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
from ft_launcher.decide.attribution.error_text import excerpt, location
from ft_launcher.decide.attribution.fault import (
    HANGS,
    NO_CAUSE,
    Cause,
    Fault,
    FaultClass,
    FaultKind,
    HangFinding,
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

_MAX_NAMED = 4
"""Ranks that a hint names. The hint is one line on the console, and a node can have many ranks."""
_RECEIVED_WITHIN_S = 1.0
"""Seconds by which the exception of a peer may be received before the verdict of the rank that the peer lost. Both are
sent within milliseconds; on a busy machine the agent reads them together, in any order."""
_IN_C_CODE = (
    "a call of C code that waits for another thread: torch's work.wait() of a send, a receive or a collective, or a "
    "lock of the program"
)
_IN_OWN_LOCK = "it waits for a lock of its own program, and no other thread of it is at work"
_LOST_AT_ONCE_S = 2.0
"""A connection lost within so many seconds after another rank returned is taken as the connection to that rank. The
other ranks wait for it already, or reach a collective with it soon; the rest is what a busy machine needs until the
launcher sees the first end."""
_LOST_WITHIN_S = 60.0
"""Seconds after a return within which a hint mentions it. A rank notices a lost peer when it next waits for that peer:
within one step, which takes a minute at most. Later the lost rank may be a third one, since in some programs ranks
return at different times."""
_RAISED_BY_TORCH = re.compile(r"raised (RuntimeError|(torch\.distributed\.)?Dist\w{0,40}Error): ")
"""The begin of the text of `_what` for an exception of torch's groups and stores. Libraries that lose a connection to a
service raise types of their own, or Python's OSError, and say nothing about a lost rank."""
_OF_PROGRAM = {FaultClass.USER_ERROR, FaultClass.MEMORY, FaultClass.UNKNOWN}
"""Classes of exceptions that may be raised again wherever the program runs. Only these get `Fault.error`, by which the
restart policy counts the same error in a row."""


def find_fault(evidence: CycleEvidence, on_error: Callable[[Exception], object]) -> Fault | None:
    """Returns the fault of the rank that failed first; None when no rank failed. Never fails because of a rank's text.

    Ranks write most of the evidence, so any of it may be malformed in a way that nobody foresaw. Then `find_fault`
    tries once more without everything that ranks wrote: exit codes and verdicts alone decide.

    Args:
        on_error: called with the exception of the first try, before the second.
    """
    try:
        return attribute(evidence)
    except Exception as error:
        on_error(error)
    return attribute(evidence.without_texts())


def attribute(evidence: CycleEvidence) -> Fault | None:
    """Does what `find_fault` does, but raises an error that the ranks' texts cause."""
    fault = _of_first(evidence) or evidence.otherwise
    if fault is None:
        return None
    fault = _about_suspect_result(fault, evidence)
    return replace(fault, hint=evidence.on_purpose.get(fault.local_rank, fault.hint))


def _of_first(evidence: CycleEvidence) -> Fault | None:
    """Returns the fault of the rank that failed first, without a suspect result or an injected fault in it; None when
    no rank failed by itself."""
    stop_began, node = evidence.stop_began, evidence.node
    ranks = [rank.by_itself(stop_began) for rank in evidence.ranks]
    own = [rank for rank in ranks if rank.failed_by_itself(stop_began)]
    failed = earliest(ranks, stop_began)
    if failed is None:
        return None
    finding: HangFinding | None = None
    views: list[RankView] = []
    if failed.fault_kind is FaultKind.HANG or cause_of(failed, ranks, node).fault_class is FaultClass.HANG:
        views = rank_view.views(ranks, stop_began)
        finding = _hang_finding(failed, ranks, views, evidence)
    first, kind = failed, failed.fault_kind
    # Several culprits (a deadlock, a mismatch): the fault is about the one that failed first by itself, if it is one of
    # them, since its verdict says most.
    if finding is not None and failed.rank not in finding.culprits:
        first = next((rank for rank in ranks if rank.rank in finding.culprits), failed)
    if finding is not None and first.rank in finding.culprits:
        kind, cause = FaultKind.HANG, _of_hang(first, ranks, finding)
    else:
        cause = cause_of(first, ranks, node, finding)
    hint = cause.hint
    # TRANSPORT: all ranks are in one collective, so no rank is missing that the hint could point to.
    is_transport = finding is not None and finding.kind is HangKind.TRANSPORT
    if hint and first.consequence_score == 1 and not is_transport:
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
        what=_what(kind, first, finding),
        where=where(first),
        hint=hint,
        iteration=iteration(first),
        limit=failed.verdict.limit if failed.verdict else "",
        learned_limit=bool(failed.verdict and failed.verdict.learned),
        detail=_detail(kind, first),
        others=(*in_consequence(_lost(first, ranks)), *_others(first, ranks)),
        agreed_exit_code=_agreed_code([rank for rank in own if rank.consequence_score < 1] or own),
        error=error,
        error_text=text,
        before_group=before_group,
        collateral=first.consequence_score == 1,
        fault_class=cause.fault_class,
        failed=tuple(sorted({first.rank, *(rank.rank for rank in own)})),
        exceeded=exceeded,
    )
    if finding is None:
        if evidence.all_ranks:
            return with_returned(fault, returned(ranks, stop_began))
        return fault
    # The recorder may show a wait although the stack is in the program: the rank waits for its GPU in `loss.item()`.
    collateral = fault.collateral or first.rank in finding.waiting
    if is_transport and first.rank in finding.culprits:
        collateral = False  # NCCL gave this rank up: it is the cause, although it is in the collective like the others
    if finding.kind is not HangKind.UNKNOWN:
        # For ranks that are stopped now, the lines show the stacks that their monitors took before.
        seen = [replace(view, scene=rank.scene) for view, rank in zip(views, ranks, strict=True)]
        places = rank_view.others(seen, first.rank)
        fault = replace(fault, others=(*in_consequence(_lost(first, ranks)), *places))
    waiting = len(finding.waiting)
    return replace(fault, collateral=collateral, finding=finding.kind.value, blamed=finding.culprits, waiting=waiting)


def earliest(ranks: Sequence[RankEvidence], stop_began: float | None = None) -> RankEvidence | None:
    """Returns the rank that failed first and by itself; None: no rank did. `triage.py` asks this before the stop.

    Args:
        stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
    """
    own = [rank for rank in ranks if rank.failed_by_itself(stop_began)]
    order = partial(_order, first_verdict=rank_view.first_verdict(ranks))
    return min(own, key=order, default=None)


def began(fault: Fault, ranks: Sequence[RankEvidence]) -> float | None:
    """Returns when a fault of one of these ranks began (monotonic seconds); None: it is not known.

    A hang began when the wait began that exceeded a limit. For a hang that no monitor saw, 0.0 is returned: the ledger
    then counts from the last progress on. Any other fault began with the first sign of a failure in any rank: the
    kernel closes the connections of a killed rank before it reports the death, so another rank may have failed by then.
    """
    failed = next((rank for rank in ranks if rank.local_rank == fault.local_rank), None)
    if failed is None:
        return None
    if failed.verdict is not None and failed.verdict.condemned and failed.verdict_at is not None:
        return failed.verdict_at - failed.verdict.waited_s
    if fault.kind is FaultKind.HANG or fault.fault_class is FaultClass.HANG:
        return 0.0
    signs = [rank.failed_at for rank in ranks]
    return min((at for at in signs if at is not None), default=None)


def _hang_finding(
    failed: RankEvidence, ranks: Sequence[RankEvidence], views: Sequence[RankView], evidence: CycleEvidence
) -> HangFinding | None:
    """Returns who holds up the ranks after a hang; None where `failed` hung by itself and did not wait for a rank.

    The culprit of a hang shows no failure: the limits of the ranks that wait for it pass first. Stopped ranks are
    handled apart: the launcher finds them stopped after the monitors have taken their stacks.

    Args:
        failed: the rank that failed first by itself.
        views: of all `ranks`, in the same order.
    """
    finding = collective.find_culprits(views, evidence.all_ranks)
    stopped = [rank for rank in ranks if rank.was_stopped]
    named = [rank for rank in stopped if finding.kind is HangKind.GONE and rank.rank in finding.culprits]
    if named:
        culprit = named[0]
        if failed in named:
            culprit = failed
        waiting = tuple(rank.rank for rank in ranks if rank not in stopped)
        return HangFinding(HangKind.GONE, (culprit.rank,), "", waiting)
    if failed.consequence_score < 1 and failed.rank not in (*finding.culprits, *finding.waiting):
        # `failed` exceeded its limit outside of any collective, and by the finding it neither waits nor holds up
        # others. That another rank is behind at this moment may mean nothing: some rank is behind at any moment.
        if not (evidence.all_ranks and failed.condemned and finding.kind is HangKind.UNKNOWN):
            return None
        inside = collective.all_inside(views)
        if inside is None:
            return None
        finding = inside
    if evidence.nccl is None:
        return finding
    answered_at = evidence.nccl.answered_at
    ended = [rank.rank for rank in ranks if rank.died_at is not None and rank.died_at <= answered_at]
    return nccl_view.refined(finding, [evidence.nccl], {rank.rank: rank.pid for rank in ranks}, ended=ended)


def _about_suspect_result(fault: Fault, evidence: CycleEvidence) -> Fault:
    """Returns `fault`, about the rank with the suspect result where all ranks agreed to exit because of one.

    After a suspect result (docs/rerun.md) all ranks exit with the same code, 16 or 17. Whichever process ended first is
    no culprit. `fault` is returned unchanged where its exit code is another one, or no rank reported such a result.
    """
    if fault.exit_code not in AGREED or not evidence.suspect_results:
        return fault
    local_rank, result = min(evidence.suspect_results.items())
    rank = next(rank for rank in evidence.ranks if rank.local_rank == local_rank)
    what = f"exited with code {fault.exit_code}: {doubt_text(result)}"
    mine = {"rank": rank.rank, "local_rank": local_rank, "pid": rank.pid, "iteration": result.iteration, "where": ""}
    return replace(fault, kind=FaultKind.EXIT, what=what, doubt=result, detail=(), hint="", collateral=False, **mine)  # type: ignore[arg-type]


def returned(ranks: Sequence[RankEvidence], stop_began: float | None) -> dict[int, float]:
    """Returns, for each rank that returned from its program before the stop, how many seconds before; by global rank.

    `left_at` counts, and not the end of the process: a rank that ends closes its connections some 20 ms before its end
    is seen, so the exception of a peer may come first, and the stop may end the rank meanwhile.
    """
    if stop_began is None:
        return {}
    ended = {rank.rank: stop_began - rank.left_at for rank in ranks if rank.left_at is not None}
    return {rank: ago_s for rank, ago_s in ended.items() if ago_s >= 0}


def with_returned(fault: Fault, ranks: Mapping[int, float]) -> Fault:
    """Returns `fault`, with the rank that had returned as its culprit where `fault` is a lost connection to it.

    A rank that returns too early closes its connections like one that died, but with exit code 0 and no error. Within
    2 s of the return the rank is named; within a minute only the hint mentions it. Called for a job of one node by
    `_of_first`, and for all nodes by `decide/policy/job_policy.py`.

    Args:
        ranks: seconds since the return, by global rank, of all ranks of the job that had returned. With more than one
            it is not known which of them was lost, and `fault` is returned unchanged.
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
    """Returns the sort key by which the first failure is found; the lowest key is the most likely cause.

    1. `consequence_score`: a rank's own failure (0), then what may be (0.5) or is (1) the consequence of another
       rank's. A rank that hangs in a collective counts as 1.
    2. Among equals: failures that are not a loss caused by a monitor's kill, then those that are. Such a loss is an
       error about a peer, at most a second before the first verdict or later.
    3. The time of the first sign, then the rank.

    An error of the program (0) is never such a loss, however near to a verdict: a rank that waits for its GPU outside
    of any collective may exceed its limit while the rank that it waits for is still exiting with that error.

    Args:
        first_verdict: when the first rank was condemned (monotonic seconds); None: none was.
    """
    failed_at = rank.failed_at or 0.0
    score = rank.consequence_score
    is_near = first_verdict is not None and failed_at > first_verdict - _RECEIVED_WITHIN_S
    lost_another = is_near and score > 0 and not rank.condemned
    return score, lost_another, failed_at, rank.rank


def _agreed_code(own: list[RankEvidence]) -> int | None:
    """Returns the exit code that all ranks which failed by themselves have in common; None: they have several, or none.

    The launcher may pass a common code on as its own (`--ft-exit-code`).
    """
    codes = {rank.exit_code for rank in own if rank.exit_code}
    if len(codes) == 1:
        return codes.pop()
    return None


def _what(kind: FaultKind, rank: RankEvidence, finding: HangFinding | None) -> str:
    """Returns what the rank did, without the subject: the headline of the fault puts `rank N on NODE` before it."""
    if rank.exception:
        raised = what_was_raised(rank.exception)
    else:
        raised = ""
    match kind:
        case FaultKind.HANG:
            return _what_hangs(rank, finding)
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


def _what_hangs(rank: RankEvidence, finding: HangFinding | None) -> str:
    """Returns the text of a hang: the cause first, as far as one is known, then which limit was exceeded."""
    cause = _cause_of_hang(rank, finding)
    if cause:
        return of_cause(cause, _exceeded(rank))
    if rank.verdict is not None and rank.condemned:
        return of_cause(rank.verdict.reason, _raised_before(rank))
    return of_cause(f"it {rank.scene.activity.value}, and the others waited for it", _raised_before(rank))


def of_cause(cause: str, exceeded: str = "") -> str:
    """Returns the text of a rank that hangs: `hangs: CAUSE`, then which limit was exceeded (`Fault.exceeded`).

    Called on the node of the rank, and by the coordinator where all nodes together know more of the cause.
    """
    return f"{HANGS}{cause}{exceeded}"


def _exceeded(rank: RankEvidence) -> str:
    """Returns the text about the limit that a rank exceeded, which follows the cause of its hang."""
    verdict = rank.verdict
    if verdict is None or not rank.condemned:
        return _raised_before(rank)
    if verdict.limit == HANG:  # the verdict's own reason would repeat the cause: `hang_clocks.py` made both
        numbers = f", for {verdict.waited_s:.2f} s; the limit is {verdict.limit_s:g} s (hang_timeout)"
    else:
        numbers = f"; {verdict.reason}"
    return numbers + _raised_before(rank)


def _raised_before(rank: RankEvidence) -> str:
    """Returns the text about an exception that the rank raised before it hung; empty: it raised none."""
    if rank.exception is None:
        return ""
    return f", after it {what_was_raised(rank.exception)}"


def _cause_of_hang(rank: RankEvidence, finding: HangFinding | None) -> str:
    """Returns the cause of a hang that the finding or the state of the process gives; empty: none."""
    waiting = ""
    if finding is not None and rank.rank in finding.culprits:
        if finding.text:
            return f"it {collective.sentence(finding, rank.scene)}"
        if finding.waiting:
            waiting = collective.waiting_text(len(finding.waiting))
    if rank.was_stopped or rank.scene.activity is Activity.STOPPED:
        return f"it is stopped{waiting}"
    return ""


def _others(first: RankEvidence, ranks: Sequence[RankEvidence]) -> tuple[str, ...]:
    """Returns lines about the other ranks, without the ranks that only lost `first`, in this order:

    1. ranks without an exception: where their stacks were explains most;
    2. one line for all ranks with the same error as `first`;
    3. ranks with another exception.
    """
    lost = _lost(first, ranks)
    others = [rank for rank in ranks if rank is not first and rank.rank not in lost]
    same = [rank.rank for rank in others if _is_same_error(first, rank)]
    lines = [state(rank) for rank in others if rank.exception is None]
    if same:
        lines.append(f"{numbered(same)} raised the same error")
    lines += [state(rank) for rank in others if rank.exception is not None and rank.rank not in same]
    return tuple(lines)


def _is_same_error(first: RankEvidence, other: RankEvidence) -> bool:
    """Returns whether two ranks raised an exception of the same type and text at the same line, and neither hung."""
    if first.exception is None or other.exception is None or first.condemned or other.condemned:
        return False
    mine, others = first.exception, other.exception
    return (mine.type, digest(mine.message), location(mine.traceback)) == (
        others.type,
        digest(others.message),
        location(others.traceback),
    )


def _lost(first: RankEvidence, ranks: Sequence[RankEvidence]) -> list[int]:
    """Returns the ranks whose error is the consequence of the end of `first`. Empty where `first` may itself have
    failed because it lost another rank: then nothing says which rank the others lost."""
    if first.consequence_score == 1 and not first.condemned:
        return []
    return [rank for rank in lost_a_peer(ranks) if rank != first.rank]


def lost_a_peer(ranks: Sequence[RankEvidence]) -> list[int]:
    """Returns the ranks whose exception certainly only says that another rank is gone."""
    return [rank.rank for rank in ranks if rank.exception and known_errors.is_about_peers(rank.exception) == 1]


def in_consequence(ranks: Sequence[int]) -> tuple[str, ...]:
    """Returns one line that says of these ranks that their errors are a consequence; empty without ranks.

    The line comes before all other lines about other ranks. The reader has just seen the tracebacks of these ranks on
    the console, and would take one of them for the cause.
    """
    if not ranks:
        return ()
    if len(ranks) == 1:
        return (f"{numbered(ranks)} failed in consequence: its traceback is not the cause",)
    return (f"{numbered(ranks)} failed in consequence: their tracebacks are not the cause",)


def with_lost(fault: Fault, lost: Sequence[int]) -> Fault:
    """Returns a fault that the coordinator found, with the line about ranks of this node that only lost a peer.

    Each node adds the line for itself: the coordinator does not know which ranks of a node printed errors.

    Args:
        lost: ranks of this node by `lost_a_peer`.
    """
    return replace(fault, others=(*in_consequence([rank for rank in lost if rank != fault.rank]), *fault.others))


def what_was_raised(exception: RankException) -> str:
    """Returns the text about an exception in the headline: its type and first line, then the same of the last error
    whose traceback its message contains (a data loader's worker, a child process)."""
    lines = exception.message.strip().splitlines() or [""]
    if exception.type == known_errors.BAD_LOSS:
        return lines[0][:200]
    raised = f"raised {exception.type}: {lines[0][:200]}"
    for inside in errors_inside(exception.message)[-1:]:
        raised += f" (the error inside: {inside.splitlines()[0][:200]})"
    return raised


def cause_of(
    rank: RankEvidence, ranks: Sequence[RankEvidence], node: NodeEvidence, finding: HangFinding | None = None
) -> Cause:
    """Returns class and hint of the failure of `rank`, one of `ranks`.

    An exception decides first, also when the rank hung or died of a signal afterwards: it is the earliest error that
    the rank knew. Without one, the kind of the end decides: a hang by stacks, a signal, an exit code.
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
        return _of_hang(rank, ranks, finding)
    if not rank.signal_number:
        return hints.of_exit(rank.exit_code or 0, node)
    # NCCL's watchdog aborts each rank of a collective that timed out, so SIGABRT of all ranks is one hang.
    if len(ranks) > 1 and all(other.signal_number == signal.SIGABRT for other in ranks):
        return hints.ALL_ABORTED
    return hints.of_signal(rank.signal_number, node)


def _of_hang(rank: RankEvidence, ranks: Sequence[RankEvidence], finding: HangFinding | None = None) -> Cause:
    """Returns class and hint of a hang: by the stack of the rank, else by what the finding says of all ranks."""
    if rank.was_stopped:
        return hints.of_hang((), "T")
    scene = rank.scene
    cause = hints.of_hang(scene.frames, str((scene.process or {}).get("state", "")))
    if not cause.hint and scene.activity is Activity.LOCKED:
        return Cause(FaultClass.HANG, _IN_OWN_LOCK)
    waits = rank.consequence_score == 1 or (finding is not None and rank.rank in finding.waiting)
    if not cause.hint and waits and len(ranks) > 1:
        if finding is not None and finding.kind is HangKind.TRANSPORT and not finding.culprits:
            return Cause(FaultClass.HANG, finding.text)
        if finding is not None and rank.rank in finding.culprits:
            return Cause(FaultClass.HANG)
        if scene.activity is Activity.BLOCKED:
            return Cause(FaultClass.HANG, _IN_C_CODE)
        hint = "every rank that hangs here waits in a collective: they are out of step, a rank of another node"
        return Cause(FaultClass.HANG, f"{hint} is gone, or the network is")
    return cause


def _to_look_at(ranks: Sequence[RankEvidence], own: Sequence[RankEvidence]) -> str:
    """Returns the end of a hint: which ranks the others may have waited for or lost.

    These are the ranks at an earlier iteration than the last. Where all are at the same one: the ranks without a
    failure, if they are no more than the failed ones. Empty when there are none.

    Args:
        own: the ranks that failed by themselves.
    """
    reached = {rank.rank: iteration(rank) for rank in ranks if iteration(rank) != NO_ITERATION}
    late = [f"rank {rank} at iteration {at}" for rank, at in reached.items() if at < max(reached.values())]
    if late:
        return f"; behind the others: {', '.join(late[:_MAX_NAMED])}"
    silent = [f"rank {rank.rank}" for rank in ranks if rank not in own]
    if 0 < len(silent) <= len(own):
        return f"; without an error: {', '.join(silent[:_MAX_NAMED])}"
    return ""


def _detail(kind: FaultKind, rank: RankEvidence) -> tuple[str, ...]:
    """Returns the lines below the headline: the innermost frames of a hang, else the best lines of the traceback."""
    if kind is FaultKind.HANG and rank.scene.frames:
        return tuple(rank.scene.frames[:4])
    if rank.exception:
        return excerpt(rank.exception.traceback)
    return ()


def _error(kind: FaultKind, rank: RankEvidence, cause: Cause) -> str:
    """Returns `TYPE at FILE:LINE` of an exception of the program, by which the restart policy knows the same error
    again. Empty for each other failure, for instance an exception that only reports a lost peer."""
    if kind is not FaultKind.EXCEPTION or rank.consequence_score == 1 or cause.fault_class not in _OF_PROGRAM:
        return ""
    assert rank.exception is not None
    at = location(rank.exception.traceback)
    if at:
        return f"{rank.exception.type} at {at}"
    return rank.exception.type
