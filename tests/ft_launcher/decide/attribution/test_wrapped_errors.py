"""Errors inside the text of others, as a data loader, a spawned process, Ray and exception groups print them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader, Dataset

from ft_client.rank.monitoring import exception_report, process
from ft_launcher.decide.attribution.error_text import excerpt, location, of_output
from ft_launcher.decide.attribution.fault import FaultClass
from ft_launcher.decide.attribution.first_failure import what_was_raised
from ft_launcher.decide.attribution.hints import NodeEvidence
from ft_launcher.decide.attribution.known_errors import is_about_peers, of_exception
from ft_launcher.decide.attribution.wrapped_errors import errors_inside, without_margins
from rank_monitor.contract.wire.messages import RankException

NO_ROOM = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
PEER = "Connection closed by peer [127.0.0.1]:4242"
DEPTH = 40
"""Frames in which the errors are raised: their text is longer than what a rank reports of a message."""


def fail(kind: Callable[[str], BaseException], text: str, depth: int = DEPTH) -> None:
    """Raises an error that many frames of different lines lead to: Python leaves out repeated ones."""
    if depth == 0:
        raise kind(text)
    if depth % 2:
        fail(kind, text, depth - 1)
    else:
        fail(kind, text, depth=depth - 1)


class Samples(Dataset[int]):
    """Each of its samples fails to be read."""

    def __init__(self, kind: Callable[[str], BaseException], text: str) -> None:
        self.kind, self.text = kind, text

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        fail(self.kind, self.text)
        return 0


def in_loader(kind: Callable[[str], BaseException], text: str) -> None:
    next(iter(DataLoader(Samples(kind, text), num_workers=1, multiprocessing_context="fork")))


def _spawned(number: int, kind: Callable[[str], BaseException], text: str) -> None:
    fail(kind, text)


def in_spawned(kind: Callable[[str], BaseException], text: str) -> None:
    start_processes(_spawned, (kind, text), nprocs=1, start_method="fork")


def in_pool(kind: Callable[[str], BaseException], text: str) -> None:
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
        pool.submit(fail, kind, text).result()


def in_chain(kind: Callable[[str], BaseException], text: str) -> None:
    try:
        fail(kind, text)
    except Exception as error:
        fail(RuntimeError, "the step failed" + " of it" * 1000)
        raise AssertionError from error


def in_group(kind: Callable[[str], BaseException], text: str) -> None:
    errors = []
    for one, words in ((kind, text), (RuntimeError, PEER)):
        try:
            fail(one, words)
        except Exception as error:
            errors.append(error)
    raise ExceptionGroup("tasks failed", errors)  # type: ignore[name-defined] # noqa: F821 - Python 3.11


def reported(failing: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> RankException:
    """Returns what a rank reports of an error of its own."""
    sent: list[RankException] = []
    link = SimpleNamespace(post=lambda message, now_ns, timeout_s: sent.append(message))
    monkeypatch.setattr(process, "current", lambda: link)
    try:
        failing()
    except Exception as error:
        exception_report.report(error, error.__traceback__)
    (found,) = sent
    return found


grouped = pytest.param(in_group, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no exception groups"))


@pytest.mark.parametrize("where", [in_loader, in_spawned, in_pool, in_chain, grouped])
@pytest.mark.parametrize(
    ("kind", "text", "fault_class"),
    [
        (RuntimeError, NO_ROOM, FaultClass.MEMORY),
        (KeyError, "label", FaultClass.USER_ERROR),
        (OSError, "Stale file handle", FaultClass.INFRASTRUCTURE),
    ],
)
def test_the_error_at_the_end_decides(
    where: Callable[[Callable[[str], BaseException], str], None],
    kind: type[Exception],
    text: str,
    fault_class: FaultClass,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = reported(lambda: where(kind, text), monkeypatch)
    cause = of_exception(found, NodeEvidence())
    assert cause.fault_class is fault_class, found
    assert is_about_peers(found) < 1
    if fault_class is FaultClass.MEMORY:
        assert "/dev/shm" in cause.hint
    assert len(found.message) + len(found.traceback) <= 9000


@pytest.mark.parametrize("where", [in_loader, in_spawned])
def test_a_lost_peer_of_another_process(
    where: Callable[[Callable[[str], BaseException], str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_about_peers(reported(lambda: where(RuntimeError, PEER), monkeypatch)) == 1


def test_a_group_is_a_consequence_where_each_of_its_members_is(monkeypatch: pytest.MonkeyPatch) -> None:
    group = pytest.importorskip("builtins").__dict__.get("ExceptionGroup")
    if group is None:
        pytest.skip("no exception groups before Python 3.11")

    def of(*texts: str) -> RankException:
        def failing() -> None:
            raise group("tasks failed", [RuntimeError(text) for text in texts])

        return reported(failing, monkeypatch)

    assert [is_about_peers(of(PEER, PEER)), is_about_peers(of(PEER, "bad")), is_about_peers(of("bad"))] == [1, 0.5, 0]


def ray_task(text: str, frames: int = 40) -> str:
    """What an error of a task of Ray has as its text, with the colours of its terminal."""
    lines = "".join(f'  File "/job/x{number}.py", line {number}, in f\n    g()\n' for number in range(frames))
    return f"\x1b[36mray::train()\x1b[39m (pid=7, ip=10.0.0.1)\n{lines}{text}"


RAY_IN_RAY = ray_task("ray.exceptions.RayTaskError(RuntimeError): " + ray_task(f"RuntimeError: {NO_ROOM}"))


@pytest.mark.parametrize(
    ("kind", "text", "fault_class"),
    [
        ("RayTaskError(RuntimeError)", ray_task(f"RuntimeError: {NO_ROOM}"), FaultClass.MEMORY),
        ("RayTaskError(RuntimeError)", RAY_IN_RAY, FaultClass.MEMORY),
        ("RayTaskError(KeyError)", ray_task("KeyError: 'label'"), FaultClass.USER_ERROR),
        ("RayTaskError(OSError)", ray_task("OSError: [Errno 28] No space left on device"), FaultClass.INFRASTRUCTURE),
        ("OutOfMemoryError", "Task was killed due to the node running low on memory.", FaultClass.MEMORY),
    ],
)
def test_a_task_of_ray(kind: str, text: str, fault_class: FaultClass) -> None:
    found = RankException(f"ray.exceptions.{kind}", text, "", 0.0)
    cause = of_exception(found, NodeEvidence())
    assert cause.fault_class is fault_class
    assert "GPU" not in cause.hint


@pytest.mark.parametrize(
    ("end", "fault_class"),
    [
        ("signal SIGTERM", FaultClass.PREEMPTION),
        ("signal SIGNO", FaultClass.UNKNOWN),
        ("exit code 127", FaultClass.USER_ERROR),
    ],
)
def test_a_spawned_process_that_raised_nothing(end: str, fault_class: FaultClass) -> None:
    kind = "torch.multiprocessing.spawn.ProcessExitedException"
    cause = of_exception(RankException(kind, f"process 0 terminated with {end}", "", 0.0), NodeEvidence())
    assert cause.fault_class is fault_class


@pytest.mark.parametrize("where", [in_loader, grouped])
def test_what_a_program_printed_of_it(where: Callable[[Callable[[str], BaseException], str], None]) -> None:
    try:
        where(RuntimeError, NO_ROOM)
    except Exception:
        printed = traceback.format_exc()
    found = of_output("step 1\n" + printed)
    assert found is not None
    assert of_exception(found, NodeEvidence()).fault_class is FaultClass.MEMORY
    assert location(found.traceback)
    assert any("fail" in line or NO_ROOM in line for line in excerpt(found.traceback))


def test_the_headline_names_the_error_inside() -> None:
    found = RankException("RuntimeError", f"Caught it in worker 0.\n{ray_task(f'OSError: {NO_ROOM}')}", "", 0.0)
    assert (
        what_was_raised(found) == f"raised RuntimeError: Caught it in worker 0. (the error inside: OSError: {NO_ROOM})"
    )


@pytest.mark.parametrize(
    "text",
    ["", "bad sample", "bad\n  indented\n\nnot an error", "a\n[...]\nb", "\n" * 100],
)
def test_no_error_inside(text: str) -> None:
    assert [error for error in errors_inside(text) if "Error" in error] == []
    assert without_margins(text) == text


def test_searching_takes_time_linear_in_the_text() -> None:
    hostile = [
        "  + Exception Group Traceback (most recent call last):\n" * 20_000,
        "  x\ny\n" * 200_000,
        "+-" * 500_000,
    ]
    started = time.process_time()
    for text in hostile:
        assert is_about_peers(RankException("RuntimeError", text, text, 0.0)) == 0
        of_output(text)
    assert time.process_time() - started < 60
