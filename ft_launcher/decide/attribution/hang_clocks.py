"""The clocks of `--ft-hang-timeout`: whether the ranks hang, for how long, and which rank is to be ended. Pure.

While a rank of a node stands still, `agent/hang_watch.py` samples the ranks of the job, eight times within the limit,
and gives the samples to `HangClocks.judge`. The option needs no support in the training script, so the clocks must tell
a hang from slow work by what can be seen from outside. There are two cases, with one clock each:

1. Ranks wait in a collective. The clock starts when the last rank that did come entered. It starts anew when a
   collective of that group is finished, and when the awaited rank reports a sign of life. CPU time does not count: a
   rank that waits on a GPU spins.
2. Nobody waits for anybody. The clock of a rank runs while its main thread executes no Python and nothing of its
   `Usage` (`node/processes/rank_usage.py`: CPU time, bytes read and written) changes.

Where ranks wait but nobody knows for whom, the whole job must stand still by case 2. Before the first collective is
finished or the first iteration reported, ranks load, compile and download: the limit is at least an hour until then.
No clock runs while a debugger is attached to a rank, or while all ranks are stopped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ft_launcher.decide.attribution import collective, rank_view
from ft_launcher.decide.attribution.fault import HangFinding, HangKind
from ft_launcher.decide.attribution.rank_view import RankView
from ft_launcher.decide.attribution.scene import Activity, numbered
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.messages import NO_ITERATION

_FIRST_LIMIT_S = 3600.0
"""The least limit before the training has begun (seconds). NVIDIA's default limit until a rank's first sign of life is
the same: compilers and downloads at the start take so long."""
_DEBUGGER = re.compile(
    r"python3[.\dt]*/(pdb|bdb|code|codeop)\.py|(ipdb|pudb|pydevd|debugpy|remote_pdb|IPython/terminal)\b"
)
"""Frames of debuggers. A rank in one of these waits for its user, which may take hours and is no hang."""


@dataclass(frozen=True)
class RankSample:
    """One rank at the moment of one sample.

    Attributes:
        view: its groups and its stack.
        idle_s, report_age_s, has_own_limit: as in `Snapshot` (`contract/wire/launcher_messages.py`).
        still_s: for how long its `Usage` has not changed, as far as the samples show (seconds).
    """

    view: RankView
    idle_s: float | None = None
    report_age_s: float | None = None
    still_s: float = 0.0
    has_own_limit: bool = False

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger is attached to the process (`TracerPid`), or runs inside it and waits for its user."""
        scene = self.view.scene
        return bool((scene.process or {}).get("traced")) or any(_DEBUGGER.search(frame) for frame in scene.frames)

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP)."""
        return self.view.scene.activity is Activity.STOPPED

    @property
    def quiet_s(self) -> float:
        """For how long the rank has done nothing at all (seconds): no Python, no report, no use of the machine."""
        return min(self.still_s, self.idle_s or 0.0, _age(self.report_age_s))


@dataclass(frozen=True)
class Hang:
    """A wait of ranks, or the standstill of one rank; a hang once it has lasted for the limit.

    Attributes:
        waited_s: how long it has lasted (seconds).
        limit_s: the limit that applies (seconds): `--ft-hang-timeout`, or an hour before the training has begun.
        finding: who holds up whom; None: nobody waits for anybody, and `rank` stands still.
        rank: the rank that stands still; -1 where there is a finding.
    """

    waited_s: float
    limit_s: float
    finding: HangFinding | None = None
    rank: int = -1

    @property
    def is_over_limit(self) -> bool:
        """Whether the wait or the standstill has lasted for the limit."""
        return self.waited_s >= self.limit_s

    def rank_to_end(self, local: Collection[int]) -> int | None:
        """Returns the rank of this node that is to be ended for the hang; None: no rank of this node.

        A culprit if it runs on this node; else a rank that waits. A node can end only ranks of its own, but any end
        will do: by it all nodes learn of the hang, and the coordinator names the culprit by what all nodes saw.

        Args:
            local: the global ranks of this node.
        """
        if self.finding is None:
            candidates: Sequence[int] = (self.rank,)
        else:
            candidates = (*self.finding.culprits, *self.finding.waiting)
        return next((rank for rank in candidates if rank in local), None)

    def reason_for(self, rank: int) -> str:
        """Returns what is wrong with `rank`, which `rank_to_end` has returned; without the subject, for its verdict."""
        finding = self.finding
        if finding is None:
            return "its main thread runs no Python, and it uses no CPU time and reads and writes nothing"
        if rank in finding.culprits and finding.kind is HangKind.GONE:
            return (
                f"it {finding.text}, {collective.waiting_text(len(finding.waiting)).removeprefix(', ')} in a collective"
            )
        if rank in finding.culprits and finding.waiting:
            return f"{collective.waiting_text(len(finding.waiting)).removeprefix(', and ')} in a collective"
        if rank in finding.culprits:
            return "it and other ranks wait for each other in collectives"
        if finding.culprits:
            return f"it waits in a collective for {numbered(finding.culprits)}"
        if finding.kind is HangKind.TRANSPORT:
            return "all ranks are in one collective that does not end"
        return "it and all other ranks stand still, and some wait in a collective"


class HangClocks:
    """The clocks of one cycle. Not thread-safe: the agent's thread calls it.

    Args:
        limit_s: `--ft-hang-timeout` (seconds).
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._finished: dict[str, tuple[int, float | None]] = {}
        """Group -> the number of the last collective that any rank has finished, and when a sample first showed this
        number (monotonic seconds); None: it is the number of the first sample, so its age is not known."""
        self._suspended_at = -math.inf
        """When a sample last showed a debugger, or all ranks stopped (monotonic seconds)."""

    def reset(self) -> None:
        """Drops all earlier samples. Called when no rank of this node stands still any more, and after one was ended:
        no samples are taken then until a rank stands still again."""
        self._finished.clear()
        self._suspended_at = -math.inf

    def judge(self, ranks: Sequence[RankSample], all_ranks: bool, now: float) -> Hang | None:
        """Returns the wait or the standstill that has lasted longest; None: no clock runs. Called for every sample.

        Args:
            ranks: a sample of each rank that is known.
            all_ranks: `ranks` are all ranks of the job; False while another node has not answered.
            now: monotonic seconds.
        """
        self._note_finished(ranks, now)
        present = [rank for rank in ranks if not rank.view.ended]
        # A user debugs the job, or has stopped all of it (Ctrl-Z, a scheduler that suspends it).
        if any(rank.is_debugged for rank in present) or all(rank.is_stopped for rank in present):
            self._suspended_at = now
            return None
        limit_s = self._limit_s
        if not _has_begun(ranks):
            limit_s = max(limit_s, _FIRST_LIMIT_S)
        finding = collective.find_culprits([rank.view for rank in ranks], all_ranks)
        if finding.waiting or len(finding.culprits) > 1:
            waited_s = self._waited_s(finding, {rank.view.rank: rank for rank in present}, all_ranks, now)
            if waited_s is None:
                return None
            # While the awaited rank was in a debugger the other ranks went on waiting. That time does not count.
            return Hang(min(waited_s, now - self._suspended_at), limit_s, _for_all(finding, present))
        alone = [rank for rank in present if not (rank.has_own_limit or rank.is_stopped or _is_in_wrapper(rank))]
        longest = max(alone, key=lambda rank: rank.quiet_s, default=None)
        if longest is None or longest.quiet_s == 0:
            return None
        return Hang(longest.quiet_s, limit_s, None, longest.view.rank)

    def _note_finished(self, ranks: Sequence[RankSample], now: float) -> None:
        """Notes which collectives are finished in each group, and when that changed."""
        for group, number in _finished(ranks).items():
            before = self._finished.get(group)
            if before is None:
                self._finished[group] = (number, None)
            elif before[0] != number:
                self._finished[group] = (number, now)

    def _waited_s(
        self, finding: HangFinding, ranks: Mapping[int, RankSample], all_ranks: bool, now: float
    ) -> float | None:
        """Returns for how long ranks have waited (seconds); None: the clock does not run.

        It does not run where a culprit is in a section with a limit of its own, which is then the limit that counts.
        Else the wait is the least of these: the idle time of each rank that waits, the age of each report of a culprit,
        and the time since a collective of their groups was finished.
        """
        waiting = [ranks[rank] for rank in finding.waiting if rank in ranks]
        blamed = [ranks[rank] for rank in finding.culprits if rank in ranks]
        if any(rank.has_own_limit for rank in blamed):
            return None
        if finding.kind is HangKind.UNKNOWN:
            if not all_ranks or any(rank.has_own_limit for rank in ranks.values()):
                return None
            return min(rank.quiet_s for rank in ranks.values())
        entered = [rank.idle_s for rank in (*waiting, *(rank for rank in blamed if rank.view.is_waiting))]
        known = [idle_s for idle_s in entered if idle_s is not None]
        if not known:
            return None
        reported = [_age(rank.report_age_s) for rank in blamed]
        return min([*known, *reported, self._unfinished_s([*waiting, *blamed], now)])

    def _unfinished_s(self, ranks: Sequence[RankSample], now: float) -> float:
        """Returns for how long no collective was finished in the groups in which these ranks wait (seconds); infinity:
        none was finished since the first sample."""
        waited_in = {name for rank in ranks for name, state in rank.view.groups.items() if state.waits_in is not None}
        moments = [since for group, (_, since) in self._finished.items() if group in waited_in or not waited_in]
        return min((now - since for since in moments if since is not None), default=float("inf"))


