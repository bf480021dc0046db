"""The link of a node that is alone: the coordinator runs in this process, without a store and without a thread.

`rendezvous/handler.py` makes one where a job has one node, and `rendezvous/foreign.py` one for each node under a
handler that is not ours. `send`, `ask` and `answer` call the coordinator in the caller's thread. Its last answer and
its last end of a cycle are kept in two fields until the caller asks for them: there is no second node, so there is
never more than one of each.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from ft_launcher.decide.policy.case import PolicyJudgement
from ft_launcher.job.coordinator.coordinator import Coordinator
from ft_launcher.job.coordinator.node_messages import (
    Answer,
    CycleEnd,
    Ended,
    JoinRequest,
    Left,
    RankAssigned,
    Reply,
    Work,
)
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.link.coordinator_link import Cut


class LocalLink:
    """The link of one node to the coordinator in its own process.

    Args:
        node: its id.
        settings: the rules and times of the job; those for other nodes have no effect.
    """

    hosts_store = False

    def __init__(self, node: str, settings: NodeSettings) -> None:
        rules = replace(settings.rules, hosts=True)  # nobody takes over from this coordinator
        self._machine = Coordinator(node, rules, settings.policy, time.monotonic())
        self._answer: tuple[int, Answer] | None = None
        self._end: CycleEnd | None = None
        self.is_polled = False

    def send(self, message: Ended | Left) -> None:
        """Has the coordinator process a message. An end of the cycle that follows from it is there at once."""
        self._note(self._machine.on(message, time.monotonic()))

    def ask(self, arrival: JoinRequest) -> None:
        """Has the coordinator process an arrival."""
        self._note(self._machine.on(arrival, time.monotonic()))

    def answer(self, seq: int, limit_s: float) -> Answer | None:
        """Returns the answer to arrival number `seq`; None if it is not due within `limit_s` seconds.

        The coordinator answers at once, except where the policy wants a pause (`--ft-backoff`): then this sleeps until
        the answer is due, or for `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while self._answer is None or self._answer[0] != seq:
            due = self._machine.next_deadline()
            now = time.monotonic()
            if due is None or due > deadline:
                time.sleep(max(0.0, deadline - now))
                return None
            time.sleep(max(0.0, due - now))
            self._note(self._machine.on_tick(time.monotonic()))
        return self._answer[1]

    def next_deadline(self) -> float | None:
        """Returns when an answer may be there by time alone (monotonic seconds); None: never."""
        return self._machine.next_deadline()

    @property
    def judgement(self) -> PolicyJudgement | None:
        """What was decided about the fault of the last cycle, also before the answer is due; None: nothing was."""
        return self._machine.judgement

    def pop_end(self, cycle: int) -> CycleEnd | None:
        """Returns the end of this cycle if it has ended and that was not taken yet."""
        end = self._end
        if end is None or end.cycle != cycle:
            return None
        self._end = None
        return end

    def _note(self, work: Iterable[Work]) -> None:
        """Stores what the coordinator wants done. Records for a successor are dropped: nobody takes over."""
        for item in work:
            match item:
                case Reply():
                    self._answer = item.seq, item.answer
                case CycleEnd():
                    self._end = item

    def close(self, last: Left, limit_s: float) -> None:
        """Has the coordinator process the last message of this node. Does not block."""
        self.send(last)

    # What only concerns other nodes.

    def fileno(self) -> None:
        """Returns None: an end comes only by what this process does."""

    def entered(self, place: RankAssigned, hosted_by_user: bool = False) -> None:
        """Does nothing: nobody counts this node as lost."""

    def announce(self, cycle: int, host: str) -> None:
        """Does nothing: no other node looks for the store."""

    def host_of_cycle(self, cycle: int, limit_s: float) -> bytes | None:
        """Never called: this node has rank 0."""
        raise AssertionError("the only node hosts the store of each cycle")

    def was_superseded(self) -> bool:
        """Returns False: no other node coordinates."""
        return False

    def cut(self, now: float) -> Cut | None:
        """Returns None: nothing lies between this node and its coordinator."""
        return None

    def trouble(self) -> Exception | None:
        """Returns None, as `cut` does."""
        return None
