"""The thread of files: works in order, results within limits, and a disk that stands still holds up nobody."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_launcher.record.events import RankExitEvent
from ft_launcher.record.journal.file_thread import FileHandler, FileThread, NoAnswer
from ft_launcher.record.journal.journal import Journal
from rank_monitor.contract.processes.wait import readable
from tests.patience import patient

LIMIT_S = patient(30.0)


class Disk:
    """A work that stands still until `answers` is set."""

    def __init__(self, files: FileThread) -> None:
        self.answers, self.is_asked = threading.Event(), threading.Event()
        assert files.submit(self._stand_still)
        assert self.is_asked.wait(LIMIT_S)

    def _stand_still(self) -> None:
        self.is_asked.set()
        self.answers.wait(LIMIT_S)


def test_works_are_done_in_order() -> None:
    files, done = FileThread(), list[int]()
    for number in range(100):
        assert files.submit(lambda number=number: done.append(number))
    assert files.call(lambda: len(done), LIMIT_S) == 100
    assert done == list(range(100)) and files.flush(0.0)
    files.close(LIMIT_S)
    assert not files.submit(done.clear)


def test_an_error_is_the_callers_or_a_line(caplog: pytest.LogCaptureFixture) -> None:
    files = FileThread()
    with pytest.raises(ZeroDivisionError):
        files.call(lambda: 1 // 0, LIMIT_S)
    files.submit([].pop)
    assert files.flush(LIMIT_S) and "a file cannot be written: IndexError" in caplog.text


def test_nobody_waits_for_a_disk_that_stands_still(caplog: pytest.LogCaptureFixture) -> None:
    files, done = FileThread(), list[int]()
    disk = Disk(files)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(NoAnswer):
                files.call(lambda: done.append(1), LIMIT_S)
            assert not files.flush(LIMIT_S)
        disk.answers.set()
        assert files.call(lambda: len(done), LIMIT_S) == 3, "done when it answers"
        files.close(LIMIT_S)
    assert [("does not answer" in line, "answers again" in line) for line in caplog.messages] == [
        (True, False),
        (False, True),
    ]


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_launcher.record.journal.file_thread._MAX_TASKS", 2)
    files = FileThread()
    disk = Disk(files)
    assert [files.submit(int) for _ in range(3)] == [True, True, False]
    disk.answers.set()
    files.close(LIMIT_S)


def test_lines_of_a_journal_wait_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr("ft_launcher.record.journal.journal._MAX_QUEUED", 1000)
    path = tmp_path / "journal.jsonl"
    files = FileThread()
    journal = Journal(files=files)
    journal.open(path)
    disk = Disk(files)
    for number in range(100):
        journal.write(RankExitEvent(0, number, 1))
    assert journal.dropped > 80
    disk.answers.set()
    assert journal.flush(LIMIT_S)
    journal.write(RankExitEvent(0, 100, 1))
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


def full(files: FileThread, disk: Disk) -> None:
    while files.submit(int):
        pass


def closed(files: FileThread, disk: Disk) -> None:
    disk.answers.set()
    files.close(LIMIT_S)


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda files, disk: None, "an earlier write or read still waits for it"),
        (full, "2 writes and reads wait for it already"),
        (closed, "the run is over"),
    ],
    ids=["behind another", "full", "closed"],
)
def test_no_answer_has_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[FileThread, Disk], None], why: str
) -> None:
    monkeypatch.setattr("ft_launcher.record.journal.file_thread._MAX_TASKS", 2)
    files = FileThread()
    disk = Disk(files)
    happens(files, disk)
    with pytest.raises(NoAnswer, match=why):
        files.call(int, LIMIT_S)
    disk.answers.set()


def test_a_work_that_is_slow_itself_is_no_answer_within_the_limit() -> None:
    files, over = FileThread(), threading.Event()
    with pytest.raises(NoAnswer, match=r"not answered within 0\.01 s"):
        files.call(over.wait, 0.01)
    over.set()


def record_of(text: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord("ft_launcher", logging.WARNING, "file", 1, text, values, None)


def test_the_log_file_is_closed_by_the_thread_after_its_lines(tmp_path: Path) -> None:
    """Closing it may wait for the disk, too: no thread of a program that called `launch()` must do that."""
    files = FileThread()
    file = (tmp_path / "log").open("w")
    handler = FileHandler(file, files)
    disk = Disk(files)
    handler.emit(record_of("first"))
    for _ in range(2):
        handler.close()
    handler.emit(record_of("too late"))
    assert not file.closed
    disk.answers.set()
    files.close(LIMIT_S)
    assert file.closed and (tmp_path / "log").read_text() == "first\n"


def test_a_line_that_cannot_be_formatted_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileThread()
    handler = FileHandler((tmp_path / "log").open("w"), files)
    handler.handle(record_of("%d", "no number"))
    handler.close()
    files.close(LIMIT_S)
    assert (tmp_path / "log").read_text() == "" and "no number" in capsys.readouterr().err


def test_a_fork_writes_nothing_to_the_journal(tmp_path: Path) -> None:
    journal = Journal()
    journal.open(tmp_path / "journal.jsonl")
    child = os.fork()
    if child == 0:
        journal.write(RankExitEvent(0, 1, 1))
        journal.report(RankExitEvent(0, 1, 1))
        os._exit(0)
    pidfd = os.pidfd_open(child)
    if not readable([pidfd], LIMIT_S):
        os.kill(child, signal.SIGKILL)
    os.close(pidfd)
    assert os.waitpid(child, 0) == (child, 0), "it waited for a lock for ever"
    journal.write(RankExitEvent(0, 0, 0))
    journal.close()
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 1
