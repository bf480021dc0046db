"""The environment of a rank beyond torch's own: how it finds its monitor, and the marks it carries. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ft_launcher import nccl
from ft_launcher.devices import VISIBLE, Move
from rank_monitor.contract import env
from rank_monitor.contract.config import NcclSettings, StartSettings


def rank_environment(tag: str, cycle: int, monitor_socket: Path, stack_file: Path, stack_signal: int) -> dict[str, str]:
    """Variables for one rank.

    Args:
        tag: the job's mark, by which all its processes are found.
    """
    return {
        env.JOB_TAG: tag,
        env.CYCLE: str(cycle),
        env.RANK_MONITOR_SOCKET: str(monitor_socket),
        env.STACK_FILE: str(stack_file),
        env.STACK_SIGNAL: str(int(stack_signal)),
    }


def cycle_environment(
    settings: NcclSettings, environ: Mapping[str, str], multipliers: Mapping[str, float], move: Move
) -> dict[str, str]:
    """Variables for all ranks of a cycle.

    Args:
        environ: the launcher's own environment, which the ranks have too.
        multipliers: learned limit -> factor, after a kill by that limit.
        move: to other hardware, and why.

    Raises:
        ConfigError: as `nccl.variables`.
    """
    variables = nccl.variables(settings, environ)
    if multipliers:
        variables[env.LIMIT_MULTIPLIERS] = json.dumps(dict(multipliers))
    if move.doubt is not None:
        variables[env.RESULT_IN_DOUBT] = json.dumps(asdict(move.doubt))
    if move.visible:
        variables[VISIBLE] = move.visible
    return variables


def start_environment(settings: StartSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a rank sets itself up as the options say.

    Args:
        environ: the launcher's own environment, which the ranks have too.
    """
    wanted = {env.ALIAS_NVRX: str(int(settings.alias_nvrx)), env.INJECT: ";".join(settings.inject)}
    return {name: text for name, text in wanted.items() if text not in ("", "0") or name in environ}
