"""NVLink: a link that was active and is no more, and a GPU with fewer active links than others of the same kind.

A GPU without any active link says nothing: a PCIe card with no bridge looks the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ft_launcher.health.finding import Answer, Finding, Task

_MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS; a GPU with fewer says so of each


class Links(NamedTuple):
    """The links of a GPU: its kind, and those that are active."""

    kind: str
    active: frozenset[int]


def judge_links(gpus: Mapping[str, Links], before: Mapping[str, frozenset[int]]) -> list[Finding]:
    """One finding per GPU that has links. Pure.

    Args:
        gpus: name -> its links.
        before: name -> the links that were active at an earlier check of this job.
    """
    findings: list[Finding] = []
    for name, links in gpus.items():
        most = max(len(other.active) for other in gpus.values() if other.kind == links.kind)
        if lost := sorted(before.get(name, frozenset()) - links.active):
            findings.append(("unhealthy", f"{name}: NVLink {', '.join(map(str, lost))} went down"))
        elif 0 < len(links.active) < most:
            findings.append(("unhealthy", f"{name} has {len(links.active)} active NVLinks, others of its kind {most}"))
        elif links.active:
            findings.append(("ok", ""))
    return findings


def look(task: Task) -> Answer:
    """The findings on the links of the GPUs that the ranks may use."""
    from ft_launcher.health import nvml

    gpus: dict[str, Links] = {}

    def read(name: str, handle: Any) -> list[Finding]:
        gpus[name] = _read(handle)
        return []

    findings = nvml.each_gpu(read, task.say)
    before = {name: frozenset(links) for name, links in task.memory.items()}
    findings += judge_links(gpus, before)
    seen = {name: before.get(name, frozenset()) | links.active for name, links in gpus.items()}
    return findings or [("not present", "no active NVLink")], {name: sorted(links) for name, links in seen.items()}


def _read(handle: Any) -> Links:
    from ft_launcher.health.nvml import ask

    active = [link for link in range(_MAX_LINKS) if ask("nvmlDeviceGetNvLinkState", handle, link)]
    return Links(str(ask("nvmlDeviceGetName", handle)), frozenset(active))
