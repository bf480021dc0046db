"""What another program may write into the rendezvous' store: the job goes on, and one line says so."""

from __future__ import annotations

import resource

import pytest

from ft_launcher.job.coordinator.node_messages import EndReason
from tests.ft_launcher.job.nodes_of_a_test import failed
from tests.ft_launcher.job.site import Site, site
from tests.ft_launcher.job.store.test_job_store import keys_of
from tests.patience import until

both = pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "apart"])
_MAX_GROWTH_KIB = 100 * 1024


def restart(made: Site, cycle: int) -> None:
    made.nodes["b"].report_end(EndReason.FAILED, "boom")
    assert made.end("abc") == {(cycle, "failed", None)}
    made.nodes["b"].attach(failed())
    assert made.form("abc") == {"a": 0, "b": 1, "c": 2}


@both
@pytest.mark.parametrize("count", ["30000000000", "3000000", "500", "0", "-7", "garbage", "9" * 30])
def test_a_foreign_counter_of_the_inbox(hosted: bool, count: str, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with site(3, 3, hosted) as made:
        made.form("abc", begin=True)
        keys_of(made.store()).set("inbox", count)
        if count in ("0", "-7", "garbage", "9" * 30):
            until(lambda: "was written anew" in caplog.text)
        for cycle in range(3):
            restart(made, cycle)
    assert ("inbox' counter" in caplog.text) == (count != "500"), "as many messages may wait in a large job"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MAX_GROWTH_KIB


@both
@pytest.mark.parametrize("beats", ["garbage", "9" * 30, "-5"])
def test_foreign_beats(hosted: bool, beats: str, caplog: pytest.LogCaptureFixture) -> None:
    with site(3, 3, hosted) as made:
        made.form("abc", begin=True)
        node = next(name for name in "abc" if name != made.coordinator())
        keys_of(made.store()).set(f"beat/{node}", beats)
        until(lambda: "counted anew" in caplog.text)
        for cycle in range(3):
            restart(made, cycle)


@both
def test_foreign_messages(hosted: bool, caplog: pytest.LogCaptureFixture) -> None:
    with site(3, 3, hosted) as made:
        made.form("abc", begin=True)
        store = made.store()
        for text in ("garbage", "[" * 100_000, '{"v": 1, "kind": "Ended"}', "", "\0" * 100):
            store.post(text)
        restart(made, 0)
        assert "a record of another program" in caplog.text
