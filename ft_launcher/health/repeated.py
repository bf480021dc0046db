"""Which checks are repeated while ranks run, how often, and what counts as a change. Pure.

The ranks go on whatever a reading says: an unhealthy node takes no part in the next cycle, since it is checked again
before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ft_launcher.health.check import State, worst
from ft_launcher.health.reading import Reading
from rank_monitor.contract.settings.config import HealthSettings

_NIC_INTERVAL_S = 5.0
"""NVIDIA's default. A reading of eight NICs takes 20 ms of CPU in its process and 1 ms in the launcher."""


@dataclass(frozen=True)
class Repeated:
    """The checks to repeat: their settings, whether the launcher's own folders are among them, and the interval."""

    settings: HealthSettings
    with_folders: bool
    interval_s: float


@dataclass(frozen=True)
class HealthChange:
    """A check found another state than at its last reading."""

    check: str
    before: State
    state: State
    reason: str


def repeated(settings: HealthSettings) -> Repeated | None:
    """Returns what is repeated while ranks run; None: nothing is."""
    if settings.health == "off":
        return None
    interval_s = settings.node_health_check_interval
    if interval_s is not None:
        nics = settings.enable_nic_healthcheck or settings.enable_nic_monitor
        # The processes on the GPUs are the ranks now.
        asked = replace(settings, enable_nic_healthcheck=nics, check_remaining_processes=False)
        return Repeated(asked, True, interval_s)
    if settings.enable_nic_monitor:
        return Repeated(_nics_only(settings), False, _NIC_INTERVAL_S)
    return None


def _nics_only(settings: HealthSettings) -> HealthSettings:
    return replace(
        settings,
        enable_nic_healthcheck=True,
        enable_gpu_health_check=False,
        enable_dist_storage_healthcheck=False,
        check_remaining_processes=False,
        storage_health_check_path=(),
        node_check=None,
        node_health_check_endpoint=None,
    )


def changes(before: Mapping[str, State], readings: Iterable[Reading]) -> tuple[list[HealthChange], dict[str, State]]:
    """Returns what changed, and the state of each check now.

    Args:
        before: the states of the last round; a check that is not in it was in order.
    """
    findings: dict[str, list[tuple[State, str]]] = {}
    for reading in readings:
        findings.setdefault(reading.check, []).append((reading.state, reading.reason))
    now = {check: worst(found) for check, found in findings.items()}
    found = []
    for check, (state, reason) in now.items():
        last = before.get(check, "ok")
        if _is_in_order(last) and _is_in_order(state):
            continue
        if state != last:
            found.append(HealthChange(check, last, state, reason))
    return found, {check: state for check, (state, _) in now.items()}


def _is_in_order(state: State) -> bool:
    return state in ("ok", "not present")
