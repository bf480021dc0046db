"""Who holds up the others: tables of scenes, each with the rank that is to blame, and random ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.decide.attribution.collective import find_culprits
from ft_launcher.decide.attribution.fault import HangKind
from ft_launcher.decide.attribution.rank_view import GroupState, RankView, of_record, to_record
from ft_launcher.decide.attribution.scene import Scene
from rank_monitor.contract.wire.messages import NO_ITERATION
from tests.ft_launcher.decide.attribution.simulated_collectives import (
    IN_COLLECTIVE,
    OUTSIDE,
    Locked,
    Op,
    Stopped,
    Stuck,
    SurelyLocked,
    hang,
)

Program = list[Op | Stuck | int]

LAYOUTS = {
    "data parallel, 2": {"world": [0, 1]},
    "data parallel, 8": {"world": list(range(8))},
    "2 x 2 tensor and data parallel": {"tp0": [0, 1], "tp1": [2, 3], "dp0": [0, 2], "dp1": [1, 3]},
    "4 x 2 tensor and data parallel": {
        **{f"tp{row}": [2 * row, 2 * row + 1] for row in range(4)},
        **{f"dp{column}": [column, column + 2, column + 4, column + 6] for column in range(2)},
    },
    "nested groups": {"world": list(range(8)), "node0": [0, 1, 2, 3], "node1": [4, 5, 6, 7]},
    "pipeline of 4 stages": {"p01": [0, 1], "p12": [1, 2], "p23": [2, 3]},
    "pipeline of 2 stages, 2 wide": {"p0": [0, 2], "p1": [1, 3], "dp0": [0, 1], "dp1": [2, 3]},
}
PLACES = [(name, rank) for name, groups in LAYOUTS.items() for rank in sorted(set().union(*groups.values()))]


def programs(groups: dict[str, list[int]], steps: int = 3) -> dict[int, Program]:
    """Each step: one collective in each group, in the order of `groups`."""
    found: dict[int, Program] = {rank: [] for rank in sorted(set().union(*groups.values()))}
    for step in range(steps):
        for rank, program in found.items():
            program.append(step)
            program += [Op(name) for name, members in groups.items() if rank in members]
    return found


def stuck_in_step(groups: dict[str, list[int]], rank: int, what: Stuck, offset: int = 0) -> dict[int, Program]:
    """All run, and one gets stuck in its second step, before its collective number `offset` of it."""
    found = programs(groups)
    at = found[rank].index(1) + 1 + offset
    found[rank] = [*found[rank][:at], what]
    return found


@pytest.mark.parametrize("iterations", [True, False], ids=["iterations", "no iterations"])
@pytest.mark.parametrize(("layout", "rank"), PLACES)
def test_a_rank_that_does_not_come(layout: str, rank: int, iterations: bool) -> None:
    groups = LAYOUTS[layout]
    blame = find_culprits(hang(stuck_in_step(groups, rank, Stuck()), groups, iterations=iterations))
    assert (blame.kind, blame.culprits) == (HangKind.BEHIND, (rank,))
    assert blame.text.startswith("never entered all_reduce 2 of group ")


@pytest.mark.parametrize(("layout", "rank"), PLACES)
def test_a_rank_that_comes_to_the_first_group_only(layout: str, rank: int) -> None:
    groups = LAYOUTS[layout]
    blame = find_culprits(hang(stuck_in_step(groups, rank, Stuck(), offset=1), groups))
    assert (blame.kind, blame.culprits) == (HangKind.BEHIND, (rank,))


@pytest.mark.parametrize(("layout", "rank"), PLACES)
def test_a_rank_that_is_stopped(layout: str, rank: int) -> None:
    groups = LAYOUTS[layout]
    blame = find_culprits(hang(stuck_in_step(groups, rank, Stopped()), groups))
    assert (blame.kind, blame.culprits) == (HangKind.GONE, (rank,))
    assert "is stopped" in blame.text


@pytest.mark.parametrize(("layout", "rank"), PLACES)
def test_a_rank_that_returned_early(layout: str, rank: int) -> None:
    groups = LAYOUTS[layout]
    early = programs(groups)
    early[rank] = early[rank][: early[rank].index(1)]
    blame = find_culprits(hang(early, groups))
    assert (blame.kind, blame.culprits) == (HangKind.GONE, (rank,))
    assert blame.text.startswith("has returned, and never entered all_reduce 2")


@pytest.mark.parametrize(("layout", "rank"), PLACES)
def test_a_rank_that_does_not_come_and_no_recorder(layout: str, rank: int) -> None:
    groups = LAYOUTS[layout]
    views = hang(stuck_in_step(groups, rank, Stuck()), groups, recorder=False)
    blame = find_culprits(views)
    if any(view.ended for view in views):  # the first stage of a pipeline has done its work, or is the cause
        assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())
    else:
        assert (blame.kind, blame.culprits) == (HangKind.BEHIND, (rank,))


@pytest.mark.parametrize(("layout", "rank"), PLACES)
def test_another_operation(layout: str, rank: int) -> None:
    groups = LAYOUTS[layout]
    wrong = programs(groups)
    at = wrong[rank].index(1) + 1
    own = wrong[rank][at]
    assert isinstance(own, Op)
    wrong[rank] = [*wrong[rank][:at], Op(own.group, "broadcast"), *wrong[rank][at + 1 :]]
    blame = find_culprits(hang(wrong, groups))
    if len(groups[own.group]) > 2:
        assert (blame.kind, blame.culprits) == (HangKind.MISMATCH, (rank,))
    else:
        assert (blame.kind, blame.culprits) == (
            HangKind.MISMATCH,
            tuple(groups[own.group]),
        )  # of two either may be wrong
    assert "broadcast" in blame.text
    assert "all_reduce" in blame.text


def test_other_sizes() -> None:
    groups = LAYOUTS["data parallel, 8"]
    wrong = programs(groups)
    wrong[5][1] = Op("world", shape="[[8]] Float")
    blame = find_culprits(hang(wrong, groups))
    assert (blame.kind, blame.culprits) == (HangKind.MISMATCH, (5,))
    assert "[[8]] Float" in blame.text
    assert "[[4]] Float" in blame.text


@pytest.mark.parametrize(("members", "ranks"), [(2, (0, 1)), (4, (0,))])
def test_one_that_differs_has_finished_its_collective(members: int, ranks: tuple[int, ...]) -> None:
    """Rank 0 passed fewer elements to gloo, which let it go on to the next group."""
    states = {"pair": GroupState(4, 4, "all_reduce", "[[2]] Float"), "world": GroupState(4, 3, "all_reduce")}
    views = [RankView(Scene(0, IN_COLLECTIVE), states)]
    for rank in range(1, members):
        inside = {"pair": GroupState(4, 3, "all_reduce", "[[4]] Float"), "world": GroupState(3, 3, "all_reduce")}
        views.append(RankView(Scene(rank, IN_COLLECTIVE), inside))
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits) == (HangKind.MISMATCH, ranks)
    assert blame.text.startswith("is or was in collective 4 of group pair, in which the ranks differ: ")


def test_sizes_of_a_scatter_may_differ() -> None:
    groups = {"world": [0, 1, 2]}
    views = [
        RankView(Scene(rank, IN_COLLECTIVE), {"world": GroupState(2, 1, "scatter", f"[[{rank}]]")})
        for rank in groups["world"]
    ]
    assert find_culprits(views).kind is HangKind.TRANSPORT


CUT_OFF = "[" + ", ".join(["[2, 2]"] * 20)


@pytest.mark.parametrize(
    ("operation", "usual", "odd", "finding"),
    [
        # As many elements in another shape, which torch and NCCL allow.
        ("all_reduce", "[[4]] ['Float']", "[[2, 2]] ['Float']", HangKind.TRANSPORT),
        ("all_reduce", "[[]] ['Float']", "[[1, 1]] ['Float']", HangKind.TRANSPORT),
        ("all_reduce", "[[4]] ['Float']", "[[4]] ['Double']", HangKind.MISMATCH),
        ("all_reduce", "[[2, 2]] ['Float']", "[[2, 3]] ['Float']", HangKind.MISMATCH),
        ("all_reduce", "[[2, 2], [3]] ['Float']", "[[4], [4]] ['Float']", HangKind.MISMATCH),
        # What the monitor cut at its limit.
        ("all_reduce", CUT_OFF, CUT_OFF.replace("[2, 2]", "[4]"), HangKind.TRANSPORT),
        ("all_reduce", CUT_OFF, CUT_OFF.replace("[2, 2]", "[4]") + "]", HangKind.TRANSPORT),
        # A list of tensors may be uneven, one tensor for all ranks may not.
        ("all_gather", "[[4]] ['Float']", "[[3]] ['Float']", HangKind.TRANSPORT),
        ("_all_gather_base", "[[4]] ['Float']", "[[3]] ['Float']", HangKind.MISMATCH),
        ("all_gather_into_tensor_coalesced", "[[4]] ['Float']", "[[3]] ['Float']", HangKind.MISMATCH),
    ],
)
def test_which_sizes_must_be_the_same(operation: str, usual: str, odd: str, finding: HangKind) -> None:
    shapes = [usual, usual, usual, odd]
    views = [
        RankView(Scene(rank, IN_COLLECTIVE), {"world": GroupState(5, 4, operation, shape)})
        for rank, shape in enumerate(shapes)
    ]
    blame = find_culprits(views)
    assert blame.kind is finding
    if finding is HangKind.MISMATCH:
        assert blame.culprits == (3,) and f"{operation} of {odd} (rank 3)" in blame.text


def test_a_deadlock_by_order() -> None:
    groups = {"a": [0, 1], "b": [0, 1]}
    blame = find_culprits(hang({0: [Op("a"), Op("b")], 1: [Op("b"), Op("a")]}, groups))
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())  # nobody knows yet who belongs to the groups
    twice = [Op("a"), Op("b")]
    blame = find_culprits(hang({0: [*twice, Op("a"), Op("b")], 1: [*twice, Op("b"), Op("a")]}, groups))
    assert (blame.kind, blame.culprits) == (HangKind.DEADLOCK, (0, 1))


def test_a_deadlock_of_three_groups() -> None:
    groups = {"a": [0, 1], "b": [1, 2], "c": [2, 0]}
    views = hang({0: [Op("a"), Op("c")], 1: [Op("b"), Op("a")], 2: [Op("c"), Op("b")]}, groups)
    blame = find_culprits(known(views, groups))
    assert (blame.kind, blame.culprits) == (HangKind.DEADLOCK, (0, 1, 2))
    for name in groups:
        assert f"group {name}" in blame.text


def known(views: list[RankView], groups: dict[str, list[int]]) -> list[RankView]:
    """The views where the members of groups are known."""
    return [RankView(view.scene, view.groups, groups, view.iteration, view.ended) for view in views]


def test_a_deadlock_where_the_members_are_known() -> None:
    groups = {"a": [0, 1], "b": [0, 1]}
    views = known(hang({0: [Op("a"), Op("b")], 1: [Op("b"), Op("a")]}, groups), groups)
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits) == (HangKind.DEADLOCK, (0, 1))
    assert "group a" in blame.text
    assert "group b" in blame.text


@pytest.mark.parametrize("kind", ["another order", "one less", "one more"])
@pytest.mark.parametrize("rank", range(8))
def test_the_one_that_is_out_of_step_with_all_others(kind: str, rank: int) -> None:
    """All ranks follow one order of collectives but this one."""
    groups = LAYOUTS["4 x 2 tensor and data parallel"] | {"world": list(range(8))}
    wrong = programs(groups, 6)
    at = wrong[rank].index(3) + 1
    own = wrong[rank][at : at + 3]
    changed = {"another order": own[::-1], "one less": own[1:], "one more": [*own, own[0]]}[kind]
    wrong[rank] = [*wrong[rank][:at], *changed, *wrong[rank][at + 3 :]]
    blame = find_culprits(hang(wrong, groups))
    assert rank in blame.culprits
    assert len(blame.culprits) <= 4
    assert blame.kind in (HangKind.DEADLOCK, HangKind.MISMATCH)


def test_two_thousand_ranks_are_not_too_many() -> None:
    """Counts what is looked at, not seconds: the ranks that are missing are looked for once for each collective."""
    world = range(2048)
    groups = {"world": list(world), **{f"tp{first}": list(range(first, first + 8)) for first in world[::8]}}
    views = hang(stuck_in_step(groups, 417, Stuck()), groups)
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits, len(blame.waiting)) == (HangKind.BEHIND, (417,), 2047)


def test_two_thousand_ranks_in_a_circle() -> None:
    """Half of them wait in one group of all, and half in another."""
    views = [
        RankView(
            Scene(rank, IN_COLLECTIVE),
            {
                "a": GroupState(4 + (rank < 1024), 4, "all_reduce"),
                "b": GroupState(4 + (rank >= 1024), 4, "all_reduce"),
            },
        )
        for rank in range(2048)
    ]
    blame = find_culprits(views)
    assert (blame.kind, len(blame.culprits)) == (HangKind.DEADLOCK, 2)
    assert "all_reduce 5 of group a" in blame.text and "all_reduce 5 of group b" in blame.text


def test_the_network() -> None:
    views = [RankView(Scene(rank, IN_COLLECTIVE), {"world": GroupState(7, 6, "all_reduce")}) for rank in range(4)]
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits, len(blame.waiting)) == (HangKind.TRANSPORT, (), 4)


@pytest.mark.parametrize("lists", range(3))
def test_the_network_in_the_first_collective(lists: int) -> None:
    """One list of the members is enough, whichever rank has it: the views of other nodes have none."""
    first = {"world": GroupState(1, 0, "all_reduce")}
    members: list[dict[str, list[int]]] = [{}, {}, {}]
    members[lists] = {"world": [0, 1, 2]}
    assert (
        find_culprits([RankView(Scene(rank, IN_COLLECTIVE), first, members[rank]) for rank in range(3)]).kind
        is HangKind.TRANSPORT
    )
    assert find_culprits([RankView(Scene(rank, IN_COLLECTIVE), first) for rank in range(3)]).kind is HangKind.UNKNOWN


def test_an_extra_collective_of_one_rank() -> None:
    groups = LAYOUTS["data parallel, 8"]
    extra = programs(groups)
    extra[3] = [*extra[3], Op("world")]
    blame = find_culprits(hang(extra, groups))
    assert (blame.kind, blame.culprits) == (HangKind.BEHIND, (3,))
    assert blame.text == "is alone in all_reduce 4 of group world"


def test_a_collective_that_one_rank_leaves_out() -> None:
    groups = LAYOUTS["data parallel, 8"]
    missing = programs(groups)
    del missing[6][1]
    blame = find_culprits(hang(missing, groups))
    assert blame.culprits == (6,)


def test_a_receive_that_the_recorder_does_not_know() -> None:
    groups = {"p01": [0, 1], "world": [0, 1, 2]}
    ranks: dict[int, Program] = {
        0: [Op("world"), Op("p01", unseen=True), Op("world")],
        1: [Op("world"), Op("world"), Stuck()],
        2: [Op("world"), Op("world")],
    }
    blame = find_culprits(hang(ranks, groups))
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())
    assert blame.text.startswith("rank 0 may wait in a call that torch's flight recorder does not know")


def test_who_waits_for_an_unseen_receive_is_not_to_blame() -> None:
    groups = {"p01": [0, 1], "world": [0, 1, 2]}
    ranks: dict[int, Program] = {
        0: [Op("world"), Op("p01", unseen=True), Op("world")],
        1: [Op("world"), Stuck()],
        2: [Op("world"), Op("world")],
    }
    assert find_culprits(hang(ranks, groups)).culprits == (1,)


def blocked(rank: int, iteration: int = NO_ITERATION, **groups: tuple[int, int]) -> RankView:
    """A rank in `work.wait()` of torch, which leaves no frame."""
    states = {name: GroupState(entered, finished, "all_reduce") for name, (entered, finished) in groups.items()}
    scene = Scene(rank, ("train.py:12 in exchange",), {"state": "S (sleeping)", "wchan": "futex_do_wait"})
    return RankView(scene, states, iteration=iteration)


def outside(rank: int, iteration: int = NO_ITERATION, **groups: tuple[int, int]) -> RankView:
    """A rank that computes."""
    states = {name: GroupState(entered, finished, "all_reduce") for name, (entered, finished) in groups.items()}
    return RankView(Scene(rank, OUTSIDE, {"state": "R (running)"}), states, iteration=iteration)


def in_roll_call(rank: int) -> RankView:
    """A rank that waits until all ranks have called `load()`, as torch's flight recorder does not know."""
    frames = ("ft_client/rank/agreement/roll_call.py:250 in wait", "train.py:3 in main")
    scene = Scene(rank, frames, {"state": "S (sleeping)", "wchan": "futex_do_wait"})
    return RankView(scene, {"0": GroupState(3, 3, "all_reduce")})


