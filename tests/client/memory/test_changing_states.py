"""One object saves states whose structure stays, or changes in any way: each file has the state of its own step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ft_client as ft
from ft_client.memory import kept_state
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.kept_state import KnownStructures
from ft_client.memory.state_reader import StateReader
from rank_monitor.contract import memory_files
from tests.client.memory.conftest import Loader, Tell


def save_all(states: list[Any], **others: Any) -> None:
    """Saves each state by one object, which also has the `others`."""
    loader = Loader({})
    keep = ft.MemoryCheckpoint(loader=loader, **others)
    keep.load()
    for step, state in enumerate(states, start=1):
        loader.state = state
        keep.step(step)
    BACKGROUND.wait()
    assert keep.failures == 0


def saved(folder: Path, states: list[Any], present: Any) -> list[Any]:
    """The states as their files have them, after one object has saved them all. `present`: what the job has then."""
    save_all(states)
    files = [memory_files.state_file(path.name) for path in folder.glob("step-*")]
    found = []
    for file in sorted((file for file in files if file is not None), key=lambda file: file.step):
        reader = StateReader(folder, file, ())
        sources = {"loader": (reader.plain, reader.tensors)}
        again = kept_state.make_again({"loader": present}, sources, reader.plain, ())
        found.append(again.states["loader"])
    assert len(found) == len(states)
    return found


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def test_each_file_has_the_state_of_its_own_step(tell: Tell) -> None:
    folder = tell(keep=20)
    square = torch.arange(4.0).view(2, 2)
    states: list[Any] = [
        {"a": square, "n": 1, "list": [1, square + 1]},
        {"a": square * 2, "n": 2, "list": [2, square + 2]},
        {"a": square * 3, "n": None, "list": [2.5, square + 3]},
        {"a": square.t(), "n": 1, "list": [1, square]},
        {"a": square.t() * 2, "n": 1, "list": [1, square]},
        {"a": square.view(4), "n": 1, "list": [1, square]},
        {"a": square.to(torch.int32), "n": 1, "list": [1, square]},
        {"a": 7, "n": square, "list": [1, square]},
        {"n": square, "a": 7, "list": [1, square]},
        {"n": square, "a": 7, "list": [square, 1]},
        {"n": square, "a": 7, "list": [square, 1, [1, 2, 3]]},
        {"n": square, "a": 7, "list": [square, 1, [1, 2, 3, 4]]},
        {"n": square, "a": numpy.arange(3), "list": []},
        {"n": square, "a": numpy.arange(3) + 1, "list": []},
        {"n": square[:0], "a": "\0tensor 0", "list": []},
        {"n": square, "a": "text", "list": []},
    ]
    found = saved(folder, states, Loader({}))
    for one, state in zip(found, states, strict=True):
        assert is_same(one, state), state


def test_a_tensor_that_is_changed_in_place_is_saved_as_it_is_then(tell: Tell) -> None:
    """Also one that gets another memory, shape or type without being another object."""
    folder = tell(keep=9)
    tensor = torch.nn.Parameter(torch.zeros(4))
    expected = []
    loader = Loader({"tensor": tensor})
    keep = ft.MemoryCheckpoint(loader=loader)
    keep.load()
    values = [torch.ones(4), torch.full((4,), 2.0), torch.full((8,), 3.0), torch.full((4,), 4.0).bfloat16()]
    for step, value in enumerate(values, start=1):
        tensor.data = value
        expected.append(value.clone())
        keep.step(step)
    BACKGROUND.wait()
    assert keep.failures == 0
    for step in (4, 3, 2, 1):
        again = Loader({})
        assert ft.MemoryCheckpoint(loader=again).load() == step
        assert is_same(again.state["tensor"], expected[step - 1])
        (newest,) = folder.glob(f"step-{step}_*")
        newest.unlink()


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_distributed_tensors_of_changing_structure(tell: Tell, mesh: Any) -> None:
    folder = tell(keep=9)
    local = torch.arange(6.0).view(2, 3)
    states = [
        {"a": DTensor.from_local(local, mesh, [Shard(0)])},
        {"a": DTensor.from_local(local * 2, mesh, [Shard(0)])},
        {"a": DTensor.from_local(local * 3, mesh, [Replicate()])},
        {"a": DTensor.from_local(local.half(), mesh, [Shard(1)])},
        {"a": local},
    ]
    present = torch.nn.Module()
    for number, placement in enumerate((Shard(0), Shard(1))):
        parameter = torch.nn.Parameter(DTensor.from_local(local, mesh, [placement]))
        present.register_parameter(f"{number}", parameter)
    known = {"loader": Loader({}), "present": present}
    save_all(states, present=present)
    for step, state in enumerate(states, start=1):
        (path,) = folder.glob(f"step-{step}_*")
        file = memory_files.state_file(path.name)
        assert file is not None
        reader = StateReader(folder, file, ())
        sources = dict.fromkeys(known, (reader.plain, reader.tensors))
        found = kept_state.make_again(known, sources, reader.plain, ()).states["loader"]["a"]
        assert type(found) is type(state["a"])
        if isinstance(found, DTensor):
            assert found.placements == state["a"].placements
            found, expected = found.to_local(), state["a"].to_local()
        else:
            expected = state["a"]
        assert is_same(found, expected)


def test_each_mesh_is_written_once(tell: Tell, mesh: Any) -> None:
    """That of a large job has as many numbers as the job has ranks, and a model has thousands of tensors."""
    folder = tell()
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    state = {f"{number}": DTensor.from_local(torch.ones(2), mesh, [Shard(0)]) for number in range(9)}
    state["both"] = DTensor.from_local(torch.ones(2), other, [Shard(0), Replicate()])
    loaders = {"first": Loader(state), "second": Loader(state)}
    keep = ft.MemoryCheckpoint(**loaders)
    keep.load()
    keep.step(1)
    BACKGROUND.wait()
    (path,) = folder.glob("step-1_*")
    file = memory_files.state_file(path.name)
    assert file is not None
    plain = StateReader(folder, file, ()).plain
    assert [len(kept["meshes"]) for kept in plain["objects"].values()] == [2, 2]
    with safe_open(path, "pt") as content:
        notes = json.loads(content.metadata()["meshes"])
    assert notes["meshes"] == [[["dp"], [0]], [["dp", "tp"], [[0]]]]
    assert notes["tensors"]["first.8"] == {"mesh": 0, "placements": ["Shard(dim=0)"], "shape": [2]}
    assert notes["tensors"]["second.both"]["mesh"] == 1
    assert len(notes["tensors"]) == 20


def test_the_structure_is_the_same_object_as_long_as_only_values_change() -> None:
    known = KnownStructures()
    model = torch.nn.Linear(2, 2)
    loader = Loader({"epoch": 1, "order": numpy.arange(3)})
    first = kept_state.collect({"model": model, "loader": loader}, frozenset(), known)
    loader.state = {"epoch": 2, "order": numpy.arange(3) + 1}
    second = kept_state.collect({"model": model, "loader": loader}, frozenset(), known)
    assert second.structures == first.structures
    model.half()
    third = kept_state.collect({"model": model, "loader": loader}, frozenset(), known)
    assert third.structures[0] != first.structures[0]
    assert third.structures[1] == first.structures[1]
