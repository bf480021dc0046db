"""NVML, the NVIDIA driver's own library, through the package nvidia-ml-py: which GPUs there are for the ranks.

The only file that imports it. What the driver does not report is None; a GPU that it calls lost raises
`Lost`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pynvml

from ft_launcher.health.check import Finding, State
from ft_launcher.health.visible_devices import visible

_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST: "the driver has lost it", pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset"}


class Lost(Exception):
    """A GPU that the driver has given up."""


def ask(function: str, *args: object) -> Any:
    """The answer of an NVML function; None when there is none.

    Raises:
        Lost: the GPU is gone.
    """
    try:
        return getattr(pynvml, function)(*args)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise Lost(_LOST[error.value]) from None
        return None


def each_gpu(look: Callable[[str, Any], list[Finding]], say: Callable[[str], None]) -> list[Finding]:
    """The findings of `look`, called with name and NVML handle of each GPU that the ranks may use."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        state: State = "not present" if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED else "unknown"
        return [(state, f"NVML does not start: {error}")]
    findings: list[Finding] = []
    handles = []
    for index in range(ask("nvmlDeviceGetCount") or 0):
        say(f"opening GPU {index}")
        try:
            handles.append(ask("nvmlDeviceGetHandleByIndex", index))
        except Lost as lost:
            handles.append(None)
            findings.append(("unhealthy", f"GPU {index}: {lost}"))
    uuids = [None if handle is None else ask("nvmlDeviceGetUUID", handle) for handle in handles]
    indices, unnamed = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    for index in indices:
        say(f"GPU {index}")
        if handles[index] is not None:
            try:
                findings += look(f"GPU {index}", handles[index])
            except Lost as lost:
                findings.append(("unhealthy", f"GPU {index}: {lost}"))
    if unnamed:
        findings.append(("unknown", f"CUDA_VISIBLE_DEVICES says {unnamed}, which names no GPU that NVML lists"))
    return findings