def test_who_does_not_make_a_call_that_all_ranks_must_make() -> None:
    views = [*map(in_roll_call, range(6)), *(outside(rank, **{"0": (3, 3)}) for rank in (6, 7))]
    found = find_culprits(views)
    assert (found.kind, found.culprits, found.waiting) == (HangKind.BEHIND, (6, 7), tuple(range(6)))
    assert found.text == "has not made a call that all ranks must make"
    assert find_culprits(views[5:]).culprits == (), "most ranks never made it: it may be one too many"
    assert find_culprits(views[:-1], all_ranks=False).culprits == ()


def test_who_is_in_the_wait_of_a_receive_is_not_to_blame() -> None:
    views = [
        RankView(Scene(0, IN_COLLECTIVE), {"world": GroupState(4, 3, "all_reduce")}),
        blocked(1, world=(3, 3)),
        outside(2, world=(3, 3)),
        RankView(Scene(3, IN_COLLECTIVE), {"world": GroupState(4, 3, "all_reduce")}),
    ]
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits, blame.waiting) == (HangKind.BEHIND, (2,), (0, 1, 3))


def test_who_may_be_in_the_wait_of_a_receive_is_not_named_alone() -> None:
    """It may as well be a lock of the program."""
    views = [
        RankView(Scene(0, IN_COLLECTIVE), {"world": GroupState(4, 3, "all_reduce")}),
        blocked(1, world=(3, 3)),
    ]
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits, blame.waiting) == (HangKind.UNKNOWN, (), (0, 1))
    assert blame.text.startswith("rank 1 may wait in a call that torch's flight recorder does not know")


