"""Every event in every phase."""

import pytest

from ft_launcher.agent.cycle.cycle import (
    Condemned,
    Cycle,
    CyclePhase,
    EndedElsewhere,
    Event,
    RankEnded,
    RankLost,
    TakesPart,
)
from ft_launcher.job.coordinator.node_messages import CycleEnd, EndReason

GREW = EndedElsewhere(CycleEnd(0, EndReason.GREW, "a node waits"))

CASES: list[tuple[str, list[Event], CyclePhase]] = [
    ("nothing yet", [], CyclePhase.RUNNING),
    ("one of two done", [RankEnded(0, 0)], CyclePhase.RUNNING),
    ("both done", [RankEnded(0, 0), RankEnded(1, 0)], CyclePhase.SUCCEEDED),
    ("one fails", [RankEnded(1, 3)], CyclePhase.FAILED),
    ("one fails after the other is done", [RankEnded(0, 0), RankEnded(1, -9)], CyclePhase.FAILED),
    ("condemned is not yet dead", [Condemned(0)], CyclePhase.RUNNING),
    ("condemned and exits 0", [Condemned(0), RankEnded(0, 0)], CyclePhase.FAILED),
    ("told to end", [CyclePhase.SIGNALLED], CyclePhase.SIGNALLED),
    ("told after one is done", [RankEnded(0, 0), CyclePhase.SIGNALLED], CyclePhase.SIGNALLED),
    ("others wait", [GREW], CyclePhase.REGROUP),
    ("a failure stands when told later", [RankEnded(0, 1), CyclePhase.SIGNALLED], CyclePhase.FAILED),
    ("told stands when ranks fail later", [CyclePhase.SIGNALLED, RankEnded(0, -15)], CyclePhase.SIGNALLED),
    ("success stands", [RankEnded(0, 0), RankEnded(1, 0), CyclePhase.SIGNALLED], CyclePhase.SUCCEEDED),
    ("a new group stands", [GREW, RankEnded(0, 1)], CyclePhase.REGROUP),
    ("asked", [CyclePhase.ASKED], CyclePhase.ASKED),
    ("asked, then the rank ends badly", [CyclePhase.ASKED, RankEnded(0, 1)], CyclePhase.ASKED),
    ("asked, then all end well", [CyclePhase.ASKED, RankEnded(0, 0), RankEnded(1, 0)], CyclePhase.ASKED),
    ("asked and told", [CyclePhase.ASKED, CyclePhase.SIGNALLED], CyclePhase.ASKED),
    ("asked when told already", [CyclePhase.SIGNALLED, CyclePhase.ASKED], CyclePhase.SIGNALLED),
    ("asked by one that has failed", [RankEnded(0, 1), CyclePhase.ASKED], CyclePhase.FAILED),
    ("asked when all is done", [RankEnded(0, 0), RankEnded(1, 0), CyclePhase.ASKED], CyclePhase.SUCCEEDED),
    ("one is lost", [RankLost(0)], CyclePhase.RUNNING),
    ("one is lost, the other is done", [RankLost(0), RankEnded(1, 0)], CyclePhase.SUCCEEDED),
    ("one is done, the other is lost", [RankEnded(1, 0), RankLost(0)], CyclePhase.SUCCEEDED),
    ("one is lost, the other fails", [RankLost(0), RankEnded(1, 1)], CyclePhase.FAILED),
    ("both are lost", [RankLost(0), RankLost(1)], CyclePhase.FAILED),
    ("a condemned one is lost", [Condemned(0), RankLost(0)], CyclePhase.RUNNING),
    ("condemned, lost, back, and done", [Condemned(0), RankLost(0), TakesPart(0), RankEnded(0, 0)], CyclePhase.RUNNING),
    ("lost and back counts again", [RankLost(0), TakesPart(0), RankEnded(1, 0)], CyclePhase.RUNNING),
    ("lost and back, both done", [RankLost(0), TakesPart(0), RankEnded(1, 0), RankEnded(0, 0)], CyclePhase.SUCCEEDED),
    ("lost twice", [RankLost(0), RankLost(0), RankEnded(1, 0)], CyclePhase.SUCCEEDED),
    ("level 2 takes over", [RankLost(0), CyclePhase.FAILED], CyclePhase.FAILED),
    ("level 2 stands", [CyclePhase.FAILED, RankEnded(0, 0), RankEnded(1, 0)], CyclePhase.FAILED),
    ("all are zombies", [RankEnded(0, 0), CyclePhase.FAILED], CyclePhase.FAILED),
    ("told when one is lost", [RankLost(0), CyclePhase.SIGNALLED], CyclePhase.SIGNALLED),
    ("cut off", [CyclePhase.CUT_OFF, RankEnded(0, 1)], CyclePhase.CUT_OFF),
    ("fenced", [CyclePhase.FENCED, RankEnded(0, -9), RankEnded(1, -9)], CyclePhase.FENCED),
    ("fenced when a rank failed already", [RankEnded(0, 1), CyclePhase.FENCED], CyclePhase.FAILED),
    ("asked when others wait", [GREW, CyclePhase.ASKED], CyclePhase.REGROUP),
]


@pytest.mark.parametrize(("events", "phase"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_phase_after_events(events: list[Event], phase: CyclePhase) -> None:
    cycle = Cycle(2)
    for event in events:
        cycle.on(event)
    assert cycle.phase is phase


@pytest.mark.parametrize(
    ("reason", "exit_code", "phase"),
    [
        (EndReason.FAILED, None, CyclePhase.FAILED_ELSEWHERE),
        (EndReason.HUNG, None, CyclePhase.FAILED_ELSEWHERE),
        (EndReason.STOOD_STILL, None, CyclePhase.FAILED_ELSEWHERE),
        (EndReason.AGREED, None, CyclePhase.FAILED_ELSEWHERE),
        (EndReason.LOST, None, CyclePhase.FAILED_ELSEWHERE),
        (EndReason.PREEMPTED, None, CyclePhase.PREEMPTED_ELSEWHERE),
        (EndReason.PREEMPTED, 85, CyclePhase.PREEMPTED_ELSEWHERE),
        (EndReason.GREW, None, CyclePhase.REGROUP),
        (EndReason.LEFT, None, CyclePhase.REGROUP),
        (EndReason.LEFT, 82, CyclePhase.JOB_ENDED),
        (EndReason.RESTART, None, CyclePhase.REGROUP),
        (EndReason.ASKED, None, CyclePhase.REGROUP),
        (EndReason.STOP, 90, CyclePhase.JOB_ENDED),
        (EndReason.SUCCEEDED, 0, CyclePhase.JOB_ENDED),
    ],
)
def test_an_end_elsewhere(reason: EndReason, exit_code: int | None, phase: CyclePhase) -> None:
    cycle = Cycle(2)
    cycle.on(EndedElsewhere(CycleEnd(0, reason, "why", exit_code)))
    assert cycle.phase is phase


def test_every_reason_has_a_phase() -> None:
    for reason in EndReason:
        cycle = Cycle(1)
        cycle.on(EndedElsewhere(CycleEnd(0, reason, "why")))
        assert cycle.phase is not CyclePhase.RUNNING
