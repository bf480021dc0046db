"""The usual checks of a loss as one value of settings: NaN, which is fatal, and sudden growth, which is not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ft_client.rerun.injector import RerunErrorInjector
from ft_client.rerun.judgement import RerunDiagnostic
from ft_client.rerun.machine import RerunMode
from ft_client.rerun.of_process import get_rerun_state_machine, initialize_rerun_state_machine
from ft_client.rerun.result import Result
from ft_client.rerun.state_machine import RerunStateMachine


@dataclass(frozen=True)
class RerunStateMachineConfig:
    """Settings by their documented names.

    `error_injection_rate`: one in so many checks. `spiky_loss_factor`: times the largest of the first 100 losses.
    """

    rerun_mode: RerunMode | str = "disabled"
    check_for_nan_in_loss: bool = True
    check_for_spiky_loss: bool = False
    spiky_loss_factor: float = 10.0
    error_injection_rate: int = 0
    error_injection_type: RerunDiagnostic | str = "transient_error"

    def __post_init__(self) -> None:
        """Raises ValueError for a factor that no loss can be judged by."""
        factor: object = self.spiky_loss_factor
        if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(f"spiky_loss_factor={factor!r} is no finite number above 0")

    def initialize(self, **arguments: Any) -> RerunStateMachine:
        """Makes the machine of this process; further arguments are `RerunStateMachine`'s."""
        injector = RerunErrorInjector(self.error_injection_rate, self.error_injection_type)
        return initialize_rerun_state_machine(mode=self.rerun_mode, error_injector=injector, **arguments)

    def validate_loss(self, loss: Result) -> None:
        """Gives `loss` to the checks that are on, in the machine of this process."""
        machine = get_rerun_state_machine()
        if self.check_for_nan_in_loss:
            machine.validate_result(loss, _is_nan, "loss is NaN")
        if self.check_for_spiky_loss:
            large = partial(machine.is_unexpectedly_large, threshold=self.spiky_loss_factor, context="loss")
            machine.validate_result(loss, large, "loss is unexpectedly large", fatal=False)


def _is_nan(loss: Result) -> bool:
    return bool(torch.isnan(loss)) if isinstance(loss, torch.Tensor) else math.isnan(loss)
