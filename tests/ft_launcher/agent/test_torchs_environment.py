"""What the node agent starts ranks with, beside what torch's own agent of the installed release starts them with."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import local_elastic_agent as torch_agent
from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from ft_launcher.agent.node_agent import NodeAgent, placement_of
from ft_launcher.job.rendezvous.cycle_store import CycleStore

CYCLE = 2
OF_THIS_TORCH = {field.name for field in fields(WorkerSpec)}
PIDS = {0: 100, 1: 101}


class StartedRanks:
    """Stands in for the ranks of the agent, and for what torch's agent gets from `start_processes`."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.placement: Any = None

    def prepare(self) -> None: ...

    def bring_state_back(self) -> None: ...

    def start(self, **arguments: Any) -> StartedRanks:
        self.arguments = arguments
        return self

    def begin(self, processes: object) -> None: ...

    def pids(self) -> dict[int, int]:
        return PIDS


def agent_of(kind: type[LocalElasticAgent], folder: Path, **more: Any) -> Any:
    """An agent with two ranks, rank 3 and 4 of 5, on the second of two nodes, in the third cycle."""
    handler = SimpleNamespace(
        get_run_id=lambda: "run 7",
        get_backend=lambda: "none",
        use_agent_store=True,
        numbers_ranks=False,
        shutdown=lambda: True,
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=2,
        rdzv_handler=handler,
        entrypoint="python",
        args=("-u", "train.py", "--gpu", "${local_rank}", "${other}"),
        max_restarts=5,
        **{name: value for name, value in more.items() if name in OF_THIS_TORCH},
    )
    agent: Any = kind.__new__(kind)
    template = "[${role_name}${rank}/${local_rank}]: ${hostname}"
    LocalElasticAgent.__init__(agent, spec, DefaultLogsSpecs(str(folder)), log_line_prefix_template=template)
    group = agent.get_worker_group()
    group.workers = [Worker(number, 3 + number, 1 + number, 5, 4) for number in range(2)]
    group.store, group.group_rank, group.group_world_size = HashStore(), 1, 2
    group.master_addr, group.master_port = "node-a", 4321
    agent._remaining_restarts = spec.max_restarts - CYCLE
    return agent


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments by which torch's agent starts ranks, and those by which ours does."""
    torchs, theirs = agent_of(LocalElasticAgent, folder, **more), StartedRanks()
    with monkeypatch.context() as patch:
        patch.setattr(torch_agent, "start_processes", theirs.start)
        assert torchs._start_workers(torchs.get_worker_group()) == PIDS
    torchs._pcontext = None
    torchs._shutdown()
    agent, ours = agent_of(NodeAgent, folder, **more), StartedRanks()
    agent._ranks = ours
    group = agent.get_worker_group()
    ours.placement = placement_of(group, CycleStore(CYCLE, "node-a", 4321, None))
    assert agent._start_workers(group) == PIDS
    agent._pcontext = None
    LocalElasticAgent._shutdown(agent)
    for arguments in (theirs.arguments, ours.arguments):
        arguments["logs_specs"] = type(arguments["logs_specs"])
    return theirs.arguments, ours.arguments


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "CUDA_VISIBLE_DEVICES": "4, 5"},
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "{folder}/timer"},
        {"TORCHELASTIC_TIMER_FILE": "{folder}/timer"},
    ],
    ids=["none", "passed on", "watchdog", "file of a watchdog"],
)
def test_ranks_start_with_what_torchs_agent_gives_them(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    torchs, ours = both(tmp_path, monkeypatch, duplicate_stdout_filters=["loss"])
    # Before torch 2.14 torch's agent leaves this word as it is.
    prefixes = {rank: each.replace("${hostname}", gethostname()) for rank, each in torchs["log_line_prefixes"].items()}
    assert ours == torchs | {"log_line_prefixes": prefixes}
    assert ours["envs"][1]["RANK"] == "4"
    assert ours["args"][1] == ("-u", "train.py", "--gpu", "1", "${other}")


@pytest.mark.skipif("virtual_local_rank" not in OF_THIS_TORCH, reason="this torch has no --virtual-local-rank")
def test_each_rank_sees_its_own_device_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    torchs, ours = both(tmp_path, monkeypatch, virtual_local_rank=True)
    assert ours["envs"] == torchs["envs"]
    assert [ours["envs"][rank]["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["4", "5"]
    assert {ours["envs"][rank]["LOCAL_RANK"] for rank in range(2)} == {"0"}
