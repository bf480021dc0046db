"""The thread of files: works in order, results within limits, and a disk that stands still holds up nobody."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from ft_launcher.record.events import RankExit
from ft_launcher.record.file_thread import FileThread, NoAnswer
from ft_launcher.record.journal import Journal
from tests.patience import patient

LIMIT_S = patient(30.0)


class Disk:
    """A work that stands still until `answers` is set."""

    def __init__(self, files: FileThread) -> None:
        self.answers, self.is_asked = threading.Event(), threading.Event()
        assert files.do(self._stand_still)
        assert self.is_asked.wait(LIMIT_S)

    def _stand_still(self) -> None:
        self.is_asked.set()
        self.answers.wait(LIMIT_S)


def test_works_are_done_in_order() -> None:
    files, done = FileThread(), list[int]()
    for number in range(100):
        assert files.do(lambda number=number: done.append(number))
    assert files.ask(lambda: len(done), LIMIT_S) == 100
    assert done == list(range(100)) and files.flush(0.0)
    files.close(LIMIT_S)
    assert not files.do(done.clear)


def test_an_error_is_the_callers_or_a_line(caplog: pytest.LogCaptureFixture) -> None:
    files = FileThread()
    with pytest.raises(ZeroDivisionError):
        files.ask(lambda: 1 // 0, LIMIT_S)
    files.do([].pop)
    assert files.flush(LIMIT_S) and "a file cannot be written: IndexError" in caplog.text


def test_nobody_waits_for_a_disk_that_stands_still(caplog: pytest.LogCaptureFixture) -> None:
    files, done = FileThread(), list[int]()
    disk = Disk(files)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(NoAnswer):
                files.ask(lambda: done.append(1), LIMIT_S)
            assert not files.flush(LIMIT_S)
        disk.answers.set()
        assert files.ask(lambda: len(done), LIMIT_S) == 3, "done when it answers"
        files.close(LIMIT_S)
    assert [("does not answer" in line, "answers again" in line) for line in caplog.messages] == [
        (True, False),
        (False, True),
    ]


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_launcher.record.file_thread._MAX_WORKS", 2)
    files = FileThread()
    disk = Disk(files)
    assert [files.do(int) for _ in range(3)] == [True, True, False]
    disk.answers.set()
    files.close(LIMIT_S)


def test_lines_of_a_journal_wait_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr("ft_launcher.record.journal._MAX_QUEUED", 1000)
    path = tmp_path / "journal.jsonl"
    files = FileThread()
    journal = Journal(files=files)
    journal.open(path)
    disk = Disk(files)
    for number in range(100):
        journal.write(RankExit(0, number, 1))
    assert journal.dropped > 80
    disk.answers.set()
    assert journal.flush(LIMIT_S)
    journal.write(RankExit(0, 100, 1))
    journal.close()
    lines = path.read_text().splitlines()
    assert len([line for line in lines if '"rank_exit"' in line]) == 101 - journal.dropped
    assert f'"lines": {journal.dropped}' in path.read_text(), "the gap is told"


def test_where_no_thread_starts_a_slow_disk_is_no_error() -> None:
    files = FileThread()
    disk = Disk(files)
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        assert not files.flush(0.0)
        files.close(0.0)
    finally:
        threading.stack_size(before)
        disk.answers.set()
