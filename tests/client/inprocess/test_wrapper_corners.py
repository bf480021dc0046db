"""The wrapper with real ranks, where callbacks, signals and arguments do what they should not."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ft_client.inprocess.restart.interrupt import Interrupted, Interrupter
from ft_client.inprocess.restart.user_function import release_frames, was_never_called
from ft_client.inprocess.standalone.store_host import own_address
from tests.client.inprocess import corner_mains
from tests.client.inprocess.job import job
from tests.patience import patient

SOON_S = 60.0
"""Less than the time for which ranks wait for each other at a barrier (100 s)."""


@pytest.mark.parametrize("ranks", [1, 3])
def test_when_nobody_would_be_active_all_end_at_once(ranks: int) -> None:
    with job(ranks, corner_mains.not_divisible, divisor=4) as made:
        told = made.end(SOON_S)
    assert {one.error for one in told.values()} == {f"RestartAbort: none of {ranks} ranks would be active"}


def test_when_nobody_is_active_after_a_restart_all_end_at_once() -> None:
    with job(3, corner_mains.not_divisible_later) as made:
        told = made.end(SOON_S)
    assert told[2].error == "SystemExit: 3"
    assert {told[rank].error for rank in (0, 1)} == {"RestartAbort: none of 2 ranks would be active"}


def test_when_all_are_discarded_all_end_at_once() -> None:
    with job(3, corner_mains.all_discarded) as made:
        told = made.end(SOON_S)
    assert told[2].error == "SystemExit: 3"
    assert all(told[rank].error.startswith("RankDiscarded") for rank in (0, 1))


@pytest.mark.parametrize("on", [(2,), (0,), (0, 1, 2)], ids=str)
def test_control_c_ends_a_rank_wherever_it_is(on: tuple[int, ...]) -> None:
    """A spare waits in the wrapper itself; the others are told, and do not wait for it at the next barrier."""
    with job(3, corner_mains.with_a_spare, active=2) as made:
        made.until(lambda: made.noted("waits") == [0, 1] and len(made.noted("ready")) == 3)
        for rank in on:
            made.kill(rank, signal.SIGINT)
        told = made.end(SOON_S)
    assert all(told[rank].error.startswith("KeyboardInterrupt") for rank in on)
    left = sorted(one.result for rank, one in told.items() if rank not in on)
    assert left == [(0, 2, 1), (1, 2, 1)][: len(left)]


@pytest.mark.parametrize(("error", "told_as"), [("RestartAbort", "RestartAbort: enough"), ("exit", "SystemExit: 5")])
def test_what_ends_a_rank_ends_it_in_the_abort_too(error: str, told_as: str) -> None:
    with job(2, corner_mains.abort_raises, error=error) as made:
        told = made.end(SOON_S)
    assert (told[0].error, told[1].result) == (told_as, (0, 1, 1))


def test_a_spare_that_fails_when_all_is_done_is_done() -> None:
    with job(2, corner_mains.late_spare) as made:
        told = made.end(SOON_S)
    assert (told[0].result, told[1].result, told[1].error) == ((0, 1), None, "")


def test_terminate_may_end_the_process() -> None:
    with job(2, corner_mains.terminate_exits) as made:
        told = made.end(SOON_S)
    assert (told[0].result, told[1].error) == ((0, 1, 1), "SystemExit: 7")


@pytest.mark.parametrize("main", [corner_mains.wrong_arguments, corner_mains.wrong_arguments_with_wrapper])
def test_arguments_that_do_not_fit_are_no_fault(main: Any) -> None:
    with job(2, main) as made:
        told = made.end(SOON_S)
    assert all(one.error.startswith("TypeError") for one in told.values())


@pytest.mark.parametrize("where", ["initialize", "finalize"])
def test_a_callback_that_returns_nothing_is_reported_once(where: str) -> None:
    """What a callback returns matters to a `Compose` only, as with NVIDIA's wrapper."""
    with job(2, corner_mains.returns_nothing, where=where) as made:
        told = made.end(SOON_S)
    assert [one.result for _, one in sorted(told.items())] == [(0, 2, 1), (1, 2, 1)]
    lines = [[note for note in one.notes if "a callback returns the state" in note] for one in told.values()]
    assert sorted(lines) == [[], [f"{where} returned None; a callback returns the state that it was given"]]


def test_whatever_a_health_check_raises_is_a_health_check_error() -> None:
    with job(2, corner_mains.unhealthy) as made:
        told = made.end(SOON_S)
    assert told[0].error.startswith("HealthCheckError: health_check raised ZeroDivisionError: no card")
    assert told[1].result == (0, 1, 1)


