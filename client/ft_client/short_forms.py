"""The two-line form: `ft.init()`, `ft.section(name)`, `ft.steps(loader)` over the one client of this process.

They create the client when there is none yet, and use the one that the script created itself when there is. Sockets and
limits are not known here.
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
    """Starts the watch at the first call. Returns the client of this process, for what has no short form.

    Args:
        num_warmup_iters: first steps that are not judged by a learned limit; None: as configured.
    """
    client = RankMonitorClient.active
    if client is None:
        client = RankMonitorClient()
        client.init_workload_monitoring(num_warmup_iters)
    return client


def section(name: str) -> Section:
    """A context manager: the section is open in its body.

    Raises:
        RankMonitorClientError: on entry, when it is open already.
    """
    return init().section(name)


def steps(iterable: Iterable[T], start: int | None = None) -> Iterator[T]:
    """The items, each with the section `step` open while it is fetched and while the loop's body runs.

    Reports each finished step as an iteration once the training's iteration is known; the section is closed when the
    body ends, breaks or raises. A loop inside the body of another is part of that one's step.

    Args:
        start: the first step's iteration; a training that resumes gives it, so that progress over restarts shows.
            None: the one after the last that was reported; when none was, none is: a count that begins anew with each
            start of the process would look like a training that never gets further.
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
    """Reports the training's iteration: for progress over restarts, warm-up and verdicts."""
    init().report_iteration(iteration)


def should_save(interval_s: float | None = None) -> bool:
    """Whether to save after this step: the same on all ranks, which call it after the same steps.

    Args:
        interval_s: seconds of training between two saves; None: `--ft-save-interval`. Without either, never.
    """
    return init().should_save(interval_s)


def shutdown() -> None:
    """Ends the watch; it may be started again."""
    if RankMonitorClient.active is not None:
        RankMonitorClient.active.shutdown_workload_monitoring()


class monitored(Generic[T]):
    """The whole protocol in one word: `for batch in ft.monitored(loader)`, or `with ft.monitored():` around a training.

    The loop form starts the watch and goes through `steps`; the `with` form starts the watch and ends it.
    """

    def __init__(self, iterable: Iterable[T] = (), start: int | None = None) -> None:
        self._iterable, self._start = iterable, start

    def __iter__(self) -> Iterator[T]:
        return steps(self._iterable, self._start)

    def __enter__(self) -> RankMonitorClient:
        return init()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutdown()
