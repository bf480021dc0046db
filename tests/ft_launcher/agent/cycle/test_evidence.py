"""What is read of a failed cycle: the text of the program where its ranks wait, memory kills and room in /dev/shm, and
how far it came, by its ranks and by the checkpoint's file, whatever is in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_launcher.agent.cycle import evidence
from ft_launcher.agent.cycle.evidence import (
    as_decided,
    call_within,
    iteration_in_file,
    iteration_reached,
    of_node,
    with_own_locks,
)
from ft_launcher.decide.attribution import RankEvidence
from ft_launcher.decide.attribution.hints import NodeEvidence
from ft_launcher.decide.attribution.rank_view import views
from ft_launcher.decide.attribution.scene import Activity
from rank_monitor.contract.processes.cgroup import oom_kills
from rank_monitor.contract.wire.launcher_messages import Snapshot
from rank_monitor.contract.wire.messages import NO_ITERATION

# The text of the program: read within bounds, and only if it is the one that runs.

TEXT = "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\nlock.release()\n"
AT_WORK = ["torch/distributed/distributed_c10d.py:2400 in recv"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    return path


def waits(file: object, line: int = 4, threads: list[str] | None = None, rank: int = 0, **groups: Any) -> RankEvidence:
    """A rank whose main thread sleeps in a call of C code at a line of a file."""
    facts = {"state": "S (sleeping)", "wchan": "futex_do_wait", "file": str(file), "other_threads": threads or []}
    frames = [f"train.py:{line} in <module>"]
    snapshot = Snapshot(0, True, True, 3, {}, 0.1, frames=frames, process=facts, groups=groups)
    return RankEvidence(rank, rank, 100 + rank, snapshot=snapshot)


def places(*ranks: RankEvidence, ran_s: float = -60.0) -> list[Activity]:
    return [rank.scene.activity for rank in with_own_locks(ranks, time.monotonic(), ran_s)]


def test_the_rank_that_waits_for_a_lock_is_marked(script: Path) -> None:
    found = places(waits(script), waits(script, line=2, rank=1), waits(script, rank=2))
    assert found == [Activity.LOCKED, Activity.BLOCKED, Activity.LOCKED]


@pytest.mark.parametrize(
    "broken",
    [
        lambda path: path.write_bytes(b"\xff" + TEXT.encode()),
        lambda path: path.write_text("#" * (1 << 20) + "\n" + TEXT),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["no UTF-8", "too large", "gone", "a pipe", "a device", "a folder"],
)
def test_a_file_that_cannot_be_read_says_nothing(script: Path, broken: Callable[[Path], object]) -> None:
    broken(script)
    assert places(waits(script)) == [Activity.BLOCKED]


def test_a_file_that_has_changed_since_the_ranks_began_says_nothing(script: Path) -> None:
    assert places(waits(script), ran_s=3600.0) == [Activity.BLOCKED]


def test_what_other_threads_do_may_be_what_it_waits_for(script: Path) -> None:
    assert places(waits(script, threads=AT_WORK), waits(script, threads=["?"], rank=1)) == [Activity.BLOCKED] * 2


@pytest.mark.parametrize("file", ["", "train.py", "<string>"])
def test_a_file_without_a_whole_path_is_not_looked_for(
    script: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    assert places(waits(file)) == [Activity.BLOCKED]


def test_a_rank_that_waits_in_a_collective_is_not_looked_at(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(evidence, "open_regular", lambda path, **_: opened.append(path))
    assert places(waits(script, world={"entered": 4, "finished": 3})) == [Activity.BLOCKED]
    assert opened == []


def test_of_many_places_those_of_the_fewest_ranks_are_looked_at(script: Path) -> None:
    many = [waits(f"/none/{number // 2}.py", rank=number) for number in range(64)]
    assert Activity.LOCKED in places(*many, waits(script, rank=64))


def test_what_hangs_holds_nothing_up() -> None:
    end = threading.Event()
    assert call_within(0.01, end.wait, "hangs") is None
    end.set()
    assert call_within(60.0, end.wait, "ends") is True


def test_storage_that_hangs_leaves_the_rank_unknown(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def hangs(*_: object, **__: object) -> None:
        end.wait(60)
        raise OSError

    monkeypatch.setattr(evidence, "_TEXTS_TIMEOUT_S", 0.01)
    monkeypatch.setattr(evidence, "open_regular", hangs)
    assert places(waits(script)) == [Activity.BLOCKED]
    end.set()


# The node.


def test_kills_count_since_the_cycle_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "oom_kills", lambda: 5)
    assert of_node(3).oom_kills == 2
    assert of_node(None).oom_kills is None
    monkeypatch.setattr(evidence, "oom_kills", lambda: None)
    assert of_node(3).oom_kills is None


def test_of_this_machine() -> None:
    found = of_node(oom_kills())
    assert isinstance(found, NodeEvidence)
    assert found.oom_kills is None or found.oom_kills >= 0
    if Path("/dev/shm").is_dir():
        assert found.shm_free is not None and found.shm_free >= 0


# How far the training came.


def reached(iteration: int | None) -> RankEvidence:
    snapshot = None if iteration is None else Snapshot(1, False, False, iteration, {}, None)
    return RankEvidence(rank=0, local_rank=0, pid=1, snapshot=snapshot)


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        ((NO_ITERATION, NO_ITERATION), NO_ITERATION),
        ((3, 5, 4), 5),
        ((0, NO_ITERATION), 0),
        ((None, 2), 2),
        ((None,), None),
        ((NO_ITERATION, None), None),
    ],
)
def test_the_rank_that_came_farthest_counts(iterations: tuple[int | None, ...], expected: int | None) -> None:
    assert iteration_reached(map(reached, iterations), None) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"1200", 1200),
        (b" 7\n", 7),
        (b"0", 0),
        (b"", None),
        (b"release", None),
        (b"-3", None),
        (b"1.5", None),
        (b"12\n13", None),
        (b"9" * 19, None),
        (b"1" * 1000, None),
        (b"\xff\x00", None),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_the_file_counts_when_there_is_one(tmp_path: Path, content: bytes, expected: int | None) -> None:
    file = tmp_path / "latest_checkpointed_iteration.txt"
    file.write_bytes(content)
    assert iteration_reached([reached(99)], str(file)) == expected


def test_a_file_without_a_number_says_nothing(tmp_path: Path) -> None:
    assert iteration_in_file(tmp_path / "none") is None
    assert iteration_in_file(tmp_path) is None


def test_a_number_on_storage_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(evidence, "read_file", lambda *_, **__: b"7" if answered.wait(60) else b"")
    assert iteration_in_file(tmp_path / "file", timeout_s=0.05) is None
    answered.set()
    assert iteration_in_file(tmp_path / "file") == 7


def test_what_is_no_regular_file_says_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    assert iteration_in_file(tmp_path / "pipe") is None
    assert iteration_in_file(tmp_path / "link") is None


@pytest.mark.parametrize("returned_at", [None, 99.0], ids=["exit code 0", "it said that it returns"])
@pytest.mark.parametrize("stood_still", [True, False])
def test_a_return_after_another_node_has_ended_the_hang_is_no_return(
    returned_at: float | None, stood_still: bool
) -> None:
    """The wait of the rank failed as the other node's rank was ended. When that was is not known on this node."""
    waits = ["torch/distributed/distributed_c10d.py:5356 in barrier", "train.py:23 in <module>"]
    after = Snapshot(1, False, False, NO_ITERATION, {}, None, False)
    seen = replace(after, frames=waits, process={"state": "S (sleeping)"})
    rank = RankEvidence(2, 0, 42, exit_code=0, died_at=100.0, returned_at=returned_at, snapshot=after)
    monitors: Any = SimpleNamespace(stood_still=lambda local_rank: seen)
    (view,) = views(as_decided([rank], monitors, stood_still), stop_began=101.0)
    assert view.ended is not stood_still
    assert view.is_waiting is stood_still


@pytest.mark.parametrize(
    ("was_silent", "state", "frames"),
    [
        (True, "R (running)", ["train.py:9 in search"]),
        (True, "S (sleeping)", []),
        (False, "R (running)", []),
    ],
)
def test_a_stack_from_before_the_stop_counts_where_the_rank_computed_on(
    was_silent: bool, state: str, frames: list[str]
) -> None:
    """It held the GIL at the check, and got the signal for its stacks only before the stop."""
    before = Snapshot(1, True, False, NO_ITERATION, {}, None, process={"state": "R (running)", "silent": was_silent})
    last = replace(before, frames=["train.py:9 in search"], process={"state": state, "signalled": True})
    monitors: Any = SimpleNamespace(stood_still=lambda local_rank: before)
    (found,) = as_decided([RankEvidence(0, 0, 42, snapshot=last)], monitors, stood_still=True)
    assert found.snapshot is not None and found.snapshot.frames == frames
    assert found.snapshot.process["signalled"] is True
