"""What the launcher tells this rank about the node's folder, and which node that is."""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from ft_client.rank.agreement import group
from rank_monitor.contract import env, memory_files
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.memory_files import MemoryFiles
from rank_monitor.contract.processes import proc
from rank_monitor.contract.wire.json_record import read_record


def read_settings() -> MemoryFiles | None:
    """Returns what the launcher says; None: it says nothing, or there is no launcher.

    Where the launcher could make no folder, its name is empty. The ranks of other nodes may have one, and wait for this
    rank in their exchanges, so this rank takes part in them. One line says why there is no folder, once; none where the
    user wants none.
    """
    text = os.environ.get(env.MEMORY_FILES)
    if text is None:
        return None
    try:
        found = read_record(MemoryFiles, text)
    except ProtocolError as problem:
        found = MemoryFiles("", keep=1, limit=0, refused=str(problem))
    if not found.folder and found.refused:
        _say_on_local_rank_0(f"no state is kept in memory: {found.refused}")
    return found


def read_settings_in_group(caller: str) -> MemoryFiles | None:
    """As `read_settings`, for what exchanges something with the other ranks of the job. None also where there is
    neither a folder nor a process group.

    Args:
        caller: for the text of the error.

    Raises:
        RuntimeError: the job has several ranks and no process group yet. Each rank would think that it is alone, and
            remove what others of its node write.
    """
    settings = read_settings()
    if settings is None or group.is_there() or _job_ranks() == 1:
        return settings
    if not settings.folder:
        return None
    raise RuntimeError(f"{caller} must be called after torch.distributed.init_process_group")


def why_not(settings: MemoryFiles, size: int | None = None) -> str:
    """Returns why this rank can keep no state; empty: it can, as far as its launcher and its process group go.

    The files are named by the ranks of the default process group. Where that is not the whole job, as where actors and
    learners have a group each, its ranks would take the files of another group's ranks with the same numbers.

    `size`: how many ranks take part; None: those of the default process group.
    """
    if not settings.folder:
        return settings.refused or "its launcher has --ft-memory-interval none"
    world = _job_ranks()
    if size is None:
        size = group.size()
    if size != world:
        return f"the default process group has {size} of the job's {world} ranks, and others use the same files"
    return ""


def _job_ranks() -> int:
    """Returns how many ranks the job has, or takes part in the present round of a restart in process."""
    return int(os.environ.get("WORLD_SIZE", group.size()))


_claims: dict[str, int] = {}
"""Path of a lock that this process holds -> its descriptor, which stays open: the kernel releases the lock with it."""


def claim(folder: str) -> str:
    """Returns why this process may not use the files of its rank; empty: it may.

    A program that a rank starts inherits the rank's environment: `torchrun` in a rank, or the same script once more. It
    would take the names of the job's files. So each process that the launcher has started holds a lock, named after its
    monitor's socket: no restart in process changes that, and no two ranks of the node have the same. It is a lock of
    fcntl(2), which a fork does not inherit: a worker of a DataLoader may outlive a rank that was killed.
    """
    monitor = Path(os.environ.get(env.RANK_MONITOR_SOCKET, "")).name
    path = str(Path(folder) / memory_files.process_lock_name(monitor))
    if not folder or path in _claims:
        return ""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return ""  # the folder is gone, which each use of it finds out
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return "the launcher has started another process for this rank, which uses its files"
    _claims[path] = descriptor
    return ""


def node_of(folder: str, rank: int) -> str:
    """Returns what tells the node of a folder from others: the same for all ranks that see the same folder.

    The boot of the machine is a part of it, and not its name: copies of a virtual machine may have one name, and the
    numbers of a tmpfs are small. A rank that cannot see its folder is a node of its own.
    """
    machine = proc.boot_id().decode(errors="replace").strip() or socket.gethostname()
    try:
        status = os.stat(folder)
    except OSError:
        return f"{machine} {socket.gethostname()} rank {rank}"
    return f"{machine} {status.st_dev} {status.st_ino}"


def ranks_of_node(nodes: list[str], rank: int) -> list[int]:
    """Returns the ranks that are on the node of a rank, ascending. `nodes`: by rank."""
    return [other for other, node in enumerate(nodes) if node == nodes[rank]]


def names_in(folder: str) -> list[str]:
    """Returns the listing of the folder; an empty one where there is none, or it cannot be read. The other ranks of an
    exchange wait for this one, so it must not fail."""
    if not folder:
        return []
    try:
        return [path.name for path in Path(folder).iterdir()]
    except OSError:
        return []


@functools.cache
def _say_on_local_rank_0(text: str) -> None:
    """Prints a line that is the same on all ranks of a node, on the first of them, once."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(text)


def say_on_rank_0(text: str) -> None:
    """Prints a line that is the same on all ranks of the job, on the first of them."""
    if group.rank() == 0:
        say(text)


def say(text: str) -> None:
    """Prints a line to stderr, which the launcher shows with the rank's number. Where stderr is on a full disk, is a
    broken pipe or is closed, the line is lost, and the training goes on."""
    with suppress(OSError, ValueError):
        print(f"ft_client: {text}", file=sys.stderr, flush=True)
