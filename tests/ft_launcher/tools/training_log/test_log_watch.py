"""The reader of ranks' files: real files that grow, and its thread."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_launcher.record.logs.spool import Spool
from ft_launcher.tools.training_log import rank_log
from ft_launcher.tools.training_log.log_watch import LogWatch
from ft_launcher.tools.training_log.rank_log import News, StepsMissing
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire.launcher_messages import LogOverdue, LogStep
from tests.patience import patient

PATTERN = r"step (?P<iteration>\d+)"
MIB = 1 << 20
"""A spool gives memory back by the MiB, and a watch skips what is more than one MiB behind."""


def news(watch: LogWatch) -> list[tuple[int, News]]:
    """Waits for the next news."""
    assert readable([watch.fileno()], patient(30))
    return watch.drain()


def iterations(found: list[tuple[int, News]]) -> list[tuple[int, int]]:
    return [(rank, item.iteration) for rank, item in found if isinstance(item, LogStep)]


def test_news_wake_and_a_silence_is_one(tmp_path: Path) -> None:
    files = {0: [str(tmp_path / "0")], 3: [str(tmp_path / "3-out"), str(tmp_path / "3-err")]}
    watch = LogWatch(PATTERN, 0.5, files, {})
    watch.start()
    try:
        with (tmp_path / "3-err").open("a") as file:
            file.write("step 4\nstep")
            file.flush()
            assert iterations(news(watch)) == [(3, 4)]
            (silence,) = [item for _, item in news(watch) if isinstance(item, LogOverdue)]
            assert silence.since_ns > 0
            file.write(" 5\n")
            file.flush()
            assert iterations(news(watch)) == [(3, 5)]
            file.write("step 6\n")
    finally:
        last = watch.stop()
    assert iterations(last) == [(3, 6)] and watch.has_steps


def test_lines_that_another_preset_reads_are_news_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_log, "_PATIENCE_S", 0.0)
    files = {0: [str(tmp_path / "0")], 1: [str(tmp_path / "1")]}
    (tmp_path / "0").write_text("warning: nothing\n")
    (tmp_path / "1").write_text("iter 1: loss 1.0, time 5.00ms, mfu 1%\n")
    watch = LogWatch(PATTERN, None, files, {})
    watch.start()
    try:
        assert news(watch) == [(1, StepsMissing("iter 1: loss 1.0, time 5.00ms, mfu 1%", "nanogpt"))]
        (tmp_path / "0").write_text("warning: nothing\nstep 1\n")
        assert iterations(news(watch)) == [(0, 1)]
    finally:
        watch.stop()
    assert watch.steps_missing() is None


def test_what_goes_wrong_with_one_rank_leaves_the_others(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").write_text("step 1\n")
    watch = LogWatch(PATTERN, None, {0: [str(tmp_path / "0")], 1: [str(tmp_path / "1")]}, {})
    watch.start()
    try:
        assert iterations(news(watch)) == [(1, 1)]
    finally:
        watch.stop()


def test_of_a_flood_the_end_is_read_and_its_memory_is_given_back() -> None:
    spool = Spool("test")
    watch = LogWatch(PATTERN, None, {0: [spool.path]}, {spool.path: spool})
    with Path(spool.path).open("ab") as file:
        file.write(b"step 1\n" + b"x" * MIB + b"\nstep 2\n")
    watch.start()
    try:
        assert iterations(news(watch)) == [(0, 2)]
        assert os.stat(spool.path).st_blocks * 512 < 2 << 20
    finally:
        watch.stop()
        spool.close()


def test_what_the_console_has_read_is_kept_for_the_watch_and_an_emptied_file_is_read_again() -> None:
    spool = Spool("test")
    watch = LogWatch(PATTERN, None, {0: [spool.path]}, {spool.path: spool})
    with Path(spool.path).open("ab") as file:
        file.write(b"step 1\n" + b"x" * (MIB - 20) + b"\n")
    spool.note_read("console", MIB)
    watch.start()
    try:
        assert iterations(news(watch)) == [(0, 1)]
        Path(spool.path).write_bytes(b"step 2\n")
        assert iterations(news(watch)) == [(0, 2)]
    finally:
        watch.stop()
        spool.close()


def test_a_limit_of_months_is_one(tmp_path: Path) -> None:
    watch = LogWatch(PATTERN, 1e7, {0: [str(tmp_path / "0")]}, {})
    watch.start()
    try:
        for step in (1, 2):
            with (tmp_path / "0").open("a") as file:
                file.write(f"step {step}\n")
            assert iterations(news(watch)) == [(0, step)]
    finally:
        watch.stop()
