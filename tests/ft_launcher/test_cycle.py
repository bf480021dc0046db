"""Every event in every phase."""

import pytest

from ft_launcher.cycle import Condemned, Cycle, Event, Lost, Phase, RankEnded, TakesPart

CASES: list[tuple[str, list[Event], Phase]] = [
    ("nothing yet", [], Phase.RUNNING),
    ("one of two done", [RankEnded(0, 0)], Phase.RUNNING),
    ("both done", [RankEnded(0, 0), RankEnded(1, 0)], Phase.SUCCEEDED),
    ("one fails", [RankEnded(1, 3)], Phase.FAILED),
    ("one fails after the other is done", [RankEnded(0, 0), RankEnded(1, -9)], Phase.FAILED),
    ("condemned is not yet dead", [Condemned(0)], Phase.RUNNING),
    ("condemned and exits 0", [Condemned(0), RankEnded(0, 0)], Phase.FAILED),
    ("told to end", [Phase.TOLD_TO_END], Phase.TOLD_TO_END),
    ("told after one is done", [RankEnded(0, 0), Phase.TOLD_TO_END], Phase.TOLD_TO_END),
    ("others wait", [Phase.REFORM], Phase.REFORM),
    ("a failure stands when told later", [RankEnded(0, 1), Phase.TOLD_TO_END], Phase.FAILED),
    ("told stands when ranks fail later", [Phase.TOLD_TO_END, RankEnded(0, -15)], Phase.TOLD_TO_END),
    ("success stands", [RankEnded(0, 0), RankEnded(1, 0), Phase.TOLD_TO_END], Phase.SUCCEEDED),
    ("reform stands", [Phase.REFORM, RankEnded(0, 1)], Phase.REFORM),
    ("asked", [Phase.ASKED], Phase.ASKED),
    ("asked, then the rank ends badly", [Phase.ASKED, RankEnded(0, 1)], Phase.ASKED),
    ("asked, then all end well", [Phase.ASKED, RankEnded(0, 0), RankEnded(1, 0)], Phase.ASKED),
    ("asked and told", [Phase.ASKED, Phase.TOLD_TO_END], Phase.ASKED),
    ("asked when told already", [Phase.TOLD_TO_END, Phase.ASKED], Phase.TOLD_TO_END),
    ("asked by one that has failed", [RankEnded(0, 1), Phase.ASKED], Phase.FAILED),
    ("asked when all is done", [RankEnded(0, 0), RankEnded(1, 0), Phase.ASKED], Phase.SUCCEEDED),
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
    ("rung 2 takes over", [Lost(0), Phase.FAILED], Phase.FAILED),
    ("rung 2 stands", [Phase.FAILED, RankEnded(0, 0), RankEnded(1, 0)], Phase.FAILED),
    ("all are zombies", [RankEnded(0, 0), Phase.FAILED], Phase.FAILED),
    ("told when one is lost", [Lost(0), Phase.TOLD_TO_END], Phase.TOLD_TO_END),
    ("cut off", [Phase.CUT_OFF, RankEnded(0, 1)], Phase.CUT_OFF),
    ("fenced", [Phase.FENCED, RankEnded(0, -9), RankEnded(1, -9)], Phase.FENCED),
    ("fenced when a rank failed already", [RankEnded(0, 1), Phase.FENCED], Phase.FAILED),
    ("asked when others wait", [Phase.REFORM, Phase.ASKED], Phase.REFORM),
]


@pytest.mark.parametrize(("events", "phase"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_phase_after_events(events: list[Event], phase: Phase) -> None:
    cycle = Cycle(2)
    for event in events:
        cycle.on(event)
    assert cycle.phase is phase
