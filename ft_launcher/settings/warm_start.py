"""Decides whether ranks may start as forks of one import of torch, and if not, why. Knows no process.

`prescan.py` asks about the command, the zygote about its own process, and `node/zygote/pool.py` about the environment
of ranks; the reason goes to the log. A fork has the state that its zygote had after the import. So ranks are not forked
where a rank's own import would have run under other conditions: each reason below is such a condition.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from rank_monitor.contract import env

# Prefixes of variables in which a rank may differ from its zygote, since nothing reads them while torch is imported.
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
"""Variables that nothing reads while torch is imported. With the prefixes above, they are the only ones in which a rank
may differ from its zygote."""

# Modules that leave a rank's `sys.modules` before its script begins, so that they hide no module of the user.
_OURS = {"ft_launcher", "ft_client", "rank_monitor", "__main__"}

_READ_BY_C = (
    *("ACC_", "BLIS_", "CUDA_", "DNNL_", "GFORTRAN_", "GLOO_", "GOMP_", "GOTO_", "HIP_", "HSA_", "KINETO_", "KMP_"),
    *("MKL", "NCCL_", "NPY_", "NUMPY_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "ROCR_", "TORCH_"),
)
"""Prefixes of variables that C code reads while torch 2.13 is imported, as far as somebody may set them (seen by a
`getenv` of our own in front of the C library's), and of variables that the device libraries of CUDA and ROCm read."""

# Each of these profilers sets its variable in the processes that it starts.
_PROFILERS = {
    "NSYS_PROFILING_SESSION_ID": "nsys",
    "NV_TPS_LAUNCH_TOKEN": "ncu",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "ncu",
    "CUDA_INJECTION64_PATH": "a CUDA profiler",
    "NVTX_INJECTION64_PATH": "a CUDA profiler",
}


def against_command(arguments: Sequence[str], environ: Mapping[str, str], orig_argv: Sequence[str]) -> str:
    """Returns why ranks of this command cannot be forks; empty: they can.

    Args:
        arguments: `[-m] SCRIPT ARGS`; empty where Python does not run the ranks.
        environ: the launcher's environment.
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
    """Returns why a process in this state cannot be forked; empty: it can.

    Args:
        threads: how many threads it has. A fork has only one of them, and the locks of all.
        cuda: whether CUDA has been initialized.
        device_files: device files of GPUs that it has open.
    """
    if cuda or device_files:
        return "CUDA was initialised by an import (a preloaded module?)"
    if threads == 2:
        return "an import started 1 thread (a preloaded module?)"
    if threads > 2:
        return f"an import started {threads - 1} threads (a preloaded module?)"
    return ""


def against_environment(ranks: Mapping[str, str], zygote: Mapping[str, str]) -> str:
    """Returns why ranks with one environment cannot be forks of a zygote with another; empty: they can."""
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
    """Returns the changed variables that an import reads. Where there is one, the rank starts again by exec
    (`node/zygote/start_again.py`): in its zygote the import has read another value.

    Args:
        changed: the variables that the script has changed.
        read: variables that Python code read in this import. Reads of C code cannot be observed.
        in_c: whether it is the import of torch or of numpy, whose C code reads more.
    """
    return sorted(name for name in changed if name in read or (in_c and name.startswith(_READ_BY_C)))


def against_folder(arguments: Sequence[str], loaded: Mapping[str, str | None]) -> str:
    """Returns why a script cannot be forked: its folder has a module of the same name as one that is loaded. Empty: it
    can.

    The folder of the script comes first in the script's `sys.path`, so a module in it hides another one of its name. In
    a fork the other one is imported already.

    Args:
        arguments: `[-m] SCRIPT ARGS`.
        loaded: the zygote's modules outside of packages, with their files.
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
    """Returns whether a folder has a module of this name that is not the loaded one. A folder without `__init__.py` is
    none."""
    own = [folder / f"{name}.py", folder / name / "__init__.py"]
    return any(path.exists() for path in own) and not any(file and path == Path(file) for path in own)
