"""The checks of this node: what the settings ask for and what is there to be checked, all made at the same time.

Looks at names in /proc, /sys and /dev only: nothing here talks to a driver or to a network file system. What an end of
a check means, and all readings for the node, is in `reading.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ft_launcher
from ft_launcher.health import storage
from ft_launcher.health.check import State, worst
from ft_launcher.health.check_process import CheckRound
from ft_launcher.health.endpoint import LINE
from ft_launcher.health.reading import Order, Reading
from rank_monitor.contract.settings.config import HealthSettings

# Appended, so that a file of another package can never stand in for a module of the standard library.
_START = "import sys; sys.path.append({root!r}); from ft_launcher.health.check import main; main()"
# The endpoint's time ends before that of the check's process, so that the check can still report its own error.
_ANSWER_SHARE = 0.9
_NIC_INTERVAL_S = 5.0
"""NVIDIA's default. A reading of eight NICs takes 20 ms of CPU in its process and 1 ms in the launcher."""


@dataclass(frozen=True)
class Places:
    """Where this node shows what it has."""

    nvidia: tuple[str, ...] = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
    gpus: str = "/proc/driver/nvidia/gpus"
    infiniband: str = "/sys/class/infiniband"
    mountinfo: str = "/proc/self/mountinfo"
    shm: str = "/dev/shm"


class NodeHealth(CheckRound):
    """The checks of a node over a job: what they saw before each cycle is compared with what they saw earlier.

    Args:
        folders: where the launcher writes, which should have room.
        tag: the job's tag, for the environment of the processes; empty: none.

    Attributes:
        interval_s: where the checks are repeated while ranks run, from the end of a round to the next one; else 0.
    """

    def __init__(
        self, settings: HealthSettings, folders: Sequence[str] = (), tag: str = "", places: Places | None = None
    ) -> None:
        super().__init__(tag)
        self._settings = settings
        self._folders = folders
        self._places = places or Places()
        self.interval_s = settings.node_health_check_interval or 0.0

    def repeated(self) -> NodeHealth | None:
        """Returns the checks that are repeated while ranks run, with a memory of their own; None: none is.

        The ranks go on whatever these say: an unhealthy node takes no part in the next cycle, since it is checked again
        before that.
        """
        wanted = repeated(self._settings)
        if wanted is None:
            return None
        if self._settings.node_health_check_interval is None:
            folders: Sequence[str] = ()
        else:
            folders = self._folders
        return NodeHealth(wanted, folders, self._tag, self._places)

    def check(self) -> list[Reading]:
        """One reading per check, within `health_timeout` and 2 s; at once where nothing is to be started."""
        self.begin()
        return self.wait()

    def begin(self) -> None:
        """Starts a round of checks; the one before is over."""
        plan = Plan(self._settings, self._folders, self._places, self.memory)
        self.start(plan.orders, self._settings.health_timeout, plan.readings)


def repeated(settings: HealthSettings) -> HealthSettings | None:
    """Returns what is checked every `node_health_check_interval` seconds while ranks run; None: nothing is."""
    if settings.health == "off":
        return None
    if settings.node_health_check_interval is not None:
        nics = settings.enable_nic_healthcheck or settings.enable_nic_monitor
        # The processes on the GPUs are the ranks now.
        return replace(settings, enable_nic_healthcheck=nics, check_remaining_processes=False)
    if settings.enable_nic_monitor:
        return replace(
            settings,
            node_health_check_interval=_NIC_INTERVAL_S,
            enable_nic_healthcheck=True,
            enable_gpu_health_check=False,
            enable_dist_storage_healthcheck=False,
            check_remaining_processes=False,
            storage_health_check_path=(),
            node_check=None,
            node_health_check_endpoint=None,
        )
    return None


