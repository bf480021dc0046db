"""Builds the environment of a rank: torchrun's documented variables, its monitor, the job's tag, limits, NCCL. Pure.

Called by `agent/node_agent.py` and `agent/ranks.py` for each cycle, and by `tools/commands/dry_run.py`.
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
_THREADS = "OMP_NUM_THREADS"


def torch_environment(placement: Placement, numbers: RankNumbers, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of one rank that torchrun documents, and those that it passes on.

    A test compares them with what the installed torch sets. `LOCAL_RANK` becomes 0 in the node agent where each rank is
    to see its own device only.

    Args:
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
    """Returns the variables of one rank.

    Args:
        tag: of the job; a stop finds all its processes by this.
        recorder_socket: where torch's worker server of the rank is to listen; empty: nowhere.
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
        environ: the launcher's own environment, which the ranks have too.
        is_program: the ranks are no Python scripts that we start (`--no-python`).
        limit_factors: learned limit -> factor, after a kill by that limit.
        suspect_result: because of which the ranks of this cycle run on another node than before; None: they do not.

    Raises:
        ConfigError: as `nccl.variables`.
    """
    # By these a rank's bootstrap applies the options. One that would only say the default is left out, unless the
    # launcher's own must be overridden.
    options = {env.ALIAS_NVRX: str(int(settings.start.alias_nvrx)), env.INJECT: ";".join(settings.start.inject)}
    variables = {name: text for name, text in options.items() if text not in ("", "0") or name in environ}
    info = current_info(settings.record, environ)
    if info is not None:
        variables[env.CURRENT_CYCLE_INFO] = str(info)
    # A program that is Python prints each line at once, unless the user decides it. Into a file it writes 8 KiB at a
    # time: what such a rank printed would be read minutes later, and `--ft-watch-log-timeout` could end it although it
    # trains. Our own ranks run as `python -u` anyhow.
    if is_program and settings.record.watch_log is not None and _UNBUFFERED not in environ:
        variables[_UNBUFFERED] = "1"
    variables |= nccl.variables(settings.nccl, environ)
    if limit_factors:
        variables[env.LIMIT_MULTIPLIERS] = json.dumps(dict(limit_factors))
    if suspect_result is not None:
        variables[env.RESULT_IN_DOUBT] = json.dumps(asdict(suspect_result))
    return variables
