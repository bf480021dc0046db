"""The two-line form: `ft.init()`, `ft.section(name)`, `ft.steps(loader)` over the one client of this process.

The functions create the client when there is none yet, and use the client that the script has created itself when there
is one. Sockets and limits are not known here.

Example:

    import ft_client as ft

    ft.init()
    for batch in ft.steps(loader):
        train(batch)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from ft_client.rank.monitoring.learned_limits import STEP
from ft_client.rank.monitoring.signs_of_life import Section
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract.wire.messages import NO_ITERATION

T = TypeVar("T")


def init(num_warmup_iters: int | None = None) -> RankMonitorClient:
    """Starts the watch at the first call, which blocks for up to 5 s. Returns the client of this process, for what has
    no short form.

    Args:
        num_warmup_iters: first steps that are not judged by a learned limit; None: as configured.
    """
    client = RankMonitorClient.active
    if client is None:
        client = RankMonitorClient()
        client.init_workload_monitoring(num_warmup_iters)
    return client


def section(name: str) -> Section:
    """Returns a context manager: the section is open in its body. Starts the watch if that has not begun.

    Example: `with ft.section("checkpoint"): save()`.

    Raises:
        RankMonitorClientError: on entry, when the section is open already.
    """
    return init().section(name)


def steps(iterable: Iterable[T], start: int | None = None) -> Iterator[T]:
    """Yields the items, each with the section `step` open while the item is fetched and while the loop's body runs.

    Each finished step is reported as an iteration, once the training's iteration is known. The section is closed when
    the body ends, breaks or raises. A loop inside the body of another is part of the outer loop's step.

    Args:
        iterable: what gives the items, a data loader for example.
        start: the iteration of the first step. A training that resumes gives it, so that progress over restarts shows.
            None: the iteration after the last one that was reported. Where none was reported, no step is reported
            either: a count that begins anew with each start of the process would look like a training that never gets
            further.
    """
    client = init()
    if client.is_open(STEP):
        yield from iterable
        return
    known = start is not None or client.iteration != NO_ITERATION
    if start is None:
        iteration = client.iteration + 1
    else:
        iteration = start
    items = iter(iterable)
    while True:
        with client.section(STEP):
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
        if known:
            client.report_iteration(iteration)
        iteration += 1


def report_iteration(iteration: int) -> None:
    """Reports the training's iteration, when it is done: for progress over restarts and for verdicts."""
    init().report_iteration(iteration)


def should_save(interval_s: float | None = None) -> bool:
    """Returns whether to save after this step: the same on all ranks, which call it after the same steps.

    Args:
        interval_s: seconds of training between two saves; None: `--ft-save-interval`. Without either, never.
    """
    return init().should_save(interval_s)


def shutdown() -> None:
    """Ends the watch; it may be started again."""
    if RankMonitorClient.active is not None:
        RankMonitorClient.active.shutdown_workload_monitoring()


class monitored(Generic[T]):
    """All of it in one word: `for batch in ft.monitored(loader)`, or `with ft.monitored():` around a training.

    The loop form starts the watch and goes through `steps`; the `with` form starts the watch and ends it. Arguments are
    those of `steps`.
    """

    def __init__(self, iterable: Iterable[T] = (), start: int | None = None) -> None:
        self._iterable, self._start = iterable, start

    def __iter__(self) -> Iterator[T]:
        return steps(self._iterable, self._start)

    def __enter__(self) -> RankMonitorClient:
        return init()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutdown()
