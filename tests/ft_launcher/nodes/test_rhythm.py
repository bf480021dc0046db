"""How many beats are left out: all in all one operation per node and beat, and never two in a row."""

from __future__ import annotations

import itertools

import pytest

from ft_launcher.nodes.rhythm import Rhythm, look_every

DEPUTIES = 2


def operations(beats: int, every: int, rank: int, members: int, deputies: int) -> tuple[int, list[bool]]:
    """Those of a node in so many beats, and which of its beats were made."""
    rhythm, made, looks = Rhythm(), [], 0
    rhythm.serve(rank, members, deputies)
    for at in range(1, beats + 1):
        if at % every == 0:
            rhythm.looked()
            looks += 1
        made.append(rhythm.next_is_made())
    return looks + sum(made), made


@pytest.mark.parametrize("members", [8, 16, 64, 256, 1024])
@pytest.mark.parametrize("beats", [10, 31, 1000])
@pytest.mark.parametrize("every", [8, 30])
def test_a_job_makes_one_operation_per_node_and_beat_from_the_start(members: int, beats: int, every: int) -> None:
    coordinator = beats + beats // 2
    deputies = sum(operations(beats, 1, rank, members, 0)[0] for rank in range(DEPUTIES))
    others = sum(operations(beats, every, rank, members, DEPUTIES)[0] for rank in range(1 + DEPUTIES, members))
    assert coordinator + deputies + others <= members * beats + 2 * DEPUTIES


@pytest.mark.parametrize("members", range(2, 10))
@pytest.mark.parametrize("beats", [10, 31, 1000])
def test_a_small_job_does_so_too(members: int, beats: int) -> None:
    watchers = min(1 + DEPUTIES, members)
    made = [operations(beats, look_every(members), rank, members, 0)[0] for rank in range(watchers)]
    made += [operations(beats, 30, rank, members, DEPUTIES)[0] for rank in range(watchers, members)]
    assert sum(made) <= members * beats + members


@pytest.mark.parametrize("members", range(1, 10))
@pytest.mark.parametrize("every", [1, 2, 3, 8])
def test_two_beats_in_a_row_are_never_left_out(members: int, every: int) -> None:
    for rank in range(members):
        _, made = operations(100, every, rank, members, min(DEPUTIES, members - 1))
        assert all(one or other for one, other in itertools.pairwise(made))


@pytest.mark.parametrize(("members", "deputies"), [(1, 0), (2, 1), (3, 2), (8, 0)])
def test_a_node_without_others_to_serve_leaves_nothing_out(members: int, deputies: int) -> None:
    assert operations(100, 1000, 0, members, deputies) == (100, [True] * 100)


def test_on_a_slow_line_every_beat_is_made() -> None:
    rhythm = Rhythm()
    rhythm.looked()
    assert [rhythm.next_is_made(quick=False) for _ in range(3)] == [True] * 3
    assert [rhythm.next_is_made() for _ in range(3)] == [False, True, True]
