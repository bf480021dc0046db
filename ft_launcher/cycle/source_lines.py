"""Reads the program's text at the lines where ranks of a hang may wait for others, or for locks of their own.

`agent/failed_cycle.py` and `blame_exchange.py` use it, for those of which nothing else says it. Storage that hangs
costs a second, and leaves what it would have shown unknown. What the text says is decided in `attribution/own_lock.py`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ft_launcher.attribution import RankEvidence
from ft_launcher.attribution.own_lock import waits_in_own_lock
from ft_launcher.attribution.rank_view import views
from ft_launcher.cycle.bounded_call import call_within
from ft_launcher.record.contained import contained
from rank_monitor.contract.wire.foreign import open_regular

_READ_TIMEOUT_S = 1.0
"""For all files together; the ranks have ended, and the restart waits for it."""
_MOST_PLACES = 4
"""One cause brings the ranks of a node to few places, and fewer to its own than to those where they wait for that."""
_MOST_BYTES = 256 << 10
"""Of a file: 6,700 lines of torch, whose tree takes 0.15 s and 11 MB for a moment."""


def with_own_locks(ranks: Sequence[RankEvidence], stop_began: float, ran_s: float) -> list[RankEvidence]:
    """Returns the ranks, those that certainly wait for locks of their own marked. Waits for files, one second at most.

    Args:
        stop_began: when the launcher began to stop the ranks (monotonic seconds).
        ran_s: seconds since they were started. A file that has changed in this time may not be the text that runs.
    """
    found = list(ranks)
    with contained("the program's text at the lines where ranks wait cannot be used"):
        asked = {
            number: (str((rank.scene.process or {}).get("file", "")), rank.scene.frames[0])
            for number, (rank, view) in enumerate(zip(ranks, views(ranks, stop_began), strict=True))
            if view.may_wait and rank.scene.others_are_idle
        }
        # A relative path was relative to where the rank was when it read the file.
        counted = Counter(place for place in asked.values() if place[0].startswith("/"))
        places = sorted(counted, key=lambda place: (counted[place], place))[:_MOST_PLACES]
        texts: dict[str, str] = {}
        if places:
            files = list(dict.fromkeys(path for path, _ in places))
            call_within(_READ_TIMEOUT_S, partial(_read, files, ran_s, texts), "ft_source_lines")
        in_lock = {place for place in places if waits_in_own_lock(texts.get(place[0], ""), place[1])}
        for number, place in asked.items():
            if place in in_lock:
                found[number] = replace(ranks[number], in_own_lock=True)
    return found


def _read(files: Sequence[str], ran_s: float, texts: dict[str, str]) -> None:
    for path in files:
        with suppress(OSError, UnicodeDecodeError), open_regular(path, follow_link=True) as file:
            status = os.fstat(file.fileno())
            age_s = time.time() - max(status.st_mtime, status.st_ctime)
            if age_s > ran_s and status.st_size <= _MOST_BYTES:
                texts[path] = file.read(_MOST_BYTES).decode("utf-8-sig")
