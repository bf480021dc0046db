"""The coordinator: scenarios, each a line per event and what was told by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ft_launcher.decide.policy.case import FaultReport
from ft_launcher.decide.policy.restart_policy import REQUESTS
from ft_launcher.job.coordinator.coordinator import Coordinator, Phase
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import EndReason, RankAssigned, Reply
from rank_monitor.contract.wire.messages import ResultInDoubt
from tests.ft_launcher.job.nodes_of_a_test import coordinator, failed, judge, node
from tests.ft_launcher.job.story import Story, running

# Forming.


@pytest.mark.parametrize(
    ("nodes", "numbers"),
    [
        ([(2, "train")], [(0, 2, 0, 2)]),
        ([(2, "train"), (3, "train")], [(0, 5, 0, 5), (2, 5, 2, 5)]),
        ([(2, "train"), (1, "read"), (4, "train")], [(0, 7, 0, 6), (2, 7, 0, 1), (3, 7, 2, 6)]),
    ],
)
def test_the_numbers_of_the_ranks(nodes: list[tuple[int, str]], numbers: list[tuple[int, ...]]) -> None:
    machine, work = coordinator(len(nodes), len(nodes)), []
    for name, (nprocs, role) in zip("abc", nodes, strict=False):
        work += machine.on(node(name, nprocs=nprocs, role=role), 0.0)
    places = [one.answer for one in work if isinstance(one, Reply) and isinstance(one.answer, RankAssigned)]
    found = [(one.first_rank, one.world_size, one.first_role_rank, one.role_world_size) for one in places]
    assert found == numbers


def test_at_the_maximum_the_first_cycle_forms_at_once() -> None:
    story = Story(2, 3)
    assert story.come("cb") == []
    assert story.come("a") == ["cycle 0: abc"]


def test_at_the_minimum_it_waits_for_the_last_call() -> None:
    story = Story(2, 3, last_call_s=30.0)
    assert story.come("ba") == []
    assert story.wait(29.0) == []
    assert story.wait(1.0) == ["cycle 0: ab"]


def test_a_last_call_begins_anew_when_the_minimum_is_lost_in_it() -> None:
    story = Story(2, 3, last_call_s=30.0)
    story.come("ab")
    story.wait(20.0)
    assert story.lost("b") == []
    assert story.wait(20.0) == []
    assert story.come("c") == []
    assert story.wait(29.0) == []
    assert story.wait(1.0) == ["cycle 0: ac"]


def test_too_few_for_too_long_is_the_end_for_all_and_for_the_late() -> None:
    story = Story(3, 3, join_s=600.0)
    story.come("ab")
    assert story.wait(599.0) == []
    assert story.wait(1.0) == ["over for a: 81", "over for b: 81"]
    assert story.come("c") == ["over for c: 81"]


def test_a_node_that_dies_between_joining_and_the_first_cycle_has_no_place() -> None:
    story = Story(2, 2)
    story.come("b")
    story.lost("b")
    assert story.come("a") == []
    assert story.come("c") == ["cycle 0: ac"]


def test_an_arrival_that_was_sent_twice_changes_nothing() -> None:
    story = running("ab", maximum=3)
    assert story.machine.on(node("b", 1), story.now) == []
    assert story.machine.phase is Phase.RUNNING
    story.come("c", rank=-1)
    assert story.machine.on(node("c", 1), story.now) == []


# Failures.


def test_members_that_are_all_back_go_on_at_once_in_the_same_order() -> None:
    story = running("abc")
    assert story.failed("b") == ["end 0: failed"]
    assert story.failed("a") == []
    assert story.come("cb") == []
    assert story.come("a") == ["cycle 1: abc"]


def test_fewer_than_the_maximum_go_on_at_once_too_when_all_of_them_are_back() -> None:
    story = running("ab", minimum=1, maximum=4)
    story.failed("a")
    assert story.come("ab") == ["cycle 1: ab"]


def test_the_messages_of_an_ended_cycle_change_nothing() -> None:
    story = running("ab")
    story.failed("a")
    story.come("ab")
    for how in EndReason:
        assert story.ended("ab", how, cycle=0) == []
    for action in REQUESTS:
        assert story.asked("ab", action, cycle=0) == []
    assert story.machine.phase is Phase.RUNNING


def test_a_member_that_never_comes_back_is_waited_for_until_the_join_timeout() -> None:
    story = running("abc", minimum=2, join_s=600.0)
    story.failed("a")
    assert story.come("ab") == []
    assert story.wait(599.0) == []
    assert story.wait(1.0) == ["cycle 1: ab"]
    story.failed("a")
    assert story.come("cab") == ["cycle 2: abc"], "the one that was late is welcome again"


def test_a_wait_before_the_restart_is_kept() -> None:
    story = running("ab")
    story.failed("a")
    story.come("a", report=failed("wait 5"))
    assert story.come("b") == []
    assert story.wait(4.0) == []
    assert story.wait(1.0) == ["cycle 1: ab"]


def test_a_wait_longer_than_the_join_timeout_is_kept_too() -> None:
    story = running("ab", join_s=10.0)
    story.failed("a")
    story.come("ab", report=failed("wait 60"))
    assert story.wait(59.0) == []
    assert story.wait(1.0) == ["cycle 1: ab"]


def test_a_fault_that_ends_the_job_ends_it_for_spares_and_the_late_too() -> None:
    story = running("ab", maximum=2)
    story.come("s")
    story.failed("b")
    story.come("a")
    assert story.come("b", report=failed("fatal")) == ["over for s: 3", "over for a: 3", "over for b: 3"]
    assert story.come("z") == ["over for z: 3"]
    assert story.machine.to_leave == {"s", "b", "z"}
    for name in "sbz":
        story.left(name)
    assert story.machine.to_leave == set()


def test_a_member_that_starts_again_without_a_word_ends_the_cycle() -> None:
    story = running("ab")
    assert story.come("b") == ["end 0: failed"]
    assert story.come("a") == ["cycle 1: ab"]


# Whose fault it was.


def restarted_by(story: Story, **reports: FaultReport | None) -> tuple[str, object]:
    """Whose fault was judged, and what was judged."""
    work = []
    for name, report in reports.items():
        story.seq[name] += 1
        work += story.machine.on(node(name, story.seq[name], 0, report=report), story.now)
    place = next(one.answer for one in work if isinstance(one, Reply) and isinstance(one.answer, RankAssigned))
    return place.judgement.node if place.judgement else "", place.reason


def test_the_first_that_failed_by_itself_is_the_cause() -> None:
    story = running("abc")
    story.failed("cba")
    own, collateral = failed(), failed(collateral=True)
    assert restarted_by(story, a=own, b=own, c=collateral) == ("b", "restart 1")


def test_consequences_alone_are_a_fault_when_nobody_is_gone() -> None:
    story = running("abc")
    story.failed("b")
    assert restarted_by(story, a=None, b=failed(collateral=True), c=None)[0] == "b"


def test_consequences_of_a_lost_node_are_nobodys_fault_and_cost_nothing() -> None:
    story = running("abc", minimum=2)
    story.failed("b")
    story.lost("c")
    culprit, reason = restarted_by(story, a=failed(collateral=True), b=failed(collateral=True))
    assert culprit == ""
    assert "boom" in str(reason)
    assert story.formed is None or story.formed.history == {}


@pytest.mark.parametrize(("collateral", "judged"), [(True, ("", "node a: boom")), (False, ("a", "restart 1"))])
def test_a_rank_that_asks_for_a_restart_explains_that_others_lose_it(
    collateral: bool, judged: tuple[str, object]
) -> None:
    """It exits after its request, and the failures of ranks that lose it may be reported first."""
    story = running("ab")
    story.failed("a")
    assert story.asked("b", "restart") == []
    assert restarted_by(story, a=failed(collateral=collateral), b=None) == judged


def test_a_fault_of_its_own_counts_though_a_node_is_gone() -> None:
    story = running("abc", minimum=2)
    story.lost("c")
    assert restarted_by(story, a=failed(collateral=True), b=failed())[0] == "b"


def test_nodes_that_do_not_agree_on_the_exit_code_have_none() -> None:
    seen = []

    def note(case, now):  # type: ignore[no-untyped-def]
        seen.append(case.report.fault.agreed_exit_code)
        return judge(case, now)

    machine = Coordinator("a", Rules(Size(2, 2)), note, 0.0)
    for message in (node("a"), node("b")):
        machine.on(message, 0.0)
    machine.on(node("a", 2, 0, report=failed(agreed_exit_code=3)), 1.0)
    machine.on(node("b", 2, 0, report=failed(agreed_exit_code=4)), 1.0)
    assert seen == [None]


def test_a_fault_is_charged_once() -> None:
    story = running("ab")
    for cycle in range(1, 4):
        story.failed("b")
        story.come("b", report=failed())
        assert story.come("a") == [f"cycle {cycle}: ab"]
        assert story.formed is not None and story.formed.history == {"restarts": cycle}


def test_ranks_that_agreed_to_exit_are_about_the_one_in_doubt() -> None:
    story = running("abc")
    assert story.ended("ac", EndReason.AGREED) == ["end 0: agreed"]
    doubt = ResultInDoubt("reproducible", 1, 7, "b", "cuda:1")
    assert restarted_by(story, a=failed(), c=failed(), b=failed(doubt=doubt))[0] == "b"


# Preemption.


def test_with_a_preempted_node_all_stop_and_the_job_is_over_when_the_others_are_too_few() -> None:
    story = running("abc")
    assert story.ended("b", EndReason.PREEMPTED) == ["end 0: preempted"]
    assert story.left("b") == []
    assert story.come("a") == []
    assert story.come("c") == ["over for a: 86", "over for c: 86"]


def test_those_that_are_enough_go_on_without_a_preempted_node_at_no_charge() -> None:
    story = running("abc", minimum=2)
    assert story.ended("b", EndReason.PREEMPTED) == ["end 0: preempted"]
    assert story.come("ac") == ["cycle 1: ac"]
    assert story.formed is not None and story.formed.history == {}
    assert story.left("b") == [], "late"


def test_a_spare_takes_the_place_of_a_preempted_node() -> None:
    story = running("ab")
    assert story.come("s") == []
    assert story.ended("a", EndReason.PREEMPTED) == ["end 0: preempted"]
    assert story.come("b") == ["cycle 1: sb"]


def test_all_are_preempted_one_after_the_other() -> None:
    story = running("ab")
    assert story.ended("a", EndReason.PREEMPTED) == ["end 0: preempted"]
    assert story.ended("b", EndReason.PREEMPTED) == []
    assert story.left("a") + story.left("b") == []
    assert story.come("c") == ["over for c: 86"]


def test_ranks_that_were_done_before_their_node_heard_of_a_preemption() -> None:
    story = running("ab", minimum=1)
    assert story.ended("a", EndReason.SUCCEEDED) == []
    assert story.ended("b", EndReason.PREEMPTED) == ["end 0: preempted"]
    assert story.come("a") == ["cycle 1: a"]


def test_the_preemption_of_the_stores_host_ends_the_job() -> None:
    story = running("ab", minimum=1, hosts=True)
    assert story.ended("a", EndReason.PREEMPTED) == ["end 0: preempted 86"]
    assert story.come("b") == ["over for b: 86"]
    assert story.left("a") == []


def test_the_stores_host_is_preempted_while_the_others_run_a_cycle_without_it() -> None:
    """It arrived too late for that cycle: its check took longer than nodes wait for each other."""
    story = running("abc", minimum=2, hosts=True)
    story.failed("b")
    assert story.come("bc") == []
    assert story.wait(600.0) == ["cycle 1: bc"]
    assert story.left("a", signal=15) == ["end 1: preempted 86"]
    assert story.come("bc") == ["over for b: 86", "over for c: 86"]


Setup = Callable[[Story], object]
MOMENTS: dict[str, tuple[Setup, str]] = {
    "its ranks run": (lambda story: None, "ac"),
    "it has a new place and has not read that": (lambda story: story.failed("b") + story.come("acb"), "ac"),
    "its rank failed": (lambda story: story.failed("b"), "ac"),
    "its rank failed and it waits for a place": (lambda story: story.failed("b") + story.come("b"), "ac"),
    "its rank failed and another waits": (lambda story: story.failed("b") + story.come("c"), "a"),
    "its rank failed and all others wait": (lambda story: story.failed("b") + story.come("ac"), ""),
    "a rank of another failed": (lambda story: story.failed("a"), "ac"),
    "a rank of another failed and it waits": (lambda story: story.failed("a") + story.come("b"), "ac"),
    "a rank of another failed and that waits": (lambda story: story.failed("a") + story.come("ba"), "c"),
    "it was reported preempted": (lambda story: story.ended("b", EndReason.PREEMPTED), "ac"),
    "a restart was asked for": (lambda story: story.asked("a", "restart"), "ac"),
}
"""Moment at which node b of a, b and c is told to end -> what comes to it, and who has still to arrive afterwards."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("minimum", "told"), [(3, ["over for a: 86", "over for c: 86"]), (2, ["cycle 1: ac"])])
def test_a_node_that_is_told_to_end_is_heard_at_every_moment(moment: str, minimum: int, told: list[str]) -> None:
    story = running("abc", minimum=minimum)
    happens, to_come = MOMENTS[moment]
    happens(story)
    lines = story.left("b", signal=15) + story.come(to_come)
    lines = [line.replace("cycle 2", "cycle 1") for line in lines if not line.startswith("end")]
    assert sorted(lines) == told, "and nobody waits for the join timeout"


