"""The job's store as the nodes use it: an inbox of messages, answers by key, beat counters, and the job's record.

`store_connection.py` opens the store. The link of a node uses it through `link/connections.py`, the coordinator's
service directly. Decides nothing, and knows of messages only that they are texts.

Where what is. The record is in a `RendezvousBackend` of torch, which has compare-and-set. All else is in a `Store`, by
set, get, add, wait and check, or by a faster method where the store has one. `<run id>` is quoted (`_prefix_of`):

    ft_launcher/<run id>/<attempt>/inbox        a counter: how many numbers of messages were given out
                                   inbox/<n>    message n; "void" where its writer died before it wrote
                                   beat/<node>  a counter: the beats of a node
                                   ...          answers and ends by key (`link/coordinator_service.py`, `questions.py`)
    ft_launcher/job                             the id of the job that used this store first
    ft_launcher/host                            there where a node hosts the store

The inbox. A writer takes a number by an addition to the counter, and then writes its message there. So messages of all
nodes have one order without a lock. Between the two steps a writer may die; a reader would wait for ever for that
number. So the coordinator, after a while, writes "void" there itself (`give_up_missing`), by compare-and-set: if the
writer only was slow, it finds that, and takes another number (`post`).

Other programs may write to the same store, by mistake, so each counter is read with a bound: see `ForeignCounter`.

Threads: torch's client takes one call at a time. A thread that waits needs its own connection. Its waits should be
long: torch's TCPStore prints two lines whenever a wait ends without its key. Each method raises StoreLost if the store
does not answer or refuses.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import quote

from torch.distributed import DistNetworkError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from ft_launcher.job.store.store_base import WaitingStore
from rank_monitor.contract.errors import StoreLost, one_line
from rank_monitor.contract.processes.making_store import making_store
from rank_monitor.contract.rounds.barrier import Store, value_now
from rank_monitor.contract.wire.complaints import Complaints
from rank_monitor.contract.wire.foreign import whole_number

logger = logging.getLogger(__name__)

Connect: TypeAlias = "Callable[[], tuple[RendezvousBackend, Store]]"
"""Makes a new connection to the store: its backend, which has the record, and the store itself."""

HOSTED = "ft_launcher/host"
"""This key exists from the beginning where an agent is the server of the store."""
_JOB = "ft_launcher/job"
_INBOX = "inbox"
_VOID = "void"
"""The message at a place of the inbox that was given up. No message of ours, which are JSON objects."""
_MAX_UNREAD = 1 << 16
"""Unread messages: 64 of each of 1,024 nodes. A counter that is further ahead was written by another program."""
_LOOKED_AT = 1024
"""Places of the inbox that are read one by one where the counter does not say which exist."""
MAX_SENT = 1 << 53
"""No job counts that far; a counter close to 2^63 would wrap around by an addition."""


@dataclass(frozen=True)
class Head:
    """The job's record as it was read, with the token by which a write finds out that nobody else wrote since."""

    value: bytes
    token: Any


