"""Maps names of `nvidia_resiliency_ext` to our modules. Pure.

The longest entry that a name begins with counts; the rest of the name is appended to its target. `_MISSING` has the
modules of the peer that we do not have, each with the reason.
"""

from __future__ import annotations

PEER = "nvidia_resiliency_ext"
_ALIAS = "ft_client.integrations.nvrx_alias"
OWN_ROOMS = f"{_ALIAS}.peer"
"""The package that is loaded under the peer's own name."""

_STRAGGLER = "ft_client.straggler"
_TARGETS = {
    "inprocess": "ft_client.inprocess",
    "inprocess.tools": f"{OWN_ROOMS}.inprocess_tools",
    "inprocess.tools.inject_fault": f"{_ALIAS}.inject_fault",
    "inprocess.wrap": "ft_client.inprocess.wrapper",
    "straggler": _STRAGGLER,
    "straggler.statistics": f"{_STRAGGLER}.samples",
    "straggler.straggler": _STRAGGLER,
    "attribution.straggler": _STRAGGLER,
    "attribution.straggler.statistics": f"{_STRAGGLER}.samples",
    "attribution.straggler.straggler": _STRAGGLER,
    "ptl_resiliency": "ft_client.integrations.lightning",
    "shared_utils.inject_fault": f"{_ALIAS}.inject_fault",
    "shared_utils.wait_daemon": "ft_client.inprocess.wait_daemon",
    "fault_tolerance.config": f"{_ALIAS}.config",
    "fault_tolerance.rank_monitor_client": "ft_client.rank_monitor_client",
    "fault_tolerance.rank_monitor_server": f"{_ALIAS}.rank_monitor_server",
}
_PTL_CALLBACKS = ("fault_tolerance_callback", "fault_tolerance_sections_callback", "straggler_det_callback")
_TARGETS |= {f"ptl_resiliency.{name}": "ft_client.integrations.lightning" for name in _PTL_CALLBACKS}

_MISSING = {
    "checkpointing": "checkpoint formats are not part of ft_launcher",
    "ptl_resiliency.local_checkpoint_callback": "checkpoint formats are not part of ft_launcher",
    "attribution": "of the peer's attribution there is straggler detection only; ft_launcher explains faults itself",
}


def target_of(name: str) -> str:
    """The name of our module for a module of the peer; in the package `OWN_ROOMS` if the table has no entry for it.

    Args:
        name: without the name of the peer's package, as `inprocess.abort`.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        target = _TARGETS.get(".".join(parts[:length]))
        if target is not None:
            return ".".join([target, *parts[length:]])
    return f"{OWN_ROOMS}.{name}"


def why_missing(name: str) -> str:
    """The reason why there is no such module, for the error of its import."""
    parts = name.split(".")
    known = (_MISSING.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    reason = next(filter(None, known), "ft_launcher has nothing of that name")
    return f"{PEER}.{name} is not there under the alias of ft_launcher: {reason}. Install nvidia-resiliency-ext for it"
