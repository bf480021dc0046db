"""Puts the state of a job with another number of ranks together for this one.

`read` is collective: all ranks call it, and none leaves it early, whatever fails on it. Its steps, with a vote after
each of them:

1. Each file on a node is verified as a whole by one of the node's ranks, before any of it is used or sent.
2. All ranks learn what each file says of its objects, and decide alike which of these count (`shared_state.py`).
3. All ranks get what one file, the *reference*, says of all tensors, and plan alike which rank sends which block of
   which shard to whom (`shard_ranges.py`): a rank reads what its own node has, and is sent the rest.
4. The blocks are sent in the order of the plan, each with a checksum (`checked_chunks.py`).

Nothing in the objects is changed here: that comes once all ranks have their whole states.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ft_client.memory import checked_chunks, checksum, kept_state, plain_state, shard_ranges, tensor_parts
from ft_client.memory.agreed_steps import OtherWorld
from ft_client.memory.kept_state import LoadedState
from ft_client.memory.safetensors_layout import ITEM_BYTES, DamagedFile
from ft_client.memory.shard_ranges import Box, CannotReshard, Layout, Piece
from ft_client.memory.shared_state import REPLICATED, SharedObjects, shared_objects
from ft_client.memory.state_reader import StateReader
from ft_client.memory.state_tree import put_together
from ft_client.memory.tensor_parts import TYPES, Meshes, OtherState
from ft_client.rank.agreement import group

REPLICATED_ENTRY = "replicated"
"""The entry of a file's metadata with the names of the objects whose state is the same on all ranks, as JSON. A file
without it was written by a release that did not know whether it may be read by other ranks."""


@dataclass(frozen=True)
class ReadState:
    """What `read` returns.

    Attributes:
        state: of this rank; None: some rank cannot read its own.
        problem: why this rank cannot; empty: it can, or a lower rank has the same reason.
        anew: names of the objects that begin anew.
    """

    state: LoadedState | None
    problem: str
    anew: tuple[str, ...] = ()


class _CannotGoOn(Exception):
    """A rank cannot go on; all ranks know it. The text is this rank's own reason, or empty."""


@dataclass(frozen=True)
class _Transfer:
    """One block. `sender`: the rank that sends it to `target`; None: the target's own node has the file."""

    part: str
    target: int
    sender: int | None
    piece: Piece


def read(folder: str, found: OtherWorld, objects: Mapping[str, Any], safe_types: Sequence[Any]) -> ReadState:
    """Returns the state of this rank, put together from the files of all nodes. Changes no object. Collective.

    Args:
        folder: of this node.
        found: what the nodes have, the same on all ranks.
        objects: name -> what has `load_state_dict`.
        safe_types: as for `MemoryCheckpoint`.
    """
    resharding = _Resharding(folder, found, objects, safe_types)
    try:
        state, anew = resharding.run()
    except _CannotGoOn as failed:
        return ReadState(None, str(failed))
    return ReadState(state, "", anew)


