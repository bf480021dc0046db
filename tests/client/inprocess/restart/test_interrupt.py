"""An interruption arrives wherever the main thread is, and nowhere else."""

from __future__ import annotations

import contextlib
import cProfile
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ft_client.inprocess.restart.interrupt import Interrupted, Interrupter

LONG_S = 60.0


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    made = Interrupter(lambda: LONG_S)
    yield made
    made.close()


def interrupt_when(interrupter: Interrupter, running: threading.Event) -> threading.Thread:
    def interrupt() -> None:
        running.wait(LONG_S)
        interrupter.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def spin() -> None:
    while True:
        pass


def locked() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def swallowing() -> None:
    try:
        time.sleep(LONG_S)
    except BaseException:
        pass
    time.sleep(LONG_S)


def in_callback() -> None:
    sorted([3, 2, 1], key=lambda number: time.sleep(LONG_S) or number)


def interrupted_while(interrupter: Interrupter, stuck: Callable[[], object]) -> None:
    """Interrupts it as soon as it runs; it is interrupted, and the thread that did it has ended."""
    running = threading.Event()
    thread = interrupt_when(interrupter, running)

    def function() -> None:
        running.set()
        stuck()

    with pytest.raises(Interrupted):
        interrupter.call(function)
    thread.join()


@pytest.mark.parametrize(
    "stuck",
    [lambda: time.sleep(LONG_S), spin, locked, swallowing, in_callback],
    ids=["sleep", "loop", "lock", "swallowed", "callback"],
)
def test_it_arrives(interrupter: Interrupter, stuck: Callable[[], None]) -> None:
    interrupted_while(interrupter, stuck)


def test_it_never_arrives_outside(interrupter: Interrupter) -> None:
    """A thousand interruptions at any moment around the end of a call: one in fifty comes after it, one within it."""
    after, within = 0, 49
    arrived, before = set[int](), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for number in range(1000):
        go = threading.Event()
        thread = interrupt_when(interrupter, go)

        def function(go: threading.Event = go, moment: int = number % 50) -> None:
            if moment == after:
                return
            go.set()
            if moment == within:
                spin()
            for _ in range(moment * 100):  # without a loop no other thread of Python 3.10 runs before the function ends
                pass

        try:
            interrupter.call(function)
        except Interrupted:
            arrived.add(number)
        go.set()
        outside = sum(range(500))
        thread.join()
        assert outside == 124750
        interrupter.reset()
    sys.setswitchinterval(before)
    assert arrived.issuperset(range(within, 1000, 50)) and arrived.isdisjoint(range(after, 1000, 50))


@pytest.mark.parametrize("swallows", [False, True])
def test_a_profiler_of_the_user_goes_on(interrupter: Interrupter, swallows: bool) -> None:
    """Around a call, one that is interrupted, one whose function swallows that, and one after it."""
    running = threading.Event()
    with cProfile.Profile() as profile:
        assert interrupter.call(lambda: 5) == 5
        thread = interrupt_when(interrupter, running)

        def function() -> None:
            running.set()
            try:
                time.sleep(LONG_S)
            except Interrupted:
                if not swallows:
                    raise

        with contextlib.suppress(Interrupted):
            interrupter.call(function)
        thread.join()
        interrupter.reset()
        assert interrupter.call(lambda: 6) == 6
    assert profile.getstats()


def test_what_begins_after_it_does_not_run(interrupter: Interrupter) -> None:
    thread = threading.Thread(target=interrupter.interrupt)
    thread.start()
    thread.join()
    with pytest.raises(Interrupted):
        interrupter.call(lambda: pytest.fail("it ran"))
    interrupter.reset()
    assert interrupter.call(lambda: 5) == 5


def test_what_the_function_raises_passes(interrupter: Interrupter) -> None:
    with pytest.raises(ZeroDivisionError):
        interrupter.call(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        interrupter.call(lambda: sys.exit(3))


def test_the_signal_is_as_before() -> None:
    before = signal.getsignal(signal.SIGURG)
    made = Interrupter(lambda: LONG_S)
    made.close()
    assert signal.getsignal(signal.SIGURG) is before


def test_the_users_own_handler_is_called_and_comes_back(interrupter: Interrupter) -> None:
    interrupter.close()
    called = list[int]()

    def handler(number: int, _frame: object) -> None:
        called.append(number)

    before = signal.signal(signal.SIGURG, handler)
    try:
        made = Interrupter(lambda: LONG_S)
        interrupted_while(made, lambda: time.sleep(LONG_S))
        made.close()
        assert signal.getsignal(signal.SIGURG) is handler
    finally:
        signal.signal(signal.SIGURG, before)
    assert set(called) == {signal.SIGURG}


def test_it_arrives_where_the_function_has_taken_the_signal(interrupter: Interrupter) -> None:
    """And a handler that the function leaves behind stays."""

    def function() -> None:
        signal.signal(signal.SIGURG, handler)
        try:
            time.sleep(LONG_S)
        except BaseException:
            cleaned.append(sum(0 for _ in range(100000)))
            raise

    def handler(_number: int, _frame: object) -> None:
        pass

    cleaned = list[int]()
    before = signal.getsignal(signal.SIGURG)
    try:
        interrupted_while(interrupter, function)
        interrupter.close()
        assert signal.getsignal(signal.SIGURG) is handler
    finally:
        signal.signal(signal.SIGURG, before)
    assert cleaned == [0]


def test_in_another_thread_than_the_main_one() -> None:
    found: list[str] = []

    def work() -> None:
        interrupter, running = Interrupter(lambda: LONG_S), threading.Event()
        thread = interrupt_when(interrupter, running)

        def function() -> None:
            running.set()
            while True:
                time.sleep(0.001)

        try:
            interrupter.call(function)
        except Interrupted:
            found.append("interrupted")
        thread.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG_S)
    assert found == ["interrupted"]


