"""Restarts in process that help nothing end with the reason; and whose fault it is when a peer is gone. No launcher."""

from __future__ import annotations

from tests.client.inprocess import escalation_mains, mains
from tests.client.inprocess.job import job, seconds
from tests.client.inprocess.test_deaths import SHORT


def test_the_same_fault_again_and_again_ends_the_call() -> None:
    options = {"same_error_limit": 3}
    with job(2, mains.main, hosted=False, fault="exception", times=100, options=options) as made:
        told = made.end()
    for one in told.values():
        assert one.error.startswith("RestartAbort: the same fault 3 times in a row: ValueError at "), one
        assert one.error.endswith(" on rank 1")
    assert [note[1] for note in told[1].notes] == [0, 1, 2]


def test_without_a_launcher_a_function_may_fail_as_often_as_it_needs() -> None:
    defaults = dict.fromkeys(("same_error_limit", "no_progress_limit", "soft_timeout_limit"))
    with job(2, mains.main, hosted=False, fault="exception", times=4, options=defaults) as made:
        told = made.end()
    assert {rank: (one.error, one.result) for rank, one in told.items()} == {0: ("", (0, 2, 4)), 1: ("", (1, 2, 4))}


def test_so_does_a_hang_right_after_each_restart() -> None:
    """The rank that hung ends by SIGTERM, as after hard_timeout; the other, which made progress, has the reason."""
    options = {**SHORT, "hard_timeout": seconds(30), "soft_timeout_limit": 1}
    with job(2, mains.main, hosted=False, fault="hang", times=100, options=options) as made:
        told = made.end()
    assert told[0].error == "RestartAbort: 1 hangs in a row right after a restart"
    assert [note[1] for note in told[0].notes] == [0, 1]
    assert (told[1].error, told[1].exit_code) == ("", -15)


def test_a_child_of_a_process_that_was_wrapped_is_watched_too() -> None:
    with job(1, escalation_mains.hangs_in_a_child, hosted=False) as made:
        told = made.end()
    assert told[0].result == -15, told[0]


def test_so_do_restarts_without_progress() -> None:
    with job(2, escalation_mains.without_progress, hosted=False, limit=3) as made:
        told = made.end()
    assert {one.error for one in told.values()} == {"RestartAbort: 3 restarts in a row without progress"}
    assert told[1].notes[-1] == 3, "the first showed progress"


def test_the_fault_is_that_of_the_rank_that_is_gone() -> None:
    """Its connections end before its process is seen to end, so that others fail first: in consequence."""
    with job(3, escalation_mains.counted, hosted=False, victim=1) as made:
        told = made.end()
    assert told[1].exit_code == -9
    for rank in (0, 2):
        assert told[rank].error == "", told[rank]
        assert told[rank].result == (1, 0)
        assert ("fault", "NoneType") in told[rank].notes
