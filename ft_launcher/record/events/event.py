"""The base class of all events of the journal, and the table of their names. Pure.

An event is a frozen dataclass. Its docstring says when it is written, and a docstring follows each field:
`scripts/docs/journal_events.py` makes docs/journal.md of both. The type of each field says whether the field may be
passed on to others (`sharing.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

from ft_launcher.record.events.sharing import Shared

EVENTS: dict[str, type[Event]] = {}
"""Name in the file -> class."""

_E = TypeVar("_E", bound="Event")


class Absent(Enum):
    """The type of `ABSENT`."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT
"""The value of a field that the line of this event does not have. JSON's null is a value of its own: unknown."""


@dataclass(frozen=True)
class Event:
    """Base class of all events. Each subclass has a name, as in `class RankExit(Event, name="rank_exit")`.

    Attributes:
        event: the name, which is the key `event` of the line.
        v: the version of this class of events, which is the key `v`. It grows when a field goes or changes its meaning;
            a new field needs no new version, since readers ignore what they do not know.
    """

    event: ClassVar[str]
    v: ClassVar[int]

    def __init_subclass__(cls, name: str, version: int = 1) -> None:
        super().__init_subclass__()
        assert name not in EVENTS, f"two events are named {name}"
        cls.event = name
        cls.v = version
        EVENTS[name] = cls

    def facts(self) -> dict[str, Any]:
        """Returns the fields of the line by name, in order."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not ABSENT}

    @classmethod
    def of(cls: type[_E], record: Any, **facts: Any) -> _E:
        """Returns the event with the fields of a dataclass that have its names; `facts` are its other fields.

        Enums become their values and dataclasses their fields, so that the line holds JSON values only.
        """
        names = {field.name for field in fields(cls)} - facts.keys()
        return cls(**{name: _plain(value) for name, value in vars(record).items() if name in names}, **facts)


@dataclass(frozen=True)
class OfCycle:
    """What an event begins with that is written while a cycle runs."""

    cycle: Shared[int]
    """The cycle that runs."""


@dataclass(frozen=True)
class OfRank(OfCycle):
    """What an event of one rank begins with."""

    rank: Shared[int]
    """The rank."""


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value
