"""Events of a job, of its nodes and of the launcher itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.record.events.event import ABSENT, Absent, Event, OfCycle
from ft_launcher.record.events.sharing import FreeText, InPart, InPartOrText, Private, Shared


@dataclass(frozen=True)
class JobStartEvent(Event, name="job_start"):
    """The launcher of this node has started. The first event of an attempt."""

    run_id: Shared[str]
    """The job's id, the same on all nodes and in all attempts: `--rdzv-id`, or one that was made up."""
    node: Shared[str]
    """The host name of this node."""
    command: Private[list[str]]
    """The command line of the ranks; for a function its name."""
    max_restarts: Shared[int]
    """`--max-restarts`."""
    nprocs: Shared[int]
    """Ranks on this node."""
    limits: Shared[Mapping[str, Any]]
    """The limits of the settings: `initial`, `subsequent`, `sections` and `out_of_section`, as in `limits`, and `log`,
    that of `--ft-watch-log-timeout`, and `hang`, that of `--ft-hang-timeout`."""
    versions: InPart[Mapping[str, str] | Absent] = ABSENT
    """The versions of `launcher`, `torch`, `numpy`, `python`, `system`, and the `machine`."""
    environment: InPart[Mapping[str, str] | Absent] = ABSENT
    """Variables of the launcher that say how collectives, devices, threads and memory behave, and the scheduler's
    numbers of the job: only names of a list (`ft_launcher/record/surroundings.py`), with a plain word as value."""
    job_name: FreeText[str | Absent] = ABSENT
    """What the job is called where people read of it: `--ft-job-name`, or made of the script's name."""


@dataclass(frozen=True)
class JobEndEvent(Event, name="job_end"):
    """The launcher of this node ends. The last event of an attempt; it is missing where the launcher was killed."""

    exit_code: Shared[int]
    """The launcher's exit code, before `--ft-preempted-exit-code` replaces it; docs/exit_codes.md lists them."""
    reason: FreeText[str]
    """Why it ends."""
    restarts_in_process: Shared[int]
    """Restarts in process of the ranks of this node, over all cycles."""
    started_again: Shared[int]
    """Ranks that were started again alone."""
    taken_over: Shared[int]
    """Faults that ended the cycle although the ranks restart in process."""
    console_lines_dropped: Shared[int | Absent] = ABSENT
    """Lines of the console that were dropped, since nobody read its pipe."""
    seconds: Shared[Mapping[str, float] | Absent] = ABSENT
    """What the time of this attempt was spent on, by category (docs/operations.md); the sum is `wall_s`."""
    wall_s: Shared[float | Absent] = ABSENT
    """From the begin of the attempt to its end (seconds)."""
    goodput: Shared[float | Absent] = ABSENT
    """Share of the time that steps took which were not done again. A later attempt may still do some again."""
    goodput_saved: Shared[float | Absent] = ABSENT
    """The same, of steps until the last checkpoint only."""


