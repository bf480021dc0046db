"""The environment of a rank beyond torch's own: how it finds its monitor, and the marks it carries. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rank_monitor.contract import env


def rank_environment(
    tag: str, cycle: int, monitor_socket: Path, stack_file: Path, stack_signal: int, multipliers: Mapping[str, float]
) -> dict[str, str]:
    """Variables for one rank.

    Args:
        tag: the job's mark, by which all its processes are found.
        multipliers: learned limit -> factor, after a kill by that limit.
    """
    variables = {
        env.JOB_TAG: tag,
        env.CYCLE: str(cycle),
        env.RANK_MONITOR_SOCKET: str(monitor_socket),
        env.STACK_FILE: str(stack_file),
        env.STACK_SIGNAL: str(int(stack_signal)),
    }
    if multipliers:
        variables[env.LIMIT_MULTIPLIERS] = json.dumps(dict(multipliers))
    return variables
