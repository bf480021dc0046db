"""Records a run: events of the journal, the block on the console, log lines, copies of stacks in the log folder.

The node agent and its parts call one method for each thing that happens, in the agent's thread. Each method knows where
its fact belongs: the journal has everything, the console what a user must read now. Recording decides nothing and must
never end a training: errors are contained and logged, and what cannot be written is reported once. Nothing here waits
for a disk for more than a second (`logs.py`, `journal.py`).

A run with nothing to keep leaves no files. So methods about something worth keeping call `files.begin` first, which
makes the folder of the run; all other events are held in memory until then.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ft_launcher.decide.attribution import Fault, RankEvidence, first_failure, signal_name
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence, to_record
from ft_launcher.decide.attribution.scene import Activity, Scene, listed
from ft_launcher.decide.health.reading import HealthChange, NodeState, Reading
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.restart_policy import Decision
from ft_launcher.record import events, surroundings
from ft_launcher.record.console import console, console_text
from ft_launcher.record.ending import Ending
from ft_launcher.record.in_process_recorder import InProcessRecorder
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.ledger.account import (
    PRINTED_STEP,
    Account,
    CycleTimes,
    durations_as_json,
    part_as_json,
    seconds_as_json,
)
from ft_launcher.record.logs.logs import KeptFiles, RunFolder
from ft_launcher.record.memory_recorder import MemoryRecorder
from ft_launcher.record.placement import Placement
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.settings.config import MonitorSettings, RecordSettings
from rank_monitor.contract.settings.injection import InjectionReport
from rank_monitor.contract.wire.complaints import Complaints
from rank_monitor.contract.wire.launcher_messages import STALL, Verdict
from rank_monitor.contract.wire.messages import (
    ControlRequest,
    InterruptedAgain,
    LimitsSet,
    Message,
    RankException,
    ResultInDoubt,
    SectionTimes,
)
from rank_monitor.contract.wire.rank_times import Durations

logger = logging.getLogger(__name__)

_INJECTED_S = 1.0
"""Seconds to wait until the event of an injected fault is in the file. The fault may kill this launcher next, and lines
in memory would be lost."""
_DECISION_S = 0.05
"""Seconds to wait until a decision is in the file, before it is carried out. A restart takes about as long. A disk that
does not answer gets the line later."""

_QUOTED = 200
"""Characters of a rank's line in a warning. A line of Megatron is longer, and is known by its beginning."""


