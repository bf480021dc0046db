"""The zygote that is to replace the present one: it imports what ranks were seen to import, while they run.

A script mostly imports more than torch: its own libraries, for seconds. The next zygote has these modules imported, so
a restart does not wait for them. The steps, once in a job:

1. While `wanted` is set, the first rank of a cycle is told to report its imports (`pool.py: start_ranks`). One rank is
   enough: the ranks of a job run the same script.
2. `begin`: the rank has reported them. The present zygote forks the next one, which tries the imports, chooses those
   that no script can notice (`module_trial.py`, `learned_modules.py`), and imports these.
3. `pop_if_ready`: the next zygote is ready. `pool.py` puts it in the place of the present one.
4. `note_taken`, `pop_learned`: the journal says what was learned.

`pool.py` owns the object. Nothing waits for the next zygote: ranks are forked from the present one until then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft_launcher.node.zygote.client import NoRanks, RankOrder, ZygoteLost, ZygoteProcess, ZygoteUnfit
from ft_launcher.node.zygote.learned_modules import Surroundings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learned:
    """The modules that the next ranks find imported, for the journal.

    Attributes:
        names: of the modules.
        left_out: module -> the reason why it was left out, of those with a reason of their own.
        mib: memory that these modules take, which all ranks share (MiB).
        seconds: from the rank's report until the next zygote was ready, while the ranks trained.
    """

    names: Sequence[str]
    left_out: Mapping[str, str]
    mib: float
    seconds: float


class NextZygote:
    """The next zygote, from the wish for it until it has replaced the present one.

    Attributes:
        wanted: whether the first rank of the next cycle is to report what it imports.
        process: the next zygote, while it imports; None: there is none, or it has replaced the present one.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.process: ZygoteProcess | None = None
        self._since = 0.0
        self._learned: Learned | None = None
        self._differing: set[str] = set()
        """Variables in which the ranks that were started last differ from the zygote."""

    def note_ranks(self, orders: Sequence[RankOrder], zygote: Mapping[str, str]) -> None:
        """Notes in which variables the ranks that were started differ from the environment of their zygote.

        A module whose import reads such a variable cannot be imported before the rank is there.
        """
        self._differing = _differing(orders, zygote)

    def begin(self, present: ZygoteProcess, names: Sequence[str], changed: Mapping[str, str | None]) -> None:
        """Has the present zygote fork the next one, which imports these modules. Does not wait for the imports.

        Args:
            present: the present zygote.
            names: the modules that a rank has imported.
            changed: variables of the environment that have changed in the rank -> their values (None: removed).

        Raises:
            ZygoteLost: the present zygote gave no answer in time.
        """
        self.wanted = False
        try:
            self.process = present.learn(names, Surroundings(self._differing, changed))
            self._since = time.monotonic()
        except NoRanks as refusal:
            logger.warning("No modules of the ranks are preloaded: %s.", refusal)

    def pop_if_ready(self) -> ZygoteProcess | None:
        """Returns the next zygote if it is ready: the caller owns it from then on. Does not wait.

        None: it is not ready yet, or there is none. One that failed is ended here, with a line in the log.
        """
        following = self.process
        if following is None:
            return None
        try:
            if following.await_ready(0.0):
                self.process = None
                return following
            if not following.ended():
                return None
            reason = "the process that imports them ended"
        except (ZygoteLost, ZygoteUnfit) as problem:
            reason = str(problem)
        self.process = None
        self.refuse(following, reason)
        return None

    def refuse(self, following: ZygoteProcess, reason: str) -> None:
        """Ends a next zygote that cannot replace the present one, and logs the reason. The present one goes on."""
        following.reap()
        logger.warning("No modules of the ranks are preloaded: %s.", reason)

    def note_taken(self, following: ZygoteProcess) -> None:
        """Notes that ranks are forked from the next zygote from now on."""
        self._learned = Learned(**following.learned, seconds=time.monotonic() - self._since)

    def pop_learned(self) -> Learned | None:
        """Returns what the next ranks find imported; None: nothing new since the last call."""
        learned, self._learned = self._learned, None
        return learned

    def close(self) -> None:
        """Ends the next zygote, if there is one."""
        if self.process is not None:
            self.process.reap()
            self.process = None


def _differing(orders: Sequence[RankOrder], zygote: Mapping[str, str]) -> set[str]:
    """Returns the variables that not all ranks have as the zygote has them."""
    of_ranks = [order.environ for order in orders]
    names = set(zygote).union(*of_ranks)
    return {name for name in names if any(environ.get(name) != zygote.get(name) for environ in of_ranks)}
