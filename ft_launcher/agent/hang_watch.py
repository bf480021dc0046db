"""Ends hangs by `--ft-hang-timeout`: checks the ranks of the job while a rank of this node stands still.

A source of events. Made by the node agent where the option has a limit.

1. A monitor reports that its rank stands still. Until then nothing happens here, and nothing is asked of any rank.
2. A check (`_states`) asks the monitors of this node for stacks and collectives. The first nodes of the job also ask
   the other nodes for theirs, in a thread (`hang_exchange.py`), and the check goes on when these have answered.
3. `decide/attribution/hang_clocks.py` decides whether the job hangs, since when, and which rank holds it up.
4. If the limit has passed, and that rank is on this node, its monitor ends it (`_end`), as for every other limit. So
   the verdict has the stacks, and all nodes report where their ranks were. Otherwise the next check follows.

Checks stop when no rank of this node stands still any more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace

from ft_launcher.agent.cycle.cycle import Event
from ft_launcher.agent.cycle.evidence import gather, with_own_locks
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.hang_exchange import HangExchange, Others
from ft_launcher.agent.ranks import Ranks
from ft_launcher.decide.attribution import rank_view
from ft_launcher.decide.attribution.hang_clocks import Hang, HangClocks, RankSample
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.node.processes.rank_usage import RankUsage
from ft_launcher.record.journal.contained import contained
from rank_monitor.contract.wire.launcher_messages import HangOverdue

_FIRST_LOOK, _LOOKS = 4, 8
"""A rank stands still when it has made no progress for a quarter of the limit (its monitor counts so, too). The checks
follow each other after an eighth of the limit."""
_SHORTEST_S = 0.05
"""Seconds between two checks at least: a check takes a few milliseconds of each rank."""
_DECIDING_NODES = 3
"""How many nodes, beginning with the first, ask all others: answers to each of hundreds of nodes would be much to send.
More than one asks, since the first node may have no rank that stands still."""


def hang_watch(ranks: Ranks, limit_s: float, rendezvous: NodeRendezvous | None) -> HangWatch:
    """Returns the watch of this node.

    Args:
        ranks: of this node.
        limit_s: `--ft-hang-timeout` (seconds).
        rendezvous: over which the other nodes are asked; None: there are none, or they cannot be asked.
    """
    if rendezvous is None:
        return HangWatch(ranks, limit_s, None)
    return HangWatch(ranks, limit_s, HangExchange(rendezvous))


class HangWatch(EventSource):
    """The checks of one job on this node.

    Args:
        ranks: of this node.
        limit_s: `--ft-hang-timeout` (seconds).
        exchange: questions to the other nodes and their answers; None: there are none, or they cannot be asked.
    """

    def __init__(self, ranks: Ranks, limit_s: float, exchange: HangExchange | None) -> None:
        self._ranks, self._limit_s, self._exchange = ranks, limit_s, exchange
        self._clocks = HangClocks(limit_s)
        self._usage = RankUsage(ranks.monitors.stack_file)
        self._standstills = 0
        self._check_at: float | None = None
        self._is_asking = False

    @contextmanager
    def during_cycle(self) -> Iterator[None]:
        """Returns a context in which ranks are checked. Begins and ends without a hang."""
        self._standstills = 0
        self._stop_checks()
        if self._exchange is not None:
            self._exchange.begin()
        try:
            yield
        finally:
            self._stop_checks()

    def descriptors(self) -> set[int]:
        """Returns the descriptor that is readable when another node asks, or the other nodes have answered."""
        if self._exchange is None:
            return set()
        return {self._exchange.fileno()}

    def next_check(self) -> float | None:
        """Returns when the next check is due (monotonic seconds); None: no rank stands still, or other nodes are
        asked."""
        if self._is_asking:
            return None
        return self._check_at

    def poll(self, ready: Set[int]) -> list[Event]:
        """Checks the ranks if that is due, and answers other nodes. A check blocks for a second at most.

        Returns no events: the verdict of the monitor that ends a rank ends the cycle.
        """
        with contained("whether ranks hang cannot be found"):
            self._poll()
        return []

    def _poll(self) -> None:
        """Begins to check where a monitor has reported a new standstill, answers other nodes, and checks when it is
        due.

        Among several nodes a check has two halves: here the question is sent, and `_check` follows at the wake-up at
        which the answers are there.
        """
        found = [self._ranks.monitors.report(local_rank).standstills for local_rank in self._ranks.monitors.local_ranks]
        if sum(found) != self._standstills:
            self._standstills = sum(found)
            if self._check_at is None:
                self._check_at = time.monotonic()
        if self._exchange is not None:
            for number in self._exchange.questions():
                self._exchange.answer(number, self._ranks.cycle, self._states())
            others = self._exchange.others()
            if others is not None and self._is_asking:
                self._is_asking = False
                self._check(others)
        if self._check_at is not None and not self._is_asking and time.monotonic() >= self._check_at:
            if self._exchange is not None and self._ranks.placement.node_rank < _DECIDING_NODES:
                self._is_asking = True
                self._exchange.ask(self._ranks.cycle)
            else:
                self._check(Others((), self._ranks.placement.is_alone))

    def _check(self, others: Others) -> None:
        """Checks the ranks of this node together with those of other nodes; ends a rank, or plans the next check.

        Args:
            others: what the other nodes have answered; on a node that does not ask, no ranks, and not complete. Such a
                node ends no rank, but its checks note where its ranks stand still (`note_standstill`).
        """
        own = self._states()
        if not any(map(self._is_idle, own)):
            self._stop_checks()
            return
        hang = self._clocks.judge([*own, *others.ranks], others.is_complete, time.monotonic())
        if hang is not None and hang.is_over_limit and self._end(hang):
            self._stop_checks()
            return
        wait_s = self._limit_s / _LOOKS
        if hang is not None and not hang.is_over_limit:
            wait_s = min(wait_s, hang.limit_s - hang.waited_s)
        self._check_at = time.monotonic() + max(_SHORTEST_S, wait_s)

    def _end(self, hang: Hang) -> bool:
        """Has the monitor end the rank that holds up the job, if it is on this node; returns whether it is."""
        local_ranks = {self._ranks.global_rank(local_rank): local_rank for local_rank in self._ranks.running()}
        rank = hang.rank_to_end(local_ranks)
        if rank is None:
            return False
        self._ranks.monitors.end_hang(
            local_ranks[rank], HangOverdue(hang.limit_s, hang.waited_s, hang.reason_for(rank))
        )
        return True

    def _states(self) -> Sequence[RankSample]:
        """Asks the monitors for stacks; returns a sample of each rank of this node. Blocks for a second at most."""
        ranks = self._ranks
        pids = ranks.processes.pids()
        ranks.monitors.snapshots(stacks=True)
        # Read after the first snapshot: a flight recorder that is asked for the first time writes a few bytes.
        still_s = self._usage.still_s({local_rank: pids[local_rank] for local_rank in ranks.running()})
        evidence = gather(ranks.placement.ranks, ranks.processes, ranks.monitors)
        # A rank that died is left out: by an in-process restart the other ranks have gone on without it.
        evidence = [rank for rank in evidence if not rank.exit_code]
        now = time.monotonic()
        evidence = with_own_locks(evidence, now, now - ranks.processes.started_ns / 1e9)
        found = []
        for rank, view in zip(evidence, rank_view.views(evidence, None), strict=True):
            snapshot = rank.snapshot
            state = RankSample(view, still_s=still_s.get(rank.local_rank, 0.0))
            if snapshot is not None:
                state = replace(
                    state,
                    idle_s=snapshot.idle_s,
                    report_age_s=snapshot.report_age_s,
                    has_own_limit=snapshot.has_own_limit,
                )
            if self._is_idle(state):
                ranks.monitors.note_standstill(rank.local_rank)
            found.append(state)
        return found

    def _is_idle(self, rank: RankSample) -> bool:
        """Returns whether a rank stands still: it has made no progress for a quarter of the limit."""
        return (rank.idle_s or 0.0) >= self._limit_s / _FIRST_LOOK

    def _stop_checks(self) -> None:
        """Plans no further check, and discards what the checks have learned: the next standstill is another one."""
        self._check_at, self._is_asking = None, False
        self._clocks.reset()
        self._usage.reset()
