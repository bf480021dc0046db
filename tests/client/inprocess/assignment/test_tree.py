"""`Tree` on all ranks over a real store; what it is fed, what it refuses."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from ft_client.inprocess.exception import InternalError, RestartAbort
from ft_client.inprocess.rank_assignment import (
    Layer,
    LayerFlag,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    Tree,
    assign,
)
from ft_client.inprocess.state import Mode, State
from tests.client.inprocess.ranks import Ranks, check_consecutive

RESERVE = LayerFlag.RESERVE


def two_layers() -> Tree:
    """At most six of eight ranks, in nodes of two that stand and fall together."""
    node = Layer(min_ranks=2, max_ranks=2, key_or_fn=lambda state: f"node{state.rank // 2}", flag=RESERVE)
    return Tree([Layer(min_ranks=4, max_ranks=6, key_or_fn="root", flag=RESERVE), node])


@pytest.mark.parametrize(
    ("losses", "picture"),
    [
        ([[]], "0 1 2 3 4 5 | 6 7"),
        ([[], []], "0 1 2 3 4 5 | 6 7"),
        ([[], [1]], "6 7 2 3 4 5"),
        ([[], [1], [0]], "6 7 4 5"),
        ([[], [7]], "0 1 2 3 4 5"),
        ([[0]], "2 3 4 5 6 7"),
        ([[], [0, 2, 4]], ""),
    ],
)
def test_pictures(losses: list[list[int]], picture: str) -> None:
    ranks = Ranks(8, two_layers)
    for terminated in losses:
        ranks.step(terminated)
    assert ranks.picture() == picture
    check_consecutive(ranks.states.values())
    assert ranks.keys_left() == 2


def test_terminated_ranks_do_not_come_back() -> None:
    ranks = Ranks(8, two_layers)
    ranks.step()
    ranks.step([1])
    assert set(ranks.states) == {2, 3, 4, 5, 6, 7}
    for _ in range(3):
        ranks.step()
        assert ranks.picture() == "6 7 2 3 4 5"


def test_a_wrapper_that_is_called_again_begins_anew() -> None:
    tree = Tree([Layer()])
    for _ in range(2):
        store = HashStore()
        state = assign(tree, RankAssignmentCtx(State(0, 1), store, set()))
        assert (state.rank, state.active_rank, store.num_keys()) == (0, 0, 2)


def test_nobody_left_to_be_active() -> None:
    tree = Tree([Layer()], world_size_filter=lambda size: size // 2 * 2)
    with pytest.raises(RestartAbort, match="none of 1 ranks"):
        assign(tree, RankAssignmentCtx(State(0, 1), HashStore(), set()))


def test_ranks_in_another_order_than_the_topology(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(4, lambda: Tree([Layer(), Layer(key_or_fn=lambda rank, world_size: f"node{rank % 2}")]))
    with caplog.at_level(logging.WARNING):
        ranks.step([])
    assert ranks.picture() == "0 2 1 3"
    assert sorted(caplog.messages) == [
        "rank 1 of the environment is number 2 of the topology",
        "rank 2 of the environment is number 1 of the topology",
    ]
    ranks.step([1])
    assert ranks.picture() == "0 1 3"


def test_a_terminated_rank_asks_nobody() -> None:
    with pytest.raises(RankDiscarded, match="rank 1 is terminated"):
        Tree([Layer()])(RankAssignmentCtx(State(1, 2), HashStore(), {1}))


def test_a_composition_is_refused() -> None:
    tree = Tree([Layer()])
    state = assign(tree, RankAssignmentCtx(State(0, 1), HashStore(), set()))
    state.mode, state.active_rank = Mode.INACTIVE, None
    with pytest.raises(InternalError, match="cannot be composed"):
        assign(tree, RankAssignmentCtx(state, HashStore(), set()))


def test_ranks_that_disagree_on_the_root() -> None:
    store = HashStore()

    def decide(rank: int) -> RankAssignmentCtx:
        return Tree([Layer(key_or_fn=f"root{rank}")])(RankAssignmentCtx(State(rank, 2), store, set()))

    with ThreadPoolExecutor(2) as threads:
        for decided in [threads.submit(decide, rank) for rank in range(2)]:
            with pytest.raises(ValueError, match="same key in the first layer"):
                decided.result(60)


def test_two_ranks_with_one_first_number() -> None:
    store = HashStore()

    def decide(rank: int) -> RankAssignmentCtx:
        return Tree([Layer()])(RankAssignmentCtx(State(rank, 2, initial_rank=0), store, set()))

    with ThreadPoolExecutor(2) as threads:
        for decided in [threads.submit(decide, rank) for rank in range(2)]:
            with pytest.raises(InternalError, match="2 ranks have 1 different initial ranks"):
                decided.result(60)


@pytest.mark.parametrize(("layers", "error"), [([], ValueError), (["root"], TypeError), ([Layer(), None], TypeError)])
def test_layers_that_are_none(layers: list[Layer], error: type[Exception]) -> None:
    with pytest.raises(error, match="layers"):
        Tree(layers)


def test_it_is_a_rank_assignment() -> None:
    assert isinstance(two_layers(), RankAssignment)