def test_the_wait_of_a_collective_in_the_background() -> None:
    views = [blocked(rank, world=(4, 3)) for rank in (0, 1, 3)] + [outside(2, world=(3, 3))]
    assert find_culprits(views).culprits == (2,)
    assert find_culprits([blocked(rank, world=(4, 3)) for rank in range(3)]).kind is HangKind.TRANSPORT


@pytest.mark.parametrize(("others", "own", "ranks"), [(3, 3, (2,)), (3, 4, ()), (NO_ITERATION, 3, ())])
def test_the_only_one_that_surely_waits_for_nobody(others: int, own: int, ranks: tuple[int, ...]) -> None:
    """All others are in sends and receives: it is named only where it is not ahead of them."""
    views = [blocked(rank, others, world=(1, 1)) for rank in range(2)] + [outside(2, own, world=(1, 1))]
    assert find_culprits(views).culprits == ranks
    in_call = RankView(Scene(1, IN_COLLECTIVE), {"pair": GroupState(2, 1, "all_reduce")}, iteration=others)
    views = [blocked(0, others, pair=(1, 1)), in_call, outside(2, own)]
    assert find_culprits(views).culprits == ranks


def test_without_a_process_group_nobody_is_waited_for() -> None:
    """A lock of the program, as far as is known; the other rank may wait for a file that this one should write."""
    blame = find_culprits([outside(0, 3), blocked(1, 3)])
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())