@dataclass(frozen=True)
class LedgerEvent(Event, name="ledger"):
    """What a part of the job's time was spent on: at the end of a cycle, and once more for what follows the last one.

    The parts of an attempt follow each other without a gap. Of a cycle that runs for long it is also written every ten
    minutes where the journal is a file; the last line with the same `since` counts.
    """

    cycle: Shared[int | None]
    """The cycle with which the part ends; null: none, it is what follows the last cycle."""
    has_ended: Shared[bool]
    """Whether the part is over."""
    since: Shared[float]
    """Its begin: seconds since 1970, by the clock as it was at the begin of the attempt."""
    until: Shared[float]
    """Its end, or when this was written."""
    seconds: Shared[Mapping[str, float]]
    """Seconds by category (docs/operations.md). Steps that later cycles did again are still in `step`."""
    steps: Shared[int]
    """Steps that were completed."""
    iteration: Shared[int | None]
    """The last iteration that the training reported; null: it reported none."""
    resumed: Shared[int | None]
    """The iteration that was complete when the ranks began to train; -1: none was, null: it is unknown."""
    points: Shared[Sequence[Sequence[float]]]
    """Pairs of an iteration and the seconds of `step` until it was reached, at most 64."""
    saved: Shared[int | None]
    """The iteration at the end of the last section that saves; null: it is unknown."""
    saved_s: Shared[float | None]
    """Seconds of `step` until then; null: no such section has ended."""
    saves: Shared[int]
    """How many sections that save have ended; of nested ones those of one name."""
    recovery: Shared[Mapping[str, float]]
    """Seconds of each phase of the recovery that led into this cycle: `detection`, `stop`, `backoff`, `health`,
    `rendezvous`, `start`, `first_step`. Empty when no fault was before it; without `first_step` it did not train."""
    durations: Shared[Mapping[str, Mapping[str, Any]]]
    """How long each section took from its opening to its end, and `step`; without it iterations are. Of each `count`,
    `first_s` (the first one of the cycle, in seconds), `max_s` (the longest of all), and `buckets`: pairs of a bucket
    and how many of the others are in it. Bucket b is for those of more than 2**((b - 33) / 2) seconds and at most
    2**((b - 32) / 2); 0 for all below and 63 for all above. Of one rank, as all of this line; at most 66 names and
    1,024 buckets. Histograms beyond that are empty."""
    total: Shared[Mapping[str, float]]
    """Seconds by category since the begin of the attempt, by what is known now."""
    goodput: Shared[float]
    """Share of the time since then that steps took which were not done again."""
    goodput_saved: Shared[float]
    """The same, of steps until the last checkpoint only."""


@dataclass(frozen=True)
class HealthEvent(Event, name="health"):
    """This node was checked, and a check found something to report; other checks leave no line."""

    cycle: Shared[int]
    """The cycle that the node was checked for."""
    healthy: Shared[bool]
    """Whether the node may take part."""
    readings: InPartOrText[Sequence[Mapping[str, Any]]]
    """What was found, each with `check`, `state` (`unknown`, `warning` or `unhealthy`), `reason`, `took_s`."""


@dataclass(frozen=True)
class HealthChangeEvent(OfCycle, Event, name="health_change"):
    """While ranks ran, a check of this node found another state than before. They go on; docs/health.md says more."""

    check: Shared[str]
    """The check."""
    before: Shared[str]
    """Its state at its last reading; `ok` before the first one."""
    state: Shared[str]
    """Its state now: `ok`, `not present`, `unknown`, `warning` or `unhealthy`."""
    reason: FreeText[str]
    """What it found; may be empty."""


@dataclass(frozen=True)
class GpuMemoryEvent(Event, name="gpu_memory"):
    """Memory of a GPU is still in use, although the ranks that had it are gone and the wait for it is over."""

    cycle: Shared[int]
    """The cycle that begins now."""
    why: FreeText[str]
    """Which GPU, and how much."""


@dataclass(frozen=True)
class DecisionEvent(Event, name="decision"):
    """What follows a failed cycle, or a request of a rank. Written before it is carried out."""

    cycle: Shared[int]
    """The cycle that it ends."""
    action: Shared[str]
    """`restart`, `give up`, or `leave` (this node ends, and the job may go on without it)."""
    reason: InPart[str]
    """Why, in words; the console shows the same."""
    charged: Shared[bool]
    """Whether the restart counts against `--max-restarts`."""
    restarts_left: Shared[int]
    """What is left of that budget."""
    exit_code: Shared[int | None]
    """The exit code of the launcher; null: it goes on."""
    wait_s: Shared[float]
    """Seconds to wait before the restart (`--ft-backoff`)."""
    not_restartable: Shared[bool]
    """Whether a new launch would fail in the same way."""
    inputs: InPart[Mapping[str, Any] | Absent | None] = ABSENT
    """What the restart policy decided by, beside the fault: `settings` and `max_restarts`, `history` (before the cycle;
    of charged restarts the ages in seconds, without a window their number), `lived_s`, `iteration`, `loaded_step` and
    `loaded_series` (of the state in memory that the cycle went on from; 0: of none; null: no rank looked for one),
    `step` and `last_step` (how many steps the rank of the fault, and the furthest rank of its node, had done),
    `saved_step` (the newest step that the ranks of that node had saved in memory since; 0: none), `elsewhere` (other
    hardware is there), `agreed_exit_code` (of all nodes), `by_views` (by where the ranks of so many nodes were the
    fault was found; 0: by `evidence` of this node), where it counted `returned` (the rank of the job that had returned,
    and how many seconds before the stop), or the `request` of a rank. null: the policy was not asked, since this node
    leaves. `ft_launcher replay` decides by it again."""
    budget: Shared[str | Absent] = ABSENT
    """Of a charged restart when the budget is whole again, in words, and whether progress has just given it back; else
    empty."""
    set_aside_from: Shared[int | Absent] = ABSENT
    """States in memory of this step and of later ones are not used any more: the job failed from them again and again.
    0: none was set aside."""
    no_save_until: Shared[int | Absent] = ABSENT
    """The step that the training must pass before it saves its state in memory again, also one that it has passed
    meanwhile. 0: none."""


