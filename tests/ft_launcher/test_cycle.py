"""Every event in every phase."""

import pytest

from ft_launcher.cycle import (
    AllZombies,
    Asked,
    Condemned,
    Cycle,
    Event,
    Lost,
    MembersWait,
    Phase,
    RankEnded,
    RungTwo,
    TakesPart,
    ToldToEnd,
)

CASES: list[tuple[str, list[Event], Phase]] = [
    ("nothing yet", [], Phase.RUNNING),
    ("one of two done", [RankEnded(0, 0)], Phase.RUNNING),
    ("both done", [RankEnded(0, 0), RankEnded(1, 0)], Phase.SUCCEEDED),
    ("one fails", [RankEnded(1, 3)], Phase.FAILED),
    ("one fails after the other is done", [RankEnded(0, 0), RankEnded(1, -9)], Phase.FAILED),
    ("condemned is not yet dead", [Condemned(0)], Phase.RUNNING),
    ("condemned and exits 0", [Condemned(0), RankEnded(0, 0)], Phase.FAILED),
    ("told to end", [ToldToEnd(15)], Phase.TOLD_TO_END),
    ("told after one is done", [RankEnded(0, 0), ToldToEnd(10)], Phase.TOLD_TO_END),
    ("nobody waits", [MembersWait(0)], Phase.RUNNING),
    ("others wait", [MembersWait(2)], Phase.REFORM),
    ("a failure stands when told later", [RankEnded(0, 1), ToldToEnd(15)], Phase.FAILED),
    ("told stands when ranks fail later", [ToldToEnd(15), RankEnded(0, -15)], Phase.TOLD_TO_END),
    ("success stands", [RankEnded(0, 0), RankEnded(1, 0), ToldToEnd(15)], Phase.SUCCEEDED),
    ("reform stands", [MembersWait(1), RankEnded(0, 1)], Phase.REFORM),
    ("asked", [Asked(0)], Phase.ASKED),
    ("asked, then the rank ends badly", [Asked(0), RankEnded(0, 1)], Phase.ASKED),
    ("asked, then all end well", [Asked(0), RankEnded(0, 0), RankEnded(1, 0)], Phase.ASKED),
    ("asked and told", [Asked(0), ToldToEnd(15)], Phase.ASKED),
    ("asked when told already", [ToldToEnd(15), Asked(0)], Phase.TOLD_TO_END),
    ("asked by one that has failed", [RankEnded(0, 1), Asked(0)], Phase.FAILED),
    ("asked when all is done", [RankEnded(0, 0), RankEnded(1, 0), Asked(0)], Phase.SUCCEEDED),
    ("one is lost", [Lost(0)], Phase.RUNNING),
    ("one is lost, the other is done", [Lost(0), RankEnded(1, 0)], Phase.SUCCEEDED),
    ("one is done, the other is lost", [RankEnded(1, 0), Lost(0)], Phase.SUCCEEDED),
    ("one is lost, the other fails", [Lost(0), RankEnded(1, 1)], Phase.FAILED),
    ("both are lost", [Lost(0), Lost(1)], Phase.FAILED),
    ("a condemned one is lost", [Condemned(0), Lost(0)], Phase.RUNNING),
    ("condemned, lost, back, and done", [Condemned(0), Lost(0), TakesPart(0), RankEnded(0, 0)], Phase.RUNNING),
    ("lost and back counts again", [Lost(0), TakesPart(0), RankEnded(1, 0)], Phase.RUNNING),
    ("lost and back, both done", [Lost(0), TakesPart(0), RankEnded(1, 0), RankEnded(0, 0)], Phase.SUCCEEDED),
    ("lost twice", [Lost(0), Lost(0), RankEnded(1, 0)], Phase.SUCCEEDED),
    ("rung 2 takes over", [Lost(0), RungTwo(0)], Phase.FAILED),
    ("rung 2 stands", [RungTwo(1), RankEnded(0, 0), RankEnded(1, 0)], Phase.FAILED),
    ("all are zombies", [RankEnded(0, 0), AllZombies()], Phase.FAILED),
    ("told when one is lost", [Lost(0), ToldToEnd(15)], Phase.TOLD_TO_END),
    ("asked when others wait", [MembersWait(1), Asked(0)], Phase.REFORM),
]


@pytest.mark.parametrize(("events", "phase"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_phase_after_events(events: list[Event], phase: Phase) -> None:
    cycle = Cycle(2)
    for event in events:
        cycle.on(event)
    assert cycle.phase is phase
