"""The memory in use on each GPU, as the driver reports it, and whether a cycle may start yet.

A driver releases memory some time after the process that had it has ended, and later if that was killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ft_launcher.health.check import Answer, Finding, Task

if TYPE_CHECKING:
    from rank_monitor.contract.settings.config import StopSettings

Used: TypeAlias = Mapping[str, float]
"""MiB in use, by the name of the GPU."""

_MIB = 1 << 20
# The pause grows with the time waited, up to the configured interval: a quick release delays the cycle little.
_FIRST_PAUSE_S = 0.1


@dataclass(frozen=True)
class Step:
    """What follows from a reading: another one after so many seconds; None: the cycle starts, `reason` says with what
    still in use."""

    pause_s: float | None
    reason: str = ""


def next_step(before: Used, now: Used, settings: StopSettings, waited_s: float) -> Step:
    """What follows from a reading. Pure.

    Args:
        before: what was in use before the first cycle; a GPU that is not in it is not waited for.
        waited_s: since the first reading was asked for.
    """
    tolerance = settings.gpu_memory_tolerance_mb
    more = {gpu: mib - before[gpu] for gpu, mib in now.items() if gpu in before and mib > before[gpu] + tolerance}
    if not more:
        return Step(None)
    left_s = settings.gpu_memory_reclaim_timeout - waited_s
    if left_s > 0:
        return Step(min(left_s, max(_FIRST_PAUSE_S, min(waited_s, settings.gpu_memory_poll_interval))))
    in_use = ", ".join(f"{gpu} {mib:.0f} MiB" for gpu, mib in more.items())
    return Step(None, f"{waited_s:.0f} s after the ranks ended, more is in use than before the first cycle: {in_use}")


def look(task: Task) -> Answer:
    """Returns one finding per GPU that the ranks may use, and the memory in use as `used_mib` of the answer."""
    from ft_launcher.health import nvml

    used_mib = {}

    def read(name: str, handle: Any) -> list[Finding]:
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
        if memory is None:
            return [("unknown", f"{name}: the driver does not say how much of its memory is in use")]
        used_mib[name] = memory.used / _MIB
        return [("ok", "")]

    return nvml.each_gpu(read, task.say), {"used_mib": used_mib}
