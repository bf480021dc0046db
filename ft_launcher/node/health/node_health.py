"""The health checks of this node: which checks the settings ask for and the node's hardware allows.

All checks of a round run at the same time, each in a process of its own (`check_process.py`), except free space on
local file systems. This file reads names in /proc, /sys and /dev only: nothing here talks to a driver or to a network
file system, either of which may hang. `decide/health/reading.py` decides what the end of a check means, and what all
readings mean for the node.

Made by `composition.py`; `agent/own_health.py` calls it before each cycle, and while ranks run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ft_launcher
from ft_launcher.decide.health.check import State, worst
from ft_launcher.decide.health.reading import Order, Reading
from ft_launcher.node.health import storage
from ft_launcher.node.health.check_process import CheckRound
from ft_launcher.node.health.endpoint import LINE
from rank_monitor.contract.settings.config import HealthSettings

# The root is appended, so that a file of another package can never stand in for a module of the standard library.
_START = "import sys; sys.path.append({root!r}); from ft_launcher.decide.health.check import main; main()"
_ANSWER_SHARE = 0.9
"""Part of the limit that an endpoint has for its answer. It ends before the limit of the check's process, so that the
check can still report the error."""
_PACKAGES = {"pynvml": "nvidia-ml-py", "grpc": "grpcio"}
"""Module of an optional package -> the package's name, for the user."""
_NIC_INTERVAL_S = 5.0
"""Seconds between two rounds where only NICs are monitored: NVIDIA's default. A reading of eight NICs takes 20 ms of
CPU in its process, and 1 ms in the launcher."""


@dataclass(frozen=True)
class Places:
    """The paths at which a node shows its hardware and mounts. Tests have others.

    Attributes:
        nvidia: one of these exists where an NVIDIA driver is loaded.
        gpus: has a folder for each GPU.
        infiniband: has a folder for each InfiniBand or RoCE device.
        mountinfo: the kernel's table of mounts.
        shm: where shared memory is mounted.
    """

    nvidia: tuple[str, ...] = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
    gpus: str = "/proc/driver/nvidia/gpus"
    infiniband: str = "/sys/class/infiniband"
    mountinfo: str = "/proc/self/mountinfo"
    shm: str = "/dev/shm"


