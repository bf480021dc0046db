"""Who goes on in process, and when level 2 takes over: tables of what ranks say and of deaths."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ft_launcher.agent.in_process.recovery_level import MAX_STARTS, RecoveryLevels, RecoveryState
from ft_launcher.agent.in_process.recovery_record import decide_again, to_record
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
from rank_monitor.contract.wire.messages import RestartReport
from tests.restart_reports import report

LIMIT_S = 30.0
PREFIX = "call/0"


@dataclass
class Node:
    """Local ranks 0, 1, ... that are ranks 4, 5, ...; a second passes with each event."""

    ranks: int = 3
    enabled: bool = True
    rejoin: bool = True
    now: float = 0.0

    def __post_init__(self) -> None:
        state = RecoveryState.at_start(range(4, 4 + self.ranks), self.rejoin, {16, 17})
        self.levels = RecoveryLevels(state, self.enabled)

    def on(self, happened: Happened, now: float | None = None) -> list[Step] | None:
        """Takes what happened; what the journal holds of it must lead to the same steps."""
        at = self.now if now is None else now
        known = self.levels.known()
        steps = self.levels.on(happened, at)
        if self.enabled:
            record = json.loads(json.dumps(to_record(happened, known, steps, at)))
            assert decide_again(record["happened"], record["known"]) == record["follows"]
        return steps

    def say(self, phase: str, *local_ranks: int, number: int = 0, prefix: str = PREFIX) -> list[Step]:
        """These ranks report it (all that are there, if none is named), in that round; returns what follows."""
        found = list[Step]()
        for local_rank in local_ranks or range(self.ranks):
            self.now += 1
            found += self.on(Reported(local_rank, reported(phase, local_rank, number, call_prefix=prefix))) or []
        return found

    def die(self, local_rank: int, exit_code: int = -9) -> list[Step] | None:
        self.now += 1
        return self.on(Died(local_rank, exit_code))

    def loss_notified(self, local_rank: int, problem: str = "") -> list[Step]:
        self.now += 1
        return self.on(LossNotified(local_rank, problem)) or []

    def tick(self, now: float) -> list[Step]:
        return self.on(DeadlinePassed(), now) or []

    def restart(self, *local_ranks: int, number: int = 1) -> list[Step]:
        """These deal with a fault to the end, until round `number` runs."""
        found = list[Step]()
        for phase in ("interrupting", "recovering", "finalizing", "closing"):
            found += self.say(phase, *local_ranks, number=number - 1)
        for phase in ("assigning", "arriving", "running"):
            found += self.say(phase, *local_ranks, number=number)
        return found


def reported(phase: str, local_rank: int, number: int = 0, **others: Any) -> RestartReport:
    return report(
        phase, round=number, entry_rank=4 + local_rank, **({"call_prefix": PREFIX, "limit_s": LIMIT_S} | others)
    )


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    assert node.say("assigning") == []
    return node


def notify(local_rank: int, joins: bool = False) -> NotifyLoss:
    return NotifyLoss(local_rank, 4 + local_rank, PREFIX, LIMIT_S, joins)


def taken_over(steps: list[Step] | None) -> str:
    """The reason, where level 2 takes over and nothing else happens."""
    assert steps is not None
    (step,) = steps
    assert isinstance(step, TakeOver)
    return step.reason


# Deaths.

DEATHS = {
    "at the start": (["assigning"], 1),
    "while a fault is dealt with": (["assigning", "recovering"], 1),
    "after a restart": (["assigning", "recovering", "running"], 0),
}


@pytest.mark.parametrize(("states", "code"), DEATHS.values(), ids=list(DEATHS))
def test_rung_one_takes_a_death_in_the_wrapped_function(states: list[str], code: int) -> None:
    node = Node()
    for number, phase in enumerate(states):
        node.say(phase, number=number)
    assert node.die(1, code) == [notify(1)]
    assert node.levels.lost == {1}


@pytest.mark.parametrize("code", [0, 1, -9])
@pytest.mark.parametrize("state", ["", "done"])
def test_a_death_outside_of_it_is_as_without_wrappers(node: Node, state: str, code: int) -> None:
    node = Node() if not state else node
    if state:
        node.say(state)
    assert node.die(1, code) is None
    assert node.levels.lost == set()


def test_off(node: Node) -> None:
    node = Node(enabled=False)
    node.say("assigning")
    assert not node.levels.is_declared(1)
    assert node.die(1) is None


@pytest.mark.parametrize("code", [16, 17])
@pytest.mark.parametrize("state", ["assigning", "left"])
def test_codes_for_the_launcher_reach_it(node: Node, state: str, code: int) -> None:
    node.say(state, 1)
    assert node.die(1, code) is None


def test_a_store_that_the_launcher_cannot_reach() -> None:
    node = Node()
    node.say("assigning", prefix="")
    assert node.die(0, 0) is None
    assert "store" in taken_over(node.die(1))


@pytest.mark.parametrize("what", ["never came", "is done", "is in another call"])
def test_all_must_be_in_the_same_call(what: str) -> None:
    node = Node()
    node.say("assigning", 0, 1)
    if what != "never came":
        node.say("done" if what == "is done" else "assigning", 2, prefix=PREFIX if "done" in what else "call/1")
    assert "rank 6 is not in the wrapped function" in taken_over(node.die(1))


def test_the_last_one() -> None:
    node = Node(2)
    node.say("assigning")
    assert node.die(0) == [notify(0)]
    assert "no rank of this node goes on" in taken_over(node.die(1))


def test_ranks_that_end_without_a_word_and_well_are_a_success() -> None:
    node = Node(2)
    node.say("assigning")
    assert node.die(0, 0) == [notify(0)]
    assert node.die(1, 0) is None


def test_the_others_could_not_be_told(node: Node) -> None:
    node.die(1)
    assert "the store is gone" in taken_over(node.loss_notified(1, "the store is gone"))


def test_a_rank_that_leaves_is_lost_whatever_its_code(node: Node) -> None:
    node.say("left", 1)
    assert node.die(1, 3) == []
    assert node.levels.lost == {1}
    node.say("left", 2)
    assert node.die(2, 0) == []
    assert node.say("left", 0) == []
    assert "no rank" in taken_over(node.die(0, 1))


def test_a_rank_that_leaves_late_does_not_spoil_success(node: Node) -> None:
    node.say("left", 1)
    node.say("done", 0, 2)
    assert [node.die(0, 0), node.die(2, 0), node.die(1, 1)] == [None, None, []]


def test_the_last_that_leaves_and_does_not_end() -> None:
    node = Node(1)
    node.say("assigning")
    node.say("left")
    due = node.levels.next_check()
    assert due is not None and node.tick(due - 0.1) == []
    assert "no rank" in taken_over(node.tick(due))


def test_a_wrapper_that_gives_up_ends_rung_one_with_the_exit_code_if_that_comes_soon(node: Node) -> None:
    node.say("gave_up", 1)
    due = node.levels.next_check()
    assert due is not None and node.tick(due - 0.1) == []
    assert "rank 5 gave up" in taken_over(node.tick(due))
    assert "rank 5 gave up" in taken_over(node.die(1, 1))


def test_the_reason_with_which_a_wrapper_gave_up_is_passed_on() -> None:
    node = Node()
    node.say("recovering")
    gave_up = reported("gave_up", 1, reason="the same error 3 times")
    node.on(Reported(1, gave_up))
    assert "rank 5 gave up: the same error 3 times" in taken_over(node.die(1, 1))


@pytest.mark.parametrize("last", ["running", "left"])
def test_that_reason_is_told_also_where_the_end_of_another_rank_is_known_first(last: str) -> None:
    node = Node()
    node.say("recovering")
    node.on(Reported(1, reported("gave_up", 1, reason="the same error 3 times")))
    for other in (0, 2):
        node.say(last, other, number=1)
    node.die(2, 1)
    assert "rank 5 gave up: the same error 3 times" in taken_over(node.die(0, 1))


# The limit.


def test_each_rank_owes_the_end_of_a_restart_within_its_limit(node: Node) -> None:
    node.say("recovering", 0)
    since = node.now
    node.say("recovering", 1, 2)
    assert node.levels.next_check() == since + LIMIT_S
    node.say("running", 1, 2, number=1)
    assert node.tick(since + LIMIT_S - 0.1) == []
    reason = node.tick(since + LIMIT_S)
    assert [type(step) for step in reason] == [EndRank], "the others went on without it"
    assert node.tick(since + LIMIT_S) == []
    assert taken_over(node.tick(since + 2 * LIMIT_S))


def test_nobody_comes_to_the_end(node: Node) -> None:
    node.say("recovering")
    assert "rank 4 did not come to the end of the restart within 30 s" in taken_over(node.tick(node.now + 99))


@pytest.mark.parametrize("state", ["running", "done", "left"])
def test_what_pays_the_debt(node: Node, state: str) -> None:
    node.say("recovering", 0, 1)
    node.say("running", 1, 2, number=1)
    assert node.levels.next_check() is not None
    node.say(state, 0, number=1)
    assert node.levels.next_check() is None


def test_the_same_word_once_more_changes_nothing(node: Node) -> None:
    node.say("recovering", 0)
    due = node.levels.next_check()
    assert node.say("recovering", 0) == []
    assert node.levels.next_check() == due


def test_a_restart_ends_when_the_last_rank_has_come_to_it(node: Node) -> None:
    node.die(1)
    since = node.now
    assert node.levels.is_restarting
    assert node.restart(0) == []
    steps = node.restart(2)
    assert steps == [Restarted(1, node.now - since, 0, PREFIX)]
    assert not node.levels.is_restarting


@pytest.mark.parametrize("restarts", [1, 3])
def test_each_restart_is_counted_in_whatever_order_the_ranks_words_come(restarts: int) -> None:
    words = [
        (state, number + (state == "running")) for number in range(restarts) for state in ("recovering", "running")
    ]
    for first in itertools.combinations(range(2 * len(words)), len(words)):
        node = Node(ranks=2)
        node.say("assigning")
        left = {0: iter(words), 1: iter(words)}
        steps = list[Step]()
        for place in range(2 * len(words)):
            rank = 0 if place in first else 1
            phase, number = next(left[rank])
            steps += node.say(phase, rank, number=number)
        assert [(step.number, step.failed) for step in steps if isinstance(step, Restarted)] == [
            (number + 1, number) for number in range(restarts)
        ]
        assert not node.levels.is_restarting


def test_an_old_end_of_a_restart_is_none_of_this_one(node: Node) -> None:
    node.restart()
    node.die(1)
    assert node.say("running", 0, 2, number=1) == []
    assert node.levels.is_restarting


def test_a_silent_rank_without_which_the_others_went_on(node: Node) -> None:
    node.restart(0, 2)
    due = node.levels.next_check()
    assert node.levels.is_restarting and due is not None
    assert [type(step) for step in node.tick(due)] == [EndRank]
    assert node.die(1) == [notify(1)]
    assert [type(step) for step in node.loss_notified(1)] == [Restarted, StartAgain]
    assert not node.levels.is_restarting


def test_a_late_rank_that_is_killed_when_all_is_done(node: Node) -> None:
    node.say("recovering")
    node.say("running", 0, 2, number=1)
    node.say("done", 0, 2, number=1)
    assert [type(step) for step in node.tick(node.now + 99)] == [EndRank]
    assert node.die(1) == []


def test_a_round_that_no_rank_can_be_in_fills_no_memory() -> None:
    """Any number may come from a rank, and stand in a journal."""
    node = Node(ranks=1)
    node.say("recovering")
    steps = node.say("running", number=1 << 60)
    assert 0 < len(steps) <= 100 and steps[-1] == Restarted(1 << 60, 1.0, (1 << 60) - 1, PREFIX)
    assert isinstance(steps[0], Restarted) and steps[0].skipped <= 1_000_000


def test_each_restart_is_counted_that_was_made_while_the_launcher_stood_still(node: Node) -> None:
    """It reads what monitors have kept of it: of each rank the last messages."""
    node.say("recovering")
    steps = node.say("recovering", number=264) + node.say("running", number=265)
    made = [step for step in steps if isinstance(step, Restarted)]
    assert sum(1 + step.skipped for step in made) == 265
    assert [step.number for step in made] == list(range(165, 266))
    assert made[0].skipped == 164 and not any(step.skipped for step in made[1:])


# Ranks that are started again.


def test_a_rank_is_started_again_after_the_restart(node: Node) -> None:
    assert node.die(1) == [notify(1)]
    node.say("recovering", 0, 2)
    assert node.loss_notified(1) == []
    assert node.say("running", 0, number=1) == []
    assert [type(step) for step in node.say("running", 2, number=1)] == [Restarted, StartAgain]


def test_or_when_the_others_are_told_if_that_is_later(node: Node) -> None:
    node.die(1)
    node.restart(0, 2)
    assert node.loss_notified(1) == [StartAgain(1)]


def test_it_takes_part_from_the_next_restart_on(node: Node) -> None:
    node.die(1)
    node.restart(0, 2)
    node.loss_notified(1)
    node.levels.started(1)
    assert node.levels.lost == {1} and node.levels.is_declared(1)
    assert node.say("joining", 1) == []
    assert node.levels.lost == {1}
    node.say("recovering", 0, 2, number=1)
    assert node.say("running", 1, number=2) == [Joined(1, 2)]
    assert node.levels.lost == set()
    assert [type(step) for step in node.say("running", 0, 2, number=2)] == [Restarted]
    assert node.die(1) == [notify(1)]


def newcomer(node: Node, *states: str) -> None:
    """Local rank 1 died, was started again, and said this."""
    node.die(1)
    node.restart(0, 2)
    assert node.loss_notified(1) == [StartAgain(1)]
    node.levels.started(1)
    for state in states:
        node.say(state, 1)


def test_one_that_dies_before_it_says_a_word_is_started_again_so_many_times(node: Node) -> None:
    newcomer(node)
    for _ in range(MAX_STARTS - 1):
        assert node.die(1) == [StartAgain(1)]
        node.levels.started(1)
    steps = node.die(1)
    assert steps == [StayAway(1, "it died 4 times between two restarts")]
    assert node.levels.next_check() is None, "the others go on"


def test_one_that_asked_to_join_withdraws_first(node: Node) -> None:
    newcomer(node, "joining")
    assert node.die(1) == [notify(1, joins=True)]
    assert node.loss_notified(1) == [StartAgain(1)]


def test_one_whose_wish_cannot_be_taken_back_stays_away(node: Node) -> None:
    newcomer(node, "joining")
    node.die(1)
    assert node.loss_notified(1, "no answer") == [StayAway(1, "its request to join could not be cancelled: no answer")]


def test_one_that_ends_well_before_it_is_let_in_is_not_wanted_again(node: Node) -> None:
    newcomer(node, "joining")
    assert node.die(1, 0) == [notify(1, joins=True)]
    assert [type(step) for step in node.loss_notified(1)] == [StayAway]


@pytest.mark.parametrize("code", [0, -9])
@pytest.mark.parametrize("states", [(), ("joining",)], ids=["no word", "joining"])
def test_one_that_ends_when_all_is_done_harms_nobody(node: Node, states: tuple[str, ...], code: int) -> None:
    newcomer(node, *states)
    node.say("done", 0, 2, number=1)
    assert node.die(1, code) == []
    assert node.levels.lost == {1}


def test_one_that_was_let_in_and_discarded(node: Node) -> None:
    newcomer(node, "joining", "left")
    assert node.die(1, 1) == []


def test_newcomers_are_no_ranks_that_go_on(node: Node) -> None:
    newcomer(node, "joining")
    assert node.die(0) == [notify(0)]
    assert "no rank" in taken_over(node.die(2))


def test_without_rejoin_it_stays_lost() -> None:
    node = Node(rejoin=False)
    node.say("assigning")
    node.die(1)
    node.restart(0, 2)
    assert node.loss_notified(1) == []


def test_when_all_is_done_nobody_is_started_again(node: Node) -> None:
    node.die(1)
    node.say("done", 0, 2)
    assert node.loss_notified(1) == []
    assert not node.levels.is_restarting


def test_starts_are_counted_anew_after_each_restart(node: Node) -> None:
    newcomer(node)
    for number in range(2, 6):
        node.restart(0, 2, number=number)
        assert node.die(1) == [StartAgain(1)]
        node.levels.started(1)


def test_the_gone_are_told_again_when_a_further_call_begins() -> None:
    """They will not come to its start; one that is back will."""
    node = Node(ranks=3, rejoin=False)
    node.say("assigning")
    assert node.die(1) == [notify(1)]
    node.loss_notified(1)
    node.restart(0, 2)
    node.say("done", 0, 2, number=1)
    found = node.say("assigning", 0, 2, prefix="call/1")
    assert found == [NotifyLoss(1, 5, "call/1", LIMIT_S, joins=False)]
    assert node.loss_notified(1) == []
