"""The limits of this rank over its life: configured, loaded, learned from all ranks, multiplied after a kill.

`RankMonitorClient` calls it, passes in what was observed, and sends the result to the monitor. What a limit is learned
from says `learned_limits.py`. Collectives are called here (`agreement/group.py`), so all ranks must call the methods
that say so, in the same order; the result is the same on all ranks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from ft_client.errors import RankMonitorClientError
from ft_client.rank.agreement import group
from ft_client.rank.monitoring.learned_limits import (
    INITIAL,
    OUT_OF_SECTION,
    SECTION,
    SUBSEQUENT,
    LearnedLimits,
    LimitFactors,
    floored,
    learned_from,
    learned_in,
    positive,
)
from rank_monitor.contract import env
from rank_monitor.contract.settings.config import MonitorSettings

logger = logging.getLogger("ft_client")

_TIMEOUTS = "current_timeouts"


class LimitsInForce:
    """The limits in force (`now`). Before `settle`, when the settings are not known yet: those that were loaded."""

    def __init__(self) -> None:
        self.now = LearnedLimits()
        self._settings: MonitorSettings | None = None
        self._factors = LimitFactors(_factors_of_environment())

    def settle(self, settings: MonitorSettings) -> None:
        """Puts the settings of the monitor in force. Limits that were loaded or learned before replace the configured
        ones."""
        self._settings = settings
        before, self.now = self.now, LearnedLimits.configured(settings)
        learned = ((name, before.seconds[name]) for name in before.learned)
        self._adopt({name: limit for name, limit in learned if limit}, loaded=False)

    def load(self, state: Mapping[str, Any]) -> None:
        """Puts the limits in force that another run has learned. An invalid state is ignored, with a warning.

        An empty state is what NVIDIA's releases 0.1 and 0.2 save when nothing was learned.

        Raises:
            RankMonitorClientError: `state` is no mapping.
        """
        if not isinstance(state, Mapping):
            raise RankMonitorClientError(f"not a state of this client: {type(state).__name__} is not a mapping")
        try:
            if not state:
                return
            if _TIMEOUTS not in state:
                raise ValueError(f"it has no {_TIMEOUTS}")
            self._adopt(learned_in(state), loaded=True)
        except ValueError as problem:
            logger.warning("learned limits are not loaded, and the configured ones hold: %s", problem)

    def learn_heartbeats(self, seen: Mapping[str, float], skip_if_not_ready: bool) -> bool:
        """Learns the limits of heartbeats: `RankMonitorClient.calculate_and_set_hb_timeouts`. Collective.

        Args:
            seen: the longest intervals of this rank, in seconds.
            skip_if_not_ready: return False instead of raising where a rank has not seen two signs of life.
        """
        unready = not {INITIAL, SUBSEQUENT} <= set(seen)
        initial, subsequent, some_unready = group.max_over_ranks(
            [seen.get(INITIAL, 0.0), seen.get(SUBSEQUENT, 0.0), float(unready)]
        )
        if not some_unready:
            self._learn({INITIAL: initial, SUBSEQUENT: subsequent})
        elif not skip_if_not_ready:
            raise RankMonitorClientError("limits of heartbeats need at least two signs of life on every rank")
        return not some_unready

    def learn_sections(
        self,
        seen: Mapping[str, float],
        opened: Collection[str],
        selected: Collection[str] | None,
        out_of_section: bool,
        skip_if_not_ready: bool,
    ) -> bool:
        """Learns the limits of sections: `RankMonitorClient.calculate_and_set_section_timeouts`. Collective.

        Args:
            seen: the longest intervals of this rank, in seconds.
            opened: names of the sections that are open on this rank.
            selected: names of the sections to learn, the same on all ranks; None: all that any rank has seen or has
                open.
            out_of_section: whether to learn the limit of the time with no section open.
            skip_if_not_ready: return False instead of raising or warning where something was never seen.
        """
        mine = {SECTION + name for name in opened}
        if selected is None:
            wanted = group.union_over_ranks(mine | {name for name in seen if name.startswith(SECTION)})
        else:
            wanted = sorted({SECTION + name for name in selected})
        if out_of_section:
            wanted.append(OUT_OF_SECTION)
        values = [seen.get(name, 0.0) for name in wanted] + [float(name in mine) for name in wanted]
        of_all = group.max_over_ranks(values)
        longest = dict(zip(wanted, of_all, strict=False))
        unseen = [name for name in wanted if not longest[name]]
        if skip_if_not_ready and (unseen or not wanted):
            return False
        is_open = dict(zip(wanted, of_all[len(wanted) :], strict=True))
        unfinished = [name for name in unseen if is_open[name]]
        if unfinished:
            raise RankMonitorClientError(f"not enough data to learn limits: still open are {', '.join(unfinished)}")
        if len(unseen) == len(wanted):
            raise RankMonitorClientError(f"no rank has seen any of: {', '.join(wanted) or 'sections'}")
        if unseen and group.rank() == 0:
            logger.warning("no limit is learned for what no rank has seen: %s", ", ".join(unseen))
        self._learn({name: took_s for name, took_s in longest.items() if took_s})
        return True

    def _learn(self, longest: Mapping[str, float]) -> None:
        """Puts the limits in force that follow from the longest intervals of all ranks."""
        assert self._settings is not None
        self._adopt(self.now.averaged(learned_from(longest, self._settings)), loaded=False)

    def _adopt(self, learned: Mapping[str, float], loaded: bool) -> None:
        """Puts learned limits in force; once the settings are known, by floor and factors."""
        limits = dict(learned)
        if self._settings is not None:
            limits, lines = self._factors(floored(learned, self._settings), loaded)
            for line in lines:
                logger.warning("%s", line)
        self.now = self.now.adopting(limits)


def _factors_of_environment() -> dict[str, float]:
    """Returns the launcher's factors for learned limits that ended a cycle, by name. Invalid ones are left out, with a
    warning."""
    text = os.environ.get(env.LIMIT_MULTIPLIERS)
    if not text:
        return {}
    try:
        return {str(name): positive(str(name), factor) for name, factor in json.loads(text).items()}
    except (ValueError, AttributeError) as problem:
        logger.warning("%s is not used: %s", env.LIMIT_MULTIPLIERS, problem)
        return {}
