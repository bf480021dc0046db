"""What is ours in this process: the stack dump, the link and its watchdog; made once, gone in a forked child."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from ft_client import stacks
from ft_client.link import Link
from ft_client.progress import Watchdog
from rank_monitor.contract import env

_link: Link | None = None
_forked = False


def start(own: bool = False, environment: Mapping[str, str] = os.environ) -> Link | None:
    """The link of this process, connected at the first call if there is somebody to connect to.

    Args:
        own: the launcher started this very process for the rank.
        environment: says who to connect to.

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
    """The link that was started, if any."""
    return _link


def is_forked() -> bool:
    """Whether this is a forked child of a process that had a link: its life is not the rank's."""
    return _forked


def _in_child() -> None:
    global _link, _forked
    _forked = True
    if _link is not None:
        _link.forget()
        _link = None
