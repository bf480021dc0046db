"""The state of one rank, as plain tensors and bytes: taken from the user's objects, and given back to them.

`collect` asks each object for its `state_dict()` and takes that apart. Nothing is copied: the tensors are the
training's own. `give_back` makes the states again and calls `load_state_dict`.

What is the same on all ranks is written by one rank of a node (`replicas.py`).

Uses torch's underscored `_metadata` of a module's state.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ft_client.memory import tensor_parts
from ft_client.memory.safetensors_layout import TensorSpec
from ft_client.memory.state_tree import OtherStructure, put_together, take_apart, take_apart_again
from ft_client.memory.tensor_parts import CannotBeKept, KnownTensors, Meshes, OtherState
from ft_client.rank import rng

_FORM = 2
"""Of what `KeptState.plain` holds. Another release with another form counts it up."""
_EXTRA_STATE = "_extra_state"
"""The last part of the key of what a module's own `get_extra_state` returns, in torch's `Module.state_dict`."""


@dataclass(frozen=True, eq=False)
class ObjectStructure:
    """How the state of one object lies in a file. It is the same object as long as nothing but values change.

    Attributes:
        forms: of each tensor, as from `tensor_parts.only_part`; None: a tensor has several parts.
        notes: about each tensor, with the names of its parts.
        specs: name -> what the header says of each part.
        meshes: of the notes, by number, as in `tensor_parts.Meshes`.
    """

    forms: Sequence[Any] | None
    notes: Sequence[Any]
    specs: Mapping[str, TensorSpec]
    meshes: Sequence[str]

    def is_like(self, other: ObjectStructure) -> bool:
        """Returns whether both structures say the same."""
        return (self.forms, self.notes, self.specs, self.meshes) == (
            other.forms,
            other.notes,
            other.specs,
            other.meshes,
        )


class KnownStructures:
    """What the last save has learned about the states of the objects, by name of the object."""

    def __init__(self) -> None:
        self._structures: dict[str, ObjectStructure] = {}
        self._rests: dict[str, Any] = {}

    def parse(self, name: str, state: Any) -> ParsedObject:
        """Returns the state of an object taken apart. Raises CannotBeKept."""
        known = self._structures.get(name)
        parsed = None
        if known is not None and known.forms is not None:
            parsed = _parsed_again(state, self._rests[name], known)
        if parsed is None:
            parsed = _parsed(name, state, known)
        self._structures[name] = parsed.structure
        self._rests[name] = parsed.rest
        return parsed


@dataclass(frozen=True)
class ParsedObject:
    """The state of one object, taken apart.

    Attributes:
        rest: the state without tensors.
        parts: the plain tensors, in the order of `structure.specs`.
        others: as in `ParsedState`.
        structure: how it lies in a file.
    """

    rest: Any
    parts: Sequence[Any]
    others: Mapping[str, Any]
    structure: ObjectStructure


@dataclass
class KeptState:
    """What goes into one rank's file.

    Attributes:
        parts: name -> plain tensor, those of the training itself.
        objects: name of an object -> its state without tensors, the notes about its tensors, and the meshes of these.
        random: the state of the generators.
        others: path -> value that torch's weights-only reader may not admit. All other values in `objects` are
            immutable, or copies that nobody else has.
        structures: of all objects. Two states with the same structures have the same layout.
    """

    parts: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    random: rng.RngState = field(default_factory=rng.save)
    others: dict[str, Any] = field(default_factory=dict)
    structures: list[ObjectStructure] = field(default_factory=list)

    def specs(self) -> dict[str, TensorSpec]:
        """Returns what the header says of each tensor."""
        return {name: spec for structure in self.structures for name, spec in structure.specs.items()}

    def plain(self) -> dict[str, Any]:
        """Returns all that is no tensor."""
        return {"form": _FORM, "random": rng.to_json(self.random), "objects": self.objects}

    def mesh_notes(self) -> dict[str, Any]:
        """Returns all meshes, and the number of the mesh, placements and shape of each DTensor by the name of its first
        part."""
        meshes: list[str] = []
        tensors: dict[str, Any] = {}
        for structure in self.structures:
            numbers = []
            for text in structure.meshes:
                if text not in meshes:
                    meshes.append(text)
                numbers.append(meshes.index(text))
            for note in structure.notes:
                if isinstance(note, dict) and "mesh" in note:
                    more = {key: note[key] for key in ("placements", "shape")}
                    tensors[note["parts"][0]] = {"mesh": numbers[note["mesh"]], **more}
        return {"meshes": [json.loads(text) for text in meshes], "tensors": tensors}


def check_object(name: str, kept: Any) -> None:
    """Raises TypeError or CannotBeKept where an object cannot be kept whatever its state is."""
    if not callable(getattr(kept, "state_dict", None)) or not callable(getattr(kept, "load_state_dict", None)):
        raise TypeError(f"MemoryCheckpoint({name}=...) has no state_dict and load_state_dict: {type(kept).__name__}")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules: list[Any] = []
    if fsdp is not None and isinstance(kept, torch.nn.Module):
        modules = list(kept.modules())
    for module in modules:
        if isinstance(module, fsdp.FullyShardedDataParallel):  # type: ignore[union-attr]
            raise CannotBeKept(f"{name} is a FullyShardedDataParallel, whose shards have no names: use fully_shard")


def collect(objects: Mapping[str, Any], written_elsewhere: frozenset[str], known: KnownStructures) -> KeptState:
    """Returns the present state of a rank. Copies nothing.

    Args:
        objects: name -> what has `state_dict`.
        written_elsewhere: names of objects that another rank of the node writes.
        known: from the last call, for this one and the next.

    Raises:
        CannotBeKept: a tensor has no form in a file.
    """
    found = KeptState()
    for name, kept in objects.items():
        if name in written_elsewhere:
            continue
        parsed = known.parse(name, kept.state_dict())
        found.parts |= zip(parsed.structure.specs, parsed.parts, strict=True)
        found.objects[name] = {
            "rest": parsed.rest,
            "notes": parsed.structure.notes,
            "meshes": parsed.structure.meshes,
        }
        found.others |= parsed.others
        found.structures.append(parsed.structure)
    return found


def _parsed(name: str, state: Any, known: ObjectStructure | None) -> ParsedObject:
    """Returns the state of an object taken apart, with `known` for its structure where that holds. Raises
    CannotBeKept."""
    apart = take_apart(state, tensor_parts.is_tensor, name)
    parts: dict[str, Any] = {}
    notes = []
    meshes = Meshes()
    for path, tensor in apart.tensors.items():
        own, note = tensor_parts.parts_of(path, tensor, meshes)
        parts |= own
        notes.append(_with_parts(note, list(own)))
    specs = {path: tensor_parts.spec(path, part) for path, part in parts.items()}
    structure = ObjectStructure(_forms(apart.tensors.values()), notes, specs, meshes.texts)
    if known is not None and known.is_like(structure):
        structure = known
    return ParsedObject(apart.rest, list(parts.values()), apart.others, structure)


def _parsed_again(state: Any, rest: Any, known: ObjectStructure) -> ParsedObject | None:
    """Returns the state of an object taken apart; None: it may have another structure than `known`.

    `rest`: of the state before, without tensors.
    """
    try:
        rest, tensors = take_apart_again(state, rest, tensor_parts.is_tensor)
        with torch.no_grad():
            found = [tensor_parts.only_part(tensor) for tensor in tensors]
    except OtherStructure:
        return None
    if [form for _, form in found] != known.forms:
        return None
    return ParsedObject(rest, [part for part, _ in found], {}, known)


def _forms(tensors: Iterable[Any]) -> list[Any] | None:
    """Returns the forms of tensors that have one part each; None: one of them has several."""
    try:
        with torch.no_grad():
            return [tensor_parts.only_part(tensor)[1] for tensor in tensors]
    except OtherStructure:
        return None


@dataclass(frozen=True)
class LoadedState:
    """The states of objects, made again: name -> state; an object without one stays as it is. `random`: of the
    generators, as `rng.to_json` wrote it; None: they begin anew, as in a job with another number of ranks."""

    states: Mapping[str, Any]
    random: Mapping[str, Any] | None


def make_again(
    objects: Mapping[str, Any],
    sources: Mapping[str, tuple[Any, Mapping[str, Any]]],
    own: Any,
    safe_types: Sequence[Any],
) -> LoadedState:
    """Returns the states of all objects, and checks that they fit the objects. Changes none of these.

    Args:
        objects: name -> what has `load_state_dict`.
        sources: name of an object -> the plain state and the tensors of the file that holds its state.
        own: the plain state of this rank's file.
        safe_types: what is admitted; of that, classes of tensors beside those that the objects have.

    Raises:
        OtherState: the file is of another state.
    """
    present = {name: kept.state_dict() for name, kept in objects.items() if isinstance(kept, torch.nn.Module)}
    tensors = list(take_apart(present, tensor_parts.is_tensor).tensors.values())
    tensors += [parameter for kept in objects.values() for parameter in optimizer_parameters(kept)]
    known = KnownTensors(tensors, safe_types)
    states = {}
    try:
        if own["form"] != _FORM:
            raise OtherState(f"its form is {own['form']}, which this release does not read")
        for name in objects:
            plain, parts = sources[name]
            kept = plain["objects"][name]
            made = [_assembled(known, note, parts, kept["meshes"]) for note in kept["notes"]]
            states[name] = put_together(kept["rest"], made)
            if name in present:
                _check_module(name, present[name], states[name])
        return LoadedState(states, own["random"])
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as problem:
        raise OtherState(f"it does not have the state of this job: {type(problem).__name__}: {problem}") from None


def give_back(objects: Mapping[str, Any], loaded: LoadedState) -> None:
    """Sets objects and the random numbers to a state.

    The tensors of the state lie in a file that will be written again, so what does not copy them gets copies.
    """
    for name, kept in objects.items():
        if name not in loaded.states:
            continue
        if isinstance(kept, torch.nn.Module):
            _give_module(kept, loaded.states[name])
        elif _copies_to_another_device(kept):
            _give_optimizer(kept, loaded.states[name])
        else:
            kept.load_state_dict(_copied(loaded.states[name]))
    if loaded.random is not None:
        rng.restore(rng.from_json(dict(loaded.random)))


def _give_module(module: Any, state: Mapping[str, Any]) -> None:
    """Sets a module to a state. Most modules copy what they get; what keeps it (quantised weights, parameters without
    memory) gets a copy in a second go."""
    in_file = _storages(state)
    # No look at the module shows what became of such a value.
    more = {key: _copied(value) for key, value in state.items() if _is_extra(key)}
    module.load_state_dict(_with_versions(module, {**state, **more}))
    if not in_file.isdisjoint(_storages(module.state_dict())):
        module.load_state_dict(_with_versions(module, _copied(state)))


def _with_versions(module: Any, state: Mapping[str, Any]) -> Any:
    """Returns the state of a module with the versions of its parts, which torch passes to each part with its values. A
    part without a version takes its state for a very old one: it renames keys, or keeps its own values. The versions
    are those of the code that runs, as it has also written the state."""
    given = OrderedDict(state)
    versions = getattr(module.state_dict(), "_metadata", None)
    if versions is not None:
        given._metadata = versions  # type: ignore[attr-defined]
    return given


def _copies_to_another_device(kept: Any) -> bool:
    """Returns whether an object is an optimizer whose parameters are on a GPU, and which takes its state as torch's
    optimizers do: by a copy to the parameter's device."""
    return (
        isinstance(kept, torch.optim.Optimizer)
        and type(kept).load_state_dict is torch.optim.Optimizer.load_state_dict
        and all(parameter.device.type != "cpu" for parameter in optimizer_parameters(kept))
    )