def test_one_rank_alone_waits_for_nobody() -> None:
    assert find_culprits([blocked(0)]).waiting == ()
    assert find_culprits([blocked(0)], all_ranks=False).waiting == (0,)


def test_the_first_collective_of_a_group() -> None:
    # Nobody has finished one, so nobody knows who belongs to the group.
    groups = {"world": [0, 1, 2, 3]}
    ranks: dict[int, Program] = {rank: [Op("world")] for rank in range(4)}
    ranks[2] = [Stuck()]
    assert find_culprits(hang(ranks, groups)).culprits == (2,)
    ranks[1] = [Stuck()]
    blame = find_culprits(hang(ranks, groups))
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())
    assert find_culprits(known(hang(ranks, groups), groups)).culprits == (1, 2)


def test_a_collective_in_the_background_is_no_wait() -> None:
    # Rank 1 started an all-reduce, computes, and is stuck there; rank 0 is at the end of the step.
    views = [
        RankView(Scene(0, IN_COLLECTIVE), {"world": GroupState(9, 8, "barrier")}),
        RankView(Scene(1, OUTSIDE), {"world": GroupState(8, 7, "all_reduce")}),
    ]
    assert find_culprits(views).culprits == (1,)


def in_program(rank: int, **groups: tuple[int, int]) -> RankView:
    """A rank whose stack is in its program: where it waits for a GPU, in `loss.item()` for instance."""
    states = {name: GroupState(entered, finished, "all_reduce") for name, (entered, finished) in groups.items()}
    return RankView(Scene(rank, OUTSIDE), states)


def test_a_chain_of_ranks_that_wait_in_their_program() -> None:
    views = [
        RankView(Scene(0, IN_COLLECTIVE), {"x": GroupState(4, 3, "all_reduce")}),
        in_program(1, x=(3, 3), y=(7, 6)),
        in_program(2, y=(6, 6)),
    ]
    assert find_culprits(views).culprits == (2,)


