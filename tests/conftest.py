"""How all tests run: hypothesis without a limit on time, signals as in a shell's foreground, records of launchers in
the tests' own folder, which tests are run, and which of them one worker of pytest-xdist runs together.

pytest-xdist's own mark for that, `xdist_group`, does nothing with pytest 9.2.
"""

from __future__ import annotations

import os
import secrets
import signal
from typing import Any

import pytest
from hypothesis import settings

from tests.changes import changed_paths
from tests.guard import watch_over_this_process
from tests.patience import patient
from tests.program import ROOT
from tests.sampling import concerned_by, is_chosen

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script starts by `&`, and all that starts from it
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGQUIT, signal.SIGHUP):  # the same, and `nohup`
    if signal.getsignal(_ignored) is signal.SIG_IGN:
        signal.signal(_ignored, signal.SIG_DFL)

settings.load_profile("ci")  # the same examples each time, however long one takes on a busy machine

TOGETHER = (
    "tests/client/rank/agreement/test_group.py::",
    "tests/client/test_preemption.py::",
    "tests/client/integrations/test_lightning_alone.py::",
    "tests/client/inprocess/test_abort.py::test_one_of_two_is_freed",
    "tests/client/inprocess/test_abort.py::test_three_of_four_are_freed",
    "tests/client/rerun/",
    "tests/ft_launcher/tools/status/test_page.py::",
    "tests/slurm/",
    *(f"tests/e2e/test_fidelity.py::test_nothing_tells_how_it_was_started[part {number} " for number in range(4)),
    "tests/e2e/test_fidelity.py::test_a_script_sees_a_fresh_interpreter",
)
"""Beginnings of tests that share something dear."""


