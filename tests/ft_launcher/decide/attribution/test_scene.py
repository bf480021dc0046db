"""Where a rank is, by its stack, and the text about ranks that stand still: tables."""

from __future__ import annotations

from typing import Any

import pytest

from ft_client.inprocess.restart.call import Call
from ft_launcher.decide.attribution.scene import Activity, Scene, about_stall

C10D = "torch/distributed/distributed_c10d.py"
IN_BARRIER = [f"{C10D}:4800 in barrier", "torch/distributed/c10d_logger.py:83 in wrapper", "train.py:7 in step"]
IN_LOAD = ["python3.11/threading.py:331 in wait", "torch/utils/data/dataloader.py:1284 in _try_get_data",
           "train.py:9 in load", "train.py:20 in <module>"]  # fmt: skip


@pytest.mark.parametrize(
    "inner",
    [
        [f"{C10D}:2962 in all_reduce", "torch/distributed/c10d_logger.py:83 in wrapper"],
        ["torch/distributed/utils.py:286 in _verify_param_shape_across_processes",
         "torch/nn/parallel/distributed.py:1064 in __init__"],
        ["torch/nn/parallel/distributed.py:2100 in _sync_buffers"],
        ["torch/autograd/graph.py:829 in _engine_run_backward", "torch/autograd/__init__.py:347 in backward"],
        ["torch/_ops.py:1158 in __call__", "torch/distributed/_functional_collectives.py:140 in wait_tensor"],
        ["python3.11/threading.py:355 in wait", "torch/distributed/rpc/api.py:80 in wait_all"],
        ["torch/distributed/rendezvous.py:180 in _create_c10d_store", f"{C10D}:1700 in init_process_group"],
        [f"{C10D}:3000 in gather_object", "torch/distributed/checkpoint/utils.py:120 in gather_object"],
        ["ft_client/rank/agreement/roll_call.py:250 in wait", "ft_client/memory/memory_checkpoint.py:142 in load"],
    ],
)  # fmt: skip
def test_inside_any_collective_of_torch(inner: list[str]) -> None:
    assert Scene(0, [*inner, "train.py:3 in <module>"]).activity is Activity.COLLECTIVE


@pytest.mark.parametrize(
    "frames",
    [
        IN_LOAD,
        ["train.py:3 in main", "torch/distributed/elastic/multiprocessing/errors/__init__.py:355 in wrapper"],
        ["train.py:4 in hook", "torch/nn/parallel/distributed.py:1600 in forward", "train.py:9 in <module>"],
        ["torch/nn/modules/linear.py:125 in forward", "torch/distributed/fsdp/fully_sharded_data_parallel.py:864 in f"],
        ["torch/distributed/checkpoint/filesystem.py:400 in write_data", "train.py:30 in save"],
        ["torch/autograd/graph.py:12 in register_hook", "train.py:3 in f"],
        ["all_reduce.py:3 in barrier"],
    ],
)
def test_outside_of_all(frames: list[str]) -> None:
    assert Scene(0, frames).activity is Activity.OUTSIDE


@pytest.mark.parametrize(
    ("frames", "state", "place"),
    [
        ([], "T (stopped)", Activity.STOPPED),
        (IN_BARRIER, "t (tracing stop)", Activity.STOPPED),
        ([], "D (disk sleep)", Activity.IN_KERNEL),
        ([], "S (sleeping)", Activity.UNKNOWN),
        ([], "", Activity.UNKNOWN),
        ([], "R (running)", Activity.UNKNOWN),
    ],
)
def test_what_its_process_says(frames: list[str], state: str, place: Activity) -> None:
    assert Scene(0, frames, {"state": state}).activity is place


@pytest.mark.parametrize(
    ("frames", "state", "place"),
    [
        ([], "R (running)", Activity.OUTSIDE),
        ([], "S (sleeping)", Activity.UNKNOWN),
        ([], "T (stopped)", Activity.STOPPED),
        (IN_BARRIER, "R (running)", Activity.COLLECTIVE),
    ],
)
def test_a_rank_that_computes_and_does_not_answer_waits_for_no_rank(
    frames: list[str], state: str, place: Activity
) -> None:
    scene = Scene(0, frames, {"state": state, "silent": True})
    assert scene.activity is place
    assert scene.waits_for_no_rank is state.startswith("R")


@pytest.mark.parametrize(
    ("innermost", "process", "place"),
    [
        ("train.py:9 in exchange", {"state": "S (sleeping)", "wchan": "futex_do_wait"}, Activity.BLOCKED),
        ("megatron/p2p.py:9 in exchange", {"state": "S (sleeping)", "wchan": "futex_wait_queue"}, Activity.BLOCKED),
        ("train.py:9 in exchange", {"state": "S (sleeping)"}, Activity.BLOCKED),
        ("train.py:9 in load", {"state": "S (sleeping)", "wchan": "hrtimer_nanosleep"}, Activity.OUTSIDE),
        ("train.py:9 in load", {"state": "R (running)"}, Activity.OUTSIDE),
        (IN_LOAD[0], {"state": "S (sleeping)", "wchan": "futex_do_wait"}, Activity.OUTSIDE),
        (IN_BARRIER[0], {"state": "S (sleeping)", "wchan": "futex_do_wait"}, Activity.COLLECTIVE),
    ],
)
def test_a_wait_that_leaves_no_frame(innermost: str, process: dict[str, Any], place: Activity) -> None:
    assert Scene(0, [innermost, "train.py:20 in <module>"], process).activity is place


LOCK = {"state": "S (sleeping)", "wchan": "futex_do_wait"}


@pytest.mark.parametrize(
    ("innermost", "process", "place"),
    [
        ("train.py:9 in load", LOCK, Activity.LOCKED),
        ("train.py:9 in load", {"state": "S (sleeping)"}, Activity.LOCKED),
        ("train.py:9 in load", {"state": "R (running)"}, Activity.OUTSIDE),
        ("train.py:9 in load", {"state": "T (stopped)"}, Activity.STOPPED),
        (IN_LOAD[0], LOCK, Activity.OUTSIDE),
        (IN_BARRIER[0], LOCK, Activity.COLLECTIVE),
    ],
)
def test_a_line_that_waits_for_a_lock(innermost: str, process: dict[str, Any], place: Activity) -> None:
    scene = Scene(0, [innermost, "train.py:20 in <module>"], process, in_own_lock=True)
    assert scene.activity is place
    assert scene.waits_for_no_rank is (place is Activity.LOCKED or process["state"].startswith("R"))


@pytest.mark.parametrize(
    ("threads", "are_idle"),
    [
        ([], True),
        (["python3.11/threading.py:331 in wait", "ft_client/rank/monitoring/link.py:171 in attend"], True),
        (["python3.13t/concurrent/futures/thread.py:81 in _worker", "python3.11/selectors.py:415 in select"], True),
        (["python3.11/threading.py:331 in wait", "torch/distributed/distributed_c10d.py:2400 in recv"], False),
        (["train.py:50 in receive"], False),
        (["ft_client/inprocess/restart/store_watcher.py:116 in _await"], True),
        (["ft_client/inprocess/restart/store_watcher.py:99 in _follow"], False),
        (["?"], False),
        (None, False),
    ],
)
def test_whether_the_other_threads_are_idle(threads: list[str] | None, are_idle: bool) -> None:
    process = LOCK if threads is None else LOCK | {"other_threads": threads}
    assert Scene(0, ["train.py:9 in load"], process).others_are_idle is are_idle


def test_who_has_returned_to_the_wrapper() -> None:
    waits = "ft_client/inprocess/restart/call.py:295 in _next"
    assert Scene(0, [waits, "ft_client/inprocess/restart/call.py:196 in _announce"], LOCK).has_returned
    assert not Scene(0, ["train.py:9 in load", waits], LOCK).has_returned
    assert not Scene(0).has_returned
    assert {"_next", "_announce", "_wait", "_arrive"} <= vars(Call).keys()


@pytest.mark.parametrize("caller", ["_wait", "_arrive", "_account"])
def test_who_waits_in_the_wrapper(caller: str) -> None:
    """A spare, and a rank between two iterations: nobody in the function waits for them."""
    call = "ft_client/inprocess/restart/call.py"
    scene = Scene(0, [f"{call}:295 in _next", f"{call}:201 in {caller}"], LOCK)
    assert scene.activity is Activity.WRAPPER and not scene.has_returned


def test_the_own_frame_is_the_innermost_of_the_program() -> None:
    assert Scene(0, IN_LOAD).own_frame == "train.py:9 in load"
    assert Scene(0, IN_LOAD[:2]).own_frame == IN_LOAD[0]
    assert Scene(0).own_frame == ""


def stopped(rank: int) -> Scene:
    return Scene(rank, [], {"state": "T (stopped)"})


@pytest.mark.parametrize(
    ("scenes", "words"),
    [
        ([Scene(0, IN_BARRIER), Scene(1, IN_LOAD)],
         "rank 1 is in no call of torch.distributed at train.py:9 in load, and rank 0 waits in a collective for 5 s"),
        ([Scene(0, IN_BARRIER), stopped(1), Scene(2, IN_BARRIER)],
         "rank 1 is stopped (SIGSTOP or a debugger), and ranks 0, 2 wait in a collective for 5 s"),
        ([*(Scene(rank, IN_BARRIER) for rank in range(6)), Scene(6, IN_LOAD), stopped(7)],
         "rank 7 is stopped (SIGSTOP or a debugger); rank 6 is in no call of torch.distributed at train.py:9 in load, "
         "and ranks 0, 1, 2, 3 and 2 more wait in a collective for 5 s"),
        ([Scene(0, IN_BARRIER), Scene(1, IN_BARRIER)],
         "ranks 0, 1, all ranks of this node, wait in a collective for 5 s: train.py:7 in step; they are out of step, "
         "or a rank of another node is missing"),
        ([Scene(0, IN_BARRIER)],
         "rank 0 waits in a collective for 5 s: train.py:7 in step; they are out of step, "
         "or a rank of another node is missing"),
        ([Scene(0, IN_LOAD)],
         "the main thread of rank 0 ran no Python for 5 s: rank 0 is in no call of torch.distributed at "
         "train.py:9 in load"),
        ([Scene(0)], "the main thread of rank 0 ran no Python for 5 s: rank 0 gave no stack"),
        ([], "the main thread of rank 0 ran no Python for 5 s"),
    ],
)  # fmt: skip
def test_the_warning_names_first_whom_the_others_wait_for(scenes: list[Any], words: str) -> None:
    assert about_stall(scenes, 0, 5.0) == words
