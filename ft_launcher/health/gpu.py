"""The state of each GPU: what recovery the driver asks for, memory errors, retired pages and remapped rows.

Where the driver says itself which recovery a GPU needs (release 570 and later), that decides; the counters decide for
older ones, because a contained memory error stays counted on a GPU that is in order again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ft_launcher.health.finding import Answer, Finding, Task

_ACTION_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_UNCORRECTED, _SINCE_RESET = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
# The values of nvmlDeviceGpuRecoveryAction_t.
_RECOVERY = {
    1: "a reset",
    2: "a reboot of the node",
    3: "its peer-to-peer traffic to be drained",
    4: "to be drained and reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the system",
}


@dataclass(frozen=True)
class Gpu:
    """What NVML says of a GPU: numbers, 0 for no; None: it does not say."""

    recovery_action: int | None = None
    remapping_failed: int | None = None
    remapping_pending: int | None = None
    retirement_pending: int | None = None
    uncorrected_errors: int | None = None


def judge_gpu(name: str, gpu: Gpu) -> Finding:
    """How the GPU is. Pure."""
    if gpu.recovery_action:
        return "unhealthy", f"{name} needs {_RECOVERY.get(gpu.recovery_action, f'action {gpu.recovery_action}')}"
    if gpu.remapping_failed:
        return "unhealthy", f"{name} could not remap a row of its memory"
    counted = []
    if gpu.remapping_pending or gpu.retirement_pending:
        counted.append(f"{name} has a bad row or page that is in use until its next reset")
    if gpu.uncorrected_errors:
        counted.append(f"{name} counts {gpu.uncorrected_errors} uncorrected memory errors since its last reset")
    if counted:
        return ("unhealthy" if gpu.recovery_action is None else "ok"), "; ".join(counted)
    if all(getattr(gpu, field.name) is None for field in fields(gpu)):
        return "unknown", f"{name}: the driver says nothing of its state"
    return "ok", ""


def look(task: Task) -> Answer:
    """One finding per GPU that the ranks may use."""
    from ft_launcher.health import nvml

    return nvml.each_gpu(lambda name, handle: [judge_gpu(name, _read(handle))], task.say), {}


def _read(handle: Any) -> Gpu:
    from ft_launcher.health.nvml import ask

    (action,) = ask("nvmlDeviceGetFieldValues", handle, [_ACTION_FIELD]) or (None,)
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows", handle) or (None, None, None, None)
    return Gpu(
        recovery_action=action.value.uiVal if action is not None and not action.nvmlReturn else None,
        remapping_failed=failed,
        remapping_pending=pending,
        retirement_pending=ask("nvmlDeviceGetRetiredPagesPendingStatus", handle),
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_RESET),
    )
