"""Classifies exceptions of Python, torch, NCCL, gloo and CUDA: class and hint by message, then by type. Pure.

`first_failure.py` asks `of_exception` for the exception of the rank that failed first. `cycle_evidence.py` and
`rank_view.py` ask `is_about_peers` of every rank, to tell a cause from its consequences. One exception is looked at
alone: the module knows no ranks.

Order of the decision, for each exception of a chain, the last one first (`_by_text`):

1. Errors of the program that no text can excuse: a syntax error, a missing import.
2. A worker of a data loader or a spawned process that died: by its signal or exit code (`hints.py`).
3. Full shared memory, then a collective that timed out.
4. The first row of the table `_BY_TEXT` that fits. The order of rows matters: special texts stand before general ones.
5. A lost peer.

Where no text says anything, the type decides (`_by_type`).

A rank chooses the text, so it is cut before it is searched, and every repetition in a pattern is bounded: the time
grows linearly with the text. (A pattern with `.*` once held the launcher for a minute over 140 KB of "NVLink".)
"""

from __future__ import annotations

import builtins
import functools
import re
import signal
from dataclasses import replace

from ft_launcher.decide.attribution import hints
from ft_launcher.decide.attribution.error_text import chain, raised_by_program
from ft_launcher.decide.attribution.fault import Cause, FaultClass
from ft_launcher.decide.attribution.hints import NodeEvidence
from ft_launcher.decide.attribution.wrapped_errors import errors_inside
from rank_monitor.contract.errors import both_ends
from rank_monitor.contract.lost_peer import MAX_SEARCHED, is_lost_peer
from rank_monitor.contract.wire.messages import RankException

_USER, _MEMORY, _HARDWARE = FaultClass.USER_ERROR, FaultClass.MEMORY, FaultClass.HARDWARE
_INFRASTRUCTURE, _HANG, _UNKNOWN = FaultClass.INFRASTRUCTURE, FaultClass.HANG, FaultClass.UNKNOWN

_WAITED = re.compile(
    r"collective operation timeout|timed out waiting \d{1,12} ?ms for (recv|send) operation"
    r"|failed to pass monitoredBarrier"
    r"|wait timeout after \d{1,12} ?ms, keys|seconds waiting for clients|Dist\w{0,20}Error: Socket Timeout"
    r"|Application timeout caused pair closure"
    r"|these did not call it within \d{1,12}(\.\d{1,12})? s\b",
    re.IGNORECASE,
)
"""Texts of a collective, a send or a receive that timed out, or of our own wait for all ranks to make a call
(`ft_client/rank/agreement/roll_call.py`): another rank did not take part in time."""
BAD_LOSS = "loss is not finite"
"""Stands in the place of an exception's type where nothing was raised, but the launcher read a loss of nan or inf in
the rank's output (`--ft-watch-log-nan=fault`)."""
_GAVE_UP = "ft_client.inprocess.exception.RestartAbort"
"""The exception that all ranks raise when restarts in process end. On the rank whose fault it was it has a cause in its
chain; on each other rank it is a consequence."""
# torch's data loader puts the text of strsignal into its message, not the number.
_LOADER = re.compile(r"DataLoader worker .{0,200}killed by signal: (.{1,40}?)\.")
# torch.multiprocessing.spawn, of a child that died. The text about a child that raised has its traceback instead, which
# `wrapped_errors.py` reads.
_SPAWNED = re.compile(r"ProcessExitedException: .{0,40}terminated with (?:signal (SIG\w{1,12})|exit code (\d{1,3}))")
_SHARED_MEMORY = re.compile(
    r"(/torch_|/dev/shm|shared memory).{0,400}No space left|No space left.{0,400}/dev/shm"
    r"|shared memory segment /dev/shm|unable to mmap \d{1,20} bytes from file </torch_",
    re.DOTALL | re.IGNORECASE,
)

_GPU_FULL = "the GPU's memory is full: the batch is too large, or another process has memory on this GPU"
_HOST_FULL = "the memory of the host, or of its group, is full"
_KERNEL = "a fault of a kernel, or of the GPU: run with CUDA_LAUNCH_BLOCKING=1, and on another node"
_OUT_OF_STEP = "ranks are out of step: they do not call the same collectives"
_NO_GPU = "no GPU is to be seen: it is lost, its driver is, or the container has none"

