"""Finds or opens the current attempt of a job, elects its coordinator, and watches it for one that may have to follow.

`node_link.py` calls it: at its creation in the caller's thread, later in `ft_node_speak` and `ft_node_beat`. What the
nodes then agree on is not known here.

Each launch of a job is an attempt, with its own keys in the store, so that nothing of an earlier launch is read by
mistake. One record (`Formed`) says which attempt is the current one, who coordinates it in which term, whether it is
over, and how the attempt before it ended. It is replaced by compare-and-set, so of several nodes one wins.

    no record, or that of an attempt that is over
        -> the first node opens the next attempt, with a random name, and coordinates in term 1 (`_open_attempt`)
    the record of a running attempt
        -> each node that arrives joins it (`enter_current`)
    its coordinator makes no beat for the node timeout
        -> one of its nodes writes the record with the next term and takes over (`become_coordinator`)
    the record of another attempt
        -> a node of the old one reads there how its own attempt ended, and ends with that (`AttemptEnded`)

Example, on a store apart from the nodes: all launchers are killed and started again at once, with the same `--rdzv-id`.
The record says that the old attempt still runs, so the new nodes join it. They find that its coordinator is silent,
take over, and the job goes on with its next cycle and with the rest of its budget.
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
from ft_launcher.job.store.job_store import MAX_SENT, Head, JobStore
from rank_monitor.contract.errors import ProtocolError, StoreLost
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.wire.foreign import whole_number

logger = logging.getLogger(__name__)


class AttemptEnded(Exception):
    """The job's record is no longer that of this node's attempt; `over` says how this node's attempt ended."""

    def __init__(self, over: JobOver) -> None:
        super().__init__(over.reason)
        self.over = over


@dataclass(frozen=True)
class NodeSettings:
    """The rules of one job, for the node and for the coordinator on it. The nodes of a job should have the same.

    Attributes:
        rules: how many nodes a cycle may have, and how long to wait for them.
        policy: decides on faults and requests.
        beat_s: the period of beats (`--ft-node-beat`, seconds).
        timeout_s: a node without a beat for so many seconds is lost (`--ft-node-timeout`).
        close_s: for how many seconds the rendezvous may take to close; torch's `close_timeout`.
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
    """Tries to become the coordinator: of a new attempt, or as the successor of one that is lost.

    Args:
        node: the id of this node.
        settings: the rules of the job.
        store: the connection that the node's link shares among its threads; the coordinator uses it as well.
        lost_term: the term of the lost coordinator; 0: a new attempt is to be opened.

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
    previous = _must_be_of(store.attempt, found)
    if previous.term != lost_term:
        # Another successor wrote the record. It may have died before it published its term, which the watches read.
        if previous.term > lost_term:
            store.publish({TERM: str(previous.term)})
        return None
    coordination = _write(node, settings, store, head, previous, previous.before)
    if coordination is not None and coordination.take_over(store, previous):
        coordination.start()
        return coordination
    return None


def _open_attempt(
    node: str, settings: NodeSettings, store: JobStore, head: Head | None, last: Formed | None
) -> CoordinatorService | None:
    """Opens the first attempt, or the one after `last`, which is over. Returns None if another node did so first.

    Keys of earlier attempts are removed where the store can list its keys; otherwise they stay, and disturb nobody.
    """
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
    previous: Formed | None,
    before: dict[str, JobOver],
) -> CoordinatorService | None:
    """Replaces `head` by the record of a new coordinator. Returns None if another node wrote in between.

    Only then publishes the term, and who beats: by these keys the other nodes find the new coordinator.
    """
    rules = settings.rules
    beats = node
    if store.hosted_here:  # nobody can take over where the coordinator's node hosts the store: nothing to watch for
        rules = replace(rules, hosts=True)
        beats = HOST
    machine = Coordinator(node, rules, settings.policy, time.monotonic(), previous)
    formed = replace(machine.formed(), attempt=store.attempt, before=before)
    written = store.set_head(encode(formed), head)
    if written is None:
        return None
    texts = {TERM: str(formed.term), BEAT: beats}
    if previous is None:  # so that a look for questions is one operation from the beginning
        texts |= dict.fromkeys(COUNTERS, "0")
    store.publish(texts)
    return CoordinatorService(store, written, formed, machine, settings.beat_s, settings.timeout_s)


def _record(head: Head | None) -> Formed | None:
    """Parses the job's record. One that cannot be read counts as the loss of the store: it must not be overwritten."""
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

    Two deputies look as often as the coordinator reads beats, and so find its loss as soon as it would find theirs. The
    other nodes look once in a node timeout, only so that the job outlives the loss of coordinator and deputies at once.
    The thread `ft_node_speak` calls the methods.

    Args:
        beat_s: period of beats (seconds).
        timeout_s: a coordinator without a beat for so many seconds is lost.

    Attributes:
        period_s: how often a deputy looks (seconds); None: this node is no deputy. Another thread may set it.
        next_look: when the next look is due (monotonic seconds).
    """

    def __init__(self, beat_s: float, timeout_s: float) -> None:
        self.period_s: float | None = None
        self.asked: Sequence[bytes] = ()
        """The values of `questions.COUNTERS` at the last look."""
        self._beat_s, self._timeout_s = beat_s, timeout_s
        self._term = b""
        self._begin(None)

    def _begin(self, period_s: float | None) -> None:
        """Begins to watch anew: the coordinator has the whole timeout from the next look on."""
        self._begun_with = period_s
        if period_s is None:
            period_s = self._timeout_s
        self._beat_reader = BeatReader(self._timeout_s, self._beat_s, period_s)
        self.next_look = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to read the coordinator's beats; notices that the node has become a deputy, or is none."""
        if self._begun_with != self.period_s:
            self._begin(self.period_s)
        return time.monotonic() >= self.next_look

    def lost_term(self, store: JobStore) -> int | None:
        """Reads the coordinator's beats. Returns its term if it has made no beat for too long; else None.

        Raises:
            StoreLost: the store does not answer.
        """
        self.next_look = time.monotonic() + self._beat_reader.period_s
        counters, (term, *self.asked) = store.counters([BEAT], (TERM, *COUNTERS))
        now = time.monotonic()
        # Another coordinator took over, which may not have made a beat yet.
        if term != self._term:
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
        if not lost:
            return None
        # Any program can write to the store. For what is no number the first term will do: `become_coordinator`
        # compares it with the record, and publishes the term that the record says.
        return whole_number(term, MAX_SENT) or 1
