"""The versions and environment variables that describe where a launcher runs, for the journal's first event.

A fault may follow from a release of torch or a variable of NCCL, and nobody remembers these weeks later. But an
environment also holds passwords and tokens. So an allow-list decides: a variable that is not named here, or whose value
is no plain word, is never written down.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping

_PACKAGES = {"launcher": "ft-launcher", "torch": "torch", "numpy": "numpy"}
"""Name in the journal -> name of the distribution."""
_NUMBERED = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG"),
    *("HIP_VISIBLE_DEVICES", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ROCR_VISIBLE_DEVICES"),
    *("MALLOC_ARENA_MAX", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
_OF_NCCL = (
    *("NCCL_ALGO", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG"),
    *("NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_QPS_PER_CONNECTION"),
    *("NCCL_IB_RETRY_CNT", "NCCL_IB_SL", "NCCL_IB_TC", "NCCL_IB_TIMEOUT", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS"),
    *("NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO"),
    *("NCCL_RAS_ENABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
)
_OF_TORCH = (
    *("TORCH_CPP_LOG_LEVEL", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_BUFFER_SIZE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_CUDA_EVENT_CACHE"),
    *("TORCH_NCCL_DESYNC_DEBUG", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"),
    *("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
)
_OF_SCHEDULERS = (
    *("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_PROCID"),
    *("SLURM_RESTART_COUNT", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "JOB_COMPLETION_INDEX"),
)
ENVIRONMENT = frozenset((*_NUMBERED, *_OF_NCCL, *_OF_TORCH, *_OF_SCHEDULERS))
"""The variables that are written down: those that change how collectives, devices, threads and memory behave, and the
numbers by which a scheduler knows the job."""

_PLAIN = re.compile(r"[\w.,:;=^*+\[\]-]{0,200}")
"""Numbers, names of devices, lists of them. No slash, at sign or blank: no path, no address with a password in it."""


def versions() -> dict[str, str]:
    """Returns the versions of what the training runs on, by name; what is not installed is missing."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    found["machine"] = platform.machine()
    for name, package in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that may be written down."""
    return {name: environ[name] for name in sorted(ENVIRONMENT & environ.keys()) if _PLAIN.fullmatch(environ[name])}
