"""Straggler detection, the rerun machine and the signal handler begin anew after a restart in process."""

from __future__ import annotations

from tests.client import restarted_tools
from tests.client.inprocess.job import job

RANKS = 3


def test_every_tool_begins_anew_in_a_function_that_is_restarted_in_process() -> None:
    with job(RANKS, restarted_tools.main) as made:
        told = made.end()
    for rank, one in told.items():
        assert not one.error and one.exit_code == 0, one
        found, *restored = one.result
        assert restored == [True, True], "the handler of the signal, and the callable that was wrapped"
        assert found["iteration"] == 2 and found["told"], "a handler around it has noted what came before the restarts"
        assert found["seen"] == [0, 1, 2, 2], "the third step is computed twice"
        assert found["diagnostic"] == ("transient_error" if rank == 1 else None)
    report = told[0].result[0]
    assert report["entries"] == {"work": 4, "Model.forward": 4}, "of this iteration alone"
    assert report["scored"] == {name: list(range(RANKS)) for name in report["entries"]}
    assert report["nodes"] == dict.fromkeys(range(RANKS), "turn2")
