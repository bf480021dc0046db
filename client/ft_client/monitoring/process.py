"""The client's state of this process: stack dump, link and watchdog. Made once; removed in a forked child."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from ft_client.monitoring import stacks
from ft_client.monitoring.link import Link
from ft_client.monitoring.watchdog import Watchdog
from rank_monitor.contract import env

_link: Link | None = None
_forked = False


def start(own: bool = False, environment: Mapping[str, str] = os.environ) -> Link | None:
    """Returns the link of this process; the first call connects it, if the environment names a monitor.

    Args:
        own: whether the launcher started this very process for the rank.
        environment: names the monitor's socket and the stack file.

    Returns:
        None without a launcher, and in a forked child of a process that had a link.
    """
    global _link
    path = environment.get(env.RANK_MONITOR_SOCKET)
    if _link is not None or _forked or not path:
        return _link
    stack_signal = stacks.register(environment)
    _link = Link(Path(path), own)
    os.register_at_fork(after_in_child=_in_child)
    _link.reconnect()
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        Watchdog(_link).start(stack_signal)
    return _link


def current() -> Link | None:
    """The link of this process; None if it was not started."""
    return _link


def is_forked() -> bool:
    """Whether this is a forked child of a process that had a link. Such a child does not count as the rank."""
    return _forked


def _in_child() -> None:
    global _link, _forked
    _forked = True
    if _link is not None:
        _link.forget()
        _link = None
