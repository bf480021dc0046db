"""Finds the folder of a step again: `ft.latest_memory_folder`, also before the job has a process group."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any, Protocol

from ft_client.memory import progress
from ft_client.memory.load_report import line_of_step, message_of_look
from ft_client.memory.node_folder import (
    names_in,
    node_of,
    ranks_of_node,
    read_settings,
    read_settings_in_group,
    say,
    why_not,
)
from ft_client.memory.to_launcher import tell
from ft_client.rank.agreement import group
from ft_client.rank.agreement.early_ranks import EarlyRanks
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import MemoryFiles, StateFolder


def latest_memory_folder(newer_than: int | None = 0, training: str = "") -> Path | None:
    """Returns the newest folder that is complete on all nodes, the same step on all ranks; None: there is none, or
    there is no launcher. Collective.

    A folder counts only if its node has the ranks now that it had then: each rank finds the files that it wrote.

    Args:
        newer_than: the step of the newest checkpoint on disk: an older folder is not returned. None as 0: there is no
            checkpoint. The largest value of all ranks counts.
        training: the name that the folder was written with (`ft.memory_folder`).

    Raises:
        TypeError: the step is no whole number.
        RuntimeError: the job has several ranks and no process group yet.
    """
    newest_on_disk = operator.index(newer_than or 0)
    settings = read_settings_in_group("ft.latest_memory_folder()")
    if settings is None:
        return None
    return _look(settings, newest_on_disk, training, group)


def latest_folder_before_group(call: str, newer_than: int | None = 0, training: str = "") -> Path | None:
    """As `latest_memory_folder`, also before the job has a process group: the ranks agree by the launcher's store then.
    All ranks of the job call it.

    Args:
        call: what the program calls, for the error where some ranks do not.
        newer_than, training: as there.

    Raises:
        TypeError: the step is no whole number.
        RuntimeError: some ranks do not call it: the error names them. Or the store does not answer.
    """
    if group.is_there():
        return latest_memory_folder(newer_than, training)
    newest_on_disk = operator.index(newer_than or 0)
    settings = read_settings()
    if settings is None:
        return None
    return _look(settings, newest_on_disk, training, EarlyRanks(call))


class _Ranks(Protocol):
    """The ranks that look together, such as the module `group` and `EarlyRanks`."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def gather_json(self, value: Any) -> list[Any]: ...


def _look(settings: MemoryFiles, newest_on_disk: int, training: str, ranks: _Ranks) -> Path | None:
    """Returns the newest folder of a training that all nodes have and that is newer than the disk, and tells the
    launcher. Collective.
    """
    in_name = memory_files.training_in_name(training)
    own_rank = ranks.rank()
    own: list[StateFolder] = []
    refused = why_not(settings, ranks.size())
    if not refused:
        whole = memory_files.complete_folders(names_in(settings.folder))
        own = [found for found in whole if found.training == in_name]
    elif settings.folder and own_rank == 0:
        say(f"no folder in memory is used: {refused}")
    node = node_of(settings.folder, own_rank)
    listed = [[found.step, found.world, found.ranks, found.series] for found in own]
    reached = progress.last_step(settings.folder)
    offers = ranks.gather_json([node, newest_on_disk, listed, reached, os.urandom(4).hex()])
    nodes = [offer[0] for offer in offers]
    on_disk = max(offer[1] for offer in offers)

    def fitting(rank: int) -> set[tuple[int, str]]:
        """Returns step and series of each folder of a rank's node that was written by the ranks that it has now."""
        here = memory_files.ranks_in_name(ranks_of_node(nodes, rank))
        return {
            (step, series) for step, world, ranks, series in offers[rank][2] if (world, ranks) == (len(offers), here)
        }

    common = set.intersection(*(fitting(rank) for rank in range(len(offers))))
    here = ranks_of_node(nodes, own_rank)
    newest = max(common, default=(0, ""))
    found = None
    if newest[0] > on_disk:
        found = StateFolder(newest[0], len(offers), memory_files.ranks_in_name(here), newest[1], in_name)
    offered = sorted({(step, series) for offer in offers for step, _, _, series in offer[2]})
    message = message_of_look(offers[0][4], found, offered, on_disk, max(offer[3] for offer in offers))
    # Where no monitor takes the message, this may be a program that a rank has started.
    is_told = tell(message)
    if is_told and not refused:
        progress.begin(settings.folder, own_rank, here, max(message.step, on_disk))
    if found is None:
        return None
    if not is_told and own_rank == 0:
        say(line_of_step(found.step, on_disk))
    return Path(settings.folder) / found.name
