"""Checks of the GPUs that the ranks may use: their state, their NVLinks, the memory in use, and foreign processes.

Runs in the process of a check (`decide/health/check.py`), since a call into the driver may hang. The rules
(`finding_...`, `findings_...`) are pure; the functions `check...` read the facts from NVML, the driver's own library.
The package for NVML, nvidia-ml-py, is imported where it is called, so the rules can be tested without it.

Each check reads one GPU after the other, and says before which one (`Task.say`): where the driver hangs, the last line
names the GPU. Only GPUs that the ranks may use count (CUDA_VISIBLE_DEVICES): another job may own the others.

What makes a GPU unhealthy:
- The driver says which recovery the GPU needs (release 570 and later). That decides, where it is reported.
- Without such a report: memory errors, retired pages and remapped rows since the last reset. They do not decide with a
  newer driver, since a contained memory error stays counted on a GPU that is in order again.
- An NVLink was active at an earlier check and is no more, or the GPU has fewer active links than others of its kind. A
  GPU without any active link is not reported: a PCIe card with no bridge looks the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ft_launcher.decide.health.check import Answer, Finding, State, Task

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
# Values of nvmlReturn_t.
_NO_DRIVER = 9  # NVML_ERROR_DRIVER_NOT_LOADED
_LOST = {15: "the driver has lost it", 16: "it needs a reset"}  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
_MIB = 1 << 20  # NVML counts bytes
_MAX_NAMED = 4
"""Processes that a reason names: it is one line on the console."""
_MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS. A GPU with fewer links says so of each number beyond."""


@dataclass(frozen=True)
class Gpu:
    """The state of a GPU as NVML reports it. 0 means no; None: the driver does not report it.

    Attributes:
        recovery_action: the recovery that the GPU needs (`_RECOVERY`).
        remapping_failed: whether a bad row of memory could not be remapped.
        remapping_pending: whether a bad row is in use until the next reset.
        retirement_pending: whether a bad page is in use until the next reset (GPUs before Ampere).
        uncorrected_errors: number of uncorrected memory errors since the last reset.
    """

    recovery_action: int | None = None
    remapping_failed: int | None = None
    remapping_pending: int | None = None
    retirement_pending: int | None = None
    uncorrected_errors: int | None = None


class Links(NamedTuple):
    """The NVLinks of a GPU: the name of its kind, and the numbers of the active links."""

    kind: str
    active: frozenset[int]


def finding_on_gpu(name: str, gpu: Gpu) -> Finding:
    """Returns the finding on one GPU. Pure. `name`: how the reason names the GPU."""
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
        # A driver that reports recovery actions and asks for none decides. The counters are then only information.
        if gpu.recovery_action is None:
            return "unhealthy", "; ".join(counted)
        return "ok", "; ".join(counted)
    if all(getattr(gpu, field.name) is None for field in fields(gpu)):
        return "unknown", f"{name}: the driver says nothing of its state"
    return "ok", ""


def finding_on_processes(name: str, commands: Mapping[int, str]) -> Finding:
    """Returns the finding on the processes that use a GPU while no rank runs. Pure.

    Args:
        name: how the reason names the GPU.
        commands: pid -> command of each process; the command is empty where it cannot be read.
    """
    if not commands:
        return "ok", ""
    named = []
    for pid, command in sorted(commands.items())[:_MAX_NAMED]:
        if command:
            named.append(f"{pid} ({command})")
        else:
            named.append(str(pid))
    if len(commands) > len(named):
        named.append(f"{len(commands) - len(named)} more")
    return "warning", f"{name} is in use by processes that are not of this job: {', '.join(named)}"


def findings_on_links(gpus: Mapping[str, Links], before: Mapping[str, frozenset[int]]) -> list[Finding]:
    """Returns one finding for each GPU that has or had links. Pure.

    Args:
        gpus: name of a GPU -> its links.
        before: name of a GPU -> the links that were active at an earlier check of this job.
    """
    findings: list[Finding] = []
    for name, links in gpus.items():
        most = max(len(other.active) for other in gpus.values() if other.kind == links.kind)
        lost = sorted(before.get(name, frozenset()) - links.active)
        if lost:
            findings.append(("unhealthy", f"{name}: NVLink {', '.join(map(str, lost))} went down"))
        elif 0 < len(links.active) < most:
            findings.append(("unhealthy", f"{name} has {len(links.active)} active NVLinks, others of its kind {most}"))
        elif links.active:
            findings.append(("ok", ""))
    return findings


def check(task: Task) -> Answer:
    """Returns one finding for each GPU that the ranks may use. The check "gpu"."""
    return _each_gpu(lambda name, handle: [finding_on_gpu(name, _read_gpu(handle))], task.say), {}


