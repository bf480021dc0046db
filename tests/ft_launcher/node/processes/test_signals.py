"""The signal pipe: what came is read, and every signal is given back as it was."""

from __future__ import annotations

import math
import os
import signal
import threading

import pytest

from ft_launcher.node.processes.signals import RankSignal, SignalPipe, rank_signal, time_to_end
from ft_launcher.settings.job_settings import about_names, named_signals
from tests.program import python


def test_signals_are_read_and_handlers_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    pipe = SignalPipe([signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    assert pipe.wait(60) == signal.SIGUSR1 and pipe.read() == []
    pipe.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_without_signals_it_can_be_made_in_any_thread() -> None:
    found: list[object] = []

    def use() -> None:
        pipe = SignalPipe(())
        found.append(pipe.read())
        pipe.close()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [[]]


def test_a_handler_of_c_is_given_back() -> None:
    code = (
        "import faulthandler, os, signal; from ft_launcher.node.processes.signals import SignalPipe;"
        "faulthandler.register(signal.SIGUSR1, file=2); pipe = SignalPipe([signal.SIGUSR1]);"
        "os.kill(os.getpid(), signal.SIGUSR1); assert pipe.read() == [signal.SIGUSR1]; pipe.close();"
        "os.kill(os.getpid(), signal.SIGUSR1)"
    )
    assert python(code).stderr.count("most recent call first") == 1


@pytest.mark.parametrize(
    ("got", "names", "reaches"),
    [
        ("SIGTERM", "", ("SIGUSR2", False)),
        ("SIGHUP", "", ("SIGUSR2", False)),
        ("SIGQUIT", "", ("SIGQUIT", False)),
        ("SIGUSR1", "", ("SIGUSR1", False)),
        ("SIGUSR1", "SIGTERM,SIGUSR1", ("SIGUSR1", True)),
        ("SIGTERM", "SIGTERM, SIGUSR1", ("SIGTERM", True)),
        ("SIGHUP", "SIGTERM,SIGUSR1", ("SIGUSR2", False)),
    ],
)
def test_what_the_ranks_get(got: str, names: str, reaches: tuple[str, bool]) -> None:
    name, always = reaches
    expected = RankSignal(getattr(signal, name), always)
    assert rank_signal(getattr(signal, got), named_signals(names), signal.SIGUSR2) == expected


def test_names_that_cannot_be() -> None:
    assert about_names("SIGTERM,SIGUSR") == [
        "--signals-to-handle: SIGUSR is not a signal, left out (did you mean SIGUSR2?)"
    ]
    assert about_names("SIGTERM, SIGUSR1") == [] and named_signals("SIGTERM,SIGUSR") == {signal.SIGTERM}
    with pytest.raises(ValueError, match="SIGKILL cannot be handled"):
        named_signals("SIGTERM,SIGKILL")


STOP_S = 15.0


@pytest.mark.parametrize(
    ("arrived", "left_s"),
    [
        ("", math.inf),
        ("TERM", math.inf),
        ("TERM HUP", STOP_S),
        ("TERM TERM TERM TERM", STOP_S),
        ("INT", STOP_S),
        ("TERM INT", STOP_S),
        ("INT INT", 3.0),
        ("INT TERM INT", 3.0),
        ("INT INT INT", 0.0),
        ("TERM INT INT INT", 0.0),
    ],
)
def test_how_long_ranks_may_take_to_end(arrived: str, left_s: float) -> None:
    assert time_to_end([getattr(signal, f"SIG{name}") for name in arrived.split()], STOP_S) == left_s


def test_a_second_interrupt_never_lengthens_the_time() -> None:
    assert time_to_end([signal.SIGINT] * 2, 1.0) == 1.0


IGNORED = """
import os, signal, sys
from ft_launcher.node.processes.signals import SignalPipe, to_handle
number, named = int(sys.argv[1]), set(map(int, sys.argv[2:]))
signal.signal(number, signal.SIG_IGN)
pipe = SignalPipe(to_handle([number], named))
os.kill(os.getpid(), number)
print(*pipe.read(), *pipe.were_ignored)
"""


@pytest.mark.parametrize(
    ("name", "named", "is_handled"),
    [
        ("HUP", False, False),
        ("INT", False, False),
        ("QUIT", False, False),
        ("USR1", False, False),
        ("USR2", False, False),
        ("USR1", True, True),
        ("TERM", False, True),
    ],
)
def test_what_was_ignored_stays_ignored(name: str, named: bool, is_handled: bool) -> None:
    """But for SIGTERM, by which schedulers end a job, and for a signal that the user named."""
    number = str(int(getattr(signal, f"SIG{name}")))
    told = python(IGNORED, number, *([number] if named else [])).stdout.split()
    assert told == [number, number] * is_handled


CHILD = """
import os, signal
from ft_launcher.node.processes.signals import children_reported
def end_of_child():
    child = os.fork()
    if child == 0:
        os._exit(7)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:
        return "no code"
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with children_reported():
    print(end_of_child())
print(end_of_child())
"""


def test_exit_codes_of_children_in_a_program_that_ignores_them() -> None:
    assert python(CHILD).stdout.split("\n") == ["7", "no code", ""]
