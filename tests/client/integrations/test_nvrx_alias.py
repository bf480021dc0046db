"""The names of `nvidia_resiliency_ext`: what stands behind them, what does not, and who decides. Each in a fresh
interpreter, since an import happens once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rank_monitor.contract import env
from tests.program import clean_environment, run

INSTALL = "from ft_client.integrations import nvrx_alias; print(nvrx_alias.install())\n"
LIMIT_S = 120
REAL = "nvidia_resiliency_ext is installed"


def python(*words: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs an interpreter to its end; `folder` comes first in its `sys.path`."""
    path = {} if folder is None else {"PYTHONPATH": str(folder)}
    return run([sys.executable, *words], environ=clean_environment(**path, **variables), limit_s=LIMIT_S)


def said_by(code: str, folder: Path | None = None, **variables: str) -> list[str]:
    """What a program prints that ends well."""
    done = python("-c", code, folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


NAMES = """
import sys
import nvidia_resiliency_ext as peer
assert peer.__version__ == "0.6.0"
assert "torch" not in sys.modules, "the alias costs nothing"

import ft_client.inprocess.rank_assignment as ours
import nvidia_resiliency_ext.inprocess as inprocess
import nvidia_resiliency_ext.inprocess.rank_assignment as theirs
assert theirs is ours and ours.__spec__.name == "ft_client.inprocess.rank_assignment"
for name in ("abort attribution completion compose exception finalize health_check initialize nested_restarter "
             "rank_assignment rank_filter state store terminate").split():
    assert getattr(inprocess, name).__name__ == "ft_client.inprocess." + name
assert inprocess.Wrapper and inprocess.Compose and inprocess.CallWrapper

from nvidia_resiliency_ext import attribution, fault_tolerance, shared_utils, straggler
from nvidia_resiliency_ext.attribution.straggler import CallableId, Detector, Report, Statistic, StragglerId
from nvidia_resiliency_ext.attribution.straggler.reporting import Report as reports
from nvidia_resiliency_ext.straggler.statistics import Statistic as statistics
assert straggler.Detector is Detector and reports is Report and statistics is Statistic

from ft_client import RankMonitorClient, RankMonitorClientError, WorkloadAction
assert fault_tolerance.RankMonitorClient is RankMonitorClient
assert fault_tolerance.RankMonitorClientError is RankMonitorClientError
assert fault_tolerance.WorkloadControlRequest(fault_tolerance.WorkloadAction.ExcludeThisNode, "why")
assert fault_tolerance.FaultToleranceConfig().rank_heartbeat_timeout
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_client import RankMonitorClient as again
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorServer
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
assert again is RankMonitorClient and RankMonitorServer is fault_tolerance.RankMonitorServer
import nvidia_resiliency_ext.fault_tolerance.data as data
from rank_monitor.contract import env
assert data.FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR == data.FT_RANK_MONITOR_IPC_SOCKET == env.RANK_MONITOR_SOCKET
assert data.FT_LAUNCHER_IPC_SOCKET_ENV_VAR == data.FT_LAUNCHER_IPC_SOCKET == env.LAUNCHER_SOCKET

import pickle
from nvidia_resiliency_ext.inprocess.state import Mode
assert pickle.loads(pickle.dumps(Mode)) is Mode
config = pickle.loads(pickle.dumps(FaultToleranceConfig(safety_factor=7)))
assert config.safety_factor == 7 and config == FaultToleranceConfig(safety_factor=7)

from nvidia_resiliency_ext.shared_utils import inject_fault, wait_daemon
from nvidia_resiliency_ext.shared_utils.inject_fault import inject_fault
from nvidia_resiliency_ext.inprocess.tools.inject_fault import inject_fault as older
assert older is inject_fault and inprocess.tools.inject_fault.Fault.SIGKILL.value == 10
from nvidia_resiliency_ext.shared_utils.inject_fault import Fault, clear_workload_exception, dispatch_fault_injection
assert Fault is inprocess.tools.inject_fault.Fault

from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import base_manager, local_manager
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import CheckpointingException
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper, parse_group_sequence
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import LazyCliqueReplicationStrategy
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.utils import debug_time, preload_tensors, wrap_for_async
from ft_client.integrations.local_checkpoints.local_manager import LocalCheckpointManager as own_manager
assert LocalCheckpointManager is own_manager and issubclass(own_manager, base_manager.BaseCheckpointManager)
assert issubclass(BasicTensorAwareStateDict, TensorAwareStateDict)
assert pickle.loads(pickle.dumps(BasicTensorAwareStateDict({"a": 1}))).state_dict == {"a": 1}

import ft_client.integrations.lightning as callbacks
import nvidia_resiliency_ext.ptl_resiliency as ptl
import nvidia_resiliency_ext.ptl_resiliency.fault_tolerance_callback as room
assert ptl is callbacks and room is callbacks and "lightning" not in sys.modules, "imported when it is used"
assert {"FaultToleranceCallback", "FaultToleranceSectionsCallback", "StragglerDetectionCallback"} <= set(dir(ptl))
"""

MISSING = """
for name in ("checkpointing.async_ckpt", "checkpointing.async_ckpt.core",
             "attribution.log_analyzer", "nothing", "inprocess.x"):
    try:
        __import__("nvidia_resiliency_ext." + name)
    except ModuleNotFoundError as error:
        print(error)
try:
    from nvidia_resiliency_ext.checkpointing import async_ckpt
except ImportError as error:
    print(error)
"""


def test_every_documented_name_resolves() -> None:
    assert said_by(INSTALL + NAMES) == ["True"]


def test_what_we_do_not_have_is_an_import_error_that_says_so() -> None:
    _, *errors = said_by(INSTALL + MISSING)
    assert len(errors) == 6
    assert all("is not there under the alias of ft_launcher" in error for error in errors)
    assert "of the peer's checkpointing there are local checkpoints only" in errors[0] == errors[-1]
    assert "straggler detection only" in errors[2]


def test_the_variable_alone_makes_it_work_from_the_start_of_an_interpreter(tmp_path: Path) -> None:
    """By the `.pth` that is installed with us: for `python -m`, srun, and spawned children."""
    (tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "def child():\n"
        "    import nvidia_resiliency_ext.inprocess\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    print(process.exitcode)\n"
    )
    asked = {env.ALIAS_NVRX: "true"}
    script = python(str(tmp_path / "script.py"), **asked)
    assert script.stdout == "0\n", script.stderr
    module = python("-m", "nvidia_resiliency_ext.shared_utils.wait_daemon", str(tmp_path / "pid"), **asked)
    assert (module.returncode, module.stderr) == (1, ""), "it ran: there is no such daemon"
    launcher = python("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ft-nonsense", **asked)
    assert launcher.returncode == 2 and "unknown option --ft-nonsense" in launcher.stderr


@pytest.mark.parametrize("variables", [{}, {env.ALIAS_NVRX: "0"}, {env.ALIAS_NVRX: "perhaps"}], ids=str)
def test_without_a_clear_word_there_is_no_alias(variables: dict[str, str]) -> None:
    done = python("-c", "import nvidia_resiliency_ext", **variables)
    assert "No module named 'nvidia_resiliency_ext'" in done.stderr
    assert ("neither true nor false" in done.stderr) == ("perhaps" in variables.values())


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        ("import nvidia_resiliency_ext as peer", {env.ALIAS_NVRX: "1"}),
        ("from ft_client.integrations.nvrx_alias import install; assert not install()", {}),
        ("import nvidia_resiliency_ext; from ft_client.integrations import nvrx_alias; nvrx_alias.install()", {}),
    ],
    ids=["variable", "install", "install later"],
)
def test_the_real_package_is_left_alone_and_that_is_said_once(
    tmp_path: Path, code: str, variables: dict[str, str]
) -> None:
    package = tmp_path / "nvidia_resiliency_ext"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = 'theirs'")
    (package / "checkpointing.py").touch()
    code += "\nimport nvidia_resiliency_ext.checkpointing; print(nvidia_resiliency_ext.__version__)"
    done = python("-c", code, folder=tmp_path, **variables)
    assert done.stdout == "theirs\n", done.stderr
    assert done.stderr.count(REAL) == 1 and str(package / "__init__.py") in done.stderr


def test_a_real_package_without_a_file_at_the_top_is_left_alone(tmp_path: Path) -> None:
    """As release 0.4.1 is."""
    inner = tmp_path / "nvidia_resiliency_ext" / "inprocess"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("whose = 'theirs'")
    code = "import nvidia_resiliency_ext.inprocess as peer; print(peer.whose)"
    done = python("-c", code, folder=tmp_path, **{env.ALIAS_NVRX: "1"})
    assert done.stdout == "theirs\n", done.stderr
    assert done.stderr.count(REAL) == 1


def test_a_mere_folder_of_that_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "nvidia_resiliency_ext").mkdir()
    code = "import nvidia_resiliency_ext; print(nvidia_resiliency_ext.__version__)"
    assert said_by(code, tmp_path, **{env.ALIAS_NVRX: "1"}) == ["0.6.0"]
