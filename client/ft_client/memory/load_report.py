"""The messages about a load: the one to the launcher, and the lines that rank 0 prints for the user. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ft_client.memory.agreed_steps import AgreedSteps, OtherWorld
from rank_monitor.contract.memory_files import Generation, StateFolder, StateTier
from rank_monitor.contract.wire.messages import MAX_REASON, MAX_REFUSED, StateLoaded, StateRefused

ALL_RANKS = -1
"""In the place of the rank of a refusal: the reason holds for all."""
_NOT_NEWER = "it is not newer than the checkpoint on disk"
_NOT_ALL_NODES = "not all nodes have it, or their ranks have moved"


def message_of_load(
    found: Generation | OtherWorld | None,
    refused: Sequence[StateRefused],
    agreed: AgreedSteps,
    world: int,
    where: StateTier = StateTier.MEMORY,
) -> StateLoaded:
    """Returns what the launcher is told; the same on all ranks.

    Args:
        found: what was loaded.
        refused: what was tried before, by rank.
        agreed: what the ranks have agreed upon.
        world: how many ranks the job has.
        where: the loaded state lay.
    """
    tier, step, series, saved_world = StateTier.NONE, 0, "", 0
    if found is not None:
        tier, step, series, saved_world = where, found.step, found.series, found.world
    others = [StateRefused(older, ALL_RANKS, _NOT_NEWER) for older in agreed.older]
    for generation in agreed.left_out:
        if generation.step > step:
            reason = _why_left_out(generation, world)
            if agreed.refusing_rank is not None:
                reason = f"rank {agreed.refusing_rank} cannot keep its own: {agreed.refused}"
            others.append(StateRefused(generation.step, ALL_RANKS, reason[:MAX_REASON]))
    of_all = sorted([*refused, *others], key=lambda one: (-one.step, one.rank))
    refusals = of_all[:MAX_REFUSED]
    newer_than, reached = agreed.newer_than, agreed.reached
    return StateLoaded(agreed.series, tier, step, series, newer_than, reached, refusals, world, saved_world)


def message_of_look(
    look: str, found: StateFolder | None, offered: Sequence[tuple[int, str]], on_disk: int, reached: int
) -> StateLoaded:
    """Returns what the launcher is told where a folder of a step was looked for; the same on all ranks.

    Args:
        look: digits that tell this look from others.
        found: the folder; None: there is none.
        offered: step and series of all folders that a node has.
        on_disk: the step of the checkpoint on disk.
        reached: the last step that a rank has reported before. A step is noted when its folder is written, and
            the steps after that are not. So where no later step is known than that of the folder, none is given.
    """
    tier, step, series = StateTier.NONE, 0, ""
    if found is not None:
        tier, step, series = StateTier.MEMORY, found.step, found.series
    refused = []
    for other, _ in sorted(offered, reverse=True):
        if other > max(step, on_disk):
            refused.append(StateRefused(other, ALL_RANKS, _NOT_ALL_NODES))
        elif step < other <= on_disk:
            refused.append(StateRefused(other, ALL_RANKS, _NOT_NEWER))
    if reached <= step:
        reached = 0
    return StateLoaded(look, tier, step, series, on_disk, reached, refused[:MAX_REFUSED])


def line_of_step(step: int, newer_than: int) -> str:
    """Returns where the training goes on. The launcher shows this itself, with the steps that were lost; rank 0 only
    where it could not tell the launcher."""
    return f"the training goes on from step {step} in memory{_on_disk(newer_than)}"


def line_of_other_world(found: OtherWorld, world: int, anew: Sequence[str]) -> str:
    """Returns what is not as it was where the state is of a job with another number of ranks.

    Args:
        found: what was loaded.
        world: how many ranks the job has.
        anew: names of the objects that were not set.
    """
    what = "random numbers and loaders"
    if anew:
        what = f"random numbers and {', '.join(anew)}"
    return f"step {found.step} in memory is of {found.world} ranks and was put together for {world}: {what} begin anew"


def lines_of_load(found: Generation | OtherWorld | None, agreed: AgreedSteps, world: int) -> list[str]:
    """Returns which state in memory was not used, and why.

    Args:
        found: what was loaded.
        agreed: what the ranks have agreed upon.
        world: how many ranks the job has.
    """
    lines = []
    on_disk = _on_disk(agreed.newer_than)
    start = 0
    if found is not None:
        start = found.step
    elif agreed.older:
        lines.append(f"step {agreed.older[0]} in memory is not newer than the checkpoint on disk{on_disk}")
    if agreed.left_out and agreed.left_out[0].step > start:
        other = agreed.left_out[0]
        lines.append(f"step {other.step} in memory cannot be used: {_why_left_out(other, world)}{on_disk}")
    if agreed.no_save_until > start:
        lines.append(f"nothing is saved in memory before step {agreed.no_save_until} is passed, where the job failed")
    return lines


def _on_disk(step: int) -> str:
    if not step:
        return ""
    return f" (the checkpoint on disk has step {step})"


def _why_left_out(generation: Generation, world: int) -> str:
    """Returns why not all nodes have a generation. `world`: how many ranks the job has."""
    if generation.world == world:
        return _NOT_ALL_NODES
    return f"it is of {generation.world} ranks and not on all nodes of a job of {world}"


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
