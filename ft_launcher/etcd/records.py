"""The records of one job in etcd: read, written and changed by transactions, all under one lease.

Every node of the job refreshes the lease. Once none has done so for its time, etcd removes the records. Must not know
what they mean.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import weakref
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from ft_launcher.etcd.gateway import EtcdRefusal, Gateway, Json

_OPERATIONS = 100
"""Operations in one transaction; etcd's default of `--max-txn-ops` is 128."""
_NOT_FOUND, _FAILED_PRECONDITION = 5, 9  # of gRPC: there is no such lease; there is one
_log = logging.getLogger(__name__)


class Record(NamedTuple):
    """A value, and the revision of the whole etcd at which it was written."""

    value: bytes
    revision: int


class Records:
    """The records of one job, by name. `root`: what their keys begin with.

    The number of the lease follows from the root, so that all nodes of a job have the same one. It is refreshed by a
    thread that ends with this object. Raises as `Gateway.call` does.
    """

    def __init__(self, gateway: Gateway, root: str, ttl_s: int) -> None:
        self.gateway = gateway
        self._root = root
        self._ttl_s = ttl_s
        # etcd's lease ids are positive 64-bit integers, hence the shift, and 1 for 0.
        self._lease = str(int.from_bytes(hashlib.blake2b(root.encode(), digest_size=8).digest(), "big") >> 1 or 1)
        self._name = secrets.token_hex(8)
        held_s = _hold_lease(gateway, self._lease, ttl_s)
        stopped = threading.Event()
        weakref.finalize(self, stopped.set)
        arguments = (gateway, self._lease, ttl_s, held_s, stopped)
        threading.Thread(target=_refresh_lease, args=arguments, name="etcd lease", daemon=True).start()

    def read(self, names: Sequence[str]) -> tuple[list[Record | None], int]:
        """Returns the records, None for a missing one, and a revision; no record is older than that."""
        found: list[Record | None] = []
        revision = 0
        for start in range(0, len(names), _OPERATIONS):
            answer = self._transact([self._range(name) for name in names[start : start + _OPERATIONS]])
            found += map(_first, answer["responses"])
            revision = revision or int(answer["header"]["revision"])
        return found, revision

    def put(self, values: Mapping[str, bytes]) -> None:
        """Writes the values, also over existing ones."""
        puts = [self._put(name, value) for name, value in values.items()]
        for start in range(0, len(puts), _OPERATIONS):
            self._transact(puts[start : start + _OPERATIONS])

    def delete(self, name: str) -> bool:
        """Removes a record. Returns whether it existed."""
        (answer,) = self._transact([{"request_delete_range": {"key": self._key(name)}}])["responses"]
        return int(answer["response_delete_range"].get("deleted", 0)) > 0

    def delete_range(self, first: str, end: str) -> None:
        """Removes the records from the first name up to, and without, the last."""
        self._transact([{"request_delete_range": {"key": self._key(first), "range_end": self._key(end)}}])

    def remove(self, name: str, revision: int, ranges: Sequence[tuple[str, str]]) -> None:
        """Removes a record and some ranges (see `delete_range`), if the record still has this revision."""
        same = {"key": self._key(name), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        keys = [{"key": self._key(name)}]
        keys += [{"key": self._key(first), "range_end": self._key(end)} for first, end in ranges]
        self._transact([{"request_delete_range": key} for key in keys], [same])

    def swap(self, name: str, revision: int, value: bytes) -> tuple[bool, Record | None]:
        """Writes if the record still has this revision (0: does not exist). Returns whether it did, and the record now.

        A random ticket is written with it: where the answer to a first try was lost, the second finds its own ticket.
        """
        ticket, writer = secrets.token_bytes(8), f"writer/{self._name}-{threading.get_ident()}"
        same = {"key": self._key(name), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
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
        self.gateway.watch(self._key(name), revision, limit_s)

    def _transact(self, then: list[Json], when: Sequence[Json] = (), otherwise: Sequence[Json] = ()) -> Json:
        body = {"compare": list(when), "success": then, "failure": list(otherwise)}
        try:
            return self.gateway.call("kv/txn", body)
        except EtcdRefusal as error:
            if error.code != _NOT_FOUND:
                raise
        _hold_lease(self.gateway, self._lease, self._ttl_s)  # it ran out, or etcd lost its records
        return self.gateway.call("kv/txn", body)

    def _key(self, name: str) -> str:
        return _text(f"{self._root}{name}".encode())

    def _put(self, name: str, value: bytes) -> Json:
        return {"request_put": {"key": self._key(name), "value": _text(value), "lease": self._lease}}

    def _range(self, name: str) -> Json:
        return {"request_range": {"key": self._key(name)}}


def _text(value: bytes) -> str:
    return b64encode(value).decode()


def _first(answer: Json) -> Record | None:
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
    # Four times in the time of the lease, so that some may fail.
    while not stopped.wait(held_s / 4):
        try:
            held_s = _hold_lease(gateway, lease, ttl_s)
        except RendezvousConnectionError as error:
            _log.warning("The job's records in etcd were not refreshed: %s", error)
