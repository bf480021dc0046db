"""Parses the answer of NCCL's RAS to `VERBOSE STATUS`: JSON from release 2.28.7 on, text of earlier releases. Pure.

`agent/cycle/nccl_ras.py` asks and passes the bytes to `view_in`, which returns an `NcclView` (`nccl_view.py`). The
facts are from NVIDIA's NCCL user guide, "RAS", and from releases 2.24.3 to 2.30.

- JSON names every rank of every communicator, 0.6 KB each.
- The text is meant for people and differs between releases. Only known lines are read, unknown ones are skipped. The
  text names only the processes and ranks that differ from the others.

Whatever listens on the port may answer. So bytes, depth, numbers and texts are bounded, and an answer about another job
is refused where the answer shows that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ft_launcher.decide.attribution.nccl_view import Late, NcclProcess, NcclView, view_of
from rank_monitor.contract.wire.foreign import parse_json, whole_number

_MAX_BYTES = 16 << 20
"""Bytes of an answer. 2,048 ranks, each in six communicators, are 7 MB of JSON."""
_FEWEST_BYTES, _BYTES_OF_RANK = 1 << 20, 8 << 10
"""Bytes that any job may answer, and bytes more for each rank. A rank is 0.6 KB in each of its communicators, and a
rank of a pipeline has one communicator for each peer. The bound keeps a small job's answer cheap: 16 MB of empty lists
take 7 s to parse, in which other threads stand still, and 1 MB half a second."""
_MAX_REPLIES = 4
"""Lines before the answer itself: the server answers each command that goes before `VERBOSE STATUS` by a line."""
_MAX_NUMBER = (1 << 31) - 1
"""Of pids, ranks and sizes: NCCL has them as C ints."""
_MAX_LAUNCHED = (1 << 63) - 1
_MAX_HOST = 64
"""Characters of an address. The longest text of an IPv6 address has 45."""

_PROCESS = re.compile(r"\s*Process (\d{1,10}) on node (\S{1,64})")
_RANK = re.compile(
    r"\s*Rank (\d{1,10})\b(?: has launched up to operation (\d{1,19})| has not (launched any operations))?"
)
_MANAGED = re.compile(r" managed by process (\d{1,10}) on node (\S{1,64})$")
_COMMUNICATOR = re.compile(r"#(\d{1,10})-\d{1,10} \([0-9a-fA-F]{1,16}\) ([A-Z]+)")
_LAUNCHED = re.compile(r"\s*\d{1,10} ranks have (?:launched up to operation (\d{1,19})|not launched any operations)")
_DIFFERENT = re.compile(r"\s*Communicator ranks have different (\S{1,32}) operation counts|\s*Communicator ranks have ")
_COUNTED = re.compile(r"\s*(?:Missing communicator data from )?(\d{1,10}) job process(?:es)?\b")
_HEADINGS = ("Job summary", "Communicators...", "Errors", "Warnings")


def most_bytes(ranks: int) -> int:
    """Returns how many bytes of an answer are read for a job with this number of ranks; more is no answer of NCCL's."""
    return min(_MAX_BYTES, _FEWEST_BYTES + ranks * _BYTES_OF_RANK)


def view_in(answer: bytes, pids: Collection[int] = ()) -> NcclView:
    """Returns what an answer says.

    Args:
        answer: all bytes from the server, with its lines about the commands before `VERBOSE STATUS`.
        pids: pids of this node's ranks. An answer in JSON must know at least one of them, which shows that it is about
            this job. An answer in text cannot be checked: it does not name healthy processes. Empty: no check.

    Raises:
        ValueError: it is no such answer, or a part of one.
    """
    body = answer
    for _ in range(_MAX_REPLIES):
        if body.startswith((b"SERVER PROTOCOL", b"OK", b"ERROR")):  # an ERROR: a release that knows no JSON
            body = body.partition(b"\n")[2]
    if body.startswith(b"{"):
        return _of_json(parse_json(body), pids)
    return _of_text(body.decode("ascii", errors="replace"))


# JSON.


