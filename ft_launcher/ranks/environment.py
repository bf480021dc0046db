"""Builds the environment of a rank beyond torch's own: its monitor, the job's tag, limits, NCCL. Pure.

Called by `agent/ranks.py` for each cycle, and by `commands/dry_run.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ft_launcher.ranks import nccl
from ft_launcher.ranks.devices import VISIBLE, Relocation
from rank_monitor.contract import env
from rank_monitor.contract.settings.config import NcclSettings, RecordSettings, StartSettings

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
    settings: NcclSettings, environ: Mapping[str, str], multipliers: Mapping[str, float], relocation: Relocation
) -> dict[str, str]:
    """Returns the variables that all ranks of a cycle get.

    Args:
        environ: the launcher's own environment, which the ranks have too.
        multipliers: learned limit -> factor, after a kill by that limit.
        relocation: to other hardware, and why.

    Raises:
        ConfigError: as `nccl.variables`.
    """
    variables = nccl.variables(settings, environ)
    if multipliers:
        variables[env.LIMIT_MULTIPLIERS] = json.dumps(dict(multipliers))
    if relocation.result is not None:
        variables[env.RESULT_IN_DOUBT] = json.dumps(asdict(relocation.result))
    if relocation.visible:
        variables[VISIBLE] = relocation.visible
    return variables


def start_environment(settings: StartSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which a rank's bootstrap applies the options.

    Args:
        environ: the launcher's own environment, which the ranks have too.
    """
    wanted = {env.ALIAS_NVRX: str(int(settings.alias_nvrx)), env.INJECT: ";".join(settings.inject)}
    # A variable that would only say the default is left out, unless the launcher's own must be overridden.
    return {name: text for name, text in wanted.items() if text not in ("", "0") or name in environ}


def printing_environment(settings: RecordSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable by which a rank that is a program (`--no-python`) prints each line at once, if it is Python.

    Into a file Python writes 8 KiB at a time: what such a rank printed would be read minutes later, and
    `--ft-watch-log-timeout` could end it although it trains. Our own ranks run as `python -u` anyhow.

    Args:
        environ: the launcher's own environment, in which the user may have decided it.
    """
    if settings.watch_log is None or _UNBUFFERED in environ:
        return {}
    return {_UNBUFFERED: "1"}
