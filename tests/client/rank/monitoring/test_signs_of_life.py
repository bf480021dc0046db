"""Heartbeats and sections: what arrives, what heals when something was lost, and threads at the same time."""

from __future__ import annotations

import os
import threading

import pytest

from ft_client import RankMonitorClient, RankMonitorClientError
from ft_client.rank.monitoring import process
from rank_monitor.contract.wire.messages import NO_ITERATION, Heartbeat, Hello, IterationReached, LimitsSet, Sections
from tests.client.fake_monitor import FakeMonitor
from tests.client.story import STATE, connected_anew, names
from tests.patience import until


def test_signs_of_life_arrive_in_order_with_their_moments(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    client.send_heartbeat()
    client.start_section("setup")
    client.start_section("load")
    client.report_iteration(12)
    client.end_section("setup")
    client.end_all_sections()
    client.send_heartbeat()
    monitor.wait_for(Heartbeat, 2)
    sections = monitor.messages(Sections)
    assert [names(one) for one in sections] == [["setup"], ["setup", "load"], ["load"], []]
    assert [one.iteration for one in sections] == [NO_ITERATION, NO_ITERATION, 12, 12]
    assert monitor.messages(IterationReached) == [IterationReached(12)]
    order = [one for one in monitor.received if isinstance(one.message, (Heartbeat, Sections, IterationReached))]
    assert [one.sent_ns for one in order] == sorted(one.sent_ns for one in order)
    assert sections[1].open[0][1] < sections[1].open[1][1] == order[2].sent_ns


def test_a_section_as_context_is_closed_by_an_exception(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    with pytest.raises(KeyError, match="mine"), client.section("step"):
        raise KeyError("mine")
    with pytest.raises(KeyError, match="also mine"), client.section("step"):
        client.end_all_sections()
        raise KeyError("also mine")
    assert [names(one) for one in monitor.wait_for(Sections, 4)] == [["step"], [], ["step"], []]


def test_too_many_open_sections_are_misuse(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    for number in range(64):
        client.start_section(f"s{number}")
    with pytest.raises(RankMonitorClientError, match="at most 64 sections"):
        client.start_section("s64")
    client.end_section("s3")
    client.start_section("s64")
    assert len(monitor.wait_for(Sections, 66)[-1].open) == 64


def test_a_new_monitor_learns_the_whole_state(monitor: FakeMonitor) -> None:
    client = RankMonitorClient()
    client.load_state_dict(STATE)
    client.init_workload_monitoring(num_warmup_iters=2)
    client.report_iteration(8)
    client.start_section("step")
    monitor.wait_for(Sections)
    last = monitor.received[-1]
    monitor.drop()
    monitor.wait_for(Sections, 2)
    assert monitor.kinds()[-3:] == ["Hello", "LimitsSet", "Sections"]
    hello = monitor.messages(Hello)[1]
    assert hello == Hello(os.getpid(), True, last.sent_ns, True, 2)
    assert monitor.messages(Sections)[1] == last.message
    assert monitor.received[-1].sent_ns == last.sent_ns, "what is said again is not a new sign of life"
    assert monitor.messages(LimitsSet)[1] == monitor.messages(LimitsSet)[0]


def test_a_training_that_showed_no_life_does_not_seem_to_on_reconnection(
    monitor: FakeMonitor, client: RankMonitorClient
) -> None:
    assert connected_anew(monitor, client) == ["Hello"]
    assert not monitor.messages(Hello)[1].got_first_sign
    assert monitor.messages(Hello)[1].last_sign_ns == monitor.received[1].sent_ns, "the moment of the attach"


def test_a_lost_section_message_is_healed_by_the_next_heartbeat(
    monitor: FakeMonitor, client: RankMonitorClient
) -> None:
    monitor.pause()
    link = process.current()
    assert link is not None
    while not link.losses:
        client.send_heartbeat()
    client.start_section("step")
    client.start_section("inner")
    client.end_section("step")
    monitor.resume()

    def healed() -> bool:
        client.send_heartbeat()
        return bool(monitor.messages(Sections))

    until(healed, "a message with the whole set")
    assert names(monitor.messages(Sections)[-1]) == ["inner"]


def test_limits_lost_in_a_full_queue_are_said_again(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    monitor.pause()
    link = process.current()
    assert link is not None
    while not link.losses:
        client.send_heartbeat()
    client.load_state_dict(STATE)
    assert link.stale
    monitor.resume()

    def said_again() -> list[LimitsSet]:
        link.resend_state()  # as the watchdog does, which may come first
        return monitor.messages(LimitsSet)

    assert until(said_again, "the limits, once the queue has room")[0].subsequent == 20.0


def test_threads_at_the_same_time_corrupt_nothing(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    def work() -> None:
        for _ in range(200):
            with client.section(threading.current_thread().name):
                client.send_heartbeat()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def settled() -> bool:
        client.send_heartbeat()
        return names(monitor.messages(Sections)[-1]) == []

    until(settled, "nothing is open in the end")
    assert {name for one in monitor.messages(Sections) for name in names(one)} <= {thread.name for thread in threads}
    link = process.current()
    assert link is not None

    def unaccounted() -> int:
        """How many messages neither arrived nor were counted as lost: each has a number of its own."""
        arrived = [one.sequence for one in (*monitor.received, *monitor.progress)]
        assert len(arrived) == len(set(arrived))
        return max(arrived) - len(arrived) - link.losses

    until(lambda: unaccounted() <= 0, "every message arrived or was counted as lost")


def test_a_change_overtaken_by_another_thread_is_followed_by_the_set_as_it_is(
    monitor: FakeMonitor, client: RankMonitorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread's message is made to go out after ours was packed and before it is sent."""
    link = process.current()
    assert link is not None
    send, overtaking = link.send, [True]

    def overtaken(data: bytes) -> bool:
        if overtaking:
            overtaking.pop()
            client.end_section("theirs")
        return send(data)

    client.start_section("theirs")
    monkeypatch.setattr(link, "send", overtaken)
    client.start_section("ours")
    monkeypatch.undo()
    sections = monitor.wait_for(Sections, 4)
    assert [names(one) for one in sections] == [["theirs"], ["ours"], ["theirs", "ours"], ["ours"]]
