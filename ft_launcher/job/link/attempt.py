"""Finds or opens the current attempt of a job, elects its coordinator, and watches it for one that may have to follow.

`Link` calls it, in its own threads. What the nodes then agree on is not known here. Each launch of a job is an
attempt, with its own keys in the store. The record names the current attempt, the term of its coordinator, and how the
attempt before it ended; it is replaced by compare-and-set. Nodes that arrive before the end of an attempt join it; if
its coordinator is lost, one of them takes over with the next term. The first node that arrives after the end opens the
next attempt. Nodes that still belong to an attempt that was replaced read from the record how theirs ended.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ft_launcher.decide.policy.case import Policy
from ft_launcher.job.coordinator.beat_schedule import BeatReader
from ft_launcher.job.coordinator.coordinator import Coordinator
from ft_launcher.job.coordinator.formation import Rules
from ft_launcher.job.coordinator.node_messages import Formed, JobOver, decode_as, encode
from ft_launcher.job.link.coordinator_service import BEAT, HOST, TERM, CoordinatorService
from ft_launcher.job.link.questions import COUNTERS
from ft_launcher.job.store.job_store import Head, JobStore
from rank_monitor.contract.errors import ProtocolError, StoreLost
from rank_monitor.contract.exit_codes import ExitCode

logger = logging.getLogger(__name__)


class AttemptEnded(Exception):
    """The job's record is no longer that of this node's attempt; `over` says how that ended."""

    def __init__(self, over: JobOver) -> None:
        super().__init__(over.reason)
        self.over = over


@dataclass(frozen=True)
class NodeSettings:
    """The rules of one job, for the node and for the coordinator on it.

    In seconds: `beat_s` is the period of beats, `timeout_s` the time without a beat after which a node is lost, and
    `close_s` how long the rendezvous may take to close.
    """

    rules: Rules
    policy: Policy
    beat_s: float
    timeout_s: float
    close_s: float = 5.0


def enter_current(store: JobStore) -> bool:
    """Sets the connection to the keys of the current attempt. Returns False if there is none, or it is over.

    Raises:
        StoreLost: the store does not answer, or its record is not one of ours.
    """
    found = _record(store.head())
    if found is None or found.over is not None:
        return False
    store.enter(found.attempt)
    return True


def check(store: JobStore) -> None:
    """Checks that the job's record is that of the connection's attempt.

    Raises:
        AttemptEnded: it is not.
        StoreLost: as for `enter_current`.
    """
    _must_be_of(store.attempt, _record(store.head()))


def become_coordinator(node: str, settings: NodeSettings, store: JobStore, lost_term: int) -> CoordinatorService | None:
    """Tries to become the coordinator: of a new attempt (`lost_term` 0), or as successor of the one of that term.

    On a connection that the link of this `node` shares.

    Returns:
        The coordination, whose threads run; None if another node is the coordinator.

    Raises:
        AttemptEnded: the attempt's record was replaced, or is lost.
        StoreLost: as for `enter_current`.
    """
    head = store.head()
    found = _record(head)
    if lost_term == 0:
        if found is not None and found.over is None:
            return None
        return _open_attempt(node, settings, store, head, found)
    former = _must_be_of(store.attempt, found)
    if former.term != lost_term:
        if former.term > lost_term:  # its coordinator may have died before it wrote that
            store.publish({TERM: str(former.term)})
        return None
    coordination = _write(node, settings, store, head, former, former.before)
    if coordination is not None and coordination.take_over(store, former):
        coordination.start()
        return coordination
    return None


def _open_attempt(
    node: str, settings: NodeSettings, store: JobStore, head: Head | None, last: Formed | None
) -> CoordinatorService | None:
    """Opens the first attempt, or the one after `last`, which is over. Returns None if another node did so first."""
    # A random name: two nodes may open an attempt at once, and must not write the same keys.
    store.enter(secrets.token_hex(4))
    over, before = None, dict[str, JobOver]()
    if last is not None and last.over is not None:
        over = last.over
        before[last.attempt] = over
    other = store.other_job()
    if other:
        hint = f"the store holds the job {other!r}, this one is {store.run_id!r}: is --rdzv-id right?"
        settings = replace(settings, rules=replace(settings.rules, hint=hint))
    coordination = _write(node, settings, store, head, None, before)
    if coordination is None:
        return None
    if over is not None:
        ended = f"an earlier job under this --rdzv-id ended with code {over.exit_code} ({over.reason})"
        logger.info("%s; this is a new one, with a budget of its own", ended)
    try:
        store.remove_other_attempts()
    except StoreLost as lost:
        logger.warning("what an earlier job left in the rendezvous' store could not be removed: %s", lost)
    coordination.start()
    return coordination


def _write(
    node: str,
    settings: NodeSettings,
    store: JobStore,
    head: Head | None,
    former: Formed | None,
    before: dict[str, JobOver],
) -> CoordinatorService | None:
    """Replaces `head` by the record of a new coordinator. Returns None if another node wrote in between."""
    rules = settings.rules
    beats = node
    if store.hosted_here:  # nobody can take over where the coordinator's node hosts the store: nothing to watch for
        rules = replace(rules, hosts=True)
        beats = HOST
    machine = Coordinator(node, rules, settings.policy, time.monotonic(), former)
    formed = replace(machine.formed(), attempt=store.attempt, before=before)
    written = store.set_head(encode(formed), head)
    if written is None:
        return None
    texts = {TERM: str(formed.term), BEAT: beats}
    if former is None:  # so that a look for questions is one operation from the beginning
        texts |= dict.fromkeys(COUNTERS, "0")
    store.publish(texts)
    return CoordinatorService(store, written, formed, machine, settings.beat_s, settings.timeout_s)


def _record(head: Head | None) -> Formed | None:
    if head is None:
        return None
    try:
        return decode_as(Formed, head.value)
    except ProtocolError as error:
        raise StoreLost(f"the job's record cannot be read: {error}") from None


def _must_be_of(attempt: str, found: Formed | None) -> Formed:
    """Returns the record if it is that of this attempt. Otherwise raises AttemptEnded, with how the attempt ended."""
    if found is not None and found.attempt == attempt:
        return found
    lost = int(ExitCode.STORE_HOST_LOST)
    if found is None:
        raise AttemptEnded(JobOver(lost, "the rendezvous' store has lost this job's records"))
    replaced = JobOver(lost, "another job under this --rdzv-id has replaced this one's record")
    raise AttemptEnded(found.before.get(attempt, replaced))


class CoordinatorWatch:
    """Watches the coordinator, on a store apart from the nodes, for one node that may take over from it.

    Deputies look as often as the coordinator does; the others only so that the job outlives coordinator and deputies
    lost at once. `period_s` may be set by another thread: how often a deputy looks, None for the others.
    """

    def __init__(self, beat_s: float, timeout_s: float) -> None:
        self.period_s: float | None = None
        self.asked: Sequence[bytes] = ()
        """The values of `questions.COUNTERS` at the last look."""
        self._beat_s, self._timeout_s = beat_s, timeout_s
        self._term = b""
        self._begin(None)

    def _begin(self, period_s: float | None) -> None:
        self._begun_with = period_s
        if period_s is None:
            period_s = self._timeout_s
        self._beat_reader = BeatReader(self._timeout_s, self._beat_s, period_s)
        self.next_look = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to read the coordinator's beats."""
        if self._begun_with != self.period_s:
            self._begin(self.period_s)
        return time.monotonic() >= self.next_look

    def lost_term(self, store: JobStore) -> int | None:
        """Reads the coordinator's beats. Returns its term if it has not beaten for too long; else None.

        Raises:
            StoreLost: the store does not answer.
        """
        self.next_look = time.monotonic() + self._beat_reader.period_s
        counters, (term, *self.asked) = store.counters([BEAT], (TERM, *COUNTERS))
        now = time.monotonic()
        if term != self._term:  # another took over: it may not have beaten yet
            self._begin(self._begun_with)
            self._term = term
        self._beat_reader.watch([BEAT], now)
        lost = self._beat_reader.read(counters, now)
        # Only a deputy looks often enough: a node that looks seldom would take each look without news for a loss.
        is_deputy = self._begun_with is not None
        if is_deputy:
            self.next_look = self._beat_reader.next_reading(now)
        else:
            self.next_look = now + self._beat_reader.period_s
        if lost:
            return int(term or 1)
        return None
