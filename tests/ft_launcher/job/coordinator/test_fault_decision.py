"""What was decided about a fault: who hears of it, also after a take-over; and cycles that fail without a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.decide.policy.case import Case, PolicyAnswer
from ft_launcher.decide.policy.restart_policy import Action
from ft_launcher.job.coordinator import fault_decision
from ft_launcher.job.coordinator.coordinator import Coordinator, Phase
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import Answer, Ended, EndReason, JobOver, Reply, Work
from ft_launcher.job.coordinator.roster import Roster
from tests.ft_launcher.job.nodes_of_a_test import failed, judge, node
from tests.ft_launcher.job.story import Story, running


def answers(work: list[Work]) -> dict[str, Answer]:
    """By node."""
    return {one.node: one.answer for one in work if isinstance(one, Reply)}


def test_a_take_over_before_the_places_were_told_tells_them_whole() -> None:
    """The coordinator died between the record and the answers."""
    story = running("ab")
    story.failed("b")
    story.come("b", report=failed())
    work = story.machine.on(node("a", 2, 0), story.now)
    story.told(work[:1])
    assert story.formed is not None and story.formed.cycle == 1
    again = answers(Coordinator("b", Rules(Size(2, 2)), judge, story.now, story.formed).resend())
    for name in "ab":
        judgement = again[name].judgement
        assert judgement is not None and (judgement.decision.action, judgement.node) == (Action.RESTART, "b")


@pytest.mark.parametrize(
    ("brought", "came", "returned"),
    [
        ({"returned": {"1": 0.02}}, "ab", {1: 0.02}),
        ({"returned": {"1": 0.02}}, "b", {}),
        ({"returned": {"one": 0.02}}, "ab", {}),
        ({"returned": ["1"]}, "ab", {}),
        ({"returned": {"1": 10**400}}, "ab", {}),
        ({"returned": {"1": float("nan")}}, "ab", {}),
        ({"returned": {"1": -5.0}}, "ab", {}),
        ({}, "ab", {}),
    ],
    ids=["returned", "a node is missing", "no number", "a list", "too large", "no number at all", "later", "nothing"],
)
def test_which_ranks_had_returned(brought: dict[str, Any], came: str, returned: dict[int, float]) -> None:
    roster = Roster(None)
    roster.form([node("a"), node("b")])
    for name in came:
        roster.waiting[name] = node(name, 2, roster.cycle, views=brought if name == "b" else {})
    assert roster.node_views().returned == returned


def test_what_a_waiting_node_has_to_hear_outlives_the_coordinator() -> None:
    """The faulty node was replaced and waits; the job ends under the next coordinator."""

    def moving(case: Case, now: float) -> PolicyAnswer:
        return replace(judge(case, now), relocates=True)

    story = Story(2, 2)
    story.machine = Coordinator("a", Rules(Size(2, 2)), moving, 0.0)
    assert story.come("ab") == ["cycle 0: ab"]
    assert story.come("s") == []
    story.failed("b")
    story.come("b", report=failed())
    assert story.come("a") == ["cycle 1: as"]
    story.taken_over(by="s")
    story.machine.on(Ended("a", 1, EndReason.SUCCEEDED, ""), story.now)
    told = answers(story.machine.on(Ended("s", 1, EndReason.SUCCEEDED, ""), story.now))
    over = told["b"]
    assert isinstance(over, JobOver) and (over.exit_code, over.reason) == (0, "all ranks succeeded")
    assert over.judgement is not None and over.judgement.node == "b"


def test_cycles_that_fail_without_a_failed_rank_end_the_job() -> None:
    """The store of a cycle cannot be reached, time after time."""
    story = running("ab")
    for cycle in (1, 2):
        assert story.failed("b") == [f"end {cycle - 1}: failed"]
        assert story.come("ba") == [f"cycle {cycle}: ab"]
    story.failed("b")
    assert story.come("ba") == ["over for b: 81", "over for a: 81"]
    over = story.machine.formed().over
    assert over is not None and over.reason == "3 cycles in a row could not begin: node b: boom"


@pytest.mark.parametrize("otherwise", ["fault", "loss", "growth"])
def test_only_such_cycles_in_a_row_count(otherwise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_decision, "MAX_FAILED_STARTS", 2)
    story = running("ab", minimum=1, maximum=3)
    story.failed("b")
    assert story.come("ba") == ["cycle 1: ab"]
    if otherwise == "fault":
        story.failed("b")
        story.come("b", report=failed())
        story.come("a")
    elif otherwise == "loss":
        story.failed("b")
        story.lost("b")
        assert story.come("a") == ["cycle 2: a"]
    else:
        story.come("c")
        story.come("ba")
    assert story.machine.phase is Phase.RUNNING
    story.failed("a")
    assert story.come("abc" if otherwise == "growth" else "ab" if otherwise == "fault" else "a")[:1] == [
        {"fault": "cycle 3: ab", "loss": "cycle 3: a", "growth": "cycle 3: abc"}[otherwise]
    ]
