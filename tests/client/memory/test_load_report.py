"""What the launcher is told about a look for state in memory."""

from __future__ import annotations

import pytest

from ft_client.memory.agreed_steps import AgreedSteps, OtherWorld
from ft_client.memory.load_report import ALL_RANKS, line_of_other_world, message_of_load, message_of_look
from rank_monitor.contract.memory_files import Generation, StateFolder, StateTier
from rank_monitor.contract.wire.messages import MAX_REASON, MAX_REFUSED, StateLoaded, StateRefused

OWN = "aaaaaaaa"
NEXT = "bbbbbbbb"


def generation(step: int, world: int = 2) -> Generation:
    return Generation(step, world, OWN, (0, 1))


def agreed(
    older: tuple[int, ...] = (),
    left_out: tuple[Generation, ...] = (),
    newer_than: int = 0,
    refusing_rank: int | None = None,
    refused: str = "",
) -> AgreedSteps:
    return AgreedSteps((), older, left_out, (0, 1), newer_than, NEXT, 1, refusing_rank, refused, 45, 0)


def refusals(message: StateLoaded) -> list[tuple[int, int, str]]:
    return [(one.step, one.rank, one.reason) for one in message.refused]


NOT_ON_ALL = "not all nodes have it, or their ranks have moved"


@pytest.mark.parametrize(
    ("found", "tried", "at", "start", "refused"),
    [
        (None, (), agreed(), (StateTier.NONE, 0, ""), []),
        (generation(40), (), agreed(), (StateTier.MEMORY, 40, OWN), []),
        (
            generation(40),
            (StateRefused(42, 1, "damaged"), StateRefused(41, 0, "damaged")),
            agreed(),
            (StateTier.MEMORY, 40, OWN),
            [(42, 1, "damaged"), (41, 0, "damaged")],
        ),
        (
            None,
            (),
            agreed(older=(40, 30), newer_than=40),
            (StateTier.NONE, 0, ""),
            [(step, ALL_RANKS, "it is not newer than the checkpoint on disk") for step in (40, 30)],
        ),
        # What is older than the loaded one is nobody's loss.
        (
            generation(40),
            (),
            agreed(left_out=(generation(44), generation(39))),
            (StateTier.MEMORY, 40, OWN),
            [(44, ALL_RANKS, NOT_ON_ALL)],
        ),
        (
            None,
            (),
            agreed(left_out=(generation(44, world=4),)),
            (StateTier.NONE, 0, ""),
            [(44, ALL_RANKS, "it is of 4 ranks and not on all nodes of a job of 2")],
        ),
        (
            None,
            (),
            agreed(left_out=(generation(44),), refusing_rank=1, refused="no room"),
            (StateTier.NONE, 0, ""),
            [(44, ALL_RANKS, "rank 1 cannot keep its own: no room")],
        ),
    ],
)
def test_what_was_loaded_and_what_was_refused(
    found: Generation | None,
    tried: tuple[StateRefused, ...],
    at: AgreedSteps,
    start: tuple[StateTier, int, str],
    refused: list[tuple[int, int, str]],
) -> None:
    message = message_of_load(found, tried, at, 2)
    assert (message.tier, message.step, message.series) == start
    assert (message.load, message.newer_than, message.reached) == (NEXT, at.newer_than, 45)
    assert refusals(message) == refused


def test_the_message_is_bounded() -> None:
    at = agreed(left_out=tuple(generation(step) for step in range(100, 0, -1)), refusing_rank=1, refused="x" * 9000)
    message = message_of_load(None, (), at, 2)
    assert [one.step for one in message.refused] == list(range(100, 100 - MAX_REFUSED, -1))
    assert {len(one.reason) for one in message.refused} == {MAX_REASON}


@pytest.mark.parametrize(
    ("step", "offered", "on_disk", "refused"),
    [
        (0, [], 0, []),
        (4, [(3, OWN), (4, OWN)], 0, []),
        (4, [(4, OWN), (5, OWN)], 0, [(5, ALL_RANKS, NOT_ON_ALL)]),
        (0, [(4, OWN)], 4, [(4, ALL_RANKS, "it is not newer than the checkpoint on disk")]),
    ],
)
def test_a_folder_of_a_step(
    step: int, offered: list[tuple[int, str]], on_disk: int, refused: list[tuple[int, int, str]]
) -> None:
    found = StateFolder(step, 2, "00000000", OWN) if step else None
    message = message_of_look(NEXT, found, offered, on_disk, 9)
    assert (message.step, message.series) == ((step, OWN) if step else (0, ""))
    assert message.tier is (StateTier.MEMORY if step else StateTier.NONE)
    assert (message.load, message.newer_than, message.reached) == (NEXT, on_disk, 9)
    # No later step is known than that of the folder, and steps without a folder are not noted.
    assert message_of_look(NEXT, found, offered, on_disk, step).reached == 0
    assert refusals(message) == refused


def test_of_how_many_ranks_the_loaded_state_is() -> None:
    found = OtherWorld(40, 4, OWN, ())
    message = message_of_load(found, (), agreed(), 2)
    assert (message.step, message.series, message.world, message.saved_world) == (40, OWN, 2, 4)
    assert (message_of_load(None, (), agreed(), 2).saved_world, message.tier) == (0, StateTier.MEMORY)
    begins = "step 40 in memory is of 4 ranks and was put together for 2: random numbers and"
    assert line_of_other_world(found, 2, ()) == f"{begins} loaders begin anew"
    assert line_of_other_world(found, 2, ("loader", "mine")) == f"{begins} loader, mine begin anew"
