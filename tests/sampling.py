"""Which of the tests that start whole jobs are run: all of them, or those of what changed and a share chosen by a seed.

A job takes seconds, and there are hundreds of these tests: `make test` runs three of ten of them and all others, so
that it ends within ten minutes on two cores; CI runs all of them, and one of five of the long tests. What a change
concerns must not depend on luck: the tests of the rooms that it touches are run whatever the seed is, but for the long
ones. `tests/changes.py` asks git what changed; without git the seed alone chooses.

FT_TEST_SHARE is the share, 1 if not set. FT_TEST_SEED chooses. FT_TEST_CHANGED names the beginnings of the tests that
are run in any case; empty: none. The first lines of a run name all three, and setting them repeats the choice. Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import PurePosixPath

JOBS = (
    "tests/client/integrations/",
    "tests/demo/",
    "tests/e2e/",
    "tests/faults/",
    "tests/ft_launcher/node/zygote/",
    "tests/nodes/",
    "tests/slurm/",
)
"""Beginnings of tests of which most start a job: three quarters of the time of all tests."""

_JOBS_OF_ALL_KINDS = ("tests/e2e/", "tests/faults/", "tests/nodes/", "tests/demo/")
JOBS_OF: dict[str, tuple[str, ...]] = {
    "configs/": ("tests/faults/test_configs",),
    "constraints.txt": ("tests/e2e/",),
    "scripts/demo/": ("tests/demo/",),
    "scripts/slurm/": ("tests/slurm/",),
    # The launcher. Directly in it are its command line, its Python API, and what composes the parts.
    "ft_launcher/": ("tests/e2e/", "tests/faults/test_launcher_", "tests/demo/"),
    "ft_launcher/agent/": _JOBS_OF_ALL_KINDS,
    "ft_launcher/decide/attribution/": (
        *("tests/faults/test_attribution", "tests/faults/test_first_rank", "tests/faults/test_guilty_rank"),
        *("tests/faults/test_hang", "tests/nodes/test_attribution", "tests/nodes/test_guilty_node"),
    ),
    "ft_launcher/tools/bundle/": ("tests/faults/test_bundle",),
    "ft_launcher/tools/commands/": ("tests/faults/test_bundle", "tests/faults/test_status", "tests/faults/test_top"),
    "ft_launcher/agent/cycle/": _JOBS_OF_ALL_KINDS,
    "ft_launcher/job/store/": ("tests/e2e/test_etcd_nodes", "tests/nodes/test_etcd"),
    "ft_launcher/node/health/": ("tests/faults/test_health_watch", "tests/nodes/test_unhealthy"),
    "ft_launcher/record/ledger/": ("tests/faults/test_ledger", "tests/nodes/test_ledger"),
    "ft_launcher/job/": (
        "tests/nodes/",
        "tests/e2e/test_static_nodes",
        "tests/faults/test_two_nodes",
        "tests/slurm/",
    ),
    "ft_launcher/decide/policy/": (
        "tests/faults/test_policy",
        "tests/faults/test_rank_faults",
        "tests/nodes/test_policy",
    ),
    "ft_launcher/node/processes/": ("tests/faults/",),
    "ft_launcher/node/ranks/": ("tests/e2e/", "tests/faults/"),
    "ft_launcher/record/": (
        *("tests/e2e/test_console", "tests/faults/test_cycle_files", "tests/faults/test_journal"),
        *("tests/faults/test_launcher_console", "tests/faults/test_rank_files", "tests/faults/test_stalled_disk"),
    ),
    "ft_launcher/job/rendezvous/": (
        *("tests/e2e/", "tests/nodes/", "tests/faults/test_silent_rendezvous"),
        *("tests/faults/test_third_party_rendezvous", "tests/faults/test_two_nodes"),
    ),
    "ft_launcher/tools/replay/": ("tests/faults/test_rank_faults", "tests/nodes/test_one_story"),
    "ft_launcher/tools/report/": ("tests/faults/test_job_report", "tests/faults/test_save_interval"),
    "ft_launcher/settings/": ("tests/e2e/", "tests/faults/test_configs"),
    "ft_launcher/tools/status/": (
        *("tests/e2e/test_prometheus", "tests/faults/test_status", "tests/faults/test_top", "tests/faults/test_traces"),
    ),
    "ft_launcher/tools/training_log/": ("tests/faults/test_watch_log",),
    "ft_launcher/node/zygote/": ("tests/e2e/", "tests/faults/", "tests/ft_launcher/node/zygote/"),
    "ft_launcher/decide/": ("tests/faults/", "tests/nodes/"),
    "ft_launcher/node/": ("tests/e2e/", "tests/faults/"),
    "ft_launcher/tools/": ("tests/faults/",),
    # The client. Directly in it are `bootstrap.py`, which runs in each rank, and what users call.
    "client/ft_client/": ("tests/client/integrations/", "tests/e2e/", "tests/faults/"),
    "client/ft_client/rank/": ("tests/client/integrations/", "tests/e2e/", "tests/faults/"),
    "client/ft_client/rank/agreement/": ("tests/client/integrations/test_lightning", "tests/nodes/test_agreements"),
    "client/ft_client/memory/": (
        *("tests/client/integrations/test_lightning_memory", "tests/client/integrations/test_transformers_memory"),
        *("tests/faults/test_memory_", "tests/faults/test_full_memory"),
    ),
    "client/ft_client/inject/": ("tests/faults/test_inject", "tests/nodes/test_inject"),
    "client/ft_client/inprocess/": (
        *("tests/client/integrations/test_nvrx_alias", "tests/client/integrations/test_peer_scripts"),
        *("tests/faults/test_in_process", "tests/slurm/test_in_process"),
    ),
    "client/ft_client/integrations/": ("tests/client/integrations/",),
    "client/ft_client/rank/monitoring/": ("tests/client/integrations/", "tests/faults/"),
    "client/ft_client/rerun/": ("tests/nodes/test_rerun",),
    "client/ft_client/rank/start/": ("tests/e2e/",),
    "client/ft_client/straggler/": (
        *("tests/client/integrations/test_lightning", "tests/client/integrations/test_peer_scripts"),
    ),
    # The monitor, and what all three share.
    "rank_monitor/": ("tests/faults/",),
    "rank_monitor/contract/": _JOBS_OF_ALL_KINDS,
    "rank_monitor/contract/rounds/": (
        *("tests/client/integrations/test_nvrx_alias", "tests/faults/test_in_process", "tests/slurm/test_in_process"),
    ),
}
"""Beginning of a changed path -> beginnings of the tests that start jobs with it. The longest that fits counts."""


def concerned_by(changed: Iterable[str]) -> list[str]:
    """Returns the beginnings of the tests that a change concerns.

    Args:
        changed: paths of the files that changed, from the project's root.
    """
    found: set[str] = set()
    for path in changed:
        if path.startswith("tests/"):
            found |= _concerned_by_test(PurePosixPath(path))
        else:
            room = max((beginning for beginning in JOBS_OF if path.startswith(beginning)), key=len, default="")
            found |= set(JOBS_OF.get(room, ()))
    folders = [beginning for beginning in found if beginning.endswith("/")]
    return sorted(one for one in found if not any(one != folder and one.startswith(folder) for folder in folders))


def _concerned_by_test(path: PurePosixPath) -> set[str]:
    """Returns the test file itself; for a helper file the tests of its folder, since several of them may use it.

    Returns nothing for a helper directly in `tests/`, which all tests use.
    """
    if path.name.startswith("test_"):
        return {str(path)}
    if len(path.parts) > 2:
        return {f"{path.parent}/"}
    return set()


def is_chosen(nodeid: str, seed: str, share: float, is_slow: bool = False, always: tuple[str, ...] = ()) -> bool:
    """Returns whether a test is run. Tests that start no job always are, unless they take long.

    Args:
        always: beginnings of tests that are run whatever the seed is, unless they take long.
    """
    if not is_slow and nodeid.startswith(always):
        return True
    # Not Python's own `hash`, which differs from one process to the next: all workers must choose alike.
    chance = zlib.crc32(f"{seed} {nodeid}".encode()) / 2**32
    return chance < share or not (is_slow or nodeid.startswith(JOBS))
