"""Gathers the evidence of a cycle, for the attribution: what ranks and node show. Reads, and decides nothing.

- `gather`: of each rank its exit code, what its monitor reported, and the error that it left in a file. Called by
  `agent/fault_finding.py` at the end of a cycle, by in-process restart, and while ranks run by `agent/hang_watch.py`,
  `agent/hang_warnings.py` and the status page.
- `as_decided`: the same, with the stacks from before a rank was ended by `--ft-hang-timeout`. For `fault_finding.py`.
- `with_own_locks`: the same, with the ranks marked that wait for a lock of their own program. For `fault_finding.py`,
  `hang_watch.py` and `agent/in_process/culprit_exchange.py`.
- `oom_kills`, `of_node`: kills for lack of memory, and room in /dev/shm. `Ranks.prepare` and in-process restart read
  the number of kills before ranks run; `fault_finding.py` and in-process restart compare it after a failure.
- `iteration_reached`: how far the training came. For `fault_finding.py`.

Threads: the agent's calls all of it. `with_own_locks` is also called by `ft_culprit` of `culprit_exchange.py`; it
touches nothing but its arguments and files.

What ranks wrote may be broken, and storage may hang. So errors in reading are contained here, and each wait for a file
has a limit.
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

from ft_launcher.decide.attribution import NodeEvidence, RankEvidence, iteration
from ft_launcher.decide.attribution.error_text import of_error_file, of_output
from ft_launcher.decide.attribution.own_lock import waits_in_own_lock
from ft_launcher.decide.attribution.rank_view import views
from ft_launcher.node.monitors.monitors import NodeMonitors
from ft_launcher.node.monitors.rank_report import RankReport
from ft_launcher.node.ranks.rank_context import ERROR_FILES_S, RankContext, RankExit
from ft_launcher.record.journal.contained import contained, log_contained
from ft_launcher.record.placement import RankNumbers
from rank_monitor.contract.processes.cgroup import oom_kills
from rank_monitor.contract.wire.foreign import open_regular, read_file
from rank_monitor.contract.wire.launcher_messages import HANG, Snapshot
from rank_monitor.contract.wire.messages import NO_ITERATION, RankException

_T = TypeVar("_T")

_MAX_OUTPUT = 16384
"""Bytes at the end of a rank's output in which its last traceback is looked for."""
_READ_TIMEOUT_S = 5.0
"""Seconds for the file with the saved iteration: storage that hangs must not hold up the restart."""
_TEXTS_TIMEOUT_S = 1.0
"""Seconds for the program's text, all files together: the ranks have ended, and the restart waits for it."""
_MAX_PLACES = 4
"""Source lines that are looked up. One cause brings the ranks of a node to few lines: the rarest are looked up first,
since fewer ranks are at the cause than wait for it."""
_MAX_TEXT = 256 << 10
"""Bytes of one source file. A file of torch with 6,700 lines has so much; to parse it takes 0.15 s, and 11 MB for a
moment."""
_MAX_DIGITS = 18
"""Digits of the number in a file that the training writes: 18 digits always fit into 64 bits."""