class Plan:
    """The checks of one round: `readings` are there already, `orders` are to be started.

    Args:
        folders: where the launcher writes: a full one is a warning.
        memory: check -> the memory that it returned last time.
    """

    def __init__(
        self, settings: HealthSettings, folders: Sequence[str], places: Places, memory: Mapping[str, dict[str, Any]]
    ) -> None:
        self.readings: list[Reading] = []
        self.orders: list[Order] = []
        self._settings = settings
        self._places = places
        self._memory = memory
        if settings.health == "off":
            return
        if settings.enable_gpu_health_check:
            self._plan_gpus()
        if settings.check_remaining_processes and has_driver(places):
            # A launcher inside of a program that uses a GPU is such a process itself.
            self._order("gpu_processes", {"own": os.getpid()}, "unknown", needs="pynvml", package="nvidia-ml-py")
        if settings.enable_nic_healthcheck:
            self._plan_nics()
        table = storage.mounts_of(_text(places.mountinfo))
        self._plan_space(folders, table)
        if settings.enable_dist_storage_healthcheck:
            self._plan_mounts(table)
        if settings.storage_health_check_path:
            self._order("storage", {"paths": list(settings.storage_health_check_path)}, "unhealthy")
        if settings.node_check:
            argv = ["/bin/sh", "-c", settings.node_check]
            self.orders.append(Order("node_check", argv, answers=False, late="unhealthy"))
        if settings.node_health_check_endpoint:
            self._plan_endpoint(settings.node_health_check_endpoint)

    def _plan_gpus(self) -> None:
        present = has_driver(self._places)
        for check in ("gpu", "nvlink"):
            if not present:
                self._read(check, "not present", "no NVIDIA driver")
            else:
                self._order(check, {}, "unknown", needs="pynvml", package="nvidia-ml-py")

    def _plan_nics(self) -> None:
        root = self._places.infiniband
        if not self._memory.get("nic") and not _names(root):
            self._read("nic", "not present", f"nothing in {root}")
            return
        work = {
            "infiniband": root,
            "gpus": self._places.gpus,
            "topology": self._settings.pci_topo_file,
            "state": self._settings.link_state_path_template,
            "downed": self._settings.link_down_path_template,
        }
        self._order("nic", work, "unknown")

    def _plan_space(self, folders: Sequence[str], table: list[storage.Mount]) -> None:
        local = [folder for folder in folders if storage.is_local(folder, table)]
        found = [
            storage.free_space(self._places.shm, needed=True),
            *(storage.free_space(folder, needed=False) for folder in local),
        ]
        self._read("space", *worst(found))
        remote = [folder for folder in folders if folder not in local]
        if remote:
            self._order("space", {"folders": remote}, "unknown")

    def _plan_mounts(self, table: list[storage.Mount]) -> None:
        found = [mount for mount in table if mount.kind in storage.NETWORK]
        if found:
            self._order("mounts", {"mounts": found}, "unhealthy")
        else:
            self._read("mounts", "not present", "no network mount")

    def _plan_endpoint(self, endpoint: str) -> None:
        work = {"endpoint": endpoint, "timeout_s": _ANSWER_SHARE * self._settings.health_timeout}
        if endpoint.startswith(LINE):
            self._order("endpoint", work, "unknown")
        else:
            self._order("endpoint", work, "unknown", needs="grpc", package="grpcio")

    def _read(self, check: str, state: State, reason: str) -> None:
        self.readings.append(Reading(check, state, reason, 0.0))

    def _order(self, check: str, work: dict[str, Any], late: State, needs: str = "", package: str = "") -> None:
        order = order_for(check, work, self._memory.get(check, {}), late, needs)
        if order is None:
            self._read(check, "unknown", f"needs the package {package}, which is not installed")
        else:
            self.orders.append(order)


def has_driver(places: Places) -> bool:
    """Whether an NVIDIA driver is loaded."""
    return any(os.path.exists(path) for path in places.nvidia)  # noqa: PTH110 - it raises nothing


def order_for(check: str, work: dict[str, Any], memory: dict[str, Any], late: State, needs: str = "") -> Order | None:
    """A check in a lean interpreter (no site); None where `needs`, the module of an optional package, is missing."""
    if needs:
        spec = importlib.util.find_spec(needs)
    else:
        spec = None
    if needs and (spec is None or spec.origin is None):
        return None
    if spec is None or spec.submodule_search_locations is None:
        levels = 0
    else:
        levels = 1
    if spec is not None and spec.origin:
        site = [str(Path(spec.origin).parents[levels])]
    else:
        site = []
    order = {"check": check, "work": work, "memory": memory, "site": site}
    root = str(Path(ft_launcher.__file__).resolve().parents[1])
    # -I ignores PYTHON* variables and the working folder, -S skips .pth files: nothing of the user's runs in a check.
    argv = [sys.executable, "-I", "-S", "-c", _START.format(root=root), json.dumps(order)]
    return Order(check, argv, answers=True, late=late)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _names(folder: str) -> list[str]:
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []
