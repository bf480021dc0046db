"""The two clocks of `--ft-hang-timeout`: whether what ranks do is a hang, for how long, and whose. Pure.

`agent/hang_watch.py` looks at the ranks again and again while one of them stands still, and asks `HangClocks` each
time. There are two cases:

1. Ranks wait in a collective. The clock runs from the moment when the last rank that did come entered. A collective of
   that group that is finished sets it back, and so does a report of the rank that has not come. CPU time does not: on a
   GPU a rank that waits spins.
2. Nobody waits for anybody. The clock of a rank runs while its main thread executes no Python and nothing of its
   `Usage` (`node/processes/rank_usage.py`) changes.

Where it is not known for whom ranks wait, the whole job must stand still. Before the first collective is finished, or
the first iteration is reported, ranks load, compile and download: the limit is an hour at least then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ft_launcher.decide.attribution import collective, rank_view
from ft_launcher.decide.attribution.fault import Blame, HangKind
from ft_launcher.decide.attribution.rank_view import RankView
from ft_launcher.decide.attribution.scene import Activity, numbered
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.messages import NO_ITERATION

_FIRST_LIMIT_S = 3600.0
"""As long as NVIDIA's limit until a rank's first sign of life: compilers and downloads at the start take so long."""
_DEBUGGER = re.compile(
    r"python3[.\dt]*/(pdb|bdb|code|codeop)\.py|(ipdb|pudb|pydevd|debugpy|remote_pdb|IPython/terminal)\b"
)
"""Frames of a debugger that waits for its user."""


@dataclass(frozen=True)
class RankLook:
    """One rank at a look.

    Attributes:
        idle_s, report_age_s, has_own_limit: as in `Snapshot`.
        still_s: for how long its `Usage` has not changed, as far as looks tell (seconds).
    """

    view: RankView
    idle_s: float | None = None
    report_age_s: float | None = None
    still_s: float = 0.0
    has_own_limit: bool = False

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger is attached to it, or waits in it for its user."""
        scene = self.view.scene
        return bool((scene.process or {}).get("traced")) or any(_DEBUGGER.search(frame) for frame in scene.frames)

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped."""
        return self.view.scene.activity is Activity.STOPPED

    @property
    def quiet_s(self) -> float:
        """For how long it has done nothing at all (seconds)."""
        return min(self.still_s, self.idle_s or 0.0, _age(self.report_age_s))


@dataclass(frozen=True)
class Hang:
    """Ranks that wait, or a rank that stands still, since `waited_s`; a hang once that is `limit_s`.

    Attributes:
        blame: who holds up whom; None: nobody waits for anybody, and `rank` stands still.
    """

    waited_s: float
    limit_s: float
    blame: Blame | None = None
    rank: int = -1

    @property
    def is_over_limit(self) -> bool:
        """Whether it has lasted too long."""
        return self.waited_s >= self.limit_s

    def whose(self, local: Collection[int]) -> int | None:
        """Returns the rank among `local`, those of a node, that is to be ended for it; None: none of them.

        One that holds up the others, if it is there; else one that waits: by its end all nodes learn of the hang, and
        what all of them saw together names the rank.
        """
        if self.blame is None:
            candidates: Sequence[int] = (self.rank,)
        else:
            candidates = (*self.blame.ranks, *self.blame.waiting)
        return next((rank for rank in candidates if rank in local), None)

    def why(self, rank: int) -> str:
        """Returns what is wrong with a rank that `whose` has returned, without the subject."""
        blame = self.blame
        if blame is None:
            return "its main thread runs no Python, and it uses no CPU time and reads and writes nothing"
        if rank in blame.ranks and blame.finding is HangKind.GONE:
            return f"it {blame.text}, {collective.waiting_text(len(blame.waiting)).removeprefix(', ')} in a collective"
        if rank in blame.ranks and blame.waiting:
            return f"{collective.waiting_text(len(blame.waiting)).removeprefix(', and ')} in a collective"
        if rank in blame.ranks:
            return "it and other ranks wait for each other in collectives"
        if blame.ranks:
            return f"it waits in a collective for {numbered(blame.ranks)}"
        if blame.finding is HangKind.TRANSPORT:
            return "all ranks are in one collective that does not end"
        return "it and all other ranks stand still, and some wait in a collective"


class HangClocks:
    """The clocks of one cycle.

    Args:
        limit_s: `hang_timeout`.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._finished: dict[str, tuple[int, float | None]] = {}
        """Group -> number of the last collective that a rank has finished, and when a look first saw that it had become
        another (None: it has not)."""
        self._suspended_at = -math.inf
        """When a look last saw that the clocks do not run for any rank."""

    def begin(self) -> None:
        """Forgets the looks before: nobody stood still since the last one."""
        self._finished.clear()
        self._suspended_at = -math.inf

    def judge(self, ranks: Sequence[RankLook], all_ranks: bool, now: float) -> Hang | None:
        """Returns the wait or the standstill that has lasted longest; None: no clock runs.

        Args:
            ranks: all that are known.
            all_ranks: these are all ranks of the job.
            now: monotonic seconds.
        """
        self._note_finished(ranks, now)
        present = [rank for rank in ranks if not rank.view.ended]
        # Somebody debugs the job, or has stopped all of it.
        if any(rank.is_debugged for rank in present) or all(rank.is_stopped for rank in present):
            self._suspended_at = now
            return None
        limit_s = self._limit_s
        if not _has_begun(ranks):
            limit_s = max(limit_s, _FIRST_LIMIT_S)
        blame = collective.find([rank.view for rank in ranks], all_ranks)
        if blame.waiting or len(blame.ranks) > 1:
            waited_s = self._waited_s(blame, {rank.view.rank: rank for rank in present}, all_ranks, now)
            if waited_s is None:
                return None
            # The others have waited meanwhile, and the rank goes on where it was.
            return Hang(min(waited_s, now - self._suspended_at), limit_s, _for_all(blame, present))
        alone = [rank for rank in present if not (rank.has_own_limit or rank.is_stopped or _is_in_wrapper(rank))]
        longest = max(alone, key=lambda rank: rank.quiet_s, default=None)
        if longest is None or longest.quiet_s == 0:
            return None
        return Hang(longest.quiet_s, limit_s, None, longest.view.rank)

    def _note_finished(self, ranks: Sequence[RankLook], now: float) -> None:
        for group, number in _finished(ranks).items():
            before = self._finished.get(group)
            if before is None:
                self._finished[group] = (number, None)
            elif before[0] != number:
                self._finished[group] = (number, now)

    def _waited_s(self, blame: Blame, ranks: Mapping[int, RankLook], all_ranks: bool, now: float) -> float | None:
        """Returns for how long ranks have waited; None: the clock does not run."""
        waiting = [ranks[rank] for rank in blame.waiting if rank in ranks]
        blamed = [ranks[rank] for rank in blame.ranks if rank in ranks]
        if any(rank.has_own_limit for rank in blamed):
            return None
        if blame.finding is HangKind.UNKNOWN:
            if not all_ranks or any(rank.has_own_limit for rank in ranks.values()):
                return None
            return min(rank.quiet_s for rank in ranks.values())
        entered = [rank.idle_s for rank in (*waiting, *(rank for rank in blamed if rank.view.is_waiting))]
        known = [idle_s for idle_s in entered if idle_s is not None]
        if not known:
            return None
        reported = [_age(rank.report_age_s) for rank in blamed]
        return min([*known, *reported, self._unfinished_s([*waiting, *blamed], now)])

    def _unfinished_s(self, ranks: Sequence[RankLook], now: float) -> float:
        """Returns for how long no collective was finished in the groups in which these ranks wait."""
        waited_in = {name for rank in ranks for name, state in rank.view.groups.items() if state.waits_in is not None}
        moments = [since for group, (_, since) in self._finished.items() if group in waited_in or not waited_in]
        return min((now - since for since in moments if since is not None), default=float("inf"))


