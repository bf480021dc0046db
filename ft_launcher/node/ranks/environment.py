"""Builds the environment of a rank beyond torch's own: its monitor, the job's tag, limits, NCCL. Pure.

Called by `agent/ranks.py` for each cycle, and by `tools/commands/dry_run.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ft_launcher.node.ranks import nccl
from ft_launcher.record.logs.cycle_files import current_info
from rank_monitor.contract import env
from rank_monitor.contract.settings.config import Settings
from rank_monitor.contract.wire.messages import ResultInDoubt

_UNBUFFERED = "PYTHONUNBUFFERED"


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
    multipliers: Mapping[str, float],
    suspect_result: ResultInDoubt | None,
) -> dict[str, str]:
    """Returns the variables that all ranks of a cycle get.

    Args:
        environ: the launcher's own environment, which the ranks have too.
        is_program: the ranks are no Python scripts that we start (`--no-python`).
        multipliers: learned limit -> factor, after a kill by that limit.
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
    if multipliers:
        variables[env.LIMIT_MULTIPLIERS] = json.dumps(dict(multipliers))
    if suspect_result is not None:
        variables[env.RESULT_IN_DOUBT] = json.dumps(asdict(suspect_result))
    return variables
