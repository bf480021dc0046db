"""Events of one rank: its end, and what its monitor reports of it; the score in a report of its timings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_launcher.record.events.event import Event, OfCycle, OfRank
from ft_launcher.record.events.sharing import FreeText, InPart, InPartOrText, Private, Shared
from rank_monitor.contract.wire.json_record import real


@dataclass(frozen=True)
class RankExitEvent(OfRank, Event, name="rank_exit"):
    """The process of a rank ended while its cycle ran."""

    exit_code: Shared[int]
    """Its exit code; minus the number of the signal that ended it."""


@dataclass(frozen=True)
class _Finding(OfRank):
    """What a monitor found: a limit was exceeded."""

    pid: Shared[int]
    """Its process."""
    limit: Shared[str]
    """`initial`, `subsequent`, `section:NAME`, `out_of_section`, `connect`, `reconnect`, `teardown`, `log`,
    `hang`, `soft_timeout`, `hard_timeout` or `stall`."""
    limit_s: Shared[float]
    """The limit in seconds."""
    waited_s: Shared[float]
    """For how long there was no sign of life, in seconds."""
    learned: Shared[bool]
    """Whether the limit was learned."""
    iteration: Shared[int]
    """The iteration that the rank had reported; -1: none."""
    sections: Shared[Mapping[str, float]]
    """Its open sections -> their age in seconds."""
    reason: Shared[str]
    """What happened, in words."""
    line: Private[str]
    """One line for logs, worded so that searches for NVIDIA's lines find it."""
    frames: InPart[list[str]]
    """The frames of its main thread, the innermost first."""
    process: InPart[Mapping[str, Any]]
    """Its process as /proc has it."""
    condemned: Shared[bool]
    """Whether the rank is ended for it."""
    stacks: Private[str]
    """The file with the stacks of all its threads; empty: there are none."""


@dataclass(frozen=True)
class VerdictEvent(_Finding, Event, name="verdict"):
    """A limit was exceeded: the rank is condemned and ended for it, or stalls, of which the launcher only warns."""


@dataclass(frozen=True)
class InterruptionEvent(_Finding, Event, name="interruption"):
    """A limit was exceeded by a rank in an in-process wrapper, which was asked to restart."""


@dataclass(frozen=True)
class UncaughtExceptionEvent(OfRank, Event, name="exception"):
    """An uncaught exception ends a rank."""

    type: InPart[str]
    """The type of the exception."""
    message: FreeText[str]
    """Its text."""
    traceback: InPartOrText[str]
    """Its traceback, as Python prints it."""
    wall_time: Shared[float]
    """When it was raised: seconds since 1970 by the rank's clock."""
    before_group: Shared[bool]
    """Whether the rank certainly had made no process group until then."""


@dataclass(frozen=True)
class NanLossEvent(OfRank, Event, name="nan_loss"):
    """A rank printed a loss that is not a finite number (`--ft-watch-log`); once until it prints a finite one again."""

    iteration: Shared[int]
    """The iteration of that line; -1: the line names none."""
    loss: Shared[str]
    """`nan`, `inf` or `-inf`."""
    fault: Shared[bool]
    """Whether it ends the cycle (`--ft-watch-log-nan=fault`)."""


@dataclass(frozen=True)
class PrintedStepsEvent(Event, name="printed_steps"):
    """How long it was from one printed step to the next in a cycle that is over (`--ft-watch-log`).

    Written for the rank of this node that printed most steps, if any printed two.
    """

    cycle: Shared[int]
    """The cycle that is over."""
    rank: Shared[int]
    """The rank."""
    durations: Shared[Mapping[str, Mapping[str, Any]]]
    """Of `printed step`, with the fields of `durations` in `ledger`. To a quarter of a second, as lines are read;
    without those that the limit or the end of the rank cut off, or of which the launcher has not read all."""


@dataclass(frozen=True)
class NeverEndsEvent(OfRank, Event, name="never_ends"):
    """The program of a rank has ended with an error, and its process did not end: the launcher ends it."""

    why: Shared[str]
    """How long its process did nothing, or worked, and which option limits that."""


@dataclass(frozen=True)
class MonitorReplacedEvent(OfRank, Event, name="monitor_replaced"):
    """The monitor of a rank was lost, and another took its place; the training goes on."""

    why: FreeText[str]
    """How the monitor was lost."""


@dataclass(frozen=True)
class LimitsEvent(OfRank, Event, name="limits"):
    """The limits of a rank, as it set or learned them."""

    initial: Shared[float | None]
    """Seconds to the first sign of life; null: no limit, here and below."""
    subsequent: Shared[float | None]
    """Seconds between two signs of life."""
    sections: Shared[Mapping[str, float | None]]
    """Section -> seconds while it is open."""
    out_of_section: Shared[float | None]
    """Seconds with no section open."""
    learned: Shared[list[str]]
    """Which of them were learned: `initial`, `subsequent`, `out_of_section`, `section:NAME`."""
    state: Private[Mapping[str, Any]]
    """What the learned limits were computed from."""


@dataclass(frozen=True)
class InterruptedAgainEvent(OfRank, Event, name="interrupted_again"):
    """A function in an in-process wrapper had not ended after its interruption, and was interrupted again."""

    iteration: Shared[int]
    """The iteration of the wrapper."""
    waited_s: Shared[float]
    """Seconds since the interruption was due."""
    why: FreeText[str]
    """What held it back."""
    stack: FreeText[str]
    """Where the main thread was."""


@dataclass(frozen=True)
class SectionTimesEvent(OfRank, Event, name="section_times"):
    """The timings of straggler detection in a rank since its last report; docs/straggler.md explains the scores."""

    sections: Shared[Mapping[str, Any]]
    """Section -> `med_ms` (median in milliseconds), `num` (how many), and the scores `relative` and `individual`."""
    gpu: Shared[Mapping[str, Any]]
    """The two scores of its kernels; empty where it has none."""


def score_of(sections: Any, gpu: Any, kind: str) -> float | None:
    """Returns the `relative` or `individual` score of a rank, in (0, 1], 1 for the fastest; None: it has none.

    Args:
        sections: of its report: section -> its scores.
        gpu: the scores of its kernels. Where it has none, the lowest score of its sections stands for them.
    """
    scored = []
    if isinstance(gpu, Mapping):
        scored = [real(gpu, kind)]
    if isinstance(sections, Mapping) and not any(score is not None for score in scored):
        scored = [real(section, kind) for section in sections.values() if isinstance(section, Mapping)]
    return min((score for score in scored if score is not None), default=None)


@dataclass(frozen=True)
class ResultInDoubtEvent(OfCycle, Event, name="result_in_doubt"):
    """A step gave an unexpected result, possibly because of a device; the job ends for it (docs/rerun.md)."""

    finding: Shared[str]
    """`reproducible` (another device has to compute the step), `same_device` (the next one was the same) or
    `persistent_error` (another device computed something else)."""
    rank: Shared[int]
    """The rank that had the result."""
    iteration: Shared[int]
    """In which iteration."""
    node: Shared[str]
    """On which node."""
    device: Shared[str]
    """On which device."""


@dataclass(frozen=True)
class ControlRequestEvent(OfRank, Event, name="control_request"):
    """A rank asked the launcher for something."""

    action: Shared[str]
    """`exclude_this_node`, `stop_job` or `restart`."""
    description: FreeText[str]
    """Its reason, in its own words."""
