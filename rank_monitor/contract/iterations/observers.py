"""A log in the ranks' store of the processes that read the iterations of a call without taking part.

A member observes while it asks to join and while it leaves; the agent or companion that speaks for a dead member
observes meanwhile. Each begins and ends by one append, and the one that speaks for a member also cancels what the dead
process left in the log. So a process that is killed at any moment leaves no entry in force.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rank_monitor.contract.iterations.barrier import Store, leave_out

_LOG = "observers"
_COMES, _GOES, _IS_DEAD = "+", "-", "!"


@contextmanager
def noted(store: Store, member: int, is_dead: bool) -> Iterator[None]:
    """A context in which a process is noted as an observer: the member, or the one that speaks for a dead member."""
    if is_dead:
        who = f"for{member}"
    else:
        who = f"{member}"
    if is_dead:
        took_back = f"{_IS_DEAD}{member}\n"
    else:
        took_back = ""
    store.append(_LOG, f"{took_back}{_COMES}{who}\n")
    try:
        yield
    finally:
        store.append(_LOG, f"{_GOES}{who}\n")


def are_there(store: Store) -> bool:
    """Whether any process observes. Takes one operation of the store; if none does, the log is emptied."""
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
