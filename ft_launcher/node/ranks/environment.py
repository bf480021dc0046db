"""Builds the environment of a rank: torchrun's documented variables, its monitor, the job's tag, limits, NCCL. Pure.

A rank's environment is the launcher's own, updated by three parts:
- `torch_environment`: what torchrun documents, for each rank (`agent/node_agent.py`),
- `cycle_environment`: the same for all ranks of a cycle (`agent/ranks.py`),
- `rank_environment`: where this rank finds its monitor (`agent/ranks.py`).

`tools/commands/dry_run.py` shows the same variables without starting anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ft_launcher.node.ranks import nccl
from ft_launcher.record.logs.cycle_files import current_info
from ft_launcher.record.placement import Placement, RankNumbers
from rank_monitor.contract import env
from rank_monitor.contract.settings.config import Settings
from rank_monitor.contract.wire.messages import ResultInDoubt

_UNBUFFERED = "PYTHONUNBUFFERED"
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""torchrun sets this variable to 1 unless the user has set it."""
_THREADS = "OMP_NUM_THREADS"
"""torchrun sets this variable in its own environment and passes it on. Here `settings/` has set it by now."""


def torch_environment(placement: Placement, numbers: RankNumbers, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of one rank that torchrun documents, and those that torchrun passes on.

    A test compares them with what the installed torch sets. With `--virtual-local-rank` the node agent changes
    `LOCAL_RANK` to 0 afterwards: each rank then sees its own device only.

    Args:
        placement: this node's part in the cycle.
        numbers: the rank's numbers in the job, on the node and in its role.
        environ: the launcher's own environment.
    """
    variables = {
        "LOCAL_RANK": str(numbers.local_rank),
        "RANK": str(numbers.rank),
        "GROUP_RANK": str(placement.node_rank),
        "ROLE_RANK": str(numbers.role_rank),
        "ROLE_NAME": placement.role,
        "LOCAL_WORLD_SIZE": str(len(placement.ranks)),
        "WORLD_SIZE": str(placement.world_size),
        "GROUP_WORLD_SIZE": str(placement.nodes),
        "ROLE_WORLD_SIZE": str(placement.role_world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        # The number of the cycle is the same on all nodes; each cycle but the first is a restart.
        "TORCHELASTIC_RESTART_COUNT": str(placement.cycle),
        "TORCHELASTIC_MAX_RESTARTS": str(placement.max_restarts),
        "TORCHELASTIC_RUN_ID": placement.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(placement.shares_store),
        _NCCL_ERRORS: environ.get(_NCCL_ERRORS, "1"),
    }
    if _THREADS in environ:
        variables[_THREADS] = environ[_THREADS]
    return variables


def rank_environment(
    tag: str, cycle: int, monitor_socket: Path, stack_file: Path, stack_signal: int, recorder_socket: str = ""
) -> dict[str, str]:
    """Returns the variables by which one rank finds its monitor, and the launcher finds the rank.

    Args:
        tag: the job's tag. Children inherit the variable, so a stop finds all processes of the job by it.
        cycle: the number of the cycle.
        monitor_socket: the socket of the rank's monitor, to which the client connects.
        stack_file: the file that the rank writes its stacks to.
        stack_signal: the signal at which the rank writes its stacks.
        recorder_socket: where torch's worker server in the rank is to listen, which gives torch's flight recorder;
            empty: nowhere.
    """
    variables = {
        env.JOB_TAG: tag,
        env.CYCLE: str(cycle),
        env.RANK_MONITOR_SOCKET: str(monitor_socket),
        env.STACK_FILE: str(stack_file),
        env.STACK_SIGNAL: str(int(stack_signal)),
    }
    if recorder_socket:
        variables[env.FLIGHT_RECORDER_SOCKET] = recorder_socket
    return variables


def cycle_environment(
    settings: Settings,
    environ: Mapping[str, str],
    is_program: bool,
    limit_factors: Mapping[str, float],
    suspect_result: ResultInDoubt | None,
) -> dict[str, str]:
    """Returns the variables that all ranks of a cycle get.

    Args:
        settings: of this launcher.
        environ: the launcher's own environment, which the ranks have too. A variable that the user set there wins.
        is_program: whether the ranks are programs that are started as they are (`--no-python`), and no Python scripts.
        limit_factors: learned limit -> factor by which the rank is to extend it. Not empty after a cycle in which a
            learned limit ended a rank.
        suspect_result: the result because of which the ranks of this cycle were moved to other nodes, for the rank that
            computes it again; None: no rank was moved.

    Raises:
        ConfigError: as `nccl.variables`.
    """
    # A rank's bootstrap reads these options from the environment. A variable that would only say the default is left
    # out, unless the launcher's own environment has it and must be overridden.
    options = {env.ALIAS_NVRX: str(int(settings.start.alias_nvrx)), env.INJECT: ";".join(settings.start.inject)}
    variables = {name: text for name, text in options.items() if text not in ("", "0") or name in environ}
    info = current_info(settings.record, environ)
    if info is not None:
        variables[env.CURRENT_CYCLE_INFO] = str(info)
    # A program that is Python must print each line at once, unless the user has decided this. Into a file Python writes
    # 8 KiB at a time: the lines would be read minutes later, and `--ft-watch-log-timeout` could end a rank that trains.
    # Scripts need no variable: they run as `python -u`.
    if is_program and settings.record.watch_log is not None and _UNBUFFERED not in environ:
        variables[_UNBUFFERED] = "1"
    variables |= nccl.variables(settings.nccl, environ)
    if limit_factors:
        variables[env.LIMIT_MULTIPLIERS] = json.dumps(dict(limit_factors))
    if suspect_result is not None:
        variables[env.RESULT_IN_DOUBT] = json.dumps(asdict(suspect_result))
    return variables
