"""What another program may write into the ranks' store: it is left out, with one line, and costs nothing."""

from __future__ import annotations

import json
import logging

import pytest
from torch.distributed import TCPStore

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.rounds.barrier import Arrivals, Entry, leave_out, ranks_in
from rank_monitor.contract.rounds.round import Closed, Round, current
from rank_monitor.contract.wire.foreign import whole_number

NUMBERS = ["30000000000", "-30000000000", "garbage", "9" * 5000, "", "1.5", "\xff\xfe"]


@pytest.fixture
def store() -> TCPStore:
    leave_out.cache_clear()
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(
    ("text", "number"),
    [(b"0", 0), ("17", 17), (b"-1", None), (b"18", None), (b"", None), (b"x", None), (b"9" * 10_000, None)],
)
def test_whole_numbers(text: bytes | str, number: int | None) -> None:
    assert whole_number(text, 17) == number


@pytest.mark.parametrize("ranges", ["0-30000000000", "30000000000", "-5", "5-3", "0--1", "x", "1-x", "1,,2"])
def test_ranges_that_no_ranks_have(ranges: str) -> None:
    with pytest.raises(ValueError):
        ranks_in(ranges)


@pytest.mark.parametrize(
    "field",
    [
        *({name: "0-30000000000"} for name in ("terminated", "members", "joined")),
        *({"world_size": number} for number in (30_000_000_000, -1)),
        {"taken": -1},
    ],
    ids=str,
)
def test_an_end_that_nobody_of_ours_wrote(field: dict[str, object]) -> None:
    whole = {"world_size": 2, "terminated": "1", "members": "0", "joined": "", "taken": 0}
    assert Closed.read(json.dumps(whole).encode())
    with pytest.raises(ProtocolError):
        Closed.read(json.dumps(whole | field).encode())


@pytest.mark.parametrize("line", ["garbage", "1 2", "1 2 3 4 5", "0 0 30000000000 1", "-1 0 2 1", "0 0 2 7", "\xff"])
def test_foreign_lines_on_a_roll(store: TCPStore, line: str, caplog: pytest.LogCaptureFixture) -> None:
    iteration = Round(store, 0)
    iteration.end.sign(Entry(0, 0, 2))
    store.append("0/end/entries", f"{line}\n")
    with caplog.at_level(logging.WARNING):
        iteration.account(Entry(1, 1, 2))
    assert iteration.closing() == Closed(2, "", "0-1", "", 0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("count", ["30000000000", "-30000000000"])
def test_a_foreign_count_of_a_roll(store: TCPStore, count: str) -> None:
    roll = Arrivals(store, "roll")
    store.set("roll/count", count)
    assert [roll.complete(Entry(member, member, 3), 3) for member in range(3)] == [False, False, True]


@pytest.mark.parametrize("number", NUMBERS)
def test_foreign_numbers_of_rounds(store: TCPStore, number: str, caplog: pytest.LogCaptureFixture) -> None:
    store.set("round", number)
    with caplog.at_level(logging.WARNING):
        assert current(store) == current(store) == 0
    assert len(caplog.records) == 1
    iteration = Round(store, 4)
    iteration.offer("")
    iteration.arrive(Entry(0, 0, 1))
    assert current(store) == 4