def gather(
    numbers: Sequence[RankNumbers],
    ranks: RankContext,
    monitors: NodeMonitors,
    stopped: Collection[int] = (),
    killed: Collection[int] = (),
) -> list[RankEvidence]:
    """Returns the evidence of the ranks with these numbers, in the same order.

    The best source of an exception wins: the rank's own report to its monitor, then torch's error file, then the last
    traceback in the rank's output. Waits `ERROR_FILES_S` at most for each file of a rank that has ended with an error.

    Args:
        numbers: of the ranks.
        ranks: their processes.
        monitors: of this node.
        stopped: local ranks whose process was found stopped (SIGSTOP, a debugger) when the cycle failed.
        killed: pids that the stop had to kill.
    """
    pids = ranks.pids()
    evidence = []
    for each in numbers:
        local_rank = each.local_rank
        report, end = monitors.report(local_rank), ranks.exits.get(local_rank)
        exception, exception_at = report.exception, report.exception_at
        # A rank under --no-python has no client that reports, and a rank whose monitor died reported to nobody.
        if exception is None and end is not None and end.exit_code:
            with contained(f"what rank {each.rank} wrote of its error cannot be read"):
                exception, exception_at = _written(ranks, local_rank, end, report)
        if exception is None:
            exception, exception_at = report.incomplete_exception(), report.failed_at
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
    """Returns the evidence with the stacks from before a rank was ended by `--ft-hang-timeout`.

    The end of that rank breaks the connections of the other ranks. What these show afterwards is a consequence of the
    end, and says nothing about the hang. So two cases are mended:
    - This node has ended a rank: all ranks are as they were at the check that decided it.
      A rank that held the GIL gave no stack at that check, but may give one right before the stop. If it still
      computes then, it has not noticed the end of the other rank, and the stack counts.
    - Another node has ended a rank (`stood_still`): the ranks that stood still are as they were at the last check. When
      the other node ended its rank is not known here. So a return from the program after that check does not count
      either: the rank's wait had failed.

    Args:
        ranks: the evidence after the stop.
        monitors: of this node, which keep the earlier snapshots.
        stood_still: whether another node has ended a rank for the hang.
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
        if seen is None or not seen.process:  # The monitor gave no stacks in time.
            found.append(rank)
            continue
        last = rank.snapshot or seen
        frames, process = seen.frames, dict(seen.process)
        if last.process.get("signalled") is True:
            process["signalled"] = True
        if _computed_on(seen, last):
            frames, process = last.frames, last.process
        snapshot = replace(last, frames=frames, process=process, groups=seen.groups)
        as_seen = replace(rank, snapshot=snapshot)
        if not is_own and rank.left_at is not None:
            as_seen = replace(as_seen, exit_code=None, died_at=None, returned_at=None)
        found.append(as_seen)
    return found


def _computed_on(seen: Snapshot, last: Snapshot) -> bool:
    """Returns whether a rank computed and was silent at the check, and still computed when it gave its last stack."""
    was_silent = seen.process.get("silent") is True and not seen.frames
    return was_silent and bool(last.frames) and str(last.process.get("state", "")).startswith("R")


def log_unusable_texts(error: Exception) -> None:
    """Logs that texts that ranks wrote cannot be used: the fault is found without these texts."""
    log_contained("what the ranks wrote of the fault cannot be used", error)


def _written(
    ranks: RankContext, local_rank: int, end: RankExit, report: RankReport
) -> tuple[RankException | None, float | None]:
    """Returns the error that an ended rank left in a file, and when it was written (monotonic seconds).

    An error that was found is kept in `ranks.errors`, and not read again.
    """
    known = ranks.errors.get(local_rank)
    if known is not None:
        return known
    exception, moment = _in_file(ranks, Path(ranks.error_files[local_rank]))
    # A rank that died of a signal has printed no traceback of that: the last one in its output is of something else.
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
    """Returns the last error that a rank printed, and when the rank ended.

    Args:
        ranks: the processes of the cycle.
        end: of the rank.
        last_output: the end of its output, as its client has reported it; empty: not reported.
        path: the file of its stderr, which is read otherwise.
    """
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
    """Returns the evidence, with those ranks marked that certainly wait for locks of their own.

    No other rank can release such a lock, so a marked rank is the cause of a hang. The source line of the innermost
    frame shows it. Waits `_TEXTS_TIMEOUT_S` at most for the files; a rank whose file is not read is not marked.

    Args:
        ranks: the evidence.
        stop_began: when the launcher began to stop the ranks (monotonic seconds).
        ran_s: seconds since the ranks were started. A file that has changed in this time may not be the text that runs.
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
    """Reads source files into `texts`, by path, in a thread. Leaves out files that are long or younger than the
    ranks."""
    for path in files:
        with suppress(OSError, UnicodeDecodeError), open_regular(path, follow_link=True) as file:
            status = os.fstat(file.fileno())
            age_s = time.time() - max(status.st_mtime, status.st_ctime)
            if age_s > ran_s and status.st_size <= _MAX_TEXT:
                texts[path] = file.read(_MAX_TEXT).decode("utf-8-sig")


# What the node shows. What cannot be read is None.


def of_node(oom_kills_before: int | None) -> NodeEvidence:
    """Returns the evidence of this node: kills for lack of memory since the cycle's start, and room in /dev/shm.

    Args:
        oom_kills_before: what `cgroup.oom_kills` returned before the start of the cycle.
    """
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
    """Returns the iteration that a cycle reached, by which the restart policy sees progress.

    Args:
        evidence: of the ranks of the cycle.
        checkpoint_iteration_file: where the training writes its last saved iteration. If given, this file alone counts.

    Returns:
        NO_ITERATION: the ranks reported none. None: unknown, since the file could not be read, or a monitor did not
        answer and no other rank reported an iteration.
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
    """Runs `function` in a thread called `name`; returns its result, or None if it has not ended within `timeout_s`.

    For a call that may hang for ever, such as reading a file from storage that is gone. The thread is a daemon: it is
    left behind then, and nobody joins it.
    """
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True, name=name)
    thread.start()
    thread.join(timeout_s)
    if found:
        return found[0]
    return None
