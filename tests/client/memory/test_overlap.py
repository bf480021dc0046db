"""Saves that overlap with the training: what is copied later, what waits for it, and what voids a save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ft_client as ft
from ft_client.memory import overlap
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.overlapped_copy import OverlappedCopy
from tests.client.memory.conftest import Tell
from tests.client.memory.test_memory_checkpoint import STEPS, Training, same, steps_in

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Gate:
    """Holds the copies behind the training up, from the next one on, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, opened = OverlappedCopy.run, threading.Event()

        def hold(copy: OverlappedCopy) -> None:
            opened.wait()
            run(copy)

        monkeypatch.setattr(OverlappedCopy, "run", hold)
        self._opened = opened

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def make_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Gate]]:
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate(monkeypatch))
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()


class Small:
    """A model of one layer and its optimizer, kept after each step."""

    def __init__(self, make_optimizer: MakeOptimizer, **more: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(20, 20)
        self.optimizer = make_optimizer(self.model.parameters())
        self.keep = ft.MemoryCheckpoint(model=self.model, optimizer=self.optimizer, **more)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 20)).square().mean().backward()

    def step(self, number: int) -> None:
        self.backward()
        self.optimizer.step()
        self.keep.step(number)

    def weight(self) -> Any:
        return self.model.weight.detach().clone()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def in_memory() -> Any:
    """The weight that the newest generation has, in a new process's place."""
    BACKGROUND.wait()
    again = Small(adamw)
    return again.keep.load(), again.weight()


def test_a_training_goes_on_where_it_was(tell: Tell) -> None:
    undisturbed = Training()
    undisturbed.run(0, STEPS)
    folder = tell()
    first = Training(overlap=True)
    first.keep.load()
    first.run(0, 7)
    assert steps_in(folder) == [7, 6, 5]
    second = Training(overlap=True)
    assert second.keep.load() == 7
    second.run(7, STEPS)
    assert same(second.values(), undisturbed.values())
    assert first.keep.failures == second.keep.failures == 0


@pytest.mark.parametrize(
    "make_optimizer",
    [
        adamw,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), amsgrad=True, capturable=False),
    ],
    ids=["adamw", "fused", "foreach", "sgd", "a rate that is a tensor"],
)
def test_the_optimizer_waits_until_its_tensors_are_copied(
    tell: Tell, make_gate: Callable[[], Gate], make_optimizer: MakeOptimizer
) -> None:
    tell()
    training = Small(make_optimizer, overlap=True)
    training.keep.load()
    training.step(1)
    BACKGROUND.wait()
    gate = make_gate()
    training.step(2)
    saved = training.weight()
    state = {key: value.clone() for key, value in training.optimizer.state[training.model.weight].items()}
    training.backward()
    stepping = threading.Thread(target=training.optimizer.step)
    stepping.start()
    stepping.join(0.05)  # it cannot end: whatever it had changed by now would be seen below
    assert torch.equal(training.weight(), saved)
    gate.open()
    stepping.join()
    assert not torch.equal(training.weight(), saved)
    BACKGROUND.wait()
    assert training.keep.failures == 0
    again = Small(make_optimizer)
    assert again.keep.load() == 2
    assert torch.equal(again.weight(), saved)
    assert all(torch.equal(again.optimizer.state[again.model.weight][key], value) for key, value in state.items())


def test_buffers_and_parameters_of_no_optimizer_are_copied_at_once(tell: Tell, make_gate: Callable[[], Gate]) -> None:
    tell()

    def training() -> Small:
        found = Small(lambda parameters: adamw(list(parameters)[:1]), overlap=True)  # all but the bias
        found.model.register_buffer("mean", torch.ones(20))
        return found

    first = training()
    first.keep.load()
    first.step(1)
    BACKGROUND.wait()
    gate = make_gate()
    first.step(2)
    saved = [value.clone() for value in first.model.state_dict().values()]
    first.model.mean.add_(1)
    first.model.bias.data.add_(1)
    gate.open()
    BACKGROUND.wait()
    second = training()
    assert second.keep.load() == 2
    assert same(list(second.model.state_dict().values()), saved)


@pytest.mark.parametrize("is_seen", [True, False], ids=["by torch", "unseen by torch"])
def test_a_change_before_the_optimizers_step_leaves_the_generation_before(
    tell: Tell, make_gate: Callable[[], Gate], is_seen: bool
) -> None:
    folder = tell()
    training = Small(adamw, overlap=True)
    training.keep.load()
    training.step(1)
    training.step(2)
    BACKGROUND.wait()
    before = training.weight()
    gate = make_gate()
    training.step(3)
    if is_seen:
        with torch.no_grad():
            training.model.weight.mul_(2)
    else:
        training.model.weight.data.mul_(2)
    gate.open()
    BACKGROUND.wait()
    assert steps_in(folder) == [2, 1]
    step, weight = in_memory()
    assert step == 2
    assert torch.equal(weight, before)


