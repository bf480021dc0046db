"""What the stores of a job have in common that outlive it: every read is a wait for keys, and they can be cleared.

Base of the stores over etcd (`etcd.py`) and over files (`file_store.py`); `job_store.py` uses them in the place of
torch's TCPStore, and asks by this class whether a store outlives the job. Must not know where the values are.

A store of this base writes two methods for reads, `_read` and `_watch`, and the writes. Waits, time limits and torch's
errors for them are here, once for both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store


class WaitingStore(Store):  # type: ignore[misc]
    """torch's `Store`, of which each read is a wait, and the removal of what a job leaves.

    A wait raises DistStoreError when time is up, as TCPStore does. All methods block, and raise what their store does
    when it is lost.

    Attributes:
        serves_many_jobs: whether other jobs use this store as well, under run ids of their own.
    """

    serves_many_jobs = True

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value, text as UTF-8."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Writes a value for each key."""
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        """Waits until the key has a value, and returns it."""
        return self._await([key], self.timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits until all keys have values, and returns them in order."""
        return self._await(keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until each key has been set. `timeout`: instead of the store's."""
        if timeout is None:
            timeout = self.timeout
        self._await(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        return None not in self.read(keys)

    def deleteKey(self, key: str) -> bool:
        """As `delete_key`: the name by which torch's PrefixStore calls it."""
        return bool(self.delete_key(key))

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values that are there now, None for a missing one; waits for none."""
        return self._read(keys, 0.0)[0]

    def remove_keys(self, prefix: str, but: str) -> None:
        """Removes the keys that begin with `prefix`, except those that begin with `but`; both end with a slash."""
        raise NotImplementedError

    def remove_job(self, record: str, token: Any, prefix: str) -> None:
        """Removes the job's record and its keys, unless another node has written the record meanwhile.

        Args:
            record: the name of the record in its backend.
            token: the record's token when it was read last.
            prefix: what the keys begin with; ends with a slash.
        """
        raise NotImplementedError

    def _await(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """Waits until all keys have values, and returns these in order. Keys that were found are not read again."""
        began = time.monotonic()
        deadline = began + timeout.total_seconds()
        missing, found = list(keys), dict[str, bytes]()
        while True:
            values, index = self._read(missing, deadline)
            found |= {key: value for key, value in zip(missing, values, strict=True) if value is not None}
            missing = [key for key in keys if key not in found]
            if not missing:
                return [found[key] for key in keys]
            now = time.monotonic()
            if now >= deadline:
                unset = ", ".join(missing[:3])
                raise DistStoreError(f"wait timeout after {timeout}, not set ({len(missing)} of {len(keys)}): {unset}")
            self._watch(missing[0], index, now - began, deadline - now)

    def _read(self, keys: Sequence[str], deadline: float) -> tuple[list[bytes | None], int]:
        """Returns as `read`, and the store's index, than which no value is older; 0 where the store has none.

        Args:
            keys: to read.
            deadline: until then a store that is lost for a moment is tried again (monotonic seconds).
        """
        raise NotImplementedError

    def _watch(self, key: str, index: int, waited_s: float, limit_s: float) -> None:
        """Returns when a key may have been written after the index, at the latest after `limit_s` seconds.

        The caller reads the key then; it may be missing still.

        Args:
            key: that is awaited.
            index: what `_read` returned.
            waited_s: for how many seconds it has been awaited. A store that polls pauses longer after a long wait.
            limit_s: of this call, in seconds.
        """
        raise NotImplementedError


def bytes_of(value: str | bytes) -> bytes:
    """Returns a value as it is stored: text as UTF-8."""
    if isinstance(value, str):
        return value.encode()
    return bytes(value)
