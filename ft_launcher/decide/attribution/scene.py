"""Where the ranks of a node are while some of them hang: stopped, waiting in a collective of torch, or outside of any.

Pure. Reads frames of main threads and states of processes; `first_failure` decides what follows for a fault.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

_WAITS_FOR_PEERS = re.compile(
    r"torch/distributed/(?!(elastic|launcher|checkpoint|run\.py))|torch/nn/parallel/|torch/autograd/graph\.py"
)
"""Files in which a rank calls what waits for its peers; in autograd's backward pass the hooks of DDP and FSDP wait.
`checkpoint` may wait for storage as well; where it calls a collective, the innermost frame is that of the collective.
"""

_STANDARD = re.compile(r"python3[.\dt]*/")
_PASSED_THROUGH = re.compile(r"python3[.\dt]*/|torch/(_ops|_compile|utils/_contextlib|_dynamo/eval_frame)\.py")
"""Called by a collective on its way, so these may lie further in: locks, operators, decorators."""

_WAITS_IN_PYTHON = re.compile(
    r"python3[.\dt]*/((threading|queue|selectors|subprocess)\.py|concurrent/|multiprocessing/|asyncio/)"
)
"""Files of the standard library in which a rank waits for a thread, a queue, a connection or a process."""

_IDLE = re.compile(
    rf"{_WAITS_IN_PYTHON.pattern}|ft_client/(rank/monitoring/|inprocess/restart/store_watcher\.py:\d+ in _await)"
)
"""Files in which a thread waits for something to do; our own that tell the monitor of progress, or wait for the end of
an iteration in process, too."""
_IN_WRAPPER = re.compile(r"ft_client/inprocess/restart/call\.py:\d+ in (\w+)$")
_NEXT = ("_next", "_announce")
"""Where a rank waits for the others in an in-process wrapper, and its caller if it has returned from its function. A
rank that is to take part only later waits there, too, and one between two iterations."""

_OF_A_LOCK = "futex"
"""How the kernel's functions begin in which a thread waits for a lock or a condition of C code (`/proc/PID/wchan`)."""

# The text is one line on the console; further ranks are counted.
_MAX_NAMED = 4


class Activity(Enum):
    """Where a rank is, as far as its stack and its process say."""

    STOPPED = "is stopped (SIGSTOP or a debugger)"
    IN_KERNEL = "waits in the kernel (storage, GPU or NIC)"
    COLLECTIVE = "waits in a collective"
    WRAPPER = "waits in the in-process wrapper for the other ranks"
    """As a spare, or between two iterations."""
    OUTSIDE = "is in no call of torch.distributed"
    BLOCKED = "waits in C code for another thread"
    """Torch's `work.wait()` is such a call and leaves no frame of Python; so is a lock of the program's own."""
    LOCKED = "waits for a lock of its own program"
    """By the text of the line where it is: no other rank can release that."""
    UNKNOWN = "gave no stack"


