"""The store of a job over etcd's v2 API: what torch's `EtcdStore` does, at a cost that does not grow with the job.

torch's own reads all keys of all jobs for each one that is asked for, and all that wait are woken by each write. Here
a key is read by itself, or with the others of its folder, and a wait watches one key. The keys of an attempt are
in a folder with a lease, so that nothing is left of a job that was killed. Must not know what is stored.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

import etcd  # type: ignore[import-untyped]

from ft_launcher.etcd.store_base import WaitingStore, bytes_of

_WATCH_S = 60.0
"""One watch at most: a connection to a host that vanished would be silent for ever."""
# Nodes that compete for a counter pause for a random time up to this.
_MAX_BACKOFF_S = 0.05
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-_")


class EtcdV2Store(WaitingStore):
    """Keys `a/b/c` are `FOLDER/a/b/=c` in etcd, values in base64. Raises the exceptions of `client`. A
    `PrefixStore` around it must not outlive it: torch's C++ part holds no reference.

    Args:
        client: a python-etcd client of its own: it makes one connection.
        folder: where the keys are.
    """

    def __init__(self, client: etcd.Client, folder: str) -> None:
        super().__init__()
        self.client, self._folder = client, folder.rstrip("/")
        self._lock = threading.Lock()
        self._counted: dict[str, tuple[int, int]] = {}
        self.set_timeout(timedelta(seconds=_WATCH_S))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See base class."""
        for key, value in zip(keys, values, strict=True):
            self._do(self.client.write, self._at(key), _text(value))

    def add(self, key: str, num: int) -> int:
        """Adds to a counter, 0 where there is none; returns the sum. One operation where nobody else adds to it."""
        if num == 0:
            return int(self.read([key])[0] or 0)
        at = self._at(key)
        backoff_s = 0.001
        while True:
            try:
                known = self._counted.pop(at, None)
                sum_, index = known or self._count_of(at)
                result = self._do(self.client.write, at, _text(str(sum_ + num)), **_only_if("prevIndex", index))
                self._counted[at] = sum_ + num, int(result.modifiedIndex)
                return sum_ + num
            except (etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist, etcd.EtcdKeyNotFound):
                time.sleep(random.uniform(0, backoff_s))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Writes if the value is the expected one, or if there is none and none (empty) was expected.

        Returns what the key has now; the expected value where it has none, as TCPStore does.
        """
        before = _only_if("prevValue", expected and _text(expected))
        with contextlib.suppress(etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist, etcd.EtcdKeyNotFound):
            self._do(self.client.write, self._at(key), _text(desired), **before)
            return bytes_of(desired)
        (found,) = self.read([key])
        if found is None:
            return bytes_of(expected)
        return found

    def delete_key(self, key: str) -> bool:
        """Removes a key. Returns whether it existed."""
        try:
            self._do(self.client.delete, self._at(key))
        except etcd.EtcdKeyNotFound:
            return False
        return True

    def hold(self, folder: str, ttl_s: int) -> None:
        """See base class."""
        at = self._folder_at(folder.split("/"))
        try:
            self._do(self.client.write, at, None, dir=True, ttl=ttl_s, prevExist=True)
        except etcd.EtcdKeyNotFound:
            self._do(self.client.write, at, None, dir=True, ttl=ttl_s)

    def remove(self, folder: str) -> None:
        """See base class. Removes also the folders above it that are empty then."""
        names = folder.split("/")
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            self._do(self.client.delete, self._folder_at(names), recursive=True, dir=True)
        self._remove_empty(self._folder_at(names[:-1]))

    def remove_keys(self, prefix: str, but: str) -> None:
        """See base class. All keys are in the folders of the folder `prefix`."""
        for name in self.folders(prefix.removesuffix("/")):
            if f"{prefix}{name}/" != but:
                self.remove(f"{prefix}{name}")

    def remove_job(self, record: str, token: Any, prefix: str) -> None:
        """See base class."""
        self._do(self.client.delete, record, prevIndex=token)
        self.remove(prefix.removesuffix("/"))
        self._remove_empty(record.rpartition("/")[0])

    def _remove_empty(self, at: str) -> None:
        """Removes a folder of etcd, and those above it, as far as they are empty."""
        with contextlib.suppress(etcd.EtcdException):
            while at:
                self._do(self.client.delete, at, dir=True)
                at = at.rpartition("/")[0]

    def folders(self, folder: str) -> list[str]:
        """Returns the names of the folders in a folder, as they were given."""
        at = self._folder_at(folder.split("/"))
        try:
            found = self._do(self.client.read, at)
        except etcd.EtcdKeyNotFound:
            return []
        return [_unescaped(node.key.rpartition("/")[2]) for node in found.children if node.dir and node.key != at]

    # Keys.

    def _do(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes one call of the client at a time, since each concurrent call opens another connection."""
        with self._lock:
            return call(*args, **kwargs)

    def _at(self, key: str) -> str:
        *folders, name = key.split("/")
        return f"{self._folder_at(folders)}/={_escaped(name)}"

    def _folder_at(self, names: Sequence[str]) -> str:
        return "/".join([self._folder, *map(_escaped, names)])

    def _count_of(self, at: str) -> tuple[int, int]:
        """Returns a counter and the index of its last write; both 0 if there is none."""
        try:
            found = self._do(self.client.read, at)
        except etcd.EtcdKeyNotFound:
            return 0, 0
        return int(b64decode(found.value)), int(found.modifiedIndex)

    def _read(self, keys: Sequence[str], deadline: float) -> tuple[list[bytes | None], int]:
        """See base class. Keys of one folder are one request."""
        paths = [self._at(key) for key in keys]
        by_folder: defaultdict[str, list[str]] = defaultdict(list)
        for at in paths:
            by_folder[at.rpartition("/")[0]].append(at)
        found: dict[str, bytes | None] = dict.fromkeys(paths)
        indices = []
        for folder, among in by_folder.items():
            try:
                if len(among) == 1:
                    answer = self._do(self.client.read, among[0])
                else:
                    answer = self._do(self.client.read, folder)
            except etcd.EtcdKeyNotFound as none:
                indices.append(int(none.payload.get("index", 0)))
                continue
            indices.append(int(answer.etcd_index))
            for node in answer.children:
                if node.key in found and not node.dir:
                    found[node.key] = b64decode(node.value)
        return [found[at] for at in paths], min(indices, default=0)

    def _watch(self, key: str, index: int, waited_s: float, limit_s: float) -> None:
        limit_s = min(limit_s, _WATCH_S)
        with contextlib.suppress(etcd.EtcdWatchTimedOut, etcd.EtcdEventIndexCleared):
            self._do(self.client.read, self._at(key), wait=True, waitIndex=index + 1, timeout=limit_s)


def _only_if(condition: str, value: str | bytes | int) -> dict[str, Any]:
    """Returns the condition of a write: the key has this value or index; with an empty one: there is no such key."""
    if value:
        return {condition: value}
    return {"prevExist": False}


def _escaped(name: str) -> str:
    """Escapes a name as one part of a path in etcd's v2 API and in HTTP. etcd hides names that begin with `_`."""
    text = "".join(chr(byte) if chr(byte) in _PLAIN else f"~{byte:02x}" for byte in name.encode())
    if text.strip(".") and text[0] != "_":
        return text
    return f"~~{text}"


def _unescaped(text: str) -> str:
    return unquote(text.removeprefix("~~").replace("~", "%"))


def _text(value: str | bytes) -> str:
    return b64encode(bytes_of(value)).decode()