SOON_S = 0.05
"""The grace of these tests; a cleanup of twice as long is beyond it, and one that is not cut off sees its own end."""


class Graces:
    """An interrupter and what it reported.

    Where the thread that is interrupted gets no processor for longer than the grace, one cleanup is reported again.
    """

    def __init__(self, grace_s: float) -> None:
        self.reports = list[tuple[float, str, str]]()
        self.interrupter = Interrupter(lambda: grace_s, lambda *report: self.reports.append(report))

    def reasons(self) -> set[str]:
        return {reason for _, reason, _ in self.reports}

    def places(self) -> set[str]:
        """Returns the lines of source code at which the thread was found: "line 380, in stuck"."""
        return {stack.rstrip().splitlines()[-2].partition(", ")[2] for _, _, stack in self.reports}


@pytest.fixture
def patient() -> Iterator[Graces]:
    made = Graces(LONG_S)
    yield made
    made.interrupter.close()
    assert not made.reports


@pytest.fixture
def impatient() -> Iterator[Graces]:
    made = Graces(SOON_S)
    yield made
    made.interrupter.close()


def looked_at() -> None:
    """Takes long enough for the other thread to look dozens of times."""
    for _ in range(10):
        time.sleep(0.05)


def in_finally() -> None:
    try:
        time.sleep(LONG_S)
    finally:
        looked_at()
        CLEANED.append("finally")


class Cleaning:
    """Cleans up wherever Python calls it by itself."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        looked_at()
        CLEANED.append("exit")


def in_exit() -> None:
    with Cleaning():
        time.sleep(LONG_S)


def in_exit_without_an_error() -> None:
    """The function had ended its work when it was interrupted."""
    with Cleaning():
        pass
    time.sleep(LONG_S)


def in_handler_of_another_error() -> None:
    """The collective failed, since a peer is gone; that came before the interruption."""
    try:
        raise RuntimeError("connection closed by peer")
    except RuntimeError:
        looked_at()
        CLEANED.append("handler")
    time.sleep(LONG_S)


def with_an_error_inside() -> None:
    """A cleanup deals with an error of its own, and goes on."""
    try:
        time.sleep(LONG_S)
    finally:
        with contextlib.suppress(KeyError):
            raise KeyError
        looked_at()
        CLEANED.append("finally")


class CleansInDel:
    def __del__(self) -> None:
        looked_at()
        CLEANED.append("del")


def held_by_a_frame() -> None:
    def inner() -> None:
        held = CleansInDel()
        time.sleep(LONG_S)
        del held

    inner()


CLEANED = list[str]()


@pytest.mark.parametrize(
    "stuck",
    [
        in_finally,
        in_exit,
        in_exit_without_an_error,
        in_handler_of_another_error,
        with_an_error_inside,
        held_by_a_frame,
    ],
)
def test_a_cleanup_is_not_cut_off(patient: Graces, stuck: Callable[[], None]) -> None:
    CLEANED.clear()
    interrupted_while(patient.interrupter, stuck)
    assert len(CLEANED) == 1


def test_a_cleanup_that_takes_longer_than_the_grace_is_cut_off(impatient: Graces) -> None:
    def stuck() -> None:
        try:
            time.sleep(LONG_S)
        finally:
            time.sleep(LONG_S)

    interrupted_while(impatient.interrupter, stuck)
    assert impatient.reasons() == {"the interruption is being handled"} and len(impatient.places()) == 1
    for waited_s, _, stack in impatient.reports:
        assert waited_s >= SOON_S and stack.rstrip().endswith("time.sleep(LONG_S)")


class HangsInDel:
    def __del__(self) -> None:
        time.sleep(LONG_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_del_that_hangs_is_cut_off_and_then_its_caller(impatient: Graces) -> None:
    """Python swallows what is raised there."""

    def stuck() -> None:
        HangsInDel()
        time.sleep(LONG_S)

    interrupted_while(impatient.interrupter, stuck)
    assert impatient.reports[0][1] == "__del__ runs"


def test_each_further_cleanup_has_its_own_grace(impatient: Graces) -> None:
    def stuck() -> None:
        try:
            try:
                time.sleep(LONG_S)
            finally:
                time.sleep(LONG_S)
        finally:
            time.sleep(LONG_S)

    interrupted_while(impatient.interrupter, stuck)
    assert len(impatient.places()) == 2


def test_a_function_that_works_in_a_handler_is_interrupted_after_the_grace(impatient: Graces) -> None:
    def stuck() -> None:
        try:
            raise FileNotFoundError
        except FileNotFoundError:
            while True:
                pass

    interrupted_while(impatient.interrupter, stuck)
    assert impatient.reasons() == {"FileNotFoundError is being handled"}


def test_what_is_handled_around_the_call_holds_nothing_back(patient: Graces) -> None:
    try:
        raise FileNotFoundError
    except FileNotFoundError:
        interrupted_while(patient.interrupter, spin)


def test_a_program_that_swallows_each_interruption_is_interrupted_again(patient: Graces) -> None:
    swallowed = 0

    def stuck() -> None:
        nonlocal swallowed
        while swallowed < 5:
            try:
                time.sleep(LONG_S)
            except BaseException:
                swallowed += 1
        time.sleep(LONG_S)

    interrupted_while(patient.interrupter, stuck)
    assert swallowed == 5


def test_it_comes_by_the_other_way_where_the_signal_is_blocked(impatient: Graces) -> None:
    def stuck() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
        while True:
            time.sleep(0.001)

    try:
        interrupted_while(impatient.interrupter, stuck)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGURG})
    assert impatient.reasons() == {"it executes no Python code"}
