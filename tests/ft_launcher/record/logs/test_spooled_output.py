"""What ranks print through spools: nothing is changed on its way to the console, and no memory is kept."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ft_launcher.record.logs import log_pump, spool
from ft_launcher.record.logs.log_pump import LogPump
from ft_launcher.record.logs.spool import MAX_BEHIND, Spool, SpooledOutput
from tests.patience import patient, until

PRINTED = b"\r 0%| | \xff\xfe \x1b[31mred\x1b[0m\r\n no end"


def console_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sends stdout and stderr of this process to one file. Not a fixture: pytest has its own streams for the test."""
    target = tmp_path / "console"
    stream = target.open("w")
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    return target


def write(path: str, content: bytes) -> None:
    with Path(path).open("ab") as file:
        file.write(content)


def test_byte_by_byte_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = console_in(tmp_path, monkeypatch)
    stdouts, stderrs = {0: ""}, {0: ""}
    output = SpooledOutput.instead_of_console(stdouts, stderrs)
    assert stdouts == stderrs and output.of(0) and not output.of(1)
    pump = LogPump(output.streams)
    pump.start()
    write(stdouts[0], PRINTED)
    write(stderrs[0], b"err")
    write(stdouts[0], b"out")
    pump.stop()
    output.close()
    assert console.read_bytes() == PRINTED + b"errout"


def test_files_of_the_user_stay_and_what_is_not_shown_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console_in(tmp_path, monkeypatch)
    kept = str(tmp_path / "stderr.log")
    stdouts, stderrs = {0: "", 1: os.devnull}, {0: kept, 1: os.devnull}
    output = SpooledOutput.instead_of_console(stdouts, stderrs)
    assert stderrs[0] == kept
    assert output.spools.keys() == {stdouts[0], stdouts[1], stderrs[1]}
    assert [stream.path for stream in output.streams] == [stdouts[0]]
    output.close()


def test_memory_is_given_back() -> None:
    spool = Spool("test")
    write(spool.path, b"x" * (5 << 20))
    spool.note_read("one", (4 << 20) + 7)
    found = os.stat(spool.path)
    assert (found.st_size, found.st_blocks * 512) == (5 << 20, 1 << 20)
    assert Path(spool.path).read_bytes()[4 << 20 :] == b"x" * (1 << 20)
    spool.close()
    spool.note_read("one", 5 << 20)


def held(spool: Spool) -> int:
    return os.stat(spool.path).st_blocks * 512


def test_what_one_reader_has_not_read_is_kept_within_limits() -> None:
    spool = Spool("test")
    spool.add_reader("slow")
    write(spool.path, b"x" * (20 << 20))
    spool.note_read("fast", 3 << 20)
    assert held(spool) == 20 << 20
    spool.note_read("slow", 2 << 20)
    assert held(spool) == 18 << 20
    spool.note_read("fast", 20 << 20)
    assert held(spool) == MAX_BEHIND
    spool.remove_reader("slow")
    spool.note_read("fast", 20 << 20)
    assert held(spool) == 0
    spool.close()


def test_where_nobody_reads_only_the_end_is_kept() -> None:
    spool = Spool("test")
    spool.add_reader("gone")
    spool.remove_reader("gone")
    write(spool.path, b"x" * (20 << 20))
    spool.trim()
    assert (held(spool), spool.begin) == (MAX_BEHIND, 4 << 20)
    Path(spool.path).write_bytes(b"")
    write(spool.path, b"x" * (3 << 20))
    spool.trim()
    assert (held(spool), spool.begin) == (3 << 20, 0)
    write(spool.path, b"x" * (20 << 20))
    spool.trim()
    # A reader that notices only now that it was emptied begins where there is still text.
    spool.restart_reader("late")
    assert (held(spool), spool.begin) == (MAX_BEHIND, 7 << 20)
    spool.close()
    spool.trim()


@pytest.mark.parametrize("since", ["before", "after"])
def test_a_rank_that_prints_unread_stays_bounded(since: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between the end of a cycle and the end of its ranks, where the stream is not shown. Ranks may have printed
    before."""
    console_in(tmp_path, monkeypatch)
    stdouts, stderrs = {0: os.devnull}, {0: os.devnull}
    output = SpooledOutput.instead_of_console(stdouts, stderrs)
    spools = output.spools
    if since == "after":
        output.start()
    for path in spools:
        write(path, b"x" * (MAX_BEHIND * 2))
    if since == "before":
        output.start()
    until(lambda: all(held(spool) <= MAX_BEHIND for spool in spools.values()), "no spool keeps all")
    output.close()
    output.close()


def test_a_rank_that_empties_its_stream_is_shown_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = console_in(tmp_path, monkeypatch)
    stdouts, stderrs = {0: ""}, {0: ""}
    output = SpooledOutput.instead_of_console(stdouts, stderrs)
    (stream,) = output.streams
    write(stdouts[0], b"before\n" + b"x" * (2 << 20) + b"\n")
    while stream.copy_new(lambda to: True) and stream.due() == 0.0:
        pass
    Path(stdouts[0]).write_bytes(b"")
    write(stdouts[0], b"after\n")
    stream.copy_new(lambda to: True, ended=True)
    output.close()
    assert console.read_bytes().endswith(b"x\nafter\n")


def test_of_a_backlog_the_end_is_shown_and_how_much_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = console_in(tmp_path, monkeypatch)
    stdouts, stderrs = {0: ""}, {0: ""}
    output = SpooledOutput.instead_of_console(stdouts, stderrs)
    (stream,) = output.streams
    write(stdouts[0], b"x" * MAX_BEHIND + b"\nlast\n")
    stream.copy_new(lambda to: False)
    assert stream.copy_new(lambda to: False, ended=True)
    output.close()
    shown = console.read_bytes()
    assert b"bytes not shown: " in shown and shown.endswith(b"x\nlast\n") and len(shown) < 1 << 17


def test_a_stream_that_takes_nothing_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch()` leaves a program its own streams, which may be pipes that nobody reads."""
    monkeypatch.setattr(spool, "_LAST_SPOOLED_S", 0.1)
    monkeypatch.setattr(log_pump, "STALLED_S", 0.1)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        monkeypatch.setattr("sys.stderr", full)
        stdouts, stderrs = {0: ""}, {0: ""}
        output = SpooledOutput.instead_of_console(stdouts, stderrs)
        pump, before = LogPump(output.streams), set(threading.enumerate())
        pump.start()
        write(stdouts[0], b"x" * (1 << 20))
        (thread,) = set(threading.enumerate()) - before
        pump.stop()
        output.close()
        assert thread.is_alive(), "it is left behind in its write"
        os.close(reader)
        thread.join(patient(10))
        assert not thread.is_alive(), "the write has failed"