@pytest.mark.parametrize("moment", ["its ranks run", "its rank failed", "its rank failed and another waits"])
def test_the_host_of_the_store_that_is_told_to_end_is_heard_at_every_moment(moment: str) -> None:
    story = running("abc", minimum=1, me="b", hosts=True)
    happens, to_come = MOMENTS[moment]
    happens(story)
    lines = story.left("b", signal=15)
    assert "end 0: preempted 86" in lines, "the ranks of the others may save"
    over = [line for line in lines + story.come(to_come) if line.startswith("over")]
    assert sorted(over) == ["over for a: 86", "over for c: 86"]


def test_with_keep_healthy_a_node_that_failed_and_is_told_to_end_is_heard() -> None:
    story = running("abc", minimum=2, keep_healthy=True)
    assert story.failed("b") == []
    assert story.left("b", signal=15) == [], "the others are enough"
    assert story.failed("a") == ["end 0: failed"]
    assert story.come("ac") == ["cycle 1: ac"]


@pytest.mark.parametrize("signal", [0, 15])
def test_a_node_without_a_place_that_leaves_ends_nothing(signal: int) -> None:
    story = Story(2, 2)
    story.come("b")
    assert story.left("b", signal) == []
    assert story.come("ac") == ["cycle 0: ac"]
    assert story.come("s") + story.left("s", signal) == [], "a spare"
    story.ended("a", EndReason.SUCCEEDED)
    assert story.left("a", signal) == [], "its ranks are done"
    assert story.ended("c", EndReason.SUCCEEDED) == ["end 0: succeeded 0"]
    assert story.left("c", signal) == []


