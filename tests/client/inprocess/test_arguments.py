"""The wrapper's arguments: what each of them may be."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ft_client.inprocess.arguments import Arguments, path_of
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.health_check import CudaHealthCheck, FaultCounter
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.rank_assignment import (
    ActivateAllRanks,
    Layer,
    MaxActiveWorldSize,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
    assign,
)
from ft_client.inprocess.rank_filter import WorldSizeDivisibleBy
from ft_client.inprocess.state import Mode, State


def arguments(**given: Any) -> Arguments:
    return Arguments(**{"store_factory": HashStore, "abort": None} | given)


@pytest.mark.parametrize(
    "given",
    [
        {"store_factory": lambda **kwargs: HashStore()},
        {"store_kwargs": {"port": 1}},
        {"initialize": RetryController()},
        {"initialize": Compose(RetryController(), lambda state: state)},
        {"initialize": lambda state: state},
        {"health_check": Compose(CudaHealthCheck(), FaultCounter(3))},
        {"rank_assignment": Tree([Layer()])},
        {"rank_assignment": MaxActiveWorldSize(4)},
        {"rank_filter": WorldSizeDivisibleBy(4)},
        {"rank_filter": lambda state: state},
        {"monitor_process_logfile": "/tmp/monitor_{rank}.log", "monitor_process_pidfile": "/run/m.pid"},
        {"enabled": False},
    ],
)
def test_what_is_allowed(given: dict[str, Any]) -> None:
    checked = arguments(**given)
    assert all(getattr(checked, name) is value for name, value in given.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"store_factory": None}, "store_factory=None cannot be called"),
        ({"store_kwargs": None}, "store_kwargs=None is not a mapping"),
        ({"store_kwargs": [1]}, r"store_kwargs=\[1\]"),
        ({"enabled": 1}, "enabled=1 is not a bool"),
        ({"soft_timeout": 60}, "soft_timeout=60 is not a timedelta"),
        ({"initialize": RetryController}, "initialize=.* is not an instance of Initialize"),
        ({"initialize": FaultCounter()}, "initialize=.*FaultCounter.* is not an instance of Initialize"),
        ({"initialize": Compose(FaultCounter(), RetryController())}, "is not an instance of Initialize"),
        ({"abort": 3}, "abort=3 is not an instance of Abort"),
        ({"finalize": "f"}, "finalize='f' is not an instance of Finalize"),
        ({"health_check": [FaultCounter()]}, "health_check="),
        ({"completion": 0}, "completion=0"),
        ({"terminate": {}}, "terminate={}"),
        ({"rank_assignment": None}, "rank_assignment=None is not an instance of RankAssignment"),
        ({"rank_assignment": ShiftRanks}, "rank_assignment="),
        ({"rank_assignment": WorldSizeDivisibleBy(4)}, "rank_assignment="),
        ({"rank_filter": MaxActiveWorldSize(4)}, "rank_filter=.* is not an instance of RankFilter"),
        ({"monitor_process_logfile": Path("/tmp/x")}, "monitor_process_logfile="),
        ({"monitor_process_pidfile": 3}, "monitor_process_pidfile=3 is not a text"),
        ({"store_factry": HashStore}, "store_factry"),
    ],
)
def test_wrong_types(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        arguments(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"monitor_process_logfile": "m.log"}, "monitor_process_logfile='m.log' is not an absolute path"),
        ({"monitor_process_pidfile": ""}, "monitor_process_pidfile=''"),
        ({"soft_timeout": datetime.timedelta(seconds=95)}, "soft_timeout=95 s must be below hard_timeout=90 s"),
    ],
)
def test_wrong_values(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments(**given)


def test_the_default_assignment_activates_all() -> None:
    state = assign(arguments().assignment, RankAssignmentCtx(State(3, 4), HashStore(), {1}))
    assert (state.rank, state.active_rank, state.active_world_size) == (2, 2, 3)


@pytest.mark.parametrize("assignment", [ShiftRanks(), Compose(ActivateAllRanks(), ShiftRanks())])
def test_the_filter_of_older_documentation(assignment: Any) -> None:
    both = arguments(
        rank_assignment=assignment,
        rank_filter=Compose(WorldSizeDivisibleBy(2), WorldSizeDivisibleBy(3)),
    ).assignment
    modes = []
    for rank in range(1, 12):
        state = assign(both, RankAssignmentCtx(State(rank, 12), HashStore(), {0}))
        assert state.active_world_size == 8
        modes.append(state.mode)
    assert modes == [Mode.ACTIVE] * 8 + [Mode.INACTIVE] * 3


def test_path_of_a_rank() -> None:
    assert path_of("/logs/{job}/m_{rank}.log", 17) == Path("/logs/{job}/m_17.log")
    assert path_of("/logs/m.log", 17) == Path("/logs/m.log")
