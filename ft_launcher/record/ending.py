"""`Ending`: the result of stopping the processes of a cycle. `node/processes/process_tree.py` fills one, `recorder.py`
writes it to the journal. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Ending:
    """The result of a stop: pids that needed SIGKILL, and pids that SIGKILL did not end."""

    killed: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
