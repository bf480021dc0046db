"""What a job leaves to the next, and what it does about files that others wrote."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from ft_client.integrations.lightning import next_job

LOGGER = logging.getLogger("of_the_test")


def state(initial: object = 10.0) -> dict[str, Any]:
    beats = {"initial": initial, "subsequent": 10.0, "were_calculated": True}
    return {"current_timeouts": {"heartbeat": beats}}


def test_written_by_one_name_and_read_by_two(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "ft_state"
    assert next_job.read_limits(folder, LOGGER) is None
    next_job.write_limits(folder, state(), LOGGER)
    assert [file.name for file in folder.iterdir()] == ["_ft_state.json"]
    assert next_job.read_limits(folder, LOGGER) == state()
    (folder / "_ft_state.json").rename(folder / "_ft_state_.json")
    assert next_job.read_limits(folder, LOGGER) == state()
    next_job.write_limits(folder, state(20.0), LOGGER)
    assert next_job.read_limits(folder, LOGGER) == state(20.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        json.dumps(state())[:30],
        "[]",
        "3",
        "{}",
        '{"version": 7}',
        json.dumps(state(-1)),
        json.dumps(state(float("inf"))),
        json.dumps(state("long")),
        '{"current_timeouts": {"heartbeat": {"were_calculated": true}}}',
        "\udce4",
    ],
)
def test_what_is_no_state_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    file = tmp_path / next_job.LIMITS
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert next_job.read_limits(tmp_path, LOGGER) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{file} is not used: " in caplog.text


def test_two_jobs_that_write_at_once_leave_one_of_both_states(tmp_path: Path) -> None:
    children = []
    for seconds in (10.0, 20.0):
        if (child := os.fork()) == 0:
            for _ in range(50):
                next_job.write_limits(tmp_path, state(seconds), LOGGER)
            os._exit(0)
        children.append(child)
    seen = [next_job.read_limits(tmp_path, LOGGER) for _ in range(200)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert all(one in (None, state(10.0), state(20.0)) for one in seen)
    assert next_job.read_limits(tmp_path, LOGGER) is not None
    assert [file.name for file in tmp_path.iterdir()] == [next_job.LIMITS]


def test_what_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    next_job.write_limits(tmp_path / "file", state(), LOGGER)
    next_job.write_finished_flag(tmp_path / "missing" / "flag", "step 7 of 7", LOGGER)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "the next job will not know the learned limits" in caplog.text
    assert "(step 7 of 7), but the finished flag was not written" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_flag_says_why(tmp_path: Path) -> None:
    next_job.write_finished_flag(tmp_path / "flag", "step 7 of 7", LOGGER)
    assert (tmp_path / "flag").read_text() == "step 7 of 7\n"
