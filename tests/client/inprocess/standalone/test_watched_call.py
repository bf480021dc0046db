"""The beat of a node: one agent beats, and another takes over; a node that beats no more is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed import PrefixStore

from ft_client.inprocess.standalone.watched_call import CallMembers, NodeWatch, this_node
from tests.client.inprocess.conftest import connection
from tests.client.inprocess.nursery import Nursery
from tests.client.stranger import holding, needs_another_user
from tests.patience import until


def test_another_agent_goes_on(ranks: Nursery, server: Any) -> None:
    call_members = CallMembers(PrefixStore("call/agents", server), 3)
    started, node = [], this_node()
    timeouts = {"heartbeat_interval": 0.05}
    for member in (1, 2):
        rank = ranks.rank()
        address = ["127.0.0.1", server.port]
        agent, _ = rank.do("start", member=member, world_size=3, address=address, timeouts=timeouts)
        started.append((rank, agent))
        until(lambda: sum(map(len, call_members.members().values())) == len(started), "it comes")
        count = call_members.beat(node, 0)
        until(lambda: call_members.beat(node, 0) > count, "the node beats")  # noqa: B023
    assert call_members.members() == {node: [1, 2]}
    (first, agent), (second, _) = started
    first.do("close")
    first.leave()
    until(lambda: agent not in ranks.processes(), "the one that beats has ended")
    count = call_members.beat(node, 0)
    until(lambda: call_members.beat(node, 0) > count, "the other goes on")
    second.do("close")
    second.leave()


@needs_another_user
@pytest.mark.parametrize("listens", ["128", "0", "never"])
def test_another_user_who_holds_the_name_silences_nobody(ranks: Nursery, server: Any, listens: str) -> None:
    call_members = CallMembers(PrefixStore("call/agents", server), 3)
    with holding(f"ft-beat-{call_members.token()}", listens):
        rank, node = ranks.rank(), this_node()
        address, timeouts = ["127.0.0.1", server.port], {"heartbeat_interval": 0.05}
        rank.do("start", member=1, world_size=3, address=address, timeouts=timeouts)
        until(lambda: call_members.beat(node, 0) > 0, "the node beats")
        rank.do("close")
        rank.leave()


def test_a_node_is_lost_once_after_each_time_that_it_was_heard(server: Any) -> None:
    """Nodes that are through are not watched, nor one that never beat; one that beats again may be lost again."""
    lost: list[list[int]] = []
    call_members = CallMembers(PrefixStore("call", server), 6)
    for member, node in enumerate(("a", "a", "b", "c", "d")):
        call_members.join(member, node)
    for node in ("a", "b", "d"):
        call_members.beat(node)
    call_members.end(2)
    call_members.end(1)
    said = threading.Event()
    nodes = NodeWatch(lambda: CallMembers(connection(server.port), 6), 0.3, 0.02, lost.append, lambda line: said.set())
    watch = threading.Thread(target=nodes.run)
    watch.start()
    until(lambda: lost or call_members.beat("d") == 0, "the silent node is lost, while another beats")
    assert lost == [[0]]
    call_members.beat("a")
    until(lambda: len(lost) > 1 or call_members.beat("d") == 0, "it beat once more, and is lost again")
    assert lost == [[0], [0]]
    for member in range(6):
        call_members.end(member)
    watch.join(60)
    assert not watch.is_alive() and said.is_set()
