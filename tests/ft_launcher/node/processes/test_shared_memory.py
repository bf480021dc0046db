"""Which files in /dev/shm are removed between cycles: tables of names, files and processes."""

from __future__ import annotations

import dataclasses
import stat

import pytest

from ft_launcher.node.processes.shared_memory import (
    ProcessView,
    ReapedProcess,
    SharedFile,
    candidates,
    line_about,
    maker_of,
    removable,
)

UID, PID = 1000, 4711
LEFT = SharedFile(f"torch_{PID}_3804158254_0", stat.S_IFREG | 0o600, UID, 1 << 20, 7, 150.0)
ENDED = {PID: ReapedProcess(100.0, 200.0)}


@pytest.mark.parametrize(
    ("name", "pid"),
    [
        ("torch_4711_3804158254_0", 4711),
        ("torch_4711_3804158254", 4711),
        ("pym-4711-a_b0c1d2", 4711),
        ("torch_4711", None),
        ("torch_04711_1_1", None),
        ("torch_4711_1_1.pt", None),
        ("torch_4711_weights_0", None),
        ("my_torch_4711_1_1", None),
        ("torch_checkpoint_4711", None),
        ("nccl-a1B2c3", None),
        ("psm_4711abcd", None),
        ("sem.mp-4711abcd", None),
        ("pym-4711-a_b0c1d2.tmp", None),
    ],
)
def test_whose_a_name_is(name: str, pid: int | None) -> None:
    assert maker_of(name) == pid


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ({}, True),
        ({"name": f"pym-{PID}-a_b0c1d2"}, True),
        ({"name": f"torch_{PID + 1}_3804158254_0"}, False),
        ({"name": "model.pt"}, False),
        ({"uid": 0}, False),
        ({"mode": stat.S_IFDIR | 0o700}, False),
        ({"mode": stat.S_IFLNK | 0o777}, False),
        ({"mode": stat.S_IFIFO | 0o600}, False),
        ({"changed_at": 99.0}, False),
        ({"changed_at": 201.0}, False),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_candidates(changes: dict[str, object], is_found: bool) -> None:
    file = dataclasses.replace(LEFT, **changes)  # type: ignore[arg-type]
    assert candidates([file], ENDED, UID) == [file] * is_found


@pytest.mark.parametrize(
    ("processes", "is_removed"),
    [
        ([], True),
        ([ProcessView(1), ProcessView(2, frozenset({"torch_2_1_1"}))], True),
        ([ProcessView(1, frozenset({LEFT.name}))], False),
        ([ProcessView(1, None)], False),
        ([ProcessView(1, sees_folder=True)], False),
        ([ProcessView(PID)], False),
    ],
    ids=["nobody", "others", "in use", "cannot be read", "another namespace", "its pid lives"],
)
def test_what_is_removed(processes: list[ProcessView], is_removed: bool) -> None:
    assert removable([LEFT], processes) == [LEFT] * is_removed


def test_one_line_has_files_and_sizes() -> None:
    sizes = [0, 3 << 10, 5 << 30, 1 << 20, 512, 2 << 10, 100]
    files = [dataclasses.replace(LEFT, name=f"torch_{PID}_1_{number}", size=size) for number, size in enumerate(sizes)]
    assert line_about(files[:1]).endswith(f"left there: torch_{PID}_1_0 (0 bytes)")
    assert line_about(files).endswith(
        f"left there: torch_{PID}_1_2 (5.0 GiB), torch_{PID}_1_3 (1.0 MiB), torch_{PID}_1_1 (3.0 KiB), "
        f"torch_{PID}_1_5 (2.0 KiB), torch_{PID}_1_4 (512 bytes) and 2 more, 5.0 GiB in all"
    )