@pytest.fixture(scope="session", autouse=True)
def _guarded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests start ends with this process, even if it is killed."""
    watch_over_this_process(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Launchers without `--log-dir` keep their records here, and TMPDIR stays empty where a test checks that."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


EVERY_TORCH = (
    "tests/test_architecture.py::test_the_monitor_runs_on_a_bare_interpreter",
    "tests/ft_launcher/settings/test_command_line.py::",
    "tests/ft_launcher/agent/test_torchs_environment.py::",
    "tests/ft_launcher/agent/test_torch_launch.py::",
    "tests/ft_launcher/job/rendezvous/test_cycle_store.py::",
    "tests/ft_launcher/test_launch_api.py::",
    "tests/ft_launcher/record/logs/test_log_pump.py::",
    "tests/ft_launcher/settings/test_job_settings.py::",
    "tests/ft_launcher/node/zygote/test_fork_server.py::test_ranks_of_every_cycle_are_forks[auto]",
    "tests/ft_launcher/node/zygote/test_fork_server.py::test_off_says_so_and_starts_by_exec",
    "tests/ft_launcher/decide/attribution/test_known_errors.py::test_the_words_of_this_torch",
    "tests/ft_launcher/job/store/test_job_store.py::",
    "tests/client/rank/monitoring/test_fork_warning.py::",
    "tests/client/rank/start/test_after_import.py::",
    "tests/client/rank/start/test_script.py::",
    "tests/client/memory/test_agreed_load.py::test_each_rank_gets_its_own_state_back_where_replicas_differ",
    "tests/client/memory/test_what_comes_back.py::",
    "tests/client/inprocess/restart/test_interrupt.py::",
    "tests/client/inprocess/test_abort.py::test_one_of_two_is_freed",
    "tests/client/inprocess/test_abort.py::test_an_aborted_group_lives_until_it_is_let_go",
    "tests/client/inprocess/test_gloo_connections.py::",
    "tests/client/inprocess/restart/test_coordination.py::",
    "tests/client/inprocess/standalone/test_store_host.py::",
    "tests/rank_monitor/contract/processes/test_fork.py::",
    "tests/rank_monitor/contract/wire/test_json_record.py::",
    "tests/rank_monitor/test_stacks.py::",
    "tests/rank_monitor/test_rank_process.py::",
    "tests/e2e/test_fidelity.py::test_nothing_tells_how_it_was_started[part 1 ",
    "tests/e2e/test_fidelity.py::test_nothing_tells_how_it_was_started[part 3 ",
    "tests/e2e/test_functions.py::test_one_function_after_the_other_in_one_program[spawn]",
    "tests/e2e/test_like_torchrun.py::",
    "tests/e2e/test_own_interpreter.py::",
    "tests/e2e/test_static_nodes.py::",
    "tests/faults/test_in_process.py::test_a_dead_rank_is_started_again_and_joins_at_the_next_restart[forks]",
    "tests/faults/test_launcher_ends.py::test_told_to_end[SIGINT-trains-130]",
    "tests/faults/test_launcher_ends.py::test_preempted_ranks_save_and_the_next_run_resumes",
    "tests/faults/test_memory_checkpoint.py::test_one_rank_and_then_all_are_killed[ddp-2]",
    "tests/faults/test_memory_checkpoint.py::test_one_rank_and_then_all_are_killed[fsdp-2]",
    "tests/faults/test_rank_faults.py::test_recovers_from_one_death_after_the_other[2]",
    "tests/faults/test_rank_faults.py::test_recovers_from_a_hang[SIGSTOP in step-2]",
    "tests/faults/test_rank_faults.py::test_ends_with_its_code_when_all_restarts_are_spent",
    "tests/faults/test_third_party_rendezvous.py::",
    "tests/faults/test_two_nodes.py::test_both_nodes_restart[SIGKILL]",
    "tests/faults/test_watch_log.py::test_progress_reaches_policy_ledger_and_console[off]",
)
"""Beginnings of tests that get the mark `every_torch`: where the launcher meets torch or the inside of CPython (forked
ranks, exit functions, faulthandler, pending calls, interrupts), a few seconds each."""


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads it
def pytest_configure(config: pytest.Config) -> None:
    """Gives a test as much more time as its deadlines get, and chooses what `sampling.py` goes by."""
    if config.getoption("timeout") is None:
        config.option.timeout = patient(float(config.getini("timeout")))
    # The workers of pytest-xdist are children of this process, and take the same.
    os.environ.setdefault("FT_TEST_SEED", str(secrets.randbelow(10**6)))
    if "FT_TEST_CHANGED" not in os.environ:
        changed = []
        if _share() < 1:  # else all are run
            changed = changed_paths(ROOT)
        os.environ["FT_TEST_CHANGED"] = " ".join(concerned_by(changed))


def _share() -> float:
    return float(os.environ.get("FT_TEST_SHARE", "1"))


def pytest_report_header() -> str:
    """Names what chooses, so that a run can be repeated."""
    seed, changed = os.environ["FT_TEST_SEED"], os.environ["FT_TEST_CHANGED"]
    return f"of the tests that start jobs: FT_TEST_SHARE={_share():g} FT_TEST_SEED={seed} FT_TEST_CHANGED={changed!r}"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives the mark `every_torch`, and leaves out what `sampling.py` does not choose.

    Raises:
        UsageError: a whole collection lacks a test that is named for it.
    """
    unused = set(EVERY_TORCH)
    for item in items:
        beginning = next((name for name in EVERY_TORCH if item.nodeid.startswith(name)), None)
        if beginning is not None:
            item.add_marker(pytest.mark.every_torch)
            unused.discard(beginning)
    failed_alone = config.getoption("lf", default=False)  # of the cache, which `-p no:cacheprovider` switches off
    everything = not failed_alone and config.args == config.getini("testpaths")
    if unused and everything:
        raise pytest.UsageError(f"EVERY_TORCH in tests/conftest.py names tests that do not exist: {sorted(unused)}")
    share, seed, always = _share(), os.environ["FT_TEST_SEED"], tuple(os.environ["FT_TEST_CHANGED"].split())
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        (chosen if is_chosen(item.nodeid, seed, share, is_slow, always) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each worker one test after the other, but `TOGETHER` as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((beginning for beginning in TOGETHER if nodeid.startswith(beginning)), nodeid)

    return Scheduling(config, log)