@dataclass(frozen=True)
class SignalEvent(Event, name="signal"):
    """The launcher got a signal to end, and the ranks are ended."""

    signal: Shared[int]
    """Its number."""


@dataclass(frozen=True)
class PreemptedElsewhereEvent(Event, name="preempted_elsewhere"):
    """Another node got a signal to end, and the ranks of this node end with it."""

    cycle: Shared[int]
    """The cycle that ends."""
    why: FreeText[str]
    """Which node, and which signal."""


@dataclass(frozen=True)
class FencedEvent(Event, name="fenced"):
    """This launcher stood still for longer than `--ft-node-timeout`, and its monitors ended the ranks of the node."""

    cycle: Shared[int]
    """The cycle that ends."""
    ranks: InPart[list[int]]
    """The ranks that were ended."""
    silent_s: Shared[float]
    """For how many seconds it stood still."""
    limit_s: Shared[float]
    """The limit in seconds."""


@dataclass(frozen=True)
class StoreSilentEvent(Event, name="store_silent"):
    """The store of the rendezvous does not answer while ranks run; they go on. Written once in an attempt."""

    error: FreeText[str]
    """What it said."""


@dataclass(frozen=True)
class ReportsEndEvent(Event, name="reports_end"):
    """The journal takes no more events whose contents ranks choose, so that no rank can fill the disk."""

    after_bytes: Shared[int]
    """Bytes of such lines in this attempt."""


@dataclass(frozen=True)
class JournalPieceEvent(Event, name="journal_piece"):
    """The file was full, and a new one begins with this line (`--ft-journal-max-mb`)."""

    run_id: Shared[str]
    """The job's id, as in `job_start`."""
    node: Shared[str]
    """The host name of this node."""
    started: Shared[float]
    """When this attempt began: seconds since 1970."""
    piece: Shared[int]
    """The number of this piece in the attempt; the one with its start is 1."""
    lost_bytes: Shared[int]
    """Bytes of events that were removed just now to make room: they were written before those of the piece
    `NODE.2.jsonl`, and after those of `NODE.1.jsonl`."""


@dataclass(frozen=True)
class LinesDroppedEvent(Event, name="lines_dropped"):
    """Events before this one are missing: the disk was full for long, or the journal began late in a long job."""

    lines: Shared[int]
    """How many."""


@dataclass(frozen=True)
class ModulesPreloadedEvent(Event, name="modules_preloaded"):
    """Modules that the ranks have imported after torch are imported once, for all ranks of the next cycle
    (`--ft-preload`)."""

    modules: Shared[int]
    """Their number."""
    packages: FreeText[list[str]]
    """The packages that they are of."""
    left_out: FreeText[Mapping[str, str]]
    """Modules that are not, since a script could tell, and why: of at most 40 with a reason of their own. Those that
    need one of these are left out too."""
    mib: Shared[float]
    """The memory that they take (MiB), which all ranks share."""
    seconds: Shared[float]
    """From the rank's report until the next zygote was ready; nothing waits for that."""
