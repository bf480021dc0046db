"""Decides whether ranks may start as forks of one import of torch, and if not, why, for the log. Knows no process.

A fork has the state of its zygote after that import. So ranks are not forked where a rank's own import would happen
under other conditions; each reason below is one of these.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from rank_monitor.contract import env

_LATE = (env.SETTING_PREFIX, "TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "CUDA_", "HIP_", "ROCR_")
_LATE_NAMES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "RES_OPTIONS",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
        env.CURRENT_CYCLE_INFO,
        env.NCCL_COLLECTIVE_TIMEOUT,
    }
)
"""Variables that nothing reads while torch is imported: the only ones in which a rank may differ from its zygote."""

# Modules that leave a rank's `sys.modules` before its script begins, so that they hide none of the user's.
_OURS = {"ft_launcher", "ft_client", "rank_monitor", "__main__"}

_READ_BY_C = (
    *("ACC_", "BLIS_", "CUDA_", "DNNL_", "GFORTRAN_", "GLOO_", "GOMP_", "GOTO_", "HIP_", "HSA_", "KINETO_", "KMP_"),
    *("MKL", "NCCL_", "NPY_", "NUMPY_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "ROCR_", "TORCH_"),
)
"""Of the variables that C code asks for while torch 2.13 is imported (seen by a `getenv` of our own in front of the C
library's), those that somebody may set; and those of the device libraries, which builds for CUDA and ROCm load."""

# Each of these profilers sets its variable in the processes that it starts.
_PROFILERS = {
    "NSYS_PROFILING_SESSION_ID": "nsys",
    "NV_TPS_LAUNCH_TOKEN": "ncu",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "ncu",
    "CUDA_INJECTION64_PATH": "a CUDA profiler",
    "NVTX_INJECTION64_PATH": "a CUDA profiler",
}


def against_command(arguments: Sequence[str], environ: Mapping[str, str], orig_argv: Sequence[str]) -> str:
    """Returns why ranks of this command cannot be forks; empty when they can.

    Args:
        arguments: `[-m] SCRIPT ARGS`; empty when Python does not run them.
        orig_argv: how this interpreter was started.
    """
    if not arguments:
        return "--no-python: the ranks are no Python scripts"
    if environ.get("PYTHON_EXEC"):
        return "PYTHON_EXEC names another interpreter"
    if arguments[0] == "-":
        return "the script is read from stdin"
    for name, tool in _PROFILERS.items():
        if name in environ:
            return f"{tool} wraps the job ({name} is set): a profiler sees ranks only from their start"
    own = takewhile(lambda option: option.startswith("-") and option not in ("-m", "-c", "-"), orig_argv[1:])
    options = [option for option in own if option != "-u"]
    if options:
        return f"the launcher's interpreter was started with {' '.join(options)}, which ranks are not"
    return ""


def against_process(threads: int, cuda: bool, device_files: Collection[str]) -> str:
    """Returns why a process in this state cannot be forked; empty when it can."""
    if cuda or device_files:
        return "CUDA was initialised by an import (a preloaded module?)"
    if threads == 2:
        return "an import started 1 thread (a preloaded module?)"
    if threads > 2:
        return f"an import started {threads - 1} threads (a preloaded module?)"
    return ""


def against_environment(ranks: Mapping[str, str], zygote: Mapping[str, str]) -> str:
    """Returns why ranks with one environment cannot be forks of a zygote with another; empty when they can."""
    differing = sorted(
        name
        for name in ranks.keys() | zygote.keys()
        if ranks.get(name) != zygote.get(name) and name not in _LATE_NAMES and not name.startswith(_LATE)
    )
    if differing:
        # Names only: a value may be a secret.
        return f"the ranks have another {', '.join(differing)} than the launcher had when it imported torch for them"
    return ""


def read_by_imports(changed: Collection[str], read: Collection[str], in_c: bool) -> list[str]:
    """Returns the changed variables that an import reads.

    Args:
        read: variables that Python code read in this import; reads of C code are not observed.
        in_c: whether it is the import of torch or of numpy, whose code in C reads more.
    """
    return sorted(name for name in changed if name in read or (in_c and name.startswith(_READ_BY_C)))


def against_folder(arguments: Sequence[str], loaded: Mapping[str, str | None]) -> str:
    """Returns why a script cannot be forked: a module in the folder that comes first in its `sys.path` hides one that
    is loaded. Empty when it can.

    Args:
        arguments: `[-m] SCRIPT ARGS`.
        loaded: the modules of the zygote that are in no package, with their files.
    """
    if arguments[0] == "-m":
        folder = Path.cwd()
    elif Path(arguments[0]).is_dir():
        folder = Path(arguments[0])
    else:
        folder = Path(arguments[0]).resolve().parent
    try:
        with os.scandir(folder) as entries:
            modules = (entry for entry in entries if entry.name.endswith(".py") or entry.is_dir())
            names = {module.name.removesuffix(".py") for module in modules}
    except OSError:
        return ""
    hidden = sorted(name for name in names & loaded.keys() - _OURS if _has_another(folder, name, loaded[name]))
    if hidden:
        return f"{folder} has a {hidden[0]} of its own"
    return ""


def _has_another(folder: Path, name: str, file: str | None) -> bool:
    """Whether a module in a folder is not the loaded one. One that is only a folder is none."""
    own = [folder / f"{name}.py", folder / name / "__init__.py"]
    return any(path.exists() for path in own) and not any(file and path == Path(file) for path in own)
