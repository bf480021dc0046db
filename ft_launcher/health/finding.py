"""What a check is told and what it answers. Light: every check's process imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["ok", "unknown", "warning", "unhealthy", "not present"]
Finding: TypeAlias = tuple[State, str]
"""One thing that was looked at: how it is, in words that name it; no words where there is nothing to say."""
Answer: TypeAlias = tuple[list[Finding], dict[str, Any]]
"""The findings of a check, and what it wants to be told again next time."""

_WORST_FIRST: tuple[State, ...] = ("unhealthy", "warning", "unknown", "ok", "not present")


class Task(NamedTuple):
    """What a check is told.

    Attributes:
        work: what to look at.
        memory: what it asked to be told again.
        say: tells where it is; the last such line is all that is known of a check that never answers.
    """

    work: dict[str, Any]
    memory: dict[str, Any]
    say: Callable[[str], None]


def worst(findings: Iterable[Finding]) -> Finding:
    """The worst state, with the reasons of all findings in that state; `not present` when there is none."""
    found = list(findings)
    states = {state for state, _ in found}
    state: State = next((state for state in _WORST_FIRST if state in states), "not present")
    return state, "; ".join(reason for its, reason in found if its == state and reason)
