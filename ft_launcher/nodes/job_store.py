"""The rendezvous' store as agents use it: an inbox, answers by key, counters of beats, one record with a token.

Works on what torch's backends give: a `RendezvousBackend` for the one record, and a `Store` with set, get, add, wait
and check for the rest; more where a store has more. Decides nothing. Not shared by threads: each takes one of its own,
and those that wait do so for long, since torch's TCPStore prints two lines each time a wait ends without its key. Uses
torch's underscored `_matches_machine_hostname`.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import psutil
from torch.distributed import FileStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend as create_c10d
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from rank_monitor.contract.errors import StoreLost

_T = TypeVar("_T")
Connect: TypeAlias = "Callable[[], tuple[Any, Any]]"

_OPERATION_S = 60
_REACH_S = 5.0
_CONNECT_S = 20.0
_RETRY_S = 0.05
_INBOX = "inbox"
_VOID = "void"


@dataclass(frozen=True)
class Head:
    """The one record of the job with the token that fences writers."""

    value: bytes
    token: Any


class JobStore:
    """One thread's connection.

    Args:
        backend: holds the one record.
        store: torch's store, or one like it.
        connect: makes a new connection to the same: both of these.
        prefix: keys of this job begin with it.
        hosted_here: this process is the store's server.

    `raw` is torch's store itself; `may_have_host`: another agent may be its server.
    """

    def __init__(self, backend: Any, store: Any, connect: Connect, prefix: str, hosted_here: bool) -> None:
        self.raw = store
        self._store = PrefixStore(prefix, store)
        self._backend = backend
        self._connect = connect
        self._prefix = prefix
        self.hosted_here = hosted_here
        self.may_have_host = isinstance(store, TCPStore) and not hosted_here
        self._many = not isinstance(store, (FileStore, EtcdStore))
        self._plain = isinstance(store, EtcdStore)

    def another(self) -> JobStore:
        """A connection of its own, for another thread.

        Raises:
            StoreLost: the store cannot be reached.
        """
        with _lost():
            return type(self)(*self._connect(), self._connect, self._prefix, self.hosted_here)

    # Messages.

    def post(self, text: str) -> None:
        """Puts a message into the inbox; one that was given up meanwhile as lost is put in again."""
        with _lost():
            while True:
                key = f"{_INBOX}/{self._store.add(_INBOX, 1)}"
                if self._put_if_absent(key, text) == text.encode():
                    return

    def read_inbox(self, taken: int, limit_s: float, more: Sequence[str] = ()) -> tuple[list[bytes], list[bytes]]:
        """Messages after the first `taken`, waiting for one up to `limit_s`; with them the values of the keys `more`.

        Messages that were given up are empty.
        """
        with _lost():
            if not self._wait(f"{_INBOX}/{taken + 1}", limit_s):
                return [], []
            count = int(self._store.add(_INBOX, 0))
            keys = [f"{_INBOX}/{number}" for number in range(taken + 1, count + 1)]
            if not self._store.check(keys):  # a writer is between its two steps; the first is there
                there = bisect.bisect_left(range(1, len(keys)), 1, key=lambda n: not self._store.check(keys[: n + 1]))
                keys = keys[: there + 1]
            values = self._get_all([*more, *keys])
            return [b"" if text == _VOID.encode() else text for text in values[len(more) :]], values[: len(more)]

    def give_up_missing(self, taken: int) -> None:
        """Fills the next place of the inbox, whose writer took a number and never wrote: the others can be read."""
        with _lost():
            if int(self._store.add(_INBOX, 0)) > taken:
                self._put_if_absent(f"{_INBOX}/{taken + 1}", _VOID)

    def forget(self, numbers: Iterable[int]) -> None:
        """Removes messages of the inbox that nobody will read again, where the store can."""
        with _lost():
            for number in () if self._plain else numbers:
                self._store.delete_key(f"{_INBOX}/{number}")

    def publish(self, texts: dict[str, str]) -> None:
        """Writes values under their keys."""
        with _lost():
            if self._many:
                self._store.multi_set(list(texts), list(texts.values()))
                return
            for key, text in texts.items():
                self._store.set(key, text)

    def drop(self, key: str) -> None:
        """Removes what nobody will read again, where the store can."""
        with _lost():
            if not self._plain:
                self._store.delete_key(key)

    def receive(self, key: str, limit_s: float) -> bytes | None:
        """The value of a key, waiting for it up to `limit_s`; None: it is not there."""
        with _lost():
            return bytes(self._store.get(key)) if self._wait(key, limit_s) else None

    # Beats.

    def beat(self, key: str) -> int:
        """Counts one more beat; returns the count."""
        with _lost():
            return int(self._store.add(f"beat/{key}", 1))

    def last_beat(self, key: str) -> None:
        """Says that no further beat is to be expected."""
        with _lost():
            self._store.set(f"beat/{key}", "-1")

    def counters(self, keys: Sequence[str], more: Sequence[str] = ()) -> tuple[dict[str, int | None], list[bytes]]:
        """The counts of beats, None for one that never beat; and the values of the keys `more`, empty for none."""
        names = [*more, *(f"beat/{key}" for key in keys)]
        with _lost():
            if not names:
                return {}, []
            there = [True] * len(names)
            if not self._store.check(names):
                there = [self._store.check([name]) for name in names]
            found = iter(self._get_all([name for name, is_there in zip(names, there, strict=True) if is_there]))
            values = [next(found) if is_there else b"" for is_there in there]
            counts = [int(text) if text else None for text in values[len(more) :]]
        return dict(zip(keys, counts, strict=True)), values[: len(more)]

    # The one record.

    def head(self) -> Head | None:
        """The job's record; None: nobody wrote one."""
        with _lost():
            found = self._backend.get_state()
        return None if found is None else Head(*found)

    def set_head(self, value: str, before: Head | None) -> Head | None:
        """Writes the record if it still is `before` (None: there was none); None: somebody else was first."""
        with _lost():
            result = self._backend.set_state(value.encode(), before.token if before else None)
        ours = result is not None and bytes(result[0]) == value.encode()  # also when an answer before this was lost
        return Head(result[0], result[1]) if ours else None

    def _wait(self, key: str, limit_s: float) -> bool:
        if limit_s <= 0:
            return bool(self._store.check([key]))
        deadline = time.monotonic() + limit_s
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except (LookupError, RuntimeError, TimeoutError) as error:
            if isinstance(error, LookupError) or "timeout" in str(error).lower() or time.monotonic() >= deadline:
                return False
            raise
        return True

    def _put_if_absent(self, key: str, text: str) -> bytes:
        """Writes unless there is a value; returns the value that is there then."""
        if not self._plain:
            return bytes(self._store.compare_set(key, "", text))
        if not self._store.check([key]):  # the two who may write here are a writer taken for dead, and its finder
            self._store.set(key, text)
        return bytes(self._store.get(key))

    def _get_all(self, keys: Sequence[str]) -> list[bytes]:
        if self._many:
            return [bytes(value) for value in self._store.multi_get(list(keys))]
        return [bytes(self._store.get(key)) for key in keys]


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Whatever a store raises when its server does not answer, as one error."""
    try:
        yield
    except (RuntimeError, ValueError, OSError, LookupError, RendezvousError) as error:
        raise StoreLost(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__) from error


def open_job_store(backend: str, parameters: RendezvousParameters) -> JobStore:
    """Connects to the job's store, and makes it where this node is its host.

    Args:
        backend: c10d, static, etcd-v2 or etcd-v3.
        parameters: as torch's registry hands them to a handler, with all of that backend's keys.

    Raises:
        RendezvousConnectionError: it cannot be reached.
    """
    prefix = f"ft_launcher/{parameters.run_id}/"
    if backend in ("etcd-v2", "etcd-v3"):
        connect = _etcd(backend, parameters)
        holder, store = connect()
        return JobStore(holder, store, connect, prefix, False)
    run_id = parameters.run_id
    _await_host(backend, parameters)
    if backend == "static":
        store = _static_store(parameters)
        holder = C10dRendezvousBackend(store, run_id)
    else:
        limit_s = (parameters.get_as_int("read_timeout", _OPERATION_S) or _OPERATION_S) + _REACH_S
        holder, store = _within(limit_s, lambda: create_c10d(parameters), parameters.endpoint)
    if isinstance(store, FileStore):
        return JobStore(holder, store, lambda: _with_record(FileStore(parameters.endpoint), run_id), prefix, False)
    host, port = store.host, store.port
    return JobStore(holder, store, lambda: _with_record(_connect(host, port), run_id), prefix, _listens(port))


def _etcd(backend: str, parameters: RendezvousParameters) -> Connect:
    if backend == "etcd-v2":
        from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend as create_etcd_v2

        return lambda: create_etcd_v2(parameters)
    from ft_launcher.etcd_v3 import create_backend as create_etcd_v3

    return lambda: create_etcd_v3(parameters)


def _with_record(store: Any, run_id: str) -> tuple[Any, Any]:
    return C10dRendezvousBackend(store, run_id), store


def _await_host(backend: str, parameters: RendezvousParameters) -> None:
    """Waits for the node that hosts the store, unless this is the one, or may be."""
    if parameters.get("store_type", "tcp").strip().lower() != "tcp" or not parameters.endpoint:
        return
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    if backend == "static":
        may_host = int(parameters.config["rank"]) == 0
        limit_s = parameters.get_as_int("timeout", 600) or 600
    else:
        told = parameters.get_as_bool("is_host")
        may_host = _matches_machine_hostname(host) if told is None else told
        limit_s = parameters.get_as_int("read_timeout", 60) or 60
    if not may_host:
        _await_listener(host, port, float(limit_s))


def _static_store(parameters: RendezvousParameters) -> TCPStore:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    first = int(parameters.config["rank"]) == 0
    limit = timedelta(seconds=parameters.get_as_int("timeout", 600) or 600)
    try:
        return TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=limit, multi_tenant=True)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(f"no store at {host}:{port}: {error}") from error


def _connect(host: str, port: int) -> TCPStore:
    """A new connection. The plain one before it tells at once, and without a C++ trace, when nobody is there."""
    socket.create_connection((host, port), _REACH_S).close()
    limit = timedelta(seconds=_CONNECT_S)
    store: TCPStore = _within(
        _CONNECT_S,
        lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit, multi_tenant=True),
        f"{host}:{port}",
    )
    store.set_timeout(timedelta(seconds=_OPERATION_S))
    return store


def _within(limit_s: float, make: Callable[[], _T], endpoint: str) -> _T:
    """What `make` gives. Aside, since torch waits without a limit for the first word of a server that has accepted.

    Raises:
        RendezvousConnectionError: the server said nothing for `limit_s`.
    """
    made: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def connect() -> None:
        try:
            made.put((make(), None))
        except BaseException as error:  # handed to the caller's thread
            made.put((None, error))

    threading.Thread(target=connect, daemon=True, name="ft_connect").start()
    try:
        value, error = made.get(timeout=limit_s)
    except queue.Empty:
        problem = f"{endpoint} accepts connections and says nothing for {limit_s:g} s: no store of torch's?"
        raise RendezvousConnectionError(problem) from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _await_listener(host: str, port: int, limit_s: float) -> None:
    """Waits until somebody listens: torch's own way waits half a minute after the first refusals."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((host, port), _REACH_S).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(
                    f"nobody answers at {host}:{port} ({error.strerror or error})"
                ) from None
            time.sleep(_RETRY_S)


def _listens(port: int) -> bool:
    """Whether this process is the server."""
    own = psutil.Process(os.getpid())
    connections = own.net_connections("tcp") if hasattr(own, "net_connections") else own.connections("tcp")
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)