def test_all_wait_in_their_program_for_one() -> None:
    views = [in_program(rank, world=(9, 8)) for rank in range(3)] + [in_program(3, world=(8, 8))]
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits, len(blame.waiting)) == (HangKind.BEHIND, (3,), 3)


def test_the_network_where_one_waits_in_its_program() -> None:
    views = [RankView(Scene(0, IN_COLLECTIVE), {"x": GroupState(7, 6, "all_reduce")}), in_program(1, x=(7, 6))]
    assert find_culprits(views).kind is HangKind.TRANSPORT


def test_a_circle_names_the_collectives_of_the_circle() -> None:
    both = {"a": GroupState(3, 2, "all_reduce"), "z": GroupState(5, 4, "all_reduce")}
    views = [
        RankView(Scene(0, IN_COLLECTIVE), {**both, "b": GroupState(2, 2, "all_reduce")}),
        RankView(Scene(1, IN_COLLECTIVE), {**both, "a": GroupState(2, 2), "b": GroupState(3, 2, "all_reduce")}),
    ]
    blame = find_culprits(views)
    assert blame.kind is HangKind.DEADLOCK
    assert "rank 0 in all_reduce 3 of group a" in blame.text
    assert "rank 1 in all_reduce 3 of group b" in blame.text


def test_ranks_of_another_node_are_missing() -> None:
    views = [RankView(Scene(rank, IN_COLLECTIVE), {"world": GroupState(7, 6, "all_reduce")}) for rank in range(4)]
    assert find_culprits(views, all_ranks=False).kind is HangKind.UNKNOWN


# Scenes in which a healthy rank is not to be named.


def waits_by_stack(rank: int, iteration: int = NO_ITERATION) -> RankView:
    """A rank in a collective, without a recorder."""
    return RankView(Scene(rank, IN_COLLECTIVE), iteration=iteration)


def waits_in(rank: int, number: int, iteration: int = NO_ITERATION) -> RankView:
    """A rank in this collective of all ranks, by the recorder."""
    states = {"world": GroupState(number, number - 1, "all_reduce")}
    return RankView(Scene(rank, IN_COLLECTIVE), states, iteration=iteration)


def waits_in_group(rank: int, group: str, number: int) -> RankView:
    """A rank in this collective of a group, by the recorder."""
    return RankView(Scene(rank, IN_COLLECTIVE), {group: GroupState(number, number - 1, "all_reduce")})


def test_one_whose_last_collective_has_no_end_is_in_the_present_one() -> None:
    """As gloo's recorder shows it now and then: the others have finished that one, too, and nobody is to blame."""
    late = replace(waits_in(1, 4), groups={"world": GroupState(4, 2, "all_reduce")})
    blame = find_culprits([waits_in(0, 4), late, waits_in(2, 4), waits_in(3, 4)])
    assert (blame.kind, blame.culprits) == (HangKind.TRANSPORT, ())
    assert blame.text.startswith("all 4 ranks are in all_reduce 4 of ")


def passes_on(
    rank: int, receives: set[int] | None = None, sends: set[int] | None = None, **groups: tuple[int, int]
) -> RankView:
    """A rank in sends and receives of NCCL: its stack is in the program, which waits for the GPU."""
    return replace(
        outside(rank, NO_ITERATION, **groups), sends=frozenset(sends or ()), receives=frozenset(receives or ())
    )


def test_a_stage_of_a_pipeline_whose_peer_is_on_another_node() -> None:
    blame = find_culprits([passes_on(1, sends={2}), passes_on(0, {5})], all_ranks=False)
    assert (blame.kind, blame.culprits, blame.waiting) == (HangKind.UNKNOWN, (), (0, 1))


def test_a_stage_of_a_pipeline_that_sends_nothing() -> None:
    blame = find_culprits([outside(0, NO_ITERATION), passes_on(1, {0}), passes_on(2, {1}), passes_on(3, {2})])
    assert (blame.kind, blame.culprits, blame.waiting) == (HangKind.BEHIND, (0,), (1, 2, 3))
    assert blame.text == "never sent what rank 1 is to receive"


def test_a_stage_of_a_pipeline_that_does_not_take_what_is_sent() -> None:
    blame = find_culprits([passes_on(0, sends={1}), outside(1, NO_ITERATION), passes_on(2, {1})])
    assert (blame.kind, blame.culprits, blame.text) == (HangKind.BEHIND, (1,), "never received what rank 0 sends")


def test_a_pipeline_behind_a_collective() -> None:
    """Stage 1 of the first pipeline waits for its gradients' sum, for which the second pipeline's stage is late."""
    late = outside(3, NO_ITERATION, dp=(4, 4))
    blame = find_culprits([passes_on(0, {1}), waits_in_group(1, "dp", 5), passes_on(2, {3}), late])
    assert (blame.kind, blame.culprits, blame.waiting) == (HangKind.BEHIND, (3,), (0, 1, 2))


def test_a_send_that_meets_its_receive_is_waited_for_by_nobody() -> None:
    """It moves data: neither side waits for the other to come."""
    blame = find_culprits([passes_on(0, sends={1}), passes_on(1, {0}), outside(2, NO_ITERATION)])
    assert blame.culprits == ()


def test_a_message_behind_another_operation_is_no_evidence() -> None:
    """The other rank may have done its part, while this one stands in a GPU's queue behind what is not finished."""
    behind = passes_on(0, {1}, x=(4, 3))
    assert find_culprits([behind, outside(1, NO_ITERATION, x=(4, 4)), outside(2, NO_ITERATION)]).culprits == ()
    assert find_culprits([passes_on(0, {1, 3}), outside(1), outside(2), outside(3)]).culprits == ()