def _of_json(found: Any, pids: Collection[int]) -> NcclView:
    """Returns the view of an answer in JSON, as parsed. Entries that cannot be read are skipped.

    Raises:
        ValueError: there are no communicators, or none of `pids` is in them.
    """
    if not isinstance(found, dict) or not isinstance(found.get("communicators"), list):
        raise ValueError("the answer has no communicators")
    known: set[tuple[str, int]] = set()
    missing: dict[tuple[str, int], NcclProcess] = {}
    late: list[Late] = []
    for communicator in found["communicators"]:
        if not isinstance(communicator, dict):
            continue
        size = _number(communicator.get("size"))
        ranks = [(_peer(rank, size), rank) for rank in _objects(communicator.get("ranks"))]
        silent = [(_peer(rank, size), rank) for rank in _objects(communicator.get("missing_ranks"))]
        for peer, rank in ranks + silent:
            if peer is not None:
                known.add((peer.host, peer.pid))
                before = missing.get((peer.host, peer.pid))
                if _is_unreached(rank) and (before is None or before.size < size):
                    missing[peer.host, peer.pid] = peer
        late += _late_in([(peer, rank.get("collective_counts")) for peer, rank in ranks if peer is not None])
    if pids and not {pid for _, pid in known}.intersection(pids):
        raise ValueError("the answer knows none of the ranks: it is about another job")
    return view_of(len(known), list(missing.values()), len(missing), late)