LEAVING: dict[str, tuple[dict[str, object], Setup]] = {
    "all are preempted": (
        {"hosts": True},
        lambda story: story.ended("b", EndReason.PREEMPTED) + story.ended("a", EndReason.PREEMPTED),
    ),
    "it is preempted and the others end": (
        {"minimum": 1},
        lambda story: story.ended("b", EndReason.PREEMPTED) + story.come("a") + story.ended("a", EndReason.SUCCEEDED),
    ),
    "it leaves as its rank has asked": (
        {"hosts": True},
        lambda story: story.asked("b", "exclude_this_node") + story.left("a"),
    ),
}
"""How the job ends while node b of a and b is still to leave, and does not wait to be told of that end."""


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("goes", ["leaves", "is lost"])
def test_who_is_leaving_when_the_job_ends_is_waited_for(how: str, goes: str) -> None:
    """Its last message would meet a store that is gone, and a scheduler kills a launcher that takes long to end."""
    rules, happens = LEAVING[how]
    story = running("ab", **rules)  # type: ignore[arg-type]
    happens(story)
    assert story.machine.phase is Phase.OVER
    assert story.machine.to_leave == {"b"} and "b" in story.machine.nodes, "its loss is noticed, too"
    is_preempted = "preempted" in how
    assert story.machine.may_return("b") is not is_preempted
    if goes == "leaves":
        story.left("b")
    else:
        story.lost("b")
    assert story.machine.to_leave == set() and "b" not in story.machine.nodes