def test_a_rank_with_an_unfinished_operation_may_wait() -> None:
    """Rank 1 waits for its all-reduce on the GPU, which stands behind another one in the queue of rank 2."""
    views = [waits_in_group(0, "x", 5), outside(1, x=(4, 4), y=(3, 2)), outside(2, y=(3, 2), z=(1, 0)), outside(3)]
    assert find_culprits(views).culprits == ()
    root = replace(outside(1, x=(4, 4)), groups={"x": GroupState(4, 4), "y": GroupState(3, 2, "broadcast")})
    assert find_culprits([views[0], root, outside(2, y=(3, 3))]).culprits == ()


def test_a_circle_with_a_receive_names_nobody() -> None:
    """A receive can be begun long before anybody waits for it: the busy rank may be the one that began it."""
    blame = find_culprits([passes_on(0, {1}), passes_on(1, {0})])
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())
    assert "rank 0 in a receive from rank 1" in blame.text


@pytest.mark.parametrize("unknown", [{"sends": None}, {"sends": None, "receives": None}])
def test_a_rank_whose_peers_are_not_known_is_not_blamed_for_a_message(unknown: dict[str, None]) -> None:
    many = replace(outside(1, NO_ITERATION), **unknown)
    assert find_culprits([passes_on(0, {1}), many, outside(2, NO_ITERATION)]).culprits == ()


def test_a_rank_that_is_gone_is_what_a_receive_waits_for() -> None:
    blame = find_culprits([passes_on(0, {1}), has_ended(1)])
    assert (blame.kind, blame.culprits) == (HangKind.GONE, (1,))


def test_messages_of_a_record() -> None:
    view = passes_on(0, {1}, {2, 3})
    again = of_record(to_record(view))
    assert (again.sends, again.receives) == (view.sends, view.receives)
    assert of_record(to_record(replace(view, sends=None))).sends is None
    older = {name: value for name, value in to_record(view).items() if name not in ("sends", "receives")}
    assert (of_record(older).sends, of_record(older).receives) == (frozenset(), frozenset())


def test_a_spare_is_not_what_the_others_wait_for() -> None:
    """It was in their group before the restart, and the recorder has that group's last state still."""
    call = "ft_client/inprocess/restart/call.py"
    spare = Scene(3, [f"{call}:295 in _next", f"{call}:201 in _wait"], {"state": "S (sleeping)"})
    others = [waits_in(0, 4), outside(1, NO_ITERATION, world=(3, 3)), waits_in(2, 4)]
    blame = find_culprits([*others, RankView(spare, {"world": GroupState(2, 2)})])
    assert (blame.kind, blame.culprits, blame.waiting) == (HangKind.BEHIND, (1,), (0, 2))
    blame = find_culprits([waits_in(0, 4), waits_in(2, 4), RankView(spare, {"world": GroupState(2, 2)})])
    assert blame.culprits == ()


def has_ended(rank: int, iteration: int = NO_ITERATION, **groups: tuple[int, int]) -> RankView:
    """A rank that has returned from its program."""
    return replace(outside(rank, iteration, **groups), ended=True)


def waits_in_python(
    rank: int, frame: str = "python3.11/threading.py:1119 in join", **groups: tuple[int, int]
) -> RankView:
    """A rank that waits for a thread, a queue or a process of its own."""
    scene = Scene(rank, (frame, "train.py:9 in load"), {"state": "S (sleeping)", "wchan": "futex_do_wait"})
    return replace(outside(rank, NO_ITERATION, **groups), scene=scene)


def sleeps(rank: int, iteration: int = NO_ITERATION, **groups: tuple[int, int]) -> RankView:
    """A rank that sleeps in its program: it may look again and again for what another should write."""
    scene = Scene(rank, OUTSIDE, {"state": "S (sleeping)", "wchan": "hrtimer_nanosleep"})
    return replace(outside(rank, iteration, **groups), scene=scene)


def is_stopped(rank: int, **groups: tuple[int, int]) -> RankView:
    return replace(outside(rank, NO_ITERATION, **groups), scene=Scene(rank, OUTSIDE, {"state": "T (stopped)"}))


@pytest.mark.parametrize(("own", "ranks"), [(10, ()), (9, (1,)), (8, (1,)), (NO_ITERATION, (1,))])
def test_without_recorder_one_that_is_ahead_is_not_named(own: int, ranks: tuple[int, ...]) -> None:
    views = [waits_by_stack(0, 9), outside(1, own), waits_by_stack(2, 9), waits_by_stack(3, 9)]
    blame = find_culprits(views)
    assert blame.culprits == ranks
    assert ranks or blame.kind is HangKind.UNKNOWN


def test_without_recorder_the_one_that_ended_may_be_waited_for() -> None:
    blame = find_culprits([waits_by_stack(0), has_ended(1), outside(2), waits_by_stack(3)])
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())
    assert blame.text.startswith("rank 1 has ended")


def test_one_collective_too_many_while_others_ended() -> None:
    views = [waits_in(rank, 4, 7) for rank in (0, 4)]
    views += [has_ended(rank, 7, world=(3, 3)) for rank in (1, 2, 5)] + [outside(3, 7, world=(3, 3))]
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())