def check_links(task: Task) -> Answer:
    """Returns the findings on the NVLinks of the GPUs that the ranks may use. The check "nvlink".

    Remembers all links that were ever active in this job.
    """
    gpus: dict[str, Links] = {}

    def read(name: str, handle: Any) -> list[Finding]:
        gpus[name] = _read_links(handle)
        return []

    findings = _each_gpu(read, task.say)
    before = {name: frozenset(links) for name, links in task.memory.items()}
    findings += findings_on_links(gpus, before)
    seen = {name: before.get(name, frozenset()) | links.active for name, links in gpus.items()}
    return findings or [("not present", "no active NVLink")], {name: sorted(links) for name, links in seen.items()}


def check_memory(task: Task) -> Answer:
    """Returns one finding for each GPU that the ranks may use, and the memory in use. The check "gpu_memory".

    The memory of the answer is `used_mib`: name of a GPU -> MiB, which `memory_reclaim.py` reads.
    """
    used_mib = {}

    def read(name: str, handle: Any) -> list[Finding]:
        memory = _ask("nvmlDeviceGetMemoryInfo", handle)
        if memory is None:
            return [("unknown", f"{name}: the driver does not say how much of its memory is in use")]
        used_mib[name] = memory.used / _MIB
        return [("ok", "")]

    return _each_gpu(read, task.say), {"used_mib": used_mib}


def check_processes(task: Task) -> Answer:
    """Returns which foreign processes compute on each GPU that the ranks may use. The check "gpu_processes".

    Made only while no rank runs. `task.work["own"]`: pid of the launcher, which may use a GPU inside a user's program.
    """

    def read(name: str, handle: Any) -> list[Finding]:
        processes = _ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if processes is None:
            return [("unknown", f"{name}: the driver does not say which processes use it")]
        pids = [process.pid for process in processes if process.pid != task.work["own"]]
        return [finding_on_processes(name, {pid: _command_of(pid) for pid in pids})]

    return _each_gpu(read, task.say), {}


def _command_of(pid: int) -> str:
    """Returns the name of a process; empty: it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:  # The process has ended, or is in another pid namespace.
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _read_gpu(handle: Any) -> Gpu:
    """Returns what the driver reports of a GPU. Raises _Lost where the driver has given it up."""
    (action,) = _ask("nvmlDeviceGetFieldValues", handle, [_ACTION_FIELD]) or (None,)
    _, _, pending, failed = _ask("nvmlDeviceGetRemappedRows", handle) or (None, None, None, None)
    return Gpu(
        recovery_action=action.value.uiVal if action is not None and not action.nvmlReturn else None,
        remapping_failed=failed,
        remapping_pending=pending,
        retirement_pending=_ask("nvmlDeviceGetRetiredPagesPendingStatus", handle),
        uncorrected_errors=_ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_RESET),
    )


def _read_links(handle: Any) -> Links:
    """Returns the kind of a GPU and its active NVLinks. Raises _Lost."""
    active = [link for link in range(_MAX_LINKS) if _ask("nvmlDeviceGetNvLinkState", handle, link)]
    return Links(str(_ask("nvmlDeviceGetName", handle)), frozenset(active))


class _Lost(Exception):
    """The driver has given up a GPU; the text says why."""


def _ask(function: str, *args: object) -> Any:
    """Calls an NVML function by its name; returns its answer; None: this driver or this GPU has none.

    Raises:
        _Lost: the driver has given up the GPU.
    """
    import pynvml

    try:
        return getattr(pynvml, function)(*args)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise _Lost(_LOST[error.value]) from None
        return None


def _each_gpu(look: Callable[[str, Any], list[Finding]], say: Callable[[str], None]) -> list[Finding]:
    """Calls `look` with name and NVML handle of each GPU that the ranks may use; returns all findings.

    The ranks may use the GPUs of CUDA_VISIBLE_DEVICES. A GPU that cannot be opened is unhealthy, and a name in that
    variable that no GPU has is reported as unknown.

    Args:
        look: reads one GPU.
        say: reports the GPU that is looked at next: where the driver hangs, the last one is named.
    """
    import pynvml

    from ft_launcher.settings.visible_devices import visible

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        state: State = "not present" if error.value == _NO_DRIVER else "unknown"
        return [(state, f"NVML does not start: {error}")]
    findings: list[Finding] = []
    handles, uuids = [], []
    for index in range(_ask("nvmlDeviceGetCount") or 0):
        say(f"opening GPU {index}")
        handle = uuid = None
        try:
            handle = _ask("nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                uuid = _ask("nvmlDeviceGetUUID", handle)
        except _Lost as lost:
            handle = None
            findings.append(("unhealthy", f"GPU {index}: {lost}"))
        handles.append(handle)
        uuids.append(uuid)
    indices, unnamed = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    for index in indices:
        say(f"GPU {index}")
        if handles[index] is not None:
            try:
                findings += look(f"GPU {index}", handles[index])
            except _Lost as lost:
                findings.append(("unhealthy", f"GPU {index}: {lost}"))
    if unnamed:
        findings.append(("unknown", f"CUDA_VISIBLE_DEVICES says {unnamed}, which names no GPU that NVML lists"))
    return findings
