"""Which folder of state in memory is a job's, whether it is taken over, and when it is removed: tables."""

from __future__ import annotations

import dataclasses

import pytest

from ft_launcher.node.memory_files.adoption import (
    LeftBehind,
    adoption,
    is_over,
    job_key,
    left_behind,
    names_for,
    of_user,
)
from rank_monitor.contract.memory_files import (
    FOLDER_PREFIX,
    OWNER_NAME,
    PartsMark,
    StateFile,
    StateFolder,
    unfinished_name,
)
from rank_monitor.contract.processes.memory_folder import Owner

BOOT, DIED_S = "boot-1", 1000.0
OWNER = Owner(tag="t", pid=7, started=1, boot=BOOT, seen_s=DIED_S, linger_s=600.0)
SERIES = "0a1b2c3d"
WHOLE = [StateFile(step, rank, 2, 2, SERIES).name for step in (10, 20) for rank in (0, 1)]
PART = StateFile(30, 0, 2, 2, SERIES).name
JOB = {"run_id": "", "uid": 1000, "folder": "/a", "command": ("python", "-u", "t.py", "1"), "node_rank": ""}


def test_a_key_is_the_same_in_each_start() -> None:
    assert job_key(**JOB) == job_key(**JOB)  # type: ignore[arg-type]
    assert job_key(**JOB).startswith("1000_")  # type: ignore[arg-type]
    assert all(name.startswith(f"{FOLDER_PREFIX}1000_") for name in names_for(job_key(**JOB)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "is_another"),
    [
        ({"folder": "/b"}, True),
        ({"command": ("python", "-u", "t.py", "2")}, True),
        ({"command": ("python", "-u", "t.py 1")}, True),
        ({"uid": 1001}, True),
        ({"node_rank": "1"}, True),
        ({"run_id": "a"}, True),
    ],
)
def test_what_tells_jobs_apart(changes: dict[str, object], is_another: bool) -> None:
    assert (job_key(**JOB) != job_key(**{**JOB, **changes})) == is_another  # type: ignore[arg-type]


def test_with_a_run_id_folder_and_command_do_not_count() -> None:
    named = {**JOB, "run_id": "night-run"}
    other = {**named, "folder": "/tmp", "command": ("python", "-u", "new.py")}
    assert job_key(**named) == job_key(**other)  # type: ignore[arg-type]


def test_names_for_launchers_of_one_key_are_different() -> None:
    names = names_for("1000_ab")
    assert names[0] == f"{FOLDER_PREFIX}1000_ab" and len(set(names)) == len(names) > 1


@pytest.mark.parametrize(
    ("owner", "names", "now_s", "linger_s", "expected"),
    [
        (OWNER, [*WHOLE, PART, OWNER_NAME], DIED_S + 5, 600.0, LeftBehind((10, 20), 5.0, True, 600.0)),
        (OWNER, [PART, unfinished_name(0, 0)], DIED_S, 60.0, LeftBehind((), 0.0, True, 60.0)),
        (OWNER, [StateFolder(40, 2, "0a0a0a0a", SERIES).name], DIED_S, 60.0, LeftBehind((40,), 0.0, True, 60.0)),
        # The clock of the machine never goes back; a wrong record must not give an age below zero.
        (OWNER, [*WHOLE, PartsMark(30, SERIES).name], DIED_S, 60.0, LeftBehind((10, 20, 30), 0.0, True, 60.0)),
        (OWNER, WHOLE, DIED_S - 9, 60.0, LeftBehind((10, 20), 0.0, True, 60.0)),
        (dataclasses.replace(OWNER, boot="x"), WHOLE, DIED_S, 60.0, LeftBehind((10, 20), 0.0, False, 60.0)),
        (None, WHOLE, DIED_S, 60.0, LeftBehind((10, 20), None, False, 60.0)),
    ],
)
def test_what_was_left(
    owner: Owner | None, names: list[str], now_s: float, linger_s: float, expected: LeftBehind
) -> None:
    assert left_behind(owner, names, BOOT, now_s, linger_s) == expected


LEFT = LeftBehind(steps=(10, 20), age_s=30.0, is_of_this_boot=True, linger_s=600.0)


@pytest.mark.parametrize(
    ("changes", "step", "says"),
    [
        ({}, 20, "died 30.0 s ago"),
        ({"age_s": 600.0}, 20, "died"),
        ({"age_s": 0.0}, 20, "died 0.0 s ago"),
        ({"age_s": 600.5}, None, "--ft-memory-linger is 600 s"),
        ({"linger_s": 0.0, "age_s": 0.0}, None, "--ft-memory-linger 0 begins afresh"),
        ({"steps": ()}, None, "no step was complete"),
        ({"age_s": None, "is_of_this_boot": False}, None, "no record"),
        ({"is_of_this_boot": False}, None, "another boot"),
    ],
)
def test_whether_it_is_taken_over(changes: dict[str, object], step: int | None, says: str) -> None:
    found = adoption(dataclasses.replace(LEFT, **changes))  # type: ignore[arg-type]
    assert found.step == step
    assert says in found.reason


@pytest.mark.parametrize(
    ("owner", "now_s", "expected"),
    [
        (OWNER, DIED_S + 600.0, False),
        (OWNER, DIED_S + 600.5, True),
        (dataclasses.replace(OWNER, linger_s=0.0), DIED_S + 0.1, True),
        (dataclasses.replace(OWNER, boot="boot-0"), DIED_S, True),
        (None, DIED_S, True),
    ],
)
def test_when_the_time_of_a_folder_is_over(owner: Owner | None, now_s: float, expected: bool) -> None:
    assert is_over(owner, BOOT, now_s) == expected


def test_which_names_are_a_users_folders() -> None:
    own, gone = f"{FOLDER_PREFIX}1000_ab", f"{FOLDER_PREFIX}1000_ab.gone-1a2b3c4d"
    names = [own, gone, f"{FOLDER_PREFIX}10_ab", f"{FOLDER_PREFIX}10000_ab", "ft-xyz", "ft_memory", "torch_1_1"]
    assert of_user(names, 1000) == ([own], [gone])