class _Resharding:
    """One call of `read`."""

    def __init__(self, folder: str, found: OtherWorld, objects: Mapping[str, Any], safe_types: Sequence[Any]) -> None:
        self._folder = Path(folder)
        self._found = found
        self._objects = objects
        self._safe_types = safe_types
        self._problem = ""
        """Why this rank cannot go on."""
        self._readers: dict[int, StateReader] = {}
        """The files of this node, by old rank."""
        self._own: dict[str, Any] = {}
        """Name of a part -> the new shard of this rank."""

    def run(self) -> tuple[LoadedState, tuple[str, ...]]:
        """Returns the state of this rank, and the names of the objects that begin anew. Raises _CannotGoOn."""
        told: list[Any] = []
        with _noting(self):
            told = self._open()
        self._vote()
        shared: SharedObjects | None = None
        of_rank = {rank: states for one in group.gather_json(told) for rank, states in one}
        with _noting(self):
            shared = self._decide(of_rank)
        self._vote()
        assert shared is not None
        plain, specs = self._reference(shared)
        self._vote()
        wanted: dict[str, tuple[Any, list[str]]] = {}
        transfers: list[_Transfer] = []
        whole: list[str] = []
        with _noting(self):
            for name in shared.taken:
                wanted[name] = self._plan(name, plain["objects"][name], specs, transfers, whole)
        self._vote()
        parts = self._whole_parts(whole, specs, shared.reference)
        self._move(transfers, specs)
        self._vote()
        state: LoadedState | None = None
        with _noting(self):
            sources = {}
            for name, (kept, meshes) in wanted.items():
                sources[name] = ({"objects": {name: {**kept, "meshes": meshes}}}, {**parts, **self._own})
            taken = {name: self._objects[name] for name in shared.taken}
            state = kept_state.make_again(taken, sources, {"form": plain["form"], "random": None}, self._safe_types)
        self._vote()
        assert state is not None
        return state, shared.anew

    def _vote(self) -> None:
        """Raises _CannotGoOn on all ranks where one cannot go on. Of ranks with the same reason the first one has it:
        many reasons follow from what all ranks know. Collective."""
        if group.min_over_ranks([float(not self._problem)])[0]:
            return
        reasons = group.gather_json(self._problem)
        reason = ""
        if reasons.index(self._problem) == group.rank():
            reason = self._problem
        raise _CannotGoOn(reason)

    def note(self, problem: Exception) -> None:
        """Notes why this rank cannot go on: the first reason counts."""
        if self._problem:
            return
        self._problem = str(problem)
        if not isinstance(problem, (DamagedFile, OtherState, CannotReshard, OSError)):
            self._problem = f"{type(problem).__name__}: {problem}"

    def _open(self) -> list[Any]:
        """Opens the files of this node, and verifies those that fall to this rank. Returns what these say of their
        objects: old rank, and name -> what tells the object's state from others."""
        told = []
        for number, file in enumerate(self._found.files):
            for ranks in file.nodes:
                if group.rank() not in ranks:
                    continue
                name = self._found.name_of(file)
                is_own = ranks[number % len(ranks)] == group.rank()
                try:
                    reader = StateReader(self._folder, name, self._safe_types, is_verified=not is_own)
                except (DamagedFile, OtherState) as problem:
                    raise type(problem)(f"{name.name}: {problem}") from None
                self._readers[file.rank] = reader
                if is_own:
                    told.append([file.rank, self._states_of(reader, name.name)])
        return told

    def _states_of(self, reader: StateReader, file: str) -> dict[str, str]:
        """Returns what tells the states of a file's objects from others."""
        if REPLICATED_ENTRY not in reader.metadata:
            raise OtherState(f"{file}: an earlier release wrote it, so only as many ranks as before can load it")
        replicated = json.loads(reader.metadata[REPLICATED_ENTRY])
        states = {}
        for name, kept in reader.plain["objects"].items():
            states[name] = REPLICATED
            if name not in replicated:
                states[name] = _checksum_of(kept, reader.tensors)
        return states

    def _decide(self, of_rank: Mapping[int, Mapping[str, str]]) -> SharedObjects:
        per_rank = [name for name, kept in self._objects.items() if _is_loader(kept)]
        may_differ = [name for name, kept in self._objects.items() if not _is_alike(kept)]
        return shared_objects(of_rank, list(self._objects), per_rank, may_differ)

    def _nodes_of(self, old_rank: int) -> tuple[tuple[int, ...], ...]:
        return next(file.nodes for file in self._found.files if file.rank == old_rank)

    def _reference(self, shared: SharedObjects) -> tuple[Any, dict[str, Any]]:
        """Returns the plain state of the reference, and type and shape of each of its tensors. Collective."""
        source = self._nodes_of(shared.reference)[0][0]
        specs, plain = b"", b""
        if group.rank() == source:
            reader = self._readers[shared.reference]
            specs = json.dumps({name: [spec.kind, spec.shape] for name, spec in reader.specs.items()}).encode()
            plain = reader.plain_bytes
        received = []
        for content in (specs, plain):
            received.append(b"{}")
            with _noting(self):
                received[-1] = checked_chunks.broadcast_bytes(content, source)
        if self._problem:
            return {}, {}
        found: Any = {}
        with _noting(self):
            found = plain_state.load(received[1], self._safe_types)
        return found, json.loads(received[0])

    def _plan(
        self, name: str, kept: Any, specs: Mapping[str, Any], transfers: list[_Transfer], whole: list[str]
    ) -> tuple[Any, list[str]]:
        """Returns the state of an object with notes about its tensors as they shall lie in this job, and the meshes of
        these notes.

        Args:
            name: of the object.
            kept: its state in the reference.
            specs: type and shape of each tensor in the reference.
            transfers: gets the blocks of its DTensors.
            whole: gets the names of the parts that all ranks get whole.
        """
        targets = _targets(self._objects[name], kept)
        meshes = Meshes()
        notes: list[Any] = []
        for number, note in enumerate(kept["notes"]):
            target = targets.get(number)
            if not isinstance(note, str) and "mesh" in note:
                notes.append(self._plan_shards(name, kept, note, target, specs, meshes, transfers))
                continue
            names = [note]
            if not isinstance(note, str):
                names = note["parts"]
            if target is not None and list(target.shape) == list(specs[names[0]][1]) and target.dim():
                raise CannotReshard(f"{names[0]} is a DTensor here, and was none there")
            whole += names
            notes.append(note)
        return {"rest": kept["rest"], "notes": notes}, meshes.texts

    def _plan_shards(
        self,
        name: str,
        kept: Any,
        note: Any,
        target: Any,
        specs: Mapping[str, Any],
        meshes: Meshes,
        transfers: list[_Transfer],
    ) -> dict[str, Any]:
        """Plans the blocks of one DTensor. Returns the note about it as it shall lie in this job."""
        part = note["parts"][0]
        if target is None:
            raise CannotReshard(f"{part} was a DTensor there, and is none here")
        if len(note["parts"]) != 1 or "class" in note["local"]:
            raise CannotReshard(f"{part} is a DTensor of a subclass, which only as many ranks as before can load")
        if list(target.shape) != note["shape"]:
            raise CannotReshard(f"{part} is {tuple(note['shape'])} there, and {tuple(target.shape)} here")
        shape = tuple(note["shape"])
        text = kept["meshes"][note["mesh"]]
        split = shard_ranges.split_of(part, note["placements"], len(shape))
        old = shard_ranges.boxes(Layout(shape, json.loads(text)[1], split))
        placements = [repr(placement) for placement in target.placements]
        split = shard_ranges.split_of(part, placements, len(shape))
        new = shard_ranges.boxes(Layout(shape, target.device_mesh.mesh.tolist(), split))
        kind = specs[part][0]
        for rank, box in sorted(new.items()):
            transfers += self._transfers(part, old, rank, box, ITEM_BYTES[kind])
        own, found = tensor_parts.parts_of(part, target, meshes)
        local = own[part]
        if group.rank() in new:
            extents = shard_ranges.extents(new[group.rank()])
            if extents != tuple(local.shape):
                raise CannotReshard(f"the shard of {part} is {tuple(local.shape)} here, and {extents} was expected")
        self._own[part] = torch.empty(local.shape, dtype=TYPES[kind])
        return {**found, "parts": [part]}

    def _transfers(
        self, part: str, old: Mapping[int, Box], rank: int, box: Box, item_bytes: int
    ) -> Iterator[_Transfer]:
        """Yields the blocks of a new shard, of a rank. Of files that have the same, one of the rank's own node is
        taken."""
        own = [file.rank for file in self._found.files if any(rank in ranks for ranks in file.nodes)]
        others = [file.rank for file in self._found.files if file.rank not in own]
        for number, piece in enumerate(shard_ranges.pieces(part, old, box, [*own, *others])):
            sender = None
            if piece.source not in own:
                ranks = self._nodes_of(piece.source)[0]
                sender = ranks[number % len(ranks)]
            for chunk in shard_ranges.chunks(piece, item_bytes, checked_chunks.MAX_BYTES):
                yield _Transfer(part, rank, sender, chunk)

    def _whole_parts(self, names: Sequence[str], specs: Mapping[str, Any], reference: int) -> dict[str, Any]:
        """Returns the tensors of the reference that all ranks get whole. Collective."""
        nodes = self._nodes_of(reference)
        if {rank for ranks in nodes for rank in ranks} == set(range(group.size())):
            return {name: self._readers[reference].tensors[name] for name in names}
        source = nodes[0][0]
        found = {}
        for name in names:
            kind, shape = specs[name]
            made = torch.empty(shape, dtype=TYPES[kind])
            content = None
            if group.rank() == source:
                content = self._readers[reference].tensors[name].reshape(-1)
            flat = made.view(-1)
            step = max(1, checked_chunks.MAX_BYTES // ITEM_BYTES[kind])
            for begin in range(0, flat.numel(), step):
                target = flat[begin : begin + step]
                block = None
                if content is not None:
                    block = content[begin : begin + step]
                with _noting(self):
                    received = checked_chunks.broadcast(block, target.numel() * ITEM_BYTES[kind], source)
                    target.copy_(received.view(target.dtype))
            found[name] = made
        return found

    def _move(self, transfers: Sequence[_Transfer], specs: Mapping[str, Any]) -> None:
        """Sends and receives all blocks of this rank, in the order of the plan. Every rank goes through the same order,
        so the first block that is not done yet always has both its ranks at it."""
        for transfer in transfers:
            size = shard_ranges.volume(transfer.piece.source_box) * ITEM_BYTES[specs[transfer.part][0]]
            if transfer.target == group.rank():
                with _noting(self):
                    self._take(transfer, size)
            elif transfer.sender == group.rank():
                block = None
                with _noting(self):
                    block = self._block(transfer)
                checked_chunks.send(block, size, transfer.target)

    def _take(self, transfer: _Transfer, size: int) -> None:
        """Puts one block into the new shard of this rank."""
        target = self._own[transfer.part][_slices(transfer.piece.target_box)]
        if transfer.sender is None:
            target.copy_(self._block(transfer))
            return
        received = checked_chunks.receive(size, transfer.sender)
        target.copy_(received.view(target.dtype).view(target.shape))

    def _block(self, transfer: _Transfer) -> Any:
        """Returns a block of a file of this node."""
        shard = self._readers[transfer.piece.source].tensors[transfer.part]
        box = transfer.piece.source_box
        if shard.dim() != len(box) or any(end > size for (_, end), size in zip(box, shard.shape, strict=True)):
            raise OtherState(f"{transfer.part} of rank {transfer.piece.source} has another shape than its mesh says")
        return shard[_slices(box)]


class _noting:
    """A context whose exceptions are noted: the other ranks wait for this one in the next vote."""

    def __init__(self, resharding: _Resharding) -> None:
        self._resharding = resharding

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, problem: BaseException | None, at: Any) -> bool:
        if not isinstance(problem, Exception):
            return False
        self._resharding.note(problem)
        return True


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in box)


