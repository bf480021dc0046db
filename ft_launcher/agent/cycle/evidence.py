"""Joins exit codes, monitors' findings and error files of a cycle into evidence of each rank, and reads what else is
known of its end: the program's text where ranks wait, what the node shows, and how far the training came.

Called by `agent/fault_finding.py`, and by in-process restart for one rank. What ranks wrote may be broken, and storage
may hang: errors in reading are contained here, and waits have limits. Decides nothing: `decide/attribution/` does.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ft_launcher.decide.attribution import Fault, NodeEvidence, RankEvidence, iteration
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence
from ft_launcher.decide.attribution.error_text import of_error_file, of_output
from ft_launcher.decide.attribution.first_failure import find
from ft_launcher.decide.attribution.own_lock import waits_in_own_lock
from ft_launcher.decide.attribution.rank_view import views
from ft_launcher.node.monitors.monitors import NodeMonitors
from ft_launcher.node.monitors.rank_report import RankReport
from ft_launcher.node.ranks.rank_context import ERROR_FILES_S, RankContext, RankExit
from ft_launcher.record.journal.contained import contained, log_contained
from ft_launcher.record.placement import RankNumbers
from rank_monitor.contract.wire.foreign import open_regular, read_file
from rank_monitor.contract.wire.launcher_messages import HANG
from rank_monitor.contract.wire.messages import NO_ITERATION, RankException

_T = TypeVar("_T")

_MAX_OUTPUT = 16384
"""Bytes at the end of a rank's output in which its last traceback is looked for."""
_CGROUPS = Path("/sys/fs/cgroup")
"""Where version 2 is mounted, and below it the controllers of version 1."""
_READ_TIMEOUT_S = 5.0
"""Storage that hangs must not hold up the restart."""
_TEXTS_TIMEOUT_S = 1.0
"""For the text of a program, all files together; the ranks have ended, and the restart waits for it."""
_MAX_PLACES = 4
"""One cause brings the ranks of a node to few places, and fewer to its own than to those where they wait for that."""
_MAX_TEXT = 256 << 10
"""Of a file: 6,700 lines of torch, whose tree takes 0.15 s and 11 MB for a moment."""
_MAX_DIGITS = 18
"""Of the number in a file that the training writes: they always fit into 64 bits."""


def gather(
    numbers: Sequence[RankNumbers],
    ranks: RankContext,
    monitors: NodeMonitors,
    stopped: Collection[int] = (),
    killed: Collection[int] = (),
) -> list[RankEvidence]:
    """Returns the evidence of the ranks with these numbers, in the same order.

    Args:
        stopped: local ranks whose process was found stopped (SIGSTOP, a debugger) when the cycle failed.
        killed: pids that the stop had to kill.
    """
    pids = ranks.pids()
    evidence = []
    for each in numbers:
        local_rank = each.local_rank
        report, end = monitors.report(local_rank), ranks.exits.get(local_rank)
        exception, exception_at = report.exception, report.exception_at
        # A rank under --no-python has no client of ours, and one whose monitor died reported to nobody.
        if exception is None and end is not None and end.exit_code:
            with contained(f"what rank {each.rank} wrote of its error cannot be read"):
                exception, exception_at = _written(ranks, local_rank, end, report)
        if exception is None:
            exception, exception_at = report.untold(), report.failed_at
        evidence.append(
            RankEvidence(
                rank=each.rank,
                local_rank=local_rank,
                pid=pids[local_rank],
                exit_code=end.exit_code if end else None,
                died_at=end.at if end else None,
                verdict=report.verdict,
                verdict_at=report.verdict_at,
                exception=exception,
                exception_at=exception_at,
                snapshot=report.snapshot,
                was_stopped=local_rank in stopped,
                killed_by_us=pids[local_rank] in killed,
                returned_at=report.returned_at,
            )
        )
    return evidence


def ended_by_hang_timeout(rank: RankEvidence) -> bool:
    """Returns whether this node has ended the rank for a hang, by `hang_timeout`."""
    return rank.condemned and rank.verdict is not None and rank.verdict.limit == HANG


