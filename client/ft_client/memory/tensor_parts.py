"""Takes a tensor apart into plain tensors, which can lie in a file, and puts the tensor together again.

- A plain strided tensor is its own only part. In the file its elements lie in the order of its indices; where they lie
  otherwise in memory (channels_last, a transposed weight), the note has the strides.
- numpy's arrays and numbers are parts, too: torch's weights-only reader does not admit them.
- A DTensor's part is its local shard. The note about it has the number of its mesh, and the placements: a rank loads
  its own shard, and the mesh must be one that the job has now.
- Another subclass is taken apart by `__tensor_flatten__`, as torch's compiler does it.

A *note* is plain data: what is needed beside the parts to make the tensor again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ft_client.memory.safetensors_layout import TensorSpec
from ft_client.memory.state_tree import OtherStructure

PLAIN: dict[str, Any] = {}
"""The note about a plain tensor."""
_PLAIN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMPY_TYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "complex64"}
)
"""Names of numpy's types that a file can hold. Packages that add types to numpy name some of them like torch's."""

_KINDS: dict[Any, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
}
TYPES: Mapping[str, Any] = {kind: dtype for dtype, kind in _KINDS.items()}
"""Name of a type in safetensors -> torch's type."""


class CannotBeKept(Exception):
    """A value for which this release has no form in a file. The text names the value; it will not help to try again."""


class OtherState(Exception):
    """The file is whole, but of a state that this job does not have: another model, other meshes, another release."""


def is_tensor(value: Any) -> bool:
    """Returns whether a value is taken apart here: a tensor of any class, or an array or a number of numpy."""
    return isinstance(value, torch.Tensor) or _is_numpy(value)


def copy_of(value: Any) -> Any:
    """Returns a copy of what `KnownTensors.assemble` has made, that lies in no file."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value  # numpy's: copied when it was made


def content_of(part: Any) -> Any:
    """Returns the bytes of a plain tensor as they lie in a file."""
    return part.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def beginning_of(part: Any, max_bytes: int) -> Any:
    """Returns a view of the first elements of a plain tensor, by their indices: of at most so many bytes, or of one
    element. Copies nothing, however the elements lie in memory."""
    while part.dim() and part.numel() * part.element_size() > max_bytes:
        count = max_bytes * part.shape[0] // (part.numel() * part.element_size())
        if count == 0:
            part = part[0]
        else:
            part = part[:count]
    return part


def spec(name: str, part: Any) -> TensorSpec:
    """Returns what a file's header says of a plain tensor.

    Raises:
        CannotBeKept: it has a layout or a type that a file cannot hold.
    """
    if part.dtype not in _KINDS or part.layout != torch.strided or part.is_meta or part.is_quantized:
        raise CannotBeKept(f"tensor {name} of {part.dtype}, {part.layout} on {part.device} cannot be kept")
    return TensorSpec(_KINDS[part.dtype], tuple(part.shape))


class Meshes:
    """The meshes of many tensors, each once: that of a large job has as many numbers as the job has ranks.

    Attributes:
        texts: what tells a mesh from others, as JSON: the names of its dimensions, and its ranks. By number.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[Any, int] = {}

    def number(self, mesh: Any) -> int:
        """Returns the number of a mesh, a new one where it was not seen before."""
        if mesh not in self._numbers:
            self._numbers[mesh] = len(self.texts)
            self.texts.append(json.dumps([mesh.mesh_dim_names, mesh.mesh.tolist()]))
        return self._numbers[mesh]


def parts_of(name: str, tensor: Any, meshes: Meshes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parts of a tensor by name, and the note about it. Copies nothing.

    `meshes`: those of the notes; a new one is added.

    Raises:
        CannotBeKept: it is of a subclass that has no `__tensor_flatten__`.
    """
    if not isinstance(tensor, torch.Tensor):
        array = sys.modules["numpy"].array(tensor)
        return {name: torch.from_numpy(array)}, {"is_array": isinstance(tensor, type(array))}
    tensor = tensor.detach()
    if type(tensor) is torch.Tensor:
        return {name: tensor}, _note_of_strides(tensor)
    if is_dtensor(tensor):
        parts, inner = parts_of(name, tensor.to_local(), meshes)
        note = {
            "mesh": meshes.number(tensor.device_mesh),
            "placements": [repr(placement) for placement in tensor.placements],
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "local": inner,
        }
        return parts, note
    if not hasattr(tensor, "__tensor_flatten__"):
        raise CannotBeKept(f"tensor subclass {class_name(type(tensor))} of {name} cannot be kept")
    attributes, context = tensor.__tensor_flatten__()
    found: dict[str, Any] = {}
    inner_notes = {}
    for attribute in attributes:
        parts, inner_notes[attribute] = parts_of(f"{name}.{attribute}", getattr(tensor, attribute), meshes)
        found |= parts
    note = {
        "class": class_name(type(tensor)),
        "inner": inner_notes,
        "context": context,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }
    return found, note


def only_part(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the only part of a plain tensor or a DTensor, and its *form*: all that `parts_of` and `spec` look at. To
    be called within `torch.no_grad`, where a DTensor gives its local tensor without autograd.

    Raises:
        OtherStructure: it is a tensor of another class, or a value of numpy.
    """
    if type(tensor) in _PLAIN_CLASSES and tensor.layout is torch.strided:
        return tensor, (tensor.dtype, tensor.shape, tensor.stride())
    if is_dtensor(tensor):
        part, form = only_part(tensor.to_local())
        return part, (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), form)
    raise OtherStructure