_BY_TEXT: tuple[tuple[str, Cause], ...] = (
    # A task of Ray; the type has the name of torch's error of a full GPU.
    (r"running low on memory", Cause(_MEMORY, _HOST_FULL)),
    (r"OutOfMemoryError|(CUDA|HIP) out of memory|CUDA error: out of memory|C\w{1,20}_STATUS_ALLOC_FAILED",
     Cause(_MEMORY, _GPU_FULL)),
    (r"^MemoryError|can't allocate memory|Cannot allocate memory|std::bad_alloc|unable to mmap",
     Cause(_MEMORY, _HOST_FULL)),
    (r"uncorrectable|fallen off the bus|GPU is lost|hardware stack error|NVLink.{0,200}error|row remap",
     Cause(_HARDWARE, "the GPU reports a fault of its own; look at nvidia-smi -q and at the kernel's log for Xid")),
    (r"no CUDA-capable device|No CUDA GPUs are available|no GPUs found|system not yet initialized|CUDA unknown error"
     r"|driver initialization failed|Driver/library version mismatch", Cause(_HARDWARE, _NO_GPU)),
    (r"NET/IB : (Unable to open device|.{0,200}(async|port) error)|ibv_\w{1,40} failed|No RDMA",
     Cause(_HARDWARE, "the network card, or its link")),
    (r"Found no NVIDIA driver", Cause(_INFRASTRUCTURE, "no driver of NVIDIA's is here, or none is passed in")),
    (r"device-side assert", Cause(_USER, "an index out of range in a kernel, say: run with CUDA_LAUNCH_BLOCKING=1")),
    (r"no kernel image is available", Cause(_USER, "torch, or an extension, is built for other GPUs than this one")),
    (r"Duplicate GPU detected", Cause(_USER, "two ranks use the same GPU: set the device by the local rank")),
    (r"invalid device ordinal", Cause(_UNKNOWN, "more ranks than GPUs, or a GPU of this node is gone")),
    (r"Detected mismatch between collectives|ncclInvalidUsage|expects same model across all ranks",
     Cause(_USER, _OUT_OF_STEP)),
    # Of `roll_call.py`: a rank has proved that it does not make a call that all ranks must make.
    (r"All ranks of the default process group must call it", Cause(_USER, "call it on all ranks, or on none")),
    (r"shapes? .{0,200}cannot be|size mismatch|must (match the size|have the same dtype)"
     r"|all tensors to be on the same device"
     r"|loading state_dict|does not require grad|inplace operation|backward through the graph a second time"
     r"|Expected to have finished reduction|expected scalar type|should be the same|Given groups="
     r"|process group has not been initialized|doesn't have NCCL built in|not compiled with CUDA"
     r"|invalid configuration argument", Cause(_USER)),
    (r"illegal memory access|unspecified launch failure|misaligned address|illegal instruction"
     r"|C\w{1,20}_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)|ncclUnhandledCudaError",
     Cause(_UNKNOWN, _KERNEL)),
    (r"ncclSystemError", Cause(_INFRASTRUCTURE, "a call of NCCL to the system failed; run with NCCL_DEBUG=WARN")),
    (r"No space left on device|Disk quota exceeded", Cause(_INFRASTRUCTURE, "the disk, or the quota on it, is full")),
    (r"Stale file handle|Input/output error|Remote I/O error|Transport endpoint is not connected|Read-only file system",
     Cause(_INFRASTRUCTURE, "storage does not answer as it should; look at its server and at the kernel's log")),
    (r"Too many open files|received 0 items of ancdata",
     Cause(_INFRASTRUCTURE, "too many open files: raise ulimit -n")),
    (r"can't start new thread|Resource temporarily unavailable",
     Cause(_INFRASTRUCTURE, "too many threads or processes: look at ulimit -u and the group's pids.max")),
    (r"Address already in use|failed to listen|EADDRINUSE", Cause(_INFRASTRUCTURE, "another process has that port")),
    (r"name resolution|Name or service not known|No route to host|Network is unreachable|Connection timed out"
     r"|Max retries exceeded|Host is down", Cause(_INFRASTRUCTURE, "the network, a name or a service")),
    (r"cannot open shared object file", Cause(_UNKNOWN, "a library is not on this node, or not on its path")),
    # torch's SignalException; 1, 10 and 15 are SIGHUP, SIGUSR1 and SIGTERM.
    (r"got signal: 1[05]?\b|SignalException", Cause(FaultClass.PREEMPTION, "somebody outside the launcher ended it")),
)  # fmt: skip
"""Pattern -> class and hint. Case is ignored, and `.` matches line ends. The first row that fits counts."""
_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE | re.DOTALL), cause) for pattern, cause in _BY_TEXT)

_VAGUE = {
    "Exception",
    "BaseException",
    "RuntimeError",
    "OSError",
    "SystemError",
    "FileNotFoundError",
    "PermissionError",
}
"""Types that say nothing about who has to act: libraries raise them for many reasons, and a file may be missing because
its mount is. They count as errors of the program only if the program itself raised them."""

_SERVICES = re.compile(
    r"(urllib3?|requests|http|ssl|socket|aiohttp|httpx|botocore|huggingface_hub|google\.api_core|etcd3gw)\."
)
"""Modules whose exceptions are about a service: a library of HTTP, of sockets, of a cloud."""
_PROGRAM = {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "NameError"}


