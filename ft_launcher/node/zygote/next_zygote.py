"""The zygote that is to take the place of the present one: it imports what ranks were seen to import, while they run.

Held by `pool.py`, which asks it when ranks are started, when one has told what it imports, and when a descriptor is
readable. Nothing waits for it: ranks are forked from the present zygote until the next one is ready. Modules are
learned once in a job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ft_launcher.node.zygote.client import NoRanks, RankOrder, ZygoteLost, ZygoteProcess, ZygoteUnfit
from ft_launcher.node.zygote.learned_modules import Surroundings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learned:
    """The modules that the next ranks find imported, after `seconds` of work beside the present ones.

    `left_out`: why others are not, of those with a reason of their own; `mib`: memory that all ranks share.
    """

    names: Sequence[str]
    left_out: Mapping[str, str]
    mib: float
    seconds: float


class NextZygote:
    """See above.

    Attributes:
        wanted: whether ranks are still to tell what they import.
        process: the process that imports it; None: there is none, or it has taken the place of the present one.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.process: ZygoteProcess | None = None
        self._since = 0.0
        self._learned: Learned | None = None
        self._differing: set[str] = set()
        """Variables in which the ranks that were started last differ from the zygote."""

    def ask(self, orders: Sequence[RankOrder]) -> Sequence[RankOrder]:
        """Returns the orders of ranks of which the first is to tell what it imports, if that is still wanted."""
        if not self.wanted or not orders:
            return orders
        return [replace(orders[0], tells_modules=True), *orders[1:]]

    def note_ranks(self, orders: Sequence[RankOrder], zygote: Mapping[str, str]) -> None:
        """Notes in what the ranks that were started differ from the environment of their zygote."""
        self._differing = _differing(orders, zygote)

    def begin(self, present: ZygoteProcess, names: Sequence[str], changed: Mapping[str, str | None]) -> None:
        """Has the present zygote fork the next one, which imports these modules. Does not wait for that.

        Args:
            names: what a rank has imported.
            changed: variables that have changed in it, with their values (None: removed).

        Raises:
            ZygoteLost: the present one gave no answer in time.
        """
        self.wanted = False
        try:
            self.process = present.learn(names, Surroundings(self._differing, changed))
            self._since = time.monotonic()
        except NoRanks as refusal:
            logger.warning("No modules of the ranks are preloaded: %s.", refusal)

    def take_if_ready(self) -> ZygoteProcess | None:
        """Returns the next zygote when it is ready, for the caller to keep. None: it is not, or will not be."""
        following = self.process
        if following is None:
            return None
        try:
            if following.await_ready(0.0):
                self.process = None
                return following
            if not following.ended():
                return None
            why = "the process that imports them ended"
        except (ZygoteLost, ZygoteUnfit) as problem:
            why = str(problem)
        self.process = None
        self.refuse(following, why)
        return None

    def refuse(self, following: ZygoteProcess, why: str) -> None:
        """Ends a next zygote that cannot take the place of the present one, which goes on."""
        following.reap()
        logger.warning("No modules of the ranks are preloaded: %s.", why)

    def note_taken(self, following: ZygoteProcess) -> None:
        """Notes that ranks are forked from the next zygote from now on."""
        self._learned = Learned(**following.learned, seconds=time.monotonic() - self._since)

    def pop_learned(self) -> Learned | None:
        """Returns what the next ranks find imported, once."""
        learned, self._learned = self._learned, None
        return learned

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self.process is not None:
            self.process.reap()
            self.process = None


def _differing(orders: Sequence[RankOrder], zygote: Mapping[str, str]) -> set[str]:
    """Returns the variables that not all ranks have as the zygote has them."""
    of_ranks = [order.environ for order in orders]
    names = set(zygote).union(*of_ranks)
    return {name for name in names if any(environ.get(name) != zygote.get(name) for environ in of_ranks)}
