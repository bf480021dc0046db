"""When nodes beat and when they count as lost.

All in all one operation per node and beat; never are two beats in a row left out.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.job.coordinator.beat_schedule import BeatReader, BeatSchedule, lease_s, own_limit_s, read_every

DEPUTIES = 2


def operations(beats: int, every: int, rank: int, members: int, deputies: int) -> tuple[int, list[bool]]:
    """Those of a node in so many beats, and which of its beats were made."""
    schedule, made, looks = BeatSchedule(), [], 0
    schedule.serve(rank, members, deputies)
    for at in range(1, beats + 1):
        if at % every == 0:
            schedule.note_operation()
            looks += 1
        made.append(schedule.next_is_made())
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
    made = [operations(beats, read_every(members), rank, members, 0)[0] for rank in range(watchers)]
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
    schedule = BeatSchedule()
    schedule.note_operation()
    assert [schedule.next_is_made(quick=False) for _ in range(3)] == [True] * 3
    assert [schedule.next_is_made() for _ in range(3)] == [False, True, True]


@given(st.floats(0.1, 5.0), st.floats(6.0, 50.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.sampled_from([1, 2]))
def test_a_node_that_cannot_beat_gives_up_before_others_count_it_as_lost(
    beat_s: float, beats_until_lost: float, own_phase: float, phase: float, every: int
) -> None:
    """Its last beat reached the store at moment 0, at the earliest when it was sent."""
    timeout_s = beat_s * beats_until_lost
    own, asked_at = own_limit_s(timeout_s, beat_s), own_phase * beat_s / 4
    while asked_at < own:
        asked_at += beat_s / 4
    period_s = every * beat_s
    reader, now = BeatReader(timeout_s, beat_s, period_s), phase * period_s
    reader.watch(["a"], now - period_s)
    while not reader.read({"a": 7}, now):
        now = max(reader.next_reading(now), now + 1e-6)
    assert asked_at <= lease_s(timeout_s, beat_s) + 1e-9 < now, "its monitors act between it and the others"
    assert now <= timeout_s + 0.5 * beat_s + 1e-5


@pytest.mark.parametrize("every", [1, 2])
def test_a_beat_that_is_left_out_now_and_then_is_no_loss(every: int) -> None:
    reader, lost = BeatReader(6.0, 1.0, every), []
    reader.watch(["a"], 0.0)
    now = 0.0
    for _ in range(200):
        now = reader.next_reading(now)
        lost += reader.read({"a": int(now / 2)}, now)
    assert lost == []


@pytest.mark.parametrize("beat_s", [0.2, 2.0])
def test_steady_beats_are_never_lost_however_the_reader_is_off(beat_s: float) -> None:
    reader, lost = BeatReader(6 * beat_s, beat_s, beat_s), []
    reader.watch(["a"], 0.0)
    for reading in range(1, 200):
        now = reading * beat_s * 1.02
        lost += reader.read({"a": int(now / beat_s)}, now)
    assert lost == []