def _for_all(blame: Blame, ranks: Sequence[RankLook]) -> Blame:
    """Returns `blame`; where nobody is named with a rank that waits in no collective, if there is one, in front."""
    if blame.ranks or blame.finding is HangKind.TRANSPORT:
        return blame
    outside = [rank.view.rank for rank in ranks if not rank.view.is_waiting]
    waiting = (*outside, *(rank for rank in blame.waiting if rank not in outside))
    return Blame(blame.finding, (), blame.text, waiting)


def _is_in_wrapper(rank: RankLook) -> bool:
    return rank.view.scene.activity is Activity.WRAPPER


def _has_begun(ranks: Sequence[RankLook]) -> bool:
    """Whether a collective was finished or an iteration reported."""
    return any(_finished(ranks).values()) or any(rank.view.iteration != NO_ITERATION for rank in ranks)


def _finished(ranks: Sequence[RankLook]) -> dict[str, int]:
    found: dict[str, int] = {}
    for rank in ranks:
        for group, state in rank.view.groups.items():
            found[group] = max(found.get(group, 0), state.finished)
    return found


def _age(age_s: float | None) -> float:
    """An age in seconds; without one the rank has never reported anything."""
    if age_s is None:
        return float("inf")
    return age_s


# As JSON values, for the other nodes.

_BESIDE = ("idle_s", "report_age_s", "still_s", "has_own_limit")


def to_record(rank: RankLook) -> dict[str, Any]:
    """Returns a rank as JSON values, about 1 KB."""
    values = asdict(rank)
    record = rank_view.to_record(rank.view) | {name: values[name] for name in _BESIDE}
    record["traced"] = rank.is_debugged
    return record


def of_record(record: Any) -> RankLook:
    """Returns the rank in a record of another node.

    Raises:
        ProtocolError: it does not fit.
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
    return RankLook(view, idle_s, report_age_s, still_s, has_own_limit)
