"""Which values come back from memory as they were, which are refused, and that nothing in a file is run."""

from __future__ import annotations

import collections
import enum
import fractions
import importlib
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ft_client as ft
from ft_client.memory import kept_state, plain_state, safetensors_layout, tensor_parts
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.kept_state import LoadedState
from ft_client.rank import rng
from rank_monitor.contract import memory_files
from tests.client.memory.conftest import Loader, Tell


def steps_in(folder: Path) -> list[int]:
    return [found.step for found in memory_files.complete_generations(path.name for path in folder.iterdir())]


def kept(state: Any, empty: Any, **more: Any) -> Any:
    """The state as another process would get it back."""
    first = ft.MemoryCheckpoint(loader=Loader(state), **more)
    first.load()
    first.step(1)
    BACKGROUND.wait()
    loader = Loader(empty)
    assert ft.MemoryCheckpoint(loader=loader, **more).load() == 1
    return loader.state


TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2),
    *(torch.float8_e4m3fn, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
    *(torch.uint32, torch.uint64, torch.bool),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_of_every_type_come_back(tell: Tell, dtype: Any) -> None:
    tell()
    tensor = torch.arange(6).to(dtype)
    state = {"whole": tensor, "turned": tensor.view(2, 3).t(), "one": tensor[1], "none": tensor[:0]}
    found = kept(state, {})
    for name, value in state.items():
        assert found[name].dtype == dtype
        assert found[name].shape == value.shape
        assert found[name].tolist() == value.tolist()


def test_what_is_no_tensor_comes_back(tell: Tell) -> None:
    tell()
    state = {"text": "\0tensor 0", 3: [1, (2.5, None)], "bytes": b"\0", "large": 1 << 80, "": {"nested": True}}
    assert kept(state, {}) == state


def test_a_type_that_is_not_safe_ends_the_saves_and_names_its_place(
    tell: Tell, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tell()
    keep = ft.MemoryCheckpoint(loader=Loader({"epoch": 1, "part": fractions.Fraction(1, 3)}))
    keep.load()
    for step in (1, 2, 3):
        keep.step(step)
    assert keep.failures == 1
    assert steps_in(folder) == []
    assert "loader.part is a fractions.Fraction, which cannot be read back safely" in capfd.readouterr().err


def test_a_later_key_that_is_not_safe_ends_the_saves_and_names_its_place(
    tell: Tell, capfd: pytest.CaptureFixture[str]
) -> None:
    """A state whose keys cannot be read back never becomes the newest."""
    folder = tell()
    loader = Loader({"counts": {}, "ready": {3: 1}})
    keep = ft.MemoryCheckpoint(loader=loader)
    keep.load()
    keep.step(1)
    loader.state = {"counts": {}, "ready": {numpy.int64(3): 1}}
    for step in (2, 3):
        keep.step(step)
    assert keep.failures == 1
    assert steps_in(folder) == [1]
    assert "key 3 of loader.ready is a numpy.int64, which cannot be read back safely" in capfd.readouterr().err


def test_keys_of_basic_types_come_back(tell: Tell) -> None:
    tell()
    state: Any = {"counts": {8: 2, 2.5: 3, None: 4, b"c": 5, ("d", 6): 7, True: torch.ones(2)}}
    found = kept(state, {})
    assert torch.equal(found["counts"].pop(True), state["counts"].pop(True))
    assert found == state


def test_a_type_that_the_user_admits_comes_back(tell: Tell) -> None:
    tell()
    state = {"part": fractions.Fraction(1, 3)}
    assert kept(state, {}, safe_types=[fractions.Fraction]) == state


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_run(tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tell()
    keep = ft.MemoryCheckpoint(loader=Loader({"value": 1}))
    keep.load()
    trap = tmp_path / "trap"
    monkeypatch.setattr(plain_state, "dump", lambda state: pickle.dumps(Harmful(trap), protocol=2))
    monkeypatch.setattr(plain_state, "check_readable", lambda *of: None)
    keep.step(1)
    BACKGROUND.wait()
    assert steps_in(folder) == [1]
    assert ft.MemoryCheckpoint(loader=Loader({})).load() == 0
    assert not trap.exists()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(2, 2).to_sparse(), "tensor loader.value of torch.float32, torch.sparse_coo on cpu cannot be kept"),
        (torch.zeros(2, device="meta"), "tensor loader.value of torch.float32, torch.strided on meta cannot be kept"),
        (torch.zeros(2, dtype=torch.complex128), "tensor loader.value of torch.complex128"),
        (torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})), "tensor subclass"),
    ],
)
def test_a_tensor_that_cannot_be_kept_ends_the_saves(
    tell: Tell, tensor: Any, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tell()
    keep = ft.MemoryCheckpoint(loader=Loader({"value": tensor}))
    keep.load()
    for step in (1, 2, 3, 4):
        keep.step(step)
    assert keep.failures == 1
    told = capfd.readouterr().err
    assert told.count("no state is kept in memory") == 1
    assert says in told


def test_a_header_that_no_reader_accepts_ends_the_saves(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tell()
    monkeypatch.setattr(safetensors_layout, "MAX_HEADER_BYTES", 1000)
    keep = ft.MemoryCheckpoint(loader=Loader({"value": torch.zeros(2)}))
    keep.load()
    for step in (1, 2, 3):
        keep.step(step)
    assert keep.failures == 1
    assert steps_in(folder) == []
    assert "no state is kept in memory: the header would have 4096 bytes" in capfd.readouterr().err


def test_tensors_lie_in_memory_as_they_did(tell: Tell) -> None:
    tell()
    state = {
        "channels last": torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one channel": torch.ones(2, 1, 4, 4).to(memory_format=torch.channels_last),
        "turned": torch.arange(6).view(2, 3).t(),
        "with gaps": torch.arange(20).view(4, 5)[:, :3],
        "plain": torch.ones(2, 3),
    }
    found = kept(state, {})
    for name, value in state.items():
        assert torch.equal(found[name], value), name
        assert found[name].stride() == value.clone().stride(), name


class Convolution:
    """A training of which each tensor lies in memory by channels, with an optimizer that relies on it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.keep = ft.MemoryCheckpoint(model=self.model, optimizer=self.optimizer)

    def run(self, start: int, end: int) -> Any:
        for step in range(start, end):
            self.optimizer.zero_grad()
            self.model(torch.randn(2, 3, 5, 5)).square().mean().backward()
            self.optimizer.step()
            self.keep.step(step + 1)
        BACKGROUND.wait()
        return self.model.weight.detach().clone()


def test_a_fused_optimizer_goes_on_with_its_own_moments(tell: Tell) -> None:
    expected = Convolution().run(0, 6)
    tell()
    first = Convolution()
    first.keep.load()
    first.run(0, 3)
    second = Convolution()
    assert second.keep.load() == 3
    moment = second.optimizer.state[second.model.weight]["exp_avg"]
    assert moment.stride() == second.model.weight.stride()
    assert torch.equal(second.run(3, 6), expected)


@pytest.mark.parametrize(
    "value",
    [
        *(numpy.int64(-7), numpy.float64(0.1), numpy.float32(0.1), numpy.bool_(True), numpy.uint16(65535)),
        *(numpy.complex64(1 + 2j), numpy.array(3), numpy.zeros((0, 2)), numpy.arange(6).reshape(2, 3)),
        *(numpy.arange(6)[::-2], numpy.arange(6, dtype=">i4").astype("i4")),
    ],
    ids=repr,
)
def test_values_of_numpy_come_back(tell: Tell, value: Any) -> None:
    """A sampler's or a loader's state is full of them, and torch's weights-only reader admits none."""
    tell()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = kept({"epoch": value, "list": [1, value]}, {})
    for one in (found["epoch"], found["list"][1]):
        assert type(one) is type(value)
        assert one.dtype == value.dtype
        assert numpy.array_equal(one, value)
    assert found["list"][0] == 1


class Mode(enum.Enum):
    TRAIN = 1


@pytest.mark.parametrize(
    "value",
    [fractions.Fraction(1, 3), Mode.TRAIN, range(3)],
    ids=lambda value: type(value).__name__,
)
def test_the_line_about_a_type_names_all_that_must_be_admitted(
    tell: Tell, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    tell()
    keep = ft.MemoryCheckpoint(loader=Loader({"value": value}))
    keep.load()
    keep.step(1)
    told = re.search(r"safe_types=\[(.*?)\]", capfd.readouterr().err)
    assert told is not None
    admitted = []
    for name in told[1].split(", "):
        module, _, attribute = name.rpartition(".")
        admitted.append(getattr(importlib.import_module(module), attribute))
    assert kept({"value": value}, {}, safe_types=admitted) == {"value": value}


class Counts(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [collections.defaultdict(list, a=[1]), collections.deque([1]), Counts(a=1)],
    ids=lambda value: type(value).__name__,
)
def test_the_line_about_a_type_that_torchs_reader_never_makes_says_so(
    tell: Tell, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    tell()
    keep = ft.MemoryCheckpoint(loader=Loader({"value": value}))
    keep.load()
    keep.step(1)
    told = capfd.readouterr().err
    assert "no type that is admitted changes that" in told
    assert "safe_types" not in told


def test_what_the_user_has_admitted_stays_admitted(tell: Tell) -> None:
    tell()
    with torch.serialization.safe_globals([fractions.Fraction]):
        assert kept({"part": fractions.Fraction(1, 3)}, {}, safe_types=[fractions.Fraction])
        assert fractions.Fraction in torch.serialization.get_safe_globals()
    assert fractions.Fraction not in torch.serialization.get_safe_globals()


class Keeper(torch.nn.Module):
    """Keeps the tensors that it gets, as layers with quantised weights do, and has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))
        self.extra: Any = {"scale": torch.zeros(8)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.weight = torch.nn.Parameter(state[f"{prefix}weight"])
        self.set_extra_state(state[f"{prefix}_extra_state"])


class Versioned(torch.nn.Linear):
    """Takes a state without a version for one of an old release, as many modules do."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}renamed"] = state.pop(f"{prefix}weight")
        super()._load_from_state_dict(state, prefix, metadata, *more)


def test_a_module_gets_its_version_back(tell: Tell) -> None:
    tell()
    first = torch.nn.Sequential(torch.nn.Flatten(), Versioned(3, 3))
    keep = ft.MemoryCheckpoint(model=first)
    keep.load()
    keep.step(1)
    BACKGROUND.wait()
    second = torch.nn.Sequential(torch.nn.Flatten(), Versioned(3, 3))
    assert ft.MemoryCheckpoint(model=second).load() == 1
    assert torch.equal(second[1].weight, first[1].weight)


class Scaled(torch.nn.Linear):
    """Has an extra state that is a tensor of bytes, as the scales of fp8: the longer, the longer it has trained."""

    scales = torch.empty(0, dtype=torch.uint8)

    def get_extra_state(self) -> Any:
        return self.scales

    def set_extra_state(self, state: Any) -> None:
        self.scales = state


def test_an_extra_state_of_another_size_comes_back(tell: Tell) -> None:
    tell()
    first, second = Scaled(3, 3), Scaled(3, 3)
    first.scales = torch.arange(7, dtype=torch.uint8)
    keep = ft.MemoryCheckpoint(model=first)
    keep.load()
    keep.step(1)
    BACKGROUND.wait()
    assert ft.MemoryCheckpoint(model=second).load() == 1
    assert second.scales.tolist() == list(range(7))
    assert torch.equal(second.weight, first.weight)


def test_a_module_that_keeps_what_it_gets_has_no_view_into_a_file(tell: Tell) -> None:
    """The file is written again by a later save."""
    folder = tell()
    first = Keeper()
    keep = ft.MemoryCheckpoint(model=first)
    keep.load()
    for step in (1, 2, 3):
        first.weight.data.fill_(step)
        first.extra["scale"].fill_(step)
        keep.step(step)
    BACKGROUND.wait()
    second = Keeper()
    assert ft.MemoryCheckpoint(model=second).load() == 3
    for file in folder.glob("step-*"):
        with file.open("r+b") as content:
            content.write(b"\xff" * file.stat().st_size)
    assert second.weight.tolist() == second.extra["scale"].tolist() == [3.0] * 8


def test_an_optimizer_on_another_device_copies_its_state_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy before that would need twice as much of the host's memory as the model has. The device `meta` stands for a
    GPU."""
    parameter = torch.nn.Parameter(torch.zeros(8, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8)}
    state = {"state": {0: moments}, "param_groups": optimizer.state_dict()["param_groups"]}
    copied: list[Any] = []

    def copy_of(tensor: Any) -> Any:
        copied.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(tensor_parts, "copy_of", copy_of)
    kept_state.give_back({"optimizer": optimizer}, LoadedState({"optimizer": state}, rng.to_json(rng.save())))
    assert [id(tensor) for tensor in copied] == [id(moments["step"])]
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"
    assert optimizer.state[parameter]["step"].item() == 3


def test_an_object_that_keeps_what_it_gets_has_no_view_into_a_file(tell: Tell) -> None:
    folder = tell()
    large = torch.randn(2, 1_000_003)
    expected = {"large": large.clone(), "turned": large.t().clone(), "small": torch.arange(3), "none": torch.empty(0)}
    keep = ft.MemoryCheckpoint(loader=Loader(expected))
    keep.load()
    keep.step(1)
    BACKGROUND.wait()
    loader = Loader({})
    assert ft.MemoryCheckpoint(loader=loader).load() == 1
    for file in folder.glob("step-*"):
        with file.open("r+b") as content:
            content.write(b"\xff" * file.stat().st_size)
    assert loader.state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loader.state[name], value), name


@pytest.mark.parametrize("flipped", [0.1, 0.5, 0.9])
def test_no_object_gets_anything_of_a_damaged_file(tell: Tell, flipped: float) -> None:
    folder = tell()
    keep = ft.MemoryCheckpoint(loader=Loader({"large": torch.ones(2_000_000)}), model=torch.nn.Linear(9, 9))
    keep.load()
    keep.step(1)
    BACKGROUND.wait()
    (path,) = folder.glob("step-1_*")
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * flipped))
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    loader, model = Loader({}), torch.nn.Linear(9, 9)
    before = model.weight.detach().clone()
    assert ft.MemoryCheckpoint(loader=loader, model=model).load() == 0
    assert loader.state == {}
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.arange(6).view(2, 3), (2, 3)),
        (torch.arange(60).view(4, 3, 5), (1, 3, 5)),
        (torch.arange(100), (15,)),
        (torch.arange(600).view(2, 300).t(), (7, 2)),
        (torch.arange(600).view(300, 2).t(), (15,)),
        (torch.arange(3.0)[1], ()),
        (torch.empty(0, 5), (0, 5)),
    ],
)
def test_the_beginning_of_a_tensor_is_a_view(tensor: Any, expected: tuple[int, ...]) -> None:
    beginning = tensor_parts.beginning_of(tensor, 120)
    assert beginning.shape == expected
    assert beginning.data_ptr() == tensor.data_ptr()
    assert torch.equal(beginning.flatten(), tensor.flatten()[: beginning.numel()])


def test_a_tensor_may_have_any_name(tell: Tell) -> None:
    tell()
    state = {"mesh": torch.ones(2), "class": torch.zeros(2), "strides": torch.ones(1)}
    assert kept(state, {}).keys() == state.keys()


class TwoPlanes(torch.Tensor):
    """A subclass that holds two tensors, as quantised weights do."""

    @staticmethod
    def __new__(cls, high: Any, low: Any) -> TwoPlanes:
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype)

    def __init__(self, high: Any, low: Any) -> None:
        self.high = high
        self.low = low

    def __tensor_flatten__(self) -> Any:
        return ["high", "low"], {"scale": 2}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> TwoPlanes:
        assert context == {"scale": 2}
        return cls(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(function(args[0].high), function(args[0].low))
        raise NotImplementedError(function)


def test_a_tensor_subclass_comes_back_where_its_class_is_admitted(tell: Tell) -> None:
    tell()
    tensor = TwoPlanes(torch.arange(4.0), torch.ones(4))
    found = kept({"value": tensor}, {}, safe_types=[TwoPlanes])
    assert isinstance(found["value"], TwoPlanes)
    assert torch.equal(found["value"].high, tensor.high)
    assert torch.equal(found["value"].low, tensor.low)


def test_a_tensor_subclass_that_the_job_does_not_have_is_not_loaded(
    tell: Tell, capfd: pytest.CaptureFixture[str]
) -> None:
    tell()
    tensor = TwoPlanes(torch.arange(4.0), torch.ones(4))
    first = ft.MemoryCheckpoint(loader=Loader({"value": tensor}))
    first.load()
    first.step(1)
    BACKGROUND.wait()
    assert ft.MemoryCheckpoint(loader=Loader({})).load() == 0
    assert "TwoPlanes, which this job has not" in capfd.readouterr().err
