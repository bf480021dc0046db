"""Ranks with GPUs that run through collectives, sends and receives until nothing moves, and how they are seen then.

A CPU enqueues operations and goes on: it waits for its GPU at `SYNC` alone. A GPU runs the operations of a group, and
the messages between two ranks, in the order in which they were enqueued, and what was waited for before anything that
comes after it. What torch's flight recorder has of them goes through the monitor's reader, as in a real job.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_launcher.decide.attribution import rank_view
from ft_launcher.decide.attribution.rank_view import RankView
from ft_launcher.decide.attribution.scene import Scene
from rank_monitor.flight_recorder import groups_of

SYNC, SLEEP = "sync", "sleep"
_OPPOSITE = {"send": "recv", "recv": "send"}
_ARROW = {"send": "->", "recv": "<-"}


@dataclass(frozen=True)
class Step:
    """What a rank enqueues.

    Attributes:
        name: of a collective.
        messages: of a batch, or a single one: `send` or `recv`, and the other rank; empty: a collective.
        is_batch: they have one state, and run on the stream of the group.
        in_background: what comes after it does not stand behind it.
    """

    group: str
    name: str = "all_reduce"
    messages: tuple[tuple[str, int], ...] = ()
    is_batch: bool = False
    in_background: bool = False


Program = Sequence[Step | str]


@dataclass
class _Operation:
    """A step that was enqueued. `number`: of its collective or of its messages, in the group on this rank."""

    rank: int
    step: Step
    number: int
    collectives: int
    behind: list[_Operation]
    parts: list[_Part] = field(default_factory=list)
    is_done: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the GPU has come to it."""
        return all(operation.is_done for operation in self.behind)


@dataclass
class _Part:
    """One send or receive. `key`: of the two ends of a message, but for its kind."""

    operation: _Operation
    kind: str
    key: tuple[str, bool, int, int, int]
    is_done: bool = False


@dataclass
class _Rank:
    program: Program
    at: int = 0
    entered: list[_Operation] = field(default_factory=list)
    awaited: list[_Operation] = field(default_factory=list)

    def count(self, group: str, messages: bool) -> int:
        """How many collectives of a group, or entries with messages, it has enqueued."""
        return sum(op.step.group == group and bool(op.step.messages) is messages for op in self.entered)


class Job:
    """Ranks that run until nothing moves.

    Args:
        programs: by rank.
        groups: members by name.
        has_buffers: a send ends without its receive, and a broadcast at its root without the others.
    """

    def __init__(self, programs: Mapping[int, Program], groups: Mapping[str, Sequence[int]], has_buffers: bool) -> None:
        self._ranks = {rank: _Rank(program) for rank, program in programs.items()}
        self._groups, self._has_buffers = groups, has_buffers
        self._collectives: dict[tuple[str, int], list[_Operation]] = {}
        self._parts: dict[tuple[str, tuple[str, bool, int, int, int]], _Part] = {}
        while any([self._enqueue(number) for number in self._ranks]) or self._run_gpus():
            pass

    def has_ended(self) -> bool:
        """Whether all ranks are through."""
        ranks = self._ranks.values()
        return all(rank.at == len(rank.program) and all(op.is_done for op in rank.entered) for rank in ranks)

    def _enqueue(self, number: int) -> bool:
        rank, began_at = self._ranks[number], self._ranks[number].at
        while rank.at < len(rank.program):
            step = rank.program[rank.at]
            if step == SLEEP or (step == SYNC and not all(operation.is_done for operation in rank.entered)):
                break
            if isinstance(step, Step):
                self._enter(number, rank, step)
            rank.at += 1
        return rank.at > began_at

    def _enter(self, number: int, rank: _Rank, step: Step) -> None:
        stream = [op for op in rank.entered if _stream(op.step) == _stream(step)]
        collectives = rank.count(step.group, messages=False)
        operation = _Operation(number, step, 0, collectives, [*rank.awaited, *stream[-1:]])
        if step.messages:
            operation.number = rank.count(step.group, messages=True) + 1
            operation.parts = [self._part(operation, kind, peer) for kind, peer in step.messages]
        else:
            operation.number = operation.collectives = collectives + 1
            self._collectives.setdefault((step.group, operation.number), []).append(operation)
        rank.entered.append(operation)
        if not step.in_background:
            rank.awaited.append(operation)

    def _part(self, operation: _Operation, kind: str, peer: int) -> _Part:
        source, target = operation.rank, peer
        if kind == "recv":
            source, target = peer, operation.rank
        step, earlier = operation.step, 0
        while (kind, (step.group, step.is_batch, source, target, earlier)) in self._parts:
            earlier += 1
        part = _Part(operation, kind, (step.group, step.is_batch, source, target, earlier))
        self._parts[kind, part.key] = part
        return part

    def _run_gpus(self) -> bool:
        moved = False
        for (group, _), operations in self._collectives.items():
            ready = [op for op in operations if op.is_ready and not op.is_done]
            if len(operations) == len(self._groups[group]) and len(ready) == sum(not op.is_done for op in operations):
                moved |= _end(ready)
            elif self._has_buffers:
                moved |= _end([op for op in ready if op.step.name == "broadcast" and op.rank == self._groups[group][0]])
        for (kind, key), part in self._parts.items():
            other = self._parts.get((_OPPOSITE[kind], key))
            meets = other is not None and (other.operation.is_ready or other.is_done)
            if part.operation.is_ready and not part.is_done and (meets or (self._has_buffers and kind == "send")):
                part.is_done = moved = True
        for rank in self._ranks.values():
            done = [op for op in rank.entered if op.parts and all(part.is_done for part in op.parts) and not op.is_done]
            moved |= _end(done)
        return moved

    def views(self, marks_batches: bool) -> list[RankView]:
        """Returns how the ranks are seen. `marks_batches`: the end of a batch is marked as a send or receive."""
        found = []
        for number, rank in self._ranks.items():
            groups = groups_of(self._answer(rank, marks_batches))
            states, members = rank_view.states_of(groups)
            sends, receives = rank_view.peers_of(groups, "sends"), rank_view.peers_of(groups, "receives")
            scene = Scene(number, ("train.py:9 in step",), {"state": "R (running)"})
            found.append(RankView(scene, states, members, sends=sends, receives=receives))
        return found

    def _answer(self, rank: _Rank, marks_batches: bool) -> bytes:
        entries, status = [], {}
        for operation in rank.entered:
            step, state = operation.step, "completed" if operation.is_done else "scheduled"
            shared = {
                "pg_id": step.group,
                "process_group": [step.group, ""],
                "collective_seq_id": operation.collectives,
            }
            shared |= {"p2p_seq_id": rank.count(step.group, messages=True), "input_sizes": [[4]]}
            if step.messages:
                shared["p2p_seq_id"] = operation.number
            members = self._groups[step.group]
            for kind, peer in step.messages:
                name = f"nccl:{kind} {members.index(operation.rank)}{_ARROW[kind]}{members.index(peer)}"
                of_part = "scheduled" if step.is_batch else state
                entries.append(shared | {"profiling_name": name, "state": of_part, "is_p2p": True})
            if step.is_batch:
                end = {"profiling_name": "nccl:coalesced", "state": state, "is_p2p": marks_batches}
                entries.append(shared | end)
            if not step.messages:
                entries.append(shared | {"profiling_name": f"nccl:{step.name}", "state": state, "is_p2p": False})
            numbers = status.setdefault(step.group, {"last_enqueued_collective": -1, "last_completed_collective": -1})
            numbers["last_enqueued_collective"] = operation.number  # of either kind, as NCCL's
            if operation.is_done:
                numbers["last_completed_collective"] = operation.number
        config = {name: {"name": name, "ranks": json.dumps(list(ranks))} for name, ranks in self._groups.items()}
        trace = {"entries": entries, "pg_status": status, "pg_config": config}
        return b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(trace).encode()


