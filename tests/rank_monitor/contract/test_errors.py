"""Each class of errors has the exit code that the launcher ends with."""

from __future__ import annotations

import errno

import pytest

from rank_monitor.contract.errors import ConfigError, FtError, ProtocolError, StoreLost, why_refused


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("nnodes", 0, "--nnodes", "must be above 0"), 2),
        (FtError("another launch() runs"), 80),
        (ProtocolError("not a message"), 80),
        (StoreLost("no answer"), 80),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_code_of_an_error(error: FtError, code: int) -> None:
    assert error.exit_code == code


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no process or thread can be started"),
        (RuntimeError("can't start new thread"), "no process or thread can be started"),
        (RuntimeError("Resource temporarily unavailable"), "no process or thread can be started"),
        (RuntimeError("the rendezvous is closed"), ""),
        (ValueError("can't start new thread"), ""),
    ],
)
def test_what_the_system_refused(error: Exception, says: str) -> None:
    refused = why_refused(error)
    assert says in refused and bool(refused) == bool(says)