class Recorder:
    """Records the events of a run, one method for each event. Events of restarts in process are at `in_process`, those
    of the training's state in memory at `memory`.

    Methods that take text of ranks are marked `contained`: an error in them is logged, and the caller goes on.

    Args:
        run: the folder of the run.
        settings: what is kept of the run, and where.
    """

    def __init__(self, run: RunFolder, settings: RecordSettings) -> None:
        self.files = KeptFiles(run, settings)
        self.journal = self.files.journal
        self.in_process = InProcessRecorder(self.files)
        self.memory = MemoryRecorder(self.files)
        self._store_reported = False
        self._complaints = Complaints(logger.warning)
        self.shown: Fault | None = None
        """The last fault whose block was printed."""

    def job_started(
        self, run_id: str, name: str, command: list[str], max_restarts: int, nprocs: int, monitor: MonitorSettings
    ) -> None:
        """Records that the launcher has started. The first event of the journal."""
        self.journal.run_id = run_id
        self.journal.node = self.files.node
        limits = {
            "initial": monitor.initial_rank_heartbeat_timeout,
            "subsequent": monitor.rank_heartbeat_timeout,
            "sections": dict(monitor.rank_section_timeouts),
            "out_of_section": monitor.rank_out_of_section_timeout,
            "log": monitor.watch_log_timeout,
            "hang": monitor.hang_timeout,
        }
        versions, environment = surroundings.versions(), surroundings.environment(os.environ)
        node = self.files.node
        self.journal.write(
            events.JobStartEvent(run_id, node, command, max_restarts, nprocs, limits, versions, environment, name)
        )

    def ledger(self, part: CycleTimes, account: Account, has_ended: bool) -> None:
        """Records what a part of the job's time was spent on, and the account until now.

        Args:
            has_ended: the part is over; False for the line that is written every ten minutes in a long cycle.
        """
        self.journal.write(events.LedgerEvent(has_ended=has_ended, **part_as_json(part, account)))

    def job_ended(self, exit_code: int, reason: str, account: Account | None = None) -> None:
        """Records that the launcher ends, and closes the journal. Blocks for 5 s at most, where the disk is slow.

        Args:
            account: what the job's time was spent on; None: no ledger was kept.
        """
        if self.in_process.counts["restarts_in_process"]:
            console_text.say(f"{console_text.level_one_summary(**self.in_process.counts)}")
        dropped = console.dropped() or events.ABSENT
        facts: dict[str, Any] = {**self.in_process.counts, "console_lines_dropped": dropped}
        if account is not None:
            facts["seconds"] = seconds_as_json(account.seconds)
            facts["wall_s"] = round(account.wall_s, 6)
            facts["goodput"] = round(account.goodput, 6)
            facts["goodput_saved"] = round(account.goodput_saved, 6)
        self.journal.write(events.JobEndEvent(exit_code, reason, **facts))
        self.journal.close()

    def cycle_started(self, placement: Placement, pids: Mapping[int, int]) -> None:
        """Records that the ranks of a cycle run.

        Args:
            pids: local rank -> pid.
        """
        self.files.follow_run()
        self.journal.write(
            events.CycleStartEvent(
                cycle=placement.cycle,
                node_rank=placement.node_rank,
                nodes=placement.nodes,
                master=f"{placement.master_addr}:{placement.master_port}",
                ranks=[
                    {"rank": placement.ranks[local_rank].rank, "local_rank": local_rank, "pid": pid}
                    for local_rank, pid in pids.items()
                ],
            )
        )

    @contained("an event cannot be recorded")
    def checked(self, cycle: int, readings: Sequence[Reading], node: NodeState) -> None:
        """Records the node's health before a cycle, if a reading is not good. An unhealthy node is said on the console:
        it takes no part."""
        notable = [asdict(reading) for reading in readings if reading.state in ("unknown", "warning", "unhealthy")]
        for reading in readings:
            if reading.state == "warning":
                logger.warning("health check %s: %s; the node takes part", reading.check, reading.reason)
        if not node.healthy:
            self.files.begin()
            console_text.say(f"this node is unhealthy and takes no part: {node.reason}")
        if notable:
            self.journal.write(events.HealthEvent(cycle, node.healthy, notable))

    @contained("an event cannot be recorded")
    def health_changed(self, cycle: int, change: HealthChange) -> None:
        """Records that a check of the node found another state than before, while ranks ran. The ranks go on."""
        self.journal.write(events.HealthChangeEvent.of(change, cycle=cycle))
        if change.state == "unhealthy":
            self.files.begin()
            console_text.say(
                f"this node is unhealthy: {change.check}: {change.reason.rstrip('.')}. The ranks go on; it is checked "
                "again before the next cycle"
            )
        elif change.before == "unhealthy":
            console_text.say(f"health check {change.check} is {change.state} again")

    def gpu_memory_in_use(self, cycle: int, reason: str) -> None:
        """Records that memory of a GPU is in use although the ranks that had it are gone.

        Args:
            reason: which GPU and how much; empty: no memory is in use, and nothing is recorded.
        """
        if reason:
            logger.warning("%s", reason)
            self.journal.write(events.GpuMemoryEvent(cycle, reason))

    def cycle_ended(self, cycle: int, end_reason: str) -> None:
        """Records that a cycle is over.

        Args:
            end_reason: the field `how` of the event `cycle_end`.
        """
        self.journal.write(events.CycleEndEvent(cycle, end_reason))

    @contained("an event cannot be recorded")
    def fault_injected(self, cycle: int, report: InjectionReport) -> None:
        """Records that a fault is about to be injected into a rank (`--ft-inject`). Blocks for a second at most, until
        the event is in the file: the fault may kill this launcher next."""
        console_text.say(f"a fault is injected into rank {report.rank} {report.at}: {report.fault}")
        self.journal.write(events.FaultOnPurposeEvent.of(report, cycle=cycle))
        self.journal.flush(_INJECTED_S)

    def rank_ended(self, cycle: int, rank: int, exit_code: int) -> None:
        """Records that a rank's process ended while its cycle ran."""
        self.journal.write(events.RankExitEvent(cycle, rank, exit_code))

    @contained("an event cannot be recorded")
    def monitor_reported(self, cycle: int, local_rank: int, rank: int, message: Message, stack_file: Path) -> None:
        """Records a message of a monitor: a verdict, or a report of the rank that the monitor passed on.

        Args:
            stack_file: where the rank writes its stacks; a copy is kept with a verdict.
        """
        match message:
            case Verdict():
                stacks = self.files.copy_stacks(cycle, local_rank, stack_file)
                if message.condemned or message.limit == STALL:
                    self.journal.write(events.VerdictEvent.of(message, stacks=stacks))
                else:
                    self.journal.write(events.InterruptionEvent.of(message, stacks=stacks))
                    line = f"rank {rank} {message.reason}"
                    if stacks:
                        line += f"; stacks: {stacks}"
                    console_text.say(line)
            case RankException():
                # `report` and not `write` wherever a rank chooses the contents: the journal bounds these lines.
                self.journal.report(events.UncaughtExceptionEvent.of(message, cycle=cycle, rank=rank))
            case LimitsSet():
                self.journal.report(events.LimitsEvent.of(message, cycle=cycle, rank=rank))
            case InterruptedAgain():
                self.journal.report(events.InterruptedAgainEvent.of(message, cycle=cycle, rank=rank))
                console_text.say(
                    f"rank {rank} has not ended {message.waited_s:.1f} s after its interruption "
                    f"({message.why}): interrupted again (--ft-interrupt-grace)"
                )
            case SectionTimes():
                self.journal.report(events.SectionTimesEvent.of(message, cycle=cycle, rank=rank))
            case ResultInDoubt():
                self.journal.report(events.ResultInDoubtEvent.of(message, cycle=cycle))
            case ControlRequest():
                text = f"rank {rank} asks for {message.action} ({message.description})"
                self._complaints.about(f"request of rank {rank}", text)
                self.journal.report(events.ControlRequestEvent.of(message, cycle=cycle, rank=rank))

    @contained("an event cannot be recorded")
    def never_ends(self, cycle: int, rank: int, failure: str, reason: str) -> None:
        """Records that the process of a rank whose program has failed did not end by itself, and is ended now.

        Args:
            failure: how the program of the rank failed, such as "exits with code 1".
            reason: how long its process did nothing or worked, and which option limits that.
        """
        logger.warning("rank %d %s, but %s: it is ended", rank, failure, reason)
        self.journal.report(events.NeverEndsEvent(cycle, rank, reason))

    def monitor_replaced(self, cycle: int, rank: int, reason: str) -> None:
        """Records that the monitor of a rank was lost and replaced; the training goes on."""
        logger.warning("the monitor of rank %d was replaced: %s; the training goes on", rank, reason)
        self.journal.write(events.MonitorReplacedEvent(cycle, rank, reason))

    @contained("an event cannot be recorded")
    def bad_loss(self, cycle: int, rank: int, iteration: int, loss: str, is_fault: bool) -> None:
        """Records that a rank printed a loss of nan or inf (`--ft-watch-log-nan`).

        Args:
            is_fault: the loss ends the cycle. Else only a warning is logged.
        """
        self.files.begin()
        if not is_fault:
            logger.warning("rank %d printed a loss of %s (iteration %s); the training goes on", rank, loss, iteration)
        self.journal.report(events.NanLossEvent(cycle, rank, iteration, loss, is_fault))

    def steps_printed(self, cycle: int, rank: int, intervals: Durations) -> None:
        """Records the times between the steps that a rank printed, of a cycle that is over."""
        self.journal.write(events.PrintedStepsEvent(cycle, rank, durations_as_json({PRINTED_STEP: intervals})))

    @contained("an event cannot be recorded")
    def save_interval(self, chosen: events.SaveIntervalEvent) -> None:
        """Records how often the ranks of the next cycle are to save (`--ft-save-interval auto`)."""
        logger.info("ranks save every %s (--ft-save-interval auto)", chosen.reason)
        self.journal.write(chosen)

    def no_steps_printed(self, rank: int, watch_log: str, line: str, preset: str) -> None:
        """Warns that `--ft-watch-log` has found no step in a minute of output, or in all output of a cycle.

        Args:
            watch_log: the value of the option.
            line: one line that the rank printed.
            preset: another value of the option that finds a step in that line; empty: none does.
        """
        text = f"--ft-watch-log {watch_log} has found no step in what the ranks print, so it protects nothing"
        text += f"; rank {rank} printed {line[:_QUOTED]!r}"
        if preset:
            text += f", in which --ft-watch-log {preset} finds a step"
        logger.warning("%s", text)

    def cannot_act(self, cycle: int, reason: str) -> None:
        """Records that limits which the user set cannot act, since the training has not asked to be watched."""
        logger.warning("%s", reason)
        self.journal.write(events.LimitsCannotActEvent(cycle, reason))

    @contained("an event cannot be recorded")
    def stalled(
        self, cycle: int, text: str, ends: str, scenes: Mapping[int, Scene], stack_file: Callable[[int], Path]
    ) -> None:
        """Records that ranks stand still (`--ft-stall-warning`). No rank is ended for it.

        Args:
            text: who waits for whom, and since when.
            ends: what would end them: a limit, or the option that would set one.
            scenes: local rank -> where the rank is.
            stack_file: local rank -> the file with the stacks of its threads.
        """
        kept = [self.files.copy_stacks(cycle, local_rank, stack_file(local_rank)) for local_rank in scenes]
        self.journal.write(events.StallEvent(cycle, text, [_plain(scene) for scene in scenes.values()]))
        if any(kept):
            stacks = f"; stacks: {Path(next(filter(None, kept))).parents[1]}"
        else:
            stacks = ""
        console_text.say(f"{text}. No rank is ended for that (--ft-stall-warning); {ends}{stacks}")

    @contained("an event cannot be recorded")
    def hang_on_other_node(self, cycle: int, ranks: Sequence[RankEvidence]) -> None:
        """Shows which ranks of this node may be the cause of a hang that another node reported: ranks that were in no
        collective."""
        says_nothing = (Activity.COLLECTIVE, Activity.WRAPPER, Activity.UNKNOWN)
        missing = [rank.scene for rank in ranks if rank.scene.activity not in says_nothing]
        if missing:
            console_text.say(f"on {self.files.node}, where no rank failed: {listed(missing)}")

    @contained("an event cannot be recorded")
    def stacks_of_hang(self, cycle: int, ranks: Sequence[RankEvidence], stack_file: Callable[[int], Path]) -> None:
        """Records where each rank of this node was before the stop of a cycle that failed by a hang, and keeps the
        stacks of all threads in the log folder."""
        found = []
        for rank in ranks:
            stacks = self.files.copy_stacks(cycle, rank.local_rank, stack_file(rank.local_rank))
            if not stacks and rank.exception is not None:
                stacks = self.files.write_stacks(cycle, rank.local_rank, rank.exception.traceback)
            found.append(_plain(rank.scene) | {"stacks": stacks, "groups": rank.groups})
        self.journal.write(events.StacksEvent(cycle, found))

    def asked(
        self, cycle: int, request: ControlRequest, decision: Decision, inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Records a rank's request (to stop, to restart, to leave) and the decision about it.

        Args:
            inputs: as for `failed`.
        """
        self._decided(cycle, decision, inputs)
        self.cycle_ended(cycle, f"asked for: {request.action}")
        console_text.say(f"{console_text.next_step(decision)}")

    def _decided(self, cycle: int, decision: Decision, inputs: Mapping[str, Any] | None) -> None:
        """Writes a decision to the journal before it is carried out. Blocks for 0.05 s at most."""
        self.files.begin()
        self.journal.write(events.DecisionEvent.of(decision, cycle=cycle, inputs=inputs))
        self.journal.flush(_DECISION_S)

    @contained("an event cannot be recorded")
    def evidence(self, cycle: int, found: CycleEvidence) -> None:
        """Records the evidence of a fault, by which `ft_launcher replay` finds the fault again."""
        # `report`: most of the evidence is text of ranks.
        self.journal.report(events.EvidenceEvent(cycle, None, **to_record(found)))

    def failed(
        self,
        cycle: int,
        fault: Fault,
        decision: Decision,
        life: CycleLife | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Records that a cycle failed by a rank of this node: fault, decision and end of the cycle to the journal, then
        the block on the console.

        Each of the steps is contained for itself: a fault that cannot be written still gets its block.

        Args:
            life: how long the cycle ran and how far it came; None: that is not known.
            inputs: what the restart policy decided by (`decide/policy/restart_policy.py`); None: it was not asked.
        """
        self.files.begin()
        with contained("the fault cannot be written to the journal"):
            self.journal.write(events.FaultEvent.of(fault, cycle=cycle))
        with contained("the decision cannot be written to the journal"):
            self._decided(cycle, decision, inputs)
            if life:
                self.journal.write(events.CycleEndEvent.of(life, cycle=cycle, how="failed"))
            else:
                self.cycle_ended(cycle, "failed")
        if self.journal.path:
            record = self.journal.path.parent
        else:
            record = None
        with contained("the block of the fault cannot be shown"):
            block = console_text.block(fault, decision, cycle, self.files.node, record, time.time())
            if sys.stderr is not None and sys.stderr.isatty():
                block = console_text.in_colour(block)
            console_text.show_lines("\n".join(block), escape=False)
            self.shown = fault

    @contained("an event cannot be recorded")
    def stopped(self, cycle: int, ending: Ending) -> None:
        """Records the stop of a cycle's processes: which of them needed SIGKILL, and which even SIGKILL did not end."""
        if ending.killed:
            self.journal.write(events.KilledEvent(cycle, sorted(ending.killed)))
        if ending.left:
            logger.error("processes that even SIGKILL did not end: %s", sorted(ending.left))
            self.journal.write(events.LeftOverEvent(cycle, sorted(ending.left)))

    def limit_doubled(self, limit: str, factor: float) -> None:
        """Records that a learned limit ended a rank.

        Args:
            factor: how many times the learned limit applies in the next cycle.
        """
        logger.warning("the learned limit %s ended a rank: %g times that applies in the next cycle", limit, factor)
        self.journal.write(events.LimitDoubledEvent(limit, factor))

    @contained("an event cannot be recorded")
    def modules_preloaded(self, names: Sequence[str], left_out: Mapping[str, str], mib: float, seconds: float) -> None:
        """Records that modules which the ranks of this cycle imported are imported once for all ranks of the next one
        (`--ft-preload`)."""
        logger.info("%d modules that the ranks import are preloaded for the next cycle (%.0f MiB)", len(names), mib)
        packages = sorted({name.partition(".")[0] for name in names})
        self.journal.report(events.ModulesPreloadedEvent(len(names), packages, dict(left_out), mib, round(seconds, 3)))

    def headline(self, fault: Fault) -> str:
        """Returns a fault of this node in one line, which other nodes show."""
        return console_text.headline(fault, self.files.node)

    def failed_on_other_node(self, cycle: int, headline: str, decision: Decision, lost: Sequence[int] = ()) -> None:
        """Records that a cycle failed on another node. That node records all of it; this one shows the fault in one
        line and what follows.

        Args:
            headline: the fault in one line.
            lost: ranks of this node whose error is a consequence of that fault.
        """
        step = console_text.next_step(decision)
        self.journal.write(events.CycleEndEvent(cycle, "failed elsewhere", why=headline, next=step))
        console_text.say(headline)
        for line in first_failure.in_consequence(lost):
            console_text.show(f"  also: {line}")
        console_text.show(f"  cycle {cycle}; {step}")

    def job_over(self, cycle: int | None, reason: str, exit_code: int) -> None:
        """Records that the job ends on this node without a fault of its ranks.

        Args:
            cycle: the last cycle; None: there was none.
        """
        console_text.say(f"the job ends here: {reason}; exit code {exit_code}")
        if cycle is not None:
            self.journal.write(events.CycleEndEvent(cycle, "job over", why=reason))

    def reform(self, cycle: int, reason: str = "other nodes wait to take part", lost: Sequence[int] = ()) -> None:
        """Records that the group of nodes forms anew without a fault of this node's ranks.

        Args:
            lost: as for `failed_on_other_node`.
        """
        logger.warning("the group forms anew: %s", "; ".join((reason, *first_failure.in_consequence(lost))))
        self.journal.write(events.CycleEndEvent(cycle, "membership changed", why=reason))

    @contained("an event cannot be recorded")
    def fenced(self, cycle: int, ranks: Sequence[int], silent_s: float, limit_s: float) -> None:
        """Records that this launcher stood still for longer than its lease, so that its monitors ended the ranks.

        Args:
            silent_s: for how long it stood still (seconds).
            limit_s: the limit (seconds).
        """
        console_text.say(
            f"this launcher stood still for {silent_s:.1f} s. The other nodes may have gone on without "
            f"it, so its monitors ended the ranks of this node after {limit_s:g} s (--ft-node-timeout)"
        )
        self.journal.write(events.FencedEvent(cycle, list(ranks), round(silent_s, 3), limit_s))

    def preempted_on_other_node(self, cycle: int, reason: str) -> None:
        """Records that another node got a signal to end, and that the ranks of this node end with it."""
        console_text.say(f"{reason}; the ranks here are told to end too")
        self.journal.write(events.PreemptedElsewhereEvent(cycle, reason))

    def lingers(self, cycle: int, commands: Mapping[int, str], limit_s: float | None) -> None:
        """Records that background processes of ranks that succeeded still run (`--ft-linger`).

        Args:
            commands: pid -> command line.
            limit_s: for how long the launcher waits for them (seconds); None: until they end.
        """
        if limit_s is None:
            how_long = "until they end"
        else:
            how_long = f"at most {limit_s:g} s"
        logger.info("the ranks succeeded; waits %s (--ft-linger) for what they left: %s", how_long, _named(commands))
        self.journal.write(events.LingersEvent(cycle, {str(pid): text for pid, text in commands.items()}))

    def ends_background(self, cycle: int, commands: Mapping[int, str], number: int | None) -> None:
        """Records that such background processes are ended.

        Args:
            number: the signal because of which they are ended; None: their time is over.
        """
        if number is None:
            reason = "--ft-linger is over"
        else:
            reason = f"got {signal_name(number)}"
        console_text.say(f"{reason}; ends what the ranks left running: {_named(commands)}")
        self.journal.write(events.BackgroundEndedEvent(cycle, sorted(commands), number))

    def signalled(self, number: int) -> None:
        """Records that a signal ends the launcher, and with it the ranks."""
        console_text.say(f"got {signal_name(number)}; the ranks are told to end")
        self.journal.write(events.SignalEvent(number))

    def ended_by_signal(self, exit_code: int) -> None:
        """Says that the ranks have ended after a signal to the launcher, and with which code the launcher exits."""
        if exit_code == ExitCode.PREEMPTED_KILLED:
            console_text.say(f"the ranks did not end in time and were killed; exit code {exit_code}")
        else:
            console_text.say(f"the ranks have ended; exit code {exit_code}")

    def hurried(self, number: int, left_s: float) -> None:
        """Says that a further signal shortens the time that the ranks have to end to `left_s` seconds."""
        if left_s > 0:
            console_text.say(f"got another signal, {signal_name(number)}; the ranks have {left_s:g} s more")
        else:
            console_text.say(f"got {signal_name(number)} for the third time; the ranks are killed")

    def store_silent(self, error: Exception) -> None:
        """Records that the rendezvous' store does not answer while ranks run. The store is asked often, so this is said
        once in a run."""
        if not self._store_reported:
            self._store_reported = True
            logger.warning("the rendezvous store does not answer (%s); the training goes on", error)
            self.journal.write(events.StoreSilentEvent(str(error)))


def _plain(scene: Scene) -> dict[str, Any]:
    """Returns where a rank is as JSON values, with the keys of the events `stacks` and `stall`."""
    process = dict(scene.process or {})
    return {"rank": scene.rank, "place": scene.activity.name.lower(), "frames": list(scene.frames), "process": process}


def _named(commands: Mapping[int, str]) -> str:
    return ", ".join(f"{pid} ({command})" for pid, command in sorted(commands.items()))
