"""Waits of tests: for a condition, under a deadline; and no test sleeps in the place of one."""

from __future__ import annotations

import ast

import pytest

from tests.patience import until
from tests.program import ROOT

PLAY_SOMETHING_SLOW = {
    "client/inprocess/restart/test_interrupt.py",  # a function that is stuck, or cleans up
    "client/inprocess/restart/test_user_function.py",  # a function that is stuck
    "client/integrations/test_lightning_alone.py",  # a step of a training
    "client/straggler/test_detector.py",
    "client/straggler/test_straggler_manager.py",
    "ft_launcher/agent/cycle/test_nccl_ras.py",  # a server
    "ft_launcher/agent/in_process/test_store_threads.py",  # a thread that connects
    "ft_launcher/job/link/test_coordinator_service.py",  # a store whose answer comes late
    "ft_launcher/job/link/test_node_link.py",  # a store whose answer comes late
    "ft_launcher/job/store/test_job_store.py",
    "rank_monitor/contract/processes/test_making_store.py",  # the constructor of a store
    "rank_monitor/test_rank_socket.py",  # heartbeats of a rank
}


def test_what_was_waited_for_is_returned() -> None:
    looks = iter([0, None, "", "found"])
    assert until(lambda: next(looks)) == "found"


def test_time_that_is_up_says_what_was_awaited() -> None:
    with pytest.raises(AssertionError, match=r"^not within 0 s: a miracle$"):
        until(lambda: False, "a miracle", limit_s=0)
    with pytest.raises(AssertionError, match=r"^not within 0 s: seen only now$"):
        until(lambda: False, lambda: "seen only now", limit_s=0)


def test_no_test_sleeps() -> None:
    """`until` waits for conditions. Programs that tests run may sleep, and the files named above, which play one."""
    tests = ROOT / "tests"
    sleeping = {
        str(path.relative_to(tests))
        for path in tests.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "sleep" and ast.unparse(node) == "time.sleep"
    }
    assert sleeping == PLAY_SOMETHING_SLOW, "use `until` of tests/patience.py"
