"""The wrapper with real ranks: each fault, and what each rank saw of it."""

from __future__ import annotations

import platform
import signal

import pytest

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.wrapper import Wrapper
from tests.client.inprocess import corner_mains, mains
from tests.client.inprocess.job import job, seconds


def entered(notes: list[object]) -> list[tuple[int, int, int]]:
    """Round, rank and world size of each call of the function."""
    return [note[1:] for note in notes if isinstance(note, tuple) and note[0] == "enter"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_come_back_with_the_numbers_they_had(ranks: int) -> None:
    with job(ranks, mains.main, fault="exception", on=(1,), times=3) as made:
        told = made.end()
    for rank, one in told.items():
        assert set(entered(one.notes)) <= {(iteration, rank, ranks) for iteration in range(4)}
        assert one.result == (rank, ranks, 3), one
        assert one.notes[-1] == ("after", rank, ranks)


@pytest.mark.parametrize("fault", ["exception", "uncopyable", "atomic", "returns"])
def test_an_exception_restarts_all(fault: str) -> None:
    with job(3, mains.main, fault=fault) as made:
        told = made.end()
    assert {rank: one.result for rank, one in told.items()} == {rank: (rank, 3, 1) for rank in range(3)}


@pytest.mark.parametrize("on", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_rank_0_and_several_at_once(on: tuple[int, ...]) -> None:
    with job(3, mains.main, fault="exception", on=on, times=2) as made:
        told = made.end()
    results = {one.result[2] for one in told.values()}
    assert len(results) == 1, "all ended in the same iteration"
    assert all(one.result[:2] == (rank, 3) for rank, one in told.items())


@pytest.mark.parametrize(
    ("fault", "error"),
    [("base exception", "KeyboardInterrupt: "), ("exit", "SystemExit: 3"), ("abort", "RestartAbort: that is enough")],
)
@pytest.mark.parametrize("on", [0, 1])
def test_what_ends_a_rank_ends_it_alone(fault: str, error: str, on: int) -> None:
    with job(3, mains.main, fault=fault, on=(on,)) as made:
        told = made.end()
    assert told[on].error == error
    left = sorted(one.result for rank, one in told.items() if rank != on)
    assert left == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.parametrize("callback", ["initialize", "health_check", "abort"])
def test_a_fault_in_a_callback_restarts(callback: str) -> None:
    with job(2, mains.main, fault=f"in {callback}") as made:
        told = made.end()
    assert "callback failed" in told[1].notes
    assert {one.result[:2] for one in told.values()} == {(0, 2), (1, 2)}


@pytest.mark.parametrize("callback", ["finalize"])
def test_a_fault_in_a_callback_after_a_fault_ends_the_rank(callback: str) -> None:
    with job(3, mains.main, fault=f"in {callback}") as made:
        told = made.end()
    assert told[1].error == "ValueError: the callback failed"
    assert sorted(one.result for rank, one in told.items() if rank != 1) == [(0, 2, 1), (1, 2, 1)]


def test_a_fault_in_completion_is_the_users() -> None:
    with job(2, mains.main, fault="in completion", times=0) as made:
        told = made.end()
    assert told[0].result == (0, 2, 0)
    assert told[1].error == "ValueError: the callback failed"


def test_terminate_runs_on_the_rank_that_ends() -> None:
    with job(2, mains.main, fault="in terminate") as made:
        told = made.end()
    assert "callback failed" in told[1].notes
    assert told[1].error == "SystemExit: 3"
    assert told[0].result == (0, 1, 1)


def test_a_spare_takes_over() -> None:
    with job(3, mains.main, fault="exit", on=(0,), active=2) as made:
        told = made.end()
    assert told[0].error == "SystemExit: 3"
    assert entered(told[2].notes) == [(1, 1, 2)]
    assert [told[rank].result for rank in (1, 2)] == [(0, 2, 1), (1, 2, 1)]


def test_a_spare_that_is_not_needed_returns_none() -> None:
    with job(3, mains.main, fault="exception", active=2) as made:
        told = made.end()
    assert [told[rank].result for rank in range(3)] == [(0, 2, 1), (1, 2, 1), None]
    assert entered(told[2].notes) == []


def test_below_the_minimum_all_end() -> None:
    with job(3, mains.main, fault="exit", retry={"min_world_size": 3}) as made:
        told = made.end()
    assert told[1].error == "SystemExit: 3"
    assert all(told[rank].error.startswith("RestartAbort") for rank in (0, 2))


def test_too_many_iterations() -> None:
    with job(2, mains.main, fault="exception", times=9, retry={"max_iterations": 3}) as made:
        told = made.end()
    assert all(one.error.startswith("RestartAbort") for one in told.values())
    assert len(entered(told[1].notes)) == 3


@pytest.mark.parametrize("aborts", [True, False])
def test_a_loop_that_swallows_each_interruption_is_ended_at_the_hard_timeout(aborts: bool) -> None:
    """Not when the others give up waiting for it at a barrier, whose time is longer than that of the test."""
    with job(3, corner_mains.swallows_for_ever, aborts=aborts) as made:
        told = made.end(limit_s=60)
    assert told[1].exit_code == -signal.SIGTERM
    assert sorted(told[rank].result for rank in (0, 2)) == [(0, 2, 1), (1, 2, 1)]


def test_an_interruption_that_is_swallowed_comes_again() -> None:
    with job(2, mains.swallowing) as made:
        told = made.end()
    assert told[0].notes == ["Interrupted"]
    assert [one.result for one in told.values()] == [1, 1]


def test_what_is_atomic_is_done_whole() -> None:
    with job(2, mains.atomically) as made:
        told = made.end()
    assert told[0].notes == ["in", *range(300), "out"]
    assert [one.result for one in told.values()] == [1, 1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_new_group_in_every_iteration(ranks: int) -> None:
    with job(ranks, mains.in_group) as made:
        told = made.end()
    total = sum(range(ranks))
    for one in told.values():
        assert one.result == (total, 3)
        sums = [note for note in one.notes if note[0] == "sum"]  # an interruption may come before one of them
        assert set(sums) <= {("sum", number, total) for number in range(4)} and sums[-1] == ("sum", 3, total)


def test_whoever_waits_for_a_group_that_is_never_made_is_freed() -> None:
    """The first rank, which hosts the store of the group, and then another fails before it is made."""
    with job(3, mains.in_group, iterations=2, early=True) as made:
        told = made.end()
    assert [one.result for one in told.values()] == [(3, 2)] * 3


def test_a_second_call_in_the_same_processes() -> None:
    with job(2, mains.main, fault="exception", calls=3) as made:
        told = made.end()
    assert told[0].result == [(0, 2, 1)] * 3
    assert told[1].result == [(1, 2, 1)] * 3


HANGS = [
    ("finalize", "sleeps", 1),
    ("health_check", "spins", 1),
    ("terminate", "sleeps", 1),
    ("completion", "sleeps", 0),
    ("completion", "spins", 0),
    ("rank_assignment", "sleeps", 1),
    ("rank_assignment", "spins", 1),
]
"""Of each callback outside of the function: how it hangs, and the round in which the others end."""


@pytest.mark.parametrize(("where", "how", "iteration"), HANGS)
def test_each_callback_outside_of_the_function_has_a_limit(where: str, how: str, iteration: int) -> None:
    """The monitor of the rank ends it; the others go on, or are done already."""
    with job(3, corner_mains.hangs_in, where=where, how=how) as made:
        told = made.end(limit_s=60)
    assert told[1].exit_code == -signal.SIGTERM
    assert "hangs" in told[1].notes
    size = 2 if iteration else 3
    others = sorted(told[rank].result for rank in (0, 2))
    assert others == [(0, size, iteration), (size - 1, size, iteration)]


@pytest.mark.parametrize("where", ["initialize", "health_check"])
def test_a_callback_before_the_function_has_the_limits_of_the_function(where: str) -> None:
    with job(2, corner_mains.hangs_in, where=where, how="sleeps", times=1) as made:
        told = made.end(limit_s=60)
    assert "hangs" in told[1].notes
    assert [one.result for one in told.values()] == [(0, 2, 1), (1, 2, 1)]


def test_an_abort_that_hangs_ends_its_rank_after_the_hard_timeout() -> None:
    short = {"soft_timeout": seconds(2), "hard_timeout": seconds(3)}
    with job(3, mains.main, fault="in abort hang", on=(1,), options=short) as made:
        told = made.end(limit_s=60)
    assert told[1].error == "InternalError: the abort took longer than hard_timeout=3 s"
    assert sorted(told[rank].result for rank in (0, 2)) == [(0, 2, 1), (1, 2, 1)]


def test_a_rank_that_does_not_return_is_interrupted() -> None:
    short = {"completion_timeout": seconds(1)}
    with job(2, mains.main, fault="straggles", options=short) as made:
        told = made.end()
    assert [one.result[2] for one in told.values()] == [1, 1]


def test_two_hundred_restarts_leave_nothing_behind() -> None:
    with job(2, mains.many, restarts=200) as made:
        told = made.end()
        keys = made.store.num_keys()
    for one in told.values():
        assert one.result == 200
        # The fewest of five calls: in one of them a thread of the restart before may still be ending.
        early, late = ([min(counts) for counts in zip(*notes, strict=True)] for notes in (one.notes[:5], one.notes[5:]))
        (_, tasks, descriptors, pages), (_, tasks_then, descriptors_then, pages_then) = early, late
        assert (tasks_then, descriptors_then) == (tasks, descriptors)
        assert pages_then - pages < 2048, "8 MiB"
    assert keys < 40 + 4 * 200, "of each iteration the three by which ranks were released, and the note"


@pytest.mark.parametrize("restarts", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_restarts_with_a_model_leave_nothing_behind(restarts: int) -> None:
    """In Python nothing at all; of the process's memory see docs/in_process.md."""
    with job(2, mains.many_models, restarts=restarts) as made:
        told = made.end(limit_s=900)
    for one in told.values():
        assert one.result == restarts
        (_, objects, pages), (_, objects_then, pages_then) = one.notes
        assert objects_then - objects < 30
        assert (pages_then - pages) * 4096 < 12 << 20


def test_it_cannot_be_called_inside_a_group() -> None:
    with job(1, mains.initialized) as made:
        told = made.end()
    assert told[0].error.startswith("ValueError: not torch.distributed.is_initialized() must hold")


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_what_the_environment_lacks(missing: str) -> None:
    with job(1, mains.with_environment, missing=missing) as made:
        told = made.end()
    assert missing in told[0].error
    assert told[0].error.startswith("ValueError")


def test_not_enabled_it_is_the_function_itself() -> None:
    def function(one: int) -> int:
        return one

    assert Wrapper(enabled=False)(function) is function


def test_the_wrapped_function_looks_like_the_function() -> None:
    def function(call: CallWrapper) -> None:
        """Its text."""

    wrapped = Wrapper()(function)
    assert (wrapped.__name__, wrapped.__doc__) == ("function", "Its text.")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"soft_timeouts": 3}, TypeError, "soft_timeouts"),
        ({"soft_timeout": 3}, TypeError, "soft_timeout"),
        ({"soft_timeout": seconds(100)}, ValueError, "soft_timeout=100 s must be below hard_timeout=90 s"),
        ({"store_factory": 3}, TypeError, "store_factory"),
        ({"monitor_process_logfile": "log"}, ValueError, "absolute"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Wrapper(**arguments)


def test_it_decorates_functions_only() -> None:
    with pytest.raises(TypeError, match="not a function"):
        Wrapper()(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_who_is_making_a_group_or_sends_to_a_rank_that_gave_up_is_freed(rounds: int) -> None:
    """One in a hundred such rounds held a rank until gloo's own timeout."""
    with job(3, mains.breaks_while_groups_are_made, rounds=rounds) as made:
        told = made.end()
    assert [one.result for one in told.values()] == [rounds] * 3, told


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
def test_a_rank_that_was_stopped_while_the_other_recovered_is_freed() -> None:
    """Its connections are reset if the other closes them before: gloo then never ends the wait for its answer."""
    with job(2, mains.breaks_while_the_other_is_stopped, rounds=10) as made:
        told = made.end()
    assert [one.result for one in told.values()] == [10] * 2, told