def class_name(kind: type) -> str:
    """Returns the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


class KnownTensors:
    """Meshes, placements and subclasses that this process has now, by what a note says of them.

    Nothing is imported or made by a name that stands in a file.

    Args:
        tensors: all tensors of the job's present state.
        classes: further classes that are admitted.
    """

    def __init__(self, tensors: Iterable[Any], classes: Iterable[Any] = ()) -> None:
        self._seen = Meshes()
        self._meshes: dict[str, Any] = {}
        """By text."""
        self._placements: dict[str, Any] = {}
        self._classes = {class_name(kind): kind for kind in classes if isinstance(kind, type)}
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.detach())
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import Replicate

            self._placements[repr(Replicate())] = Replicate()

    def _note(self, tensor: Any) -> None:
        if is_dtensor(tensor):
            self._meshes[self._seen.texts[self._seen.number(tensor.device_mesh)]] = tensor.device_mesh
            self._placements |= {repr(placement): placement for placement in tensor.placements}
            self._note(tensor.to_local())
        elif type(tensor) is not torch.Tensor:
            self._classes[class_name(type(tensor))] = type(tensor)
            for attribute in tensor.__tensor_flatten__()[0]:
                self._note(getattr(tensor, attribute))

    def assemble(self, name: str, note: Mapping[str, Any], parts: Iterator[Any], meshes: Sequence[str]) -> Any:
        """Returns a tensor made of its parts.

        Args:
            name: of the tensor, for errors.
            note: as from `parts_of`.
            parts: gives the parts in the order in which `parts_of` names them; those of this tensor are taken.
            meshes: by number, as in `Meshes.texts`.

        Raises:
            OtherState: the note names a mesh, a placement or a class that the job does not have now.
        """
        if "class" in note:
            return self._of_class(name, note, parts, meshes)
        if "is_array" in note:
            array = next(parts).numpy().copy()
            if note["is_array"]:
                return array
            return array[()]
        if "mesh" not in note:
            return _with_strides(next(parts), note)
        text = meshes[note["mesh"]]
        mesh = self._meshes.get(text)
        placements = [self._placements.get(text) for text in note["placements"]]
        if mesh is None or None in placements:
            raise OtherState(f"{name} lies on mesh {text} with {note['placements']}, which this job has not")
        return _distributed(self.assemble(name, note["local"], parts, meshes), mesh, placements, note)

    def _of_class(self, name: str, note: Mapping[str, Any], parts: Iterator[Any], meshes: Sequence[str]) -> Any:
        kind = self._classes.get(note["class"])
        if kind is None:
            raise OtherState(f"{name} is of class {note['class']}, which this job has not")
        inner = {attribute: self.assemble(name, one, parts, meshes) for attribute, one in note["inner"].items()}
        return kind.__tensor_unflatten__(inner, note["context"], torch.Size(note["shape"]), tuple(note["stride"]))  # type: ignore[attr-defined]


def _distributed(local: Any, mesh: Any, placements: Sequence[Any], note: Mapping[str, Any]) -> Any:
    """Returns a DTensor whose local shard stays where it is: in a file, for a mesh of GPUs.

    `DTensor.from_local` would copy it to the GPU, beside the model that is there already, and before it is known
    whether all ranks can read theirs. It leaves a shard on the device `meta` alone, so the shard takes the place of
    such a one.
    """
    from torch.distributed.tensor import DTensor

    shape, stride = torch.Size(note["shape"]), tuple(note["stride"])
    empty = torch.empty(local.shape, dtype=local.dtype, device="meta")
    outline = DTensor.from_local(empty, mesh, placements, run_check=False, shape=shape, stride=stride)
    attributes, context = outline.__tensor_flatten__()
    inner = {attribute: getattr(outline, attribute) for attribute in attributes}
    for attribute, value in inner.items():
        if isinstance(value, torch.Tensor):
            inner[attribute] = local
    return DTensor.__tensor_unflatten__(inner, context, shape, stride)


def _note_of_strides(tensor: Any) -> dict[str, Any]:
    """Returns the note about a plain tensor: its strides, unless its elements lie in the order of the indices.

    Fused optimizers walk through the memory of a parameter and of its moments at once, so both must lie alike.
    """
    if tensor.layout != torch.strided:
        return PLAIN  # `spec` refuses it
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            # Those of a copy: of a view with gaps, without the gaps.
            return {"strides": list(torch.empty_like(tensor, device="meta").stride())}
        expected *= max(size, 1)
    return PLAIN


def _with_strides(part: Any, note: Mapping[str, Any]) -> Any:
    """Returns a plain tensor as its note says that it lies in memory."""
    if "strides" not in note:
        return part
    return torch.empty_strided(part.shape, note["strides"], dtype=part.dtype).copy_(part)


def _is_numpy(value: Any) -> bool:
    """Returns whether a value is an array or a number of numpy that torch has a type for. Loads nothing."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    return bool(value.dtype.isnative and value.dtype.name in _NUMPY_TYPES)


def is_dtensor(tensor: Any) -> bool:
    """Returns whether a tensor is a DTensor. Loads nothing: where the module is not loaded, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
