"""What the launcher records of the training's state in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.agent.state_in_memory import StateInMemory
from ft_launcher.node.memory_files.node_memory import NodeMemory
from ft_launcher.record.events import StateLoadedEvent, StatesSavedEvent
from rank_monitor.contract.memory_files import StateTier
from rank_monitor.contract.processes.rank_progress import RankProgress
from rank_monitor.contract.wire.messages import StateLoaded, StateRefused

LOADED = StateLoaded("0000000a", StateTier.MEMORY, 20, "aaaaaaaa", 10, 45)
NONE = StateLoaded("0000000b", StateTier.NONE, 0, "", 0, 0)
KEPT = NodeMemory(40, 3000, 9000, {0: RankProgress(step=44, saves=4, cost_ns=10, first_cost_ns=5, size=7, began_ns=1)})


class Folder:
    """A node's folder, and what is in it."""

    def __init__(self, kept: NodeMemory | None) -> None:
        self.kept = kept
        self.since_ns: list[int] = []

    def state(self, since_ns: int) -> NodeMemory | None:
        self.since_ns.append(since_ns)
        return self.kept


class Recorder:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.loads: list[StateLoadedEvent] = []
        self.shown: list[bool] = []
        self.saves: list[StatesSavedEvent] = []

    def loaded(self, event: StateLoadedEvent, is_shown: bool) -> None:
        self.loads.append(event)
        self.shown.append(is_shown)

    def saved(self, event: StatesSavedEvent) -> None:
        self.saves.append(event)


def made(kept: NodeMemory | None = None) -> tuple[StateInMemory, Any, Any]:
    folder, recorder = Folder(kept), Recorder()
    return StateInMemory(folder, recorder), folder, recorder  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "iteration", "reached", "lost"),
    [
        (NONE, -1, 0, None),
        (LOADED, -1, 45, 25),
        # Iterations that a program reported itself: it may have gone on since its last `step`.
        (LOADED, 46, 47, 27),
        (LOADED, 44, 45, 25),
        # The checkpoint on disk is newer than the state in memory, which was not loaded.
        (replace(NONE, newer_than=40, reached=45), -1, 45, 5),
        # The program names no checkpoint on disk, and may have one all the same.
        (replace(NONE, reached=45), -1, 45, None),
        # The ranks went on from a later step than was ever reported here: another launcher's job.
        (replace(LOADED, reached=0), -1, 0, None),
    ],
)
def test_how_many_steps_are_lost(message: StateLoaded, iteration: int, reached: int, lost: int | None) -> None:
    state, _, recorder = made()
    state.cycle_over(0, 1, iteration)
    state.on_loaded(1, message, True)
    (event,) = recorder.loads
    assert (event.cycle, event.reached, event.steps_lost) == (1, reached, lost)
    assert (event.tier, event.step, event.newer_than) == (str(message.tier), message.step, message.newer_than)


@pytest.mark.parametrize(("iteration", "reached"), [(46, 46), (45, 45), (0, 45), (-1, 45)])
def test_a_log_that_numbers_the_first_iteration_1_says_how_many_are_done(iteration: int, reached: int) -> None:
    recorder = Recorder()
    state = StateInMemory(Folder(None), recorder, iterations_from_1=True)  # type: ignore[arg-type]
    state.cycle_over(0, 1, iteration)
    state.on_loaded(1, LOADED, True)
    assert [(event.reached, event.steps_lost) for event in recorder.loads] == [(reached, reached - 20)]


def test_all_ranks_tell_the_same_look_and_a_restart_in_process_is_another() -> None:
    state, _, recorder = made()
    for message in (LOADED, LOADED, replace(LOADED, load="0000000c"), LOADED):
        state.on_loaded(0, message, True)
    assert [event.steps_lost for event in recorder.loads] == [25, 25]


def test_an_iteration_counts_for_one_look() -> None:
    state, _, recorder = made()
    state.cycle_over(0, 1, 59)
    state.on_loaded(1, LOADED, True)
    state.on_loaded(1, replace(LOADED, load="0000000c", reached=20), True)
    assert [event.steps_lost for event in recorder.loads] == [40, 0]


def test_one_node_of_the_job_tells_the_user() -> None:
    shown: Sequence[bool] = (True, False)
    for has_rank0 in shown:
        state, _, recorder = made()
        state.on_loaded(0, LOADED, has_rank0)
        assert recorder.shown == [has_rank0]


def test_what_was_refused_is_recorded() -> None:
    state, _, recorder = made()
    state.on_loaded(0, replace(LOADED, refused=[StateRefused(22, 1, "damaged")]), True)
    assert recorder.loads[0].refused == [{"step": 22, "rank": 1, "reason": "damaged"}]


def test_what_was_loaded_is_known_until_the_next_cycle() -> None:
    state, _, _ = made()
    state.on_loaded(0, LOADED, True)
    state.cycle_over(0, 1, -1)
    assert state.loaded == LOADED
    state.cycle_begins()
    assert state.loaded is None


def test_saves_are_summed_up_at_the_end_of_a_cycle() -> None:
    state, folder, recorder = made(KEPT)
    state.cycle_over(3, 77, -1)
    assert folder.since_ns == [77] and state.kept == KEPT
    (event,) = recorder.saves
    assert (event.cycle, event.newest, event.reached, event.saves, event.size) == (3, 40, 44, 4, 7)
    assert (event.in_use, event.limit) == (3000, 9000)


@pytest.mark.parametrize("kept", [None, NodeMemory(40, 3000, 9000, {})])
def test_a_cycle_whose_ranks_looked_for_no_state_has_no_line(kept: NodeMemory | None) -> None:
    state, _, recorder = made(kept)
    state.cycle_over(0, 1, -1)
    assert recorder.saves == [] and state.kept == kept


def test_the_node_without_a_folder(tmp_path: Path) -> None:
    """As where the user wants none."""
    from ft_launcher.node.memory_files.job_folder import JobFolder
    from rank_monitor.contract.settings.config import MemorySettings

    folder = JobFolder(MemorySettings(), "tag")
    assert folder.state(0) is None
