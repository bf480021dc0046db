"""Events of a job, of its nodes and of the launcher itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.record.events.event import ABSENT, Absent, Event, OfCycle


@dataclass(frozen=True)
class JobStart(Event, name="job_start"):
    """The launcher of this node has started. The first event of an attempt."""

    run_id: str
    """The job's id, the same on all nodes and in all attempts: `--rdzv-id`, or one that was made up."""
    node: str
    """The host name of this node."""
    command: list[str]
    """The command line of the ranks; for a function its name."""
    max_restarts: int
    """`--max-restarts`."""
    nprocs: int
    """Ranks on this node."""
    limits: Mapping[str, Any]
    """The limits of the settings: `initial`, `subsequent`, `sections` and `out_of_section`, as in `limits`, and `log`,
    that of `--ft-watch-log-timeout`, and `hang`, that of `--ft-hang-timeout`."""
    versions: Mapping[str, str] | Absent = ABSENT
    """The versions of `launcher`, `torch`, `numpy`, `python`, `system`, and the `machine`."""
    environment: Mapping[str, str] | Absent = ABSENT
    """Variables of the launcher that say how collectives, devices, threads and memory behave, and the scheduler's
    numbers of the job: only names of a list (`ft_launcher/record/surroundings.py`), with a plain word as value."""
    job_name: str | Absent = ABSENT
    """What the job is called where people read of it: `--ft-job-name`, or made of the script's name."""


@dataclass(frozen=True)
class JobEnd(Event, name="job_end"):
    """The launcher of this node ends. The last event of an attempt; it is missing where the launcher was killed."""

    exit_code: int
    """The launcher's exit code, before `--ft-preempted-exit-code` replaces it; docs/exit_codes.md lists them."""
    reason: str
    """Why it ends."""
    restarts_in_process: int
    """Restarts in process of the ranks of this node, over all cycles."""
    started_again: int
    """Ranks that were started again alone."""
    taken_over: int
    """Faults that ended the cycle although the ranks restart in process."""
    console_lines_dropped: int | Absent = ABSENT
    """Lines of the console that were dropped, since nobody read its pipe."""
    seconds: Mapping[str, float] | Absent = ABSENT
    """What the time of this attempt was spent on, by category (docs/operations.md); the sum is `wall_s`."""
    wall_s: float | Absent = ABSENT
    """From the begin of the attempt to its end (seconds)."""
    goodput: float | Absent = ABSENT
    """Share of the time that steps took which were not done again. A later attempt may still do some again."""
    goodput_saved: float | Absent = ABSENT
    """The same, of steps until the last checkpoint only."""


@dataclass(frozen=True)
class Ledger(Event, name="ledger"):
    """What a part of the job's time was spent on: at the end of a cycle, and once more for what follows the last one.

    The parts of an attempt follow each other without a gap. Of a cycle that runs for long it is also written every ten
    minutes where the journal is a file; the last line with the same `since` counts.
    """

    cycle: int | None
    """The cycle with which the part ends; null: none, it is what follows the last cycle."""
    has_ended: bool
    """Whether the part is over."""
    since: float
    """Its begin: seconds since 1970, by the clock as it was at the begin of the attempt."""
    until: float
    """Its end, or when this was written."""
    seconds: Mapping[str, float]
    """Seconds by category (docs/operations.md). Steps that later cycles did again are still in `step`."""
    steps: int
    """Steps that were completed."""
    iteration: int | None
    """The last iteration that the training reported; null: it reported none."""
    resumed: int | None
    """The iteration that was complete when the ranks began to train; -1: none was, null: it is unknown."""
    points: Sequence[Sequence[float]]
    """Pairs of an iteration and the seconds of `step` until it was reached, at most 64."""
    saved: int | None
    """The iteration at the end of the last section that saves; null: it is unknown."""
    saved_s: float | None
    """Seconds of `step` until then; null: no such section has ended."""
    saves: int
    """How many sections that save have ended; of nested ones those of one name."""
    recovery: Mapping[str, float]
    """Seconds of each phase of the recovery that led into this cycle: `detection`, `stop`, `backoff`, `health`,
    `rendezvous`, `start`, `first_step`. Empty when no fault was before it; without `first_step` it did not train."""
    durations: Mapping[str, Mapping[str, Any]]
    """How long each section took from its opening to its end, and `step`; without it iterations are. Of each `count`,
    `first_s` (the first one of the cycle, in seconds), `max_s` (the longest of all), and `buckets`: pairs of a bucket
    and how many of the others are in it. Bucket b is for those of more than 2**((b - 33) / 2) seconds and at most
    2**((b - 32) / 2); 0 for all below and 63 for all above. Of one rank, as all of this line; at most 66 names and
    1,024 buckets. Histograms beyond that are empty."""
    total: Mapping[str, float]
    """Seconds by category since the begin of the attempt, by what is known now."""
    goodput: float
    """Share of the time since then that steps took which were not done again."""
    goodput_saved: float
    """The same, of steps until the last checkpoint only."""


