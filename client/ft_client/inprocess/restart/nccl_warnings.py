"""Warnings about settings in a rank's environment that prevent in-process restart with NCCL. Pure.

`wrapper.py` logs them at each call of a wrapped function. Nothing is refused: a job that never has a fault runs well
with any of these settings.

Two things go wrong. An abort of a communicator may hang: then nothing frees the main thread, and the rank is killed.
Or NCCL's watchdog, a thread of torch, ends the process at an error or a timeout, before the restart has begun.

The facts are those of NVIDIA's guide to in-process restart (requirements and known issues) and of torch's
ProcessGroupNCCL (names and defaults of its variables).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping

from ft_client.inprocess.arguments import Timeouts

Version = tuple[int, ...]

_NCCL: Version = (2, 26, 2)
"""Below this version of NCCL the abort of any communicator may hang."""
_TORCH_PAIRS: Version = (2, 8)
"""Below this version of torch the abort of a pair for send and recv, which torch made by itself, may hang."""
_MARGIN = datetime.timedelta(seconds=60)
"""How much later than `hard_timeout` NCCL's watchdog must act, so that `hard_timeout` comes first."""
_HEARTBEAT = datetime.timedelta(minutes=8)
"""torch's default of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC."""
_ASYNC_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""The variable's name, and its older name, in the order in which torch reads them."""
_ENDS_THE_PROCESS = {"1", "3"}
"""Values of that variable with which the process ends: torch's modes TearDown and SkipCleanUp."""
_BY_DEFAULT = "3"
"""torch's default: SkipCleanUp."""
_OFF = {"0", "n", "no", "f", "false"}
"""Values that torch reads as false."""


def nccl_warnings(
    environment: Mapping[str, str],
    nccl: Version | None,
    torch: str,
    timeouts: Timeouts,
    collective_timeout: datetime.timedelta | None = None,
) -> list[str]:
    """Returns warnings, one sentence each, with the problem and what to do; none without NCCL.

    Args:
        environment: the rank's variables, before its first process group: torch reads them when a group is made.
        nccl: NCCL's version, as `torch.cuda.nccl.version()` has it; None without NCCL.
        torch: torch's version, as `torch.__version__` has it.
        timeouts: the wrapper's durations.
        collective_timeout: the timeout of groups that are made without one of their own; None: not known.
    """
    if nccl is None:
        return []
    return [
        *_versions(nccl, torch),
        *_variables(environment),
        *_watchdog(environment, timeouts.hard_timeout, collective_timeout),
    ]


def _versions(nccl: Version, torch: str) -> list[str]:
    """Returns warnings about versions whose abort may hang."""
    found = []
    if nccl < _NCCL:
        found.append(f"NCCL {_dotted(nccl)} may hang when it is aborted: use {_dotted(_NCCL)} or later")
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < _TORCH_PAIRS:
        found.append(
            f"torch {torch} may hang when a group is aborted that made pairs for send and recv by itself: "
            f"make these pairs with new_group, or use torch {_dotted(_TORCH_PAIRS)} or later"
        )
    return found


def _variables(environment: Mapping[str, str]) -> list[str]:
    """Returns warnings about variables that matter whatever the wrapper's durations are."""
    found = []
    if environment.get("NCCL_NVLS_ENABLE") != "0":
        found.append("NVLink SHARP is not off and does not survive an abort: set NCCL_NVLS_ENABLE=0")
    if environment.get("NCCL_NET_PLUGIN", "").strip().lower() != "none":
        found.append("a network plugin of NCCL may hang when it is aborted: set NCCL_NET_PLUGIN=none")
    if _is_on(environment, "TORCH_NCCL_RETHROW_CUDA_ERRORS"):
        found.append(
            "NCCL's watchdog ends the process at the first CUDA or NCCL error, before a restart can begin: "
            "set TORCH_NCCL_RETHROW_CUDA_ERRORS=0"
        )
    return found


def _watchdog(
    environment: Mapping[str, str], hard: datetime.timedelta, collective: datetime.timedelta | None
) -> list[str]:
    """Returns warnings about settings by which NCCL's watchdog ends the process before a restart does.

    The watchdog has two ways: it handles errors and timeouts of collectives, and its own monitor ends a process whose
    watchdog shows no heartbeat.

    Args:
        environment: the rank's variables.
        hard: the wrapper's `hard_timeout`.
        collective: the timeout of NCCL groups that are made without one of their own; None: not known.
    """
    found = []
    enough = hard + _MARGIN
    reason = f"hard_timeout={_seconds(hard)} + {_seconds(_MARGIN)}"
    handling = next((environment[name] for name in _ASYNC_ERROR_HANDLING if name in environment), _BY_DEFAULT)
    if handling.strip() in _ENDS_THE_PROCESS:
        found.append(
            f"NCCL's watchdog ends the process when a peer is lost (TORCH_NCCL_ASYNC_ERROR_HANDLING is {handling}): "
            "set TORCH_NCCL_ASYNC_ERROR_HANDLING=0"
        )
        if collective is not None and collective < enough:
            found.append(
                f"NCCL's watchdog ends the process after {_seconds(collective)} in a collective, before {reason}: "
                f"give init_process_group a timeout of at least {_seconds(enough)}"
            )
    if _is_on(environment, "TORCH_NCCL_ENABLE_MONITORING"):
        heartbeat = _heartbeat(environment)
        if heartbeat < enough:
            found.append(
                f"NCCL's watchdog ends the process when it stood still for {_seconds(heartbeat)}, before {reason}: "
                f"set TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={enough.total_seconds():.0f} or more"
            )
    return found


def _heartbeat(environment: Mapping[str, str]) -> datetime.timedelta:
    """The value of the variable; torch's default if it is not a number, which torch itself reports."""
    try:
        return datetime.timedelta(seconds=int(environment["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]))
    except (KeyError, ValueError, OverflowError):
        return _HEARTBEAT


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "1").strip().lower() not in _OFF


def _seconds(duration: datetime.timedelta) -> str:
    return f"{duration.total_seconds():g} s"


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
