"""Reads what the kernel says of the memory of this process' cgroup: its limit, what is in use, how often it killed.

The launcher asks for kills when a rank died of SIGKILL, and for the limit when it decides how much state may be kept in
memory. A rank asks what is free before it writes that state. Reads cgroup version 2, else version 1 (cgroups(7)).
Nothing is raised: what cannot be read is None. Nothing blocks.

A limit of a parent holds for its children too, so limits are read from the group of this process up to the root. Where
a container shows paths of its host, the groups of this process are not there; then the root is the container's own
group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract.memory_room import MemoryRoom

ROOT = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
_NO_LIMIT = 1 << 60
"""Bytes. Version 1 says "no limit" by the largest multiple of a page below 2**63."""


@dataclass(frozen=True)
class _Version:
    """The names of the files of a cgroup in one version. `cache`: the line of memory.stat about droppable pages."""

    limit: str
    used: str
    cache: str
    kills: str


_ONE = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_TWO = _Version("memory.max", "memory.current", "inactive_file", "memory.events")


def memory_room() -> MemoryRoom | None:
    """Returns how much memory this process' cgroup may use. None: neither the kernel's groups nor /proc/meminfo can be
    read."""
    machine = _fields(MEMINFO)
    limits = [1024 * number for name, number in machine.items() if name == "MemTotal:"]
    frees = [1024 * number for name, number in machine.items() if name == "MemAvailable:"]
    for own, root, version in _groups():
        for folder in _with_parents(own, root):
            limit, used = _number(folder / version.limit), _number(folder / version.used)
            if limit is not None and limit < _NO_LIMIT:
                limits.append(limit)
                if used is not None:
                    cache = _fields(folder / "memory.stat").get(version.cache, 0)
                    frees.append(max(0, limit - used + cache))
    if not limits or not frees:
        return None
    return MemoryRoom(min(limits), min(frees))


def oom_kills() -> int | None:
    """Returns how many processes of this process' cgroup the kernel has killed for lack of memory so far. None: this
    cannot be read."""
    for folder, _, version in _groups():
        # The same name in memory.events (version 2) and in memory.oom_control (version 1).
        found = _fields(folder / version.kills).get("oom_kill")
        if found is not None:
            return found
    return None


def _groups() -> Iterator[tuple[Path, Path, _Version]]:
    """Yields the folder of the memory cgroup of this process, the root of its hierarchy, and the version; on a machine
    with both versions for each of them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # `HIERARCHY:CONTROLLERS:PATH`. The line of version 2 has no controllers.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield ROOT / path.lstrip("/"), ROOT, _TWO
        elif "memory" in controllers.split(","):
            yield ROOT / "memory" / path.lstrip("/"), ROOT / "memory", _ONE


def _with_parents(folder: Path, root: Path) -> Iterator[Path]:
    """Yields a folder and its parents up to `root`."""
    yield folder
    while folder != root:
        folder = folder.parent
        yield folder


def _number(path: Path) -> int | None:
    """Returns the number in a file; None: there is none, as in `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers in a file of lines `NAME NUMBER ...`, by name."""
    found = {}
    try:
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(" ")
            number = rest.split()[:1]
            if number and number[0].isdigit():
                found[name] = int(number[0])
    except OSError:
        pass
    return found
