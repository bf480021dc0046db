"""What is said about copies of states in memory on other nodes (`--ft-memory-buddies`). Pure.

Each node has a process for its copies (`rank_monitor/memory_copies.py`). Here are the records that three pairs of
processes exchange, all as JSON:

- Launcher and launcher, through the coordinator: `CopyOffer` with each arrival, `CopyPlan` with each place.
- A launcher and its process: `CopySettings` at its start, then `CopyOrder` and `CopyNews`, a line each.
- Two processes: `CopyRequest`, `CopyAnswer`, `FileHead` and `FileEnd`, each in a frame (`wire/proven_link.py`).

**Names.** A node keeps what it has for another one in a folder `copies_name(...)` within its own folder, in files that
are named as that node's own (`memory_files.py`). So a copy that is fetched back needs no other name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rank_monitor.contract.memory_files import StateFile, complete_generations, ranks_in_name, state_file

_COPIES = re.compile(r"copies_world-\d{1,9}_ranks-[0-9a-f]{8}", re.ASCII)
MAX_RANKS = 1024
"""Of a node. More would not fit into a record of a connection."""


@dataclass(frozen=True)
class HeldState:
    """The files of one step of all ranks of a node, and whether they lie where these ranks load them.

    Attributes:
        step, world, series: as in `memory_files.StateFile`.
        ranks: of the node that wrote them, ascending.
        is_own: they are in the node's own folder; False: they are a copy for another node.
    """

    step: int
    world: int
    series: str
    ranks: list[int]
    is_own: bool

    def files(self) -> list[str]:
        """Returns the names of the files, by rank."""
        count = len(self.ranks)
        return [StateFile(self.step, rank, self.world, count, self.series).name for rank in self.ranks]


@dataclass(frozen=True)
class CopyOffer:
    """What a node says of copies when it asks for a place.

    Attributes:
        port: at which its process for copies listens, at the node's address.
        buddies: `--ft-memory-buddies`: on how many other nodes it wants its states.
        states: that it has.
    """

    port: int
    buddies: int
    states: list[HeldState] = field(default_factory=list)


@dataclass(frozen=True)
class CopyPeer:
    """Where the process for copies of another node is. `name`: the host name, for texts."""

    name: str
    address: str
    port: int


@dataclass(frozen=True)
class CopyFetch:
    """A state that a node lacks and others have. `peers`: who has it, in the order in which they are asked; empty: the
    node has it itself, as a copy for the ranks that are its own now."""

    step: int
    world: int
    series: str
    ranks: list[int]
    peers: list[CopyPeer] = field(default_factory=list)


@dataclass(frozen=True)
class CopyPlan:
    """What the coordinator decides for one node of a cycle.

    Attributes:
        world: how many ranks the job has in this cycle.
        targets: the nodes to which it sends its states.
        receives: the ranks of each node that sends its states here.
        fetch: what it fetches before its ranks start; None: nothing.
    """

    world: int = 0
    targets: list[CopyPeer] = field(default_factory=list)
    receives: list[list[int]] = field(default_factory=list)
    fetch: CopyFetch | None = None


@dataclass(frozen=True)
class CopySettings:
    """What a process for copies is started with.

    Attributes:
        folder: of this node's state in memory.
        limit: bytes that all files in it may have (`--ft-memory-limit`).
        keep: how many steps are kept for each node (`--ft-memory-keep`).
        bandwidth: bytes a second with which it sends, to all nodes together (`--ft-memory-bandwidth`).
        job: the name of the job, the same on all nodes.
        secret_file: `--ft-job-secret-file`; empty: there is none.
    """

    folder: str
    limit: int
    keep: int
    bandwidth: int
    job: str
    secret_file: str = ""


@dataclass(frozen=True)
class CopyOrder:
    """What a launcher tells its process.

    Attributes:
        plan: a cycle begins, with this; None: nothing of it changes.
        is_over: the cycle is over, and this node may have no part in the next one: nothing is sent until the next plan.
        set_aside_from: states of this step and later ones are bad (`memory_files.py`), so copies of them are removed;
            0: none is.
    """

    plan: CopyPlan | None = None
    is_over: bool = False
    set_aside_from: int = 0


LISTENS, MOVED, FETCHED, COPIED, NOT_COPIED = "listens", "moved", "fetched", "copied", "not copied"


@dataclass(frozen=True)
class CopyNews:
    """What a process for copies tells its launcher.

    Attributes:
        kind: LISTENS: it is ready, at `port`. MOVED: a fetch goes on; `size` bytes are here. FETCHED: the fetch has
            ended. COPIED: a state is on another node. NOT_COPIED: it is not.
        step: of the state; None: nothing was fetched.
        size: its bytes.
        took_s: how long it took (seconds).
        peer: the host name of the other node; empty: the copy was on this node.
        reason: why it was not fetched or copied; empty: it was.
    """

    kind: str
    port: int = 0
    step: int | None = None
    size: int = 0
    took_s: float = 0.0
    peer: str = ""
    reason: str = ""


PUT, GET = "put", "get"


@dataclass(frozen=True)
class CopyRequest:
    """The first record on a connection. PUT: the files follow, once the answer allows it. GET: the answer is followed
    by the files. `sizes`: of the files, by rank; empty with GET."""

    work: str
    step: int
    world: int
    series: str
    ranks: list[int]
    sizes: list[int] = field(default_factory=list)

    def state(self) -> HeldState | None:
        """Returns what is asked about; None: there can be no such files."""
        if not self.ranks or len(self.ranks) > MAX_RANKS or self.ranks != sorted(set(self.ranks)):
            return None
        state = HeldState(self.step, self.world, self.series, self.ranks, is_own=False)
        if self.ranks[-1] >= self.world or any(state_file(name) is None for name in state.files()):
            return None
        return state


@dataclass(frozen=True)
class CopyAnswer:
    """`reason`: why not; empty: it is done, or goes on. `sizes`: of the files that follow, by rank."""

    reason: str = ""
    sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class FileHead:
    """Goes before the bytes of a file."""

    name: str


@dataclass(frozen=True)
class FileEnd:
    """Goes after the bytes of a file. `sha256`: of these bytes. `is_whole`: the file was not written again meanwhile,
    as its ranks do with the oldest one."""

    sha256: str
    is_whole: bool


def copies_name(world: int, ranks: Sequence[int]) -> str:
    """Returns the name of the folder with copies of the states of a node's ranks."""
    return copies_prefix(world) + ranks_in_name(ranks)


def copies_prefix(world: int) -> str:
    """Returns what the names of the folders with copies of a job with so many ranks begin with."""
    return f"copies_world-{world}_ranks-"


def is_copies_name(name: str) -> bool:
    """Returns whether a name in a node's folder is that of a folder with copies."""
    return _COPIES.fullmatch(name) is not None


def held_states(own: Iterable[str], copies: Mapping[str, Iterable[str]]) -> list[HeldState]:
    """Returns the complete states of a node that are not set aside.

    Args:
        own: the listing of its folder, with the marks in it.
        copies: name of each folder with copies -> its listing.
    """
    own = list(own)
    marks = [name for name in own if state_file(name) is None]
    found = [
        HeldState(each.step, each.world, each.series, list(each.ranks), True) for each in complete_generations(own)
    ]
    for names in copies.values():
        found += [
            HeldState(each.step, each.world, each.series, list(each.ranks), False)
            for each in complete_generations([*marks, *names])
        ]
    return found
