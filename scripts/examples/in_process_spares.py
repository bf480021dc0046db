"""Spares and a `Tree` of two layers: three hosts of two ranks, of which two hosts train and the third stands by.

Rank 1 leaves in the midst of the training. A host with one rank is of no use here (`min_ranks=2`), so the other rank of
that host has to leave as well, and the ranks of the spare host take over the numbers of both. No step is lost, since
the newest state that any rank has is handed to all. The exit code is 0 only if the result is that without a fault.

    ft_launcher --nproc-per-node 6 scripts/examples/in_process_spares.py
    torchrun    --nproc-per-node 6 scripts/examples/in_process_spares.py

A rank that leaves does so with exit code 0, since torchrun ends all ranks when one fails.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ft_client.inprocess import CallWrapper, Wrapper
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.rank_assignment import Layer, LayerFlag, RankDiscarded, Tree
from ft_client.inprocess.state import FrozenState

HOSTS, ACTIVE_HOSTS, RANKS_PER_HOST = 3, 2, 2
STEPS, LEAVES_AT = 30, 10
SAMPLES = torch.arange(STEPS * 1000).reshape(STEPS, -1)


@dataclass
class Progress:
    """What outlives an iteration: how many steps are done, and the sum of their samples (this training's weights)."""

    done: tuple[int, torch.Tensor]


def host(state: FrozenState) -> str:
    """The branch of a rank in the second layer. Where the hosts are real, `socket.gethostname()`."""
    assert state.initial_rank is not None
    return f"host {state.initial_rank // RANKS_PER_HOST}"


def shared(steps: int, weights: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The newest state that any active rank has: a spare that has just become active has none."""
    of_all = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    of_all[dist.get_rank()] = steps
    dist.all_reduce(of_all)
    newest = weights.clone()
    dist.broadcast(newest, src=int(of_all.argmax()))
    return int(of_all.max()), newest


def train(progress: Progress, call: CallWrapper) -> int:
    """The wrapped function; returns the weights. Called on active ranks only, with their numbers in RANK."""
    dist.init_process_group("gloo")
    rank, world_size, entry = dist.get_rank(), dist.get_world_size(), call.state.initial_rank
    progress.done = shared(*progress.done)
    first = progress.done[0]
    print(f"iteration {call.iteration}: rank {entry} is rank {rank} of {world_size} from step {first} on", flush=True)
    # One for all steps: at the end of a group, torch 2.6 may hang where a tensor that was reduced is gone.
    update = torch.zeros_like(progress.done[1])
    for step in range(first, STEPS):
        if entry == 1 and step == LEAVES_AT:
            sys.exit(0)
        update.copy_(SAMPLES[step, rank::world_size].sum())
        dist.all_reduce(update)
        progress.done = step + 1, progress.done[1] + update  # replaced as a whole: never half a step
        call.ping()
    dist.destroy_process_group()
    return int(progress.done[1])


def main() -> int:
    """One rank; 1: the result is wrong."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    entry = int(os.environ["RANK"])
    of_all_ranks = Layer(max_ranks=ACTIVE_HOSTS * RANKS_PER_HOST, flag=LayerFlag.RESERVE)
    of_a_host = Layer(min_ranks=RANKS_PER_HOST, key_or_fn=host, flag=LayerFlag.RESERVE)
    wrapped = Wrapper(
        rank_assignment=Tree([of_all_ranks, of_a_host]),
        initialize=RetryController(min_active_world_size=ACTIVE_HOSTS * RANKS_PER_HOST),
        last_call_wait=timedelta(milliseconds=10),
    )(train)
    try:
        weights = wrapped(Progress((0, torch.tensor(0))))
    except RankDiscarded as reason:
        print(f"rank {entry} leaves, too: {reason}", flush=True)
        return 0
    if weights is None:
        print(f"rank {entry} was not needed", flush=True)
        return 0
    is_right = weights == int(SAMPLES.sum())
    print(
        f"rank {entry} ends with {'the result of a run without a fault' if is_right else 'ANOTHER RESULT'}", flush=True
    )
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
