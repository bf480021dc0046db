"""NCCL's timeouts as variables of the ranks, and how long a hang in a collective can last with them. Pure.

Called by `environment.py` and `function_context.py` for the ranks' environment, and by `agent/hang_warnings.py` and
`composition.py` for the texts about hangs.

How torch ends a hang in a collective (ProcessGroupNCCL): a watchdog thread in each rank aborts a collective that has
taken longer than its timeout. The abort itself may hang. A second thread therefore watches the watchdog's heartbeat,
and ends the process when the heartbeat stays away. So a hang can last for both times together.

A variable that the user set wins over the setting. Names and defaults of the TORCH_NCCL variables are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings import kinds
from rank_monitor.contract.settings.config import NcclSettings

# torch's ProcessGroupNCCL reads these variables when a group is made.
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# The texts that torch's `getCvarBool` reads as false.
_OFF = {"0", "n", "no", "f", "false"}
# torch's defaults (seconds): `kProcessGroupNCCLDefaultTimeout`, and of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC.
_COLLECTIVE_S, _HEARTBEAT_S = 600.0, 480.0

VARIABLES = (env.NCCL_COLLECTIVE_TIMEOUT, _HEARTBEAT, _MONITORING, _ERRORS)
"""The variables that the function `variables` may return."""


def variables(settings: NcclSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the ranks get in addition to `environ`, the launcher's own environment.

    Leaves out variables that `environ` has, and settings without a value: torch's defaults apply then.

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
    """Returns those of `VARIABLES` that an environment has. For ranks whose parent is not this process."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def detection(ranks: Mapping[str, str], max_restarts: int) -> str:
    """Returns a text for the console: how long ranks may hang in NCCL, in one cycle and in the whole job.

    Args:
        ranks: the environment of the ranks.
        max_restarts: `--max-restarts`. Each cycle may hang once more.
    """
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
    """Returns a text for a warning about a hang: the timeout of collectives in groups that are made without one.

    Args:
        settings: of this launcher.
        environ: the launcher's own environment.
    """
    timeout_s = _collective_timeout_s({**environ, **variables(settings, environ)})
    if timeout_s is None:
        after = "torch's default, 600 s for NCCL and 1800 s for others"
    else:
        after = f"{timeout_s:g} s"
    return f"the collective timeout ends it (--ft-nccl-collective-timeout: {after})"


def _collective_timeout_s(environ: Mapping[str, str]) -> float | None:
    """Returns the collective timeout of an environment (seconds); None: not set, or off.

    Raises:
        ConfigError: the variable's text is not a limit.
    """
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
    """Returns the whole number in a variable's text; None where torch uses its default, which torch logs itself."""
    try:
        return float(int(text or ""))
    except ValueError:
        return None


def _text(number: float | None) -> str | None:
    """Returns a number as the text of a variable, whole numbers without ".0"; None for None."""
    if number is None:
        return None
    if number == int(number):
        return str(int(number))
    return str(number)


def _seconds(seconds: float | None, default: float) -> str:
    """Returns a duration in words; None: torch's default, which is `default`."""
    if seconds is None:
        return f"{default:g} s, torch's default"
    return f"{seconds:g} s"