def test_who_was_refused_just_before_the_end_is_waited_for() -> None:
    story = running("ab", hosts=True)
    assert story.come("s", rank=7) == ["over for s: 2"]
    story.ended("ab", EndReason.SUCCEEDED)
    story.left("b")
    assert story.machine.to_leave == {"s"}
    story.left("s")
    assert story.machine.to_leave == set()


@pytest.mark.parametrize("signal", [0, 15])
def test_who_has_left_before_the_end_is_not_waited_for(signal: int) -> None:
    story = running("ab", minimum=1, hosts=True)
    story.left("b", signal)
    story.ended("a", EndReason.PREEMPTED, cycle=0)
    assert story.machine.phase is Phase.OVER and story.machine.to_leave == set()


GONE: dict[str, Setup] = {
    "it is lost": lambda story: story.lost("b"),
    "it leaves": lambda story: story.left("b"),
    "its ranks are done": lambda story: story.ended("b", EndReason.SUCCEEDED, cycle=0),
    "its ranks failed and it waits for a place": lambda story: story.failed("b") + story.come("b"),
    "it leaves after a preemption of its own": lambda story: story.ended("b", EndReason.PREEMPTED) + story.left("b"),
}
"""How the ranks of node b come to their end without its word, which it has for a preemption that it hears of."""


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("how", GONE)
@pytest.mark.parametrize("rules", [{}, {"hosts": True}, {"minimum": 1, "keep_healthy": True}])
def test_a_preempted_node_is_told_whose_ranks_have_ended(how: str, is_before: bool, rules: dict[str, object]) -> None:
    """It may host a store, and stay for them."""
    story = running("abc", **rules)  # type: ignore[arg-type]
    if is_before:
        GONE[how](story)
    story.ended("a", EndReason.PREEMPTED, cycle=0)
    if not is_before:
        assert story.without_ranks == ""
        GONE[how](story)
    assert story.without_ranks.replace("11", "1") == "1", "not of c, whose ranks save"


