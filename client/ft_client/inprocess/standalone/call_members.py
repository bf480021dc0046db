"""The members of a call in the store: on which node each is, which have finished, and the beats of the nodes.

The companions write it, each for its own rank. Restarts within the call do not change it.
"""

from __future__ import annotations

import datetime
import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from rank_monitor.contract.iterations.barrier import EVER

FINISHED = "finished"
"""The key that is set when every member has finished."""

# Each look is an operation of the store, as each beat is.
_INTERVALS_PER_LOOK = 4


class CallMembers:
    """The keys of one call.

    Args:
        store: the part of the call's store that is the companions' own.
        world_size: members of the call.
    """

    def __init__(self, store: Any, world_size: int) -> None:
        self._store, self._world_size = store, world_size

    def join(self, member: int, node: str) -> None:
        """Adds a member on a node (a name without blanks). A second call for the same member does nothing."""
        if self._store.add(f"came/{member}", 1) == 1:
            self._store.append("nodes", f"{member} {node}\n")
            self._store.add("came", 1)

    def all_joined(self) -> bool:
        """Whether all members have been added."""
        return int(self._store.add("came", 0)) >= self._world_size

    def end(self, member: int) -> None:
        """Marks a member as finished: its call is over, or its process has ended. A second call does no harm."""
        if self._store.add(f"ended/{member}", 1) == 1 and self._store.add("ended", 1) >= self._world_size:
            self._store.set(FINISHED, "")

    def has_ended(self, member: int) -> bool:
        """Whether a member has finished."""
        return int(self._store.add(f"ended/{member}", 0)) > 0

    def is_finished(self) -> bool:
        """Whether all members have finished."""
        return bool(self._store.check([FINISHED]))

    def wait_finished(self, timeout: datetime.timedelta = EVER) -> None:
        """Blocks until all members have finished.

        Raises:
            RuntimeError: they have not within `timeout`, or the store is lost.
        """
        self._store.wait([FINISHED], timeout)

    def members(self) -> dict[str, list[int]]:
        """Node -> the members on it that have been added so far."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        if self._store.check(["nodes"]):
            for line in self._store.get("nodes").decode().splitlines():
                member, _, node = line.partition(" ")
                found[node].append(int(member))
        return dict(found)

    def token(self) -> str:
        """A random text that is the same for all members of this call."""
        return bytes(self._store.compare_set("token", "", secrets.token_hex(8))).decode()

    def until_finished(self, interval_s: float) -> Iterator[None]:
        """An iterator that yields now and after each interval until all members have finished.

        That is checked at every fourth interval only, since each check is an operation of the store.
        """
        for number in itertools.count():
            if number % _INTERVALS_PER_LOOK == 0 and self.is_finished():
                return
            yield
            time.sleep(interval_s)

    def beat(self, node: str, amount: int = 1) -> int:
        """Increases the counter of a node. Returns its value."""
        return int(self._store.add(f"beat/{node}", amount))
