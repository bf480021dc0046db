"""An agreed stop: on real ranks of gloo, alone without torch, beside loader workers, and with wrong arguments."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ft_client.preemption import DistributedSignalHandler, PreemptionGuard
from tests.client import preempted
from tests.client.rerun.ranks import Ranks
from tests.program import python

LIMIT_S = 240.0


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """The ranks of a world of a size; one that is alone has no process group."""
    there: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in there:
            there[world_size] = Ranks(tmp_path_factory.mktemp("group"), world_size)
        return there[world_size]

    yield of
    with ExitStack() as stack:
        for one in there.values():
            stack.callback(one.close)


@pytest.mark.parametrize(("world_size", "signalled"), [(1, 0), (2, 1), (4, 2)])
def test_one_rank_is_hit_and_all_stop_at_the_same_step(
    ranks_of: Callable[[int], Ranks], world_size: int, signalled: int
) -> None:
    told = ranks_of(world_size).run(preempted.asks, signalled=signalled, at=3, sig=signal.SIGTERM)
    for rank, one in enumerate(told):
        assert one["step"] == 3
        assert one["agreed"] == ([("all_reduce", 1)] * 4 if world_size > 1 else []), "one number per step"
        assert one["flags"] == [other == signalled for other in range(world_size)]
        assert one["released"] == [True, False] and one["restored"]
        received = ["Received signal 15, initiating graceful stop"] if rank == signalled else []
        assert one["lines"] == ["Signal handler installed for 15", *received]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_guard_saves_everywhere_and_leaves(ranks_of: Callable[[int], Ranks], world_size: int) -> None:
    told = ranks_of(world_size).run(preempted.guards, signalled=world_size - 1, at=2)
    assert [(one["saved"], one["code"]) for one in told] == [([2], 3)] * world_size
    assert told[0]["lines"][-1] == "exiting program after receiving SIGUSR1."


ALONE = """
import logging, os, signal, sys
from ft_client.preemption import PreemptionGuard
logging.basicConfig(level=logging.INFO, format="%(message)s")
with PreemptionGuard(lambda: print("saved")) as guard:
    for step in range(10):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        guard.check()
        print(step)
        assert "torch" not in sys.modules
"""


def test_a_real_time_signal() -> None:
    number = signal.SIGRTMIN + 2
    with pytest.raises(SystemExit), PreemptionGuard(sig=number) as guard:
        signal.raise_signal(number)
        with pytest.raises(RuntimeError, match=f"sig=signal {number} is installed already"):
            guard.__enter__()
        guard.check()
    assert signal.getsignal(number) is signal.SIG_DFL


def test_alone_and_without_torch() -> None:
    done = python(ALONE, limit_s=LIMIT_S)
    assert done.stdout.split() == ["0", "1", "2", "3", "saved"], done.stderr
    assert done.stderr.splitlines() == [
        "Signal handler installed for 15",
        "Received signal 15, initiating graceful stop",
        "exiting program after receiving SIGTERM.",
    ]


LOADERS = """
import os, signal, subprocess, time
from pathlib import Path
from torch.utils.data import DataLoader
from ft_client.preemption import DistributedSignalHandler

def pending(pid):
    mask = int(Path(f"/proc/{pid}/status").read_text().split("ShdPnd:")[1].split()[0], 16)
    return mask >> signal.SIGTERM - 1 & 1

class Pids(list):
    def __getitem__(self, index):
        return os.getpid()

def survives(for_dataloader, **more):
    with DistributedSignalHandler(exit_signal_handler_for_dataloader=for_dataloader) as handler:
        batches = iter(DataLoader(Pids(range(9)), batch_size=None, num_workers=1, prefetch_factor=1, **more))
        worker = next(batches)
        try:  # torch raises as soon as it hears of a worker's death, wherever this process is then
            subprocess.run(["sh", "-c", f"kill -TERM {worker}"], check=True)
            alive = [next(batches) for _ in range(5)] == [worker] * 5
        except RuntimeError:
            return False
        process = batches._workers[0]
        while pending(worker):  # a second signal would be lost in the first
            time.sleep(0.001)
        process.terminate()
        process.join()
        assert process.exitcode == 0 and not handler.should_stop()
        return alive

by_hand = DistributedSignalHandler().worker_init_fn()
print(survives(False), survives(True), survives(True, worker_init_fn=by_hand))
"""


def test_loader_workers_outlive_a_signal_but_not_their_parents() -> None:
    done = python(LOADERS, limit_s=LIMIT_S)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


def test_the_workers_function_can_travel() -> None:
    assert pickle.loads(pickle.dumps(PreemptionGuard().worker_init_fn())).args == (signal.SIGTERM,)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP, 0, 99, -1, "SIGTERM", True, None])
def test_signals_that_cannot_be_caught(sig: int) -> None:
    for kind in (lambda: DistributedSignalHandler(sig), lambda: PreemptionGuard(sig=sig)):
        with pytest.raises(ValueError, match=r"^sig=\S+ (cannot be caught|is not a signal)"):
            kind()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"exit_code": 256}, "exit_code"), ({"exit_code": None}, "exit_code"), ({"save": 3}, "save")],
)
def test_arguments_of_the_guard(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}="):
        PreemptionGuard(**arguments)  # type: ignore[arg-type]


def test_another_thread_is_refused() -> None:
    refused: list[str] = []

    def enter() -> None:
        try:
            DistributedSignalHandler().__enter__()
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=enter, name="loader")
    thread.start()
    thread.join()
    (text,) = refused
    assert "sig=SIGTERM" in text and "main thread" in text and "'loader'" in text


def test_twice_is_refused_and_again_is_not() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    handler = DistributedSignalHandler(signal.SIGUSR2)
    assert handler.release() is False
    with handler:
        with pytest.raises(RuntimeError, match="installed already"):
            handler.__enter__()
        signal.raise_signal(signal.SIGUSR2)
        assert handler.should_stop() and handler.signals_received() == [True]
    assert signal.getsignal(signal.SIGUSR2) is before
    with handler:
        assert not handler.should_stop()
    assert handler.release() is False


def test_what_save_raises_comes_out_and_the_handler_goes() -> None:
    def save() -> None:
        raise OSError("disk full")

    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(OSError, match="disk full"), PreemptionGuard(save, sig=signal.SIGUSR2) as guard:
        signal.raise_signal(signal.SIGUSR2)
        guard.check()
    assert signal.getsignal(signal.SIGUSR2) is before
