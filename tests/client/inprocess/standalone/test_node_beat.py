"""The beat of a node: one companion beats, and another takes over."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import PrefixStore

from ft_client.inprocess.standalone.node_beat import this_node
from ft_client.inprocess.standalone.watched_call import CallMembers
from tests.client.inprocess.nursery import Nursery, until
from tests.client.stranger import holding, needs_another_user


def test_another_companion_goes_on(ranks: Nursery, server: Any) -> None:
    call_members = CallMembers(PrefixStore("call/companion", server), 3)
    started, node = [], this_node()
    timeouts = {"heartbeat_interval": 0.05}
    for member in (1, 2):
        rank = ranks.rank()
        address = ["127.0.0.1", server.port]
        companion, _ = rank.do("start", member=member, world_size=3, address=address, timeouts=timeouts)
        started.append((rank, companion))
        until(lambda: sum(map(len, call_members.members().values())) == len(started), "it comes")
        count = call_members.beat(node, 0)
        until(lambda: call_members.beat(node, 0) > count, "the node beats")  # noqa: B023
    assert call_members.members() == {node: [1, 2]}
    (first, companion), (second, _) = started
    first.do("close")
    first.leave()
    until(lambda: companion not in ranks.processes(), "the one that beats has ended")
    count = call_members.beat(node, 0)
    until(lambda: call_members.beat(node, 0) > count, "the other goes on")
    second.do("close")
    second.leave()


@needs_another_user
@pytest.mark.parametrize("listens", ["128", "0", "never"])
def test_another_user_who_holds_the_name_silences_nobody(ranks: Nursery, server: Any, listens: str) -> None:
    call_members = CallMembers(PrefixStore("call/companion", server), 3)
    with holding(f"ft-beat-{call_members.token()}", listens):
        rank, node = ranks.rank(), this_node()
        address, timeouts = ["127.0.0.1", server.port], {"heartbeat_interval": 0.05}
        rank.do("start", member=1, world_size=3, address=address, timeouts=timeouts)
        until(lambda: call_members.beat(node, 0) > 0, "the node beats")
        rank.do("close")
        rank.leave()
