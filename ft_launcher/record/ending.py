"""`Ending`: what a stop of the processes of a cycle came to. The node stops them, the recorder writes it; data only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Ending:
    """The result of a stop: pids that needed SIGKILL, and pids that SIGKILL did not end."""

    killed: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