class NodeHealth(CheckRound):
    """The checks of a node over a job. Some compare what they see with what they saw in an earlier round (`memory`).

    Args:
        settings: which checks are wanted, and their limit.
        folders: the folders that the launcher writes to, which should have room.
        tag: the job's tag, for the environment of the processes; empty: there is no job.
        places: the paths to look at.
        is_alone: whether no other node can take the place of this one.

    Attributes:
        interval_s: seconds from the end of a round to the next one, where checks are repeated while ranks run; else 0.
    """

    def __init__(
        self,
        settings: HealthSettings,
        folders: Sequence[str] = (),
        tag: str = "",
        places: Places | None = None,
        is_alone: bool = False,
    ) -> None:
        super().__init__(tag)
        self._settings = settings
        self._folders = folders
        self._places = places or Places()
        self._is_alone = is_alone
        self._rounds = 0
        self.interval_s = settings.node_health_check_interval or 0.0

    def repeated(self) -> NodeHealth | None:
        """Returns the checks that are repeated while ranks run, with a memory of their own; None: none is repeated.

        The ranks go on whatever these checks say. An unhealthy node is found again by the checks before the next cycle,
        in which it takes no part.
        """
        wanted = repeated(self._settings)
        if wanted is None:
            return None
        if self._settings.node_health_check_interval is None:
            folders: Sequence[str] = ()
        else:
            folders = self._folders
        return NodeHealth(wanted, folders, self._tag, self._places, self._is_alone)

    def check(self) -> list[Reading]:
        """Makes a round of checks; returns one reading for each. Blocks for `health_timeout` and 2 s at most."""
        self.begin()
        return self.wait()

    def begin(self) -> None:
        """Starts a round of checks and returns. The previous round must be over."""
        if self._settings.health != "off":
            # A list, so that an error while the orders are made leaves no check running.
            self.start(list(self._planned()), self._settings.health_timeout)
            self._rounds += 1

    def _planned(self) -> Iterator[Order | Reading]:
        """Yields the checks of a round: orders to start, and readings that are known without a process."""
        settings, places = self._settings, self._places
        if settings.enable_gpu_health_check:
            for check in ("gpu", "nvlink"):
                if has_driver(places):
                    yield self._order(check, {}, needs="pynvml")
                else:
                    yield Reading(check, "not present", "no NVIDIA driver")
        if settings.check_remaining_processes and has_driver(places):
            # A launcher inside of a program that uses a GPU is such a process itself.
            yield self._order("gpu_processes", {"own": os.getpid()}, needs="pynvml")
        if settings.enable_nic_healthcheck:
            yield self._nics()
        table = storage.mounts_of(_text(places.mountinfo))
        yield from self._space(table)
        if settings.enable_dist_storage_healthcheck:
            yield self._mounts(table)
        if settings.storage_health_check_path:
            yield self._order("storage", {"paths": list(settings.storage_health_check_path)}, "unhealthy")
        if settings.node_check:
            argv = ["/bin/sh", "-c", settings.node_check]
            yield Order("node_check", argv, answers=False, late="unhealthy")
        if settings.node_health_check_endpoint:
            yield self._endpoint(settings.node_health_check_endpoint)

    def _nics(self) -> Order | Reading:
        """Returns the check of InfiniBand and RoCE ports. Devices that were there in an earlier round are missed."""
        root = self._places.infiniband
        if not self.memory.get("nic") and not _names(root):
            return Reading("nic", "not present", f"nothing in {root}")
        work = {
            "infiniband": root,
            "gpus": self._places.gpus,
            "topology": self._settings.pci_topo_file,
            "state": self._settings.link_state_path_template,
            "downed": self._settings.link_down_path_template,
        }
        return self._order("nic", work)

    def _space(self, table: list[storage.Mount]) -> Iterator[Order | Reading]:
        """Yields readings of free space in local folders, and a check of the folders on network file systems."""
        local = [folder for folder in self._folders if storage.is_local(folder, table)]
        # Ranks that died may have filled /dev/shm. Before the first cycle nothing is lost if this node leaves the job.
        # Later the job would be over where no other node takes its place, and the training may do without the room.
        needs_room = not (self._is_alone and self._rounds > 0)
        found = [
            storage.free_space(self._places.shm, needed=needs_room),
            *(storage.free_space(folder, needed=False) for folder in local),
        ]
        yield Reading("space", *worst(found))
        remote = [folder for folder in self._folders if folder not in local]
        if remote:
            yield self._order("space", {"folders": remote}, "warning")

    def _mounts(self, table: list[storage.Mount]) -> Order | Reading:
        """Returns the check that network mounts answer."""
        found = [mount for mount in table if mount.kind in storage.NETWORK]
        if found:
            return self._order("mounts", {"mounts": found}, "unhealthy")
        return Reading("mounts", "not present", "no network mount")

    def _endpoint(self, endpoint: str) -> Order | Reading:
        """Returns the check that asks the operator's health checker."""
        work = {"endpoint": endpoint, "timeout_s": _ANSWER_SHARE * self._settings.health_timeout}
        if endpoint.startswith(LINE):
            return self._order("endpoint", work)
        return self._order("endpoint", work, needs="grpc")

    def _order(self, check: str, work: dict[str, Any], late: State = "unknown", needs: str = "") -> Order | Reading:
        """Returns `order_for`, with what the check has remembered of its last round."""
        return order_for(check, work, self.memory.get(check, {}), late, needs)


def repeated(settings: HealthSettings) -> HealthSettings | None:
    """Returns the settings of the checks that are repeated while ranks run; None: none is repeated. Pure."""
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


def has_driver(places: Places) -> bool:
    """Returns whether an NVIDIA driver is loaded on this node."""
    return any(os.path.exists(path) for path in places.nvidia)  # noqa: PTH110 - it raises nothing


def order_for(
    check: str, work: dict[str, Any], memory: dict[str, Any], late: State, needs: str = ""
) -> Order | Reading:
    """Returns the order of a check in a lean interpreter, which loads no `site` and nothing of the user's.

    Args:
        check: its name in `check.CHECKS`.
        work: what to check.
        memory: what the check returned as its memory last time.
        late: the state of the check if it does not answer in time.
        needs: the module of an optional package that the check imports; empty: none.

    Returns:
        A reading instead, if that package is not installed.
    """
    site = []
    if needs:
        spec = importlib.util.find_spec(needs)
        if spec is None or spec.origin is None:
            return Reading(check, "unknown", f"needs the package {_PACKAGES[needs]}, which is not installed")
        levels = 0 if spec.submodule_search_locations is None else 1
        site = [str(Path(spec.origin).parents[levels])]
    order = {"check": check, "work": work, "memory": memory, "site": site}
    root = str(Path(ft_launcher.__file__).resolve().parents[1])
    # -I ignores PYTHON* variables and the working folder, -S skips .pth files: nothing of the user's runs in a check.
    argv = [sys.executable, "-I", "-S", "-c", _START.format(root=root), json.dumps(order)]
    return Order(check, argv, answers=True, late=late)


def _text(path: str) -> str:
    """Returns the contents of a file; empty: it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _names(folder: str) -> list[str]:
    """Returns the names in a folder; empty: it cannot be read."""
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []
