"""What is read of this process' memory cgroup, in trees of files in the place of the kernel's, for both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_monitor.contract.memory_room import MemoryRoom
from rank_monitor.contract.processes import cgroup
from rank_monitor.contract.processes.cgroup import memory_room, oom_kills

OWN = Path("/proc/self/cgroup").read_text()
MIB = 1 << 20


def own_group() -> tuple[str, bool]:
    """The path of this process' memory cgroup below the root, and whether it is of version 2."""
    found = [line.split(":", 2)[1:] for line in OWN.splitlines()]
    for controllers, path in found:
        if "memory" in controllers.split(","):
            return f"memory/{path.lstrip('/')}", False
    for controllers, path in found:
        if not controllers:
            return path.lstrip("/"), True
    pytest.skip("this machine has no cgroups")


class Tree:
    """A tree of cgroups for the group that this process is really in, and a machine with much memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        path, self.is_two = own_group()
        self.own = root / path
        self.own.mkdir(parents=True, exist_ok=True)
        (root / "meminfo").write_text("MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 524288 kB\n")

    def kills(self, count: object) -> None:
        name = "memory.events" if self.is_two else "memory.oom_control"
        (self.own / name).write_text(f"low 0\nmax 7\noom 9\noom_kill {count}\noom_group_kill 5\n")

    def bound(self, limit: int | None, used: int, cache: int = 0, folder: Path | None = None) -> None:
        """Writes limit, use and droppable cache of a group, in bytes; of this process' own one by default."""
        folder = folder or self.own
        if self.is_two:
            texts = {"memory.max": limit if limit is not None else "max", "memory.current": used}
            stat = f"anon 5\ninactive_file {cache}\nshmem 77\n"
        else:
            texts = {"memory.limit_in_bytes": limit or 9223372036854771712, "memory.usage_in_bytes": used}
            stat = f"inactive_file 3\ntotal_inactive_file {cache}\n"
        for name, text in texts.items():
            (folder / name).write_text(f"{text}\n")
        (folder / "memory.stat").write_text(stat)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "MEMINFO", tmp_path / "meminfo")
    return Tree(tmp_path)


def test_kills_of_the_own_group(tree: Tree) -> None:
    assert oom_kills() is None, "no such file"
    tree.kills(3)
    assert oom_kills() == 3
    tree.kills("many")
    assert oom_kills() is None


def test_without_a_limit_the_machine_counts(tree: Tree) -> None:
    machine = MemoryRoom(limit=1024 * MIB, free=512 * MIB)
    assert memory_room() == machine
    tree.bound(None, used=700 * MIB)
    assert memory_room() == machine


@pytest.mark.parametrize(
    ("limit", "used", "cache", "expected"),
    [
        (100, 30, 0, MemoryRoom(100 * MIB, 70 * MIB)),
        # The kernel drops the cache of files before it kills.
        (100, 90, 25, MemoryRoom(100 * MIB, 35 * MIB)),
        (100, 120, 0, MemoryRoom(100 * MIB, 0)),
        # A limit above what the machine has says nothing.
        (4096, 30, 0, MemoryRoom(1024 * MIB, 512 * MIB)),
        # The group may use more than the machine has left.
        (1000, 100, 0, MemoryRoom(1000 * MIB, 512 * MIB)),
    ],
)
def test_the_least_counts(tree: Tree, limit: int, used: int, cache: int, expected: MemoryRoom) -> None:
    tree.bound(limit * MIB, used * MIB, cache * MIB)
    assert memory_room() == expected


def test_a_limit_of_a_parent_holds_too(tree: Tree) -> None:
    root = tree.root if tree.is_two else tree.root / "memory"
    tree.bound(200 * MIB, 10 * MIB)
    if tree.own != root:
        tree.bound(100 * MIB, 60 * MIB, folder=root)
        assert memory_room() == MemoryRoom(100 * MIB, 40 * MIB)


def test_a_container_that_shows_the_paths_of_its_host(tree: Tree) -> None:
    """The folder of the own group is missing; what is mounted as the root is the container's group."""
    root = tree.root if tree.is_two else tree.root / "memory"
    if tree.own == root:
        pytest.skip("this process is in the root group")
    tree.own.rmdir()
    tree.bound(100 * MIB, 60 * MIB, folder=root)
    assert memory_room() == MemoryRoom(100 * MIB, 40 * MIB)


def test_what_cannot_be_read_is_unknown(tree: Tree) -> None:
    (tree.root / "meminfo").unlink()
    assert memory_room() is None


def test_of_this_machine() -> None:
    found = memory_room()
    assert found is not None and 0 <= found.free <= found.limit
    kills = oom_kills()
    assert kills is None or kills >= 0
