"""One rank keeps its state in memory and goes on from it."""

from __future__ import annotations

import fractions
import gc
import os
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

import ft_client as ft
from ft_client.memory import memory_checkpoint, state_saves
from ft_client.memory.agreed_load import NotRestored
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.node_folder import read_settings
from ft_client.memory.rank_files import RankFiles
from rank_monitor.contract import env, memory_files
from rank_monitor.contract.memory_files import MemoryFiles, StateFile
from rank_monitor.contract.processes.rank_progress import progress_name
from rank_monitor.contract.wire.json_record import write_record
from tests.client.memory.conftest import Loader, Tell
from tests.program import clean_environment, run

STEPS = 12


class Training:
    """A small model with Adam, dropout, a schedule and data from three generators.

    Its weights after some steps depend on all of the kept state.
    """

    def __init__(self, **more: Any) -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.keep = ft.MemoryCheckpoint(model=self.model, optimizer=self.optimizer, schedule=self.schedule, **more)

    def run(self, start: int, end: int) -> None:
        for step in range(start, end):
            batch = torch.randn(4, 8) * random.random() + float(numpy.random.rand())
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.keep.step(step + 1)
        BACKGROUND.wait()

    def values(self) -> list[Any]:
        return [value.clone() for value in self.model.state_dict().values()]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.fixture
def undisturbed() -> list[Any]:
    """The weights of a training that nothing interrupts."""
    training = Training()
    training.run(0, STEPS)
    return training.values()


def names_in(folder: Path) -> list[str]:
    """All files but the locks and the rank's progress."""
    others = (memory_files.LOCK_NAME, memory_files.process_lock_name(""), progress_name(0))
    return [path.name for path in folder.iterdir() if path.name not in others]


def steps_in(folder: Path) -> list[int]:
    return [found.step for found in memory_files.complete_generations(names_in(folder))]


def test_a_training_goes_on_where_it_was(tell: Tell, undisturbed: list[Any]) -> None:
    folder = tell()
    first = Training()
    assert first.keep.load() == 0
    first.run(0, 7)
    assert steps_in(folder) == [7, 6, 5]
    second = Training()
    assert second.keep.load() == 7
    assert same(first.values(), second.values())
    second.run(7, STEPS)
    assert same(second.values(), undisturbed)
    assert first.keep.failures == second.keep.failures == 0


def test_without_a_launcher_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.MEMORY_FILES, raising=False)
    monkeypatch.chdir(tmp_path)
    training = Training()
    assert training.keep.load() == 0
    training.run(0, 2)
    assert names_in(tmp_path) == []


def test_a_launcher_without_a_folder_is_said_once(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tell(refused="/dev/null is no tmpfs")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for _ in range(2):
        training = Training()
        assert training.keep.load() == 0
        training.run(0, 3)
    assert names_in(here) == []
    assert capfd.readouterr().err == "ft_client: no state is kept in memory: /dev/null is no tmpfs\n"


def test_files_are_private_and_used_again(tell: Tell) -> None:
    folder = tell(keep=1)
    training = Training()
    training.keep.load()
    training.run(0, 2)
    inodes = {file.stat().st_ino for file in folder.glob("step-*")}
    assert len(inodes) == 2
    training.run(2, 9)
    assert {file.stat().st_ino for file in folder.glob("step-*")} == inodes
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert steps_in(folder) == [9, 8]


def test_the_safetensors_library_reads_the_files(tell: Tell) -> None:
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 3)
    (file,) = folder.glob("step-3_*")
    with safe_open(file, "pt") as content:
        assert content.metadata()["step"] == "3"
        assert torch.equal(content.get_tensor("model.0.weight"), training.model[0].weight)
        moment = training.optimizer.state[training.model[0].weight]["exp_avg"]
        assert torch.equal(content.get_tensor("optimizer.state.0.exp_avg"), moment)


