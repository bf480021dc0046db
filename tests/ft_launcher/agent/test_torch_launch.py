"""What makes and runs the node agent, beside torch's own launcher of the installed release."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api as torch_launcher
from torch.distributed.launcher.api import LaunchConfig

from ft_launcher.agent.torch_launch import agent_arguments, run_agent, worker_spec

ARGS = ["-u", "train.py", "a"]
LATER = {
    "event_log_handler": "console",
    "duplicate_stdout_filters": ["loss"],
    "virtual_local_rank": True,
    "shutdown_timeout": 7,
    "signals_to_handle": "SIGTERM,SIGUSR2",
}
FAILURE = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="<N/A>")


def config() -> LaunchConfig:
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=3,
        run_id="seven",
        role="trainer",
        rdzv_backend="theirs",
        rdzv_endpoint="localhost:1",
        max_restarts=4,
        monitor_interval=0.5,
        start_method="fork",
        log_line_prefix_template="[${rank}] ",
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(os.devnull),
        **{name: value for name, value in LATER.items() if name in known},
    )


class Handler:
    """A rendezvous that notes whether it was closed."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def shutdown(self) -> bool:
        self.told.append("closed")
        return True


class Agent:
    """Stands in for an agent: notes what it is made of and what is asked of it."""

    def __init__(self, told: list[str], run: Callable[[], RunResult | None]) -> None:
        self.told, self.does = told, run
        self.spec: Any = None
        self.arguments: dict[str, Any] = {}

    def made(self, spec: Any, **arguments: Any) -> Agent:
        self.spec, self.arguments = spec, arguments
        return self

    def get_worker_group(self) -> Agent:
        return self

    def run(self) -> RunResult | None:
        self.told.append(f"signals: {os.environ.get('TORCHELASTIC_SIGNALS_TO_HANDLE')}")
        return self.does()

    def get_event_succeeded(self) -> str:
        return "succeeded"

    def get_event_failed(self) -> str:
        return "failed"


def end_by(error: BaseException) -> Callable[[], RunResult | None]:
    def run() -> RunResult | None:
        raise error

    return run


def patched(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch's launcher make this agent, and both launchers record their events in its list."""
    monkeypatch.setattr(torch_launcher, "LocalElasticAgent", agent.made)
    monkeypatch.setattr(torch_launcher.rdzv_registry, "get_rendezvous_handler", lambda _: Handler(agent.told))
    monkeypatch.setattr(
        torch_launcher.events, "record", lambda event, where="null": agent.told.append(f"{event} to {where}")
    )
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)


def outcome_of(launch: Callable[[], Any]) -> str:
    try:
        return repr(launch())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_specification_and_arguments_are_those_that_torchs_launcher_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent([], lambda: RunResult(WorkerState.SUCCEEDED))
    patched(agent, monkeypatch)
    torch_launcher.launch_agent(config(), sys.executable, ARGS)
    asked = config()
    ours = worker_spec(asked, sys.executable, ARGS, agent.spec.rdzv_handler)
    assert vars(ours) == vars(agent.spec)
    given = {name: value for name, value in agent.arguments.items() if value is not None}
    given["logs_specs"] = asked.logs_specs
    assert agent_arguments(asked) == given


@pytest.mark.parametrize(
    "run",
    [
        lambda: RunResult(WorkerState.SUCCEEDED, {0: "a", 1: None}),
        lambda: RunResult(WorkerState.FAILED, failures={0: FAILURE}),
        end_by(SignalException("told to end", signal.SIGTERM)),
        end_by(ValueError("a defect")),
    ],
    ids=["succeeds", "fails", "signal", "error"],
)
def test_it_ends_as_torchs_launcher_does(run: Callable[[], RunResult | None], monkeypatch: pytest.MonkeyPatch) -> None:
    torchs, ours = Agent([], run), Agent([], run)
    with monkeypatch.context() as patch:
        patched(torchs, patch)
        theirs = outcome_of(lambda: torch_launcher.launch_agent(config(), sys.executable, ARGS))
    patched(ours, monkeypatch)
    made: Any = ours.made(worker_spec(config(), sys.executable, ARGS, Handler(ours.told)))
    assert outcome_of(lambda: run_agent(made, config())) == theirs
    assert ours.told == torchs.told


@pytest.mark.parametrize(
    "entrypoint", [sys.executable, "/bin/train", outcome_of], ids=["script", "program", "function"]
)
def test_the_error_names_what_ran_as_torchs_launcher_does(entrypoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent([], lambda: RunResult(WorkerState.FAILED, failures={0: FAILURE}))
    patched(agent, monkeypatch)
    theirs = outcome_of(lambda: torch_launcher.launch_agent(config(), entrypoint, ARGS))
    made: Any = agent.made(worker_spec(config(), entrypoint, ARGS, Handler([])))
    assert outcome_of(lambda: run_agent(made, config())) == theirs
