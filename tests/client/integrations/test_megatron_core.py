"""Megatron Core as it is on PyPI, unmodified, with local checkpoints under the alias; and how programs find out whether
NVIDIA's package is there, without it, with the alias, and with the package."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rank_monitor.contract import env
from tests.client.integrations.test_local_checkpoint_ranks import run
from tests.nodes.conftest import require
from tests.program import clean_environment
from tests.program import run as run_program

WORKER = "tests.client.integrations.megatron_core_worker"
ALIAS = {env.ALIAS_NVRX: "1"}


@pytest.fixture(autouse=True)
def _core_is_installed() -> None:
    if importlib.util.find_spec("megatron") is None:
        require("Megatron Core is not installed: pip install megatron-core")


@pytest.mark.timeout(300)
def test_megatron_core_saves_and_loads(tmp_path: Path) -> None:
    """All ways in one run, since the import of Core takes several seconds."""
    of_ranks, said = run(tmp_path, "all_of_it", worker=WORKER, limit=1 << 20, **ALIAS)
    for rank, found in enumerate(of_ranks):
        loaded = [-1, 10, [10, 20, 10 + rank, 10 + rank, 10]]
        assert found == {
            "atomic": loaded,
            "fully_parallel": loaded,
            "asynchronous": loaded,
            "by_a_persistent_worker": loaded,
            # The request of a save that does not fit passes through the queue, which waits for its end. The
            # program's own function is not called.
            "refused": [1, -1],
            "replicated": 5,
        }
    assert said.count("no local checkpoint was saved: parts of 8.0 MiB do not fit into the") == 1
    assert said.count("local checkpoints are not replicated") == 1


DETECTION = """
import importlib, json, sys, warnings
from importlib import import_module
warnings.simplefilter("ignore")

def there(name):
    try:
        import_module(name)
    except (ImportError, ModuleNotFoundError):
        return False
    return True

PEER = "nvidia_resiliency_ext"
from megatron.core.dist_checkpointing import tensor_aware_state_dict
print(json.dumps([
    # Megatron Bridge, for local checkpoints.
    there(PEER + ".checkpointing"),
    # Megatron-LM, as it checks its arguments.
    there(PEER + ".checkpointing.local.ckpt_managers.local_manager"),
    # Megatron Core's class of a state.
    tensor_aware_state_dict.HAVE_NVRX,
    # Megatron Core and Bridge, for asynchronous saves of checkpoints on disk.
    any(there(f"{PEER}.checkpointing.async_ckpt.{name}") for name in (
        "core", "cached_metadata_filesystem_reader", "filesystem_async", "state_dict_saver")),
    tensor_aware_state_dict.TensorAwareStateDict.__module__,
]))
"""


def detected(folder: Path, **variables: str) -> list[object]:
    path = {"PYTHONPATH": str(folder)}
    done = run_program([sys.executable, "-c", DETECTION], environ=clean_environment(**path, **variables), limit_s=120)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def test_without_the_package_and_without_the_alias_nothing_is_there(tmp_path: Path) -> None:
    *found, _ = detected(tmp_path)
    assert found == [False, False, False, False]


def test_under_the_alias_local_checkpoints_are_there_and_asynchronous_ones_are_not(tmp_path: Path) -> None:
    *found, module = detected(tmp_path, **ALIAS)
    assert found == [True, True, True, False]
    assert module == "ft_client.integrations.local_checkpoints.state_dicts"


def test_with_the_package_its_own_modules_are_found(tmp_path: Path) -> None:
    """A stand-in with the package's modules: with the package itself in the tests' environment there is no alias."""
    top = tmp_path / "nvidia_resiliency_ext" / "checkpointing"
    for name in ("local/base_state_dict", "local/ckpt_managers/local_manager"):
        file = top / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("class TensorAwareStateDict: pass\n")
    for name in ("core", "cached_metadata_filesystem_reader", "filesystem_async", "state_dict_saver"):
        file = top / "async_ckpt" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (top / "__init__.py").touch()
    *found, module = detected(tmp_path, **ALIAS)
    assert found == [True, True, True, True]
    assert module == "nvidia_resiliency_ext.checkpointing.local.base_state_dict"
