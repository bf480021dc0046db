"""What must hold after every fault, I1 to I6, read off what a job left behind.

    I1  no process of the job, no socket, no port, nothing in its TMPDIR is left
    I2  the launcher ended by itself within its limit, with the code it should
    I3  the training came to what it comes to without faults: every sample of every epoch once, the same values
    I4  a rank that was well was not killed, nor condemned
    I5  the journal tells each fault once: rank, kind, limit, decision
    I6  from what the journals hold, everything is decided again as it was

Starts and ends nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_launcher.tools.commands.replay import as_lines, decide_again
from ft_launcher.tools.replay.replay import DECISION, FAULT, Replay
from tests.faults.children import Child
from tests.faults.job import Job
from tests.faults.training import EPOCHS, PER_EPOCH, fault_free
from tests.patience import patient

RESTART, GIVE_UP = "restart", "give up"
_GONE_S = patient(10.0)
_TORCHS = "/torchinductor_"  # a cache that torch makes in a rank and means to keep
_REMOTE_MODULE = "_remote_module_non_scriptable."
"""How a file begins, alone with its bytecode in a temporary folder that torch 2.6 makes at the first DDP: a killed rank
leaves them, under torchrun, too."""


@dataclass(frozen=True)
class Told:
    """A fault as the journal should tell it. `limit`: the one that was passed, for a hang."""

    kind: str
    ranks: Collection[int]
    limit: str = ""
    action: str = RESTART


def holds(job: Job, code: int, story: Collection[Told] = (), limit_s: float = 60.0) -> None:
    """Waits for the job's end and checks I1, I2, I4, I5 and I6, and I3 where it should end well."""
    found = job.finish(limit_s)
    assert found == code, f"I2: ended with {found}, not {code}\n{job.tail()}"
    nothing_left(job)
    if code == 0:
        result_is_fault_free(job, job.nproc)
    healthy_ranks_live(job, story)
    journal_tells(job, code, story)
    again = decided_again(job.journal_folder)
    assert again.same[FAULT] == again.same[DECISION] == len(story), f"I6: {again.left_out}\n{job.tail()}"


def nothing_left(job: Job, limits: Collection[str] = ()) -> None:
    """I1. `limits` names kinds of children that may be left, as documented.

    The kernel may need a moment for what was killed, so that there is a deadline; processes that end by themselves
    would not count as left over, and none here does.
    """
    deadline = time.monotonic() + _GONE_S
    while (left := _left_over(job, limits)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"I1: left over: {left}\n{job.tail()}"
    earlier = [file.name for file in (job.folder / "ranks").glob("[!.]*") if '"left": []' not in file.read_text()]
    assert not earlier, f"I1: cycles began beside children of earlier ones: {earlier}\n{job.tail()}"


def result_is_fault_free(job: Job, world: int) -> None:
    """I3."""
    states = [job.state(rank) for rank in range(world)]
    expected = [fault_free(rank, world) for rank in range(world)]
    assert states == expected, f"I3: {states} is not {expected}\n{job.tail()}"
    seen = sorted(sample for state in expected for sample in state.seen)
    assert seen == [(epoch, sample) for epoch in range(EPOCHS) for sample in range(PER_EPOCH * world)]


def healthy_ranks_live(job: Job, story: Collection[Told]) -> None:
    """I4: no verdict against a rank, and no SIGKILL for one, that did nothing wrong."""
    guilty = {rank for told in story for rank in told.ranks}
    condemned = {verdict["rank"] for verdict in job.journal("verdict") if verdict["condemned"]}
    assert condemned <= guilty, f"I4: healthy ranks were condemned: {condemned - guilty}\n{job.tail()}"
    started = {rank["pid"]: rank["rank"] for line in job.journal("cycle_start") for rank in line["ranks"]}
    killed = {started[pid] for line in job.journal("killed") for pid in line["pids"] if pid in started}
    stubborn = set(job.plan.stubborn_ranks)
    assert killed <= guilty | stubborn, f"I4: healthy ranks were killed: {killed - guilty}\n{job.tail()}"


def journal_tells(job: Job, code: int, story: Collection[Told]) -> None:
    """I5."""
    faults, verdicts = job.journal("fault"), job.journal("verdict")
    cycles = {fault["cycle"] for fault in faults}
    decisions = [decision for decision in job.journal("decision") if decision["cycle"] in cycles]
    told = [(fault["kind"], fault["limit"], decision["action"]) for fault, decision in _pairs(faults, decisions)]
    expected = [(one.kind, one.limit, one.action) for one in story]
    assert told == expected, f"I5: told {told}, happened {expected}\n{job.tail()}"
    for one, fault, decision in zip(story, faults, decisions, strict=True):
        assert fault["rank"] in one.ranks, f"I5: rank {fault['rank']} is blamed, not {one.ranks}\n{job.tail()}"
        assert fault["cycle"] == decision["cycle"] and decision["reason"]
    hangs = [one for one in story if one.limit]
    condemned = [(verdict["limit"], verdict["cycle"]) for verdict in verdicts if verdict["condemned"]]
    assert len(condemned) == len(set(condemned)) == len(hangs), f"I5: verdicts {condemned}\n{job.tail()}"
    assert job.journal("left_over") == [], job.tail()
    (first, *_), (*_, last) = job.journal(), job.journal()
    assert (first["event"], last["event"]) == ("job_start", "job_end"), job.tail()
    assert last["exit_code"] == code and last["reason"], job.tail()


def decided_again(*journals: Path) -> Replay:
    """I6. Returns what was decided again."""
    found, findings = decide_again(journals)
    assert not found.differences, "I6: " + "\n".join(as_lines(found, findings))
    return found


def _pairs(
    faults: list[dict[str, Any]], decisions: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    assert len(faults) == len(decisions), f"I5: {len(faults)} faults, {len(decisions)} decisions"
    return list(zip(faults, decisions, strict=True))


def _left_over(job: Job, limits: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "processes": job.processes(),
        "children": [child for child in job.children() if child.alive and child.kind not in limits],
        "files": _entries(job.tmp),
        "sockets": job.unix_sockets(),
        "ports": job.listening(_ports(job)),
    }
    allowed = {child.pid for child in job.children() if child.kind in limits}
    found["processes"] = {pid: command for pid, command in found["processes"].items() if pid not in allowed}
    return {what: left for what, left in found.items() if left}


def _entries(folder: Path) -> list[str]:
    """All that is in a folder; what is removed meanwhile does not matter, so that `rglob` would not do."""
    entries = [f"{top}/{name}" for top, *kinds in os.walk(folder) for names in kinds for name in names]
    of_killed = {
        entry.partition(_REMOTE_MODULE)[0].removesuffix("__pycache__/") for entry in entries if _REMOTE_MODULE in entry
    }
    return [
        entry
        for entry in entries
        if _TORCHS not in entry and not any(f"{entry}/".startswith(folder) for folder in of_killed)
    ]


def _ports(job: Job) -> set[int]:
    """Of every store the job served."""
    served = {int(line["master"].rpartition(":")[2]) for line in job.journal("cycle_start")}
    return served | ({job.port} if job.port else set())


def modes(*folders: Path) -> set[int]:
    """The permissions of these folders and of all that the launcher wrote in them: error files are the ranks'."""
    found = [path for folder in folders if folder.exists() for path in (folder, *folder.rglob("*"))]
    return {path.lstat().st_mode & 0o777 for path in found if not path.name.startswith("error.json")}


def gone(children: Collection[Child]) -> bool:
    """Whether none of these processes lives."""
    return not any(child.alive for child in children)