def test_a_program_that_changes_parameters_itself_gets_saves_that_copy_at_once(
    tell: Tell, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tell()
    training = Small(adamw, overlap=True)
    training.keep.load()
    of_copy = OverlappedCopy.run
    lock = threading.Lock()

    def late(copy: OverlappedCopy) -> None:
        with lock:
            of_copy(copy)

    monkeypatch.setattr(OverlappedCopy, "run", late)
    training.step(1)
    for number in range(2, 8):
        BACKGROUND.wait()
        with lock:
            training.keep.step(number)
            with torch.no_grad():
                training.model.weight.add_(1)
    BACKGROUND.wait()
    errors = capfd.readouterr().err
    assert "the state was not saved in memory, which is tried again: StateChanged: model.weight changed" in errors
    assert "saves in memory do not overlap with the training from now on: model.weight changed" in errors
    assert training.keep.failures == 2
    assert steps_in(folder)[0] == 7


def test_gradients_of_several_batches_and_a_step_that_is_left_out(tell: Tell) -> None:
    """`step` after each batch, the optimizer's step after each third one, and once not at all (GradScaler)."""
    folder = tell()
    training = Small(adamw, overlap=True)
    training.keep.load()
    for number in range(1, 13):
        training.backward()
        if number % 3 == 0 and number != 9:
            training.optimizer.step()
        training.keep.step(number)
    step, weight = in_memory()
    assert (step, training.keep.failures) == (12, 0)
    assert torch.equal(weight, training.weight())
    assert steps_in(folder)[0] == 12


def test_each_of_several_optimizers_waits(tell: Tell, make_gate: Callable[[], Gate]) -> None:
    tell()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.1) for layer in model]
    keep = ft.MemoryCheckpoint(model=model, one=optimizers[0], other=optimizers[1], overlap=True)
    keep.load()

    def backward() -> None:
        model(torch.randn(2, 4)).square().mean().backward()

    backward()
    for optimizer in optimizers:
        optimizer.step()
    keep.step(1)
    BACKGROUND.wait()
    gate = make_gate()
    keep.step(2)
    saved = [value.detach().clone() for value in model.parameters()]
    backward()
    threads = [threading.Thread(target=optimizer.step) for optimizer in reversed(optimizers)]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    assert same(saved, list(model.parameters()))
    gate.open()
    for thread in threads:
        thread.join()
    BACKGROUND.wait()
    assert keep.failures == 0
    assert keep.load() == 2
    assert same(saved, list(model.parameters()))


def test_a_new_start_in_the_process_waits_for_the_copy_and_takes_the_hooks_away(
    tell: Tell, make_gate: Callable[[], Gate]
) -> None:
    """As a restart in process in the middle of a copy: the save is whole, since nothing had changed."""
    tell()
    first = Small(adamw, overlap=True)
    first.keep.load()
    first.step(1)
    BACKGROUND.wait()
    gate = make_gate()
    first.step(2)
    threading.Timer(0.01, gate.open).start()
    second = Small(adamw, overlap=True)
    assert second.keep.load() == 2
    assert torch.equal(second.weight(), first.weight())
    first.backward()
    first.optimizer.step()
    second.step(3)
    step, weight = in_memory()
    assert step == 3
    assert torch.equal(weight, second.weight())


class Wrapped(torch.optim.Optimizer):
    """As wrappers do that are an Optimizer in name alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


class Own:
    """An optimizer of the user's own."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("make_optimizer", "reason"),
    [
        (lambda parameters: Wrapped(adamw(parameters)), "Wrapped, which calls no hook of torch.optim.Optimizer"),
        (Own, "Own, which calls no hook of torch.optim.Optimizer"),
        (lambda parameters: Loaderless(), "no torch.optim.Optimizer is among the objects"),
    ],
    ids=["wrapper", "own", "none"],
)
def test_what_calls_no_hook_is_refused_by_one_line_and_saved_at_once(
    tell: Tell, capfd: pytest.CaptureFixture[str], make_optimizer: Any, reason: str
) -> None:
    folder = tell()
    training = Small(make_optimizer, overlap=True)
    training.keep.load()
    for number in range(1, 4):
        training.keep.step(number)
    BACKGROUND.wait()
    errors = capfd.readouterr().err
    assert errors.count("saves in memory do not overlap with the training: ") == 1
    assert reason in errors
    assert steps_in(folder) == [3, 2, 1]


class Loaderless:
    """What has a state, and is no optimizer."""

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_the_wait_is_told_once() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = overlap.Overlap({"optimizer": optimizer})
    copy = OverlappedCopy()
    copy.run()
    hooks.begins(copy)
    optimizer.step()
    assert hooks.pop_blocked_s() > 0
    assert hooks.pop_blocked_s() == 0
    optimizer.step()
    assert hooks.pop_blocked_s() == 0
    hooks.begins(OverlappedCopy())
    hooks.close()
    optimizer.step()  # waits for nothing
