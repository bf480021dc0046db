"""Who came to a call, on which node, who is through with it, and the beats of its nodes; as it stands in the store.

Written by the companions, each for its own rank; constant for a call, whatever happens in it.
"""

from __future__ import annotations

import datetime
import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

FINISHED = "finished"
"""The key that is set when every member is through."""

_INTERVALS_PER_LOOK = 4
_EVER = datetime.timedelta(days=3650)


class Attendance:
    """The keys of one call.

    Args:
        store: the part of the call's store that is the companions' own.
        world_size: members of the call.
    """

    def __init__(self, store: Any, world_size: int) -> None:
        self._store, self._world_size = store, world_size

    def come(self, member: int, node: str) -> None:
        """A member takes part, on a node (a name without blanks)."""
        if self._store.add(f"came/{member}", 1) == 1:
            self._store.append("nodes", f"{member} {node}\n")
            self._store.add("came", 1)

    def everybody_came(self) -> bool:
        """Whether all members came."""
        return int(self._store.add("came", 0)) >= self._world_size

    def end(self, member: int) -> None:
        """A member is through: its call is over, or its process has ended. Saying it twice does no harm."""
        if self._store.add(f"ended/{member}", 1) == 1 and self._store.add("ended", 1) >= self._world_size:
            self._store.set(FINISHED, "")

    def has_ended(self, member: int) -> bool:
        """Whether a member is through."""
        return int(self._store.add(f"ended/{member}", 0)) > 0

    def is_finished(self) -> bool:
        """Whether all members are through."""
        return bool(self._store.check([FINISHED]))

    def wait_finished(self, timeout: datetime.timedelta = _EVER) -> None:
        """Waits until all members are through.

        Raises:
            RuntimeError: what the store raises when they are not in time, or when it is lost.
        """
        self._store.wait([FINISHED], timeout)

    def members(self) -> dict[str, list[int]]:
        """Node -> the members there that came so far."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        if self._store.check(["nodes"]):
            for line in self._store.get("nodes").decode().splitlines():
                member, _, node = line.partition(" ")
                found[node].append(int(member))
        return dict(found)

    def token(self) -> str:
        """Random letters that the members of this call have in common."""
        return bytes(self._store.compare_set("token", "", secrets.token_hex(8))).decode()

    def until_finished(self, interval_s: float) -> Iterator[None]:
        """Now and after each interval, until all members are through, which is looked at now and then."""
        for number in itertools.count():
            if number % _INTERVALS_PER_LOOK == 0 and self.is_finished():
                return
            yield
            time.sleep(interval_s)

    def beat(self, node: str, amount: int = 1) -> int:
        """Increases the counter of a node; returns it."""
        return int(self._store.add(f"beat/{node}", amount))
