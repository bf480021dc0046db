"""Each class of errors has the exit code that the launcher ends with."""

from __future__ import annotations

import pytest

from rank_monitor.contract.errors import ConfigError, FtError, ProtocolError, StoreLost


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