def _objects(values: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the objects in a list; nothing for any other value."""
    if isinstance(values, list):
        yield from (value for value in values if isinstance(value, dict))


def _peer(rank: Mapping[str, Any], size: int) -> NcclProcess | None:
    """Returns the process of a rank in a communicator of `size` ranks; None: host or pid cannot be read."""
    host, pid = rank.get("host"), _number(rank.get("pid"))
    if not isinstance(host, str) or len(host) > _MAX_HOST or pid <= 0:
        return None
    number = _number(rank.get("rank"))
    return NcclProcess(host, pid, number, size, _status(rank).get("considered_dead") is True)


def _status(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    status = rank.get("status")
    if isinstance(status, dict):
        return status
    return {}


def _is_unreached(rank: Mapping[str, Any]) -> bool:
    """Returns whether NCCL does not reach the process of a rank. A missing rank with neither mark is reached, and is
    only no member of this communicator any more."""
    status = _status(rank)
    return status.get("considered_dead") is True or status.get("unresponsive") is True


def _late_in(counted: list[tuple[NcclProcess, Any]]) -> list[Late]:
    """Returns the ranks of one communicator that have launched fewer collectives of a kind than the rank with most.

    Args:
        counted: each process with its counts: kind of collective -> how many it has launched.
    """
    by_kind: dict[str, list[tuple[NcclProcess, int]]] = {}
    for peer, counts in counted:
        if isinstance(counts, dict):
            for kind, count in counts.items():
                by_kind.setdefault(kind[:_MAX_HOST], []).append((peer, _number(count, _MAX_LAUNCHED)))
    found = []
    for kind, launched in by_kind.items():
        most = max(count for _, count in launched)
        found += [Late(peer, kind, count, most) for peer, count in launched if 0 <= count < most]
    return found


def _number(value: Any, most: int = _MAX_NUMBER) -> int:
    """Returns `value` if it is a whole number from 0 to `most`; -1 for anything else."""
    if type(value) is int and 0 <= value <= most:
        return value
    return -1


# Text.


def _of_text(text: str) -> NcclView:
    """Returns the view of an answer in text.

    Raises:
        ValueError: the answer is cut off, or its numbers contradict each other.
    """
    parts = _parts(text)
    if "Errors" not in parts or "Warnings" not in parts:
        raise ValueError("the answer is not complete")
    sizes = _sizes(parts.get("Communicators...", []))
    missing, count = _missing(parts["Errors"], sizes)
    processes = _processes(parts.get("Job summary", []))
    if processes < count:
        raise ValueError("the answer has fewer processes than it misses")
    return view_of(processes, missing, count, _late(parts["Warnings"], sizes))


def _parts(text: str) -> dict[str, list[str]]:
    """Returns the lines below each heading of the answer."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        heading = next((name for name in _HEADINGS if line.startswith(name)), "")
        if heading and heading not in found:
            lines = found[heading] = []
        else:
            lines.append(line)
    return found


def _processes(lines: list[str]) -> int:
    """Returns the number of all processes, which the table of the job's summary has in its last row of numbers.

    The row has 3 columns, or 5 where all nodes are alike and the table has numbers per node too. The number of
    processes is the last column but one in both.
    """
    rows = [words for words in (line.split() for line in lines) if words and all(word.isdecimal() for word in words)]
    if rows and len(rows[-1]) in (3, 5):
        return _of_digits(rows[-1][-2])
    raise ValueError("the answer does not say how many processes there are")


def _sizes(lines: list[str]) -> dict[str, int]:
    """Returns the size of the communicators of each group of communicators, by the group's number."""
    rows = [line.split() for line in lines]
    return {row[0]: _of_digits(row[4]) for row in rows if len(row) == 8 and row[0].isdecimal() and row[4].isdecimal()}


def _missing(lines: list[str], sizes: Mapping[str, int]) -> tuple[list[NcclProcess], int]:
    """Returns the processes that NCCL does not reach, with their ranks where the lines give these; and how many
    processes these are in all. The lines may count more than they name."""
    found: dict[tuple[str, int], NcclProcess] = {}
    count, is_dead, group = 0, False, ""
    for line in lines:
        communicator = _COMMUNICATOR.match(line)
        if communicator is not None:
            group = communicator[1]
        elif line.strip() in ("INCOMPLETE", "DEAD"):
            group, is_dead = "", line.strip() == "DEAD"
        counted, process, rank = _COUNTED.match(line), _PROCESS.match(line), _RANK.match(line)
        if counted is not None and not group:
            count += _of_digits(counted[1])
        elif process is not None and not group:
            found[process[2], _of_digits(process[1])] = NcclProcess(process[2], _of_digits(process[1]), is_dead=is_dead)
        elif rank is not None and group:
            managed, size = _MANAGED.search(line), sizes.get(group, 0)
            known = managed and found.get((managed[2], _of_digits(managed[1])))
            if known and known.size < size:
                found[known.host, known.pid] = replace(known, rank=_of_digits(rank[1]), size=size)
    return list(found.values()), max(count, len(found))


def _late(lines: list[str], sizes: Mapping[str, int]) -> list[Late]:
    """Returns the ranks that have launched fewer collectives than others, as far as the lines name them."""
    found: list[Late] = []
    named: list[tuple[NcclProcess, int]] = []
    """Ranks of the present communicator and operation, each with its count; -1: the line gives none."""
    group, operation, launched, most = "", "", -1, 0

    def close_operation() -> None:
        found.extend(Late(peer, operation, count, most) for peer, count in named if 0 <= count < most)
        named.clear()

    for line in lines:
        communicator, different, several = _COMMUNICATOR.match(line), _DIFFERENT.match(line), _LAUNCHED.match(line)
        if communicator is not None:
            close_operation()
            group, launched, most = communicator[1], -1, 0
        elif different is not None:
            close_operation()
            operation, launched, most = (different[1] or "").replace("collective", ""), -1, 0
        elif several is not None:
            launched = _of_digits(several[1] or "0")
            most = max(most, launched)
        rank, managed = _RANK.match(line), _MANAGED.search(line)
        if rank is None or managed is None:
            continue
        count = launched
        if rank[2] or rank[3]:
            count = _of_digits(rank[2] or "0")
            most = max(most, count)
        size = sizes.get(group, 0)
        named.append((NcclProcess(managed[2], _of_digits(managed[1]), _of_digits(rank[1]), size), count))
    close_operation()
    return found


def _of_digits(digits: str) -> int:
    number = whole_number(digits, _MAX_LAUNCHED)
    if number is None:
        raise ValueError(f"a number of the answer is too large: {digits[:_MAX_HOST]}")
    return number
