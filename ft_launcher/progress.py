"""How far a cycle came: the highest iteration of its ranks, or what the checkpoint's file says. Decides nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from ft_launcher.attribution import RankEvidence, iteration
from rank_monitor.contract.foreign import read_file
from rank_monitor.contract.messages import NO_ITERATION

_PATIENCE_S = 5.0
_MOST_DIGITS = 18


def of_cycle(evidence: Iterable[RankEvidence], checkpoint_iteration_file: str | None) -> int | None:
    """The iteration of a cycle that ended; NO_ITERATION when its ranks reported none.

    Args:
        evidence: of its ranks.
        checkpoint_iteration_file: where the training writes its last saved iteration; what it says counts then.

    Returns:
        None when the file could not be read, or a monitor did not answer and no other rank reported one.
    """
    if checkpoint_iteration_file is not None:
        return of_file(Path(checkpoint_iteration_file))
    ranks = list(evidence)
    highest = max(map(iteration, ranks), default=NO_ITERATION)
    return highest if highest != NO_ITERATION or all(rank.snapshot for rank in ranks) else None


def of_file(path: Path, patience_s: float = _PATIENCE_S) -> int | None:
    """The whole number in a file; None when there is none, or when the file cannot be read in time."""
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
    reader.join(patience_s)  # storage that hangs must not hold up the restart
    return found[0] if found else None
