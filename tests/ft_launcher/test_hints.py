"""Deaths to likely causes, by tables. The messages are those of torch."""

from __future__ import annotations

import pytest

from ft_launcher.hints import NodeEvidence, of_exception, of_exit, of_signal

NODE = NodeEvidence()
FULL = NodeEvidence(shm_free=3 << 20)
ROOMY = NodeEvidence(shm_free=1 << 40)
KILLS = NodeEvidence(oom_kills=2)
UNKNOWN = NodeEvidence(oom_kills=None)


@pytest.mark.parametrize(
    ("number", "node", "hint"),
    [
        (6, NODE, "collective that timed out or ranks out of step"),
        (7, FULL, "/dev/shm is full (3 MiB free)"),
        (7, ROOMY, "look at /dev/shm"),
        (7, NODE, "look at /dev/shm"),
        (9, KILLS, "out of memory: the kernel killed 2"),
        (9, NODE, "not by us: the kernel's memory killer (no kill counted here)"),
        (9, UNKNOWN, "not by us: the kernel's memory killer (its kills cannot be read here)"),
        (11, NODE, "native code"),
        (15, NODE, "outside the launcher"),
        (10, NODE, ""),
        (41, NODE, ""),
        (0, NODE, ""),
    ],
)
def test_signals(number: int, node: NodeEvidence, hint: str) -> None:
    found = of_signal(number, node)
    assert hint in found and bool(hint) == bool(found)


@pytest.mark.parametrize(
    ("code", "hint"),
    [(137, "a command in it died of SIGKILL: out of"), (134, "SIGABRT"), (1, ""), (128, ""), (255, "")],
)
def test_codes_of_a_shell(code: int, hint: str) -> None:
    found = of_exit(code, KILLS)
    assert hint in found and bool(hint) == bool(found)


WORKER = "DataLoader worker (pid 7) is killed by signal: {}. "
SHM = "It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."

NO_ROOM = "unable to write to file </torch_7_3>: No space left on device (28)"


@pytest.mark.parametrize(
    ("kind", "message", "node", "hint"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", NODE, "the GPU's memory is full"),
        ("torch.OutOfMemoryError", "", NODE, "the GPU's memory is full"),
        ("RuntimeError", "CUDA error: out of memory", NODE, "the GPU's memory is full"),
        ("RuntimeError", WORKER.format("Killed"), KILLS, "a loader worker died: out of memory"),
        ("RuntimeError", WORKER.format("Bus error") + SHM, FULL, "a loader worker died: /dev/shm is full"),
        ("RuntimeError", WORKER.format("Segmentation fault"), NODE, "a loader worker died: a fault in native code"),
        ("RuntimeError", WORKER.format("Nonsense"), NODE, ""),
        ("RuntimeError", NO_ROOM, FULL, "/dev/shm is full"),
        ("RuntimeError", NO_ROOM, NODE, "container's limit"),
        ("DistBackendError", "Watchdog caught collective operation timeout: WorkNCCL", NODE, "did not take part"),
        ("OSError", "[Errno 28] No space left on device: '/data/x'", FULL, ""),
        ("ValueError", "the batch is empty", FULL, ""),
    ],
)  # fmt: skip
def test_exceptions(kind: str, message: str, node: NodeEvidence, hint: str) -> None:
    found = of_exception(kind, message, node)
    assert hint in found and bool(hint) == bool(found)
