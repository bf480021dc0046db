"""NCCL's timeouts as variables of the ranks, and how long a hang in a collective can last with them. Pure.

Called by `environment.py` and `function_context.py` for the ranks, by `agent/hang_warnings.py` and `composition.py` for
the texts about hangs.

A variable that the user set wins over the setting. The names and defaults of the TORCH_NCCL variables are those of
torch's ProcessGroupNCCL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings import kinds
from rank_monitor.contract.settings.config import NcclSettings

# Read by torch's ProcessGroupNCCL when a group is made.
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# The texts that torch's `getCvarBool` reads as false.
_OFF = {"0", "n", "no", "f", "false"}
_COLLECTIVE_S, _HEARTBEAT_S = 600.0, 480.0  # torch's defaults

VARIABLES = (env.NCCL_COLLECTIVE_TIMEOUT, _HEARTBEAT, _MONITORING, _ERRORS)
"""The variables that `variables` may give."""


def variables(settings: NcclSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what the ranks get in addition to `environ`, the launcher's own environment.

    Raises:
        ConfigError: the user's FLYTE_NCCL_COLLECTIVE_TIMEOUT_SEC is not a limit.
    """
    _collective_timeout_s(environ)
    wanted = {
        env.NCCL_COLLECTIVE_TIMEOUT: _text(settings.nccl_collective_timeout),
        # torch reads whole seconds here.
        _HEARTBEAT: _text(settings.nccl_heartbeat_timeout and math.ceil(settings.nccl_heartbeat_timeout)),
        _MONITORING: str(int(settings.nccl_enable_monitoring)),
        _ERRORS: _text(settings.nccl_async_error_handling),
    }
    return {name: text for name, text in wanted.items() if text is not None and name not in environ}


def of(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns those of `VARIABLES` that an environment has."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def detection(ranks: Mapping[str, str], max_restarts: int) -> str:
    """Returns a text: how long ranks with this environment may hang in NCCL, in one cycle and in all."""
    collective, heartbeat = _collective_timeout_s(ranks), _number(ranks.get(_HEARTBEAT))
    if ranks.get(_ERRORS, "").strip() == "0":
        return f"NCCL ends no rank that hangs in a collective ({_ERRORS} is 0); the monitors' limits do"
    first = f"collective {_seconds(collective, _COLLECTIVE_S)}"
    if ranks.get(_MONITORING, "1").strip().lower() in _OFF:
        return f"NCCL aborts a collective after {first}; nothing ends an abort that hangs ({_MONITORING} is off)"
    # The watchdog aborts the collective after its timeout; if the abort hangs, the heartbeat monitor ends the process.
    cycle_s = (collective or _COLLECTIVE_S) + (heartbeat or _HEARTBEAT_S)
    return (
        f"a hang in NCCL lasts at most {cycle_s:g} s ({first} + heartbeat {_seconds(heartbeat, _HEARTBEAT_S)}); "
        f"with --max-restarts={max_restarts} {(max_restarts + 1) * cycle_s:g} s in all"
    )


def collective_timeout(settings: NcclSettings, environ: Mapping[str, str]) -> str:
    """Returns a text: the timeout of collectives in process groups that are made without one."""
    timeout_s = _collective_timeout_s({**environ, **variables(settings, environ)})
    if timeout_s is None:
        after = "torch's default, 600 s for NCCL and 1800 s for others"
    else:
        after = f"{timeout_s:g} s"
    return f"the collective timeout ends it (--ft-nccl-collective-timeout: {after})"


def _collective_timeout_s(environ: Mapping[str, str]) -> float | None:
    text = environ.get(env.NCCL_COLLECTIVE_TIMEOUT)
    try:
        found = kinds.LIMIT.read(text)
    except ValueError as problem:
        expected = f"Expected: {kinds.LIMIT.form}"
        raise ConfigError(env.NCCL_COLLECTIVE_TIMEOUT, text, "the environment", str(problem), expected) from None
    if isinstance(found, float):
        return found
    return None


def _number(text: str | None) -> float | None:
    """Returns the number; None where torch takes its default, which it logs itself."""
    try:
        return float(int(text or ""))
    except ValueError:
        return None


def _text(number: float | None) -> str | None:
    if number is None:
        return None
    if number == int(number):
        return str(int(number))
    return str(number)


def _seconds(seconds: float | None, default: float) -> str:
    if seconds is None:
        return f"{default:g} s, torch's default"
    return f"{seconds:g} s"
