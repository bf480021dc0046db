"""The checks of this node: what the settings ask for and what is there to be checked, all made at the same time.

Looks at names in /proc, /sys and /dev only: nothing here talks to a driver or to a network file system. What an end of
a check means, and all readings for the node, is in `reading.py`.
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

# Appended, so that a file of another package can never stand in for a module of the standard library.
_START = "import sys; sys.path.append({root!r}); from ft_launcher.decide.health.check import main; main()"
# The endpoint's time ends before that of the check's process, so that the check can still report its own error.
_ANSWER_SHARE = 0.9
_PACKAGES = {"pynvml": "nvidia-ml-py", "grpc": "grpcio"}
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
        is_alone: no other node can take the place of this one.

    Attributes:
        interval_s: where the checks are repeated while ranks run, from the end of a round to the next one; else 0.
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
        return NodeHealth(wanted, folders, self._tag, self._places, self._is_alone)

    def check(self) -> list[Reading]:
        """One reading per check, within `health_timeout` and 2 s; at once where nothing is to be started."""
        self.begin()
        return self.wait()

    def begin(self) -> None:
        """Starts a round of checks; the one before is over."""
        if self._settings.health != "off":
            # A list: what fails while it is made has started nothing.
            self.start(list(self._planned()), self._settings.health_timeout)
            self._rounds += 1

    def _planned(self) -> Iterator[Order | Reading]:
        """Yields the checks of a round: what is to be started, and readings that are there already."""
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
        local = [folder for folder in self._folders if storage.is_local(folder, table)]
        # Ranks that died may have filled /dev/shm. Before the first cycle nothing is lost by leaving. Later the job
        # would be over where no other node takes the place, and the training may do without that room.
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
        found = [mount for mount in table if mount.kind in storage.NETWORK]
        if found:
            return self._order("mounts", {"mounts": found}, "unhealthy")
        return Reading("mounts", "not present", "no network mount")

    def _endpoint(self, endpoint: str) -> Order | Reading:
        work = {"endpoint": endpoint, "timeout_s": _ANSWER_SHARE * self._settings.health_timeout}
        if endpoint.startswith(LINE):
            return self._order("endpoint", work)
        return self._order("endpoint", work, needs="grpc")

    def _order(self, check: str, work: dict[str, Any], late: State = "unknown", needs: str = "") -> Order | Reading:
        return order_for(check, work, self.memory.get(check, {}), late, needs)


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


def has_driver(places: Places) -> bool:
    """Whether an NVIDIA driver is loaded."""
    return any(os.path.exists(path) for path in places.nvidia)  # noqa: PTH110 - it raises nothing


def order_for(
    check: str, work: dict[str, Any], memory: dict[str, Any], late: State, needs: str = ""
) -> Order | Reading:
    """A check in a lean interpreter (no site); a reading where `needs`, the module of an optional package, is missing.

    Args:
        memory: what the check returned as its memory last time.
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
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _names(folder: str) -> list[str]:
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []
