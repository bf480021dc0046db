"""NVIDIA's classes for local checkpoints, for one rank: where files lie, what is kept, and that nothing ends a
training."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import weakref
from collections.abc import Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_client.integrations.local_checkpoints import part_files, part_format
from ft_client.integrations.local_checkpoints.async_request import AsyncRequest
from ft_client.integrations.local_checkpoints.base_manager import CheckpointingException
from ft_client.integrations.local_checkpoints.group_utils import parse_group_sequence
from ft_client.integrations.local_checkpoints.local_manager import LocalCheckpointManager
from ft_client.integrations.local_checkpoints.state_dicts import BasicTensorAwareStateDict
from ft_client.integrations.local_checkpoints.strategies import CliqueReplicationStrategy
from ft_client.memory.background_work import BACKGROUND
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import StateTier
from rank_monitor.contract.processes import rank_progress
from rank_monitor.contract.wire.messages import StateLoaded
from tests.client.memory.conftest import Tell

Said = pytest.CaptureFixture[str]


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """The folder that the user's program names. It is not there yet."""
    return tmp_path / "user" / "local"


def state(value: float = 1.0, size: int = 1000) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict({"weight": torch.full((size,), value), "more": [{"bias": torch.ones(3)}, "text"]})


def value_of(manager: LocalCheckpointManager) -> float:
    loaded, ckpt_id = manager.load()
    assert ckpt_id == (manager.latest_iteration, 0, "")
    assert isinstance(loaded, BasicTensorAwareStateDict)
    return float(loaded.state_dict["weight"][0])


def files_of(manager: LocalCheckpointManager) -> list[str]:
    BACKGROUND.wait()
    return sorted(path.name for path in manager.local_ckpt_dir.iterdir())