class ForeignCounter(Exception):
    """The counter of the inbox, `count`, cannot be the number of messages: another program wrote it."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the inbox' counter is {count}")
        self.count = count


class JobStore:
    """A connection to the job's store. A thread that waits needs one of its own.

    Args:
        backend: has the job's record.
        store: torch's store, or one with the same methods.
        connect: makes a new connection; returns both of these.
        run_id: the job's id, with which all its keys begin.
        hosted_here: whether this process is the store's server.

    Attributes:
        raw: torch's store itself, without a prefix.
        may_have_host: whether another agent may be the server of the store.
        attempt: name of the attempt whose keys are read and written; empty: none was entered.
    """

    def __init__(
        self, backend: RendezvousBackend, store: Store, connect: Connect, run_id: str, hosted_here: bool
    ) -> None:
        self.raw = store
        self.backend = backend
        self.connect = connect
        self.run_id = run_id
        self._prefix = _prefix_of(run_id)
        self.hosted_here = hosted_here
        self.may_have_host = isinstance(store, TCPStore) and not hosted_here
        self.attempt = ""
        with making_store():
            self._store = PrefixStore(self._prefix, store)
        self._seen: set[str] = set()
        self._complaints = Complaints(logger.warning)

    def enter(self, attempt: str) -> None:
        """Makes all further calls use the keys of this attempt. A second call with the same attempt changes nothing."""
        if attempt == self.attempt:
            return
        self.attempt = attempt
        with making_store():
            self._store = PrefixStore(self._prefix + attempt, self.raw)
        self._seen = set()

    def another(self) -> JobStore:
        """Makes another connection to the same keys, for another thread.

        Raises:
            StoreLost: the store cannot be reached.
        """
        with _lost():
            other = type(self)(*self.connect(), self.connect, self.run_id, self.hosted_here)
        other.enter(self.attempt)
        return other

    # Messages.

    def post(self, text: str) -> None:
        """Puts a message into the inbox. Takes another number if a reader has given its place up in the meantime."""
        with _lost():
            while True:
                key = f"{_INBOX}/{self._store.add(_INBOX, 1)}"
                if self._put_if_absent(key, text) == text.encode():
                    return

    def read_inbox(self, taken: int, limit_s: float, more: Sequence[str] = ()) -> tuple[list[bytes], list[bytes]]:
        """Waits up to `limit_s` seconds for messages after the first `taken`. Returns them and the values of `more`.

        Both lists are empty if none arrived. A place that was given up has an empty message. The values of `more` are
        read in the same operation as the messages, so a new term is seen before the messages are acted on.

        Raises:
            ForeignCounter: see there; `rescue` returns the messages, and the inbox goes on after `count`.
            StoreLost: the store does not answer.
        """
        with _lost():
            if not self._wait(f"{_INBOX}/{taken + 1}", limit_s):
                return [], []
            count = int(self._store.add(_INBOX, 0))
            if count - taken > _MAX_UNREAD:
                raise ForeignCounter(count)
            keys = [f"{_INBOX}/{number}" for number in range(taken + 1, count + 1)]
            # A writer is between its two steps: only the messages before its place are read, found by halving.
            if not self._store.check(keys):
                there = bisect.bisect_left(range(1, len(keys)), 1, key=lambda n: not self._store.check(keys[: n + 1]))
                keys = keys[: there + 1]
            values = self._get_all([*more, *keys])
            return [b"" if text == _VOID.encode() else text for text in values[len(more) :]], values[: len(more)]

    def give_up_missing(self, taken: int, sent: int) -> None:
        """Fills places after `taken` whose writers took a number and did not write, so that later ones can be read.

        Args:
            taken: how many messages were read.
            sent: the last number that a writer took long enough ago to have written its message.
        """
        with _lost():
            for number in range(taken + 1, min(sent, taken + _LOOKED_AT) + 1):
                self._put_if_absent(f"{_INBOX}/{number}", _VOID)

    def rescue(self, taken: int, count: int) -> list[bytes]:
        """Returns the messages around a counter that another program set to `count`: those before it, and those since.

        Reads a bounded number of places at both ends. Gives up those before `count` that are not written yet: their
        writers, if there are any, take another number.
        """
        before = range(taken + 1, taken + 1 + _LOOKED_AT)
        since = range(count + 1 - _LOOKED_AT, count + 1)
        with _lost():
            keys = [key for key in (f"{_INBOX}/{number}" for number in before) if self._store.check([key])]
            # Another coordinator may have removed them since.
            found = [value_now(self._store, key) for key in keys]
            texts = [text for text in found if text is not None]
            texts += [self._put_if_absent(f"{_INBOX}/{number}", _VOID) for number in since]
        return [text for text in texts if text != _VOID.encode()]

    def count_from(self, taken: int) -> None:
        """Writes the counter of the inbox where it is lost or not a number: `taken` messages were read."""
        with _lost():
            self._store.set(_INBOX, str(taken))

    def remove_messages(self, numbers: Iterable[int]) -> None:
        """Removes messages of the inbox that will not be read again."""
        with _lost():
            for number in numbers:
                self._store.delete_key(f"{_INBOX}/{number}")

    def publish(self, texts: dict[str, str]) -> None:
        """Writes values under their keys."""
        with _lost():
            self._store.multi_set(list(texts), list(texts.values()))

    def drop(self, key: str) -> None:
        """Removes a key that will not be read again."""
        with _lost():
            self._store.delete_key(key)

    def receive(self, key: str, limit_s: float) -> bytes | None:
        """Waits up to `limit_s` seconds for the value of a key; None if it has none. With 0 it does not wait."""
        with _lost():
            if self._wait(key, limit_s):
                # Another reader may have removed it since; a `get` would wait for it. Who waited has been woken.
                return value_now(self._store, key)
            return None

    def count(self, key: str) -> int:
        """Increases a counter by one; returns the count."""
        with _lost():
            return int(self._store.add(key, 1))

    # Beats.

    def beat(self, key: str) -> int:
        """Counts one more beat; returns the count."""
        return self.count(f"beat/{key}")

    def counters(self, keys: Sequence[str], more: Sequence[str] = ()) -> tuple[dict[str, int | None], list[bytes]]:
        """Returns the counts of beats, None for a node without any, and the values of `more`, empty where missing.

        The coordinator calls this each beat for all nodes, so it makes two operations as a rule, whatever their number.
        """
        names = [*more, *(f"beat/{key}" for key in keys)]
        with _lost():
            if isinstance(self.raw, WaitingStore):  # it may have lost all: a get would block other threads
                values = [value or b"" for value in self.raw.read([self._full(name) for name in names])]
            else:
                self._look_for([name for name in names if name not in self._seen])
                there = [name for name in names if name in self._seen]
                found = dict(zip(there, self._get_all(there), strict=True))
                values = [found.get(name, b"") for name in names]
            counts = [self._beats(*pair) for pair in zip(keys, values[len(more) :], strict=True)]
        return dict(zip(keys, counts, strict=True)), values[: len(more)]

    def _beats(self, key: str, text: bytes) -> int | None:
        """Returns a count of beats; None if it is missing. One that is not a number is set to 0."""
        if not text:
            return None
        count = whole_number(text, MAX_SENT)
        if count is None:
            complaint = f"the beats of {key} in the rendezvous' store were no number: they are counted anew"
            self._complaints.about("beats", complaint)
            self._store.set(f"beat/{key}", "0")
        return count or 0

    def _look_for(self, names: Sequence[str]) -> None:
        """Notes which of these exist. A get of a missing one would block; counters are never removed."""
        if names and self._store.check(list(names)):
            self._seen |= set(names)
        elif len(names) > 1:  # by halves: of many nodes few have made no beat yet
            self._look_for(names[: len(names) // 2])
            self._look_for(names[len(names) // 2 :])

    # The one record, and whose the store is.

    def has_host(self) -> bool:
        """Whether an agent is the server of the store."""
        with _lost():
            return self.hosted_here or (self.may_have_host and bool(self.raw.check([HOSTED])))

    def other_job(self) -> str:
        """Writes the job's id to a key that all jobs of this store read. Returns the id of another that was first; else
        empty.

        Two jobs in one store are as a rule one job whose nodes have different `--rdzv-id`; each half would wait for the
        other and not say why.
        """
        with _lost():
            if isinstance(self.raw, WaitingStore) and self.raw.serves_many_jobs:
                first = self.run_id.encode()
            else:
                first = bytes(self.raw.compare_set(_JOB, "", self.run_id))
        if first == self.run_id.encode():
            return ""
        return first.decode(errors="replace")

    def head(self) -> Head | None:
        """Returns the job's record; None if there is none."""
        with _lost():
            is_in_files = isinstance(self.raw, WaitingStore) and not self.raw.serves_many_jobs
            if is_in_files and not self.raw.check([self.backend._key]):
                return None  # torch's backend, which files have, would wait for a record that they have lost
            found = self.backend.get_state()
        if found is None:
            return None
        return Head(*found)

    def set_head(self, value: str, before: Head | None) -> Head | None:
        """Writes the record if it still is `before` (None: there was none). Returns None if it changed or is gone."""
        with _lost():
            result = self.backend.set_state(value.encode(), before.token if before else None)
        ours = result is not None and bytes(result[0]) == value.encode()  # also when an answer before this was lost
        if ours:
            return Head(result[0], result[1])
        return None

    def remove(self, head: Head) -> None:
        """Removes the record, if it still is `head`, and the keys of the attempt, on stores that outlive the job."""
        if isinstance(self.raw, WaitingStore):
            with _lost():
                self.raw.remove_job(self.backend._key, head.token, self._full(""))

    def remove_other_attempts(self) -> None:
        """Removes the keys of other attempts of this job, where the store can list its keys."""
        own = self._full("")
        with _lost():
            if isinstance(self.raw, WaitingStore):
                self.raw.remove_keys(self._prefix, own)
            elif hasattr(self.raw, "list_keys"):  # TCPStore of later releases of torch
                for key in self.raw.list_keys():
                    if key.startswith(self._prefix) and not key.startswith(own):
                        self.raw.delete_key(key)

    def _wait(self, key: str, limit_s: float) -> bool:
        """Waits for a key; returns whether it is there."""
        if limit_s <= 0:
            return bool(self._store.check([key]))
        deadline = time.monotonic() + limit_s
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except (RuntimeError, TimeoutError) as error:
            # Stores raise different errors when time is up; the class alone does not distinguish a lost connection.
            if "timeout" in str(error).lower():
                return False
            # TCPStore looks up the names of both ends for its error about a lost connection: time may be up by then.
            if isinstance(error, DistNetworkError) or time.monotonic() < deadline:
                raise
            return False
        return True

    def _put_if_absent(self, key: str, text: str) -> bytes:
        """Writes unless there is a value; returns the value that is there then."""
        return bytes(self._store.compare_set(key, "", text))

    def _get_all(self, keys: Sequence[str]) -> list[bytes]:
        if not keys:
            return []
        return [bytes(value) for value in self._store.multi_get(list(keys))]

    def _full(self, key: str) -> str:
        """Returns the name of a key of the attempt in `raw`."""
        return f"{self._prefix}{self.attempt}/{key}"


def _prefix_of(run_id: str) -> str:
    """Returns what all keys of a job begin with. The id is quoted, so that it has no slash.

    The keys of a job `x/y` would else be among those of the job `x`, which removes what its earlier attempts left.
    """
    return f"ft_launcher/{quote(run_id, safe='')}/"


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Turns the exceptions of the stores into StoreLost. Each store raises its own classes for a lost connection."""
    try:
        yield
    except (RuntimeError, ValueError, OSError, LookupError, RendezvousError) as error:
        raise StoreLost(one_line(error)) from error
