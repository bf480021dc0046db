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

from ft_client.inprocess.interrupt import Interrupted, Interrupter

LONG_S = 60.0


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    made = Interrupter()
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


class SwallowsInDel:
    def __del__(self) -> None:
        time.sleep(LONG_S)


def deleting() -> None:
    SwallowsInDel()
    time.sleep(LONG_S)


def in_callback() -> None:
    sorted([3, 2, 1], key=lambda number: time.sleep(LONG_S) or number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "stuck",
    [lambda: time.sleep(LONG_S), spin, locked, swallowing, deleting, in_callback],
    ids=["sleep", "loop", "lock", "swallowed", "del", "callback"],
)
def test_it_arrives(interrupter: Interrupter, stuck: Callable[[], None]) -> None:
    running = threading.Event()
    thread = interrupt_when(interrupter, running)

    def function() -> None:
        running.set()
        stuck()

    with pytest.raises(Interrupted):
        interrupter.call(function)
    thread.join()


def test_it_never_arrives_outside(interrupter: Interrupter) -> None:
    """A thousand interruptions at any moment around the end of a call."""
    arrived, before = 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for number in range(1000):
        go = threading.Event()
        thread = interrupt_when(interrupter, go)

        def function(go: threading.Event = go, size: int = number % 50 * 1000) -> None:
            go.set()
            sum(range(size))

        try:
            interrupter.call(function)
        except Interrupted:
            arrived += 1
        outside = sum(range(500))
        thread.join()
        assert outside == 124750
        interrupter.reset()
    sys.setswitchinterval(before)
    assert 0 < arrived < 1000


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
    made = Interrupter()
    made.close()
    assert signal.getsignal(signal.SIGURG) is before


def test_the_users_own_handler_stays() -> None:
    before = signal.signal(signal.SIGURG, interrupt_handler)
    try:
        made = Interrupter()
        assert signal.getsignal(signal.SIGURG) is interrupt_handler
        made.close()
        assert signal.getsignal(signal.SIGURG) is interrupt_handler
    finally:
        signal.signal(signal.SIGURG, before)


def interrupt_handler(_number: int, _frame: object) -> None:
    """The user's."""


def test_in_another_thread_than_the_main_one() -> None:
    found: list[str] = []

    def work() -> None:
        interrupter, running = Interrupter(), threading.Event()
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