def test_without_a_preemption_nobody_asks_whose_ranks_have_ended() -> None:
    story = running("abc", minimum=1)
    story.failed("c")
    story.lost("b")
    story.come("ac")
    story.ended("a", EndReason.SUCCEEDED)
    story.left("c")
    assert story.without_ranks == ""


# Losses, spares and size.


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    story = running("abc")
    assert story.come("s") == []
    assert story.lost("b") == ["end 0: lost"]
    assert story.come("a") == []
    assert story.come("c") == ["cycle 1: asc"]
    assert story.come("b") == [], "the lost one returns as a spare"
    story.failed("a")
    assert story.come("cas") == ["cycle 2: asc"]


def test_without_a_spare_the_replacement_is_waited_for() -> None:
    story = running("ab", last_call_s=30.0)
    story.lost("a")
    assert story.come("b") == []
    assert story.come("n") == ["cycle 1: nb"]


def test_survivors_above_the_minimum_go_on_at_once_and_grow_when_one_comes() -> None:
    story = running("abc", minimum=2, maximum=3)
    story.lost("a")
    assert story.come("bc") == ["cycle 1: bc"]
    assert story.come("n") == ["end 1: grew"]
    assert story.come("bc") == ["cycle 2: bcn"]


def test_growth_below_the_maximum_waits_for_the_last_call() -> None:
    story = running("ab", minimum=1, maximum=4, last_call_s=30.0)
    story.come("c")
    assert story.wait(29.0) == []
    assert story.wait(1.0) == ["end 0: grew"]
    assert story.come("ab") == ["cycle 1: abc"]


