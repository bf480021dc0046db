"""The progress of a cycle: the highest iteration of its ranks, or that in the checkpoint's file. Decides nothing.

`agent/ranks.py` asks after a failed cycle. Reading the file must not hold up a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from ft_launcher.attribution import RankEvidence, iteration
from rank_monitor.contract.wire.foreign import read_file
from rank_monitor.contract.wire.messages import NO_ITERATION

# Storage that hangs must not hold up the restart.
_READ_TIMEOUT_S = 5.0
# The training writes this file. 18 digits always fit into 64 bits.
_MOST_DIGITS = 18


def of_cycle(evidence: Iterable[RankEvidence], checkpoint_iteration_file: str | None) -> int | None:
    """Returns the iteration that a cycle reached; NO_ITERATION when its ranks reported none.

    Args:
        evidence: of its ranks.
        checkpoint_iteration_file: where the training writes its last saved iteration. If given, it alone counts.

    Returns:
        None when the file could not be read, or a monitor did not answer and no other rank reported an iteration.
    """
    if checkpoint_iteration_file is not None:
        return of_file(Path(checkpoint_iteration_file))
    ranks = list(evidence)
    highest = max(map(iteration, ranks), default=NO_ITERATION)
    if highest != NO_ITERATION or all(rank.snapshot for rank in ranks):
        return highest
    return None


def of_file(path: Path, timeout_s: float = _READ_TIMEOUT_S) -> int | None:
    """Returns the whole number in a file; None when it contains none, or cannot be read within `timeout_s`."""
    found: list[int] = []

    def read() -> None:
        try:
            text = read_file(path, follow_link=True).strip()
        except OSError:
            return
        if text.isdigit() and len(text) <= _MOST_DIGITS:
            found.append(int(text))

    reader = threading.Thread(target=read, daemon=True, name="ft_checkpoint_iteration")
    reader.start()
    reader.join(timeout_s)
    if found:
        return found[0]
    return None
