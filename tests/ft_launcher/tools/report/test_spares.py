"""Lost and waiting nodes, from journals written by hand: three nodes of two ranks each, as a rule."""

from __future__ import annotations

from ft_launcher.tools.report.spares import Spares
from tests.ft_launcher.tools.report.lines import Line, begins, end, found, line, start


def node(
    name: str, *cycles: tuple[int, float, float, int], since: float = 0, until: float | None = None, rank: int = 0
) -> list[Line]:
    """The journal of a node with these cycles: number, begin, end, and how many nodes. `until`: None: it was lost."""
    lines = [start(since, name)]
    for number, began, ended, nodes in cycles:
        lines.append(begins(began, number, rank) | {"nodes": nodes})
        lines.append(line("cycle_end", ended, cycle=number, how="failed elsewhere"))
    if until is not None:
        return [*lines, end(until)]
    # The end of the cycle is not in the journal of a launcher that was lost in it.
    return lines[:-1]


def spares(*journals: list[Line]) -> Spares:
    known = found(*journals).spares
    assert known is not None
    return known


def test_one_node_has_no_spares() -> None:
    assert found(node("a", (0, 1, 9, 1), until=10)).spares is None


def test_a_restart_with_all_nodes_is_no_loss() -> None:
    cycles = [(0, 0, 100, 2), (1, 103, 200, 2)]
    known = spares(node("a", *cycles, until=200), node("b", *cycles, until=200, rank=1))
    assert (known.losses, known.mtbf_s, known.back_s, known.saved_rank_s, known.idle_rank_s) == (0, None, None, 0, 0)
    assert (known.cost_rank_s, known.active, known.ran_s) == (400, 1.0, 200)


def test_all_wait_until_the_node_is_back() -> None:
    """It takes 60 s, of which 3 s are what a restart takes that waits for no node."""
    cycles = [(0, 0, 100, 2), (1, 103, 200, 2), (2, 260, 300, 2)]
    lost, again = node("b", *cycles[:2], rank=1), node("b", cycles[2], since=255, until=300, rank=1)
    known = spares(node("a", *cycles, until=300), [*lost, *again])
    assert (known.losses, known.by_spare, known.mtbf_s, known.back_s) == (1, 0, 300, 60)
    assert known.saved_rank_s == 57 * 4


def test_the_job_runs_without_the_node_for_a_while() -> None:
    """Two nodes of three run for 90 s: of a spare 2 ranks would have run."""
    cycles = [(0, 0, 100, 3), (1, 110, 200, 2), (2, 205, 300, 3)]
    nodes = [node(name, *cycles, until=300, rank=rank) for rank, name in enumerate("ab")]
    nodes += [node("c", cycles[0], rank=2), node("c", cycles[2], since=150, until=300, rank=2)]
    known = spares(*nodes)
    assert (known.losses, known.back_s) == (1, 105)
    assert known.saved_rank_s == 90 * 2 + (10 - 5) * 4


def test_a_second_loss_meanwhile_needs_a_second_spare() -> None:
    cycles = [(0, 0, 100, 4), (1, 100, 200, 3), (2, 200, 300, 2)]
    known = spares(*(node(name, *cycles, until=300) for name in "ab"), node("c", *cycles[:2]), node("d", cycles[0]))
    assert (known.losses, known.back_s, known.saved_rank_s) == (2, None, 2 * 100 * 2)


def test_a_spare_takes_the_place() -> None:
    cycles = [(0, 0, 100, 2), (1, 103, 200, 2)]
    known = spares(node("a", *cycles, until=200), node("b", cycles[0], rank=1), node("c", cycles[1], until=200, rank=1))
    assert (known.losses, known.by_spare, known.back_s, known.saved_rank_s) == (1, 1, None, 0)
    assert known.idle_rank_s == 100 * 2
    assert known.active == (4 * 197) / (4 * 197 + 200)


def test_a_spare_that_nobody_needs() -> None:
    cycle = (0, 0, 100, 2)
    known = spares(node("a", cycle, until=100), node("b", cycle, until=100, rank=1), node("c", until=101))
    assert (known.losses, known.idle_rank_s) == (0, 200)


def test_a_node_whose_loss_ends_the_attempt() -> None:
    """The next attempt begins two minutes later with another node."""
    first, second = (0, 0, 100, 2), (0, 220, 300, 2)
    nodes = [
        [*node("a", first, until=101), *node("a", second, since=210, until=300)],
        node("b", first, rank=1),
        node("c", second, since=211, until=300, rank=1),
    ]
    known = spares(*nodes)
    assert (known.losses, known.back_s, known.ran_s) == (1, 120, 101 + 90)
    nodes[1] = node("b", first, until=101, rank=1)
    assert spares(*nodes).losses == 0


def test_without_the_lost_nodes_journal_the_count_tells() -> None:
    cycles = [(0, 0, 100, 3), (1, 110, 200, 2)]
    known = spares(*(node(name, *cycles, until=200, rank=rank) for rank, name in enumerate("ab")))
    assert (known.losses, known.saved_rank_s) == (1, 90 * 2)