def test_a_node_that_goes_before_it_was_let_in_ends_nothing() -> None:
    story = running("ab", minimum=1, maximum=4, last_call_s=30.0)
    story.come("c")
    story.wait(20.0)
    story.left("c")
    assert story.wait(100.0) == []


def test_no_growth_where_it_is_not_wanted_nor_when_a_node_is_done() -> None:
    story = running("ab", minimum=1, maximum=4, may_grow=False)
    story.come("cd")
    assert story.wait(100.0) == []
    story = running("ab", minimum=1, maximum=3)
    story.ended("a", EndReason.SUCCEEDED)
    assert story.come("c") == []
    assert story.ended("b", EndReason.SUCCEEDED) == ["end 0: succeeded 0", "over for c: 0"]


def test_no_shrinking_where_it_is_not_wanted() -> None:
    story = running("abc", minimum=1, may_shrink=False, join_s=600.0)
    story.lost("b")
    assert story.come("ac") == []
    assert story.come("n") == ["cycle 1: anc"]
    story.lost("a")
    story.come("nc")
    assert story.wait(600.0) == ["over for n: 84", "over for c: 84"]


def test_all_nodes_are_lost_and_replaced() -> None:
    story = running("abc", minimum=2, last_call_s=30.0)
    assert story.lost("a") == ["end 0: lost"]
    assert story.lost("b") == story.lost("c") == []
    assert story.come("xy") == []
    assert story.wait(30.0) == ["cycle 1: xy"]
    assert story.come("z") == ["end 1: grew"]


def test_a_lost_node_that_only_slept_has_its_place_again() -> None:
    story = running("abc")
    story.lost("b")
    story.come("ac")
    assert story.come("b") == ["cycle 1: abc"]


def test_a_second_loss_while_forming_is_heeded() -> None:
    story = running("abcd", minimum=2)
    story.lost("b")
    story.come("ac")
    assert story.lost("d") == ["cycle 1: ac"]


def test_a_node_that_leaves_ends_the_cycle_and_not_the_job() -> None:
    story = running("ab", minimum=1)
    assert story.left("b") == ["end 0: left"]
    assert story.come("a") == ["cycle 1: a"]


# min-healthy.


def test_with_keep_healthy_the_cycle_goes_on_until_the_minimum_is_lost() -> None:
    story = running("abcd", minimum=2, maximum=4, keep_healthy=True)
    assert story.failed("a") == []
    assert story.come("a", report=failed()) == []
    assert story.wait(100.0) == []
    assert story.lost("b") == []
    assert story.failed("c") == ["end 0: failed"]
    assert story.come("c") == []
    assert story.come("d") == ["cycle 1: acd"]


def test_with_keep_healthy_a_node_that_comes_waits_for_the_next_formation() -> None:
    """So a lost node costs one restart, whether another comes before the formation or after it."""
    story = running("abc", minimum=2, maximum=3, keep_healthy=True)
    story.lost("c")
    assert story.failed("b") == ["end 0: failed"]
    assert story.come("ab") == ["cycle 1: ab"]
    assert story.come("d") == [] and story.wait(100.0) == []
    assert story.lost("b") == ["end 1: lost"]
    assert story.come("e") == [] and story.come("a") == ["cycle 2: ade"]


def test_with_keep_healthy_members_that_are_gone_are_named() -> None:
    """By node rank: the others keep theirs."""
    story = running("abcd", minimum=2, maximum=4, keep_healthy=True)
    before = story.machine.standing()
    story.lost("c")
    members = story.machine.members()
    assert (len(members.active), members.gone) == (4, [2]) and story.machine.standing() != before
    story.failed("a")
    story.come("a")
    members = story.machine.members()
    assert (len(members.active), len(members.waiting), members.gone) == (4, 1, [0, 2])


