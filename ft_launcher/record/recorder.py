"""Records a run: journal lines, the console block, log lines, and stacks copied to the log folder.

Called by the node agent and its parts. Decides nothing, and nothing here can end a training: what cannot be written is
reported once.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ft_launcher.attribution import Fault, RankEvidence, signal_name
from ft_launcher.attribution.cycle_evidence import CycleEvidence, to_record
from ft_launcher.attribution.scene import Scene, Whereabouts, about_stall, listed
from ft_launcher.health.reading import NodeState, Reading
from ft_launcher.health.repeated import HealthChange
from ft_launcher.ledger.account import Account, CycleTimes, durations_as_json
from ft_launcher.policy.restart_history import CycleLife
from ft_launcher.policy.restart_policy import Decision
from ft_launcher.processes.process_tree import Ending
from ft_launcher.record import console, events, report, surroundings
from ft_launcher.record.contained import contained
from ft_launcher.record.journal import Journal
from ft_launcher.record.logs import MOST_KEPT, RunFolder
from ft_launcher.record.monitor_events import STALL, MonitorEvent, Replaced
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings.config import MonitorSettings, RecordSettings
from rank_monitor.contract.settings.injection import StrikeReport
from rank_monitor.contract.wire.foreign import read_file
from rank_monitor.contract.wire.launcher_messages import Verdict
from rank_monitor.contract.wire.messages import (
    ControlRequest,
    InterruptedAgain,
    LimitsSet,
    RankException,
    ResultInDoubt,
    SectionTimes,
)

logger = logging.getLogger(__name__)

# The console line stays one line; the journal has all reasons.
_MOST_REASONS = 4
_STACKS = "stacks.txt"


class Recorder:
    """Records the events of a run. One method for each event.

    Args:
        run: the run's folder; made at the first thing worth keeping.
        settings: where the journal goes instead, how large it may become, and who reads it: with a log folder, a
            folder for the journal or a port to ask at, it is kept from the start.
    """

    def __init__(self, run: RunFolder, settings: RecordSettings) -> None:
        self.journal = Journal(settings.journal_max_mb)
        self._run = run
        self._node = socket.gethostname()
        self._folder: Path | None = None
        if settings.journal_dir:
            self._folder = Path(settings.journal_dir)
        self._store_reported = False
        self._keep_failed = False
        self.shown: Fault | None = None
        """The last fault whose block was printed."""
        self._counts = {"restarts_in_process": 0, "started_again": 0, "taken_over": 0}
        asked_at = settings.metrics_port is not None or settings.status_port is not None
        if settings.journal_dir or run.exists or asked_at:
            self._keep()

    def job_started(
        self, run_id: str, command: list[str], max_restarts: int, nprocs: int, monitor: MonitorSettings
    ) -> None:
        """The launcher has started."""
        self.journal.run_id = run_id
        self.journal.node = self._node
        limits = {
            "initial": monitor.initial_rank_heartbeat_timeout,
            "subsequent": monitor.rank_heartbeat_timeout,
            "sections": dict(monitor.rank_section_timeouts),
            "out_of_section": monitor.rank_out_of_section_timeout,
        }
        versions, environment = surroundings.versions(), surroundings.environment(os.environ)
        self.journal.write(
            events.JobStart(run_id, self._node, command, max_restarts, nprocs, limits, versions, environment)
        )

    def ledger(self, part: CycleTimes, account: Account, has_ended: bool) -> None:
        """What a part of the job's time was spent on, and the account until now."""
        self.journal.write(
            events.Ledger(
                cycle=part.cycle,
                has_ended=has_ended,
                since=round(part.since, 6),
                until=round(part.until, 6),
                seconds=_rounded(part.seconds),
                steps=part.steps,
                iteration=part.iteration,
                resumed=part.resumed,
                points=[[iteration, round(spent_s, 6)] for iteration, spent_s in part.points],
                saved=part.saved,
                saved_s=None if part.saved_s is None else round(part.saved_s, 6),
                saves=part.saves,
                recovery={phase: round(spent_s, 6) for phase, spent_s in part.recovery.items()},
                durations=durations_as_json(part.durations),
                total=_rounded(account.seconds),
                goodput=round(account.goodput, 6),
                goodput_saved=round(account.goodput_saved, 6),
            )
        )

    def job_ended(self, exit_code: int, reason: str, account: Account | None = None) -> None:
        """The launcher ends: closes the journal."""
        if self._counts["restarts_in_process"]:
            report.show(f"ft_launcher: {report.of_rung_one(**self._counts)}")
        dropped = console.dropped() or events.ABSENT
        facts: dict[str, Any] = {**self._counts, "console_lines_dropped": dropped}
        if account is not None:
            facts["seconds"] = _rounded(account.seconds)
            facts["wall_s"] = round(account.wall_s, 6)
            facts["goodput"] = round(account.goodput, 6)
            facts["goodput_saved"] = round(account.goodput_saved, 6)
        self.journal.write(events.JobEnd(exit_code, reason, **facts))
        self.journal.close()

    def cycle_started(self, cycle: int, group: Any, ranks: Mapping[int, tuple[int, int]]) -> None:
        """The ranks of a cycle run; `ranks` maps local rank to global rank and pid."""
        if self._run.exists:  # made for what the ranks print
            self._keep()
        self.journal.write(
            events.CycleStart(
                cycle=cycle,
                node_rank=group.group_rank,
                nodes=group.group_world_size,
                master=f"{group.master_addr}:{group.master_port}",
                ranks=[{"rank": rank, "local_rank": local, "pid": pid} for local, (rank, pid) in ranks.items()],
            )
        )

    @contained("an event cannot be recorded")
    def checked(self, cycle: int, readings: Sequence[Reading], node: NodeState) -> None:
        """The node's health before a cycle. Recorded if a reading is not good."""
        notable = [asdict(reading) for reading in readings if reading.state in ("unknown", "warning", "unhealthy")]
        for reading in readings:
            if reading.state == "warning":
                logger.warning("health check %s: %s; the node takes part", reading.check, reading.reason)
        if not node.healthy:
            self._keep()
            report.show(f"ft_launcher: this node is unhealthy and takes no part: {node.reason}")
        if notable:
            self.journal.write(events.Health(cycle, node.healthy, notable))

    @contained("an event cannot be recorded")
    def health_changed(self, cycle: int, change: HealthChange) -> None:
        """While ranks ran, a check of the node found another state than before."""
        self.journal.write(events.HealthChange.of(change, cycle=cycle))
        if change.state == "unhealthy":
            self._keep()
            report.show(
                f"ft_launcher: this node is unhealthy: {change.check}: {change.reason}. The ranks go on; it is checked "
                "again before the next cycle"
            )
        elif change.before == "unhealthy":
            report.show(f"ft_launcher: health check {change.check} is {change.state} again")

    def memory_kept(self, cycle: int, why: str) -> None:
        """Memory of a GPU is in use although the ranks that had it are gone; empty: none is."""
        if why:
            logger.warning("%s", why)
            self.journal.write(events.GpuMemory(cycle, why))

    def cycle_ended(self, cycle: int, how: str) -> None:
        """A cycle is over."""
        self.journal.write(events.CycleEnd(cycle, how))

    @contained("an event cannot be recorded")
    def on_purpose(self, cycle: int, strike: StrikeReport) -> None:
        """A fault on purpose strikes a rank."""
        report.show(f"ft_launcher: a fault on purpose strikes rank {strike.rank} {strike.at}: {strike.fault}")
        self.journal.write(events.FaultOnPurpose.of(strike, cycle=cycle))

    def rank_ended(self, cycle: int, rank: int, exit_code: int) -> None:
        """A rank's process ended while its cycle ran."""
        self.journal.write(events.RankExit(cycle, rank, exit_code))

    @contained("an event cannot be recorded")
    def heard(self, cycle: int, local_rank: int, rank: int, message: MonitorEvent, stack_file: Path) -> None:
        """A message of a monitor."""
        match message:
            case Verdict():
                stacks = self._keep_stacks(cycle, local_rank, stack_file)
                if message.condemned or message.limit == STALL:
                    self.journal.write(events.Verdict.of(message, stacks=stacks))
                else:
                    self.journal.write(events.Interruption.of(message, stacks=stacks))
                    line = f"ft_launcher: rank {rank} {message.reason}"
                    if stacks:
                        line += f"; stacks: {stacks}"
                    report.show(line)
            case RankException():
                # `report` and not `write` wherever a rank chooses the contents: these lines are bounded.
                self.journal.report(events.UncaughtException.of(message, cycle=cycle, rank=rank))
            case Replaced():
                logger.warning("the monitor of rank %d was replaced: %s; the training goes on", rank, message.why)
                self.journal.write(events.MonitorReplaced(cycle, rank, message.why))
            case LimitsSet():
                self.journal.report(events.Limits.of(message, cycle=cycle, rank=rank))
            case InterruptedAgain():
                self.journal.report(events.InterruptedAgain.of(message, cycle=cycle, rank=rank))
                report.show(
                    f"ft_launcher: rank {rank} has not ended {message.waited_s:.1f} s after its interruption "
                    f"({message.why}): interrupted again (--ft-interrupt-grace)"
                )
            case SectionTimes():
                self.journal.report(events.SectionTimes.of(message, cycle=cycle, rank=rank))
            case ResultInDoubt():
                self.journal.report(events.ResultInDoubt.of(message, cycle=cycle))
            case ControlRequest():
                logger.warning("rank %d asks for %s (%s)", rank, message.action, message.description)
                self.journal.report(events.ControlRequest.of(message, cycle=cycle, rank=rank))

    @contained("an event cannot be recorded")
    def bad_loss(self, cycle: int, rank: int, iteration: int, loss: str, is_fault: bool) -> None:
        """A rank printed a loss of nan or inf."""
        self._keep()
        if not is_fault:
            logger.warning("rank %d printed a loss of %s (iteration %s); the training goes on", rank, loss, iteration)
        self.journal.report(events.NanLoss(cycle, rank, iteration, loss, is_fault))

    def no_steps_printed(self, cycle: int, watch_log: str) -> None:
        """No line of a whole cycle was one of a step."""
        logger.warning("--ft-watch-log %s found no step in what the ranks of cycle %d printed", watch_log, cycle)

    def cannot_act(self, cycle: int, why: str) -> None:
        """Limits that the user set cannot act."""
        logger.warning("%s", why)
        self.journal.write(events.LimitsCannotAct(cycle, why))

    @contained("an event cannot be recorded")
    def stalled(
        self, cycle: int, stall: Verdict, scenes: Mapping[int, Scene], stack_file: Callable[[int], Path]
    ) -> None:
        """Ranks stand still, and go on running; `scenes`: where each rank of this node is, by local rank."""
        kept = [self._keep_stacks(cycle, local_rank, stack_file(local_rank)) for local_rank in scenes]
        text = about_stall(list(scenes.values()), stall.rank, round(stall.waited_s, 1))
        self.journal.write(events.Stall(cycle, text, [_plain(scene) for scene in scenes.values()]))
        if any(kept):
            stacks = f"; stacks: {Path(next(filter(None, kept))).parents[1]}"
        else:
            stacks = ""
        report.show(f"ft_launcher: {text}. They are not stopped (--ft-stall-warning){stacks}")

    @contained("an event cannot be recorded")
    def hang_elsewhere(self, cycle: int, ranks: Sequence[RankEvidence]) -> None:
        """A rank of another node failed by a hang: shows which ranks of this node it may have waited for."""
        missing = [
            rank.scene for rank in ranks if rank.scene.place not in (Whereabouts.COLLECTIVE, Whereabouts.UNKNOWN)
        ]
        if missing:
            report.show(f"ft_launcher: on {self._node}, where no rank failed: {listed(missing)}")

    @contained("an event cannot be recorded")
    def stacks_of_hang(self, cycle: int, ranks: Sequence[RankEvidence], stack_file: Callable[[int], Path]) -> None:
        """Keeps where each rank was before the stop of a cycle that failed by a hang."""
        found = []
        for rank in ranks:
            stacks = self._keep_stacks(cycle, rank.local_rank, stack_file(rank.local_rank))
            if not stacks and rank.exception is not None:
                stacks = self._keep_text(cycle, rank.local_rank, rank.exception.traceback)
            found.append(_plain(rank.scene) | {"stacks": stacks, "groups": rank.groups})
        self.journal.write(events.Stacks(cycle, found))

    @contained("an event cannot be recorded")
    def lost_in_process(self, cycle: int, end: RankEvidence, fault: Fault | None, killed_by_us: bool) -> None:
        """A rank's process ended, and rung 1 handles it."""
        self._keep()
        if killed_by_us:
            what = "was killed by the launcher"
        else:
            what = f"exited with code {end.exit_code}"
        known = {"what": what, "where": "", "hint": "", "fault_class": ""}
        if fault:
            what = fault.what
            known = {"what": what, "where": fault.where, "hint": fault.hint, "fault_class": fault.fault_class.value}
        self.journal.write(events.InProcessFault(cycle, end.rank, end.pid, end.exit_code, **known))
        place = "".join(f", {part}" for part in (known["where"], known["hint"] and f"likely: {known['hint']}") if part)
        report.show(f"ft_launcher: rank {end.rank} (pid {end.pid}) {what}{place}; handled in process")

    @contained("an event cannot be recorded")
    def restarted_in_process(self, cycle: int, iteration: int, took_s: float, why: Sequence[Mapping[str, Any]]) -> None:
        """The ranks of this node run again, in the same processes; `why`: what the ranks wrote of the fault."""
        self._keep()
        self._counts["restarts_in_process"] += 1
        self.journal.write(events.InProcessRestart(cycle, iteration, round(took_s, 6), why))
        line = f"ft_launcher: restarted in process after {took_s:.3f} s: iteration {iteration} of cycle {cycle}"
        reasons = ", ".join(map(report.of_interruption, why[:_MOST_REASONS]))
        if reasons:
            line += f" ({reasons})"
        report.show(line)

    def started_again(self, cycle: int, rank: int, local_rank: int, pid: int) -> None:
        """A rank that died was started again alone."""
        self._counts["started_again"] += 1
        self.journal.write(events.StartedAgain(cycle, rank, local_rank, pid))
        report.show(f"ft_launcher: rank {rank} was started again (pid {pid}); it joins at the next restart in process")

    def stays_away(self, cycle: int, rank: int, reason: str) -> None:
        """A rank that died is not started again in this cycle."""
        self.journal.write(events.StaysAway(cycle, rank, reason))
        report.show(f"ft_launcher: rank {rank} is not started again: {reason}; the others go on")

    @contained("an event cannot be recorded")
    def blamed_in_process(self, cycle: int, iteration: int, finding: str, ranks: Sequence[int], text: str) -> None:
        """Who held up the others, because of which the ranks restart in process."""
        self.journal.write(events.InProcessBlame(cycle, iteration, finding, ranks, text))
        if ranks:
            report.show(f"ft_launcher: {text}; the ranks restart in process")

    def joined(self, cycle: int, rank: int, iteration: int) -> None:
        """A rank that was started again takes part."""
        self.journal.write(events.Joined(cycle, rank, iteration))

    def finished_without(self, cycle: int, ranks: Sequence[int]) -> None:
        """A cycle succeeds, and these ranks are lost."""
        self.journal.write(events.FinishedWithout(cycle, ranks))
        report.show(f"ft_launcher: the ranks are done, without those that were lost: {', '.join(map(str, ranks))}")

    def ends_late_rank(self, cycle: int, rank: int, reason: str) -> None:
        """A rank that the others went on without is killed."""
        self.journal.write(events.LateRankEnded(cycle, rank, reason))
        report.show(f"ft_launcher: {reason}; the others went on, and it is killed")

    def took_over(self, cycle: int, rank: int, reason: str) -> None:
        """Rung 1 cannot handle a fault: the cycle ends."""
        self._keep()
        self._counts["taken_over"] += 1
        self.journal.write(events.TakenOver(cycle, rank, reason))
        report.show(f"ft_launcher: no restart in process: {reason}")

    def asked(
        self, cycle: int, request: ControlRequest, decision: Decision, inputs: Mapping[str, Any] | None = None
    ) -> None:
        """A rank's request and the decision about it; `inputs`: as for `failed`."""
        self._decided(cycle, decision, inputs)
        self.cycle_ended(cycle, f"asked for: {request.action}")
        report.show(f"ft_launcher: {report.next_step(decision)}")

    def _decided(self, cycle: int, decision: Decision, inputs: Mapping[str, Any] | None) -> None:
        """Writes a decision to the journal, before it is carried out."""
        self._keep()
        self.journal.write(events.Decision.of(decision, cycle=cycle, inputs=inputs))

    @contained("an event cannot be recorded")
    def evidence(self, cycle: int, found: CycleEvidence, of_rank: int | None = None) -> None:
        """What a fault is found by; `of_rank`: of this rank alone, whose end rung 1 handles."""
        # `report`: most of it is texts of ranks.
        self.journal.report(events.Evidence(cycle, of_rank, **to_record(found)))

    def failed(
        self,
        cycle: int,
        fault: Fault,
        decision: Decision,
        life: CycleLife | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        """A cycle failed: the fault and the decision.

        Args:
            life: how long the cycle ran and how far it came.
            inputs: what the restart policy decided by (`policy/question.py`); None: it was not asked.
        """
        self._keep()
        with contained("the fault cannot be written to the journal"):
            self.journal.write(events.Fault.of(fault, cycle=cycle))
        with contained("the decision cannot be written to the journal"):
            self._decided(cycle, decision, inputs)
            if life:
                self.journal.write(events.CycleEnd.of(life, cycle=cycle, how="failed"))
            else:
                self.cycle_ended(cycle, "failed")
        if self.journal.path:
            record = self.journal.path.parent
        else:
            record = None
        with contained("the block of the fault cannot be shown"):
            colour = sys.stderr is not None and sys.stderr.isatty()
            report.show_lines(report.block(fault, decision, cycle, self._node, record, colour), escape=False)
            self.shown = fault

    @contained("an event cannot be recorded")
    def stopped(self, cycle: int, ending: Ending) -> None:
        """The processes of a cycle were ended: which of them needed SIGKILL, and which are left."""
        if ending.killed:
            self.journal.write(events.Killed(cycle, sorted(ending.killed)))
        if ending.left:
            logger.error("processes that even SIGKILL did not end: %s", sorted(ending.left))
            self.journal.write(events.LeftOver(cycle, sorted(ending.left)))

    def limit_doubled(self, limit: str, factor: float) -> None:
        """A learned limit killed a rank; it is `factor` times itself in the next cycle."""
        logger.warning("the learned limit %s ended a rank: %g times that applies in the next cycle", limit, factor)
        self.journal.write(events.LimitDoubled(limit, factor))

    def headline(self, fault: Fault) -> str:
        """Returns a fault of this node in one line, which other nodes show."""
        return report.headline(fault, self._node)

    def failed_elsewhere(self, cycle: int, headline: str, decision: Decision) -> None:
        """A cycle failed on another node, which records all of it: here the fault in one line and what follows."""
        step = report.next_step(decision)
        self.journal.write(events.CycleEnd(cycle, "failed elsewhere", why=headline, next=step))
        report.show(f"ft_launcher: {headline}")
        report.show(f"  cycle {cycle}; {step}")

    def job_over(self, cycle: int | None, why: str, exit_code: int) -> None:
        """The job ends on this node without a fault of its ranks; `cycle`: the last one, if any."""
        report.show(f"ft_launcher: the job ends here: {why}; exit code {exit_code}")
        if cycle is not None:
            self.journal.write(events.CycleEnd(cycle, "job over", why=why))

    def reform(self, cycle: int, why: str = "other nodes wait to take part") -> None:
        """The group forms anew, without a fault of this node's ranks."""
        logger.warning("the group forms anew: %s", why)
        self.journal.write(events.CycleEnd(cycle, "membership changed", why=why))

    @contained("an event cannot be recorded")
    def fenced(self, cycle: int, ranks: Sequence[int], silent_s: float, limit_s: float) -> None:
        """This launcher stood still, and its monitors ended the ranks."""
        report.show(
            f"ft_launcher: this launcher stood still for {silent_s:.1f} s. The other nodes may have gone on without "
            f"it, so its monitors ended the ranks of this node after {limit_s:g} s (--ft-node-timeout)"
        )
        self.journal.write(events.Fenced(cycle, list(ranks), round(silent_s, 3), limit_s))

    def preempted_elsewhere(self, cycle: int, why: str) -> None:
        """Another node got a signal to end, and the ranks of this node end with it."""
        report.show(f"ft_launcher: {why}; the ranks here are told to end too")
        self.journal.write(events.PreemptedElsewhere(cycle, why))

    def lingers(self, cycle: int, commands: Mapping[int, str], limit_s: float | None) -> None:
        """Background processes of ranks that succeeded still run."""
        if limit_s is None:
            how_long = "until they end"
        else:
            how_long = f"at most {limit_s:g} s"
        logger.info("the ranks succeeded; waits %s (--ft-linger) for what they left: %s", how_long, _named(commands))
        self.journal.write(events.Lingers(cycle, {str(pid): text for pid, text in commands.items()}))

    def ends_background(self, cycle: int, commands: Mapping[int, str], number: int | None) -> None:
        """Background processes are ended, since their time is over or because of a signal."""
        if number is None:
            why = "--ft-linger is over"
        else:
            why = f"got {signal_name(number)}"
        report.show(f"ft_launcher: {why}; ends what the ranks left running: {_named(commands)}")
        self.journal.write(events.BackgroundEnded(cycle, sorted(commands), number))

    def signalled(self, number: int) -> None:
        """A signal ends the launcher."""
        report.show(f"ft_launcher: got {signal_name(number)}; the ranks are told to end")
        self.journal.write(events.Signal(number))

    def store_silent(self, error: Exception) -> None:
        """The rendezvous' store does not answer while ranks are healthy."""
        # The store is asked again and again; one line is enough.
        if not self._store_reported:
            self._store_reported = True
            logger.warning("the rendezvous store does not answer (%s); the training goes on", error)
            self.journal.write(events.StoreSilent(str(error)))

    def _keep(self) -> None:
        """Makes the run's folder and opens the journal, once there is something to keep."""
        if self._keep_failed or self.journal.path is not None:
            return
        try:
            if self._folder is not None:
                folder = self._folder
            else:
                folder = self._run.make()
        except ConfigError as error:
            self._keep_failed = True
            logger.warning("nothing can be kept of this run: %s", error)
            return
        self.journal.open(folder / f"journal.{self._node}.jsonl", self._run.access)

    def _keep_stacks(self, cycle: int, local_rank: int, stack_file: Path) -> str:
        """Copies a rank's stacks to its log folder; returns the path, empty when there are none."""
        return self.keep(cycle, local_rank, stack_file, _STACKS)

    def keep(self, cycle: int, local_rank: int, file: Path, name: str) -> str:
        """Copies a file of a rank to its log folder; returns the path, empty when it cannot be read or written."""
        self._keep()
        try:
            # The last stacks are the ones that explain the end.
            content = read_file(file, MOST_KEPT, tail=True)
            if not content or self._keep_failed:
                return ""
            kept = self._run.of_rank(cycle, local_rank) / name
            self._write(kept, content)
            return str(kept)
        except (OSError, ConfigError):
            return ""

    def _keep_text(self, cycle: int, local_rank: int, text: str) -> str:
        """Writes a traceback in the place of the stacks of a rank that has ended; returns the path."""
        try:
            file = self._run.of_rank(cycle, local_rank) / _STACKS
            self._write(file, text.encode(errors="backslashreplace"))
            return str(file)
        except (OSError, ConfigError):
            return ""

    def _write(self, path: Path, content: bytes) -> None:
        with open(path, "wb", opener=self._run.access.opener) as file:
            file.write(content)


def _plain(scene: Scene) -> dict[str, Any]:
    process = dict(scene.process or {})
    return {"rank": scene.rank, "place": scene.place.name.lower(), "frames": list(scene.frames), "process": process}


def _named(commands: Mapping[int, str]) -> str:
    return ", ".join(f"{pid} ({command})" for pid, command in sorted(commands.items()))


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by category in whole microseconds, without those that are zero."""
    found = {str(category): round(spent_s, 6) for category, spent_s in seconds.items()}
    return {category: spent_s for category, spent_s in found.items() if spent_s}
