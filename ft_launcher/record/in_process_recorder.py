"""Records what happens in a cycle whose ranks restart in process (level 1): events of the journal, lines on the
console.

The in-process engine of a cycle (`agent/in_process/in_process.py`) calls one method for each event, in the agent's
thread. Recording decides nothing and must never end a training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ft_launcher.decide.attribution import Fault, RankEvidence
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence, to_record
from ft_launcher.record import events
from ft_launcher.record.console import console_text
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.logs.logs import KeptFiles

# Reasons of a restart in its line on the console. The journal has all of them.
_MAX_REASONS = 4


class InProcessRecorder:
    """Records the events of level 1, one method for each event; `Recorder.in_process` is the only one."""

    def __init__(self, files: KeptFiles) -> None:
        self._files = files
        self._journal = files.journal
        self.counts = {"restarts_in_process": 0, "started_again": 0, "taken_over": 0}
        """Counts over the whole run, by their names in the event `job_end`."""

    @contained("an event cannot be recorded")
    def decided(self, cycle: int, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Records what the launcher decided for the ranks of this node, and by what; `ft_launcher replay` decides it
        again.

        Args:
            facts: makes the fields of the event; called inside, so that an error in it is contained.
        """
        # `report`: the event quotes messages of ranks.
        self._journal.report(events.InProcessDecisionEvent(cycle, **facts()))

    @contained("an event cannot be recorded")
    def evidence(self, cycle: int, found: CycleEvidence, rank: int) -> None:
        """Records the evidence of the fault of one rank, whose end level 1 handles while the other ranks go on."""
        # `report`: most of the evidence is text of ranks.
        self._journal.report(events.EvidenceEvent(cycle, rank, **to_record(found)))

    @contained("an event cannot be recorded")
    def lost(self, cycle: int, end: RankEvidence, fault: Fault | None, killed_by_us: bool) -> None:
        """Records that a rank's process ended and that level 1 handles this.

        Args:
            end: the evidence of that rank.
            fault: its fault; None: no fault was found.
            killed_by_us: the launcher killed the rank, for instance because it was late.
        """
        self._files.begin()
        if killed_by_us:
            what = "was killed by the launcher"
        else:
            what = f"exited with code {end.exit_code}"
        known = {"what": what, "where": "", "hint": "", "fault_class": ""}
        if fault:
            what = fault.what
            known = {"what": what, "where": fault.where, "hint": fault.hint, "fault_class": fault.fault_class.value}
        self._journal.write(events.InProcessFaultEvent(cycle, end.rank, end.pid, end.exit_code, **known))
        place = "".join(f", {part}" for part in (known["where"], known["hint"] and f"likely: {known['hint']}") if part)
        console_text.say(f"rank {end.rank} (pid {end.pid}) {what}{place}; handled in process")

    @contained("an event cannot be recorded")
    def restarted(
        self, cycle: int, number: int, took_s: float, interruptions: Sequence[Mapping[str, Any]], skipped: int = 0
    ) -> None:
        """Records that the ranks of this node run again in the same processes, in round `number`.

        Args:
            took_s: seconds from the fault to the restart, as this launcher saw them.
            interruptions: what the ranks wrote about the fault into their store.
            skipped: how many restarts came just before, while the launcher stood still. These are only counted.
        """
        self._files.begin()
        self.counts["restarts_in_process"] += 1 + skipped
        self._journal.write(events.InProcessRestartEvent(cycle, number, round(took_s, 6), interruptions, skipped))
        line = f"restarted in process after {took_s:.3f} s: round {number} of cycle {cycle}"
        reasons = ", ".join(map(console_text.of_interruption, interruptions[:_MAX_REASONS]))
        if reasons:
            line += f" ({reasons})"
        console_text.say(line)

    def started_again(self, cycle: int, rank: int, local_rank: int, pid: int) -> None:
        """Records that a rank which died was started again alone. It joins at the next restart in process."""
        self.counts["started_again"] += 1
        self._journal.write(events.StartedAgainEvent(cycle, rank, local_rank, pid))
        console_text.say(f"rank {rank} was started again (pid {pid}); it joins at the next restart in process")

    def stays_away(self, cycle: int, rank: int, reason: str) -> None:
        """Records that a rank which died is not started again in this cycle."""
        self._journal.write(events.StaysAwayEvent(cycle, rank, reason))
        console_text.say(f"rank {rank} is not started again: {reason}; the others go on")

    @contained("an event cannot be recorded")
    def culprits_named(self, cycle: int, number: int, finding: str, ranks: Sequence[int], text: str) -> None:
        """Records who held up the other ranks in round `number`, which is interrupted for it.

        Args:
            finding: a value of `HangKind`.
            ranks: the culprits; empty where none can be named, and then the console gets no line.
            text: what they did, in words.
        """
        self._journal.write(events.InProcessBlameEvent(cycle, number, finding, ranks, text))
        if ranks:
            console_text.say(f"{text}; the ranks restart in process")

    def joined(self, cycle: int, rank: int, number: int) -> None:
        """Records that a rank which was started again takes part from round `number` on."""
        self._journal.write(events.JoinedEvent(cycle, rank, number))

    def finished_without(self, cycle: int, ranks: Sequence[int]) -> None:
        """Records that a cycle succeeds without `ranks`, which were lost on the way."""
        self._journal.write(events.FinishedWithoutEvent(cycle, ranks))
        console_text.say(f"the ranks are done, without those that were lost: {', '.join(map(str, ranks))}")

    def ends_late_rank(self, cycle: int, rank: int, reason: str) -> None:
        """Records that a rank is killed because the other ranks went on without it."""
        self._journal.write(events.LateRankEndedEvent(cycle, rank, reason))
        console_text.say(f"{reason}; the others went on, and it is killed")

    def took_over(self, cycle: int, rank: int, reason: str) -> None:
        """Records that level 1 cannot handle a fault: the cycle ends, and the restart policy decides."""
        self._files.begin()
        self.counts["taken_over"] += 1
        self._journal.write(events.TakenOverEvent(cycle, rank, reason))
        console_text.say(f"no restart in process: {reason}")
