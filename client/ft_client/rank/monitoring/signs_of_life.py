"""The hot path: heartbeats, sections and iterations of the training in this process.

Base class of `RankMonitorClient`. The open sections are kept here and sent through the link. Each call also notes the
interval since the last one, from which limits can be learned (`learned_limits.py`).

No call blocks, and a fault of the monitor raises nothing. Only misuse is raised, before anything is sent.

Threads: any thread of the training may call. No lock is taken: each step is one operation of the interpreter. A report
of sections that was overtaken by a change of another thread is followed by one with the whole set as it is then.
"""

from __future__ import annotations

import copy
import itertools
from time import monotonic_ns
from types import TracebackType

from ft_client.errors import RankMonitorClientError
from ft_client.rank.monitoring.learned_limits import Observed
from ft_client.rank.monitoring.link import Link
from ft_client.rank.monitoring.watchdog import megatron_iteration
from rank_monitor.contract.wire import codec
from rank_monitor.contract.wire.messages import NO_ITERATION, IterationReached

_MAX_ITERATION = 2**63 - 1
"""The field in the message is a signed number of 64 bits."""


class SignsOfLife:
    """Sends the training's signs of life.

    Attributes:
        is_initialized: whether calls are expected now. Without a link, as without a launcher, they do nothing.
        iteration: the last iteration reported; -1: none was.
    """

    def __init__(self) -> None:
        self.is_initialized = False
        self.iteration = NO_ITERATION
        self._link: Link | None = None
        self._observed = Observed()
        self._observed_before_fault: Observed | None = None
        """What was observed until an interruption, while `stop_learning` is in force."""
        self._open: dict[str, int] = {}
        """The open sections, each with the moment of its opening."""
        self._left_open: set[str] = set()
        """Sections that an interrupted call left open: their end may still be called, and is no misuse."""
        self._names: set[str] = set()
        """Names that were checked."""
        self._changes = itertools.count(1)
        self._last_change = 0
        """The number of the last change of the open sections, by any thread."""

    def send_heartbeat(self) -> None:
        """Reports that the training is alive. Does not block.

        Raises:
            RankMonitorClientError: the watch has not begun (`init_workload_monitoring`).
        """
        if not self.is_initialized:
            raise not_initialized("send_heartbeat")
        link = self._link
        if link is None:
            return
        now_ns = monotonic_ns()
        self._observed.sign(now_ns)
        if link.dirty:
            self._send_sections(link, now_ns)
        else:
            link.send(codec.heartbeat(next(link.sequence), now_ns))

    def start_section(self, section: str) -> None:
        """Opens a section of any name. Sections may overlap and need not be nested. Does not block.

        Raises:
            RankMonitorClientError: the watch has not begun, the section is open already, the name is no text or too
                long, or too many sections are open.
        """
        if not self.is_initialized:
            raise not_initialized("start_section")
        link = self._link
        if link is None:
            return
        if section in self._open:
            raise RankMonitorClientError(f"section {section!r} is open already")
        if section not in self._names or len(self._open) >= codec.MAX_OPEN_SECTIONS:
            self._check_name(section)
        iteration = megatron_iteration()
        if iteration is not None:
            self.iteration = iteration
        now_ns = monotonic_ns()
        if not self._open:
            self._observed.entered(now_ns)
        self._observed.sign(now_ns)
        self._open[section] = now_ns
        self._last_change = next(self._changes)
        self._send_sections(link, now_ns)

    def end_section(self, section: str) -> None:
        """Closes a section. Does not block.

        Raises:
            RankMonitorClientError: the watch has not begun, or the section is not open.
        """
        if not self.is_initialized:
            raise not_initialized("end_section")
        link = self._link
        if link is None:
            return
        now_ns = monotonic_ns()
        since_ns = self._open.pop(section, None)
        if since_ns is None:
            if section in self._left_open:
                return
            raise RankMonitorClientError(f"section {section!r} is not open")
        self._note_closed(section, since_ns, now_ns)
        self._last_change = next(self._changes)
        self._send_sections(link, now_ns)

    def end_all_sections(self) -> None:
        """Closes every open section.

        Raises:
            RankMonitorClientError: not initialised.
        """
        if not self.is_initialized:
            raise not_initialized("end_all_sections")
        for name in list(self._open):
            self.end_section(name)

    def is_open(self, name: str) -> bool:
        """Whether a section is open."""
        return name in self._open

    def section(self, name: str) -> Section:
        """Returns a context manager: the section is open in its body.

        Example: `with client.section("checkpoint"): save()`. If the body raises, the time of the section teaches no
        limit.
        """
        return Section(self, name)

    def report_iteration(self, iteration: int) -> None:
        """Reports the training's iteration. Does not block.

        The launcher measures progress over restarts by it, and verdicts name it. To be called when the iteration is
        done.

        Raises:
            RankMonitorClientError: the watch has not begun, or `iteration` is no whole number from 0 to 2**63 - 1.
        """
        if not self.is_initialized:
            raise not_initialized("report_iteration")
        try:
            number = int(iteration)
        except (TypeError, ValueError, OverflowError):
            raise RankMonitorClientError(f"iteration {iteration!r} is not a whole number") from None
        if not 0 <= number <= _MAX_ITERATION:
            raise RankMonitorClientError(f"iteration {iteration!r} is out of range")
        self.iteration = number
        link = self._link
        if link is not None:
            now_ns = monotonic_ns()
            self._observed.last_sign_ns = now_ns
            link.send(codec.encode(IterationReached(number), next(link.sequence), now_ns))

    def discount(self, name: str) -> None:
        """Excludes an open section from learned limits, as it is left by an exception: its time begins now."""
        if name in self._open:
            self._observed.last_sign_ns = self._open[name] = monotonic_ns()

    def stop_learning(self) -> None:
        """Excludes intervals that end from now on from learned limits: the training is interrupted, and what follows is
        no usual interval. Called by the in-process wrapper, from any thread."""
        if self._observed_before_fault is None:
            seen = copy.copy(self._observed)
            seen.sections_ns = seen.sections_ns.copy()
            self._observed_before_fault = seen

    def learn_again(self, now_ns: int) -> None:
        """Ends `stop_learning`: what was observed since is dropped, and the next intervals begin at `now_ns`."""
        if self._observed_before_fault is not None:
            self._observed, self._observed_before_fault = self._observed_before_fault, None
        self._observed.begin(now_ns)

    def begin_anew(self, now_ns: int) -> None:
        """Closes the sections that an earlier call of the training's function left open. Called when the wrapper calls
        the function again. Their end may still be called: the code of the earlier call may be unwinding."""
        self._left_open |= self._open.keys()
        self._open.clear()
        self._last_change = next(self._changes)
        self.learn_again(now_ns)

    def _check_name(self, name: str) -> None:
        """Raises RankMonitorClientError unless a section of this name can be reported. Once for each name."""
        try:
            fits = len(name.encode()) <= codec.MAX_NAME_BYTES
        except (AttributeError, ValueError):
            fits = False
        if not fits:
            raise RankMonitorClientError(f"section name {name!r} is not text of at most {codec.MAX_NAME_BYTES} bytes")
        if len(self._open) >= codec.MAX_OPEN_SECTIONS:
            raise RankMonitorClientError(f"at most {codec.MAX_OPEN_SECTIONS} sections may be open at a time")
        self._names.add(name)

    def _note_closed(self, name: str, since_ns: int, now_ns: int) -> None:
        """Notes the end of a section for learned limits."""
        observed = self._observed
        observed.sign(now_ns)
        observed.closed(name, now_ns - since_ns)
        if not self._open:
            observed.left(now_ns)

    def _send_sections(self, link: Link, sent_ns: int) -> None:
        """Sends the whole set of open sections; once more if another thread has changed the set meanwhile."""
        while True:
            link.dirty = False
            change = self._last_change
            link.send(codec.sections(next(link.sequence), sent_ns, self.iteration, self._open.copy()))
            if change == self._last_change:
                return


class Section:
    """A section as a context manager, from `SignsOfLife.section`."""

    def __init__(self, client: SignsOfLife, name: str) -> None:
        self._client, self._name = client, name

    def __enter__(self) -> None:
        self._client.start_section(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._client.discount(self._name)
        try:
            self._client.end_section(self._name)
        except RankMonitorClientError:
            if error is None:  # else the training's own error matters more
                raise


def not_initialized(call: str) -> RankMonitorClientError:
    """Returns the error of a call that came before `init_workload_monitoring`."""
    return RankMonitorClientError(f"{call}() needs init_workload_monitoring() first")