@pytest.mark.parametrize(
    "frame",
    [
        "python3.11/threading.py:1119 in join",
        "python3.12/queue.py:171 in get",
        "python3.11/concurrent/futures/_base.py:451 in result",
        "python3.13t/multiprocessing/connection.py:1136 in wait",
        "python3.11/selectors.py:415 in select",
        "python3.11/subprocess.py:2011 in _try_wait",
    ],
)
def test_who_waits_for_a_thread_may_wait_for_a_rank_in_a_lock(frame: str) -> None:
    """Rank 0 is the cause: it is in a lock of its own."""
    inside = [waits_in(rank, 10) for rank in (2, 3)]
    blame = find_culprits([blocked(0, world=(9, 9)), waits_in_python(1, frame, world=(9, 9)), *inside])
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())
    assert blame.text.startswith("ranks 0, 1 may wait")
    without = [RankView(view.scene) for view in inside]
    assert find_culprits([blocked(0), waits_in_python(1, frame), *without]).culprits == ()


def test_who_waits_for_a_thread_is_named_where_it_is_the_only_one_missing() -> None:
    """The data loader of one rank hangs, and all others of the job are in the collective."""
    inside = [waits_in(rank, 10) for rank in (2, 3)]
    assert find_culprits([waits_in_python(1, world=(9, 9)), *inside]).culprits == (1,)
    assert find_culprits([waits_in_python(1), *(waits_by_stack(rank) for rank in (2, 3))]).culprits == (1,)
    assert find_culprits([waits_in_python(1, world=(9, 9)), *inside], all_ranks=False).culprits == ()


def test_of_two_that_are_missing_the_one_that_computes_is_named_not_the_one_that_waits_for_a_thread() -> None:
    inside = [waits_in(rank, 10) for rank in (2, 3)]
    assert find_culprits([outside(0, world=(9, 9)), waits_in_python(1, world=(9, 9)), *inside]).culprits == (0,)


def test_who_sleeps_may_look_for_what_a_rank_in_a_lock_should_write() -> None:
    views = [blocked(0, 3, world=(9, 9)), sleeps(1, 3, world=(9, 9)), waits_in(2, 10, 3), waits_in(3, 10, 3)]
    assert (find_culprits(views).kind, find_culprits(views).culprits) == (HangKind.UNKNOWN, ())
    assert find_culprits([sleeps(0, 3, world=(9, 9)), *views[2:]]).culprits == (0,)
    without = [blocked(0, 3), sleeps(1, 3), waits_by_stack(2, 3), waits_by_stack(3, 3)]
    assert find_culprits(without).culprits == (1,)  # a recorder would show the doubt


def at_line(view: RankView, line: int) -> RankView:
    """The same rank at another line of the program."""
    return replace(view, scene=replace(view.scene, frames=(f"train.py:{line} in exchange",)))


def test_two_at_the_same_line_are_in_no_lock_of_their_own() -> None:
    """A ring of sends and receives, as in hang_worker.py: both neighbours of the rank that sleeps wait for it."""
    in_ring = [blocked(0, 3, world=(9, 9)), blocked(2, 3, world=(9, 9))]
    inside = [waits_in(rank, 10, 3) for rank in (3, 4)]
    assert find_culprits([in_ring[0], sleeps(1, 3, world=(9, 9)), in_ring[1], *inside]).culprits == (1,)
    assert find_culprits([in_ring[0], sleeps(1, 3, world=(9, 9)), in_ring[1]]).culprits == (1,)
    # Any of these may be the cause, and the others may wait for it.
    apart = [in_ring[0], at_line(in_ring[1], 99)]
    assert find_culprits([apart[0], sleeps(1, 3, world=(9, 9)), apart[1], *inside]).culprits == ()
    one_more = at_line(blocked(5, 3), 99)
    assert find_culprits([in_ring[0], sleeps(1, 3, world=(9, 9)), in_ring[1], *inside, one_more]).culprits == ()
    thread = waits_in_python(5, world=(9, 9))
    assert find_culprits([in_ring[0], sleeps(1, 3, world=(9, 9)), in_ring[1], *inside, thread]).culprits == ()
    two = [sleeps(1, 3, world=(9, 9)), sleeps(5, 3, world=(9, 9))]
    assert find_culprits([*in_ring, *two, *inside]).culprits == ()


def in_own_lock(rank: int, iteration: int = NO_ITERATION, **groups: tuple[int, int]) -> RankView:
    """A rank that waits for a lock of its own, as the text of its line says."""
    view = at_line(blocked(rank, iteration, **groups), 30)
    return replace(view, scene=replace(view.scene, in_own_lock=True))


def test_who_waits_for_a_lock_of_its_own_is_named_beside_those_that_may_wait() -> None:
    """As `work.wait()` of a send or a receive, at one line or at several."""
    inside = [waits_in(rank, 10, 3) for rank in (3, 4)]
    in_ring = [blocked(0, 3, world=(9, 9)), blocked(2, 3, world=(9, 9))]
    blame = find_culprits([in_ring[0], in_own_lock(1, 3, world=(9, 9)), in_ring[1], *inside])
    assert (blame.kind, blame.culprits, blame.waiting) == (HangKind.BEHIND, (1,), (0, 2, 3, 4))
    assert blame.text.startswith("never entered all_reduce 10 of ")
    apart = at_line(in_ring[1], 99)
    assert find_culprits([in_ring[0], in_own_lock(1, 3, world=(9, 9)), apart, *inside]).culprits == (1,)
    thread = waits_in_python(2, world=(9, 9))
    assert find_culprits([in_own_lock(1, 3, world=(9, 9)), thread, *inside]).culprits == (1,)
    assert find_culprits([in_own_lock(1, 3, world=(9, 9)), apart, *inside], all_ranks=False).culprits == (1,)


