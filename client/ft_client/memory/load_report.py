"""What rank 0 tells the user about a load. Pure."""

from __future__ import annotations

from ft_client.memory.agreed_steps import AgreedSteps
from rank_monitor.contract.memory_files import Generation


def lines_of_load(found: Generation | None, agreed: AgreedSteps, world: int) -> list[str]:
    """Returns where the training goes on, and what in memory is newer than that.

    Args:
        found: what was loaded.
        agreed: what the ranks have agreed upon.
        world: how many ranks the job has.
    """
    lines = []
    on_disk = ""
    if agreed.newer_than:
        on_disk = f" (the checkpoint on disk has step {agreed.newer_than})"
    start = 0
    if found is not None:
        start = found.step
        lines.append(f"the training goes on from step {start} in memory{on_disk}")
    elif agreed.older:
        lines.append(f"step {agreed.older[0]} in memory is not newer than the checkpoint on disk{on_disk}")
    if agreed.left_out and agreed.left_out[0].step > start:
        other = agreed.left_out[0]
        where = f"it is of {other.world} ranks and not on all nodes of a job of {world}"
        if other.world == world:
            where = "not all nodes have it, or their ranks have moved"
        lines.append(f"step {other.step} in memory cannot be used: {where}{on_disk}")
    return lines


def lines_of_refusal(agreed: AgreedSteps, has_folder: bool) -> list[str]:
    """Returns why no state is kept, and what in memory is not used by that.

    Args:
        agreed: what the ranks have agreed upon.
        has_folder: whether rank 0 has a folder. Where it has none, `read_settings` has said why.
    """
    lines = []
    if agreed.refusing_rank != 0:
        lines.append(f"no state is kept in memory: rank {agreed.refusing_rank} cannot keep its own: {agreed.refused}")
    elif has_folder:
        lines.append(f"no state is kept in memory: {agreed.refused}")
    if agreed.left_out:
        step = agreed.left_out[0].step
        lines.append(f"step {step} in memory is not used in this start, as a rank can keep no state")
    return lines
