"""Records what happens in a cycle whose ranks restart in process: journal lines and lines of the console.

Called by the in-process engine of a cycle. Decides nothing, and nothing here can end a training.
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

# The console line stays one line; the journal has all reasons.
_MAX_REASONS = 4


class InProcessRecorder:
    """Records the events of level 1. One method for each event."""

    def __init__(self, files: KeptFiles) -> None:
        self._files = files
        self._journal = files.journal
        self.counts = {"restarts_in_process": 0, "started_again": 0, "taken_over": 0}
        """Of the whole run, by their names in the journal."""

    @contained("an event cannot be recorded")
    def decided(self, cycle: int, facts: Callable[[], Mapping[str, Any]]) -> None:
        """What follows for the ranks of this node, and by what it was decided."""
        # `report`: messages of ranks lead to it, and are in it.
        self._journal.report(events.InProcessDecisionEvent(cycle, **facts()))

    @contained("an event cannot be recorded")
    def evidence(self, cycle: int, found: CycleEvidence, rank: int) -> None:
        """What the fault of a rank is found by, whose end level 1 handles."""
        # `report`: most of it is texts of ranks.
        self._journal.report(events.EvidenceEvent(cycle, rank, **to_record(found)))

    @contained("an event cannot be recorded")
    def lost(self, cycle: int, end: RankEvidence, fault: Fault | None, killed_by_us: bool) -> None:
        """A rank's process ended, and level 1 handles it."""
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
        """The ranks of this node run again, in the same processes, in round `number`.

        Args:
            interruptions: what the ranks wrote of the fault.
            skipped: how many restarts before this one are not recorded each.
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
        """A rank that died was started again alone."""
        self.counts["started_again"] += 1
        self._journal.write(events.StartedAgainEvent(cycle, rank, local_rank, pid))
        console_text.say(f"rank {rank} was started again (pid {pid}); it joins at the next restart in process")

    def stays_away(self, cycle: int, rank: int, reason: str) -> None:
        """A rank that died is not started again in this cycle."""
        self._journal.write(events.StaysAwayEvent(cycle, rank, reason))
        console_text.say(f"rank {rank} is not started again: {reason}; the others go on")

    @contained("an event cannot be recorded")
    def culprits_named(self, cycle: int, number: int, finding: str, ranks: Sequence[int], text: str) -> None:
        """Who held up the others in round `number`, because of which the ranks restart in process."""
        self._journal.write(events.InProcessBlameEvent(cycle, number, finding, ranks, text))
        if ranks:
            console_text.say(f"{text}; the ranks restart in process")

    def joined(self, cycle: int, rank: int, number: int) -> None:
        """A rank that was started again takes part, from round `number` on."""
        self._journal.write(events.JoinedEvent(cycle, rank, number))

    def finished_without(self, cycle: int, ranks: Sequence[int]) -> None:
        """A cycle succeeds, and these ranks are lost."""
        self._journal.write(events.FinishedWithoutEvent(cycle, ranks))
        console_text.say(f"the ranks are done, without those that were lost: {', '.join(map(str, ranks))}")

    def ends_late_rank(self, cycle: int, rank: int, reason: str) -> None:
        """A rank that the others went on without is killed."""
        self._journal.write(events.LateRankEndedEvent(cycle, rank, reason))
        console_text.say(f"{reason}; the others went on, and it is killed")

    def took_over(self, cycle: int, rank: int, reason: str) -> None:
        """Level 1 cannot handle a fault: the cycle ends."""
        self._files.begin()
        self.counts["taken_over"] += 1
        self._journal.write(events.TakenOverEvent(cycle, rank, reason))
        console_text.say(f"no restart in process: {reason}")