@dataclass(frozen=True)
class Scene:
    """One rank at the moment of a hang: `frames` of its main thread (innermost first), `process` as /proc has it.

    `in_own_lock`: the line at which it is certainly waits for a lock of its own (`own_lock.py`).
    """

    rank: int
    frames: Sequence[str] = ()
    process: Mapping[str, Any] | None = None
    in_own_lock: bool = False

    @property
    def activity(self) -> Activity:
        """Where it is. That the process is stopped decides before its stack does."""
        state = str((self.process or {}).get("state", ""))
        # States of proc(5): T stopped by a signal, t by a tracer, D uninterruptible sleep.
        if state.startswith(("T", "t")):
            return Activity.STOPPED
        if not self.frames:
            if state.startswith("D"):
                return Activity.IN_KERNEL
            return Activity.UNKNOWN
        if in_collective(self.frames):
            return Activity.COLLECTIVE
        if self._in_wrapper[:1] == _NEXT[:1] and not self.has_returned:
            return Activity.WRAPPER
        waits_in = str((self.process or {}).get("wchan", ""))
        # Where the kernel does not say in what a process sleeps, it may be this.
        in_lock = waits_in.startswith(_OF_A_LOCK) or (state.startswith("S") and not waits_in)
        # A lock that Python code waits for has a frame of the standard library.
        if not in_lock or _STANDARD.match(self.frames[0]):
            return Activity.OUTSIDE
        if self.in_own_lock:
            return Activity.LOCKED
        return Activity.BLOCKED

    @property
    def has_returned(self) -> bool:
        """Whether it has returned from the function of an in-process wrapper, and waits there for the others."""
        return self._in_wrapper == _NEXT

    @property
    def _in_wrapper(self) -> tuple[str, ...]:
        """The two innermost functions, as far as they are of the wrapper's call."""
        found = [_IN_WRAPPER.match(frame) for frame in self.frames[:2]]
        return tuple(match[1] for match in found if match is not None)

    @property
    def waits_in_python(self) -> bool:
        """Whether it waits for a thread, a queue, a connection or a process: what is there may wait for a rank."""
        innermost = next(iter(self.frames), "")
        return self.activity is Activity.OUTSIDE and _WAITS_IN_PYTHON.match(innermost) is not None

    @property
    def waits_for_no_rank(self) -> bool:
        """Whether its main thread runs, is in an uninterruptible sleep, or in a lock of its own."""
        is_busy = str((self.process or {}).get("state", "")).startswith(("R", "D"))
        return is_busy or self.activity is Activity.LOCKED

    @property
    def others_are_idle(self) -> bool:
        """Whether each thread beside the main one is known to wait for something to do, outside of the file in which
        the main thread is: so none of them has taken a lock of that file."""
        threads = (self.process or {}).get("other_threads")
        return isinstance(threads, list) and all(_IDLE.match(str(frame)) for frame in threads)

    @property
    def own_frame(self) -> str:
        """The innermost frame of the program itself, else the innermost of all; empty without frames."""
        own = (frame for frame in self.frames if "/" not in frame and not frame.startswith("<frozen "))
        return next(chain(own, self.frames), "")


def in_collective(frames: Sequence[str]) -> bool:
    """Whether the innermost frame is one of torch's that waits for peers.

    Args:
        frames: of the main thread, the innermost first, library files by their path within the library.
    """
    innermost = next((frame for frame in frames if not _PASSED_THROUGH.match(frame)), "")
    found = _WAITS_FOR_PEERS.match(innermost)
    return found is not None and ("autograd" not in innermost or "_engine_run_backward" in innermost)


def about_stall(scenes: Sequence[Scene], stalled: int, waited_s: float) -> str:
    """Describes stalled ranks in one line: first those that the others wait for, as far as stacks show it.

    Args:
        scenes: of all ranks of the node that run.
        stalled: the rank whose monitor reported it.
        waited_s: for how long its main thread ran no Python.
    """
    by_place = {place: [scene for scene in scenes if scene.activity is place] for place in Activity}
    waiting = by_place[Activity.COLLECTIVE]
    held_up = by_place[Activity.STOPPED] + by_place[Activity.IN_KERNEL] + by_place[Activity.OUTSIDE]
    held_up = held_up or by_place[Activity.BLOCKED]
    since = f"for {waited_s:g} s"
    if waiting and held_up:
        if len(waiting) > 1:
            verb = "wait"
        else:
            verb = "waits"
        return f"{listed(held_up)}, and {numbered([scene.rank for scene in waiting])} {verb} in a collective {since}"
    if waiting and len(waiting) == len(scenes):
        if len(waiting) > 1:
            whole = f"{numbered([scene.rank for scene in waiting])}, all ranks of this node, wait"
        else:
            whole = f"{numbered([scene.rank for scene in waiting])} waits"
        where = waiting[0].own_frame
        return f"{whole} in a collective {since}: {where}; they are out of step, or a rank of another node is missing"
    if not held_up or len(scenes) == 1:
        held_up = [scene for scene in scenes if scene.rank == stalled]
    stands = f"the main thread of rank {stalled} ran no Python {since}"
    if held_up:
        return f"{stands}: {listed(held_up)}"
    return stands


def listed(scenes: Sequence[Scene]) -> str:
    """Describes in one line where these ranks are; at most four are named, the others counted."""
    named = [_described(scene) for scene in scenes[:_MAX_NAMED]]
    more = len(scenes) - len(named)
    if more:
        named.append(f"{more} more ranks")
    return "; ".join(named)


def _described(scene: Scene) -> str:
    text = f"rank {scene.rank} {scene.activity.value}"
    if scene.own_frame:
        return f"{text} at {scene.own_frame}"
    return text


def numbered(ranks: Sequence[int]) -> str:
    """Names ranks in a few words: `rank 3`, or `ranks 0, 1, 2, 3 and 12 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = len(ranks) - _MAX_NAMED
    if more > 0:
        return f"ranks {named} and {more} more"
    return f"ranks {named}"
