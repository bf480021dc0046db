"""The membership of a node, where the order of two events decides."""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from ft_launcher.agent.cycle.cycle import CyclePhase, EndedElsewhere
from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.membership import Membership
from ft_launcher.job.coordinator.node_messages import CycleEnd, EndReason
from rank_monitor.contract.settings.config import Settings

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


def test_a_preemption_after_which_the_job_goes_on_does_not_limit_a_later_end() -> None:
    """What the launcher does at that end, hours later, has its own time."""
    stopped: list[float] = []
    nothing: Any = None
    parts = Mock(settings=Settings(), named_signals=())
    parts.signals.read = list
    parts.signals.fileno.return_value = 0
    ranks = Mock(parts=parts, cycle=0, processes=SimpleNamespace(pids=dict, pidfds={}))
    ending = EndingSignal(ranks)
    ranks.stop = lambda: stopped.append(ending.grace_ends_at)
    rendezvous: Any = Mock(trouble=Rendezvous().trouble, link=Rendezvous().link, lease=Rendezvous().lease)
    rendezvous.pop_end.side_effect = [CycleEnd(0, EndReason.PREEMPTED, "", signal=signal.SIGTERM), None]
    node = Membership(ranks, nothing, ending, rendezvous, nothing)
    node.poll(set())
    assert node.after(CyclePhase.PREEMPTED_ELSEWHERE) is None
    assert math.isfinite(stopped[0]) and math.isinf(ending.grace_ends_at)
