"""Where a rank is during a hang, by the stack of its main thread and its state in /proc. Pure.

The monitor of a rank takes the stack and the state (`rank_monitor/rank_process.py`); `Scene` reads both as an
`Activity`: stopped, in a collective of torch, in the wrapper, in C code, or in its own program. One rank alone is read
here. `collective.py` compares the ranks and names a culprit; `about_stall` puts a stall into one line for a warning.

A frame is text, `train.py:42 in step` for the user's program, and `torch/...` or `python3.12/...` for libraries.
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
    r"|ft_client/rank/agreement/roll_call\.py"
)
"""Files of torch whose calls wait for peers, and one of ours that waits until all ranks have made a call.
`autograd/graph.py` is one of them because the hooks of DDP and FSDP run, and wait, in the backward pass. `checkpoint`
is none: it may wait for storage, and where it calls a collective, the innermost frame is the collective's own."""

_STANDARD = re.compile(r"python3[.\dt]*/")
_PASSED_THROUGH = re.compile(r"python3[.\dt]*/|torch/(_ops|_compile|utils/_contextlib|_dynamo/eval_frame)\.py")
"""Files that a collective itself calls: locks, operators, decorators. Their frames are skipped in the search for the
innermost frame that says something."""

_WAITS_IN_PYTHON = re.compile(
    r"python3[.\dt]*/((threading|queue|selectors|subprocess)\.py|concurrent/|multiprocessing/|asyncio/)"
)
"""Files of the standard library in which a rank waits for a thread, a queue, a connection or a process of its own."""

_IDLE = re.compile(
    rf"{_WAITS_IN_PYTHON.pattern}|ft_client/(rank/monitoring/|inprocess/restart/store_watcher\.py:\d+ in _await)"
)
"""Files in which a thread waits for work: the standard library's, and those of our own threads that report to the
monitor or wait for the end of a round."""
_IN_ROLL_CALL = re.compile(r"ft_client/rank/agreement/roll_call\.py")
_IN_WRAPPER = re.compile(r"ft_client/inprocess/restart/call\.py:\d+ in (\w+)$")
_NEXT = ("_next", "_announce")
"""The two functions of `call.py` in which a wrapped rank waits for the others, innermost first. `_next` alone is a
spare, or a rank between two rounds. With `_announce` as its caller the rank has returned from the wrapped function."""

_OF_A_LOCK = "futex"
"""The begin of the names of kernel functions in which a thread sleeps for a lock or a condition variable of C code, in
`/proc/PID/wchan`."""

# Ranks that a text names. The text is one line on the console, so further ranks are only counted.
_MAX_NAMED = 4


class Activity(Enum):
    """Where a rank is, as far as its stack and its process show. The value is the text for users, after `it` or the
    rank; the name in lower case is the value of `place` in the journal."""

    STOPPED = "is stopped (SIGSTOP or a debugger)"
    IN_KERNEL = "waits in the kernel (storage, GPU or NIC)"
    COLLECTIVE = "waits in a collective"
    WRAPPER = "waits in the in-process wrapper for the other ranks"
    """A spare, or a rank between two rounds. Nobody waits for such a rank."""
    OUTSIDE = "is in no call of torch.distributed"
    BLOCKED = "waits in C code for another thread"
    """In doubt: torch's `work.wait()` of a send or a receive is such a call and leaves no Python frame, but so does a
    lock of the program."""
    LOCKED = "waits for a lock of its own program"
    """Decided from the source line of the innermost frame (`own_lock.py`). Another rank cannot release such a lock, so
    this rank is the cause."""
    UNKNOWN = "gave no stack"


