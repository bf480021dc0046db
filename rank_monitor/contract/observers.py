"""Who reads the iterations of a call without taking part: a log in the ranks' store. Knows no iteration.

A member observes while it asks to join and while it leaves; whoever speaks for a member that died observes meanwhile.
Each comes and goes by one append, and whoever speaks for a member takes back what its process left in the log; so a
process that is killed anywhere leaves no mark behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rank_monitor.contract.roll import Store, leave_out

_LOG = "observers"
_COMES, _GOES, _IS_DEAD = "+", "-", "!"


@contextmanager
def noted(store: Store, member: int, is_dead: bool) -> Iterator[None]:
    """Notes that somebody observes: the member itself, or whoever speaks for one whose process `is_dead`."""
    who = f"for{member}" if is_dead else f"{member}"
    took_back = f"{_IS_DEAD}{member}\n" if is_dead else ""
    store.append(_LOG, f"{took_back}{_COMES}{who}\n")
    try:
        yield
    finally:
        store.append(_LOG, f"{_GOES}{who}\n")


def are_there(store: Store) -> bool:
    """Whether somebody observes. One operation; when nobody does, the log begins anew."""
    log = store.compare_set(_LOG, "", "").decode(errors="replace")
    there: Counter[str] = Counter()
    for line in log.splitlines():
        what, who = line[:1], line[1:]
        if what not in (_COMES, _GOES, _IS_DEAD):
            leave_out(_LOG)
        elif what == _COMES:
            there[who] += 1
        elif what == _IS_DEAD or there[who] <= 1:  # it may be silent and not dead, and go later
            del there[who]
        else:
            there[who] -= 1
    if log and not there:
        store.compare_set(_LOG, log, "")
    return bool(there)
