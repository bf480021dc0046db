"""Which attempt of a job this node takes part in, and who coordinates it: agreed on by compare-and-set of one record.

Each launch of a job is an attempt, with keys of its own in the store. The record names the current attempt. Nodes that
arrive before its end join it, and replace its coordinator when that is silent. The first node that arrives after its
end opens the next attempt. Nodes of an attempt whose record was replaced read its end from the new record.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from ft_launcher.nodes.coordinator import Coordinator
from ft_launcher.nodes.coordinator_service import BEAT, HOST, TERM, Coordination
from ft_launcher.nodes.fault_decision import Policy
from ft_launcher.nodes.formation import Rules
from ft_launcher.nodes.job_store import Head, JobStore
from ft_launcher.nodes.messages import Formed, Over, decode, encode, over_of
from rank_monitor.contract.errors import ProtocolError, StoreLost
from rank_monitor.contract.exit_codes import ExitCode

logger = logging.getLogger(__name__)


class AttemptEnded(Exception):
    """The attempt that this node takes part in is no longer the one in the job's record; `over` is its end."""

    def __init__(self, over: Over) -> None:
        super().__init__(over.reason)
        self.over = over


@dataclass(frozen=True)
class Candidate:
    """The node that wants to coordinate, with rules, policy and times (seconds) that it would use."""

    node: str
    rules: Rules
    policy: Policy
    beat_s: float
    timeout_s: float


def enter_current(store: JobStore) -> bool:
    """Sets the connection to the keys of the current attempt. Returns False if none goes on.

    Raises:
        StoreLost: the store does not answer, or its record is not one of ours.
    """
    found = _record(store.head())
    if found is None or found.over:
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


def become_coordinator(me: Candidate, store: JobStore, lost_term: int) -> Coordination | None:
    """Tries to become the coordinator: of a new attempt (`lost_term` 0), or in place of the one of that term.

    Returns:
        The coordination, started; None if another node coordinates.

    Raises:
        AttemptEnded: the attempt's record was replaced, or is lost.
        StoreLost: as for `enter_current`.
    """
    head = store.head()
    found = _record(head)
    if lost_term == 0:
        if found is not None and not found.over:
            return None
        return _open_attempt(me, store, head, found)
    former = _must_be_of(store.attempt, found)
    if former.term != lost_term:
        if former.term > lost_term:  # its coordinator may have died before it wrote that
            store.publish({TERM: str(former.term)})
        return None
    coordination = _write(me, store, head, former, former.before)
    if coordination is not None and coordination.take_over(store, former):
        coordination.start()
        return coordination
    return None


def _open_attempt(me: Candidate, store: JobStore, head: Head | None, last: Formed | None) -> Coordination | None:
    """Opens the first attempt, or the one after `last`, which is over. Returns None if another node was first."""
    # A random name: two nodes may open an attempt at once, and must not write the same keys.
    store.enter(secrets.token_hex(4))
    # Before the record names the attempt, so that no key of it is ever written without a lease.
    store.hold()
    if last is None:
        before = {}
    else:
        before = {last.attempt: last.over}
    coordination = _write(me, store, head, None, before)
    if coordination is None:
        store.drop_attempt()
        return None
    if last is None:
        over = None
    else:
        over = over_of(last)
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
    me: Candidate, store: JobStore, head: Head | None, former: Formed | None, before: dict[str, Any]
) -> Coordination | None:
    """Writes the record in place of `head`. Returns None if another node was first."""
    try:
        machine = Coordinator(me.node, me.rules, me.policy, time.monotonic(), former)
    except ProtocolError as error:
        raise StoreLost(f"the job's record cannot be read: {error}") from None
    formed = replace(machine.formed(), attempt=store.attempt, before=before)
    written = store.set_head(encode(formed), head)
    if written is None:
        return None
    if store.hosted_here:
        beats = HOST
    else:
        beats = me.node
    store.publish({TERM: str(formed.term), BEAT: beats})
    return Coordination(me.node, store, written, machine, me.beat_s, me.timeout_s)


def _record(head: Head | None) -> Formed | None:
    if head is None:
        return None
    try:
        found = decode(head.value)
        if not isinstance(found, Formed):
            raise ProtocolError(f"it is a {type(found).__name__}")
    except ProtocolError as error:
        raise StoreLost(f"the job's record cannot be read: {error}") from None
    return found


def _must_be_of(attempt: str, found: Formed | None) -> Formed:
    """Returns the record if it is that of this attempt; else raises AttemptEnded with the attempt's end."""
    if found is not None and found.attempt == attempt:
        return found
    lost = int(ExitCode.STORE_HOST_LOST)
    if found is None:
        raise AttemptEnded(Over(lost, "the rendezvous' store has lost this job's records"))
    try:
        over = over_of(replace(found, over=found.before.get(attempt, {})))
    except ProtocolError:
        over = None
    raise AttemptEnded(over or Over(lost, "another job under this --rdzv-id has replaced this one's record"))
