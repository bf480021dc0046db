"""What the stores of a job have in common: every read is a wait for keys, and values are bytes.

Base of the stores over etcd (`v2.py`, `v3.py`) and of `nodes/file_store.py`. Must not know where the values are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store


class WaitingStore(Store):  # type: ignore[misc]
    """torch's `Store` by one method, `_await`."""

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

    def deleteKey(self, key: str) -> bool:
        """As `delete_key`: the name by which torch's PrefixStore calls it."""
        return bool(self.delete_key(key))

    def _await(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        raise NotImplementedError


def bytes_of(value: str | bytes) -> bytes:
    """Returns a value as it is stored: text as UTF-8."""
    if isinstance(value, str):
        return value.encode()
    return bytes(value)