def as_decided(ranks: Sequence[RankEvidence], monitors: NodeMonitors, stood_still: bool = False) -> list[RankEvidence]:
    """Returns the ranks; where this node has ended one of them by `hang_timeout`, all are as they were at the look by
    which that was decided. Where another node has (`stood_still`), those that stood still are as they were at the last
    look, which that node had asked for.

    The end of that rank breaks the connections of the others. Until the stop asks them they may have ended, or be on
    their way out, and what they show then is a consequence of the decision.
    """
    is_own = any(ended_by_hang_timeout(rank) for rank in ranks)
    if not is_own and not stood_still:
        return list(ranks)
    found = []
    for rank in ranks:
        if is_own:
            seen = monitors.report(rank.local_rank).at_decision
        else:
            seen = monitors.stood_still(rank.local_rank)
        if seen is None or not seen.process:  # its monitor gave no stacks in time
            found.append(rank)
            continue
        last = rank.snapshot or seen
        snapshot = replace(last, frames=seen.frames, process=seen.process, groups=seen.groups)
        found.append(replace(rank, snapshot=snapshot))
    return found


def fault_in(evidence: CycleEvidence) -> Fault | None:
    """As `first_failure.find`; an error in what the ranks wrote is logged."""
    return find(evidence, partial(log_contained, "what the ranks wrote of the fault cannot be used"))


def _written(
    ranks: RankContext, local_rank: int, end: RankExit, report: RankReport
) -> tuple[RankException | None, float | None]:
    """Returns the error that an ended rank left in a file, and its moment. Once found it is not read again."""
    known = ranks.errors.get(local_rank)
    if known is not None:
        return known
    exception, moment = _in_file(ranks, Path(ranks.error_files[local_rank]))
    # A rank that a signal ended has printed no traceback of its own: the last one is of something else.
    if exception is None and end.exit_code > 0:
        exception, moment = _printed(ranks, end, report.last_output, ranks.stderrs[local_rank])
        if exception is not None:
            exception = replace(exception, before_group=report.before_group)
    if exception is not None:
        ranks.errors[local_rank] = exception, moment
    return exception, moment


def _printed(
    ranks: RankContext, end: RankExit, last_output: str, path: str
) -> tuple[RankException | None, float | None]:
    """Returns the last error that a rank printed, as it reported it or from its stderr file, and when it ended."""
    exception = of_output(last_output)
    if exception is None:
        with suppress(OSError):
            content = ranks.files.call(partial(read_file, path, _MAX_OUTPUT, tail=True), ERROR_FILES_S)
            exception = of_output(content.decode(errors="replace"))
    if exception is None:
        return (None, None)
    return (exception, end.at)


def _in_file(ranks: RankContext, path: Path) -> tuple[RankException | None, float | None]:
    """Returns the exception in torch's error file, and when that was written (monotonic seconds)."""
    try:
        # In the thread of files: the folder of logs or temporary files may not answer.
        written_at, content = ranks.files.call(lambda: (path.stat().st_mtime, read_file(path)), ERROR_FILES_S)
    except OSError:
        return None, None
    # The file has wall-clock time; all other moments of a fault are monotonic.
    age_s = max(0.0, time.time() - written_at)
    exception = of_error_file(content)
    if exception is None:
        return (None, None)
    return (exception, time.monotonic() - age_s)


# The program's text at the lines where ranks wait. What cannot be read in time leaves unknown what it would have shown.


