"""A training with the calls of Megatron-LM's rerun machine and signal handler, in its order and by its keywords.

Only the first two imports of ours are not Megatron's.
"""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_client.preemption import DistributedSignalHandler
from ft_client.rerun import (
    RerunDataIterator,
    RerunDiagnostic,
    RerunErrorInjector,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

MICROBATCHES, STEPS, SIGNAL_AT = 2, 4, 3


class ExternalLoader:
    """A loader that is an iterator, with a state of its own."""

    def __init__(self, start: int) -> None:
        self._numbers = itertools.count(start)

    def __next__(self) -> torch.Tensor:
        return torch.tensor([float(next(self._numbers))])

    def save_state(self) -> str:
        return "saved"


def pretrain(
    rank: int, world_size: int, *, rerun_mode: str, rate: int, kind: str, folder: str, signaled: int = -1
) -> dict[str, Any]:
    """One rank: from the setup of the machine to the exit code."""
    weight = torch.zeros(1)
    initialize_rerun_state_machine(
        state_save_func=lambda: {"weight": weight.clone()},
        state_restore_func=lambda state_dict: weight.copy_(state_dict["weight"]),
        mode=RerunMode(rerun_mode),
        error_injector=RerunErrorInjector(error_injection_rate=rate, error_injection_type=RerunDiagnostic(kind)),
        result_rejected_tracker_filename=f"{folder}/rejected",
    )
    checkpoint, iteration = Path(folder, f"checkpoint-{rank}"), 0
    rerun_state_machine = get_rerun_state_machine()
    if checkpoint.exists():
        state_dict = torch.load(checkpoint)
        iteration = state_dict["iteration"]
        assert rerun_state_machine.validate_state_dict(state_dict["rerun_state_machine"])
        rerun_state_machine.load_state_dict(state_dict["rerun_state_machine"])
    else:
        rerun_state_machine.current_iteration = iteration - 1
    train_data = [RerunDataIterator(ExternalLoader(iteration * MICROBATCHES)) for _ in range(2)]
    valid_data = RerunDataIterator(map(float, itertools.count()))
    handler = DistributedSignalHandler(signal.SIGUSR1).__enter__()
    told: dict[str, Any] = {"seen": [], "code": 0, "stopped": False, "states": set()}
    while iteration < STEPS:
        should_checkpoint, should_exit, told["code"] = train_step(train_data, weight, told["seen"])
        if should_checkpoint:
            rerun_state = rerun_state_machine.state_dict(data_iterator=train_data, ckpt_format="torch_dist")
            torch.save({"iteration": iteration, "rerun_state_machine": rerun_state}, checkpoint)
        if should_exit:
            break
        iteration += 1
        told["kept"] = evaluate(valid_data)
        told["states"].add(train_data[0].iterable.save_state())
        if (rank, iteration) == (signaled, SIGNAL_AT):
            os.kill(os.getpid(), signal.SIGUSR1)
        if any(handler.signals_received()):
            told["stopped"] = True
            break
    handler.release()
    destroy_rerun_state_machine()
    return told | {"iteration": iteration}


def train_step(data_iterator: list[RerunDataIterator[Any]], weight: torch.Tensor, seen: list[Any]) -> Any:
    """All microbatches of a step, perhaps twice."""
    rerun_state_machine = get_rerun_state_machine()
    while rerun_state_machine.should_run_forward_backward(data_iterator):
        for one in data_iterator:
            numbers = [float(next(one)) for _ in range(MICROBATCHES)]
            loss_func(torch.tensor([sum(numbers)]))
        seen.append((rerun_state_machine.current_iteration, numbers))
    should = rerun_state_machine.should_checkpoint_and_exit()
    if not should[1]:
        weight += 1
        if dist.is_initialized():
            dist.all_reduce(weight)
    return should


def loss_func(loss: torch.Tensor) -> None:
    """The checks of a loss, in an evaluation as well."""
    rerun_state_machine = get_rerun_state_machine()
    rerun_state_machine.validate_result(
        result=loss,
        rejection_func=torch.isnan,
        message="found NaN in local forward loss calculation",
        tolerance=0.0,
        fatal=True,
    )
    rerun_state_machine.validate_result(
        result=loss,
        rejection_func=partial(rerun_state_machine.is_unexpectedly_large, threshold=10, context="loss"),
        message="Spiky loss",
        tolerance=0.0,
        fatal=False,
    )


def evaluate(data_iterator: RerunDataIterator[Any]) -> int:
    """Two steps, with result validation disabled; how many microbatches the iterator holds on to."""
    rerun_state_machine = get_rerun_state_machine()
    rerun_mode = rerun_state_machine.get_mode()
    rerun_state_machine.set_mode(RerunMode.DISABLED)
    for _ in range(2):
        loss_func(torch.tensor([next(data_iterator)]))
    rerun_state_machine.set_mode(rerun_mode)
    return len(data_iterator.saved_microbatches)
