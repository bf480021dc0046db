"""Asks a rank for torch's flight recorder: which collectives of each process group it has entered and finished.

`server.py` uses it: when a limit is about to pass, when the launcher asks for a snapshot, and before a stall is
reported. By the answers of all ranks the launcher finds the rank that the others wait for.

**Sequence.** `ask` sends an HTTP request to a Unix socket of the rank and returns. The monitor's loop receives the
answer (`_read`). `groups` interprets the last answer when somebody needs it, and waits a bounded time for one that is
on its way.

The answer comes from a thread in C++ that torch's worker server has in the rank (`rank/start/after_import.py` starts
it), also while the rank holds the GIL. An answer takes 0.5 ms, or 40 ms where the recorder's 2,000 entries are full
(torch 2.13, 2 cores, both ranks computing). An answer that has not come in time is left out. To interpret an answer of
that length takes 30 ms, and a deadline may be due when the answer arrives: so an answer is interpreted only on demand.

What the recorder says is a rank's word: it is bounded, and any of it may be wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire.foreign import parse_json, whole_number
from rank_monitor.loop import Loop

# torch's own handler. Releases that have none answer with 404, and are done without.
_REQUEST = b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_MAX_BYTES = 8 << 20
"""Of an answer; a longer one is dropped. The recorder's 2,000 entries are 1 MB; a user can set a larger recorder, or
have something else listen there."""
_READ_BYTES = 1 << 18
"""Of one read: 1 MB takes four turns of the loop, none of which is long."""
_MAX_GROUPS = 32
"""A rank of a model with every kind of parallelism is in about ten groups. The groups that the rank waits in come
first."""
_MAX_NUMBER = 1 << 62
"""Of a collective: torch counts in 64 bits."""
_MAX_TEXT = 120
"""Characters of one name or shape. The launcher shows a few of them in a line."""
_MAX_PEERS = 64
"""Ranks that one rank sends to or receives from at once; a stage of a pipeline has two neighbours."""
_MESSAGE = re.compile(r"\w{1,20}:(send|recv) \d{1,9}(?:->|<-)(\d{1,9})")
"""The name of a send or a receive, with the peer's rank in the group, which stands last: `nccl:recv 1<-0`."""
_KEPT_S = 10.0
"""Seconds after the request for which an answer stands for a rank that is gone. The rank was asked just before it got
the signal that ended it, and the launcher asks the monitor after that."""


