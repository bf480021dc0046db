"""The rendezvous backend `etcd-v3`: torch's backend and store over etcd's v3 API.

etcd 3.6 has no v2 API, which is all that torch's own backends speak. `store_connection.py` makes backend and store for
a job. Must not know how etcd is reached (`etcd_gateway.py`), what the records mean, nor who joins what.

The records of a job, which are read, written and changed by transactions:

    <prefix>/<run id>/state          the job's record; its fencing token is the revision at which it was written
                      store/<key>    the keys of torch's store
                      writer/<id>    the last ticket of each writer, see `Records.swap`

All of them are under one lease, which every node of the job refreshes. Once none has done so for the time of the lease,
etcd removes the records: so a job whose nodes have all died leaves nothing behind.

Threads: `etcd lease`, one for each connection, refreshes the lease and ends with the connection. All else runs in the
caller's thread, and blocks.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import threading
import time
import weakref
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote

from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ft_launcher.job.store.etcd_gateway import EtcdRefusal, Gateway, Json
from ft_launcher.job.store.store_base import WaitingStore, bytes_of
from rank_monitor.contract.errors import ConfigError

BACKEND = "etcd-v3"

# etcd's default for clients.
_PORT = 2379
_PREFIX = "/ft_launcher"
# torch's, for the record of its etcd-v2 backend. Longer than a node timeout: the records outlive a coordinator.
_TTL_S = 7200
# torch's default for its backends.
_READ_TIMEOUT_S = 60
_WATCH_S = 10.0
"""One watch stream at most: a connection to a host that vanished would be silent for ever."""
# Seconds between two attempts to read again after etcd was lost, while a key is awaited.
_RETRY_S = 0.5
# Nodes that compete for a key pause for a random time up to this (seconds), else they would collide again.
_MAX_BACKOFF_S = 0.05
_OPERATIONS = 100
"""Operations in one transaction; etcd's default of `--max-txn-ops` is 128."""
_NOT_FOUND, _FAILED_PRECONDITION = 5, 9  # of gRPC: there is no such lease; there is one
_log = logging.getLogger(__name__)


class Record(NamedTuple):
    """A value, and the revision of the whole etcd at which it was written."""

    value: bytes
    revision: int