def test_with_keep_healthy_the_rest_may_succeed_alone() -> None:
    story = running("abc", minimum=2, keep_healthy=True)
    story.ended("a", EndReason.SUCCEEDED)
    story.failed("b")
    assert story.ended("c", EndReason.SUCCEEDED) == ["end 0: succeeded 0"]
    assert story.come("b") == ["over for b: 0"]


# Success, requests, and the end.


def test_the_job_is_over_when_all_have_succeeded() -> None:
    story = running("ab")
    assert story.ended("b", EndReason.SUCCEEDED) == []
    assert story.ended("a", EndReason.SUCCEEDED) == ["end 0: succeeded 0"]
    assert story.come("z") == ["over for z: 0"]


def test_a_member_that_succeeded_and_is_then_lost_is_no_loss() -> None:
    story = running("abc")
    story.ended("b", EndReason.SUCCEEDED)
    assert story.lost("b") == []
    assert story.ended("ac", EndReason.SUCCEEDED) == ["end 0: succeeded 0"]


def test_a_failure_after_another_node_is_done_begins_the_cycle_again() -> None:
    story = running("ab")
    story.ended("b", EndReason.SUCCEEDED)
    assert story.failed("a") == ["end 0: failed"]
    assert story.come("ab") == ["cycle 1: ab"]
    assert story.ended("a", EndReason.SUCCEEDED) == []


@pytest.mark.parametrize(
    ("action", "ended", "arrived"),
    [
        ("stop_job", ["end 0: stop 95", "over for s: 95"], ["over for a: 95", "over for b: 95"]),
        ("restart", ["end 0: restart"], ["cycle 1: ab"]),
        ("exclude_this_node", ["end 0: left"], ["cycle 1: as", "over for b: 94"]),
        ("dance", [], []),
    ],
)
def test_a_request_of_a_rank(action: str, ended: list[str], arrived: list[str]) -> None:
    story = running("ab", maximum=2)
    story.come("s")
    assert story.asked("b", action) == ended
    if ended:
        assert story.come("ab") == arrived


@pytest.mark.parametrize(
    ("action", "asked", "arrived"),
    [
        ("stop_job", ["over for a: 95"], ["over for b: 95"]),
        ("restart", [], ["cycle 1: ab"]),
        ("exclude_this_node", [], ["over for b: 94"]),
    ],
)
def test_a_request_that_comes_after_a_failure(action: str, asked: list[str], arrived: list[str]) -> None:
    """The end of the job, and that of a node, are not lost with the cycle that they ended."""
    story = running("ab")
    story.failed("a")
    story.come("a")
    assert story.asked("b", action) == asked
    assert story.come("b") == arrived


def test_the_host_of_the_store_leaves_as_its_rank_has_asked() -> None:
    story = running("ab", hosts=True)
    assert story.asked("a", "exclude_this_node") == ["end 0: left 82"]
    assert story.come("ab") == ["over for a: 94", "over for b: 82"]


def test_a_node_that_leaves_as_asked_is_told_so_by_another_coordinator_too() -> None:
    """The first one had decided so, formed the next cycle, and died before the node arrived."""
    story = running("abc", minimum=2)
    story.asked("c", "exclude_this_node")
    assert story.come("ab") == ["cycle 1: ab"]
    story.taken_over("b")
    assert story.come("c") == ["over for c: 94"]
    story.left("c")
    assert story.machine.formed().owed == {}


def test_the_job_ends_with_the_host_of_its_store() -> None:
    story = running("ab", hosts=True)
    story.come("s")
    assert story.left("a") == ["end 0: left 82", "over for s: 82"]
    story = running("ab", hosts=True)
    story.failed("a")
    assert story.left("a") == ["end 0: left 82"]
    assert story.come("b") == ["over for b: 82"]


def test_a_node_that_was_told_and_dies_is_not_waited_for() -> None:
    story = running("ab", maximum=2)
    story.come("s")
    story.ended("ab", EndReason.SUCCEEDED)
    assert story.machine.nodes >= {"b", "s"}
    story.lost("s")
    story.lost("b")
    assert story.machine.to_leave == set()


