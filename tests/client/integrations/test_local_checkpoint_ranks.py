"""Local checkpoints of two real ranks over gloo, on one node and on two, with and without the launcher's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract import env
from rank_monitor.contract.memory_files import MemoryFiles
from rank_monitor.contract.wire.json_record import write_record
from tests.patience import patient
from tests.program import ROOT, clean_environment

WORKER = "tests.client.integrations.local_checkpoint_worker"


def run(
    tmp_path: Path, what: str, folders: int = 1, worker: str = WORKER, limit: int = 1 << 30, **more: str
) -> tuple[list[Any], str]:
    """Runs a function of a worker on two ranks. Returns what each has found, and what they have said.

    Args:
        folders: of launchers: 1, one node; 2, two nodes; 0: no launcher.
        limit: bytes of each folder.
        more: variables of the environment.
    """
    started = []
    for rank in range(2):
        variables = {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2", **more}
        if folders:
            folder = tmp_path / f"node-{rank % folders}"
            folder.mkdir(mode=0o700, exist_ok=True)
            variables[env.MEMORY_FILES] = write_record(MemoryFiles(str(folder), 2, limit, 1))
            variables[env.RANK_MONITOR_SOCKET] = str(tmp_path / f"m{rank}")
        words = [str(rank), str(tmp_path / "store"), str(tmp_path / "user"), what]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", worker, *words],
                cwd=ROOT,
                env=clean_environment("RANK", "LOCAL_RANK", **variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    try:
        for process in started:
            out, err = process.communicate(timeout=patient(120))
            ended.append((process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [code for code, _, _ in ended] == [0, 0], ended
    return [json.loads(out) for _, out, _ in ended], "".join(err for _, _, err in ended)


@pytest.mark.parametrize("folders", [0, 1, 2])
def test_each_rank_gets_its_own_part_back(tmp_path: Path, folders: int) -> None:
    found, _ = run(tmp_path, "saves_and_loads", folders)
    assert found == [[[-1], [10, 100.0], False], [[-1], [10, 101.0], False]]


@pytest.mark.parametrize("folders", [0, 2])
def test_parts_of_two_saves_of_one_iteration_are_not_loaded(tmp_path: Path, folders: int) -> None:
    found, said = run(tmp_path, "mixes_two_saves", folders)
    assert found == [[[-1], True, [15, 300.0]], [[-1], True, [15, 301.0]]]
    assert said.count("iteration 10 cannot be used: not all ranks have a part of the same save") == 1


def test_a_save_that_fails_on_one_rank_is_dropped_by_all(tmp_path: Path) -> None:
    found, said = run(tmp_path, "cannot_write_on_one_rank")
    assert found == [[1, False, [5, 50.0]], [1, False, [5, 51.0]]]
    assert said.count("no local checkpoint was saved: iteration 10: rank 1: IsADirectoryError") == 1


def test_a_torn_part_costs_all_ranks_that_save_and_only_that_part(tmp_path: Path) -> None:
    found, said = run(tmp_path, "is_torn_on_one_rank", 2)
    assert found == [[[5, 50.0], True], [[5, 51.0], False]]
    assert said.count("iteration 10 is not used: rank 1: ") == 1


def test_parts_that_no_other_node_has_do_not_take_the_room_of_new_ones(tmp_path: Path) -> None:
    """As after a death in the middle of a save, where the other node was replaced."""
    found, said = run(tmp_path, "has_lost_a_node", 2, limit=220_000)
    assert found == [[[-1], 0, [30, 300.0]], [[-1], 0, [30, 301.0]]], said


def test_the_room_is_measured_once_all_ranks_of_the_node_have_made_theirs(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "measures_the_room")
    assert found == [[[25], 0], [[25], 0]]


def test_a_load_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "cannot_load_on_one_rank")
    assert found[0] == found[1]
    assert found[0][0] == 5 and "cannot be loaded: rank 1: CheckpointingException" in found[0][1]


def test_groups_of_ranks_have_the_peers_methods(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "has_groups")
    batch = [[[0.0]], [[0.0], [1.0, 1.0]]]
    for rank in range(2):
        assert found[rank] == [[1, 0, rank, [rank]], [2, rank, rank, [0, 1]], [True, ["x", "x"], "gloo"], batch]