def _is_loader(kept: Any) -> bool:
    """Returns whether the state of an object is a place in the data of its own rank."""
    if isinstance(kept, (torch.nn.Module, torch.optim.Optimizer)):
        return False
    return hasattr(kept, "__iter__") or hasattr(kept, "__next__")


def _is_alike(kept: Any) -> bool:
    """Returns whether an object must have the same state on all ranks, but for its DTensors, for the training to be the
    same."""
    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    return isinstance(kept, kinds)


def _checksum_of(kept: Any, tensors: Mapping[str, Any]) -> str:
    """Returns a checksum of all of an object's state but its own shards."""
    found = checksum.crc32(repr([kept["rest"], list(kept["meshes"])]).encode())
    for note in kept["notes"]:
        compared = note
        if isinstance(note, str):
            names = [note]
        elif "mesh" in note:
            names = []
            compared = {key: value for key, value in note.items() if key != "local"}
        else:
            names = note["parts"]
        found = checksum.crc32(repr(compared).encode(), found)
        for name in names:
            if tensors[name].numel():
                found = checksum.crc32(tensor_parts.content_of(tensors[name]), found)
    return f"{found:08x}"


@dataclass(frozen=True)
class _Place:
    """Stands in a state in the place of a tensor. `number`: of its note."""

    number: int


def _targets(kept_object: Any, kept: Any) -> dict[int, Any]:
    """Returns the DTensors of this job into which those of an object's state go, by the number of their notes: of a
    module those with the same keys, of an optimizer the parameters that the state's indices name."""
    tagged = put_together(kept["rest"], [_Place(number) for number in range(len(kept["notes"]))])
    found: dict[int, Any] = {}
    if isinstance(kept_object, torch.nn.Module):
        present = kept_object.state_dict()
        for key, value in tagged.items():
            if isinstance(value, _Place):
                found[value.number] = present.get(key)
    elif isinstance(kept_object, torch.optim.Optimizer):
        parameters = list(kept_state.optimizer_parameters(kept_object))
        for index, state in tagged["state"].items():
            for value in state.values():
                if isinstance(value, _Place):
                    found[value.number] = parameters[index].detach()
    return {number: target for number, target in found.items() if tensor_parts.is_dtensor(target)}