def test_a_flipped_byte_anywhere_costs_one_generation(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 4)
    files = {file.name: file.read_bytes() for file in folder.glob("step-*")}
    (newest,) = folder.glob("step-4_*")
    for place in (3, 200, 4096, len(files[newest.name]) // 2, len(files[newest.name]) - 1):
        for old in folder.iterdir():
            old.unlink()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        damaged = bytearray(files[newest.name])
        damaged[place] ^= 4
        newest.write_bytes(damaged)
        again = Training()
        assert again.keep.load() == 3, place
        assert f"step 4 in memory is not used: {newest.name}: " in capfd.readouterr().err
        assert steps_in(folder) == [3, 2], "the damaged one is not offered again"


def test_all_generations_damaged_is_a_start_from_zero(tell: Tell) -> None:
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 4)
    for file in folder.glob("step-*"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    again = Training()
    before = again.values()
    assert again.keep.load() == 0
    assert same(again.values(), before)
    again.run(0, 5)
    assert steps_in(folder)[0] == 5


def test_a_file_with_another_files_name_is_refused(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 2)
    (file,) = folder.glob("step-2_*")
    file.rename(folder / file.name.replace("step-2_", "step-9_"))
    assert Training().keep.load() == 1
    assert "its header is of another file" in capfd.readouterr().err


def test_memory_that_is_not_newer_than_the_disk_is_not_used(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    tell()
    training = Training()
    training.keep.load()
    training.run(0, 5)
    again = Training()
    before = again.values()
    assert again.keep.load(newer_than=5) == 0
    assert same(again.values(), before)
    assert "step 5 in memory is not newer than the checkpoint on disk" in capfd.readouterr().err


def test_the_console_names_both_steps(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    tell()
    training = Training()
    training.keep.load()
    training.run(0, 5)
    assert Training().keep.load(newer_than=3) == 5
    told = "goes on from step 5 in memory (the checkpoint on disk has step 3)"
    assert told in capfd.readouterr().err


def test_files_of_later_steps_are_not_mixed_with_what_is_saved_now(tell: Tell) -> None:
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 8)
    again = Training()
    again.keep.load(newer_than=100)
    assert steps_in(folder) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda training: training.model.append(torch.nn.Linear(8, 8)), "model has other keys, such as 3."),
        (lambda training: setattr(training.model, "0", torch.nn.Linear(8, 9)), "model.0.weight is (8, 8)"),
        (lambda training: training.model.double(), "model.0.weight is (8, 8) of torch.float32 there"),
    ],
)
def test_the_state_of_another_model_is_not_loaded(
    tell: Tell, change: Callable[[Training], Any], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tell()
    training = Training()
    training.keep.load()
    training.run(0, 2)
    other = Training()
    change(other)
    before = other.values()
    assert other.keep.load() == 0
    assert same(other.values(), before)
    assert says in capfd.readouterr().err


def test_a_state_that_grows_and_shrinks_comes_back(tell: Tell) -> None:
    folder = tell(keep=1)
    loader = Loader({})
    keep = ft.MemoryCheckpoint(loader=loader)
    keep.load()
    for step, size in enumerate((10, 100_000, 20, 300_000, 5), start=1):
        loader.state = {"tensor": torch.full((size,), step), "list": list(range(size)), "text": "x" * size}
        keep.step(step)
        BACKGROUND.wait()
        assert steps_in(folder)[0] == step
        again = Loader({})
        other = ft.MemoryCheckpoint(loader=again)
        assert other.load() == step
        assert torch.equal(again.state.pop("tensor"), loader.state.pop("tensor"))
        assert again.state == loader.state
        keep = ft.MemoryCheckpoint(loader=loader)
        keep.load()
    assert keep.failures == 0


def test_a_folder_that_is_gone_never_ends_the_training(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 2)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    training.run(2, 8)
    told = capfd.readouterr().err
    assert told.count("which is tried again") == state_saves.MAX_FAILURES - 1
    assert told.count("no state is kept in memory from now on, after 3 saves that failed") == 1
    assert Training().keep.load() == 0


def test_a_limit_that_is_too_small_is_said_once(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell(limit=200_000)
    training = Training()
    training.keep.load()
    training.run(0, 3)
    told = capfd.readouterr().err
    assert told.count("do not fit into the 195.3 KiB that are left") == 1
    assert "--ft-memory-keep 1 would fit" in told
    assert list(folder.glob("step-*")) == []
    assert training.keep.failures == 1


def test_a_step_that_goes_backwards_is_said_and_not_saved(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 3)
    training.keep.step(1)
    BACKGROUND.wait()
    assert steps_in(folder) == [3, 2, 1]
    assert "step 1 follows step 3" in capfd.readouterr().err


def test_the_program_may_choose_the_interval(tell: Tell) -> None:
    folder = tell(interval=2)
    training = Training(interval=3)
    training.keep.load()
    training.run(0, 7)
    assert steps_in(folder) == [6, 3]
    with pytest.raises(ValueError, match="1 or more"):
        Training(interval=0)


def test_a_smaller_keep_removes_files(tell: Tell) -> None:
    folder = tell(keep=3)
    training = Training()
    training.keep.load()
    training.run(0, 5)
    assert steps_in(folder) == [5, 4, 3, 2]
    tell(keep=1)
    assert Training().keep.load() == 5
    assert steps_in(folder) == [5, 4]


def test_files_of_another_number_of_ranks_stay_until_the_job_has_its_own(
    tell: Tell, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tell()
    others = [StateFile(9, rank, 2, 2, "0a1b2c3d").name for rank in (0, 1)]
    for name in others:
        (folder / name).write_bytes(b"of two ranks")
    (folder / memory_files.unfinished_name(1, 0)).touch()
    training = Training()
    assert training.keep.load() == 0
    assert "step 9 in memory is not used" in capfd.readouterr().err
    assert names_in(folder) == others
    training.run(0, 1)
    assert set(others) < set(names_in(folder))
    training.run(1, 2)
    assert not set(others) & set(names_in(folder))
    assert steps_in(folder) == [2, 1]


def test_a_save_that_was_cut_off_leaves_no_generation(
    tell: Tell, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 5)

    class Cut(BaseException):
        """As the exception by which an in-process restart interrupts the training."""

    copy = torch.Tensor.copy_
    copied: list[Any] = []

    def cut(target: Any, source: Any) -> Any:
        copied.append(target)
        if len(copied) == 5:
            raise Cut
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", cut)
    with pytest.raises(Cut):
        training.run(5, 6)
    monkeypatch.undo()
    folder = tell()
    assert steps_in(folder) == [5, 4]
    again = Training()
    assert again.keep.load() == 5
    again.run(5, STEPS)
    assert same(again.values(), undisturbed)


def test_an_object_that_has_given_up_begins_anew_with_load(tell: Tell) -> None:
    """As in a restart in process, where other ranks may be new processes that have not given up."""
    tell(limit=1000)
    training = Training()
    training.keep.load()
    training.run(0, 3)
    folder = tell()
    assert training.keep.load() == 0
    training.run(3, 5)
    assert steps_in(folder) == [5, 4]


def test_only_the_object_that_was_loaded_last_saves(tell: Tell) -> None:
    folder = tell()
    first, second = Training(), Training()
    first.keep.load()
    first.run(0, 2)
    second.keep.load()
    first.run(2, 4)
    assert steps_in(folder) == [2, 1]


def test_a_step_before_the_load_is_said_once(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell()
    training = Training()
    training.run(0, 3)
    assert names_in(folder) == []
    assert capfd.readouterr().err.count("step() was called before load()") == 1
    training.keep.load()
    training.run(3, 5)
    assert steps_in(folder) == [5, 4]


@pytest.mark.parametrize("step", [5.0, numpy.float64(5), "5"])
def test_a_step_is_a_whole_number(tell: Tell, step: Any) -> None:
    """Else the files would get names that no load knows."""
    folder = tell()
    keep = ft.MemoryCheckpoint(loader=Loader({}))
    calls: list[Callable[[Any], Any]] = [keep.load, keep.step, ft.memory_folder, ft.latest_memory_folder]
    for call in calls:
        with pytest.raises(TypeError, match="integer"):
            call(step)
    assert names_in(folder) == []


def test_a_step_may_be_a_number_of_numpy_and_there_may_be_no_checkpoint_on_disk(tell: Tell) -> None:
    folder = tell()
    keep = ft.MemoryCheckpoint(loader=Loader({}))
    assert keep.load(newer_than=None) == 0
    keep.step(numpy.int64(5))  # type: ignore[arg-type]
    BACKGROUND.wait()
    assert steps_in(folder) == [5]
    assert ft.MemoryCheckpoint(loader=Loader({})).load(newer_than=None) == 5
    assert ft.latest_memory_folder(newer_than=None) is None


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"MemoryCheckpoint\(model=...\) has no state_dict"):
        ft.MemoryCheckpoint(model=object())
    with pytest.raises(TypeError, match="needs what it shall keep"):
        ft.MemoryCheckpoint()


def test_a_job_of_several_ranks_needs_its_process_group(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    tell()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="after torch\\.distributed\\.init_process_group"):
        Training().keep.load()


def test_a_process_group_of_one_rank_in_a_larger_job_keeps_nothing(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where each rank trains a model of its own."""
    folder = tell()
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        training = Training()
        assert training.keep.load() == 0
        training.run(0, 2)
    finally:
        dist.destroy_process_group()
    assert names_in(folder) == []
    assert "the default process group has 1 of the job's 2 ranks" in capfd.readouterr().err


class Refusing(Loader):
    """Does not take a state back once it is told so."""

    is_refusing = False

    def load_state_dict(self, state: Any) -> None:
        if self.is_refusing:
            raise ValueError("another number of workers")
        super().load_state_dict(state)


def test_a_state_that_an_object_refuses_ends_one_start_only(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    """The next start finds nothing in memory, and loads the checkpoint on disk."""
    folder = tell()
    training = Training()
    keep = ft.MemoryCheckpoint(model=training.model, loader=Refusing({"epoch": 1}))
    keep.load()
    for step in (1, 2):
        keep.step(step)
    BACKGROUND.wait()
    loader = Refusing({})
    loader.is_refusing = True
    again = ft.MemoryCheckpoint(model=Training().model, loader=loader)
    with pytest.raises(NotRestored, match="some of which were changed"):
        again.load()
    assert capfd.readouterr().err.count("is not used: ValueError: another number of workers") == 2
    assert steps_in(folder) == []
    assert ft.MemoryCheckpoint(model=training.model, loader=loader).load() == 0


def test_an_older_state_that_is_taken_is_used(tell: Tell) -> None:
    folder = tell()
    loader = Refusing({"epoch": 1})
    keep = ft.MemoryCheckpoint(loader=loader)
    keep.load()
    for step in (1, 2):
        loader.state = {"epoch": step}
        keep.step(step)
    BACKGROUND.wait()

    class Older(Loader):
        def load_state_dict(self, state: Any) -> None:
            if state["epoch"] == 2:
                raise ValueError("too new")
            super().load_state_dict(state)

    older = Older({})
    assert ft.MemoryCheckpoint(loader=older).load() == 1
    assert older.state == {"epoch": 1}
    assert steps_in(folder) == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_an_object_keeps_no_model_alive(tell: Tell, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A restart in process makes the new model before the new object is there."""
    tell()
    training = Training()
    training.keep.load()
    if fails:

        def fail(self: Any, file: Any, name: Any) -> None:
            raise OSError("on purpose")

        monkeypatch.setattr(RankFiles, "give_name", fail)
    training.run(0, 3)
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None


def test_the_user_may_want_no_state_in_memory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every call is without effect, also where there is no process group yet, and no line is said."""
    monkeypatch.setenv(env.MEMORY_FILES, write_record(MemoryFiles("", keep=2, limit=0)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    training = Training()
    assert training.keep.load() == 0
    training.run(0, 2)
    assert capfd.readouterr().err == ""


def test_a_state_in_memory_that_gives_up_frees_its_memory(tell: Tell) -> None:
    folder = tell()
    loader = Loader({"value": 1})
    keep = ft.MemoryCheckpoint(loader=loader)
    keep.load()
    for step in (1, 2):
        keep.step(step)
    loader.state = {"value": fractions.Fraction(1, 3)}
    for step in (3, 4):
        keep.step(step)
    assert steps_in(folder) == [2, 1]
    assert len(names_in(folder)) == 2


def test_a_program_that_a_rank_starts_leaves_the_ranks_files_alone(tell: Tell) -> None:
    """It has the rank's environment, and may be the same script."""
    folder = tell()
    training = Training()
    training.keep.load()
    training.run(0, 3)
    code = (
        "import torch, ft_client as ft\n"
        "keep = ft.MemoryCheckpoint(model=torch.nn.Linear(2, 2))\n"
        "print(keep.load())\n"
        "keep.step(9)\n"
    )
    own = {env.MEMORY_FILES: os.environ[env.MEMORY_FILES]}
    done = run([sys.executable, "-c", code], environ=clean_environment("WORLD_SIZE", **own), check=True)
    assert done.stdout == "0\n"
    assert "no state is kept in memory: the launcher has started another process for this rank" in done.stderr
    assert steps_in(folder) == [3, 2, 1]
    assert Training().keep.load() == 3


def test_a_state_that_is_set_aside_is_not_loaded_and_its_files_are_used_again(
    tell: Tell, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tell()
    first = Training()
    first.keep.load()
    first.run(0, 7)
    assert steps_in(folder) == [7, 6, 5]
    for name in (memory_files.set_aside_name(6), memory_files.no_save_name(9)):
        (folder / name).touch()
    second = Training()
    assert second.keep.load() == 5
    assert "nothing is saved in memory before step 9 is passed, where the job failed" in capfd.readouterr().err
    # The next `load`, as in a restart in process, must find what is saved from now on.
    assert memory_files.set_aside_from(names_in(folder)) is None
    assert steps_in(folder) == [5]
    second.run(5, 9)
    assert steps_in(folder) == [5], "the state that was loaded stays the newest one until the fault's step is passed"
    second.run(9, STEPS)
    assert steps_in(folder) == [12, 11, 10]
    assert len([name for name in names_in(folder) if name.endswith(".safetensors")]) == 3
    assert Training().keep.load() == STEPS


def test_a_block_before_the_load_does_not_bring_back_what_is_set_aside(tell: Tell) -> None:
    folder = tell()
    first = Training()
    first.keep.load()
    first.run(0, 7)
    (folder / memory_files.set_aside_name(6)).touch()
    assert ft.memory_folder.is_on()
    assert memory_files.set_aside_from(names_in(folder)) is None
    assert Training().keep.load() == 5


def test_where_all_states_are_set_aside_the_disk_is_next(tell: Tell) -> None:
    folder = tell()
    first = Training()
    first.keep.load()
    first.run(0, 3)
    (folder / memory_files.set_aside_name(1)).touch()
    second = Training()
    assert second.keep.load(newer_than=2) == 0
    assert steps_in(folder) == [] and memory_files.set_aside_from(names_in(folder)) is None


def test_the_mark_stays_where_a_load_comes_to_nothing(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start of the ranks must not find the bad state again."""
    folder = tell()
    first = Training()
    first.keep.load()
    first.run(0, 3)
    (folder / memory_files.set_aside_name(3)).touch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(memory_checkpoint, "read_settings_in_group", lambda caller: read_settings())
    assert Training().keep.load() == 0
    assert memory_files.set_aside_from(names_in(folder)) == 3
    assert steps_in(folder) == [2, 1]
