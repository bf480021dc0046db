"""When restarts in process end: stories of rounds, and what is said of them."""

from __future__ import annotations

import json

import pytest

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.rounds.escalation import (
    CountedRestarts,
    EscalationLimits,
    LimitsSet,
    RunLife,
    reason_to_give_up,
)
from rank_monitor.contract.wire.json_record import read_record, write_record

LIMITS = EscalationLimits(same_error=3, no_progress=4, soft_timeouts=2)
SOFT_S = 10.0


def record(rank: int, kind: str = "EXCEPTION", error: str = "", **more: object) -> str:
    known = {"rank": rank, "interruption": kind, **more}
    return json.dumps(known | ({"error": error} if error else {}))


def life(ran_s: float = 100.0, pinged: bool = False, reached: int = -1) -> RunLife:
    return RunLife(ran_s, pinged, reached, SOFT_S)


BAD_1 = record(1, error="ValueError at /run_1/a.py:7", member=1, text="one")
BAD_2 = record(1, error="ValueError at /run_2/a.py:7", member=1, text="one")
OTHER_TEXT = record(1, error="ValueError at /run_1/a.py:7", member=1, text="two")
BAD = record(1, error="ValueError at a.py:7", member=1)
OTHER = record(1, error="ValueError at a.py:8", member=1)
ELSEWHERE = record(0, error="ValueError at a.py:7", member=0)
MOVED = record(0, error="ValueError at a.py:7", member=1)
LOST_PEER = record(0, error="RuntimeError at b.py:1", collateral=True)
DEAD = record(1, "TERMINATED")
HANG = record(0, "SOFT_TIMEOUT", member=0)


def told(*stories: tuple[list[str], RunLife | None], limits: EscalationLimits = LIMITS) -> list[str]:
    """What is said after each round."""
    counted, said = CountedRestarts(), []
    for number, (records, one) in enumerate(stories):
        counted = CountedRestarts.read(write_record(counted.after(number, records, one, limits.least_progress)))
        said.append(reason_to_give_up(counted.history, limits))
    return said


@pytest.mark.parametrize(
    ("records", "ends"),
    [
        ([BAD, BAD, BAD], True),
        ([BAD, MOVED, MOVED], True),
        ([BAD, OTHER, BAD, OTHER], False),
        ([BAD, BAD, ELSEWHERE, BAD], False),
        ([DEAD, DEAD, DEAD], True),
        ([record(1, "HARD_TIMEOUT")] * 4, False),
        ([record(1, "UNRESPONSIVE")] * 4, False),
        ([BAD, BAD, HANG, BAD], False),
        ([BAD, record(0, "JOINING"), BAD, record(0, "JOINING"), BAD], True),
        ([BAD, BAD, "garbage", BAD], False),
        ([BAD, BAD, "[1]", BAD], False),
        ([BAD_1, BAD_2, BAD_1], True),
        ([BAD_1, OTHER_TEXT, BAD_1, OTHER_TEXT], False),
        ([BAD_1, BAD_1, OTHER_TEXT], False),
    ],
)
def test_the_same_fault_in_a_row(records: list[str], ends: bool) -> None:
    said = told(*(([one], life()) for one in records))
    assert not any(said[:-1])
    assert bool(said[-1]) == ends
    if ends:
        assert said[-1].startswith("the same fault 3 times in a row: ") and said[-1].endswith(" on rank 1")


def test_a_consequence_is_not_the_fault() -> None:
    said = told(*(([LOST_PEER, DEAD], life()) for _ in range(3)))
    assert said == ["", "", "the same fault 3 times in a row: TERMINATED on rank 1"]
    assert not any(told(*(([LOST_PEER], life()) for _ in range(9))))


def test_hangs_right_after_a_restart() -> None:
    soon, late = life(SOFT_S + 1), life(3 * SOFT_S)
    assert told(([HANG], soon), ([HANG], soon), ([HANG], soon)) == ["", "", "2 hangs in a row right after a restart"]
    assert not any(told(([HANG], soon), ([HANG], soon), ([HANG], late), ([HANG], soon)))
    assert not any(told(([HANG], soon), ([HANG], soon), ([BAD], soon), ([HANG], soon)))
    assert not any(told(([HANG], soon), ([HANG], None), ([HANG], None)))


def test_no_progress_by_reports() -> None:
    others = [record(rank, error=f"E at {rank}") for rank in range(9)]
    lives = [life(reached=number) for number in (5, 5, 4, 9, 9, 9, 8, 9)]
    said = told(*(([one], lived) for one, lived in zip(others, lives, strict=False)))
    assert said == [""] * 7 + ["4 restarts in a row without progress"]


def test_no_progress_by_pings() -> None:
    others = [record(rank, error=f"E at {rank}") for rank in range(9)]
    lives = [life(pinged=pinged) for pinged in (False, False, True, False, True, False, False, False, False)]
    said = told(*(([one], lived) for one, lived in zip(others, lives, strict=True)))
    assert said == [""] * 8 + ["4 restarts in a row without progress"]


def test_a_training_that_tells_nothing_has_no_lack_of_progress() -> None:
    assert not any(told(*(([record(number, error="E")], life()) for number in range(20))))


def test_a_rank_that_did_not_run_knows_nothing_of_progress() -> None:
    stories = [([record(0, error="E at 0")], life(pinged=True))]
    stories += [([record(number, error="E at n")], None) for number in range(20)]
    assert not any(told(*stories))


def test_zero_is_never() -> None:
    never = EscalationLimits()
    assert not any(told(*(([BAD], life(1.0)) for _ in range(20)), limits=never))
    assert not any(told(*(([HANG], life(1.0)) for _ in range(20)), limits=never))


def test_an_iteration_counts_once() -> None:
    once = CountedRestarts().after(0, [BAD], life(), 1)
    assert once.after(0, [BAD], life(), 1) == once


def test_what_is_no_record_is_no_history() -> None:
    for text in (b"\xff{", '{"last": "3"}', '{"history": {"same_errors": "3"}}', '{"history": 3}', ""):
        assert CountedRestarts.read(text) == CountedRestarts()
    assert read_record(EscalationLimits, write_record(LIMITS)) == LIMITS
    with pytest.raises(ProtocolError):
        read_record(EscalationLimits, "{")


def test_what_is_set_goes_over_the_defaults() -> None:
    assert LimitsSet().over(LIMITS) == LIMITS
    assert LimitsSet(same_error=0, least_progress=7).over(LIMITS) == EscalationLimits(0, 4, 2, 7)
    assert read_record(LimitsSet, write_record(LimitsSet(soft_timeouts=9))) == LimitsSet(soft_timeouts=9)