class FlightRecorder:
    """The flight recorder of the rank that a monitor watches. One request is under way at a time.

    Args:
        loop: the monitor's loop, which receives the answer.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._connection: socket.socket | None = None
        self._received = bytearray()
        """The part of the answer that has arrived."""
        self._asked_at = 0.0
        """When the last request was sent (monotonic seconds)."""
        self._answer = b""
        """The last whole answer, until it is interpreted."""
        self._answer_to = 0.0
        """When that answer was asked for (monotonic seconds)."""
        self._groups: dict[str, Any] | None = None
        """What the answer says of the groups; None: it was not interpreted yet."""
        self._usual_gap_s: float | None = None
        """What the answer says of the time between two collectives, once it was interpreted."""

    def reset(self) -> None:
        """Drops what is known, and a request that is under way: another rank is watched from now on."""
        self._close()
        self._answer, self._answer_to, self._groups, self._asked_at = b"", 0.0, None, 0.0

    def ask(self, path: str, asked_before: float) -> None:
        """Sends a request. Does not block. A request that is still under way is given up.

        Nothing comes of it where torch.distributed is not imported yet, the rank is gone, or no descriptor is left.

        Args:
            path: the rank's socket; empty: the rank has none.
            asked_before: nothing is sent if the rank was asked at this moment or later (monotonic seconds).
        """
        if not path or self._asked_at >= asked_before:
            return
        self._close()
        self._asked_at = time.monotonic()
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            connection = undo.enter_context(socket.socket(socket.AF_UNIX, kind))
            connection.connect(path)
            connection.sendall(_REQUEST)
            self._loop.watch(connection.fileno(), self._read)
            undo.pop_all()
            self._connection = connection
            self._received.clear()

    def groups(self, wait_s: float = 0.0, since: float | None = None) -> dict[str, Any]:
        """Returns what `groups_of` makes of the last answer; empty without a recent answer.

        Args:
            wait_s: an answer that is on its way is waited for until so many seconds after the request. Blocks as long.
            since: an answer counts if it was asked for at this moment or later (monotonic seconds). None: the rank is
                gone, and the last answer of its last seconds will do.
        """
        while self._connection is not None:
            left_s = self._asked_at + wait_s - time.monotonic()
            if not readable([self._connection.fileno()], max(0.0, left_s)):
                break
            self._read()
        if since is None:
            since = time.monotonic() - _KEPT_S
        if self._answer_to < since:
            return {}
        if self._groups is None:
            self._groups, self._usual_gap_s = {}, None
            with contextlib.suppress(ValueError, RecursionError):  # a rank may have put anything there
                self._groups = groups_of(self._answer)
                self._usual_gap_s = usual_gap_s(self._answer)
            self._answer = b""
        return self._groups

    def usual_gap_s(self, wait_s: float, since: float) -> float | None:
        """Returns what the function `usual_gap_s` makes of the last answer; None without a recent answer. Arguments and
        waiting are those of `groups`."""
        if not self.groups(wait_s, since):
            return None
        return self._usual_gap_s

    def _read(self) -> None:
        """Receives a part of the answer; called by the loop. The end of the connection ends the answer."""
        assert self._connection is not None
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        if data and len(self._received) <= _MAX_BYTES:
            return
        if not data:
            self._answer, self._answer_to, self._groups = bytes(self._received), self._asked_at, None
            self._received.clear()
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._loop.unwatch(self._connection.fileno())
            self._connection.close()
            self._connection = None


def groups_of(answer: bytes) -> dict[str, Any]:
    """Returns what an answer of torch's worker server says of each process group, by the group's name. Pure.

    The groups that the rank waits in come first. Each group has:

    - `entered`, `started`, `finished`: the numbers of the last collective of the group that the rank has entered, that
      the GPU has begun (0 where the recorder does not know, as with gloo), and that is finished
    - `operation`, `shape`: of the first collective that is not finished, else of the last one; empty: not kept any more
    - `description`: the name that the program gave the group
    - `members`: its ranks, where the recorder has them (NCCL)
    - `sends`, `receives`, of a group with such messages (NCCL): the ranks to and from which the last message is not
      finished; None: which ranks is not known

    Raises:
        ValueError: `answer` is no answer with a trace of the recorder.
    """
    trace = _trace(answer)
    states, entries = trace.get("pg_status"), trace.get("entries")
    if not isinstance(states, dict) or not isinstance(entries, list):
        raise ValueError("the trace has no groups")
    by_group: dict[str, _Entries] = {}
    for entry in entries:
        if isinstance(entry, dict):
            by_group.setdefault(str(entry.get("pg_id")), _Entries()).add(entry)
    members = _members(trace.get("pg_config"))
    found: dict[str, dict[str, Any]] = {}
    for key, kept in by_group.items():
        state = states.get(key)
        if not isinstance(state, dict):
            continue
        entered, finished = _progress(state, kept)
        shown = kept.first_pending(finished)
        name, description = _names(shown)
        operation = shape = ""
        # Otherwise the collective is older than what the recorder keeps.
        if kept.collectives and (entered <= finished or finished + 1 in kept.collectives):
            operation = _text(shown.get("profiling_name")).rpartition(":")[2]
            shape = _text(f"{shown.get('input_sizes')} {_text(shown.get('input_dtypes'))}")
        found[name] = {
            "entered": entered,
            "started": _number(state.get("last_started_collective")),
            "finished": finished,
            "operation": operation,
            "shape": shape,
            "description": description,
            "members": members.get(name, []),
        }
        if kept.messages:
            found[name] |= kept.peers(members.get(name, []))
    waiting_first = sorted(found.items(), key=lambda item: item[1]["entered"] <= item[1]["finished"])
    return dict(waiting_first[:_MAX_GROUPS])


def usual_gap_s(answer: bytes) -> float | None:
    """Returns the usual seconds between two collectives of a rank, by an answer of torch's worker server; None: not
    known. Pure.

    The result is the median weighted by time: at half of all moments the rank was in a gap that is at least so long.
    The plain median would be the gap within one backward pass, whose collectives follow each other in milliseconds.

    Raises:
        ValueError: `answer` is no answer with a trace of the recorder.
    """
    entries = _trace(answer).get("entries")
    if not isinstance(entries, list):
        raise ValueError("the trace has no entries")
    moments = [entry.get("time_created_ns") for entry in entries if isinstance(entry, dict)]
    known = sorted(moment for moment in moments if type(moment) is int)
    gaps = sorted(after - before for before, after in itertools.pairwise(known))
    passed, half = 0, sum(gaps) / 2
    for gap in gaps:
        passed += gap
        if passed >= half:
            return gap / 1e9
    return None


def _trace(answer: bytes) -> dict[str, Any]:
    """Returns the recorder's JSON object in an HTTP answer of the worker server.

    Raises:
        ValueError: the server refuses, or the body is no such object.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] + b" ":
        raise ValueError("the worker server refuses")
    trace = parse_json(body)
    if not isinstance(trace, dict):
        raise ValueError("the trace is no object")
    return trace


