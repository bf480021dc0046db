"""Waits until all ranks of the default process group have begun a call that all of them must make, or names the ranks
that do not make it.

A collective that some ranks never enter waits until the timeout of the group, and its error names no rank. So a call
that a program may make on some ranks only, by mistake, begins with `await_all`. It asks the store of the process group,
and no collective, since a rank that does not come may be in another collective.

An error must not meet a program that is right and slow. So there are two ways to find that a rank does not come:

- The rank has proved it, by what it did in the place of the call (`say_absent`).
- Nearly the timeout of the group has passed (`limit_s`). A rank that came later than the timeout would fail anyway.

The ranks decide together: the first result that a rank writes counts for all, those that come later included.

    calls/RANK      how many of these calls the rank has begun
    NUMBER/came     the ranks that have begun the call of this number (`Arrivals`)
    NUMBER/absent   the ranks that have proved that they do not begin it
    NUMBER/result   empty: all came. Else the text of the error

The keys lie in the store of the group, and end with it: a new cycle and a round of a restart in process have stores of
their own. The keys of a call are removed when all ranks have begun the next one.

The launcher sees a rank that waits here as one in a collective (`decide/attribution/scene.py`), so the limits of hangs
hold for it. For that its main thread must execute no Python, and yet be interruptible by a restart in process. A wait
in torch's store could not be interrupted, so a thread looks at the store (`_Looks`) while the main thread waits for a
lock.

Uses torch's underscored names: `_get_default_store`, since torch 2.6 has no other name for that store; the default
group, its backend and the timeout in its options, which have none.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

from ft_client.rank.agreement import group
from rank_monitor.contract.processes.making_store import making_store
from rank_monitor.contract.rounds.barrier import Arrivals, Entry, Store, ranges_of, release

_ALL_CAME = "all ranks have begun the call"
_FIRST_LOOK_S, _MAX_LOOK_S = 0.002, 1.0
"""The first pause between two looks for the result, and the longest. A rank that waits for long looks seldom."""
_LOOKS_SHARE = 16
"""A pause is at most the time waited so far, divided by this: so the last rank that comes holds up the others for a
sixteenth of the time that they have waited for it."""
_LOOKS_PER_S = 1000
"""Looks of all ranks together in a second: what a store answers in a few hundredths of a second."""
_EARLIER_SHARE, _EARLIER_S = 0.1, 60.0
"""How much before the timeout of the group the wait ends: a tenth, and not more than a minute. The error must come
before a rank that went on elsewhere reaches its own timeout, and that rank may have gone on a little earlier."""


class NotAllCame(RuntimeError):
    """Some ranks have not begun a call that all ranks must make. Raised on all ranks that have begun it."""


def limit_s(timeout_s: float) -> float:
    """Returns for how many seconds `await_all` waits in a group whose timeout is `timeout_s`."""
    return timeout_s - min(_EARLIER_SHARE * timeout_s, _EARLIER_S)


def await_all(call: str) -> None:
    """Waits until all ranks of the group have begun a call. Blocks; returns at once where this rank is alone.

    Args:
        call: the call, for the error, such as `MemoryCheckpoint.load()`. The same on all ranks.

    Raises:
        NotAllCame: some ranks do not begin the call. It names them, and those that did.
        RuntimeError: the store of the group does not answer.
    """
    store = _store(call)
    if store is not None:
        RollCall(call, store, group.rank(), group.size()).await_all(limit_s(_timeout_s()))


def say_absent(call: str, instead: str) -> None:
    """Says to the other ranks that this rank does not begin the next call, since it has made the call `instead`, which
    only follows that one. Ranks that wait for this one then get an error at once.

    Not where these have made `instead` without the call themselves: then all ranks do the same, which is no mistake of
    this rank. Does not wait for other ranks. An error of the store is ignored: the wait of the others has its limit.
    """
    with contextlib.suppress(RuntimeError):
        store = _store(call)
        if store is not None:
            RollCall(call, store, group.rank(), group.size()).say_absent(instead)


def _store(call: str) -> Any:
    """Returns the keys of a call in the store of the default process group; None: this rank is alone."""
    if group.size() == 1:
        return None
    dist = sys.modules["torch.distributed"]
    with making_store():
        return dist.PrefixStore(f"ft_roll_call/{call}", dist.distributed_c10d._get_default_store())


def _timeout_s() -> float:
    """Returns the timeout of the default process group in seconds: after it a collective fails.

    The timeout of the group's store is another one: a program that makes the store itself has chosen it, if at all, for
    the connection (`init_process_group(store=...)`). Where torch does not say the group's, as of a backend without
    options, it is taken as torch's longest default (30 minutes) or that of the store, whichever is longer: an error
    that comes late does less harm than one to a rank that is right.
    """
    dist = sys.modules["torch.distributed"]
    c10d = dist.distributed_c10d
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        backend = c10d._get_default_group()._get_backend(group.device())
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend, and the wrapper has no options.
        backend = getattr(backend, "wrapped_pg", backend)
        timeout_s = float(backend.options._timeout.total_seconds())
        if timeout_s > 0:
            return timeout_s
    return max(
        float(timeout.total_seconds()) for timeout in (c10d.default_pg_timeout, c10d._get_default_store().timeout)
    )


class RollCall:
    """One rank's part in the roll calls of one kind of call. Costs nothing: made wherever it is needed.

    Args:
        call: the call, for the error.
        store: with keys for this kind of call only.
        rank: of this rank in the group.
        size: how many ranks the group has.
    """

    def __init__(self, call: str, store: Store, rank: int, size: int) -> None:
        self._call = call
        self._store = store
        self._rank = rank
        self._size = size

    def await_all(self, limit_s: float) -> None:
        """Begins this rank's next call, and waits until all ranks have begun it, `limit_s` seconds at most.

        Raises:
            NotAllCame: some ranks do not begin the call.
            RuntimeError: the store does not answer.
        """
        number = self._begun(1)
        if self._came(number).complete(Entry(self._rank), self._size):
            result = self._settle(number, _ALL_CAME)
            self._remove(number - 1)
        else:
            absent = self._absent(number)
            if absent and self._rank not in absent:
                self._settle(number, self._error(number, f"rank {ranges_of(absent)} has gone on without it"))
            result = self._await_result(number, limit_s)
        if result != _ALL_CAME:
            raise NotAllCame(result)

    def say_absent(self, instead: str) -> None:
        """Says that this rank does not begin the next call, as it has made `instead`."""
        number = self._begun(0) + 1
        Arrivals(self._store, f"{number}/absent").sign(Entry(self._rank))
        came = {entry.entry_rank for entry in self._came(number).entries()}
        if came - self._absent(number):
            self._settle(number, self._error(number, f"rank {self._rank} has called {instead} without it"))

    def _begun(self, more: int) -> int:
        """Returns how many calls this rank has begun, after it has begun so many more."""
        return int(self._store.add(f"calls/{self._rank}", more))

    def _came(self, number: int) -> Arrivals:
        return Arrivals(self._store, f"{number}/came")

    def _absent(self, number: int) -> set[int]:
        """Returns the ranks that have said that they do not begin a call."""
        return {entry.entry_rank for entry in Arrivals(self._store, f"{number}/absent").entries()}

    def _await_result(self, number: int, limit_s: float) -> str:
        """Returns the result of a call once there is one; decides it when `limit_s` seconds have passed."""
        key = f"{number}/result"
        if not _Looks(self._store, key, limit_s, max(_MAX_LOOK_S, self._size / _LOOKS_PER_S)).wait():
            return self._settle(number, self._error(number, f"these did not call it within {limit_s:g} s"))
        return self._store.get(key).decode()

    def _settle(self, number: int, result: str) -> str:
        """Decides the result of a call, unless another rank has decided it. Returns the result that counts."""
        return release(self._store, f"{number}/result", result).decode()

    def _error(self, number: int, reason: str) -> str:
        """Returns the text of the error: which ranks have begun the call, and which have not."""
        came = {entry.entry_rank for entry in self._came(number).entries()}
        missing = set(range(self._size)) - came
        return (
            f"{self._call} was called by {_ranks(came)} and not by {_ranks(missing)}: {reason}. "
            "All ranks of the default process group must call it"
        )

    def _remove(self, number: int) -> None:
        """Removes the keys of a call that all ranks have left."""
        if number == 0:
            return
        keys = [*self._came(number).keys(), *Arrivals(self._store, f"{number}/absent").keys(), f"{number}/result"]
        with contextlib.suppress(RuntimeError):  # stores of other libraries may keep all keys
            for key in keys:
                self._store.delete_key(key)


class _Looks:
    """Looks for a key again and again, in a thread of its own, until the key is there or the limit has passed.

    `wait` is called in the thread of the program, which executes no Python until then. All else runs in the thread
    `ft_roll_call`, which ends with the wait, or after an interruption as soon as the store has answered it.

    Args:
        store: which has the key.
        key: looked for.
        limit_s: of the wait, in seconds.
        longest_s: the longest pause between two looks, in seconds.
    """

    def __init__(self, store: Store, key: str, limit_s: float, longest_s: float) -> None:
        self._store = store
        self._key = key
        self._limit_s = limit_s
        self._longest_s = longest_s
        self._is_there = False
        self._problem: Exception | None = None
        self._waiting = threading.Lock()
        """Held until the looks have ended."""
        self._interrupted = threading.Event()

    def wait(self) -> bool:
        """Returns whether the key is there; False: the limit has passed. Blocks.

        Raises:
            RuntimeError: the store does not answer, or no thread can be started.
        """
        self._waiting.acquire()
        try:
            threading.Thread(target=self._run, daemon=True, name="ft_roll_call").start()
            self._waiting.acquire()  # no Event: a restart in process interrupts what handles locks only after a while
        finally:
            self._interrupted.set()
        if self._problem is not None:
            raise self._problem
        return self._is_there

    def _run(self) -> None:
        try:
            self._is_there = self._look()
        except Exception as problem:  # raised where the program waits
            self._problem = problem
        finally:
            self._waiting.release()

    def _look(self) -> bool:
        began, waited_s = time.monotonic(), 0.0
        while not self._store.check([self._key]):
            if waited_s >= self._limit_s:
                return False
            pause_s = max(_FIRST_LOOK_S, waited_s / _LOOKS_SHARE)
            if self._interrupted.wait(min(pause_s, self._longest_s, self._limit_s - waited_s)):
                return False
            waited_s = time.monotonic() - began
        return True


def _ranks(ranks: set[int]) -> str:
    """Returns ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranges_of(ranks)}"
    return f"ranks {ranges_of(ranks)}"
