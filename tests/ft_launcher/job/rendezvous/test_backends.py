"""What a node says of itself, and what the settings and torch's keys mean for the rules of the nodes."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from ft_launcher.job.coordinator.formation import Size, choose
from ft_launcher.job.coordinator.node_messages import NO_RANK
from ft_launcher.job.rendezvous.backends import node_settings, this_node
from rank_monitor.contract.settings.config import MemberSettings, RestartSettings, Settings
from tests.ft_launcher.job.nodes_of_a_test import node


def parameters(**conf: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", "127.0.0.1:1", "job", 2, 4, **conf)


BLOCK = {"SLURM_TOPOLOGY_ADDR": "spine.block2.node7"}


@pytest.mark.parametrize(
    ("environ", "rank", "index"),
    [
        ({"SLURM_PROCID": "3", "SLURM_NODEID": "4", "GROUP_RANK": "5"}, 6, 3),
        ({"SLURM_NODEID": "4", "GROUP_RANK": "5"}, 6, 4),
        ({"GROUP_RANK": "5"}, 6, 5),
        ({"SLURM_PROCID": "", "GROUP_RANK": "x"}, 6, 6),
        ({}, 0, 0),
    ],
)
def test_the_order_of_nodes(environ: dict[str, str], rank: int, index: int) -> None:
    arrival = this_node(2, parameters(rank=rank), MemberSettings(), environ | BLOCK, insists=False)
    assert arrival.order == f"{index:010d} spine.block2.node7 {arrival.name}"
    assert (arrival.rank, arrival.nprocs) == (NO_RANK, 2)
    assert this_node(2, parameters(rank=rank), MemberSettings(), environ, insists=True).rank == rank


@pytest.mark.parametrize(("rank", "insists", "says"), [(6, False, True), (3, False, False), (6, True, False)])
def test_a_node_rank_that_the_environment_overrules_says_so(
    rank: int, insists: bool, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    this_node(2, parameters(rank=rank), MemberSettings(), {"SLURM_PROCID": "3"}, insists=insists)
    assert ("--node-rank 6 has no effect: nodes are sorted by SLURM_PROCID, which is 3 here" in caplog.text) == says


def test_nodes_without_a_number_stand_by_topology_and_then_by_name() -> None:
    def order(topology: str, name: str) -> str:
        environ = {"SLURM_TOPOLOGY_ADDR": topology} if topology else {}
        arrival = this_node(1, parameters(), MemberSettings(), environ, insists=False)
        return arrival.order.replace(arrival.name, name)

    places = [("a.b.z", "z"), ("a.a.y", "y"), ("", "x"), ("", "w")]
    came = [node(name, order=order(topology, name)) for topology, name in places]
    assert [one.node for one in choose(came, [], Size(4, 4))] == ["w", "x", "y", "z"]


def test_the_group_of_a_node() -> None:
    def group(environ: dict[str, str], **settings: Any) -> str:
        return this_node(1, parameters(), MemberSettings(**settings), environ, insists=False).group

    assert group({}) == ""
    assert group(BLOCK) == "spine.block2"
    assert group(BLOCK, node_group="rack4") == "rack4"


@pytest.mark.parametrize(
    ("conf", "timeout_s", "beat_s"),
    [
        ({}, 15, 2),
        ({"keep_alive_interval": "3", "keep_alive_max_attempt": "4"}, 12, 2),
        ({"keep_alive_interval": "1"}, 3, 0.5),
        ({"keep_alive_max_attempt": "6"}, 30, 2),
    ],
)
def test_when_a_silent_node_is_lost(conf: dict[str, str], timeout_s: float, beat_s: float) -> None:
    settings = node_settings(parameters(**conf), Settings(), 0)
    assert (settings.timeout_s, settings.beat_s) == (timeout_s, beat_s)
    assert settings.rules.rank_claim_s > timeout_s


@pytest.mark.parametrize(
    ("scale", "grows", "shrinks"),
    [("both", True, True), ("up", True, False), ("down", False, True), ("off", False, False)],
)
def test_the_number_of_nodes(scale: str, grows: bool, shrinks: bool) -> None:
    members = MemberSettings(spares=1, segment=2, scale=scale)
    rules = node_settings(parameters(), Settings(members=members), 0).rules
    assert rules.size == Size(2, 4, held_back=1, segment=2, may_grow=grows, may_shrink=shrinks)
    assert not rules.keep_healthy
    healthy = Settings(restart=RestartSettings(restart_policy="min-healthy"))
    assert node_settings(parameters(), healthy, 0).rules.keep_healthy


def test_how_long_nodes_wait_for_each_other() -> None:
    assert (
        node_settings(parameters(), Settings(), 0).rules.join_s,
        node_settings(parameters(), Settings(), 0).rules.last_call_s,
    ) == (
        600,
        30,
    )
    given = node_settings(parameters(join_timeout="7", last_call_timeout="0"), Settings(), 0).rules
    assert (given.join_s, given.last_call_s) == (7, 0)
    assert node_settings(parameters(close_timeout="8"), Settings(), 0).close_s == 8
    assert node_settings(parameters(timeout="9"), Settings(), 0).rules.join_s == 9, "static has that key"


@pytest.mark.parametrize(("static", "join_s"), [(False, 600), (True, 900)])
def test_the_timeout_that_torch_puts_into_each_configuration_is_that_of_static(static: bool, join_s: int) -> None:
    config = LaunchConfig(min_nodes=2, max_nodes=4, nproc_per_node=1)
    assert node_settings(parameters(**config.rdzv_configs), Settings(), 0, static).rules.join_s == join_s
    config = LaunchConfig(min_nodes=2, max_nodes=4, nproc_per_node=1, rdzv_configs={"join_timeout": 7})
    assert node_settings(parameters(**config.rdzv_configs), Settings(), 0, static).rules.join_s == 7
