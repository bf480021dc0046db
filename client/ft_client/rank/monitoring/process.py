"""The client's state of this process: stack file, link and watchdog. Made once; removed in a forked child.

`bootstrap.py` calls `start` before the script begins, so a rank is connected even if its program never asks to be
watched. `RankMonitorClient` calls it again, and gets the same link.

A forked child of a rank, such as a worker of a data loader, is not the rank: it must not speak for it, nor keep its
connection open. So the child gives up the link, and gets no other (`is_forked`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from ft_client.rank.monitoring import fork_warning, stack_writer
from ft_client.rank.monitoring.link import Link
from ft_client.rank.monitoring.watchdog import Watchdog
from rank_monitor.contract import env

_link: Link | None = None
_forked = False


def start(
    own: bool = False, environment: Mapping[str, str] | None = None, reports_modules: bool = False
) -> Link | None:
    """Returns the link of this process; the first call connects it, if the environment names a monitor.

    Args:
        own: whether the launcher started this very process for the rank.
        environment: names the socket and the stack file of a monitor that was started for this very process, which may
            be a forked child (a standalone agent does so). None: the variables of this process name the rank's monitor.
        reports_modules: whether the rank is to send which modules its program has imported.

    Returns:
        The link; None where there is no monitor, or where this is a forked child of a process that had a link.
    """
    global _link, _forked
    if environment is None:
        environment = os.environ
    else:
        _forked = False
    path = environment.get(env.RANK_MONITOR_SOCKET)
    if _link is not None or _forked or not path:
        return _link
    stacks = stack_writer.of_environment(environment)
    _link = Link(Path(path), own)
    os.register_at_fork(after_in_child=_in_child)
    fork_warning.keep_away()
    _link.reconnect()
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        Watchdog(_link, reports_modules, stacks).start()
    return _link


def current() -> Link | None:
    """Returns the link of this process; None if there is none."""
    return _link


def is_forked() -> bool:
    """Whether this is a forked child of a process that had a link. Such a child does not count as the rank."""
    return _forked


def _in_child() -> None:
    """Runs in each forked child, right after the fork."""
    global _link, _forked
    _forked = True
    if _link is not None:
        _link.close_in_child()
        _link = None
