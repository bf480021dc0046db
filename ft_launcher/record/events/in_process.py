"""Events of restarts in process, as the launcher sees them. Pure. docs/restart_policy.md tells them in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.record.events.event import Event, OfCycle, OfRank
from ft_launcher.record.events.sharing import FreeText, InPart, InPartOrText, Shared


@dataclass(frozen=True)
class InProcessDecisionEvent(OfCycle, Event, name="in_process_decision"):
    """What the launcher decides for ranks that restart in process; `ft_launcher replay` decides it again. Written
    before the events of what follows: for each death of a rank there, and for a message or a deadline that calls for
    a step.
    """

    happened: InPartOrText[Mapping[str, Any]]
    """`what`: `heard` (a `message` of the wrapper of `local_rank`), `died` (with `exit_code`), `loss_notified` (the
    others know that it is gone, or the `problem` with that) or `deadline` (one of `known` has passed)."""
    known: InPartOrText[Mapping[str, Any]]
    """What the launcher knew before: `ranks` of this node; `rejoin` (dead ranks are started again); `final_codes`
    (exit codes that end the cycle); where ranks restart, `since_s` (seconds since the first sign of the fault) and
    `failed` (the round); `wrappers`, each with the `local_ranks` for which it holds: of the last message `state`,
    `iteration` (the round), `prefix`, `limit_s`, `reason`, and `member` where it is not the rank; and only where they
    apply `exit_code`, `is_new` (started again, not let in yet), `is_lost`, `starts` (how often it was started again),
    `is_next` (to be started again), `is_ended` (killed for its deadline), `due_s` (seconds to the deadline of each)."""
    follows: InPartOrText[Sequence[Mapping[str, Any]] | None]
    """The steps, each with its name `step`: `notify_loss`, `start_again`, `stay_away`, `joined`, `restarted`,
    `end_rank` or `take_over`; none: the others go on. null: the death ends the cycle, as without wrappers."""


@dataclass(frozen=True)
class InProcessFaultEvent(OfRank, Event, name="in_process_fault"):
    """The process of a rank ended, and the other ranks go on in process."""

    pid: Shared[int]
    """Its process."""
    exit_code: Shared[int | None]
    """Its exit code; minus the number of the signal that ended it; null: it is not known."""
    what: FreeText[str]
    """What happened, in words."""
    where: Shared[str]
    """Where the rank was in its training; empty: unknown."""
    hint: Shared[str]
    """The likely cause; empty: none is known."""
    fault_class: Shared[str]
    """The class of the fault; empty where no fault was found."""


@dataclass(frozen=True)
class InProcessRestartEvent(OfCycle, Event, name="in_process_restart"):
    """The ranks of this node run again, in the same processes."""

    iteration: Shared[int]
    """The round that begins."""
    took_s: Shared[float]
    """Seconds from the fault to the restart, as this launcher saw them."""
    why: InPartOrText[Sequence[Mapping[str, Any]]]
    """What the ranks wrote of the fault: each with `rank`, `interruption` and more."""
    skipped: Shared[int] = 0
    """How many restarts came just before, while the launcher stood still: they are counted and have no event each."""


@dataclass(frozen=True)
class InProcessBlameEvent(OfCycle, Event, name="in_process_blame"):
    """Who held up the others when ranks were asked to restart in process because they made no progress. The node that
    hosts the ranks' store says it, for those of all nodes."""

    iteration: Shared[int]
    """The round that is interrupted."""
    finding: Shared[str]
    """As in `fault`: `gone`, `behind`, `deadlock`, `mismatch`, `transport` or `unknown`."""
    ranks: InPart[Sequence[int]]
    """The culprits; empty where no rank can be named."""
    text: Shared[str]
    """What they did, in words."""


@dataclass(frozen=True)
class StartedAgainEvent(OfRank, Event, name="started_again"):
    """A rank that died was started again alone; it joins at the next restart in process."""

    local_rank: Shared[int]
    """Its number on this node."""
    pid: Shared[int]
    """Its new process."""


@dataclass(frozen=True)
class StaysAwayEvent(OfRank, Event, name="stays_away"):
    """A rank that died is not started again in this cycle; the others go on."""

    reason: FreeText[str]
    """Why not."""


@dataclass(frozen=True)
class JoinedEvent(OfRank, Event, name="joined"):
    """A rank that was started again takes part."""

    iteration: Shared[int]
    """The first round that it takes part in."""


@dataclass(frozen=True)
class LateRankEndedEvent(OfRank, Event, name="late_rank_ended"):
    """A rank that the others went on without is killed."""

    reason: FreeText[str]
    """What it was late for."""


@dataclass(frozen=True)
class FinishedWithoutEvent(Event, name="finished_without"):
    """The cycle succeeds, although some ranks are lost."""

    cycle: Shared[int]
    """The cycle that succeeds."""
    ranks: InPart[Sequence[int]]
    """The lost ranks."""


@dataclass(frozen=True)
class TakenOverEvent(Event, name="taken_over"):
    """A restart in process does not help: the cycle ends, and the restart policy decides."""

    cycle: Shared[int]
    """The cycle that ends."""
    rank: Shared[int]
    """The rank that it is blamed on."""
    reason: FreeText[str]
    """Why it does not help."""