@pytest.mark.parametrize("end", ["returns", "returns at last", "fails"])
def test_a_call_leaves_no_connection_behind(end: str) -> None:
    with job(1, corner_mains.leaves_connections, end=end) as made:
        assert made.end(SOON_S)[0].result == 0


def test_the_advice_about_nccl_is_given_at_the_call() -> None:
    with job(1, corner_mains.advised) as made:
        told = made.end(SOON_S)
    assert told[0].result == (0, 1)
    assert any(
        "ends the process after 60 s in a collective, before hard_timeout=90 s" in note for note in told[0].notes
    )
    assert any("set NCCL_NVLS_ENABLE=0" in note for note in told[0].notes)


def test_a_call_without_a_fault_says_at_debug_level_when_it_begins_and_ends() -> None:
    with job(1, corner_mains.told_at_debug_level) as made:
        told = made.end(SOON_S)
    assert [note for note in told[0].notes if "ft_client.inprocess:" in note] == [
        "DEBUG:ft_client.inprocess:rank 0 of 1: a wrapped call begins",
        "DEBUG:ft_client.inprocess:rank 0 of 1: the wrapped call has ended",
    ]


def test_a_store_that_nobody_serves_is_named() -> None:
    with job(2, corner_mains.nobody_serves, hosted=False) as made:
        told = made.end(SOON_S)
    assert told[0].result is None and not told[0].error
    assert re.search(r"127\.0\.0\.1.*\d{4}", told[1].error), told[1].error


def test_a_wrapped_function_in_a_wrapped_function() -> None:
    with job(2, corner_mains.nested) as made:
        told = made.end(SOON_S)
    assert all("cannot be called by one" in one.result for one in told.values())


def test_what_a_failed_call_held_is_gone_before_the_next() -> None:
    with job(2, corner_mains.keeps_a_model) as made:
        told = made.end(SOON_S)
    for one in told.values():
        assert one.notes == [("alive", number, 0) for number in range(3)]


def test_a_failure_in_consequence_is_not_counted() -> None:
    with job(2, corner_mains.in_consequence) as made:
        told = made.end(SOON_S)
    assert [one.result for one in told.values()] == [2, 2]


def test_a_rank_that_was_stopped_does_not_go_on_beside_the_others(tmp_path: Path) -> None:
    """It wakes up when the others are some rounds further."""
    go = tmp_path / "go"
    with job(3, corner_mains.stopped, go=str(go)) as made:
        made.until(lambda: made.noted("waits") == [1, 2])
        made.kill(1, signal.SIGSTOP)
        go.touch()
        made.until(lambda: made.noted("last") == [0])
        made.kill(1, signal.SIGCONT)
        made.until(lambda: bool(made.ranks[1].error))
        go.with_name("end").touch()
        told = made.end()
    assert told[1].notes == ["waits"]
    assert sorted(told[rank].result for rank in (0, 2)) == [(0, 2, 4), (1, 2, 4)]


def test_the_signal_of_a_user_does_not_leave_a_function_to_be_interrupted() -> None:
    """Raised while the call is on its way out, it passes, and nothing is armed any more."""
    interrupter = Interrupter(lambda: SOON_S)

    class Nasty:
        def __init__(self) -> None:
            self.times = 0

        def __enter__(self) -> None:
            self.times += 1
            if self.times == 1:
                raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    interrupter._lock = Nasty()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        interrupter.call(lambda: 1)
    asking = threading.Thread(target=interrupter.interrupt)  # waits for a function that runs: there is none
    asking.start()
    asking.join(patient(20))
    assert not asking.is_alive()
    with pytest.raises(Interrupted):
        interrupter.call(lambda: 1)
    interrupter.close()


def test_what_fails_before_the_first_line_was_never_called() -> None:
    def of(function: Any, *args: object) -> Exception:
        try:
            function(*args)
        except TypeError as error:
            return error
        raise AssertionError

    assert not was_never_called(of(lambda: int("1", base=[])))  # type: ignore[call-overload]
    assert not was_never_called(ValueError("with no trace"))


def test_a_chain_of_exceptions_holds_nothing() -> None:
    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    def first() -> None:
        large = Large()
        raise KeyError(str(large))

    def second() -> None:
        large = Large()
        try:
            first()
        except KeyError as error:
            raise ValueError(str(large)) from error

    try:
        second()
    except ValueError as error:
        kept: BaseException = error
    assert Large.alive == 2
    release_frames(kept)
    assert Large.alive == 0
    kept.__cause__.__cause__ = kept  # type: ignore[union-attr]
    release_frames(kept)


def test_a_name_that_means_loopback_here_is_told_to_others_as_it_is() -> None:
    assert own_address(("localhost", 29500)) == "localhost"
    assert own_address(("127.0.0.1", 29500)) == "127.0.0.1"