def with_own_locks(ranks: Sequence[RankEvidence], stop_began: float, ran_s: float) -> list[RankEvidence]:
    """Returns the ranks, those that certainly wait for locks of their own marked. Waits for files, one second at most.

    Args:
        stop_began: when the launcher began to stop the ranks (monotonic seconds).
        ran_s: seconds since they were started. A file that has changed in this time may not be the text that runs.
    """
    found = list(ranks)
    with contained("the program's text at the lines where ranks wait cannot be used"):
        asked = {
            number: (str((rank.scene.process or {}).get("file", "")), rank.scene.frames[0])
            for number, (rank, view) in enumerate(zip(ranks, views(ranks, stop_began), strict=True))
            if view.may_wait and rank.scene.others_are_idle
        }
        # A relative path was relative to where the rank was when it read the file.
        counted = Counter(place for place in asked.values() if place[0].startswith("/"))
        places = sorted(counted, key=lambda place: (counted[place], place))[:_MAX_PLACES]
        texts: dict[str, str] = {}
        if places:
            files = list(dict.fromkeys(path for path, _ in places))
            call_within(_TEXTS_TIMEOUT_S, partial(_read_texts, files, ran_s, texts), "ft_source_lines")
        in_lock = {place for place in places if waits_in_own_lock(texts.get(place[0], ""), place[1])}
        for number, place in asked.items():
            if place in in_lock:
                found[number] = replace(ranks[number], in_own_lock=True)
    return found


def _read_texts(files: Sequence[str], ran_s: float, texts: dict[str, str]) -> None:
    for path in files:
        with suppress(OSError, UnicodeDecodeError), open_regular(path, follow_link=True) as file:
            status = os.fstat(file.fileno())
            age_s = time.time() - max(status.st_mtime, status.st_ctime)
            if age_s > ran_s and status.st_size <= _MAX_TEXT:
                texts[path] = file.read(_MAX_TEXT).decode("utf-8-sig")


# What the node shows. What cannot be read is None.


def oom_kills() -> int | None:
    """Returns how many processes of this process' cgroup were killed for lack of memory so far (v2, else v1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # `HIERARCHY:CONTROLLERS:PATH`, cgroups(7). The line of version 2 has no controllers.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            counter = _CGROUPS / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            counter = _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        found = _read_counter(counter)
        if found is not None:
            return found
    return None


def _read_counter(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            # The same name in memory.events (version 2) and in memory.oom_control (version 1).
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def of_node(oom_kills_before: int | None) -> NodeEvidence:
    """Returns the evidence of this node; `oom_kills_before` is an earlier reading of `oom_kills`."""
    now = oom_kills()
    try:
        shm = os.statvfs("/dev/shm")
        # `f_bavail` and not `f_bfree`: what a user without privileges can still write.
        shm_free: int | None = shm.f_bavail * shm.f_frsize
    except OSError:
        shm_free = None
    kills = None
    if now is not None and oom_kills_before is not None:
        kills = now - oom_kills_before
    return NodeEvidence(oom_kills=kills, shm_free=shm_free)


# How far the training came.


def iteration_reached(evidence: Iterable[RankEvidence], checkpoint_iteration_file: str | None) -> int | None:
    """Returns the iteration that a cycle reached; NO_ITERATION when its ranks reported none.

    Args:
        evidence: of its ranks.
        checkpoint_iteration_file: where the training writes its last saved iteration. If given, it alone counts.

    Returns:
        None when the file could not be read, or a monitor did not answer and no other rank reported an iteration.
    """
    if checkpoint_iteration_file is not None:
        return iteration_in_file(Path(checkpoint_iteration_file))
    ranks = list(evidence)
    highest = max(map(iteration, ranks), default=NO_ITERATION)
    if highest != NO_ITERATION or all(rank.snapshot for rank in ranks):
        return highest
    return None


def iteration_in_file(path: Path, timeout_s: float = _READ_TIMEOUT_S) -> int | None:
    """Returns the whole number in a file; None when it contains none, or cannot be read in `timeout_s` seconds."""

    def read() -> int | None:
        with suppress(OSError):
            text = read_file(path, follow_link=True).strip()
            if text.isdigit() and len(text) <= _MAX_DIGITS:
                return int(text)
        return None

    return call_within(timeout_s, read, "ft_checkpoint_iteration")


def call_within(timeout_s: float, function: Callable[[], _T], name: str) -> _T | None:
    """Returns what `function` returns in a thread called `name`; None: it has not ended in time, and goes on there.

    So what may hang for ever is called, as reading a file of storage that is gone: nobody joins its thread.
    """
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True, name=name)
    thread.start()
    thread.join(timeout_s)
    if found:
        return found[0]
    return None