def _for_all(finding: HangFinding, ranks: Sequence[RankSample]) -> HangFinding:
    """Returns `finding`, where nobody is named with the ranks that wait in no collective at the head of `waiting`.

    `Hang.rank_to_end` takes the first: a rank outside of the collectives is more likely the cause than one inside.
    """
    if finding.culprits or finding.kind is HangKind.TRANSPORT:
        return finding
    outside = [rank.view.rank for rank in ranks if not rank.view.is_waiting]
    waiting = (*outside, *(rank for rank in finding.waiting if rank not in outside))
    return HangFinding(finding.kind, (), finding.text, waiting)


def _is_in_wrapper(rank: RankSample) -> bool:
    return rank.view.scene.activity is Activity.WRAPPER


def _has_begun(ranks: Sequence[RankSample]) -> bool:
    """Returns whether the training has begun: a rank has finished a collective or reported an iteration."""
    return any(_finished(ranks).values()) or any(rank.view.iteration != NO_ITERATION for rank in ranks)


def _finished(ranks: Sequence[RankSample]) -> dict[str, int]:
    """Returns, for each group, the number of the last collective that any rank has finished."""
    found: dict[str, int] = {}
    for rank in ranks:
        for group, state in rank.view.groups.items():
            found[group] = max(found.get(group, 0), state.finished)
    return found