@dataclass
class _Entries:
    """What the recorder keeps of one group.

    Attributes:
        collectives: the entries of collectives, by their number.
        messages: the entries of sends and receives by their number, which all entries of a batch share.
        entered: the number of the last collective that was entered, also one that is not kept any more.
    """

    collectives: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    messages: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    entered: int = 0
    _last_message: int = -1
    """The number of the latest entry, if that is a send or a receive."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Adds the next entry. To be called in the order in which the rank entered them."""
        number = _number(entry.get("collective_seq_id"))
        self.entered = max(self.entered, number)
        # Releases of torch differ in whether the entry that ends a batch of sends and receives is marked as one.
        of_message = _number(entry.get("p2p_seq_id"))
        ends_batch = _text(entry.get("profiling_name")).endswith(":coalesced") and self._last_message == of_message
        self._last_message = -1
        if entry.get("is_p2p") or ends_batch:
            self.messages.setdefault(of_message, []).append(entry)
            self._last_message = of_message
        else:
            self.collectives[number] = entry

    def first_pending(self, finished: int) -> Mapping[str, Any]:
        """Returns the entry of the first collective that is not finished, else of the last one. In a group without
        collectives, that of a send or a receive."""
        if self.collectives:
            return self.collectives.get(finished + 1, self.collectives[max(self.collectives)])
        return next(iter(self.messages.values()))[-1]

    def has_own_states(self) -> bool:
        """Whether progress is to be read from the entries, since the numbers of the group count something else.

        The numbers of gloo count sends and receives as well, also those of rank 0 in a `monitored_barrier`: they differ
        from rank to rank. And of two collectives that end at once they may keep the lower one (torch 2.13). The numbers
        of NCCL are those of the last send or receive where that came last.
        """
        entries = self.collectives.values()
        is_gloo = all(
            _text(entry.get("profiling_name")).startswith("gloo:") and "retired" in entry for entry in entries
        )
        return is_gloo or bool(self.messages)

    def peers(self, members: Collection[int]) -> dict[str, list[int] | None]:
        """Returns `sends` and `receives` of `groups_of`: the ranks to and from which the last message is not finished.

        Of a batch, only the last entry, `coalesced`, gets a new state; the other entries keep their first one for ever.
        So the state of the last entry stands for all.

        Args:
            members: the ranks of the group, in the order of their ranks in the group.
        """
        ranks = list(members)
        is_pending: dict[tuple[str, int], bool] = {}
        for together in self.messages.values():
            for entry in together:
                named = _MESSAGE.fullmatch(_text(entry.get("profiling_name")))
                if named is not None:
                    is_pending[named[1], int(named[2])] = not _has_ended(together[-1])
        found: dict[str, list[int] | None] = {}
        for kind, name in (("send", "sends"), ("recv", "receives")):
            peers = [peer for (of, peer), pending in is_pending.items() if of == kind and pending]
            if len(peers) > _MAX_PEERS or any(peer >= len(ranks) for peer in peers):
                found[name] = None
            else:
                found[name] = sorted(ranks[peer] for peer in peers)
        return found


def _has_ended(entry: Mapping[str, Any]) -> bool:
    """Whether an entry's operation is done, in whatever way. NCCL's watchdog retires an entry a while after its end."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _progress(state: Mapping[str, Any], kept: _Entries) -> tuple[int, int]:
    """Returns the number of the last collective of a group that was entered, and that of the last collective before the
    first that is not finished."""
    if kept.has_own_states():
        pending = (number for number, entry in kept.collectives.items() if not _has_ended(entry))
        return kept.entered, max(0, min(pending, default=kept.entered + 1) - 1)
    return _number(state.get("last_enqueued_collective")), _number(state.get("last_completed_collective"))


def _names(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the name of an entry's group, which is the same on all members, and the description of the group."""
    names = entry.get("process_group")
    if isinstance(names, list) and len(names) == 2:
        return _text(names[0]), _text(names[1])
    return _text(entry.get("pg_id")), ""


def _members(configs: Any) -> dict[str, list[int]]:
    """Returns the global ranks of each group, which the recorder has as a text like `[0, 2]`."""
    found: dict[str, list[int]] = {}
    if not isinstance(configs, dict):
        return found
    for config in configs.values():
        if isinstance(config, dict) and isinstance(config.get("ranks"), str) and config.get("name"):
            with contextlib.suppress(ValueError):
                ranks = parse_json(config["ranks"])
                if isinstance(ranks, list) and ranks and all(type(rank) is int and rank >= 0 for rank in ranks):
                    found[_text(config["name"])] = ranks
    return found


def _number(value: Any) -> int:
    """Returns a number of the recorder, which writes numbers as text in some places; 0 for none (it has -1 then)."""
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return whole_number(str(value), _MAX_NUMBER) or 0
    return 0


def _text(value: Any) -> str:
    """Returns a name or a shape as text, cut: the rank chose it."""
    return str(value)[:_MAX_TEXT]
