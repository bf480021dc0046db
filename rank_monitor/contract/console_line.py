"""The form of a line that the launcher writes to the console: the time of day, its name, the text.

The launcher, its zygote and the ranks that the zygote forks use it. The answer of a command (`ft_launcher status`) has
no time: the user who typed the command reads the answer at once.
"""

from __future__ import annotations

import time


def console_line(text: str, at: float) -> str:
    """Returns a line of the launcher that is written `at` (seconds since 1970): `12:34:56 ft_launcher: text`."""
    return f"{time_of_day(at)} ft_launcher: {text}"


def time_of_day(at: float) -> str:
    """Returns a moment (seconds since 1970) as local time of day: `12:34:56`."""
    return time.strftime("%H:%M:%S", time.localtime(at))
