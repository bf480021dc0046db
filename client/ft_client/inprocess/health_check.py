"""Checks whether this rank may take part in the next round. Users pass them to the wrapper as `health_check`.

`restart/user_function.py` calls the check before each round's function, and after a fault when `finalize` is done. A
health check is local: nothing is exchanged with other ranks, of which some may be gone.
"""

from __future__ import annotations

import datetime

from ft_client.inprocess.callback import Callback, call_within
from ft_client.inprocess.exception import HealthCheckError, RestartError
from ft_client.inprocess.state import FrozenState


class HealthCheck(Callback):
    """Runs before the function and after a fault.

    What it raises before the function is a fault, which restarts. What it raises after a fault ends this rank.
    """


class CudaHealthCheck(HealthCheck):
    """Waits for the work on this rank's CUDA device. Does nothing where CUDA is not in use.

    It synchronises twice. The first synchronisation may report the fault that is being handled. Only if the second
    fails as well the CUDA context is broken: such an error stays until the process ends.

    Args:
        timeout: for both synchronisations together. A device that hangs never comes to an end.
    """

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`.

        Raises:
            TimeoutError: of `inprocess.exception`: the device does not come to an end.
            HealthCheckError: the CUDA context is broken.
        """
        import torch

        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return state
        try:
            call_within(self.timeout, _synchronize_twice, "CUDA synchronisation")
        except RuntimeError as error:
            raise HealthCheckError(f"the CUDA context is broken: {error}") from error
        return state


def _synchronize_twice() -> None:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        pass
    torch.cuda.synchronize()


class FaultCounterExceeded(RestartError):
    """This rank's function has failed more often than it may."""


class FaultCounter(HealthCheck):
    """Counts the faults that began on this rank; faults of other ranks don't count.

    A rank that fails more often than others may have a broken device, and is left out when it exceeds its limit.

    Args:
        max_rank_faults: how many faults are allowed; None: no limit.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`.

        Raises:
            FaultCounterExceeded: naming limit and count. Its cause is the function's last exception.
        """
        if state.fn_exception is not None:
            self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"{self.faults_count} faults on this rank are above max_rank_faults={self.max_rank_faults}"
            ) from state.fn_exception
        return state