class Records:
    """The records of one job, by name. Its methods block, and raise as `Gateway.call` does.

    The number of the lease follows from the root, so that all nodes of a job have the same one without asking each
    other. A thread that ends with this object refreshes the lease.

    Args:
        gateway: the way to etcd.
        root: what the keys of the job begin with; ends with a slash.
        ttl_s: for how many seconds the lease is held without a refreshment.
    """

    def __init__(self, gateway: Gateway, root: str, ttl_s: int) -> None:
        self.gateway = gateway
        self._root = root
        self._ttl_s = ttl_s
        # etcd's lease ids are positive 64-bit integers, hence the shift, and 1 for 0.
        self.lease = str(int.from_bytes(hashlib.blake2b(root.encode(), digest_size=8).digest(), "big") >> 1 or 1)
        self._name = secrets.token_hex(8)
        held_s = _hold_lease(gateway, self.lease, ttl_s)
        stopped = threading.Event()
        weakref.finalize(self, stopped.set)
        arguments = (gateway, self.lease, ttl_s, held_s, stopped)
        threading.Thread(target=_refresh_lease, args=arguments, name="etcd lease", daemon=True).start()

    def read(self, names: Sequence[str]) -> tuple[list[Record | None], int]:
        """Returns the records, None for a missing one, and a revision; no record is older than that.

        Many names are read in several transactions. A watch from the returned revision misses no change.
        """
        found: list[Record | None] = []
        revision = 0
        for start in range(0, len(names), _OPERATIONS):
            answer = self._transact([self._range(name) for name in names[start : start + _OPERATIONS]])
            found += map(_first, answer["responses"])
            revision = revision or int(answer["header"]["revision"])
        return found, revision

    def put(self, values: Mapping[str, bytes]) -> None:
        """Writes the values, also over existing ones. Many values are written in several transactions."""
        puts = [self._put(name, value) for name, value in values.items()]
        for start in range(0, len(puts), _OPERATIONS):
            self._transact(puts[start : start + _OPERATIONS])

    def delete(self, name: str) -> bool:
        """Removes a record. Returns whether it existed."""
        (answer,) = self._transact([{"request_delete_range": {"key": self.key_of(name)}}])["responses"]
        return int(answer["response_delete_range"].get("deleted", 0)) > 0

    def delete_range(self, first: str, end: str) -> None:
        """Removes the records from the first name up to, and without, the last."""
        self._transact([{"request_delete_range": {"key": self.key_of(first), "range_end": self.key_of(end)}}])

    def remove(self, name: str, revision: int, ranges: Sequence[tuple[str, str]]) -> None:
        """Removes a record and some ranges (see `delete_range`), if the record still has this revision."""
        same = {"key": self.key_of(name), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        keys = [{"key": self.key_of(name)}]
        keys += [{"key": self.key_of(first), "range_end": self.key_of(end)} for first, end in ranges]
        self._transact([{"request_delete_range": key} for key in keys], [same])

    def swap(self, name: str, revision: int, value: bytes) -> tuple[bool, Record | None]:
        """Writes if the record still has this revision (0: does not exist). Returns whether it did, and the record now.

        A random ticket is written in the same transaction, at a key of this thread. The gateway tries a call again if
        the answer was lost. Where the first try had succeeded, the second finds another revision of the record, but
        also the ticket: so the swap reports success, and a count is not added twice.
        """
        ticket, writer = secrets.token_bytes(8), f"writer/{self._name}-{threading.get_ident()}"
        same = {"key": self.key_of(name), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        writes = [self._put(name, value), self._put(writer, ticket)]
        answer = self._transact(writes, [same], [self._range(name), self._range(writer)])
        if answer.get("succeeded"):
            return True, Record(value, int(answer["header"]["revision"]))
        now, last = map(_first, answer["responses"])
        if last is not None and last.value == ticket:
            return True, Record(value, last.revision)
        return False, now

    def watch(self, name: str, revision: int, limit_s: float) -> None:
        """Waits until a record was written after a revision; see `Gateway.watch`."""
        self.gateway.watch(self.key_of(name), revision, limit_s)

    def _transact(self, then: list[Json], when: Sequence[Json] = (), otherwise: Sequence[Json] = ()) -> Json:
        """Runs one transaction, `then` if all of `when` hold, else `otherwise`; returns etcd's answer.

        Makes the lease again where etcd does not know it any more.
        """
        body = {"compare": list(when), "success": then, "failure": list(otherwise)}
        try:
            return self.gateway.call("kv/txn", body)
        except EtcdRefusal as error:
            if error.code != _NOT_FOUND:
                raise
        # The lease ran out, or etcd has lost its records.
        _hold_lease(self.gateway, self.lease, self._ttl_s)
        return self.gateway.call("kv/txn", body)

    def key_of(self, name: str) -> str:
        """Returns the key of a record in etcd, as its gateway takes it."""
        return _text(f"{self._root}{name}".encode())

    def _put(self, name: str, value: bytes) -> Json:
        return {"request_put": {"key": self.key_of(name), "value": _text(value), "lease": self.lease}}

    def _range(self, name: str) -> Json:
        return {"request_range": {"key": self.key_of(name)}}


class EtcdV3Backend(RendezvousBackend):  # type: ignore[misc]
    """The state of a rendezvous in etcd. Its fencing token is the revision at which the state was written."""

    _key = "state"

    def __init__(self, records: Records) -> None:
        self.records = records

    @property
    def name(self) -> str:
        """The backend's name."""
        return BACKEND

    def get_state(self) -> tuple[bytes, int] | None:
        """See base class."""
        (state,), _ = self.records.read([self._key])
        if state is None:
            return None
        return (state.value, state.revision)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool] | None:
        """See base class. A token that no `get_state` gave never fits."""
        if token is None or isinstance(token, int):
            revision = token or 0
        else:
            revision = -1
        written, now = self.records.swap(self._key, revision, state)
        if now is None:
            return None
        return (now.value, now.revision, written)


class EtcdV3Store(WaitingStore):
    """torch's store, in etcd. A `PrefixStore` around it must not outlive it: torch's C++ part holds no reference.

    A wait ends within its timeout plus the read timeout, any other operation within the read timeout for each of its
    transactions. A lost connection is tried again once; while a key is awaited, for as long as the read timeout. Raises
    `RendezvousConnectionError` when etcd is lost.
    """

    def __init__(self, records: Records) -> None:
        super().__init__()
        self.records = records
        self._counted: dict[str, Record] = {}
        self.set_timeout(timedelta(seconds=records.gateway.read_timeout_s))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See base class."""
        self.records.put({_name(key): bytes_of(value) for key, value in zip(keys, values, strict=True)})

    def add(self, key: str, num: int) -> int:
        """Adds to a counter, 0 where there is none, once even when an answer is lost; returns the sum.

        etcd has no addition, so this is a swap of the value. The last value and its revision are kept for each counter:
        where nobody else adds to it, as to a node's beats, an addition is one operation without a read before.
        """
        if num == 0:
            return int(self.read([key])[0] or 0)
        written = self._change(key, lambda old: b"%d" % (int(old or 0) + num), self._counted.pop(key, None))
        assert written is not None
        self._counted[key] = written
        return int(written.value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Writes if the value is the expected one, or if there is none and none (empty) was expected.

        Returns what the key has now; the expected value where it has none, as TCPStore does.
        """
        wanted, new = bytes_of(expected), bytes_of(desired)
        now = self._change(key, lambda old: new if (old or b"") == wanted else None)
        if now is None:
            return wanted
        return now.value

    def delete_key(self, key: str) -> bool:
        """Removes a key. Returns whether it existed."""
        return self.records.delete(_name(key))

    def remove_keys(self, prefix: str, but: str) -> None:
        """See base class."""
        self.records.delete_range(_name(prefix), _name(but))
        self.records.delete_range(_after(but), _after(prefix))

    def remove_job(self, record: str, token: Any, prefix: str) -> None:
        """See base class."""
        self.records.remove(record, token, [(_name(prefix), _after(prefix)), ("writer/", "writer0")])

    def _change(
        self, key: str, change: Callable[[bytes | None], bytes | None], record: Record | None = None
    ) -> Record | None:
        """Writes the result of `change`; repeats the swap until nobody has written in between.

        Args:
            key: of the record.
            change: old value, None where there is none -> new value; None: nothing is to be written.
            record: as it was last, where that is known; a wrong one costs one more swap.

        Returns:
            The record as it is then; None: there is none.

        Raises:
            DistStoreError: others have written in between, again and again, for the store's timeout.
        """
        name, deadline = _name(key), time.monotonic() + self.timeout.total_seconds()
        if record is None:
            (record,), _ = self.records.read([name])
        backoff_s = 0.001
        while True:
            if record is None:
                old, revision = None, 0
            else:
                old, revision = record.value, record.revision
            new = change(old)
            if new is None:
                return record
            written, record = self.records.swap(name, revision, new)
            if written:
                return record
            if time.monotonic() > deadline:
                raise DistStoreError(f"{key} was changed by others all the time for {self.timeout}")
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            time.sleep(random.uniform(0, backoff_s))

    def _read(self, keys: Sequence[str], deadline: float) -> tuple[list[bytes | None], int]:
        lost_at = min(deadline, time.monotonic() + self.records.gateway.read_timeout_s)
        while True:
            try:
                found, revision = self.records.read([_name(key) for key in keys])
                return [None if record is None else record.value for record in found], revision
            except EtcdRefusal:
                raise
            except RendezvousConnectionError:
                if time.monotonic() + _RETRY_S > lost_at:
                    raise
            time.sleep(_RETRY_S)

    def _watch(self, key: str, index: int, waited_s: float, limit_s: float) -> None:
        self.records.watch(_name(key), index, min(limit_s, _WATCH_S))


def _name(key: str) -> str:
    """Returns the name of the record of a key of the store."""
    return f"store/{key}"


def _after(prefix: str) -> str:
    """Returns the first name after all that begin with this prefix, which ends with a slash: 0 follows it."""
    return f"{_name(prefix).removesuffix('/')}0"


def create_backend(params: RendezvousParameters) -> tuple[EtcdV3Backend, EtcdV3Store]:
    """Makes the backend and a store for it, over one connection. The endpoint: one or several `host[:port]`, by commas.

    Settings, with torch's names (`--rdzv-conf`):

    - `protocol`: http or https; http.
    - `ssl_cert`, `ssl_cert_key`, `ca_cert`: files; none.
    - `read_timeout`: seconds for one call, over all endpoints and tries; also the store's timeout; 60.
    - `key_prefix` or `etcd_prefix`: what all keys begin with; `/ft_launcher`.
    - `ttl`: seconds for which records outlive the job; two hours.

    `settings/rendezvous_check.py` has checked them before.

    Raises:
        ConfigError: the run id is empty.
        RendezvousConnectionError: no endpoint answers as an etcd does.
    """
    if not params.run_id:
        raise ConfigError("rdzv_id", params.run_id, "--rdzv-id", "must not be empty")
    protocol = str(params.get("protocol", "http")).strip().lower()
    cert, key = params.get("ssl_cert"), params.get("ssl_cert_key")
    if cert and key:
        cert = (cert, key)
    prefix = str(params.get("key_prefix") or params.get("etcd_prefix") or _PREFIX).rstrip("/")
    addresses = [parse_rendezvous_endpoint(address, _PORT) for address in params.endpoint.split(",")]
    read_timeout_s = params.get_as_int("read_timeout", _READ_TIMEOUT_S)
    gateway = Gateway(addresses, read_timeout_s, protocol, cert or None, params.get("ca_cert") or None)
    records = Records(gateway, f"{prefix}/{quote(params.run_id, safe='')}/", params.get_as_int("ttl", _TTL_S))
    return EtcdV3Backend(records), EtcdV3Store(records)


def _text(value: bytes) -> str:
    """Returns bytes as etcd's JSON has them: in base64."""
    return b64encode(value).decode()


def _first(answer: Json) -> Record | None:
    """Returns the record that a read of one key has found; None: there is none."""
    found = answer["response_range"].get("kvs")
    if found:
        return Record(b64decode(found[0].get("value", "")), int(found[0]["mod_revision"]))
    return None


def _hold_lease(gateway: Gateway, lease: str, ttl_s: int) -> int:
    """Refreshes the lease, or makes it; returns for how many seconds it is held."""
    held_s = int(gateway.call("lease/keepalive", {"ID": lease}).get("TTL", 0))
    if held_s > 0:
        return held_s
    try:
        return int(gateway.call("lease/grant", {"ID": lease, "TTL": str(ttl_s)})["TTL"])
    except EtcdRefusal as error:
        if error.code != _FAILED_PRECONDITION:  # else another node was faster
            raise
    return ttl_s


def _refresh_lease(gateway: Gateway, lease: str, ttl_s: int, held_s: float, stopped: threading.Event) -> None:
    """The thread `etcd lease`: refreshes the lease until `stopped` is set. Holds no reference to `Records`, with which
    it ends."""
    # Four times in the time of the lease, so that some may fail.
    while not stopped.wait(held_s / 4):
        try:
            held_s = _hold_lease(gateway, lease, ttl_s)
        except RendezvousConnectionError as error:
            _log.warning("The job's records in etcd were not refreshed: %s", error)
