"""The durations of the wrapper: defaults, and every relation."""

from __future__ import annotations

import datetime
from dataclasses import fields

import pytest

from ft_client.inprocess.arguments import Timeouts


def s(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def test_documented_defaults() -> None:
    durations = {one.name: getattr(Timeouts(), one.name) for one in fields(Timeouts)}
    assert durations.pop("interrupt_grace") is None
    assert {name: duration.total_seconds() for name, duration in durations.items()} == {
        "monitor_thread_interval": 1,
        "monitor_process_interval": 1,
        "heartbeat_interval": 1,
        "progress_watchdog_interval": 1,
        "soft_timeout": 60,
        "hard_timeout": 90,
        "heartbeat_timeout": 30,
        "barrier_timeout": 120,
        "completion_timeout": 120,
        "last_call_wait": 1,
        "termination_grace_time": 5,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"soft_timeout": 90}, "soft_timeout=90 s must be below hard_timeout=90 s"),
        ({"hard_timeout": 120}, "hard_timeout=120 s must be below barrier_timeout=120 s"),
        (
            {"monitor_process_interval": 200, "heartbeat_timeout": 100},
            "monitor_process_interval=200 s must be below barrier_timeout=120 s",
        ),
        ({"monitor_process_interval": 30}, "monitor_process_interval=30 s must be below heartbeat_timeout=30 s"),
        (
            {"monitor_process_interval": 20, "soft_timeout": 20},
            "monitor_process_interval=20 s must be below soft_timeout=20 s",
        ),
        ({"heartbeat_interval": 30.5}, "heartbeat_interval=30.5 s must be below heartbeat_timeout=30 s"),
        ({"heartbeat_timeout": 120}, "heartbeat_timeout=120 s must be below barrier_timeout=120 s"),
        ({"monitor_thread_interval": 60}, "monitor_thread_interval=60 s must be below soft_timeout=60 s"),
        ({"progress_watchdog_interval": 61}, "progress_watchdog_interval=61 s must be below soft_timeout=60 s"),
        ({"last_call_wait": -0.001}, "last_call_wait=-0.001 s is below zero"),
        ({"completion_timeout": -1}, "completion_timeout=-1 s is below zero"),
    ],
)
def test_relations(given: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        Timeouts(**{name: s(value) for name, value in given.items()})


@pytest.mark.parametrize("given", [{"last_call_wait": 0}, {"termination_grace_time": 0}, {"heartbeat_interval": 29.9}])
def test_what_is_allowed(given: dict[str, float]) -> None:
    made = Timeouts(**{name: s(value) for name, value in given.items()})
    assert {name: getattr(made, name) for name in given} == {name: s(value) for name, value in given.items()}


@pytest.mark.parametrize("name", [one.name for one in fields(Timeouts) if one.name != "interrupt_grace"])
@pytest.mark.parametrize("value", [1, 1.5, None, "1s"])
def test_wrong_types(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name}={value!r} is not a timedelta"):
        Timeouts(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given_s", "of_launcher_s", "grace_s"), [(None, None, 15), (None, 4.0, 4), (2, 4.0, 2), (0, None, 0)]
)
def test_the_grace_of_an_interruption(given_s: float | None, of_launcher_s: float | None, grace_s: float) -> None:
    grace = None if given_s is None else s(given_s)
    assert Timeouts(interrupt_grace=grace).interrupt_grace_s(of_launcher_s) == grace_s
