"""What ranks print through spools: nothing is changed on its way to the console, and no memory is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_launcher.record.log_pump import LogPump
from ft_launcher.record.spool import Spool
from ft_launcher.record.spooled_output import SpooledOutput

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
    assert output.unshown.keys() == {stdouts[1], stderrs[1]}
    assert [stream.path for stream in output.streams] == [stdouts[0]]
    output.close()


def test_memory_is_given_back() -> None:
    spool = Spool("test")
    write(spool.path, b"x" * (5 << 20))
    spool.give_back((4 << 20) + 7)
    found = os.stat(spool.path)
    assert (found.st_size, found.st_blocks * 512) == (5 << 20, 1 << 20)
    assert Path(spool.path).read_bytes()[4 << 20 :] == b"x" * (1 << 20)
    spool.close()
