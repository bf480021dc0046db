"""Exceptions to class and hint, by a table. The messages are those of Python, torch, NCCL, gloo and CUDA."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ft_launcher.decide.attribution import error_text, known_errors
from ft_launcher.decide.attribution.fault import FaultClass
from ft_launcher.decide.attribution.hints import NodeEvidence
from ft_launcher.decide.attribution.known_errors import is_about_peers, of_exception
from rank_monitor import stacks
from rank_monitor.contract.wire.messages import RankException
from tests.ports import free_port

USER, HANG, HARDWARE, MEMORY = FaultClass.USER_ERROR, FaultClass.HANG, FaultClass.HARDWARE, FaultClass.MEMORY
TOLD, AROUND, UNSURE = FaultClass.PREEMPTION, FaultClass.INFRASTRUCTURE, FaultClass.UNKNOWN

NODE = NodeEvidence()
FULL = NodeEvidence(shm_free=3 << 20)
KILLS = NodeEvidence(oom_kills=2)

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.2 GiB is free."
)
NO_HOST_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
WORKER = "DataLoader worker (pid 7) is killed by signal: {}. "
SHM = "It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
NO_ROOM = "unable to write to file </torch_7_3>: No space left on device (28)"
IN_WORKER = (
    "Caught {0} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    '  File "/a/worker.py", line 309, in _worker_loop\n{0}: {1}'
)
WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=37, OpType=ALLREDUCE, NumelIn=1000, "
    "NumelOut=1000, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.27.5\n{}"
REMOTE = NCCL.format(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
)
SYSTEM = NCCL.format("unhandled system error", "ncclSystemError: System call (e.g. socket, malloc) failed.")
UNHANDLED = NCCL.format("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.")
DUPLICATE = NCCL.format(
    "invalid usage", "ncclInvalidUsage: ...\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 50"
)
IB = "NET/IB : Unable to open device mlx5_0"
PAIR = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
RESET = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:4242: Connection reset by peer"
WAITED = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"
BARRIER = "Rank 1 failed to pass monitoredBarrier in 30000 ms"
STORE = "wait timeout after 300000ms, keys: /default_pg/0//cuda//0"
NOT_ALL_CAME = "ft_client.rank.agreement.roll_call.NotAllCame"
ABSENT = "MemoryCheckpoint.load() was called by ranks 0-6 and not by rank 7: "
EVERY = "All ranks of the default process group must call it"
CLIENTS = "Timed out after 61 seconds waiting for clients. 1/2 clients joined."
RECV = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
UNREACHED = (
    "The client socket has failed to connect to any network address of (node1, 29500). The client socket has failed "
    "to connect to 10.0.0.1:29500 (errno: 111 - Connection refused)."
)
ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"
SHAPES = "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"
REDUCTION = "Expected to have finished reduction in the prior iteration before starting a new one."
DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
STATE = "Error(s) in loading state_dict for Net:\n\tsize mismatch for weight"
IMPORT_CUDA = "libcudart.so.12: cannot open shared object file: No such file or directory"
SIGNALLED = "Process 4711 got signal: 15"


@pytest.mark.parametrize(
    ("kind", "message", "node", "fault_class", "hint"),
    [
        # Memory: GPU, host, shared.
        ("OutOfMemoryError", OOM, NODE, MEMORY, "the GPU's memory is full"),
        ("torch.OutOfMemoryError", "", NODE, MEMORY, "the GPU's memory is full"),
        ("RuntimeError", "CUDA error: out of memory", NODE, MEMORY, "the GPU's memory is full"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", NODE, MEMORY,
         "GPU"),
        ("RuntimeError", NO_HOST_MEMORY, NODE, MEMORY, "host"),
        ("MemoryError", "", NODE, MEMORY, "host"),
        ("OSError", "[Errno 12] Cannot allocate memory", NODE, MEMORY, "host"),
        ("RuntimeError", WORKER.format("Killed"), KILLS, MEMORY, "a loader worker died: out of memory"),
        ("RuntimeError", WORKER.format("Bus error") + SHM, FULL, MEMORY, "a loader worker died: /dev/shm is full"),
        ("RuntimeError", NO_ROOM, FULL, MEMORY, "/dev/shm is full"),
        ("RuntimeError", NO_ROOM, NODE, MEMORY, "container's limit"),
        ("torch.distributed.DistBackendError", "Error while creating shared memory segment /dev/shm/nccl-x (size 9)",
         NODE, MEMORY, "shared memory"),
        ("torch.OutOfMemoryError", IN_WORKER.format("torch.OutOfMemoryError", OOM), NODE, MEMORY, "GPU"),
        # Somebody waited in vain.
        ("torch.distributed.DistBackendError", WATCHDOG, NODE, HANG, "did not take part"),
        ("RuntimeError", WAITED + " to complete", NODE, HANG, "did not take part"),
        ("RuntimeError", BARRIER, NODE, HANG, "did not take part"),
        ("torch.distributed.DistStoreError", STORE, NODE, HANG, "did not take part"),
        ("torch.distributed.DistStoreError", CLIENTS, NODE, HANG, "did not take part"),
        ("torch.distributed.DistStoreError", "Socket Timeout", NODE, HANG, "did not take part"),
        (NOT_ALL_CAME, ABSENT + "these did not call it within 540 s. " + EVERY, NODE, HANG, "did not take part"),
        (NOT_ALL_CAME, ABSENT + "rank 7 has called keep.step() without it. " + EVERY, NODE, USER, "call it on all"),
        # A peer is gone.
        ("RuntimeError", PAIR, NODE, AROUND, "other end is gone"),
        ("RuntimeError", RESET, NODE, AROUND, "other end is gone"),
        ("torch.distributed.DistBackendError", REMOTE, NODE, AROUND, "other end is gone"),
        ("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 1.", NODE, AROUND, "other end"),
        ("torch.distributed.DistNetworkError", RECV, NODE, AROUND, "other end is gone"),
        ("torch.distributed.DistNetworkError", UNREACHED, NODE, AROUND, "other end is gone"),
        ("BrokenPipeError", "[Errno 32] Broken pipe", NODE, AROUND, "other end is gone"),
        ("ConnectionResetError", "", NODE, AROUND, ""),
        # Hardware, or what stands in its place.
        ("torch.AcceleratorError", ECC, NODE, HARDWARE, "fault of its own"),
        ("RuntimeError", "CUDA error: unspecified: GPU is lost", NODE, HARDWARE, "fault of its own"),
        ("RuntimeError", "No CUDA GPUs are available", NODE, HARDWARE, "no GPU"),
        ("RuntimeError", "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", NODE,
         HARDWARE, "no GPU"),
        ("RuntimeError", "CUDA error: no CUDA-capable device is detected", NODE, HARDWARE, "no GPU"),
        ("ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", NODE, HARDWARE, "no GPU"),
        ("torch.distributed.DistBackendError", IB, NODE, HARDWARE, "network card"),
        # Infrastructure.
        ("OSError", "[Errno 28] No space left on device: '/data/x'", FULL, AROUND, "disk"),
        ("OSError", "[Errno 122] Disk quota exceeded: '/data/x'", NODE, AROUND, "quota"),
        ("OSError", "[Errno 116] Stale file handle: '/data/x'", NODE, AROUND, "storage"),
        ("OSError", "[Errno 5] Input/output error", NODE, AROUND, "storage"),
        ("OSError", "[Errno 30] Read-only file system: '/ckpt'", NODE, AROUND, "storage"),
        ("OSError", "[Errno 24] Too many open files: '/data/x'", NODE, AROUND, "ulimit -n"),
        ("RuntimeError", "received 0 items of ancdata", NODE, AROUND, "ulimit -n"),
        ("RuntimeError", "can't start new thread", NODE, AROUND, "pids.max"),
        ("torch.distributed.DistNetworkError", "The server socket has failed to listen on any local network address. "
         "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE", NODE, AROUND, "has that port"),
        ("socket.gaierror", "[Errno -3] Temporary failure in name resolution", NODE, AROUND, "network"),
        ("requests.exceptions.ConnectionError", "HTTPSConnectionPool: Max retries exceeded with url: /x", NODE, AROUND,
         "service"),
        ("botocore.exceptions.ClientError", "SlowDown", NODE, AROUND, ""),
        ("TimeoutError", "[Errno 110] Connection timed out", NODE, AROUND, "network"),
        ("TimeoutError", "", NODE, AROUND, ""),
        ("torch.distributed.DistBackendError", SYSTEM, NODE, AROUND, "NCCL_DEBUG"),
        ("RuntimeError", "Found no NVIDIA driver on your system.", NODE, AROUND, "driver"),
        # The program.
        ("SyntaxError", "'(' was never closed (train.py, line 3)", NODE, USER, ""),
        ("ModuleNotFoundError", "No module named 'apex'", NODE, USER, ""),
        ("NameError", "name 'modle' is not defined", NODE, USER, ""),
        ("ValueError", "the batch is empty", FULL, USER, ""),
        ("KeyError", "'labels'", NODE, USER, ""),
        ("IndexError", "list index out of range", NODE, USER, ""),
        ("TypeError", "main() got an unexpected keyword argument 'lr'", NODE, USER, ""),
        ("AssertionError", "Torch not compiled with CUDA enabled", NODE, USER, ""),
        ("ZeroDivisionError", "division by zero", NODE, USER, ""),
        ("RecursionError", "maximum recursion depth exceeded", NODE, USER, ""),
        ("BadConfig", "defined in the script", NODE, USER, ""),
        ("RuntimeError", SHAPES, NODE, USER, ""),
        ("RuntimeError", DEVICES, NODE, USER, ""),
        ("RuntimeError", STATE, NODE, USER, ""),
        ("RuntimeError", REDUCTION, NODE, USER, ""),
        ("RuntimeError", "Detected mismatch between collectives on ranks. Rank 0 is", NODE, USER, "out of step"),
        ("torch.distributed.DistBackendError", DUPLICATE, NODE, USER, "same GPU"),
        ("torch.AcceleratorError", ASSERT, NODE, USER, "index out of range"),
        ("torch.AcceleratorError", "CUDA error: no kernel image is available for execution on the device", NODE, USER,
         "built for other GPUs"),
        ("ValueError", IN_WORKER.format("ValueError", "bad image"), NODE, USER, ""),
        # Preemption.
        ("torch.distributed.elastic.multiprocessing.api.SignalException", SIGNALLED, NODE, TOLD, "outside"),
        # What may be this or that.
        ("torch.AcceleratorError", ILLEGAL, NODE, UNSURE, "CUDA_LAUNCH_BLOCKING"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", NODE, UNSURE, "CUDA_LAUNCH_BLOCKING"),
        ("torch.distributed.DistBackendError", UNHANDLED, NODE, UNSURE, "CUDA_LAUNCH_BLOCKING"),
        ("torch.AcceleratorError", "CUDA error: invalid device ordinal", NODE, UNSURE, "more ranks than GPUs"),
        ("ImportError", IMPORT_CUDA, NODE, UNSURE, "a library"),
        ("RuntimeError", WORKER.format("Segmentation fault"), NODE, UNSURE, "a loader worker died: a fault in native"),
        ("RuntimeError", WORKER.format("Nonsense"), NODE, UNSURE, ""),
        ("RuntimeError", "something else", NODE, UNSURE, ""),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/x'", NODE, UNSURE, ""),
        ("json.decoder.JSONDecodeError", "Expecting value: line 1 column 1 (char 0)", NODE, UNSURE, ""),
        ("Exception", "", NODE, UNSURE, ""),
    ],
)  # fmt: skip
def test_class_and_hint(kind: str, message: str, node: NodeEvidence, fault_class: FaultClass, hint: str) -> None:
    found = of_exception(RankException(kind, message, "", 0.0), node)
    assert found.fault_class is fault_class
    assert hint in found.hint and bool(hint) == bool(found.hint)


def store(port: int = 0, server: bool = True) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, 1, server, timeout=timedelta(seconds=1), wait_for_workers=False)


def port_in_use() -> None:
    with socket.create_server(("0.0.0.0", 0)) as one:
        store(one.getsockname()[1])


@pytest.mark.parametrize(
    ("call", "fault_class", "peers"),
    [
        (lambda: store().wait(["/k"], timedelta(milliseconds=50)), HANG, 1.0),
        (lambda: store(free_port(), server=False), AROUND, 1.0),
        (port_in_use, AROUND, 0.0),
        (lambda: torch.empty(10**14), MEMORY, 0.0),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), USER, 0.0),
        (lambda: torch.ones(2, 3) @ torch.ones(3, dtype=torch.float64), USER, 0.0),
        (lambda: torch.ones(1).sum().backward(), USER, 0.0),
        (lambda: torch.nn.Linear(2, 2).load_state_dict({}), USER, 0.0),
        (lambda: dist.get_rank(dist.new_group([0])), USER, 0.0),
    ],
)
def test_the_words_of_this_torch(call: Callable[[], object], fault_class: FaultClass, peers: float) -> None:
    with pytest.raises(Exception) as raised:  # of many types
        call()
    kind = type(raised.value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    told = RankException(name, str(raised.value), "", 0.0)
    assert (of_exception(told, NODE).fault_class, is_about_peers(told)) == (fault_class, peers), told


def trace(*links: str, source: str = "step()", file: str = "/data/train.py") -> str:
    head = f'Traceback (most recent call last):\n  File "{file}", line 3, in main\n    {source}\n'
    return "".join(f"{head}{link}\n" if "exception" not in link else f"\n{link}\n\n" for link in links)


CAUSED = "The above exception was the direct cause of the following exception:"
MEANWHILE = "During handling of the above exception, another exception occurred:"
LOST = f"RuntimeError: {PAIR}"


@pytest.mark.parametrize(
    ("traceback", "fault_class"),
    [
        (trace("RuntimeError: training failed"), UNSURE),
        (trace("RuntimeError: training failed", source="raise RuntimeError('training failed')"), USER),
        (trace("RuntimeError: training failed", source="raise it", file="/x/site-packages/lib/a.py"), UNSURE),
        (trace(f"torch.OutOfMemoryError: {OOM}", CAUSED, "RuntimeError: training failed"), MEMORY),
        (trace(LOST, CAUSED, "RuntimeError: training failed"), AROUND),
        (trace("OSError: [Errno 116] Stale file handle", MEANWHILE, "RuntimeError: training failed"), AROUND),
    ],
)
def test_what_led_to_it_counts(traceback: str, fault_class: FaultClass) -> None:
    assert (
        of_exception(RankException("RuntimeError", "training failed", traceback, 0.0), NODE).fault_class is fault_class
    )


@pytest.mark.parametrize(
    ("kind", "message", "traceback", "how_much"),
    [
        ("RuntimeError", PAIR, "", 1.0),
        ("RuntimeError", PAIR, trace(LOST), 1.0),
        ("RuntimeError", WAITED, "", 1.0),
        ("torch.distributed.DistBackendError", WATCHDOG, "", 1.0),
        ("torch.distributed.DistStoreError", STORE, "", 1.0),
        ("BrokenPipeError", "[Errno 32] Broken pipe", "", 1.0),
        (NOT_ALL_CAME, ABSENT + "these did not call it within 67.5 s. " + EVERY, "", 1.0),
        (NOT_ALL_CAME, ABSENT + "rank 7 has gone on without it. " + EVERY, "", 0.0),
        ("Failed", "no", trace(LOST, CAUSED, "Failed: no"), 1.0),
        ("Failed", "no", trace(LOST, CAUSED, "Worse: no", CAUSED, "Failed: no"), 1.0),
        ("Failed", "no", trace(LOST, MEANWHILE, "Failed: no"), 0.5),
        ("RuntimeError", PAIR, trace("ValueError: bad", MEANWHILE, LOST), 0.5),
        ("RuntimeError", PAIR, trace("ValueError: bad", CAUSED, LOST), 0.0),
        ("Failed", "no", trace("ValueError: bad", CAUSED, "Failed: no"), 0.0),
        ("ValueError", "the peer group is empty", "", 0.0),
        ("torch.AcceleratorError", "CUDA error: peer mapping resources exhausted", "", 0.0),
        ("RuntimeError", SHAPES, "", 0.0),
    ],
)
def test_what_is_about_peers(kind: str, message: str, traceback: str, how_much: float) -> None:
    assert is_about_peers(RankException(kind, message, traceback, 0.0)) == how_much


def patterns() -> list[re.Pattern[str]]:
    """Every pattern that is searched for in text which a rank wrote."""
    return [one for module in (known_errors, error_text, stacks) for one in patterns_in(list(vars(module).values()))]


def patterns_in(value: object) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from patterns_in(one)


def searching_s(text: str) -> float:
    """Seconds of processor time that all searches of one text take."""
    began = time.process_time()
    for pattern in patterns():
        pattern.search(text)
    return time.process_time() - began


@pytest.mark.parametrize(
    "part",
    [
        *("NVLink", "NCCL", "C", "ibv_", "/torch_", "/torch_a", "shape ", "DataLoader worker ", "No space left"),
        *("NET/IB : ", "Dist", 'File "', 'File "a', "timed out waiting 1", "unable to mmap 1"),
        *("Thread 0x1", "Current thread 0x", "  "),
    ],
)
@pytest.mark.parametrize("end", ["", "1"])
def test_searching_takes_time_linear_in_the_text(part: str, end: str) -> None:
    """Four times the text takes four times as long, where a quadratic pattern takes sixteen.

    The two are measured in turn and the least of each counts: a machine that slows down slows both.
    """
    short, long = (part * (size // len(part)) + end for size in (10_000, 40_000))
    times = [(searching_s(short), searching_s(long)) for _ in range(5)]
    least_short, least_long = map(min, zip(*times, strict=True))
    assert least_long <= 6 * least_short + 0.01