def _give_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Sets an optimizer to a state that it copies itself. A copy in the host's memory before that would be twice as
    large as the model, beside all files.

    Single numbers are copied: torch leaves the count of steps where it is.
    """
    in_file = _storages(state)
    apart = take_apart(state, tensor_parts.is_tensor)
    given = [_copied_number(tensor) for tensor in apart.tensors.values()]
    optimizer.load_state_dict(put_together(apart.rest, given))
    if not in_file.isdisjoint(_storages(optimizer.state_dict())):
        optimizer.load_state_dict(_copied(state))


def _copied_number(tensor: Any) -> Any:
    """Returns a copy of a tensor with one element, and any other tensor itself."""
    if isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
        return tensor_parts.copy_of(tensor)
    return tensor


def _copied(state: Any) -> Any:
    """Returns a state whose tensors are copies."""
    apart = take_apart(state, tensor_parts.is_tensor)
    return put_together(apart.rest, [tensor_parts.copy_of(tensor) for tensor in apart.tensors.values()])


def _storages(state: Any) -> set[int]:
    """Returns the addresses of the memory of all tensors in a state."""
    meshes = Meshes()
    parts = [
        part
        for tensor in take_apart(state, tensor_parts.is_tensor).tensors.values()
        for part in tensor_parts.parts_of("", tensor, meshes)[0].values()
    ]
    return {part.untyped_storage().data_ptr() for part in parts if part.numel()}


def optimizer_parameters(kept: Any) -> Iterator[Any]:
    """Yields the parameters of an optimizer; nothing for other objects."""
    if isinstance(kept, torch.optim.Optimizer):
        for group in kept.param_groups:
            yield from group["params"]


def _with_parts(note: Any, names: list[str]) -> Any:
    """Returns a note that also names the parts; of a plain tensor only the name."""
    if not note:
        return names[0]
    return {**note, "parts": names}


def _assembled(known: KnownTensors, note: Any, parts: Mapping[str, Any], meshes: Sequence[str]) -> Any:
    """Returns a tensor by its note, as `_with_parts` made it."""
    if isinstance(note, str):
        return parts[note]
    names = note["parts"]
    return known.assemble(str(names[0]), note, iter([parts[name] for name in names]), meshes)


def _is_extra(key: str) -> bool:
    """Returns whether a module's key is of what its own `get_extra_state` returns."""
    return str(key).rpartition(".")[2] == _EXTRA_STATE


def _check_module(name: str, present: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Raises OtherState unless a module has the same keys, shapes and types as the state: `load_state_dict` would
    change some of its tensors before it finds out.

    Extra state is for the module itself to judge: that of TransformerEngine is a tensor of bytes, which is empty until
    the module was used.
    """
    if set(present) != set(loaded):
        different = sorted(set(present) ^ set(loaded))
        raise OtherState(f"{name} has other keys, such as {different[0]}")
    for key, value in loaded.items():
        if _is_extra(key):
            continue
        if tensor_parts.is_tensor(value) and (value.shape, value.dtype) != (present[key].shape, present[key].dtype):
            raise OtherState(f"{name}.{key} is {tuple(value.shape)} of {value.dtype} there, and not here")