def of_exception(exception: RankException, node: NodeEvidence) -> Cause:
    """Returns class and likely cause of an exception: by the texts of its chain, the last exception first, else by
    type.

    An exception may carry others inside its text: a group, or the error of a data loader's worker. The errors inside
    are asked before the text as a whole, the last one first. Errors about lost peers among them are left out, since
    they may be consequences of the others.

    Args:
        node: decides what a SIGKILL or a SIGBUS of a worker means.
    """
    links = chain(exception)
    for link in reversed(links):
        texts = _own_errors(link.text)
        if not (texts and _mentions_peers(link.text)):
            texts = [*texts, link.text]
        for text in texts:
            known = _by_text(text, node)
            if known is not None:
                return known
    for text in _own_errors(links[-1].text)[:1]:
        exception = replace(exception, type=text.partition(":")[0])
    return Cause(_by_type(exception))


def _own_errors(text: str) -> list[str]:
    """Returns the errors inside a text, the last one first, without errors about a lost peer."""
    return [error for error in reversed(errors_inside(text)) if not _mentions_peers(error)]


# Cached: while ranks are compared, this is asked several times for the exception of each rank.
@functools.lru_cache(maxsize=64)
def is_about_peers(exception: RankException) -> float:
    """Rates whether an exception is the consequence of another rank's end: 1 certainly, 0.5 possibly, 0 not.

    The first exception of the chain of causes (`raise ... from ...`) decides. An exception that was raised while
    another one was handled is only possibly a consequence (0.5). The earlier one may be the real error of this rank,
    and the lost peer a collective in its `finally` that nobody else came to.
    """
    links = chain(exception)
    first = len(links) - 1
    while first > 0 and links[first - 1].caused_next:
        first -= 1
    share = _share_about_peers(links[first].text)
    if share:
        if first == 0:
            return share
        return 0.5
    if any(_mentions_peers(link.text) for link in links[:first]):
        return 0.5
    return 0.0


def _share_about_peers(text: str) -> float:
    """Rates one exception of a chain as `is_about_peers` does. Of several errors inside its text each may be the real
    one: 1 only if all are about peers."""
    inside = [_mentions_peers(error) for error in errors_inside(text)] or [_mentions_peers(text)]
    if all(inside):
        return 1.0
    if any(inside):
        return 0.5
    return 0.0


def _mentions_peers(text: str) -> bool:
    """Returns whether a text is about a lost peer, a collective that timed out, or the end of restarts in process."""
    text = both_ends(text, MAX_SEARCHED)
    return bool(is_lost_peer(text) or _WAITED.search(text) or text.startswith(_GAVE_UP))


def _by_text(text: str, node: NodeEvidence) -> Cause | None:
    """Returns class and hint by a text that begins with the type of the exception; None: the text says nothing."""
    text = both_ends(text, MAX_SEARCHED)
    # An ImportError for want of a shared library may be a fault of the node. The table decides about it.
    if text.partition(":")[0] in _PROGRAM and "shared object file" not in text:
        return Cause(_USER)
    worker = _LOADER.search(text)
    if worker is not None:
        cause = hints.of_signal(hints.number_of(worker[1]), node)
        if not cause.hint:
            return cause
        return Cause(cause.fault_class, f"a loader worker died: {cause.hint}")
    spawned = _SPAWNED.search(text)
    if spawned is not None:
        return _of_spawned(spawned[1] or "", int(spawned[2] or 0), node)
    if _SHARED_MEMORY.search(text):
        return Cause(
            _MEMORY, hints.full(node) or "shared memory was full; look at /dev/shm, and at a container's limit"
        )
    if _WAITED.search(text):
        return Cause(_HANG, "a rank did not take part in the collective in time: it died, hangs, or is out of step")
    known = next((cause for pattern, cause in _PATTERNS if pattern.search(text)), None)
    if known is not None:
        return known
    if is_lost_peer(text):
        return Cause(_INFRASTRUCTURE, "the other end is gone: another rank or service ended first, or the network did")
    return None


def _of_spawned(signal_name: str, exit_code: int, node: NodeEvidence) -> Cause:
    """Returns class and hint of a spawned process that died of a signal, or ended with an exit code."""
    number = signal.Signals.__members__.get(signal_name)
    if number is not None:
        cause = hints.of_signal(number, node)
    else:
        cause = hints.of_exit(exit_code, node)
    if not cause.hint:
        return cause
    return Cause(cause.fault_class, f"a spawned process ended: {cause.hint}")


def _by_type(exception: RankException) -> FaultClass:
    """Returns the class of an exception whose text says nothing, by its type and where it was raised.

    A plain builtin type such as ValueError is an error of the program. A vague type, or one of a library, is that only
    where the innermost frame is a `raise` in a file of the user's.
    """
    module, _, name = exception.type.rpartition(".")
    kind = getattr(builtins, exception.type, None)
    if isinstance(kind, type) and issubclass(kind, (ConnectionError, TimeoutError)):
        return _INFRASTRUCTURE
    if _SERVICES.match(exception.type) or name in ("DistNetworkError", "DistStoreError"):
        return _INFRASTRUCTURE
    if exception.type in _VAGUE or module:
        if raised_by_program(exception.traceback):
            return _USER
        return _UNKNOWN
    return _USER
