"""The copies of this node's state in memory on other nodes, cycle by cycle (`--ft-memory-buddies`).

The node agent makes one `StateCopies`. It passes on what the coordinator has planned
(`job/coordinator/copy_plan.py`) to the process that does the work (`node/memory_files/copies.py`), and records what
became of it. Everything but `offer` is called in the agent's thread; `begin` blocks while a state is fetched.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from ft_launcher.agent.cycle.cycle import Event
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.ranks import Ranks
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.record import events
from rank_monitor.contract.copy_records import COPIED, NOT_COPIED, CopyNews, CopyOffer, CopyPlan
from rank_monitor.contract.processes.wait import readable


class StateCopies(EventSource):
    """What this node does about copies. `ranks`: of this node."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parts = ranks.parts
        self._targets: list[str] = []
        """The host names of the nodes to which this node sends its states in this cycle."""
        self._is_working = False
        """Whether the process works by the plan of this cycle, as far as is known."""
        self._copied: dict[str, events.StatesCopiedEvent] = {}
        """Host name of another node -> what was copied to it in this cycle."""
        self._said: set[tuple[str, str]] = set()
        """Other nodes, with why they have no copy, that were recorded in this cycle. Reasons count without their
        numbers: with each new step these differ."""

    def offer(self) -> CopyOffer | None:
        """Returns what this node says of copies with its request for a place; None: it makes and keeps none."""
        copies = self._parts.state_in_memory.copies
        if copies is None:
            return None
        return copies.offer()

    def begin(self, plan: CopyPlan | None, rendezvous: NodeRendezvous) -> None:
        """Begins a cycle, before its ranks start. Blocks while a state is fetched that this node lacks; a signal to the
        launcher ends the wait.

        Args:
            plan: what the coordinator has planned for this node; None: it made no offer.
            rendezvous: says whether the cycle has ended elsewhere, which ends the wait.
        """
        copies, recorder = self._parts.state_in_memory.copies, self._parts.recorder.memory
        self._copied.clear()
        self._said.clear()
        self._is_working = False
        self._ranks.state.copied = None
        self._targets = [peer.name for peer in plan.targets] if plan is not None else []
        if copies is None:
            return
        if plan is None:
            recorder.not_copied(self._ranks.cycle, None, "", copies.refused or "its process is not there")
            return
        self._is_working = True
        signals = self._parts.signals.fileno()

        def why_not() -> str:
            if readable({signals}, 0.0):
                return "this launcher got a signal"
            if rendezvous.has_ended():
                return "the cycle has ended on another node"
            return ""

        fetched = copies.begin(plan, {signals, *rendezvous.descriptors()}, why_not)
        if fetched is not None:
            recorder.fetched(self._ranks.cycle, fetched)

    def cycle_over(self) -> None:
        """Records what was copied in a cycle that is over."""
        self.poll(set())
        for copied in self._copied.values():
            self._parts.recorder.memory.copied(replace(copied, took_s=round(copied.took_s, 3)))
        self._copied.clear()

    # As a source of events.

    def descriptors(self) -> set[int]:
        """Readable when there is news of copies."""
        copies = self._parts.state_in_memory.copies
        if copies is None:
            return set()
        return copies.descriptors()

    def poll(self, ready: Set[int]) -> list[Event]:
        """Takes the news of copies. It never ends a cycle."""
        copies = self._parts.state_in_memory.copies
        if copies is not None:
            for news in copies.news():
                self._note(news)
            if self._is_working and not copies.descriptors():
                self._is_working = False
                reason = "its process has died; the next cycle has another one"
                self._parts.recorder.memory.not_copied(self._ranks.cycle, None, "", reason)
        return []

    def _note(self, news: CopyNews) -> None:
        if news.kind == COPIED and news.step is not None:
            before = self._copied.get(news.peer)
            count, took_s = 1, news.took_s
            if before is not None:
                count, took_s = before.copies + 1, before.took_s + news.took_s
            self._copied[news.peer] = events.StatesCopiedEvent(
                self._ranks.cycle, news.peer, newest=news.step, copies=count, size=news.size, took_s=took_s
            )
            newest = [self._copied[name].newest for name in self._targets if name in self._copied]
            if len(newest) == len(self._targets):
                self._ranks.state.copied = min(newest, default=None)
        elif news.kind == NOT_COPIED:
            what = news.peer, "".join(letter for letter in news.reason if not letter.isdigit())
            if what not in self._said:
                self._said.add(what)
                self._parts.recorder.memory.not_copied(self._ranks.cycle, news.step, news.peer, news.reason)
