"""The names in `--signals-to-handle` as signals. Pure.

The settings of a job and `launch()` read them here; the handlers are set elsewhere.
"""

from __future__ import annotations

import signal

from ft_launcher.settings.options import nearest


def named_signals(names: str) -> frozenset[int]:
    """Returns the numbers of the signals in `--signals-to-handle`; unknown names are left out.

    Raises:
        ValueError: no process can handle one of them.
    """
    numbers = frozenset(numbers_of(names))
    impossible = numbers & {signal.SIGKILL, signal.SIGSTOP}
    if impossible:
        name = signal.Signals(min(impossible)).name
        raise ValueError(f"{name} cannot be handled by a process")
    return numbers


def about_names(names: str) -> list[str]:
    """Returns a warning about each name in `--signals-to-handle` that is not a signal of this system."""
    known = signal.Signals.__members__
    unknown = [name for name in map(str.strip, names.split(",")) if name and name not in known]
    return [f"--signals-to-handle: {name} is not a signal, left out{nearest(name, known)}" for name in unknown]


def numbers_of(names: str) -> tuple[int, ...]:
    """Parses names like `SIGTERM,SIGINT`; names that this system lacks are left out, as in torch."""
    known = (getattr(signal, name.strip(), None) for name in names.split(","))
    return tuple(int(number) for number in known if isinstance(number, signal.Signals))
