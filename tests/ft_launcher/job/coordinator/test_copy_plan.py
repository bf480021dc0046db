"""Which node keeps whose copies, and what each fetches: tables, and what holds for any nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.job.coordinator.copy_plan import plan_copies
from ft_launcher.job.coordinator.node_messages import JoinRequest
from rank_monitor.contract.copy_records import CopyOffer, CopyPlan, HeldState
from tests.ft_launcher.job.nodes_of_a_test import node


def state(text: str, world: int = 2) -> HeldState:
    """`5a0` is step 5 of series a of rank 0, in the node's own folder; `5a0'` a copy of it."""
    return HeldState(int(text[0]), world, text[1], [int(text[2])], is_own=not text.endswith("'"))


def member(name: str, states: str = "", group: str = "", buddies: int = 1, port: int = 1) -> JoinRequest:
    """A node of one rank that makes an offer."""
    return node(name, group=group, nprocs=1, copies=CopyOffer(port, buddies, [state(each) for each in states.split()]))


def plans_of(
    members: Sequence[JoinRequest], waiting: Sequence[JoinRequest] = (), set_aside_from: int = 0
) -> dict[str, CopyPlan]:
    set_aside = {1: set_aside_from} if set_aside_from else {}
    return plan_copies(members, waiting, list(range(len(members))), set_aside)


def targets(plans: dict[str, CopyPlan]) -> str:
    return " ".join(f"{name}:{''.join(peer.name for peer in plan.targets)}" for name, plan in plans.items())


@pytest.mark.parametrize(
    ("nodes", "buddies", "expected"),
    [
        ("a", 1, "a:"),
        ("a b", 1, "a:b b:a"),
        ("a b", 2, "a:b b:a"),
        ("a b c", 1, "a:b b:c c:a"),
        ("a b c", 2, "a:bc b:ac c:ab"),
        ("a b", 0, "a: b:"),
        # Nodes of another group first, and none of them twice as often as another.
        ("a1 b1 c2 d2", 1, "a1:c2 b1:d2 c2:a1 d2:b1"),
        ("a1 b2 c1 d2", 1, "a1:b2 b2:c1 c1:d2 d2:a1"),
        ("a1 b1 c2", 1, "a1:c2 b1:c2 c2:a1"),
        # All in one group: the next node all the same.
        ("a1 b1 c1", 1, "a1:b1 b1:c1 c1:a1"),
    ],
)
def test_a_node_sends_its_states_to_the_next_of_another_group(nodes: str, buddies: int, expected: str) -> None:
    members = [member(name, group=name[1:], buddies=buddies) for name in nodes.split()]
    assert targets(plans_of(members)) == expected


def test_a_node_that_makes_no_offer_neither_sends_nor_receives() -> None:
    members = [member("a"), node("b", nprocs=1), member("c")]
    assert targets(plans_of(members)) == "a:c c:a"
    assert plans_of([node("a"), node("b")]) == {}


def test_a_node_knows_whose_states_come() -> None:
    plans = plan_copies([member("a"), member("b"), member("c", buddies=0)], [], [0, 4, 8], {})
    assert {name: plan.receives for name, plan in plans.items()} == {"a": [], "b": [[0]], "c": [[4]]}


@pytest.mark.parametrize(
    ("members", "waiting", "set_aside_from", "expected"),
    [
        # Nothing is missing, or nothing is there.
        (["5a0", "5a1"], [], 0, {}),
        (["", ""], [], 0, {}),
        # The copy of the lost node is fetched.
        (["5a0 5a1'", ""], [], 0, {"n1": (5, "a", ["n0"])}),
        # Also from a node that waits: ranks have moved.
        (["5a0", ""], ["5a1"], 0, {"n1": (5, "a", ["w0"])}),
        (["5a0 5a1'", ""], ["5a1"], 0, {"n1": (5, "a", ["w0", "n0"])}),
        # The newest that all can have, and not the newest of all.
        (["5a0 9a0 5a1'", ""], [], 0, {"n1": (5, "a", ["n0"])}),
        (["5a0 9a0 5a1' 9a1'", ""], [], 0, {"n1": (9, "a", ["n0"])}),
        # One that a node has does not help where another node's part is nowhere.
        (["5a0", ""], [], 0, {}),
        # Two series are never put together.
        (["5a0 5b1'", ""], [], 0, {}),
        # The own copy is enough: places were exchanged.
        (["5a1 5a0'", "5a0 5a1'"], [], 0, {"n0": (5, "a", ["n1"]), "n1": (5, "a", ["n0"])}),
        # Bad states do not come back.
        (["5a0 9a0 5a1' 9a1'", ""], [], 9, {"n1": (5, "a", ["n0"])}),
        (["9a0 9a1'", ""], [], 9, {}),
    ],
)
def test_a_node_fetches_its_part_of_the_newest_state_that_all_can_have(
    members: list[str], waiting: list[str], set_aside_from: int, expected: dict[str, tuple[int, str, list[str]]]
) -> None:
    plans = plans_of(
        [member(f"n{at}", states) for at, states in enumerate(members)],
        [member(f"w{at}", states) for at, states in enumerate(waiting)],
        set_aside_from,
    )
    fetches = {name: plan.fetch for name, plan in plans.items() if plan.fetch is not None}
    found = {name: (one.step, one.series, [peer.name for peer in one.peers]) for name, one in fetches.items()}
    assert found == expected


def test_bad_states_of_a_node_that_was_away_do_not_come_back() -> None:
    """In the cycle after the one that was formed without them, too: that node has marked nothing."""
    was_there = node("a", nprocs=1, cycle=3, copies=CopyOffer(1, 1, [state("5a0"), state("5a1'")]))
    away = node("c", nprocs=1, cycle=1, copies=CopyOffer(1, 1, [state("9a0'"), state("9a1")]))
    members = [was_there, member("b")]

    def fetched(set_aside: dict[int, int]) -> int:
        plans = plan_copies(members, [away], [0, 1], set_aside)
        fetch = plans["b"].fetch
        assert fetch is not None
        return fetch.step

    assert fetched({}) == 9
    assert fetched({2: 8}) == 5
    assert fetched({1: 8}) == 9, "it was in that cycle, so it has marked what was bad then"
    again = node("a", nprocs=1, cycle=3, copies=CopyOffer(1, 1, [state("9b0"), state("9b1'")]))
    assert plan_copies([again, member("b")], [], [0, 1], {2: 8})["b"].fetch is not None, "computed again"


def test_states_of_another_number_of_ranks_are_not_fetched() -> None:
    states = [state("5a0", world=4), state("5a1", world=4)]
    members = [node("a", nprocs=1, copies=CopyOffer(1, 1, states)), member("b")]
    assert plans_of(members)["b"].fetch is None


@given(st.lists(st.tuples(st.sampled_from(["", "1", "2", "3"]), st.integers(0, 3), st.booleans()), max_size=12))
def test_no_node_gets_much_more_than_the_others_or_its_own(nodes: list[tuple[str, int, bool]]) -> None:
    members = [
        member(f"n{at}", group=group, buddies=buddies) if offers else node(f"n{at}")
        for at, (group, buddies, offers) in enumerate(nodes)
    ]
    offering = [one.node for one in members if one.copies is not None]
    for name, plan in plans_of(members).items():
        to = [peer.name for peer in plan.targets]
        buddies = nodes[int(name[1:])][1]
        assert len(set(to)) == len(to) == min(buddies, len(offering) - 1)
        assert name not in to
        assert set(to) <= set(offering)
