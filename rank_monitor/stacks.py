"""Reads the frames of the main thread from a dump of faulthandler, and where the other threads are. Pure.

A frame of the program is shown by the name of its file, one of a library by its path within the library: that path has
a slash, by which the launcher knows the frames that are the user's own.

faulthandler lists the threads newest first, so the main thread is the last block. A dump by the rank's watchdog, which
is the current thread then, has that block even where the list was cut (after 100 threads, MAX_NTHREADS in CPython's
traceback.c), and an end line. In a dump by the signal the main thread is the current one: the kernel prefers the main
thread for a signal to a process. Such a dump without a current thread is a beginning, as one by the watchdog without an
end line is: a rank that computes on a busy machine loses the CPU while faulthandler writes. The last block is then some
other thread, and says nothing about the main thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rank_monitor.contract.wire.messages import END_OF_STACKS

MAX_FRAMES = 40
"""Frames of the main thread that are passed on: the innermost, which show where a rank waits. With 300 characters each
they fit into a message of 60,000 bytes."""
_MAX_LOCATIONS = 16
"""Of the other threads of a rank: a training has two to ten of them, most at the same few places."""
_MAX_PATH = 1000
"""Characters of a path that are looked at, the last ones: the patterns below are searched in text that a rank can
write."""
_BLOCK = re.compile(r"^(Current thread|Thread) 0x[0-9a-fA-F]+\b.*:$")
_STARTED_BY = re.compile(
    r"/ft_client/(bootstrap|rank/start/script|rank/start/function)\.py$|^<frozen runpy>$"
    r"|/ft_launcher/(__main__|cli|node/zygote/(fork_server|pool|client|forked_rank)|node/ranks/function_rank)\.py$"
    r"|/bin/(ft_launcher|ftrun)$"
)
"""Files whose frames show how every rank begins: the same for all, so they are left out."""
_BY_WATCHDOG = re.compile(r"/ft_client/rank/monitoring/stack_writer\.py$")
"""The file with the innermost frame of a watchdog that writes a dump."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/(.+)$")
_STANDARD = re.compile(r"^.*/lib(?:64)?/(python3[.\d]*t?/.+)$")
_SOURCE_TREE = re.compile(r"^.*/((?:torch/(?:distributed|nn|autograd|utils|_\w+)|ft_client)/?.*\.py)$")
"""torch built from source and our own package under development lie in no folder of packages."""


@dataclass(frozen=True)
class StackDump:
    """What a dump says of the threads of a rank.

    `frames`: of the main thread, innermost first, as `train.py:42 in step`; empty when the dump does not show them.
    `file`: the path of the innermost one; empty where it is not known for certain. `others`: where the other threads
    are, each place once: the innermost frame in `file`, else the innermost of all. `?`: a thread has no frame, or not
    all are known.

    `is_whole`: the dump is complete and shows the main thread. False does not say that it is not complete: another
    thread than the main one may have taken the signal, or the list of threads was cut.
    """

    frames: list[str]
    file: str
    others: list[str]
    is_whole: bool


def read(text: str) -> StackDump:
    """Returns what a dump of faulthandler, or the beginning of one, says. Reads any text without an error."""
    found = _threads(text)
    # The list was cut, and what follows is not the main thread's block, which the watchdog adds: it saw no cut.
    if found.has_end and found.ends_cut:
        return StackDump([], "", ["?"], is_whole=False)
    last = len(found.blocks) - 1
    # A signal to a process usually goes to its main thread: then the last block is the current thread's.
    has_main_last = found.current == last
    if found.has_end:
        has_main_last = last >= 0 and found.current != last
    if (found.current is None or found.is_by_watchdog) and not (found.has_end and has_main_last):
        return StackDump([], "", ["?"], is_whole=False)
    main = found.blocks[-1]
    if found.is_cut and not found.has_end and found.current is not None:
        main = found.blocks[found.current]
    frames = [_frame(frame) for frame in main[:MAX_FRAMES]]
    is_whole = has_main_last and text.endswith("\n") and bool(frames)
    if found.is_cut or not has_main_last or not main:
        return StackDump(frames, "", ["?"], is_whole)
    return StackDump(frames, main[0][0], _locations(found.blocks[:-1], main[0][0]), is_whole)


def _locations(threads: list[list[tuple[str, str, str]]], file: str) -> list[str]:
    """Returns where threads are, each location once: by the innermost frame in `file`, else by the innermost of all.

    `["?"]` where there are too many to be shown.
    """
    found = set()
    for frames in threads:
        shown = [_frame(frame) for frame in frames if frame[0] == file] or [_frame(frame) for frame in frames[:1]]
        found.add((shown or ["?"])[0])
    if len(found) > _MAX_LOCATIONS:
        return ["?"]
    return sorted(found)


@dataclass
class _Threads:
    """The threads of a dump.

    `blocks`: of each thread its frames (path, line, function). `current`: the index of the current thread; None: there
    is none yet. `is_cut`: not all threads are there. `ends_cut`: no thread has come after the last cut. `has_end`: the
    end line has come.
    """

    blocks: list[list[tuple[str, str, str]]] = field(default_factory=list)
    current: int | None = None
    is_cut: bool = False
    ends_cut: bool = False
    has_end: bool = False

    @property
    def is_by_watchdog(self) -> bool:
        """Whether the current thread is a watchdog that writes the dump."""
        return self.current is not None and any(_BY_WATCHDOG.search(path) for path, _, _ in self.blocks[self.current])


def _threads(text: str) -> _Threads:
    """Returns the threads of a dump, or of the beginning of one. What follows an end line is another dump."""
    found = _Threads()
    for line in text.splitlines():
        block = _BLOCK.match(line)
        if block:
            if block[1] == "Current thread":
                found.current = len(found.blocks)
            found.blocks.append([])
            found.ends_cut = False
        elif line == END_OF_STACKS.rstrip():
            found.has_end = True
            break
        # faulthandler writes this line where it cuts the list of threads.
        elif line == "...":
            found.is_cut = found.ends_cut = True
        elif found.blocks:
            frame = _FRAME.match(line)
            if frame and not _STARTED_BY.search(frame[1]):
                found.blocks[-1].append((frame[1], frame[2], frame[3]))
    return found


def _frame(frame: tuple[str, str, str]) -> str:
    """Returns a frame as `train.py:42 in step`, at most 300 characters."""
    path, line, function = frame
    return f"{_shown(path)}:{line} in {function}"[:300]


def _shown(path: str) -> str:
    """Returns the name of a file of the program, or the path of a library's file within its package."""
    path = path[-_MAX_PATH:]
    packaged = _PACKAGES.match(path)
    if packaged is not None:
        if "/" in packaged[1]:
            return packaged[1]
        return f"site-packages/{packaged[1]}"
    known = _STANDARD.match(path) or _SOURCE_TREE.match(path)
    if known is not None:
        return known[1]
    return path.rpartition("/")[2]
