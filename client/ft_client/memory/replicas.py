"""Which objects have the same state on all ranks, and whether they really have.

Such a state (of DDP's module, and of an optimizer of its parameters) is *replicated*: of the ranks of a node only one
writes it, and the others read that rank's file. `replicated` says which objects should be so, and the ranks compare
`replicated_checksum`, or the cheaper `sample_checksum`.

Uses torch's underscored `_comm_hooks` of DDP.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ft_client.memory import checksum, tensor_parts
from ft_client.memory.kept_state import KnownStructures, collect, optimizer_parameters

_SAMPLED = 32
"""So many parameters of a module, or up to twice as many, are in a sample: each takes some microseconds, on a GPU ten
times as long."""
_SAMPLED_BYTES = 4096
"""Bytes of each of them."""


def replicated(objects: Mapping[str, Any], world: int) -> frozenset[str]:
    """Returns the names of the objects whose state is the same on all ranks: modules of DDP over the whole job, and
    optimizers of nothing but their parameters.

    Where DDP does not broadcast buffers, each rank has its own. Of one rank nothing is named: it has no other.
    """
    if world == 1:
        return frozenset()
    return alike(objects, world)


def alike(objects: Mapping[str, Any], world: int) -> frozenset[str]:
    """As `replicated`, but also in a job of one rank: what such a job has saved may be loaded by one with more."""
    parallel = sys.modules.get("torch.nn.parallel")
    if parallel is None:
        return frozenset()
    names = set()
    parameters: set[int] = set()
    for name, kept in objects.items():
        if isinstance(kept, parallel.DistributedDataParallel) and _is_alike_everywhere(kept, world):
            names.add(name)
            parameters |= {id(parameter) for parameter in kept.parameters()}
    for name, kept in objects.items():
        of_optimizer = {id(parameter) for parameter in optimizer_parameters(kept)}
        # ZeroRedundancyOptimizer has a part of the state on each rank; it is a subclass outside `torch.optim`.
        if of_optimizer and of_optimizer <= parameters and type(kept).__module__.startswith("torch.optim."):
            names.add(name)
    return frozenset(names)


def replicated_checksum(objects: Mapping[str, Any], names: frozenset[str]) -> int:
    """Returns a checksum of what must be the same on all ranks where these objects are replicated. Takes the time of a
    checksum, and on a GPU that of a copy of the state.

    Buffers do not count: DDP takes them from rank 0 at the beginning of each forward pass, and until then those of the
    ranks differ, as the running means of BatchNorm do.

    Raises:
        CannotBeKept: as for `collect`.
    """
    buffers = {
        f"{name}.{key}"
        for name in names
        if isinstance(objects[name], torch.nn.Module)
        for key, _ in objects[name].named_buffers()
    }
    state = collect({name: kept for name, kept in objects.items() if name in names}, frozenset(), KnownStructures())
    found = 0
    for path, part in state.parts.items():
        if path not in buffers and part.numel():
            found = checksum.crc32(tensor_parts.content_of(part), found)
    if not state.others:
        found = checksum.crc32(repr([kept["rest"] for kept in state.objects.values()]).encode(), found)
    return found


def sample_checksum(objects: Mapping[str, Any], names: frozenset[str]) -> int:
    """Returns a checksum of the beginnings of some parameters, which takes a fraction of a millisecond. `names` as for
    `replicated_checksum`.

    A step that only some ranks make, or each with its own gradients, changes nearly all parameters.
    """
    found = 0
    for name in sorted(names):
        if not isinstance(objects[name], torch.nn.Module):
            continue
        plain = [kept for kept in objects[name].parameters() if type(kept) is torch.nn.Parameter]
        for parameter in plain[:: max(1, len(plain) // _SAMPLED)]:
            if parameter.numel():
                beginning = tensor_parts.beginning_of(parameter.detach(), _SAMPLED_BYTES)
                found = checksum.crc32(tensor_parts.content_of(beginning), found)
    return found


def _is_alike_everywhere(module: Any, world: int) -> bool:
    """Returns whether a module of DDP should be the same on all ranks.

    It is not where DDP leaves parameters out, nor where a hook may do something else with the gradients than to take
    their mean over all ranks, as that of local SGD does.
    """
    if module.parameters_to_ignore or module._comm_hooks:
        return False
    return module.process_group.size() == world and (module.broadcast_buffers or not list(module.buffers()))
