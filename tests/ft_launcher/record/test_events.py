"""Every event of the journal is documented, and holds what the records that it is made of hold."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import pytest

from ft_launcher.decide.attribution import Fault
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.restart_policy import Decision
from ft_launcher.record import events
from ft_launcher.record.events import ABSENT, EVENTS, Event
from ft_launcher.record.events.sharing import sharing_of
from rank_monitor.contract.settings.injection import InjectionReport
from rank_monitor.contract.wire import launcher_messages, messages
from scripts.docs import journal_events

HEAD = {"v", "t", "event"}

every_event = pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)


def keys(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


@every_event
def test_every_event_and_every_field_is_documented(event: type[Event]) -> None:
    assert (event.__doc__ or "").strip() and not (event.__doc__ or "").startswith(f"{event.__name__}(")
    assert keys(event) == journal_events.meanings_of(event).keys()
    assert not keys(event) & HEAD
    assert getattr(events, event.__name__) is event


@every_event
def test_the_class_of_an_event_says_that_it_is_one(event: type[Event]) -> None:
    """What an event is about often has a class of the same name: a fault, a decision, a verdict."""
    assert event.__name__.endswith("Event")


@every_event
def test_every_field_says_whether_it_may_be_passed_on(event: type[Event]) -> None:
    assert sharing_of(event).keys() == keys(event), "see ft_launcher/record/events/sharing.py"


@every_event
def test_every_event_is_on_the_page(event: type[Event]) -> None:
    assert f"\n### {event.event}\n" in journal_events.PAGE.read_text(), "its module may be missing in `_GROUPS`"


def test_the_page_is_current() -> None:
    assert journal_events.PAGE.read_text() == journal_events.page(), "run `make docs`"


@pytest.mark.parametrize(
    ("event", "record", "more"),
    [
        (events.FaultEvent, Fault, {"cycle"}),
        (events.DecisionEvent, Decision, {"cycle", "inputs"}),
        (events.FaultOnPurposeEvent, InjectionReport, {"cycle"}),
        (events.VerdictEvent, launcher_messages.Verdict, {"stacks"}),
        (events.InterruptionEvent, launcher_messages.Verdict, {"stacks"}),
        (events.UncaughtExceptionEvent, messages.RankException, {"cycle", "rank"}),
        (events.LimitsEvent, messages.LimitsSet, {"cycle", "rank"}),
        (events.InterruptedAgainEvent, messages.InterruptedAgain, {"cycle", "rank"}),
        (events.SectionTimesEvent, messages.SectionTimes, {"cycle", "rank"}),
        (events.ResultInDoubtEvent, messages.ResultInDoubt, {"cycle"}),
        (events.ControlRequestEvent, messages.ControlRequest, {"cycle", "rank"}),
    ],
    ids=lambda value: getattr(value, "event", ""),
)
def test_an_event_of_a_record_has_all_its_fields(event: type[Event], record: type, more: set[str]) -> None:
    assert keys(event) == keys(record) | more


def test_the_end_of_a_failed_cycle_has_what_is_known_of_its_life() -> None:
    assert keys(CycleLife) < keys(events.CycleEndEvent)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    depth: int


@dataclass(frozen=True)
class Record:
    cycle: int
    how: Any
    why: Any
    unknown: str = "no field of the event"


def test_an_event_is_made_of_a_record_as_plain_values() -> None:
    event = events.CycleEndEvent.of(Record(1, Colour.RED, Inner(2)), cycle=7)
    assert event.facts() == {"cycle": 7, "how": "red", "why": {"depth": 2}}
    assert json.dumps(event.facts())


def test_a_field_that_is_absent_is_not_null() -> None:
    assert events.CycleEndEvent(0, "failed", iteration=None).facts() == {"cycle": 0, "how": "failed", "iteration": None}
    assert "iteration" not in events.CycleEndEvent(0, "failed", iteration=ABSENT).facts()


def test_two_events_cannot_have_one_name() -> None:
    with pytest.raises(AssertionError, match="rank_exit"):
        type("Again", (Event,), {}, name="rank_exit")
