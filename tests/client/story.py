"""What several tests of the client tell: a state that was learned, a connection lost and made anew."""

from __future__ import annotations

from ft_client import RankMonitorClient
from ft_client.rank.monitoring import process
from rank_monitor.contract.wire.messages import Hello, IterationReached, Sections
from tests.client.fake_monitor import FakeMonitor
from tests.patience import until

STATE = {
    "current_timeouts": {
        "heartbeat": {"initial": 40.0, "subsequent": 20.0, "were_calculated": True},
        "section": {
            "section": {"step": 15.0, "setup": 99.0},
            "out_of_section": None,
            "calculated_sections": ["step"],
            "is_out_of_section_calculated": False,
        },
    }
}


def names(sections: Sections) -> list[str]:
    return [name for name, _ in sections.open]


def connected_anew(monitor: FakeMonitor, client: RankMonitorClient) -> list[str]:
    """Drops the connection; the kinds of what came over the next one until its hello's state was whole."""
    before = len(monitor.received)
    monitor.drop()
    until(lambda: len(monitor.messages(Hello)) > 1, "a second hello")
    link = process.current()
    assert link is not None
    until(lambda: not link._connecting.locked(), "the new connection in use")
    client.report_iteration(1000)
    monitor.wait_for(IterationReached)
    return monitor.kinds()[before:-1]