@dataclass(frozen=True)
class Health(Event, name="health"):
    """This node was checked, and a check found something to report; other checks leave no line."""

    cycle: int
    """The cycle that the node was checked for."""
    healthy: bool
    """Whether the node may take part."""
    readings: Sequence[Mapping[str, Any]]
    """What was found, each with `check`, `state` (`unknown`, `warning` or `unhealthy`), `reason`, `took_s`."""


@dataclass(frozen=True)
class HealthChange(OfCycle, Event, name="health_change"):
    """While ranks ran, a check of this node found another state than before. They go on; docs/health.md says more."""

    check: str
    """The check."""
    before: str
    """Its state at its last reading; `ok` before the first one."""
    state: str
    """Its state now: `ok`, `not present`, `unknown`, `warning` or `unhealthy`."""
    reason: str
    """What it found; may be empty."""


@dataclass(frozen=True)
class GpuMemory(Event, name="gpu_memory"):
    """Memory of a GPU is still in use, although the ranks that had it are gone and the wait for it is over."""

    cycle: int
    """The cycle that begins now."""
    why: str
    """Which GPU, and how much."""


@dataclass(frozen=True)
class Decision(Event, name="decision"):
    """What follows a failed cycle, or a request of a rank. Written before it is carried out."""

    cycle: int
    """The cycle that it ends."""
    action: str
    """`restart`, `give up`, or `leave` (this node ends, and the job may go on without it)."""
    reason: str
    """Why, in words; the console shows the same."""
    charged: bool
    """Whether the restart counts against `--max-restarts`."""
    restarts_left: int
    """What is left of that budget."""
    exit_code: int | None
    """The exit code of the launcher; null: it goes on."""
    wait_s: float
    """Seconds to wait before the restart (`--ft-backoff`)."""
    not_restartable: bool
    """Whether a new launch would fail in the same way."""
    inputs: Mapping[str, Any] | Absent | None = ABSENT
    """What the restart policy decided by, beside the fault: `settings` and `max_restarts`, `history` (before the cycle;
    of charged restarts the ages in seconds, without a window their number), `lived_s`, `iteration`, `elsewhere` (other
    hardware is there), `agreed_exit_code` (of all nodes), `by_views` (by where the ranks of so many nodes were the
    fault was found; 0: by `evidence` of this node), where it counted `returned` (the rank of the job that had returned,
    and how many seconds before the stop), or the `request` of a rank. null: the policy was not asked, since this node
    leaves or, with several nodes, a rank asks. `ft_launcher replay` decides by it again."""
    budget: str | Absent = ABSENT
    """Of a charged restart when the budget is whole again, in words, and whether progress has just given it back; else
    empty."""


@dataclass(frozen=True)
class Signal(Event, name="signal"):
    """The launcher got a signal to end, and the ranks are ended."""

    signal: int
    """Its number."""


@dataclass(frozen=True)
class PreemptedElsewhere(Event, name="preempted_elsewhere"):
    """Another node got a signal to end, and the ranks of this node end with it."""

    cycle: int
    """The cycle that ends."""
    why: str
    """Which node, and which signal."""


@dataclass(frozen=True)
class Fenced(Event, name="fenced"):
    """This launcher stood still for longer than `--ft-node-timeout`, and its monitors ended the ranks of the node."""

    cycle: int
    """The cycle that ends."""
    ranks: list[int]
    """The ranks that were ended."""
    silent_s: float
    """For how many seconds it stood still."""
    limit_s: float
    """The limit in seconds."""


@dataclass(frozen=True)
class StoreSilent(Event, name="store_silent"):
    """The store of the rendezvous does not answer while ranks run; they go on. Written once in an attempt."""

    error: str
    """What it said."""


@dataclass(frozen=True)
class ReportsEnd(Event, name="reports_end"):
    """The journal takes no more events whose contents ranks choose, so that no rank can fill the disk."""

    after_bytes: int
    """Bytes of such lines in this attempt."""


@dataclass(frozen=True)
class JournalPiece(Event, name="journal_piece"):
    """The file was full, and a new one begins with this line (`--ft-journal-max-mb`)."""

    run_id: str
    """The job's id, as in `job_start`."""
    node: str
    """The host name of this node."""
    started: float
    """When this attempt began: seconds since 1970."""
    piece: int
    """The number of this piece in the attempt; the one with its start is 1."""
    lost_bytes: int
    """Bytes of events that were removed just now to make room: they were written before those of the piece
    `NODE.2.jsonl`, and after those of `NODE.1.jsonl`."""


@dataclass(frozen=True)
class LinesDropped(Event, name="lines_dropped"):
    """Events before this one are missing: the disk was full for long, or the journal began late in a long job."""

    lines: int
    """How many."""


@dataclass(frozen=True)
class ModulesPreloaded(Event, name="modules_preloaded"):
    """Modules that the ranks have imported after torch are imported once, for all ranks of the next cycle
    (`--ft-preload`)."""

    modules: int
    """Their number."""
    packages: list[str]
    """The packages that they are of."""
    left_out: Mapping[str, str]
    """Modules that are not, since a script could tell, and why: of at most 40 with a reason of their own. Those that
    need one of these are left out too."""
    mib: float
    """The memory that they take (MiB), which all ranks share."""
    seconds: float
    """From the rank's report until the next zygote was ready; nothing waits for that."""
