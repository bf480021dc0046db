"""Asks the monitors where the ranks are when somebody wants to know. A source of events that never ends a cycle.

`composition.py` makes it, and the agent's loop calls it, in the agent's thread. No method blocks: a question to the
monitors is sent, and their answers are looked at when the loop calls again. While nobody asks, no monitor is asked.

One request takes this way: a server's thread calls `Asking.ask`; the loop sees `Asking.fileno` readable and calls
`poll`, which asks all monitors; their answers wake the loop; when all have answered, or a limit is over, the readings
go to `NodeStatus` and the request is released.

When somebody asks while the training is stalled, ranks are also asked once in that stall for stacks and collectives.
These say whom the ranks wait for, and the answer to the request is held back until they are there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ft_launcher.agent.cycle.cycle import Event
from ft_launcher.agent.cycle.evidence import gather
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.ranks import Ranks
from ft_launcher.decide.attribution import collective, rank_view
from ft_launcher.record.journal.contained import contained
from ft_launcher.tools.status.asking import Asking
from ft_launcher.tools.status.node_status import NodeStatus, RankReading
from rank_monitor.contract.processes.proc import is_stopped

_READING_S, _STACKS_S = 0.2, 1.0
"""How long answers of monitors are waited for, and stacks of ranks (seconds). A monitor answers at once; a rank may
need longer for its stacks, and a stopped rank gives none."""


class StatusFeed(EventSource):
    """Brings the readings of the ranks of this node to the status, cycle after cycle.

    Args:
        status: gets the readings.
        asking: has the requests of the servers' threads.
        ranks: the ranks of this node.
    """

    def __init__(self, status: NodeStatus, asking: Asking, ranks: Ranks) -> None:
        self._status = status
        self._asking = asking
        self._ranks = ranks
        self._reads_steps = ranks.parts.settings.monitor.watch_log_timeout is not None
        self._token = 0
        self._number = 0
        self._until: float | None = None
        self._collects = False
        self._collected: dict[int, tuple[float, Mapping[str, Any]]] = {}
        """Local rank -> when it was last asked for its collectives in this cycle, and its answer. Kept while later
        requests ask for less. A rank that did not answer the last time is not in it."""
        self._stopped: set[int] = set()
        """Local ranks whose process was stopped when collectives were last asked for."""
        self._stalled_after: int | None = None
        """The step after which the stall began for which the ranks were last asked; None: they were asked for no
        stall."""
        self._stall_cause = ""

    @contextmanager
    def during_cycle(self) -> Iterator[None]:
        """Context of one cycle: forgets the answers of the cycle before, and lets requests through until its end."""
        self._until = self._stalled_after = None
        self._stall_cause = ""
        self._collected.clear()
        self._stopped.clear()
        self._publish()
        self._asking.set_active(True)
        try:
            yield
        finally:
            self._asking.set_active(False)

    def descriptors(self) -> set[int]:
        """Returns the descriptor that is readable when somebody asks; empty while answers are awaited, since one round
        of questions at a time is enough."""
        if self._until is not None:
            return set()
        return {self._asking.fileno()}

    def next_check(self) -> float | None:
        """Returns when to answer with what is known by then (monotonic seconds); None: nobody waits."""
        return self._until

    def poll(self, ready: Set[int]) -> list[Event]:
        """Asks the monitors if somebody wants to know, and publishes their answers when they are complete. Returns no
        event.

        An error here must not end the cycle, so it is contained. A thread that waits for an answer then goes on at the
        limit of `Asking.ask`.
        """
        with contained("the status of the ranks cannot be read"):
            if self._asking.fileno() in ready:
                self._number, stacks, collectives = self._asking.drain()
                self._ask(stacks, collectives)
            if self._until is not None and (self._is_complete() or time.monotonic() >= self._until):
                self._until = None
                self._ranks.record_times()
                self._store_collectives()
                if not self._asks_about_stall():
                    self._publish()
                    self._asking.answer(self._number)
        return []

    def _ask(self, stacks: bool, collectives: bool) -> None:
        """Asks all monitors for readings, and for `stacks` and `collectives` where these are wanted. Sets the time
        limit."""
        # Time ledgers are asked for first. Answers count as complete when the readings are there, and a ledger of long
        # ago would look like a stall.
        self._ranks.monitors.ask_times()
        self._token = self._ranks.monitors.ask_readings(stacks, collectives)
        self._collects = stacks or collectives
        limit_s = _READING_S
        if self._collects:
            limit_s = _STACKS_S
        self._until = time.monotonic() + limit_s

    def _asks_about_stall(self) -> bool:
        """Asks the ranks for stacks and collectives if the training has stalled since they were last asked.

        Returns whether they were asked now. Then the request that is being answered waits for their answer.
        """
        stall = self._ranks.parts.times.stall
        if stall is None:
            self._stalled_after, self._stall_cause = None, ""
        elif self._stalled_after != stall.steps:
            self._stalled_after, self._stall_cause = stall.steps, ""
            self._ask(stacks=True, collectives=True)
            return True
        elif not self._stall_cause and self._collects:
            self._stall_cause = self._cause()
        return False

    def _cause(self) -> str:
        """Returns whom the ranks wait for according to the last readings, in words; empty: the readings do not show
        it."""
        placement, processes, monitors = self._ranks.placement, self._ranks.processes, self._ranks.monitors
        evidence = [
            replace(rank, snapshot=monitors.report(rank.local_rank).reading)
            for rank in gather(placement.ranks, processes, monitors, self._stopped)
        ]
        views = rank_view.views(evidence, None)
        return collective.summary(collective.find_culprits(views, placement.is_alone), views)

    def _is_complete(self) -> bool:
        """Returns whether the monitors of all running ranks have answered the last question."""
        monitors, running = self._ranks.monitors, self._ranks.running()
        readings = [monitors.report(local_rank).reading for local_rank in running]
        return all(reading is not None and reading.token <= self._token for reading in readings)

    def _store_collectives(self) -> None:
        """Stores what the ranks have answered about their collectives, if they were asked, and which ranks are
        stopped."""
        if not self._collects:
            return
        pids = self._ranks.processes.pids()
        self._stopped = {local_rank for local_rank in self._ranks.running() if is_stopped(pids[local_rank])}
        self._collected.clear()
        for local_rank in self._ranks.monitors.local_ranks:
            report = self._ranks.monitors.report(local_rank)
            has_answer = report.reading is not None and report.reading.token <= self._token
            if has_answer and report.reading is not None and report.reading.groups and report.reading_at is not None:
                self._collected[local_rank] = (report.reading_at, dict(report.reading.groups))

    def _publish(self) -> None:
        """Gives the status a reading of each rank of this node. A rank whose monitor never answered has an empty
        one."""
        pids = self._ranks.processes.pids()
        readings = []
        for local_rank in self._ranks.monitors.local_ranks:
            report, rank = self._ranks.monitors.report(local_rank), self._ranks.global_rank(local_rank)
            pid = pids.get(local_rank, 0)
            reading, verdict = report.reading, report.verdict
            # A rank of which printed steps are read is watched from its first step on, although it asks for no watch
            # itself.
            is_read = self._reads_steps and report.times is not None and report.times.attached
            collected_at, groups = self._collected.get(local_rank, (None, {}))
            process: dict[str, Any] = {}
            if local_rank in self._stopped:
                process["stopped"] = True
            if reading is None:
                readings.append(RankReading(rank, local_rank, pid, process=process))
                continue
            readings.append(
                RankReading(
                    rank,
                    local_rank,
                    pid,
                    report.reading_at,
                    reading.connected or is_read,
                    (reading.attached and not reading.detached) or is_read,
                    reading.iteration,
                    dict(reading.sections),
                    reading.last_sign_age_s,
                    verdict is not None and verdict.condemned,
                    tuple(reading.frames),
                    {**process, **reading.process},
                    groups,
                    collected_at,
                )
            )
        saved = self._ranks.state.saved(self._ranks.cycle, self._ranks.processes.started_ns)
        self._status.read(readings, self._stall_cause, saved)