def flip_a_byte(manager: LocalCheckpointManager, iteration: int) -> None:
    path = manager.local_ckpt_dir / part_format.file_name(iteration, 0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_parts_lie_in_the_launchers_folder_and_the_newest_is_kept(tell: Tell, user: Path) -> None:
    folder = tell()
    manager = LocalCheckpointManager(user)
    assert manager.find_latest() == -1
    for iteration in (5, 10):
        assert manager.save(state(iteration), iteration) is None
    assert manager.find_latest() == 10
    assert value_of(manager) == 10
    assert folder in manager.local_ckpt_dir.parents and not user.exists()
    assert files_of(manager) == ["iter_0000010_0_local.pt"]
    assert [mark.step for mark in memory_files.parts_marks(os.listdir(folder))] == [10]  # noqa: PTH208
    again = LocalCheckpointManager(user)
    assert again.find_latest() == 10 and value_of(again) == 10 and value_of(again) == 10
    assert LocalCheckpointManager(user, session_id="other").find_latest() == -1
    assert LocalCheckpointManager(user.with_name("other")).find_latest() == -1


def test_without_the_launcher_parts_lie_in_the_users_folder(user: Path) -> None:
    manager = LocalCheckpointManager(user, "session")
    manager.save(state(), 3)
    assert manager.local_ckpt_dir == user / "session" / "0"
    assert files_of(manager) == ["iter_0000003_0_local.pt"]
    assert LocalCheckpointManager(user, "session").find_latest() == 3


def test_where_the_launcher_has_no_folder_the_users_is_taken(tell: Tell, user: Path, capfd: Said) -> None:
    tell(refused="/dev/shm is read-only")
    manager = LocalCheckpointManager(user)
    manager.save(state(), 3)
    assert manager.local_ckpt_dir == user / "0" and manager.find_latest() == 3
    assert f"local checkpoints lie in {user}, as their program says: /dev/shm is read-only" in capfd.readouterr().err


def test_before_the_process_group_nothing_is_done(tell: Tell, user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="after torch"):
        LocalCheckpointManager(user).find_latest()


def test_a_torn_part_is_set_aside_and_later_removed(tell: Tell, user: Path, capfd: Said) -> None:
    tell()
    LocalCheckpointManager(user).save(state(), 5)
    manager = LocalCheckpointManager(user)
    flip_a_byte(manager, 5)
    assert manager.find_latest() == -1
    assert "iteration 5 is not used: rank 0: CheckpointingException: iter_0000005_0_local.pt has another checksum" in (
        capfd.readouterr().err
    )
    assert files_of(manager) == [part_format.torn_name(5, 0)]
    manager.save(state(), 6)
    assert files_of(manager) == ["iter_0000006_0_local.pt"]


class Moody:
    """An object that cannot be made again while `is_on` is set."""

    is_on = False

    def __reduce__(self) -> Any:
        return made, ()


def made() -> Moody:
    if Moody.is_on:
        raise KeyError("another version of the program")
    return Moody()


def test_a_part_that_cannot_be_read_now_is_not_used_and_stays(tell: Tell, user: Path, capfd: Said) -> None:
    tell()
    manager = LocalCheckpointManager(user)
    manager.save(BasicTensorAwareStateDict({"moody": Moody()}), 5)
    Moody.is_on = True
    try:
        assert manager.find_latest() == -1
        assert "iteration 5 is not used: rank 0: KeyError: 'another version of the program'" in capfd.readouterr().err
        with pytest.raises(CheckpointingException, match="find_latest"):
            manager.load()
    finally:
        Moody.is_on = False
    assert manager.find_latest() == 5
    manager.load()
    Moody.is_on = True
    try:
        with pytest.raises(CheckpointingException, match="rank 0: KeyError"):
            manager.load()
    finally:
        Moody.is_on = False
    assert manager.load()


def test_no_room_ends_no_training_and_is_tried_three_times(tell: Tell, user: Path, capfd: Said) -> None:
    tell(limit=100_000)
    manager = LocalCheckpointManager(user)
    manager.save(state(1), 1)
    for iteration in range(2, 8):
        manager.save(state(iteration, size=100_000), iteration)
    lines = [line for line in capfd.readouterr().err.splitlines() if "no local checkpoint was saved" in line]
    assert len(lines) == 3 == manager.failures
    assert "parts of 781.3 KiB do not fit into the" in lines[0] and "missing" in lines[0]
    assert lines[2].endswith("3 in a row were not: no more are saved") and "in a row" not in lines[1]
    assert manager.find_latest() == 1 and value_of(manager) == 1


def test_a_save_that_succeeds_ends_the_row(tell: Tell, user: Path) -> None:
    tell(limit=100_000)
    manager = LocalCheckpointManager(user)
    for iteration in range(1, 10):
        manager.save(state(iteration, size=100_000 if iteration % 3 else 10), iteration)
    assert manager.failures == 6 and manager.find_latest() == 9


def test_a_folder_that_is_gone_ends_no_training(tell: Tell, user: Path, capfd: Said) -> None:
    folder = tell()
    manager = LocalCheckpointManager(user)
    assert manager.find_latest() == -1
    folder.rename(folder.with_name("gone"))
    request = manager.save(state(), 1, is_async=True)
    assert request is not None
    request.execute_sync()
    assert "no local checkpoint was saved: rank 0: FileNotFoundError" in capfd.readouterr().err
    assert manager.find_latest() == -1


def test_another_program_in_the_rank_does_not_take_its_parts(
    tell: Tell, user: Path, monkeypatch: pytest.MonkeyPatch, capfd: Said
) -> None:
    tell()
    LocalCheckpointManager(user).save(state(), 5)
    monkeypatch.setattr("ft_client.integrations.local_checkpoints.parts_folder.claim", lambda folder: "it is taken")
    other = LocalCheckpointManager(user)
    assert other.find_latest() == -1
    other.save(state(), 6)
    assert "no local checkpoint was saved: rank 0: it is taken" in capfd.readouterr().err


def test_replication_is_refused_with_one_line(tell: Tell, user: Path, capfd: Said) -> None:
    tell()
    strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = LocalCheckpointManager(user, repl_strategy=strategy)
    manager.save(state(), 5)
    assert manager.find_latest() == 5 and manager.repl_strategy is None
    assert capfd.readouterr().err.count("local checkpoints are not replicated") == 1


def in_another_process(request: AsyncRequest, start: str) -> None:
    """What a program's queue does: calls the function elsewhere, and then the others here."""
    function, arguments, named = request.async_fn, request.async_fn_args, request.async_fn_kwargs
    process = torch.multiprocessing.get_context(start).Process(target=function, args=arguments, kwargs=named)
    process.start()
    process.join()
    assert process.exitcode == 0
    request.execute_finalize_fns()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_an_asynchronous_save_may_be_written_by_another_process(tell: Tell, user: Path, start: str) -> None:
    """`spawn`: as by a persistent worker, which gets the request as a pickle."""
    tell()
    manager = LocalCheckpointManager(user)
    kept = torch.full((1000,), 1.0)
    request = manager.save(BasicTensorAwareStateDict({"weight": kept}), 5, is_async=True)
    assert request is not None
    kept.fill_(99)
    order: list[str] = []
    request.add_finalize_fn(lambda: order.append("after"))
    in_another_process(request, start)
    assert order == ["after"] and manager.find_latest() == 5 and value_of(manager) == 1
    assert files_of(manager) == ["iter_0000005_0_local.pt"]


def test_a_request_has_the_fields_that_megatron_core_converts() -> None:
    assert tuple(AsyncRequest.__annotations__) == (
        *("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn", "is_frozen"),
    )
    frozen = AsyncRequest(print, (), [], {}).freeze()
    assert frozen.is_frozen
    with pytest.raises(RuntimeError):
        frozen.add_finalize_fn(print)


def test_a_save_while_another_is_written_is_left_out_and_counts_as_no_failure(
    tell: Tell, user: Path, capfd: Said
) -> None:
    tell()
    manager = LocalCheckpointManager(user)
    first = manager.save(state(1), 1, is_async=True)
    late = [manager.save(state(2), iteration, is_async=True) for iteration in range(2, 14)]
    assert first is not None
    for request in late:
        assert request is not None and callable(request.async_fn)
        request.add_finalize_fn(lambda: pytest.fail("the program counts upon a checkpoint that is not there"))
        pickle.dumps((request.async_fn, request.async_fn_args))
        in_another_process(request, "fork")
    in_another_process(first, "fork")
    assert capfd.readouterr().err.count("is left out: that of iteration 1 is still being written") == 2
    assert manager.find_latest() == 1 and manager.failures == 0
    manager.save(state(17), 17)
    assert manager.find_latest() == 17


def test_a_save_that_waits_in_the_queue_does_not_hold_up_the_next(tell: Tell, user: Path, capfd: Said) -> None:
    """The queue finalizes in order, and a checkpoint on disk before this one may take minutes."""
    tell()
    manager = LocalCheckpointManager(user)
    order: list[int] = []
    requests = []
    for iteration in (1, 2, 3):
        request = manager.save(state(iteration), iteration, is_async=True)
        assert request is not None
        request.add_finalize_fn(partial(order.append, iteration))
        request.async_fn(*request.async_fn_args)
        requests.append(request)
    assert files_of(manager) == ["iter_0000002_0_local.pt", "iter_0000003_0_local.pt"]
    for request in requests:
        request.execute_finalize_fns()
    assert order == [1, 2, 3] and manager.failures == 0 and "left out" not in capfd.readouterr().err
    assert files_of(manager) == ["iter_0000003_0_local.pt"] and manager.find_latest() == 3


def test_a_writer_that_dies_costs_its_save_only(tell: Tell, user: Path, capfd: Said) -> None:
    tell()
    manager = LocalCheckpointManager(user)
    manager.save(state(5), 5)
    request = manager.save(state(6), 6, is_async=True)
    assert request is not None
    request.add_finalize_fn(lambda: pytest.fail("the program counts upon a checkpoint that is not there"))
    (manager.local_ckpt_dir / part_format.dirty_name(6, 0, 16 * "0")).write_bytes(b"half")
    request.execute_finalize_fns()
    assert files_of(manager) == ["iter_0000005_0_local.pt"]
    assert "no local checkpoint was saved: iteration 6: rank 0: its part is not there" in capfd.readouterr().err
    assert manager.find_latest() == 5 and value_of(manager) == 5


def test_a_writer_that_outlives_its_rank_gives_no_name_to_a_later_save(tell: Tell, user: Path, capfd: Said) -> None:
    tell()
    manager = LocalCheckpointManager(user)
    old = manager.save(state(1), 5, is_async=True)
    assert old is not None
    again = LocalCheckpointManager(user)
    again.save(state(2), 5)
    old.async_fn(*old.async_fn_args)
    assert "iter_0000005_0_local.pt was written by another save in the meantime" in capfd.readouterr().err
    fresh = LocalCheckpointManager(user)
    assert fresh.find_latest() == 5 and value_of(fresh) == 2
    assert files_of(fresh) == ["iter_0000005_0_local.pt"]


class Unsendable:
    """What can be written, but not be sent to another process."""

    def __init__(self) -> None:
        self.no_pickle = lambda: None


@pytest.mark.parametrize("what", ["no pickle", "no room"])
def test_a_state_that_cannot_be_sent_to_a_worker_is_a_failed_save_and_no_request_that_never_ends(
    tell: Tell, user: Path, monkeypatch: pytest.MonkeyPatch, capfd: Said, what: str
) -> None:
    """A persistent worker gets the request by a queue, whose thread drops what cannot be pickled, without a sign."""
    tell()
    given = state(2)
    if what == "no pickle":
        given = BasicTensorAwareStateDict({"weight": torch.ones(3), "more": Unsendable()})
    else:
        monkeypatch.setattr("ft_client.integrations.local_checkpoints.parts_folder.SHARED_MEMORY", "/not/there")
    manager = LocalCheckpointManager(user)
    request = manager.save(given, 5, is_async=True)
    assert request is not None
    function, arguments = ForkingPickler.loads(ForkingPickler.dumps((request.async_fn, request.async_fn_args)))
    function(*arguments)
    request.execute_finalize_fns()
    said = capfd.readouterr().err
    assert "the state could not be sent to the process that writes it" in said
    assert {"no pickle": "lambda", "no room": "do not fit into the shared memory"}[what] in said
    assert manager.failures == 1 and manager.find_latest() == -1


def test_an_optimizer_in_a_file_beside_the_parts_is_never_mixed_with_them(tell: Tell, user: Path, capfd: Said) -> None:
    """As Megatron Bridge writes the state of a layer-wise distributed optimizer before each save."""
    tell()
    manager = LocalCheckpointManager(user)
    manager.save(state(20), 20)
    (manager.local_ckpt_dir / "layer_wise_optimizer_0.pt").write_bytes(b"of iteration 40")
    assert LocalCheckpointManager(user).find_latest() == -1
    manager.save(state(40), 40)
    assert "rank 0: the program keeps its optimizer's state in a file of its own (layer_wise_optimizer_0.pt)" in (
        capfd.readouterr().err
    )
    assert manager.find_latest() == -1 and manager.failures == 1


@pytest.mark.parametrize("is_launched", [True, False])
def test_parts_of_ranks_that_are_not_on_the_node_any_more_are_removed(
    tell: Tell, user: Path, is_launched: bool
) -> None:
    """In the launcher's folder: the user's may be one that nodes share."""
    if is_launched:
        tell(limit=20_000)
    manager = LocalCheckpointManager(user)
    gone = manager.local_ckpt_dir.with_name("8")
    gone.mkdir(mode=0o700, parents=True)
    (gone / part_format.file_name(3, 8)).write_bytes(bytes(8000))
    (gone / part_format.dirty_name(4, 8, 16 * "0")).write_bytes(bytes(8000))
    manager.save(state(5), 5)
    assert gone.exists() != is_launched
    for iteration in range(6, 10):
        manager.save(state(iteration), iteration)
    assert manager.failures == 0 and manager.find_latest() == 9


def test_a_first_save_of_a_program_that_did_not_look_says_what_it_removes(tell: Tell, user: Path, capfd: Said) -> None:
    tell()
    LocalCheckpointManager(user).save(state(1000), 1000)
    manager = LocalCheckpointManager(user)
    for iteration in (20, 40):
        manager.save(state(iteration), iteration)
    line = "has not looked for the local checkpoint of iteration 1000 (Megatron-LM looks only with --load)"
    assert capfd.readouterr().err.count(line) == 1
    assert manager.find_latest() == 40


def test_a_look_leaves_no_state_in_memory(tell: Tell, user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose checkpoint on disk is newer never loads it."""
    tell()
    manager = LocalCheckpointManager(user)
    manager.save(state(5), 5)
    seen: list[weakref.ref[Any]] = []

    read = part_files.read

    def read_and_watch(path: Path) -> Any:
        found = read(path)
        seen.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(part_files, "read", read_and_watch)
    assert manager.find_latest() == 5
    gc.collect()
    assert [found() for found in seen] == [None]


def test_a_disk_may_be_filled(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must stay free in memory need not on a disk of the user."""
    folder = "ft_client.integrations.local_checkpoints.parts_folder"
    mount = os.statvfs_result((4096, 4096, 1 << 30, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(f"{folder}.os.statvfs", lambda path: mount)
    monkeypatch.setattr(f"{folder}.tmpfs.kind_of", lambda path: "ext4")
    manager = LocalCheckpointManager(user)
    manager.save(state(5), 5)
    assert manager.find_latest() == 5 and manager.failures == 0


def test_a_state_that_cannot_be_copied_or_pickled_ends_no_training(tell: Tell, user: Path, capfd: Said) -> None:
    class Broken(BasicTensorAwareStateDict):
        def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
            raise RuntimeError("no memory on the host")

    tell()
    manager = LocalCheckpointManager(user)
    manager.save(BasicTensorAwareStateDict({"no pickle": lambda: None}), 1)
    request = manager.save(Broken({}), 2, is_async=True)
    assert request is not None and callable(request.async_fn)
    request.execute_sync()
    said = capfd.readouterr().err
    assert "iteration 1: rank 0: " in said and "iteration 2: rank 0: RuntimeError: no memory on the host" in said
    assert manager.failures == 2 and files_of(manager) == []


def test_a_training_that_went_back_leaves_no_newer_part(tell: Tell, user: Path) -> None:
    tell()
    LocalCheckpointManager(user).save(state(20), 20)
    manager = LocalCheckpointManager(user)
    manager.save(state(10), 10)
    assert manager.find_latest() == 10 and files_of(manager) == ["iter_0000010_0_local.pt"]


def test_the_launcher_is_told_what_is_loaded_and_what_saves_come_to(
    tell: Tell, user: Path, monkeypatch: pytest.MonkeyPatch, capfd: Said
) -> None:
    folder = tell(limit=100_000)
    told: list[StateLoaded] = []

    def post(message: StateLoaded) -> bool:
        told.append(message)
        return False

    monkeypatch.setattr("ft_client.integrations.local_checkpoints.parts_folder.tell", post)
    manager = LocalCheckpointManager(user)
    assert manager.find_latest() == manager.find_latest() == -1
    assert [(message.tier, message.step, message.reached) for message in told] == [(StateTier.NONE, 0, 0)]
    manager.save(state(5), 5)
    manager.save(state(6, size=100_000), 6)
    manager.save(state(7), 7)
    again = LocalCheckpointManager(user)
    assert again.find_latest() == 7 and len(told) == 1, "the program may have a newer one on disk"
    again.load()
    again.load()
    assert [(message.tier, message.step, message.reached) for message in told[1:]] == [(StateTier.MEMORY, 7, 0)]
    assert "the training goes on from step 7 in memory" in capfd.readouterr().err, "as nobody took the message"
    (noted,) = rank_progress.read_all(str(folder), os.listdir(folder)).values()  # noqa: PTH208
    assert (noted.step, noted.saves, noted.failed) == (7, 2, 1) and noted.cost_ns > 0 and noted.size > 4000


def test_a_state_that_the_launcher_has_set_aside_is_not_used_and_may_be_saved_again(tell: Tell, user: Path) -> None:
    folder = tell()
    LocalCheckpointManager(user).save(state(20), 20)
    (folder / memory_files.set_aside_name(20)).touch()
    assert memory_files.parts_marks(os.listdir(folder)) == []  # noqa: PTH208
    manager = LocalCheckpointManager(user)
    assert manager.find_latest() == -1 and files_of(manager) == []
    assert not (folder / memory_files.set_aside_name(20)).exists()
    manager.save(state(21), 20)
    again = LocalCheckpointManager(user)
    assert again.find_latest() == 20 and value_of(again) == 21


def test_a_negative_iteration_is_an_error(tell: Tell, user: Path) -> None:
    tell()
    with pytest.raises(CheckpointingException):
        LocalCheckpointManager(user).save(state(), -1)


def test_a_basic_state_is_taken_apart_and_put_together() -> None:
    given = state(3)
    tensors = given.pop_tensors()
    assert given.is_hollow and len(tensors) == 2
    hollow = pickle.loads(pickle.dumps(given))
    hollow.init_tensors()
    assert hollow.state_dict["weight"].shape == (1000,)
    given.insert_tensors(tensors)
    assert not given.is_hollow and given.state_dict["more"][0]["bias"] is tensors[1]
    before = given.state_dict["weight"]
    given.copy_tensors_to_cpu()
    assert given.state_dict["weight"] is not before and torch.equal(given.state_dict["weight"], before)
    given.restore_tensor_device()
    assert given.state_dict["weight"].device.type == "cpu"


@pytest.mark.parametrize(
    ("jump", "factor", "world", "groups"),
    [
        (1, 2, 4, [(0, 1), (2, 3)]),
        (2, 2, 4, [(0, 2), (1, 3)]),
        (2, 2, 8, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (1, 1, 2, [(0,), (1,)]),
    ],
)
def test_groups_of_ranks(jump: int, factor: int, world: int, groups: list[tuple[int, ...]]) -> None:
    assert parse_group_sequence(replication_jump=jump, replication_factor=factor, world_size=world) == groups


@pytest.mark.parametrize(("jump", "factor", "world"), [(0, 2, 4), (1, 0, 4), (2, 2, 6)])
def test_groups_that_do_not_divide_the_ranks_are_an_error(jump: int, factor: int, world: int) -> None:
    with pytest.raises(AssertionError):
        parse_group_sequence(jump, factor, world)


@pytest.fixture(autouse=True)
def no_children_are_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())  # of other tests in this process
    yield
    assert not set(multiprocessing.active_children()) - before
