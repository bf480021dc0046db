"""What is read of the node: memory kills in the counters of both kinds of cgroups, room in /dev/shm."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_launcher.attribution.hints import NodeEvidence
from ft_launcher.cycle import evidence
from ft_launcher.cycle.evidence import of_node, oom_kills

OWN = Path("/proc/self/cgroup").read_text()


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of cgroups in the place of the kernel's, for the group that this process is really in."""
    monkeypatch.setattr(evidence, "_CGROUPS", tmp_path)
    return tmp_path


def counter(cgroups: Path, kills: object) -> Path:
    """The counter of this process' group: of version 2, or of version 1 where the machine has that."""
    found = [line.split(":", 2)[1:] for line in OWN.splitlines()]
    two = next((path for controllers, path in found if not controllers), None)
    one = next((path for controllers, path in found if "memory" in controllers.split(",")), None)
    if two is None and one is None:
        pytest.skip("this machine has no cgroups")
    if two is not None:
        file = cgroups / two.lstrip("/") / "memory.events"
    else:
        file = cgroups / "memory" / str(one).lstrip("/") / "memory.oom_control"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"low 0\nmax 7\noom 9\noom_kill {kills}\noom_group_kill 5\n")
    return file


def test_kills_since_the_cycle_began(cgroups: Path) -> None:
    counter(cgroups, 3)
    before = oom_kills()
    assert before == 3
    assert of_node(before).oom_kills == 0
    counter(cgroups, 5)
    assert of_node(before).oom_kills == 2


def test_what_cannot_be_read_is_unknown(cgroups: Path) -> None:
    assert oom_kills() is None, "no such file"
    assert of_node(None).oom_kills is None
    counter(cgroups, "many")
    assert oom_kills() is None
    assert of_node(3).oom_kills is None


def test_of_this_machine() -> None:
    found = of_node(oom_kills())
    assert isinstance(found, NodeEvidence)
    assert found.oom_kills is None or found.oom_kills >= 0
    if Path("/dev/shm").is_dir():
        assert found.shm_free is not None and found.shm_free >= 0
