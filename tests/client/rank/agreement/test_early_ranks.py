"""What ranks say to each other before there is a process group, over a store of torch's in this process."""

from __future__ import annotations

import datetime
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from ft_client.rank.agreement.early_ranks import EarlyRanks, prefix_of
from ft_client.rank.agreement.roll_call import NotAllCame, RollCall
from rank_monitor.contract import env
from tests.patience import patient

CALL = "latest()"
PATIENT_S = patient(60.0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a job of two ranks, of which this process is the first."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = HashStore()
    made.set_timeout(datetime.timedelta(seconds=PATIENT_S))
    return made


def test_each_rank_gets_what_all_have_said(store: Any) -> None:
    ranks = EarlyRanks(CALL, store)
    with ThreadPoolExecutor(1) as pool:
        for number in (1, 2):
            store.set(f"{number}/1", json.dumps(["other", number]))
            other = pool.submit(RollCall(CALL, store, 1, 2).await_all, PATIENT_S)
            assert ranks.gather_json(("this", number)) == [["this", number], ["other", number]]
            other.result(PATIENT_S)


def test_what_all_have_read_is_removed(store: Any) -> None:
    store.set("1/1", "0")
    store.add("1/read", 1)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(RollCall(CALL, store, 1, 2).await_all, PATIENT_S)
        EarlyRanks(CALL, store).gather_json(1)
        other.result(PATIENT_S)
    assert not any(store.check([key]) for key in ("1/0", "1/1", "1/read"))


def test_a_rank_that_goes_on_without_the_call_is_named(store: Any) -> None:
    RollCall(CALL, store, 1, 2).say_absent("fit()")
    with pytest.raises(NotAllCame, match=r"latest\(\) was called by rank 0 and not by rank 1"):
        EarlyRanks(CALL, store).gather_json(1)


def test_a_rank_that_is_alone_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert EarlyRanks(CALL).gather_json((1, 2)) == [[1, 2]]


def test_a_call_that_a_restart_in_process_cut_off_does_not_shift_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 had begun its call in the round before, and rank 1 had not."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(env.CYCLE_STORE, f"127.0.0.1:{server.port}")
    before = PrefixStore(prefix_of(CALL, "127.0.0.1", "1"), server)
    before.add("number/0", 1)
    before.add("calls/0", 1)
    now = PrefixStore(prefix_of(CALL, "127.0.0.1", "2"), server)
    now.set("1/1", json.dumps("other"))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(RollCall(CALL, now, 1, 2).await_all, PATIENT_S)
        assert EarlyRanks(CALL).gather_json("this") == ["this", "other"]
        other.result(PATIENT_S)
