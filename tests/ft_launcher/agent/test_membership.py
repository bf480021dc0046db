"""The membership of a node, where the order of two events decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ft_launcher.agent.cycle.cycle import EndedElsewhere
from ft_launcher.agent.membership import Membership
from ft_launcher.job.coordinator.node_messages import CycleEnd, EndReason

END = CycleEnd(0, EndReason.FAILED, "a rank failed")


class Rendezvous:
    """Has the end of the cycle once, as the real one does; the node is neither cut off nor fenced."""

    def __init__(self) -> None:
        self.lease = SimpleNamespace(silent_s=lambda: None)
        self.ends = [END]
        self.link = SimpleNamespace(cut=lambda now: None)

    def poll(self, ready: set[int]) -> None:
        pass

    def trouble(self) -> None:
        pass

    def pop_end(self) -> CycleEnd | None:
        return self.ends.pop() if self.ends else None


def test_an_end_that_arrives_with_the_last_exit_code_is_not_waited_for_again() -> None:
    """The loop polls all sources at each wake-up: it takes the end also where the ranks' success came first."""
    rendezvous: Any = Rendezvous()
    stop = SimpleNamespace(exit_barrier_timeout=300.0)
    ranks: Any = SimpleNamespace(parts=SimpleNamespace(settings=SimpleNamespace(stop=stop)))
    nothing: Any = None
    node = Membership(ranks, nothing, nothing, rendezvous, nothing)
    assert node.poll(set()) == [EndedElsewhere(END)] and rendezvous.ends == []
    assert node._await_end(limit_s=0.0) == END