def _age(age_s: float | None) -> float:
    """Returns an age in seconds; infinity for None, the age of a report that never came."""
    if age_s is None:
        return float("inf")
    return age_s


# Samples as JSON values: `agent/hang_exchange.py` sends them to the nodes that decide.

_BESIDE = ("idle_s", "report_age_s", "still_s", "has_own_limit")
"""The fields of a record that are not those of its view."""


def to_record(rank: RankSample) -> dict[str, Any]:
    """Returns a sample as JSON values, about 1 KB."""
    values = asdict(rank)
    record = rank_view.to_record(rank.view) | {name: values[name] for name in _BESIDE}
    record["traced"] = rank.is_debugged
    return record


def of_record(record: Any) -> RankSample:
    """Returns the sample in a record of another node.

    Raises:
        ProtocolError: the record is not one of `to_record`.
    """
    view = rank_view.of_record(record)
    try:
        idle_s, report_age_s = (None if record[name] is None else float(record[name]) for name in _BESIDE[:2])
        still_s, has_own_limit, traced = float(record["still_s"]), bool(record["has_own_limit"]), bool(record["traced"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the state of a rank does not fit: {error!r}") from None
    if traced:
        scene = view.scene
        view = RankView(type(scene)(scene.rank, scene.frames, {**(scene.process or {}), "traced": True}), view.groups)
    return RankSample(view, idle_s, report_age_s, still_s, has_own_limit)
