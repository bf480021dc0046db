"""Silence, by counters and one clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.nodes.silence import Silence, lease_s, own_limit_s


def silence() -> Silence:
    watched = Silence(timeout_s=10.0, beat_s=2.0)
    watched.watch(["a", "b"], 0.0)
    return watched


def readings(watched: Silence, counters: list[dict[str, int | None]], period_s: float = 2.0) -> list[list[str]]:
    return [watched.read(one, (index + 1) * period_s) for index, one in enumerate(counters)]


def test_a_node_that_beats_is_there_and_one_that_stops_is_lost_once() -> None:
    lost = readings(silence(), [{"a": beats, "b": min(beats, 2)} for beats in range(1, 9)])
    assert lost == [[], [], [], [], [], [], ["b"], []], "its last news was read at 4 s, and 9 s have passed at 14 s"


def test_a_node_that_never_beat_is_lost_too() -> None:
    assert readings(silence(), [{"a": beats, "b": None} for beats in range(1, 6)]) == [[], [], [], [], ["b"]]


def test_a_counter_that_went_back_is_news_as_well() -> None:
    assert readings(silence(), [{"a": 9 - beats % 2, "b": beats} for beats in range(1, 20)]) == [[]] * 19


def test_time_in_which_the_reader_slept_counts_for_nobody() -> None:
    watched = silence()
    watched.read({"a": 1, "b": 1}, 2.0)
    assert watched.read({"a": 1, "b": 1}, 3600.0) == []
    assert watched.read({"a": 2, "b": 1}, 3602.0) == []
    assert watched.read({"a": 3, "b": 1}, 3604.0) == []
    assert watched.read({"a": 4, "b": 1}, 3606.0) == ["b"], "4 s of the sleep counted, and 6 s since"


def test_who_is_watched_anew_has_its_whole_time() -> None:
    watched = silence()
    watched.read({"a": 1, "b": 1}, 2.0)
    watched.watch(["b", "c"], 8.0)
    assert watched.read({"b": 2}, 8.0) == []
    assert set(watched.nodes) == {"b", "c"}


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
    watched, now = Silence(timeout_s, beat_s, period_s), phase * period_s
    watched.watch(["a"], now - period_s)
    while not watched.read({"a": 7}, now):
        now = max(watched.next_reading(now), now + 1e-6)
    assert asked_at <= lease_s(timeout_s, beat_s) + 1e-9 < now, "its monitors act between it and the others"
    assert now <= timeout_s + 0.5 * beat_s + 1e-5


@pytest.mark.parametrize("every", [1, 2])
def test_a_beat_that_is_left_out_now_and_then_is_no_loss(every: int) -> None:
    watched, lost = Silence(6.0, 1.0, every), []
    watched.watch(["a"], 0.0)
    now = 0.0
    for _ in range(200):
        now = watched.next_reading(now)
        lost += watched.read({"a": int(now / 2)}, now)
    assert lost == []


@pytest.mark.parametrize("beat_s", [0.2, 2.0])
def test_steady_beats_are_never_lost_however_the_reader_is_off(beat_s: float) -> None:
    watched, lost = Silence(6 * beat_s, beat_s), []
    watched.watch(["a"], 0.0)
    for reading in range(1, 200):
        now = reading * beat_s * 1.02
        lost += watched.read({"a": int(now / beat_s)}, now)
    assert lost == []
