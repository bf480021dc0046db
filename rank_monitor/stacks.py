"""Reads what faulthandler wrote: the frames of the main thread. Pure.

Threads are listed newest first, so the main thread is the last block, unless the list was cut (after 100 threads);
then it is the current one, since the kernel prefers the main thread for a signal to a process.
"""

from __future__ import annotations

import re

MAX_FRAMES = 40
_BLOCK = re.compile(r"^(Current thread|Thread) 0x[0-9a-fA-F]+\b.*:$")
_STARTED_BY = re.compile(r"/ft_client/(bootstrap|script)\.py$|^<frozen runpy>$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def main_thread_frames(text: str) -> list[str]:
    """The frames of the main thread, innermost first, as `train.py:42 in step`; empty when `text` holds none."""
    blocks: list[list[str]] = []
    current: list[str] | None = None
    cut = False
    for line in text.splitlines():
        if block := _BLOCK.match(line):
            blocks.append([])
            if block[1] == "Current thread":
                current = blocks[-1]
        elif blocks and (frame := _FRAME.match(line)):
            if _STARTED_BY.search(frame[1]):  # how every rank begins; tells nothing
                continue
            name = frame[1].rpartition("/")[2]
            blocks[-1].append(f"{name}:{frame[2]} in {frame[3]}"[:300])
        elif line == "...":
            cut = True
    if not blocks:
        return []
    return (current if cut and current is not None else blocks[-1])[:MAX_FRAMES]
