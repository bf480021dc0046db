"""Checks of InfiniBand and RoCE ports: a link that was active and is not, or that drops again and again.

Runs in the process of a check (`decide/health/check.py`): a driver that hangs makes its files in /sys hang too. The
rules (`findings_...`) are pure; `check` reads the files.

A port that was never active in this job may be one without a cable. Such a port counts only where `pci_topo_file` says
that it serves a GPU of the ranks.

Each check runs in a new process. What it has to remember, the ports that were ever active and the last counters of
drops, is in its answer, and comes back to the next check as `Task.memory`. The checks before cycles and those that are
repeated while ranks run remember apart from each other.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ft_launcher.decide.health.check import Answer, Finding, State, Task

# The files of one NIC, unless the user gives templates (`link_state_path_template`, `link_down_path_template`). `root`
# is filled in at once, `nic` for each NIC.
_STATE = "{root}/{{nic}}/ports/*/state"
_DOWNED = "{root}/{{nic}}/ports/*/counters/link_downed"
_UP = frozenset({"ACTIVE", "UP"})
"""States in which a port is up. InfiniBand's file `state` has "4: ACTIVE"; `operstate` of a network interface, which a
user's template may name, has "up"."""
_DROPS = 2
"""Checks in a row at which the counter of drops has risen, that make a port unhealthy. A single drop is only reported:
the link is back."""


def findings_on_states(
    states: Mapping[str, str | None], known: Collection[str], needed: Mapping[str, str]
) -> list[Finding]:
    """Returns one finding for each port that is up, or that should be. Pure.

    Args:
        states: path of each state file -> its state; None: the file cannot be read.
        known: paths of the ports that were active at an earlier check of this job.
        needed: path -> why this port must be active.
    """
    findings: list[Finding] = []
    for path in sorted({*known, *needed, *states}):
        state = states.get(path, "gone")
        if state is None:
            findings.append(("unknown", f"{path} cannot be read"))
        elif state.upper() in _UP:
            findings.append(("ok", ""))
        elif path in known or path in needed:
            if path in known:
                reason = "was active before"
            else:
                reason = needed[path]
            findings.append(("unhealthy", f"{path} is {state}; it {reason}"))
    return findings


def findings_on_drops(
    counts: Mapping[str, int], before: Mapping[str, list[int]]
) -> tuple[list[Finding], dict[str, list[int]]]:
    """Returns one finding for each counter of drops that rose since the last check. Pure.

    A link that dropped and is back is reported; one that drops between each two checks is unhealthy.

    Args:
        counts: path of each counter -> its value.
        before: what this function returned to be remembered at the last check.

    Returns:
        The findings, and what to remember: path -> its value, and at how many checks in a row it has risen.
    """
    findings: list[Finding] = []
    after = {}
    for path, count in counts.items():
        last, in_a_row = before.get(path, [count, 0])
        if count > last:
            in_a_row = in_a_row + 1
        else:
            in_a_row = 0
        after[path] = [count, in_a_row]
        if in_a_row:
            reason = f"{path} rose from {last} to {count}"
            if in_a_row > 1:
                reason = f"{reason}, {in_a_row} checks in a row"
            state: State = "ok"
            if in_a_row >= _DROPS:
                state = "unhealthy"
            findings.append((state, reason))
    return findings, after


def check(task: Task) -> Answer:
    """Returns the findings on all ports below `task.work["infiniband"]`. The check "nic".

    Remembers the ports that were ever active, and the counters of drops.
    """
    work, memory = task.work, task.memory
    root = work["infiniband"]
    nics = sorted(os.listdir(root))  # noqa: PTH208
    state_of = {nic: _paths(work["state"] or _STATE.format(root=root), nic) for nic in nics}
    downed = [path for nic in nics for path in _paths(work["downed"] or _DOWNED.format(root=root), nic)]
    needed: dict[str, str] = {}
    findings: list[Finding] = []
    if work["topology"]:
        try:
            for gpu, nic in _mapped(work, nics).items():
                needed.update(dict.fromkeys(state_of[nic], f"serves GPU {gpu}"))
        except (OSError, ValueError) as error:
            findings.append(("unknown", f"pci_topo_file {work['topology']}: {error}"))
    states: dict[str, str | None] = {}
    for path in (path for paths in state_of.values() for path in paths):
        task.say(path)
        text = _read(path)
        states[path] = None
        if text is not None:
            states[path] = text.rpartition(":")[2].strip()
    known = memory.get("active", [])
    findings += findings_on_states(states, known, needed)
    texts = {path: _read(path) or "" for path in downed}
    counts = {path: int(text) for path, text in texts.items() if text.isdigit()}
    drops, remembered = findings_on_drops(counts, memory.get("downed", {}))
    active = {path for path, state in states.items() if state is not None and state.upper() in _UP}
    return findings + drops, {"active": sorted(active.union(known)), "downed": remembered}


def _paths(template: str, nic: str) -> list[str]:
    """Returns the files of a NIC that a template names. It may name the NIC as `{nic}` or `{dev_name}`."""
    return sorted(glob.glob(template.replace("{nic}", nic).replace("{dev_name}", nic)))  # noqa: PTH207


def _read(path: str) -> str | None:
    """Returns the text of a file without white space around it; None: the file cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _mapped(work: dict[str, Any], nics: list[str]) -> dict[str, str]:
    """Returns the NIC of each GPU that the ranks may use, according to the topology file: bus id of the GPU -> NIC.

    Raises:
        OSError, ValueError: the topology file, or the driver's list of GPUs, cannot be read.
    """
    from ft_launcher.settings.visible_devices import nics_of, visible
    from rank_monitor.contract.wire.foreign import MAX_USER_FILE_BYTES, read_file

    gpus = sorted(os.listdir(work["gpus"]))  # noqa: PTH208
    uuids = [_uuid(Path(work["gpus"]) / gpu / "information") for gpu in gpus]
    used = [gpus[index] for index in visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)[0]]
    at = {nic: Path(work["infiniband"], nic, "device").resolve().name for nic in nics}
    return nics_of(read_file(work["topology"], MAX_USER_FILE_BYTES, follow_link=True).decode(), used, at)


def _uuid(information: Path) -> str | None:
    """Returns the UUID in a GPU's file of /proc/driver/nvidia; None: there is none."""
    lines = (_read(str(information)) or "").splitlines()
    return next((line.split()[-1] for line in lines if line.startswith("GPU UUID:")), None)
