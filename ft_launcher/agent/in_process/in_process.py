"""In-process restart (recovery level 1) of one cycle on this node: carries out the steps that `recovery_level.py`
decides.

`agent/ranks.py` makes an `InProcess` in each cycle, when the ranks have just started, and calls it while the cycle
runs. A rank that dies in a wrapped function passes these stations:

1. `Ranks.poll` sees the end of the process, and asks the monitors for what they have not passed on yet: what the death
   means depends on the rank's last report, and what follows on those of the others (`needs_all_reports`).
2. `ended` asks `RecoveryLevels`. If the rank is in no wrapped function, the result is `RankEnded`, and the cycle fails
   as under torchrun. Else the result is `RankLost`, and the steps are carried out: as a rule a `NotifyLoss`, in a
   thread.
3. The other ranks read the notice in their store, restart, and report their phases (`on_message`).
4. `poll` receives the outcome of the notice. Now the dead rank may be started again, alone (`_start_again`).
5. When all ranks run again, the step `Restarted` is recorded. When a deadline passes before that, the step `TakeOver`
   ends the cycle: level 2 starts all ranks again.

In a job without wrappers only `ended` is passed: it notes the exit code and returns `RankEnded`.

The decisions are pure and are written to the journal, with what they were decided by. Here are processes, signals,
stores and the recorder. This file decides nothing, and ends no cycle itself: it returns events to the cycle loop.

Threads: all methods of `InProcess` are called on the agent's thread, and none of them waits in a store. Work in the
ranks' store has threads of `store_threads.py`: `ft_rounds PREFIX` serves the stores of a call's rounds,
`ft_departurePID` reports a lost rank, `ft_culprit` and `ft_culpritN` find who holds up the others.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed import PrefixStore

from ft_launcher.agent.cycle.cycle import CyclePhase, Event, RankEnded, RankLost, TakesPart
from ft_launcher.agent.cycle.evidence import gather, log_unusable_texts, of_node
from ft_launcher.agent.in_process.culprit_exchange import CulpritExchange, CulpritSearch
from ft_launcher.agent.in_process.rank_loss import RankLossNotifier
from ft_launcher.agent.in_process.recovery_level import RecoveryLevels, RecoveryState
from ft_launcher.agent.in_process.recovery_record import is_recorded, to_record
from ft_launcher.agent.in_process.recovery_steps import (
    DeadlinePassed,
    Died,
    EndRank,
    Happened,
    Joined,
    LossNotified,
    NotifyLoss,
    Reported,
    Restarted,
    StartAgain,
    StayAway,
    Step,
    TakeOver,
)
from ft_launcher.agent.in_process.store_threads import Keys, StoreThreads, connect
from ft_launcher.decide.attribution import Fault, FaultKind, RankEvidence, first_failure
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence
from ft_launcher.decide.policy.restart_policy import final_codes
from ft_launcher.job.rendezvous.cycle_store import CycleStore, PortHolder
from ft_launcher.node.monitors.monitors import NodeMonitors
from ft_launcher.node.ranks.rank_context import RankContext
from ft_launcher.node.zygote.pool import NoWarmStart
from ft_launcher.record.in_process_recorder import InProcessRecorder
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.placement import Placement, RankNumbers
from rank_monitor.contract import env
from rank_monitor.contract.processes.cgroup import oom_kills
from rank_monitor.contract.processes.making_store import making_store
from rank_monitor.contract.restart_phase import ENTERING
from rank_monitor.contract.rounds.round import Round
from rank_monitor.contract.rounds.round_stores import serve_rounds
from rank_monitor.contract.settings.config import Settings
from rank_monitor.contract.wire.foreign import parse_json
from rank_monitor.contract.wire.messages import RestartReport

logger = logging.getLogger(__name__)

LIMIT = "in_process"
"""The name of the limit in a fault where a restart in process did not end. Journal and report show the name."""


class InProcess:
    """In-process restart of one cycle. Made when the ranks have just started; `close` follows when they have ended.

    Args:
        settings: of the launcher; `--ft-inprocess`, `--ft-rejoin`, the final exit codes and the stop's limit are used.
        store: of the cycle. The ranks' store is in it, and this node may host it.
        ports: to serve the stores of rounds; None: another node's agent serves them.
        placement: of this node in the cycle.
        ranks: torch's context of the processes, by which one rank is started again.
        monitors: of these ranks; what they reported is the evidence of a death.
        recorder: writes journal and console.
    """

    def __init__(
        self,
        settings: Settings,
        store: CycleStore,
        ports: PortHolder | None,
        placement: Placement,
        ranks: RankContext,
        monitors: NodeMonitors,
        recorder: InProcessRecorder,
    ) -> None:
        self._store, self._ports, self._ranks = store, ports, ranks
        self._numbers = placement.ranks
        self._monitors, self._recorder = monitors, recorder
        self._rejoins = settings.start.rejoin
        start, numbers = settings.start, [each.rank for each in placement.ranks]
        state = RecoveryState.at_start(numbers, start.rejoin != "false", final_codes(settings.restart))
        self._levels = RecoveryLevels(state, start.inprocess == "auto")
        self._threads = StoreThreads(partial(connect, store.host, store.port))
        self._loss_notifier = RankLossNotifier(self._threads, settings.stop.workers_stop_timeout, ranks.on_reaped)
        self._servers: dict[str, dict[int, object]] = {}
        """For each call, by the prefix of its keys: the store servers of its rounds."""
        self._oom_kills = oom_kills()
        """The kernel's count of processes killed for lack of memory, when the ranks had just started."""
        self._events: list[Event] = []
        """Events that the next `poll` returns."""
        self._notified: list[LossNotified] = []
        """Outcomes of notices, received by `needs_all_reports`. `poll` handles them, after the monitors' messages."""
        self._ends: dict[int, RankEvidence] = {}
        """The last death of each rank."""
        self._open: set[int] = set()
        """Local ranks whose death the others have not yet recovered from. If the cycle ends now, each of them is
        evidence of the fault."""
        self._killed: set[int] = set()
        """Local ranks that this object has killed (`EndRank`). Their deaths have no other cause to look for."""
        self._took_over: TakeOver | None = None
        """The step by which level 2 took over; None: level 1 has not failed."""
        # Not a method: a circle of references would keep the descriptors of a cycle that is over.
        members = partial(_members, placement.ranks, ranks, monitors, self._levels)
        is_host, started_at = store.server is not None, ranks.started_ns / 1e9
        exchange = CulpritExchange(self._threads, placement.nodes, started_at, is_host)
        self._culprit_search = CulpritSearch(monitors, exchange, members)

    def descriptors(self) -> set[int]:
        """Readable when `poll` has something to do."""
        return {self._loss_notifier.notified.fileno(), self._culprit_search.fileno()}

    def next_check(self) -> float | None:
        """When `poll` should be called even if nothing is readable (monotonic seconds); None: no need."""
        return self._levels.next_check()

    def on_message(self, local_rank: int, report: RestartReport) -> None:
        """Handles a report of a rank's wrapper: its phase has changed. Called for each such message of a monitor.

        On the node of rank 0, the first report of a call starts the server of the call's rounds. Does not block.
        """
        # A rank may report late, when others are in a further call. Its report must not end the stores of that call.
        is_entering = report.phase in ENTERING and report.call_prefix and report.call_prefix not in self._servers
        if is_entering and self._ports is not None:
            self._serve_rounds(report.call_prefix, self._ports)
        if report.call_prefix:
            self._culprit_search.on_message(report)
        self._do(self._decide(Reported(local_rank, report)) or [])

    def suspected(self) -> None:
        """Called when a monitor suspects a wrapped rank: it is about to exceed a limit and to be asked to restart.

        Has all nodes asked for stacks now. Once the restart has interrupted the ranks, no stack shows who waited for
        whom. Does not block: the finding comes to a later `poll`.
        """
        self._culprit_search.suspected(time.monotonic())

    def ended(self, local_rank: int, exit_code: int) -> Event:
        """Handles the end of a rank's process; returns the event that the end is for the cycle.

        Called once for each process, after the last messages of its monitor were received.

        Returns:
            `RankEnded`: the death counts as without wrappers. `RankLost`: level 1 handles the death, or has taken the
            cycle to level 2, for which `poll` returns an event of its own.
        """
        if not self._levels.is_used:
            self._levels.note_exit(local_rank, exit_code)
            return RankEnded(local_rank, exit_code)
        was_let_in = local_rank not in self._levels.lost
        steps = self._decide(Died(local_rank, exit_code))
        if steps is None:
            return RankEnded(local_rank, exit_code)
        (end,) = gather([self._numbers[local_rank]], self._ranks, self._monitors)
        self._ends[local_rank] = end
        # A rank that was started again, and ended with 0 before the others let it in, is not a fault.
        if was_let_in or exit_code != 0:
            # The launcher's own kill has no cause to look for.
            ours = local_rank in self._killed
            if ours:
                fault = None
            else:
                evidence = CycleEvidence([end], of_node(self._oom_kills))
                fault = first_failure.find_fault(evidence, on_error=log_unusable_texts)
                self._recorder.evidence(self._store.cycle, evidence, end.rank)
            self._recorder.lost(self._store.cycle, end, fault, ours)
        self._do(steps)
        if self._levels.is_restarting or self._took_over is not None:
            self._open.add(local_rank)
        return RankLost(local_rank)

    def needs_all_reports(self, ended: Iterable[int]) -> bool:
        """Returns whether what follows depends on the last reports of all ranks: their monitors must be asked first.

        True in two cases:
        - A rank has ended in a wrapped call. Whether the others can go on without it depends on where they are.
        - A notice of a loss has ended. The next `poll` handles its outcome, after the others' reports of the restart.

        Args:
            ended: local ranks whose process has ended.
        """
        self._notified += self._loss_notifier.notified.drain()
        return bool(self._notified) or any(self._levels.is_declared(rank) for rank in ended)

    def poll(self) -> list[Event]:
        """Handles outcomes of notices, a deadline that has passed, and findings of who held up the others.

        Called at each wake-up of the cycle loop. Returns the events for the cycle since the last call.
        """
        losses, self._notified = self._notified, []
        for loss in losses:
            self._do(self._decide(loss) or [])
        due = self._levels.next_check()
        if due is not None and due <= time.monotonic():
            self._do(self._decide(DeadlinePassed()) or [])
        self._record_culprits()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Ends the threads in the ranks' store, and with them the stores of rounds.

        Called by `Ranks.stop` when the ranks have ended: earlier, a rank could read a released key as an answer. Waits
        0.5 s for each thread at most. A second call does nothing.
        """
        self._threads.close()
        self._loss_notifier.notified.close()
        self._culprit_search.close()
        self._servers.clear()

    def finish(self) -> set[int]:
        """Returns the local ranks without which the cycle succeeded, and records them. Called once, after success.

        torch's result leaves these ranks out: they died, or did not take part again, and the training is complete.
        """
        lost = sorted(self._levels.lost)
        if lost:
            self._recorder.finished_without(self._store.cycle, [self._rank(local_rank) for local_rank in lost])
        return set(lost)

    def of_the_end(self, evidence: list[RankEvidence]) -> list[RankEvidence]:
        """Returns the evidence of a cycle that has failed, as the search for the first failure is to see it.

        Called by `fault_finding.py` when the ranks are stopped. `evidence` says of each rank what its present process
        shows. Of a rank whose death the others have not recovered from, the evidence of that death takes its place. Of
        a rank that the others went on without, the death is left out: it has been dealt with, and is not the cause.
        """
        found = []
        for rank in evidence:
            if rank.local_rank in self._open:
                found.append(self._ends[rank.local_rank])
            elif rank.local_rank in self._levels.lost:
                found.append(replace(rank, died_at=None, verdict=None, exception_at=None))
            else:
                found.append(rank)
        return found

    def fault(self, evidence: list[RankEvidence]) -> Fault | None:
        """Returns the fault of a cycle that ended because level 1 failed; None: level 1 did not fail.

        Counts only where no rank is found to have failed by itself (`CycleEvidence.otherwise`).
        """
        if self._took_over is None:
            return None
        rank = evidence[self._took_over.local_rank]
        others = tuple(f"rank {other.rank} was running" for other in evidence if other is not rank)
        what = f"hangs: {self._took_over.reason}"
        return Fault(FaultKind.HANG, rank.rank, rank.local_rank, rank.pid, 1, what, "", "", limit=LIMIT, others=others)

    def _decide(self, happened: Happened) -> list[Step] | None:
        """Returns the steps that follow, as `RecoveryLevels.on`, and records what they were decided by.

        The state is copied before the event changes it, so that `ft_launcher replay` can decide the same again.
        """
        known, now = self._levels.known(), time.monotonic()
        steps = self._levels.on(happened, now)
        # Level 2 takes over once. The deadline that has passed stays in the past, so each later wake-up until the end
        # of the cycle decides the same again, which the journal need not repeat.
        comes_again = self._took_over is not None and isinstance(happened, DeadlinePassed)
        if is_recorded(happened, known, steps) and not comes_again:
            self._recorder.decided(self._store.cycle, partial(to_record, happened, known, steps, now))
        return steps

    def _do(self, steps: list[Step]) -> None:
        """Carries out steps in their order. None of them blocks: a notice waits in a thread of its own."""
        for step in steps:
            match step:
                case NotifyLoss():
                    self._loss_notifier.notify(step, self._ends[step.local_rank].pid)
                case StartAgain(local_rank):
                    self._start_again(local_rank)
                case StayAway(local_rank, reason):
                    self._recorder.stays_away(self._store.cycle, self._rank(local_rank), reason)
                case Joined(local_rank, number):
                    self._events.append(TakesPart(local_rank))
                    self._recorder.joined(self._store.cycle, self._rank(local_rank), number)
                case Restarted(number, took_s):
                    self._open.clear()
                    reasons = self._records(step.prefix, step.failed)
                    self._recorder.restarted(self._store.cycle, number, took_s, reasons, step.skipped)
                case EndRank(local_rank, reason):
                    self._recorder.ends_late_rank(self._store.cycle, self._rank(local_rank), reason)
                    self._killed.add(local_rank)
                    with contextlib.suppress(KeyError, OSError):  # it ended by itself meanwhile
                        signal.pidfd_send_signal(self._ranks.pidfds[local_rank], signal.SIGKILL)
                case TakeOver(local_rank, reason) if self._took_over is None:
                    self._took_over = step
                    self._events.append(CyclePhase.FAILED)
                    self._recorder.took_over(self._store.cycle, self._rank(local_rank), reason)

    def _rank(self, local_rank: int) -> int:
        """Returns the global rank of a local one."""
        return self._numbers[local_rank].rank

    @contained("who held up the others before a restart in process cannot be found")
    def _record_culprits(self) -> None:
        """Records which ranks held up the others before a restart, where a finding has arrived."""
        for found in self._culprit_search.poll(time.monotonic()):
            finding = found.finding
            self._recorder.culprits_named(
                self._store.cycle, found.number, finding.kind.value, finding.culprits, found.text
            )

    def _serve_rounds(self, prefix: str, ports: PortHolder) -> None:
        """Starts a thread that serves the stores of a call's rounds. No rank serves them, since each rank may die.

        Called on the node of rank 0 only, at the first report of a call.

        Args:
            prefix: of the call's keys.
            ports: makes the servers.
        """
        self._servers.clear()  # The servers of the previous call end here: that call is over.
        servers = self._servers[prefix] = dict[int, object]()

        def serve(keys: Keys) -> None:
            serve_rounds(keys, ports.serve_round, self._store.host, servers)

        def end(problem: str) -> None:
            if problem and not self._threads.is_over:
                logger.warning("the stores of rounds are not served any more: %s", problem)

        self._threads.start(f"ft_rounds {prefix}", prefix, serve, end)

    def _records(self, prefix: str, number: int) -> list[dict[str, Any]]:
        """Returns the ranks' records of why a round was interrupted; empty on nodes that do not host the store.

        Read without a connection, since the server is in this process: the agent's thread must not wait for a store.
        """
        if self._store.server is None or not prefix:
            return []
        try:
            with making_store():
                keys = PrefixStore(prefix, self._store.server)
            records = Round(keys, number).records()
            return [dict(parse_json(record)) for record in records]
        # Ranks wrote the records; the restart is over, and only its line on the console is poorer.
        except (RuntimeError, ValueError, TypeError) as error:
            logger.warning("why round %d was interrupted cannot be read: %s", number, error)
            return []

    def _start_again(self, local_rank: int) -> None:
        """Starts one rank again while the others run; it joins them at a restart of theirs (`FT_REJOIN`).

        The rank's monitor stays, and is told of the new process. Where no process can be started, the job goes on
        without the rank, and this is recorded.
        """
        started_ns, rank = time.monotonic_ns(), self._rank(local_rank)
        try:
            pid = self._ranks.start_again(local_rank, {env.REJOIN: self._rejoins})
        except (OSError, NoWarmStart) as error:
            self._recorder.stays_away(self._store.cycle, rank, f"it cannot be started: {error}")
            return
        self._killed.discard(local_rank)
        self._monitors.begin_rank(self._store.cycle, local_rank, rank, pid, started_ns)
        self._levels.started(local_rank)
        self._recorder.started_again(self._store.cycle, rank, local_rank, pid)


def _members(
    numbers: Sequence[RankNumbers], ranks: RankContext, monitors: NodeMonitors, levels: RecoveryLevels
) -> list[RankEvidence]:
    """Returns the evidence of all ranks of this node, but for those that the others went on without.

    The exchange about a hang calls it: a rank that does not take part cannot hold up the others.
    """
    return [rank for rank in gather(numbers, ranks, monitors) if rank.local_rank not in levels.lost]
