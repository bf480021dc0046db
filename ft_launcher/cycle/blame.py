"""Asks who holds up the others when a rank is about to be asked to restart in process, and answers for this node.

`in_process.py` uses it, in the thread of the cycle loop; `blame_exchange.py` has the threads in the ranks' store, which
the nodes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ft_launcher.attribution import RankEvidence
from ft_launcher.cycle.blame_exchange import ASKED_FOR_S, Asked, Blamed, BlameExchange, Question
from ft_launcher.ranks.monitors import NodeMonitors
from rank_monitor.contract.wire.messages import Restarter


class BlameOfInterruption:
    """Of one cycle on this node.

    Args:
        monitors: of this node.
        make_exchange: returns the exchange with the other nodes.
        gather: returns the evidence of the ranks of this node.
    """

    def __init__(
        self,
        monitors: NodeMonitors,
        make_exchange: Callable[[], BlameExchange],
        gather: Callable[[], Sequence[RankEvidence]],
    ) -> None:
        self._monitors, self._exchange, self._gather = monitors, make_exchange(), gather
        self._exchange.listen()
        self._iteration = Question("", 0)
        self._next_number = 0
        self._ask_again_at = 0.0
        self._open: tuple[int, int] | None = None
        """The number of the question that the monitors answer, and the token of their answers."""

    def fileno(self) -> int:
        """Readable when `attend` has something to do."""
        return self._exchange.news.fileno()

    def heard(self, message: Restarter) -> None:
        """Takes where the wrapper is: which call, and which iteration of it."""
        self._iteration = Question(message.prefix, message.iteration)

    def suspected(self, now: float) -> None:
        """Takes that a rank is about to exceed a limit: all nodes are asked, unless they were a moment ago."""
        if now >= self._ask_again_at:
            self._ask_again_at = now + ASKED_FOR_S
            self._exchange.ask(self._next_number, self._iteration)

    def attend(self, now: float) -> list[Blamed]:
        """Passes questions to the monitors, and their answers to the exchange; returns what was found."""
        found = []
        for news in self._exchange.news.take():
            if isinstance(news, Asked):
                self._next_number, self._ask_again_at = news.number + 1, now + ASKED_FOR_S
                self._open = news.number, self._monitors.ask_readings(stacks=True)
            else:
                found.append(news)
        if self._open is not None:
            self._answer(*self._open)
        return found

    def _answer(self, number: int, token: int) -> None:
        readings = {rank: self._monitors.found(rank).reading for rank in self._monitors.local_ranks}
        tokens = {reading.token for reading in readings.values() if reading is not None}
        if any(later < token for later in tokens):  # somebody looks at the status, for which no stacks are asked for
            self._open = number, self._monitors.ask_readings(stacks=True)
        elif tokens == {token} and None not in readings.values():
            self._open = None
            ranks = [replace(rank, snapshot=readings[rank.local_rank]) for rank in self._gather()]
            self._exchange.answer(number, ranks)

    def close(self) -> None:
        """Closes the descriptors. Call it when the threads at the store have ended."""
        self._exchange.news.close()
