"""A rank notes how far it is where it outlives the rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_client.memory import progress
from rank_monitor.contract.processes import rank_progress
from rank_monitor.contract.processes.rank_progress import MAX_NUMBER, RankProgress, pack, progress_name


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was noted before."""
    monkeypatch.setattr(progress, "opened", {})
    yield


def noted(folder: Path) -> dict[int, RankProgress]:
    return rank_progress.read_all(str(folder), [path.name for path in folder.iterdir()])


def test_steps_and_saves_are_seen_by_others_at_once(tmp_path: Path) -> None:
    own = progress.begin(str(tmp_path), 1, [0, 1], 20)
    found = noted(tmp_path)[1]
    assert (found.step, found.saves) == (20, 0) and 0 < found.began_ns == found.at_ns
    own.reached(21)
    own.cost(0.5)
    own.cost(0.25)
    own.saved(100)
    own.failed()
    found = noted(tmp_path)[1]
    assert (found.step, found.saves, found.failed, found.size) == (21, 1, 1, 100)
    assert (found.first_cost_ns, found.cost_ns) == (500_000_000, 250_000_000)
    assert found.at_ns > found.began_ns


def test_a_restart_in_process_goes_on_counting_and_another_process_begins_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress.begin(str(tmp_path), 0, [0], 0).saved(100)
    began = noted(tmp_path)[0].began_ns
    progress.begin(str(tmp_path), 0, [0], 5)
    again = noted(tmp_path)[0]
    assert (again.step, again.saves, again.began_ns) == (5, 1, began)
    monkeypatch.setattr(progress, "opened", {})
    progress.begin(str(tmp_path), 0, [0], 4)
    assert (noted(tmp_path)[0].step, noted(tmp_path)[0].saves) == (4, 0)


def test_the_first_rank_of_a_node_removes_what_ranks_left_that_are_gone(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / progress_name(rank)).write_bytes(pack(RankProgress(step=100 + rank)))
    assert progress.last_step(str(tmp_path)) == 103
    progress.begin(str(tmp_path), 1, [0, 1], 7)
    assert sorted(noted(tmp_path)) == [0, 1, 2, 3]
    progress.begin(str(tmp_path), 0, [0, 1], 7)
    assert {rank: found.step for rank, found in noted(tmp_path).items()} == {0: 7, 1: 7}
    assert progress.last_step(str(tmp_path)) == 7


@pytest.mark.parametrize("step", [-3, 0, MAX_NUMBER + 1, 2**70])
def test_no_step_ends_a_training(tmp_path: Path, step: int) -> None:
    progress.begin(str(tmp_path), 0, [0], 0).reached(step)
    assert noted(tmp_path)[0].step == min(max(0, step), MAX_NUMBER)


def test_where_there_is_no_folder_nothing_is_noted(tmp_path: Path) -> None:
    own = progress.begin(str(tmp_path / "gone"), 0, [0], 3)
    own.reached(4)
    own.saved(1)
    assert progress.last_step(str(tmp_path / "gone")) == progress.last_step("") == 0


def test_a_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    progress.begin(str(tmp_path), 0, [0], 3)
    (tmp_path / progress_name(0)).unlink()
    progress.begin(str(tmp_path), 0, [0], 4)
    assert noted(tmp_path)[0].step == 4
