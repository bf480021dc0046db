"""How far a cycle came: by its ranks, and by the checkpoint's file, whatever is in it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ft_launcher.attribution import RankEvidence
from ft_launcher.cycle import evidence
from ft_launcher.cycle.evidence import iteration_in_file, iteration_reached
from rank_monitor.contract.wire.launcher_messages import Snapshot
from rank_monitor.contract.wire.messages import NO_ITERATION


def rank(iteration: int | None) -> RankEvidence:
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
    assert iteration_reached(map(rank, iterations), None) == expected


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
    assert iteration_reached([rank(99)], str(file)) == expected


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert iteration_in_file(tmp_path / "none") is None
    assert iteration_in_file(tmp_path) is None


def test_a_file_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
