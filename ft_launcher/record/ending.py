"""`Ending`: which processes a stop had to kill, and which it could not end. Data only.

`stop` of `node/processes/process_tree.py` fills one. `recorder.py` writes it to the journal, and the attribution takes
from it which ranks the launcher itself killed, so that these do not count as failed. It is defined here since the wing
`record` must not import the wing `node`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Ending:
    """The result of a stop.

    Attributes:
        killed: pids that were sent SIGKILL.
        left: those of them that did not end.
    """

    killed: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
