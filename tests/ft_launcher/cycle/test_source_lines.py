"""The text of a program at the lines where its ranks wait: read within bounds, and only if it is the one that runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.attribution import RankEvidence
from ft_launcher.attribution.scene import Whereabouts
from ft_launcher.cycle import evidence
from ft_launcher.cycle.evidence import call_within, with_own_locks
from rank_monitor.contract.wire.launcher_messages import Snapshot

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


def places(*ranks: RankEvidence, ran_s: float = -60.0) -> list[Whereabouts]:
    return [rank.scene.place for rank in with_own_locks(ranks, time.monotonic(), ran_s)]


def test_the_rank_that_waits_for_a_lock_is_marked(script: Path) -> None:
    found = places(waits(script), waits(script, line=2, rank=1), waits(script, rank=2))
    assert found == [Whereabouts.LOCKED, Whereabouts.BLOCKED, Whereabouts.LOCKED]


@pytest.mark.parametrize(
    "broken",
    [
        lambda path: path.write_bytes(b"\xff" + TEXT.encode()),
        lambda path: path.write_text("#" * evidence._MOST_TEXT + "\n"),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["no UTF-8", "too large", "gone", "a pipe", "a device", "a folder"],
)
def test_a_file_that_cannot_be_read_says_nothing(script: Path, broken: Callable[[Path], object]) -> None:
    broken(script)
    assert places(waits(script)) == [Whereabouts.BLOCKED]


def test_a_file_that_has_changed_since_the_ranks_began_says_nothing(script: Path) -> None:
    assert places(waits(script), ran_s=3600.0) == [Whereabouts.BLOCKED]


def test_what_other_threads_do_may_be_what_it_waits_for(script: Path) -> None:
    assert places(waits(script, threads=AT_WORK), waits(script, threads=["?"], rank=1)) == [Whereabouts.BLOCKED] * 2


@pytest.mark.parametrize("file", ["", "train.py", "<string>"])
def test_a_file_without_a_whole_path_is_not_looked_for(
    script: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    assert places(waits(file)) == [Whereabouts.BLOCKED]


def test_a_rank_that_waits_in_a_collective_is_not_looked_at(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_read_texts", lambda *_: pytest.fail("it is read"))
    assert places(waits(script, world={"entered": 4, "finished": 3})) == [Whereabouts.BLOCKED]


def test_of_many_places_those_of_the_fewest_ranks_are_looked_at(script: Path) -> None:
    many = [waits(f"/none/{number // 2}.py", rank=number) for number in range(64)]
    assert Whereabouts.LOCKED in places(*many, waits(script, rank=64))


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
    assert places(waits(script)) == [Whereabouts.BLOCKED]
    end.set()