def test_who_waits_for_a_lock_of_its_own_is_named_where_nobody_else_is_outside() -> None:
    inside = [waits_in(rank, 10, 3) for rank in (0, 2)]
    assert find_culprits([in_own_lock(1, 3, world=(9, 9)), *inside]).culprits == (1,)
    without = [waits_by_stack(0, 3), in_own_lock(1, 3), waits_by_stack(2, 3), blocked(3, 3)]
    assert find_culprits(without).culprits == (1,)  # no recorder


def test_ranks_in_locks_of_their_own_are_named_together() -> None:
    """One cause can hit two of them, and the others wait for both."""
    views = [in_own_lock(0, 3, world=(9, 9)), in_own_lock(1, 3, world=(9, 9)), blocked(2, 3, world=(9, 9))]
    assert find_culprits([*views, *(waits_in(rank, 10, 3) for rank in (3, 4))]).culprits == (0, 1)


def test_beside_one_in_a_lock_another_that_sleeps_leaves_it_open() -> None:
    """Of two sources both are named, or none: the one that sleeps may look for what the third should write."""
    views = [in_own_lock(0, 3, world=(9, 9)), sleeps(1, 3, world=(9, 9)), blocked(2, 3, world=(9, 9))]
    blame = find_culprits([*views, waits_in(3, 10, 3), waits_in(4, 10, 3)])
    assert (blame.kind, blame.culprits) == (HangKind.UNKNOWN, ())


def test_who_waits_for_a_lock_while_a_collective_of_its_own_goes_on_is_in_that() -> None:
    """It has entered it as all others have: the network, or a device."""
    views = [in_own_lock(0, 3, world=(10, 9)), waits_in(1, 10, 3), waits_in(2, 10, 3)]
    blame = find_culprits(views)
    assert (blame.kind, blame.culprits) == (HangKind.TRANSPORT, ())


def test_who_is_ahead_in_a_lock_of_its_own_is_not_named_by_iterations() -> None:
    views = [waits_by_stack(0, 3), in_own_lock(1, 4), blocked(2, 3), waits_by_stack(3, 3)]
    assert find_culprits(views).culprits == ()


def test_one_that_waits_for_a_lock_does_not_hide_a_stopped_one() -> None:
    views = [in_own_lock(0, 3, world=(9, 9)), is_stopped(1, world=(9, 9)), waits_in(2, 10, 3)]
    assert (find_culprits(views).kind, find_culprits(views).culprits) == (HangKind.GONE, (1,))


def test_a_lock_that_nobody_waits_for_is_not_named() -> None:
    """All are out of the process group's sight: a program that has none, as far as is known."""
    assert find_culprits([in_own_lock(0), blocked(1), blocked(2)]).culprits == ()
    one_group = [in_own_lock(0, 3, pair=(9, 9)), blocked(1, 3, pair=(9, 9))]
    others = [waits_in(2, 10, 3), waits_in(3, 10, 3), has_ended(4, 3, world=(9, 9))]
    assert find_culprits([*one_group, *others]).culprits != (0,)


def test_a_stopped_rank_that_nobody_waits_for_is_not_named() -> None:
    pair = {"pair": GroupState(10, 9, "all_reduce")}
    inside = RankView(Scene(1, IN_COLLECTIVE), pair)
    blame = find_culprits([outside(0, pair=(9, 9)), inside, is_stopped(2, world=(3, 3)), is_stopped(3, world=(3, 3))])
    assert (blame.kind, blame.culprits) == (HangKind.BEHIND, (0,))
    assert find_culprits([is_stopped(0, pair=(9, 9)), inside, is_stopped(2, world=(3, 3))]).culprits == (0,)
    assert find_culprits([outside(0), waits_by_stack(1), is_stopped(2)]).culprits == ()
    assert find_culprits([waits_by_stack(0), waits_by_stack(1), is_stopped(2)]).culprits == (2,)
    assert find_culprits([has_ended(0), waits_by_stack(1), is_stopped(2)]).culprits == ()


@given(st.data())
def test_never_another_rank(data: st.DataObject) -> None:
    """Random groups, orders that all ranks agree on, and one rank that gets stuck somewhere. Some groups are pairs that
    send and receive, and some are waited for in `work.wait()`."""
    world = data.draw(st.integers(2, 6))
    ranks = list(range(world))
    groups = {
        f"g{number}": sorted(data.draw(st.sets(st.sampled_from(ranks), min_size=2)))
        for number in range(data.draw(st.integers(1, 4)))
    }
    order = data.draw(st.lists(st.sampled_from(sorted(groups)), min_size=1, max_size=8))
    unseen = data.draw(st.sets(st.sampled_from(sorted(groups))))
    no_frame = data.draw(st.sets(st.sampled_from(sorted(groups))))
    ops = {name: Op(name, unseen=name in unseen, no_frame=name in no_frame) for name in groups}
    reports = data.draw(st.booleans())
    found: dict[int, Program] = {}
    for rank in ranks:
        found[rank] = []
        for iteration, name in enumerate(order):
            if reports and data.draw(st.booleans()):
                found[rank].append(iteration)
            found[rank] += [ops[name]] * (rank in groups[name])
    culprit = data.draw(st.sampled_from(ranks))
    at = data.draw(st.integers(0, len(found[culprit])))
    kind = data.draw(st.sampled_from([Stuck, Stopped, Locked, SurelyLocked]))
    found[culprit] = [*found[culprit][:at], kind()]
    views = hang(found, groups)
    if data.draw(st.booleans()):
        views = known(views, groups)
    blame = find_culprits(views)
    assert blame.culprits in ((culprit,), ())