def _stream(step: Step) -> Any:
    """The queue of the GPU in which a step stands."""
    if step.messages and not step.is_batch:
        return step.group, frozenset(peer for _, peer in step.messages)
    return step.group


def _end(operations: Sequence[_Operation]) -> bool:
    for operation in operations:
        operation.is_done = True
    return bool(operations)


def random_programs(chance: random.Random) -> tuple[dict[int, list[Step | str]], dict[str, list[int]]]:
    """Returns programs of two to six ranks that all run through, as far as buffers allow, and their groups."""
    ranks = range(chance.randint(2, 6))
    groups = {"world": list(ranks)}
    for number in range(chance.randint(0, 3)):
        groups[f"g{number}"] = sorted(chance.sample(ranks, chance.randint(2, len(ranks))))
    programs: dict[int, list[Step | str]] = {rank: [] for rank in ranks}
    syncs = chance.choice([0.05, 0.2, 0.5])
    for _ in range(chance.randint(2, 14)):
        for rank, step in _together(chance, groups):
            programs[rank].append(step)
        for program in programs.values():
            if chance.random() < syncs:
                program.append(SYNC)
    for program in programs.values():
        program.append(SYNC)
    return programs, groups


def _together(chance: random.Random, groups: Mapping[str, Sequence[int]]) -> Iterator[tuple[int, Step]]:
    """What ranks do with each other at one moment: a collective, a message, an exchange, or a ring of messages."""
    group = chance.choice(list(groups))
    members, in_background = groups[group], chance.random() < 0.3
    kind = chance.choice(["collective", "message", "batch", "exchange", "ring"])
    if kind == "collective":
        name = chance.choice(["all_reduce", "all_reduce", "broadcast"])
        yield from ((rank, Step(group, name, in_background=in_background)) for rank in members)
    elif kind == "ring":
        for place, rank in enumerate(members):
            beside = ("send", members[(place + 1) % len(members)]), ("recv", members[place - 1])
            yield rank, Step(group, messages=beside, is_batch=True)
    else:
        one, other = chance.sample(list(members), 2)
        there, back = (("send", other),), (("recv", one),)
        if kind == "exchange":
            there, back = (*there, ("recv", other)), (("send", one), *back)
        for rank, messages in ((one, there), (other, back)):
            is_behind = in_background and chance.random() < 0.5
            yield rank, Step(group, messages=messages, is_batch=kind != "message", in_background=is_behind)
