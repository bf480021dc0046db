"""Two real ranks over gloo: whatever differs between them, both leave each exchange by the same way, and each gets its
own state back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract import env
from rank_monitor.contract.memory_files import AUTO, MemoryFiles
from rank_monitor.contract.wire.json_record import write_record
from tests.patience import patient
from tests.program import ROOT, clean_environment

WORKER = "tests.client.memory.agreed_load_worker"
KEEP = 2


def files(folder: Path, interval: int = 1, refused: str = "") -> MemoryFiles:
    """What the launcher of a node says."""
    if refused:
        return MemoryFiles("", KEEP, 1 << 30, interval, refused)
    folder.mkdir(mode=0o700, exist_ok=True)
    return MemoryFiles(str(folder), KEEP, 1 << 30, interval)


def run(tmp_path: Path, what: str, of_ranks: Sequence[MemoryFiles]) -> list[tuple[int, str, str]]:
    """Runs a function of the worker on the ranks of a job, of which each two have a process group. Returns exit code,
    stdout and stderr of each."""
    started = []
    for number, says in enumerate(of_ranks):
        group, rank = divmod(number, 2)
        variables = {
            env.MEMORY_FILES: write_record(says),
            env.RANK_MONITOR_SOCKET: str(tmp_path / f"m{number}"),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(len(of_ranks)),
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", WORKER, str(rank), str(tmp_path / f"store{group}"), what],
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
    return ended


def found(tmp_path: Path, what: str, *of_ranks: MemoryFiles) -> tuple[list[Any], list[str]]:
    """What the function returned on each rank, and what each rank said."""
    if not of_ranks:
        of_ranks = (files(tmp_path / "node"), files(tmp_path / "node"))
    ended = run(tmp_path, what, of_ranks)
    assert [code for code, _, _ in ended] == [0] * len(of_ranks), ended
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended], [err for _, _, err in ended]


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_object_that_had_no_room_on_one_rank_is_loaded_again(tmp_path: Path, nodes: int) -> None:
    results, said = found(
        tmp_path, "no_room_and_then_room", files(tmp_path / "node"), files(tmp_path / ("node", "other")[nodes - 1])
    )
    assert results == [{"left": [], "start": 0, "steps": [5, 4]}] * 2
    assert "another rank cannot save its own" in said[0]


@pytest.mark.parametrize(("interval", "steps"), [(3, [6, 3]), (AUTO, [1])])
def test_the_interval_of_rank_0_holds_for_all(tmp_path: Path, interval: int, steps: list[int]) -> None:
    nodes = files(tmp_path / "node", interval=interval), files(tmp_path / "other", interval=2)
    assert found(tmp_path, "intervals", *nodes)[0] == [steps, steps]


@pytest.mark.parametrize("interval", [3, 2, AUTO])
def test_ranks_that_count_differently_keep_nothing(tmp_path: Path, interval: int) -> None:
    results, said = found(tmp_path, "different_steps", *[files(tmp_path / "node", interval=interval)] * 2)
    assert results == [[], []]
    assert said[0].count("no state is kept in memory: the ranks are at different steps, 1 to 2") == 1
    assert "different steps" not in said[1]


def test_a_node_without_a_folder_takes_part(tmp_path: Path) -> None:
    nodes = files(tmp_path / "node"), files(tmp_path / "other", interval=5, refused="/dev/shm is full")
    results, said = found(tmp_path, "one_save", *nodes)
    assert results == [{"start": 0, "is_in_order": True}] * 2
    assert "no state is kept in memory: rank 1 cannot keep its own: /dev/shm is full" in said[0]


def test_a_start_in_which_one_rank_can_keep_nothing_leaves_the_state_for_the_next(tmp_path: Path) -> None:
    results, said = found(tmp_path, "refused_in_one_start")
    assert results == [[0, 6]] * 2
    assert "no state is kept in memory: rank 1 cannot keep its own: /dev/shm is missing" in said[0]
    assert said[0].count("step 6 in memory is not used in this start, as a rank can keep no state") == 1


def test_objects_that_one_rank_cannot_keep_are_kept_by_none(tmp_path: Path) -> None:
    results, said = found(tmp_path, "refused_on_one")
    assert results == [{"start": 0, "steps": []}] * 2
    assert "no state is kept in memory: rank 1 cannot keep its own: its shards have no names" in said[0]


def test_a_rank_of_another_release_ends_no_training(tmp_path: Path) -> None:
    results, said = found(tmp_path, "another_release")
    assert results == [{"start": 0, "is_in_order": True}] * 2
    assert "rank 1 cannot keep its own: it has another release" in said[0]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("load_on_rank_0_only", "rank 1 has "),
        ("load_on_rank_0_only_and_no_step", "these did not call it within 0.5 s"),
    ],
)
def test_load_on_some_ranks_only_names_those_that_did_not_come(tmp_path: Path, what: str, reason: str) -> None:
    """Before any collective: the collectives of the training are still paired on all ranks."""
    (first, second), _ = found(tmp_path, what)
    assert first["raised"].startswith(f"MemoryCheckpoint.load() was called by rank 0 and not by rank 1: {reason}")
    assert second["raised"] == "" and first["is_in_order"] and second["is_in_order"]


def test_a_late_rank_is_waited_for_by_the_timeout_of_the_group_and_not_by_that_of_its_store(tmp_path: Path) -> None:
    results, _ = found(tmp_path, "late_with_a_store_of_its_own")
    assert results == [{"start": 0, "is_in_order": True, "asked_of": [70.0]}] * 2


def test_steps_before_load_on_all_ranks_are_only_said(tmp_path: Path) -> None:
    results, said = found(tmp_path, "steps_before_load")
    assert results == [{"start": 0, "steps": [3]}] * 2
    assert said[0].count("no state is kept in memory: step() was called before load()") == 1


def test_two_process_groups_of_one_job_share_no_files(tmp_path: Path) -> None:
    """The ranks of both have the same numbers: one would load the state of the other."""
    results, said = found(tmp_path, "one_of_two_groups", *[files(tmp_path / "node")] * 4)
    expected = {"start": 0, "is_in_order": True, "is_on": False, "is_temporary": True}
    for result in results:
        assert not [name for name in result.pop("files") if not name.startswith("process-")]
        assert result == expected
    for first_of_group in (said[0], said[2]):
        assert "no state is kept in memory: the default process group has 2 of the job's 4 ranks" in first_of_group
        assert "no folders are kept in memory: rank 0: the default process group has 2 of" in first_of_group


def test_a_state_that_an_object_of_one_rank_refuses_is_followed_by_the_next(tmp_path: Path) -> None:
    results, said = found(tmp_path, "the_newest_is_refused")
    assert results == [{"start": 5, "state": {"step": 5}, "steps": [5]}] * 2
    assert "step 6 in memory is not used: KeyError: 'another number of workers'" in said[1]
    assert "step 6 in memory is not used: an object of another rank does not take it" in said[0]


def test_a_state_that_is_refused_is_met_once(tmp_path: Path) -> None:
    """The next cycle begins without it, and loads the checkpoint on disk."""
    results, _ = found(tmp_path, "all_are_refused")
    for result in results:
        assert "could be given back to all objects" in result["raised"]
        assert result["next"] == 0


def test_each_rank_gets_its_own_state_back_where_replicas_differ(tmp_path: Path) -> None:
    results, said = found(tmp_path, "state_of_replicas")
    for rank, result in enumerate(results):
        for kind, facts in result.items():
            assert (facts["start"], facts["same"]) == (2, True), kind
            assert facts["saved"] == [2, 1], kind
            assert facts["tensors"] == (rank == 0 or kind != "the same"), kind
    assert "model, optimizer should be the same on all ranks and are not" in said[0]


def test_replicas_that_become_different_are_found_at_the_next_save(tmp_path: Path) -> None:
    results, said = found(tmp_path, "replicas_that_become_different")
    assert results == [
        {"start": 4, "same": True, "tensors": [True] * 4},
        {"start": 4, "same": True, "tensors": [False, False, True, True]},
    ]
    assert said[0].count("model, optimizer should be the same on all ranks and are not") == 1


def test_a_state_that_one_rank_cannot_compare_is_not_saved_and_said_as_it_is(tmp_path: Path) -> None:
    """Nor is the save before it dropped."""
    results, said = found(tmp_path, "a_replica_that_fails_to_give_its_state")
    saved = [[], [11, 10, 9], [11, 10, 9], [13, 11, 10]]
    assert results == [{"saved": saved, "failures": 0}, {"saved": saved, "failures": 2}]
    assert said[1].count("the state was not saved in memory, which is tried again: ValueError: on purpose") == 2
    assert "should be the same" not in said[0]


def test_torchs_distributed_checkpoint_in_a_folder(tmp_path: Path) -> None:
    assert found(tmp_path, "distributed_checkpoint")[0] == [[7.0] * 4] * 2


def test_a_rank_that_fails_in_a_collective_body_ends_with_its_error(tmp_path: Path) -> None:
    """It does not wait for the other rank, which waits for it in the body."""
    node = files(tmp_path / "node")
    (first, _, _), (second, _, said) = run(tmp_path, "a_collective_body_fails", (node, node))
    assert first != 0 and second != 0
    assert "RuntimeError: on purpose" in said


def test_the_older_folder_stays_until_the_new_one_has_its_name_on_all_nodes(tmp_path: Path) -> None:
    results, said = found(
        tmp_path, "a_folder_gets_no_name_on_one_node", files(tmp_path / "node"), files(tmp_path / "other")
    )
    assert results == [{"steps": [1, 3]}] * 2
    assert "step 2 was not saved in memory: OSError: on purpose" in said[1]