# Ranks that nodes insist on.


def test_the_second_node_of_one_rank_is_refused_when_the_first_is_alive() -> None:
    story = Story(3, 3, rank_claim_s=17.0)
    story.come("a", rank=0)
    story.come("b", rank=1)
    assert story.come("x", rank=1) == []
    assert story.wait(16.0) == []
    assert story.wait(1.0) == ["over for x: 2"]
    assert story.come("y", rank=0) == ["over for y: 2"], "the coordinator itself is surely alive"
    assert story.come("z", rank=3) == ["over for z: 2"]
    assert story.come("c", rank=2) == ["cycle 0: abc"]


def test_the_second_node_of_one_rank_takes_it_when_the_first_was_dead() -> None:
    story = Story(2, 2, rank_claim_s=17.0)
    story.come("a", rank=0)
    story.come("b", rank=1)
    assert story.come("x", rank=1) == []
    assert story.lost("b") == ["end 0: lost"]
    assert story.come("a", rank=0) == ["cycle 1: ax"] or story.wait(1.0) == ["cycle 1: ax"]


def test_a_doubtful_node_hears_of_the_end_too() -> None:
    story = running("ab")
    story.come("s")
    story = Story(2, 2, rank_claim_s=17.0)
    story.come("a", rank=0)
    story.come("b", rank=1)
    story.come("x", rank=1)
    assert story.ended("ab", EndReason.SUCCEEDED) == ["end 0: succeeded 0", "over for x: 0"]
    assert story.machine.next_deadline() is None


# Take-over.


def test_a_take_over_tells_the_places_again_and_goes_on() -> None:
    story = running("abc", minimum=2)
    assert story.taken_over(by="b") == ["cycle 0: abc"]
    assert story.lost("a") == ["end 0: lost"]
    assert story.come("bc") == ["cycle 1: bc"]
    assert story.formed is not None and story.formed.term == 2
    assert story.come("a") == [], "its previous coordinator is gone under that name"


def test_messages_of_every_coordinator_before_are_those_of_the_dead() -> None:
    story = running("abc", minimum=2)
    story.taken_over(by="b")
    story.lost("a")
    story.taken_over(by="c")
    story.lost("b")
    story.lost("a")
    assert story.come("a") == story.come("b") == story.come("c") == []
    assert story.come("d") == ["cycle 1: dc"], "neither of those that are gone is counted"


def test_a_take_over_knows_who_waits_and_what_was_charged() -> None:
    story = running("ab", maximum=2)
    story.failed("b")
    story.come("s")
    story.come("b", report=failed())
    assert story.come("a") == ["cycle 1: ab"]
    story.taken_over(by="b")
    story.lost("a")
    assert story.come("b") == ["cycle 2: sb"]
    assert story.formed is not None and story.formed.history == {"restarts": 1}


def test_a_take_over_after_the_end_tells_the_end_again_and_to_the_late() -> None:
    story = running("ab", maximum=2)
    story.come("s")
    story.ended("ab", EndReason.SUCCEEDED)
    assert story.taken_over(by="z")[:1] == ["end 0: succeeded 0"]
    assert story.come("z") == ["over for z: 0"]
    assert story.lost("a") == []


def test_a_take_over_from_itself_does_not_forget_itself() -> None:
    story = running("ab")
    story.taken_over(by="a")
    story.failed("a")
    assert story.come("ab") == ["cycle 1: ab"]


def test_rank_0_alone_learns_the_names_of_all() -> None:
    machine = coordinator(2, 3, held_back=1)
    work = [one for name in "abc" for one in machine.on(node(name), 0.0)] + machine.on_tick(30.0)
    places = {one.node: one.answer for one in work if isinstance(one, Reply) and isinstance(one.answer, RankAssigned)}
    assert {name: (place.active, place.standby) for name, place in places.items()} == {
        "a": (["a", "b"], ["c"]),
        "b": ([], []),
    }
