"""What a coordinator is given and gives: its rules, the judge it asks about a fault, and the work it wants done. Pure.

Knows no state of a job; `coordinator.py` holds that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ft_launcher.nodes.membership import Size
from ft_launcher.nodes.messages import Answer, CycleEnd, Formed


@dataclass(frozen=True)
class Rules:
    """How many nodes, and how long to wait for them.

    Attributes:
        size: how many.
        last_call_s: from the minimum to the formation, unless that can be at once.
        join_s: how long too few nodes wait for more.
        keep_healthy: a failed node does not end the cycle while the minimum of nodes is healthy.
        deputies: how many members watch the coordinator.
        doubt_s: how long a node waits whose rank another holds that may be dead.
        hosts: the coordinator's node hosts the store, so the job ends when it leaves.
        in_vain: so many cycles in a row that fail without a failed rank, since their store cannot be reached, say, end
            the job.
        hint: a word more for nodes that turn out to be too few.
    """

    size: Size
    last_call_s: float = 30.0
    join_s: float = 600.0
    keep_healthy: bool = False
    deputies: int = 2
    doubt_s: float = 20.0
    hosts: bool = False
    in_vain: int = 3
    hint: str = ""


@dataclass(frozen=True)
class Judgement:
    """What follows a fault: go on (`exit_code` None), after `wait_s`, or give up; and the new history of restarts.

    `moves`: another node that waits is to have the faulty one's place; `exchange`: a member, where none waits.
    """

    reason: str
    exit_code: int | None
    decision: dict[str, Any]
    history: dict[str, Any]
    wait_s: float = 0.0
    moves: bool = False
    exchange: bool = False


@dataclass(frozen=True)
class Case:
    """What is judged: a fault, and the history of restarts as it was `age_s` ago.

    `elsewhere`: a node waits that could take the faulty one's place. `exchange`: a member could change places with it.
    """

    fault: dict[str, Any]
    history: dict[str, Any]
    age_s: float
    elsewhere: bool
    exchange: bool = False


Judge: TypeAlias = Callable[[Case, float], Judgement]
"""Case, now -> judgement. The restart policy behind a wall: the coordinator knows no policy."""


@dataclass(frozen=True)
class Reply:
    """Answers a node's arrival number `seq`."""

    node: str
    seq: int
    answer: Answer


Work: TypeAlias = "Formed | Reply | CycleEnd"
"""What the coordinator wants done, in order. `Formed` must be agreed on before anything after it is done."""
