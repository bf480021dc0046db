"""The launchers that are compared: how each is started and what its flags are called.

Knows nothing of scenarios. NVIDIA's gets an environment of its own under `bench_out/`, made on the first request.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
IN_PROCESS_WORKER = Path(__file__).with_name("in_process_worker.py")
MEMORY_WORKER = Path(__file__).with_name("memory_worker.py")
FORK_RANKS = Path(__file__).with_name("fork_ranks.py")
OUT = ROOT / "bench_out"
LM_RESILIENCY_PACKAGES = ("lm-resiliency==0.2.0",)
NVRX_PACKAGES = ("nvidia-resiliency-ext==0.4.1", "packaging", "nvidia-ml-py", "defusedxml")
COMMON_ENVIRONMENT = {
    "RES_OPTIONS": "timeout:1 attempts:1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Launcher:
    """One way to start ranks. `monitor_words` are found in the command line of its sidecars and of nothing else."""

    name: str
    module: str
    python: str = sys.executable
    client: str = ""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    monitor_words: str = ""
    stop_flag: str = "--workers-stop-timeout"
    check_interval_s: float = 0.1
    script: Path = WORKER

    def command(self, ranks: int, max_restarts: int, flags: Sequence[str], arguments: Sequence[str]) -> list[str]:
        """The command line that runs the worker on `ranks` ranks of this machine."""
        layout = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
        return [self.python, "-m", self.module, *layout, *self.flags, *flags, str(self.script), *arguments]


class Alone(Launcher):
    """No launcher: one process forks the ranks, and nobody watches them."""

    def command(self, ranks: int, max_restarts: int, flags: Sequence[str], arguments: Sequence[str]) -> list[str]:
        """The command line that runs the script on `ranks` ranks; without restarts and flags."""
        return [self.python, str(FORK_RANKS), str(ranks), str(self.script), *arguments]


# This tree's launcher, whatever is installed.
OURS = Launcher(
    "ours",
    module="ft_launcher",
    client="ft_client",
    environment={"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])},
    monitor_words="rank_monitor",
)
OURS_EXEC = replace(OURS, name="ours-exec", flags=("--ft-warm-start=off",))
TORCHRUN = Launcher("torchrun", module="torch.distributed.run", stop_flag="--shutdown-timeout")
# With a store per restart: without it the ranks of torchrun often read stale addresses after a restart.
TORCHRUN_OWN_STORE = replace(TORCHRUN, name="torchrun-opt", environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
# Its monitors are forks of the launcher.
NVRX = Launcher(
    "nvrx",
    module="nvidia_resiliency_ext.fault_tolerance.launcher",
    python=str(OUT / "nvrx" / "bin" / "python"),
    client="nvidia_resiliency_ext.fault_tolerance",
    flags=("--ignore-missing-fault-tol-cfg", "--ft-enable-nic-monitor=false"),
    monitor_words="fault_tolerance.launcher",
    check_interval_s=5.0,
)
NVRX_QUICK = replace(
    NVRX, name="nvrx-0.1s", flags=(*NVRX.flags, "--ft-workload-check-interval=0.1"), check_interval_s=0.1
)
# The wrappers of in-process restart.
OURS_WRAPPED = replace(OURS, client="ft_client.inprocess", script=IN_PROCESS_WORKER)
OURS_ALONE = Alone(
    "ours-alone", "", client="ft_client.inprocess", environment=OURS.environment, script=IN_PROCESS_WORKER
)
NVRX_ALONE = Alone("nvrx", "", python=NVRX.python, client="nvidia_resiliency_ext.inprocess", script=IN_PROCESS_WORKER)


# The ways to keep a state: torch's own need no launcher, and lm-resiliency has none.
OURS_MEMORY = replace(OURS, script=MEMORY_WORKER)
OURS_OVERLAP = replace(OURS_MEMORY, name="ours-overlap")
DCP, DCP_ASYNC, DCP_SHM, TORCH_SAVE = (
    Alone(name, "", client="torch", script=MEMORY_WORKER) for name in ("dcp", "dcp-async", "dcp-shm", "torch-save")
)
LM_RESILIENCY = Alone(
    "lm-resiliency", "", python=str(OUT / "lm-resiliency" / "bin" / "python"), client="torch", script=MEMORY_WORKER
)


def make_nvrx_environment() -> None:
    """Makes the environment of NVIDIA's package."""
    make_environment("nvrx", NVRX_PACKAGES, "nvidia_resiliency_ext.fault_tolerance")


def make_lm_resiliency_environment() -> None:
    """Makes the environment of lm-resiliency."""
    make_environment("lm-resiliency", LM_RESILIENCY_PACKAGES, "lm_resiliency")


def make_environment(name: str, packages: Sequence[str], module: str) -> None:
    """Installs a peer's packages beside, not over, this environment's torch; `PIP_FLAGS` is passed on to pip."""
    python = OUT / name / "bin" / "python"
    check = [str(python), "-c", f"import {module}"]
    if python.exists() and subprocess.run(check, check=False, capture_output=True).returncode == 0:
        return
    print(f"making {OUT / name} with {', '.join(packages)}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(OUT / name)], check=True)
    base = sysconfig.get_paths()["purelib"]
    (site,) = (OUT / name / "lib").glob("python3*/site-packages")
    (site / "base_environment.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    flags = ["-c", str(ROOT / "constraints.txt"), *shlex.split(os.environ.get("PIP_FLAGS", ""))]
    subprocess.run([*pip, *flags, *packages], check=True)