@dataclass(frozen=True)
class Scene:
    """One rank at the moment of a hang, as its monitor saw it.

    Attributes:
        rank: its global rank.
        frames: of its main thread, the innermost first; empty where no stack was taken.
        process: what /proc says of the process (`state`, `wchan`, `other_threads`, `silent`); None: nothing was
            read.
        in_own_lock: the source line of the innermost frame certainly waits for a lock that only threads of this process
            can release (`own_lock.py`).
    """

    rank: int
    frames: Sequence[str] = ()
    process: Mapping[str, Any] | None = None
    in_own_lock: bool = False

    @property
    def activity(self) -> Activity:
        """Where the rank is. The state of the process decides first: a stopped rank is stopped, whatever its stack."""
        state = str((self.process or {}).get("state", ""))
        # States of proc(5): T stopped by a signal, t by a tracer, D uninterruptible sleep.
        if state.startswith(("T", "t")):
            return Activity.STOPPED
        if not self.frames:
            if state.startswith("D"):
                return Activity.IN_KERNEL
            # A wait in a collective gives up the GIL, so the rank would have answered.
            if self.is_silent and state.startswith("R"):
                return Activity.OUTSIDE
            return Activity.UNKNOWN
        if in_collective(self.frames):
            return Activity.COLLECTIVE
        if self._in_wrapper[:1] == _NEXT[:1] and not self.has_returned:
            return Activity.WRAPPER
        waits_in = str((self.process or {}).get("wchan", ""))
        # In containers `wchan` may be unreadable. Then each process that sleeps may sleep for a lock.
        in_lock = waits_in.startswith(_OF_A_LOCK) or (state.startswith("S") and not waits_in)
        # A wait inside Python's own library (`threading`, `queue`) is not in doubt: its frame names the file.
        if not in_lock or _STANDARD.match(self.frames[0]):
            return Activity.OUTSIDE
        if self.in_own_lock:
            return Activity.LOCKED
        return Activity.BLOCKED

    @property
    def is_silent(self) -> bool:
        """Whether the rank computes and does not answer, since a thread holds the GIL in C code (`rank_process.py`)."""
        return (self.process or {}).get("silent") is True

    @property
    def is_in_roll_call(self) -> bool:
        """Whether the rank has made a call that all ranks must make, and waits until all of them have."""
        return any(map(_IN_ROLL_CALL.match, self.frames[:1]))

    @property
    def has_returned(self) -> bool:
        """Whether the rank has returned from the wrapped function, and waits in the wrapper for the other ranks."""
        return self._in_wrapper == _NEXT

    @property
    def _in_wrapper(self) -> tuple[str, ...]:
        """The names of the two innermost functions, as far as they belong to the wrapper's `call.py`."""
        found = [_IN_WRAPPER.match(frame) for frame in self.frames[:2]]
        return tuple(match[1] for match in found if match is not None)

    @property
    def waits_in_python(self) -> bool:
        """Whether the rank waits for a thread, a queue, a connection or a process of its own, which may in turn wait
        for another rank."""
        innermost = next(iter(self.frames), "")
        return self.activity is Activity.OUTSIDE and _WAITS_IN_PYTHON.match(innermost) is not None

    @property
    def waits_for_no_rank(self) -> bool:
        """Whether the rank certainly waits for no other rank: its main thread computes, is in an uninterruptible sleep
        (a disk, a driver), or waits for a lock of its own program."""
        is_busy = str((self.process or {}).get("state", "")).startswith(("R", "D"))
        return is_busy or self.activity is Activity.LOCKED

    @property
    def others_are_idle(self) -> bool:
        """Whether each thread beside the main thread is known to wait for work, in no call from the file in which the
        main thread is. `agent/cycle/evidence.py` asks this before it believes in a lock of the rank's own: a thread
        that holds the lock may itself wait for a rank."""
        threads = (self.process or {}).get("other_threads")
        return isinstance(threads, list) and all(_IDLE.match(str(frame)) for frame in threads)

    @property
    def own_frame(self) -> str:
        """The innermost frame of the user's program, else the innermost of all; empty without frames."""
        own = (frame for frame in self.frames if "/" not in frame and not frame.startswith("<frozen "))
        return next(chain(own, self.frames), "")


def in_collective(frames: Sequence[str]) -> bool:
    """Returns whether the innermost frame, apart from frames that a collective passes through, waits for peers.

    Args:
        frames: of the main thread, the innermost first, library files by their path within the library.
    """
    innermost = next((frame for frame in frames if not _PASSED_THROUGH.match(frame)), "")
    found = _WAITS_FOR_PEERS.match(innermost)
    return found is not None and ("autograd" not in innermost or "_engine_run_backward" in innermost)


def about_stall(scenes: Sequence[Scene], stalled: int, waited_s: float) -> str:
    """Describes stalled ranks in one line, for the warning of `--ft-stall-warning`: first the ranks that the others
    wait for, as far as stacks show them. Called by `agent/hang_warnings.py` where the recorder names no rank.

    Args:
        scenes: of all ranks of the node that run.
        stalled: the rank whose monitor reported the stall.
        waited_s: for how long the main thread of `stalled` ran no Python.
    """
    of_activity = {activity: [scene for scene in scenes if scene.activity is activity] for activity in Activity}
    waiting = of_activity[Activity.COLLECTIVE]
    held_up = of_activity[Activity.STOPPED] + of_activity[Activity.IN_KERNEL] + of_activity[Activity.OUTSIDE]
    held_up = held_up or of_activity[Activity.BLOCKED]
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
