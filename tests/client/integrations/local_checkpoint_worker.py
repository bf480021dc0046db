"""What the two ranks of a process group of `test_local_checkpoint_ranks.py` run: one of the functions below, which the
last argument names. The other arguments: the rank, a file for the process group, and the user's folder.

The result is printed as JSON.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ft_client.integrations import nvrx_alias
from ft_client.integrations.local_checkpoints.parts_folder import PartsFolder
from ft_client.memory.background_work import BACKGROUND

nvrx_alias.install()

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict  # noqa: E402
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager  # noqa: E402
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper  # noqa: E402


def state(value: float, size: int = 1000) -> Any:
    return BasicTensorAwareStateDict({"weight": torch.full((size,), value + dist.get_rank())})


def loaded(manager: Any) -> list[float]:
    """Iteration and value of what is loaded; the iteration alone: there is nothing."""
    iteration = manager.find_latest()
    if iteration == -1:
        return [-1]
    return [iteration, float(manager.load()[0].state_dict["weight"][0])]


def path_of(manager: Any, iteration: int) -> Path:
    found: Path = manager.local_ckpt_dir / f"iter_{iteration:07}_{dist.get_rank()}_local.pt"
    return found


def saves_and_loads(user: Path) -> Any:
    manager = LocalCheckpointManager(user)
    before = loaded(manager)
    manager.save(state(50), 5)
    request = manager.save(state(100), 10, is_async=True)
    request.execute_sync()
    BACKGROUND.wait()
    return [before, loaded(LocalCheckpointManager(user)), path_of(manager, 5).exists()]


def mixes_two_saves(user: Path) -> Any:
    """Rank 1 has the part of iteration 10 of an earlier save of it, as after a death in the middle of the second."""
    manager = LocalCheckpointManager(user)
    manager.save(state(100), 10)
    old = path_of(manager, 10).read_bytes()
    manager.save(state(200), 10)
    if dist.get_rank() == 1:
        path_of(manager, 10).write_bytes(old)
    dist.barrier()
    mixed = loaded(LocalCheckpointManager(user))
    has_stayed = path_of(manager, 10).exists()
    manager.save(state(300), 15)
    return [mixed, has_stayed, loaded(LocalCheckpointManager(user))]


def cannot_write_on_one_rank(user: Path) -> Any:
    manager = LocalCheckpointManager(user)
    manager.save(state(50), 5)
    if dist.get_rank() == 1:
        path_of(manager, 10).mkdir()
    manager.save(state(100), 10)
    has_part = path_of(manager, 10).is_file()
    return [manager.failures, has_part, loaded(LocalCheckpointManager(user))]


def is_torn_on_one_rank(user: Path) -> Any:
    manager = LocalCheckpointManager(user)
    manager.save(state(50), 5)
    kept = path_of(manager, 5).read_bytes()
    manager.save(state(100), 10)
    path_of(manager, 5).write_bytes(kept)
    if dist.get_rank() == 1:
        content = bytearray(path_of(manager, 10).read_bytes())
        content[len(content) // 2] ^= 1
        path_of(manager, 10).write_bytes(content)
    dist.barrier()
    found = loaded(LocalCheckpointManager(user))
    return [found, path_of(manager, 10).exists()]


def has_two(user: Path) -> None:
    """Leaves whole parts of iterations 20 and 25."""
    manager = LocalCheckpointManager(user)
    manager.save(state(200, 10_000), 20)
    kept = path_of(manager, 20).read_bytes()
    manager.save(state(250, 10_000), 25)
    path_of(manager, 20).write_bytes(kept)
    dist.barrier()


def has_lost_a_node(user: Path) -> Any:
    has_two(user)
    manager = LocalCheckpointManager(user)
    if dist.get_rank() == 1:
        for path in manager.local_ckpt_dir.iterdir():
            path.unlink()
    found = loaded(manager)
    manager.save(state(300, 10_000), 30)
    return [found, manager.failures, loaded(LocalCheckpointManager(user))]


def measures_the_room(user: Path) -> Any:
    """Rank 1 takes its time to remove its old part. Returns what was found, and how many old parts rank 0 sees of rank
    1 when it measures."""
    has_two(user)
    manager = LocalCheckpointManager(user)
    found = [manager.find_latest()]
    seen: list[Path] = []
    remove, measure = PartsFolder.keep_only, PartsFolder.left

    def remove_slowly(parts: Any, *iterations: Any) -> None:
        time.sleep(0.5 * dist.get_rank())
        remove(parts, *iterations)

    def look_and_measure(parts: Any) -> Any:
        seen.extend(path_of(manager, 20).parent.parent.glob("*/iter_0000020_*"))
        return measure(parts)

    with (
        mock.patch.object(PartsFolder, "keep_only", remove_slowly),
        mock.patch.object(PartsFolder, "left", look_and_measure),
    ):
        manager.save(state(300, 10_000), 30)
    return [found, len(seen)]


def cannot_load_on_one_rank(user: Path) -> Any:
    """All ranks get the error of one, and none waits for it."""
    manager = LocalCheckpointManager(user)
    manager.save(state(50), 5)
    iteration = manager.find_latest()
    manager.load()
    if dist.get_rank() == 1:
        path_of(manager, 5).unlink()
    try:
        manager.load()
    except Exception as error:
        return [iteration, str(error)]
    return []


def has_groups(user: Path) -> Any:
    pairs = [dist.new_group([rank]) for rank in range(2)]
    own = GroupWrapper.from_list_of_groups(pairs)
    whole = GroupWrapper()
    given = [torch.full((rank + 1,), float(rank)) for rank in range(dist.get_rank() + 1)]
    batch = [[tensor.tolist() for tensor in tensors] for tensors in whole.all_gather_batch(given)]
    return [
        [own.world_size, own.my_group_rank, own.my_global_rank, list(own.ranks)],
        [whole.world_size, whole.my_group_rank, whole.my_global_rank, list(whole.ranks)],
        [GroupWrapper.wrap(own) is own, whole.all_gather_object("x"), whole.backend],
        batch,
    ]


def main() -> None:
    rank, store, user, what = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    function: Callable[[Path], Any] = globals()[what]
    print(json.dumps(function(user)))
    BACKGROUND.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
