"""What NCCL's RAS answers, in the shapes that NVIDIA's guide and releases 2.24 to 2.30 show. No GPU wrote these.

Four ranks on two nodes, in containers: their pids are the same on both.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.decide.attribution import ras_answer
from ft_launcher.decide.attribution.nccl_view import Late, NcclProcess, NcclView, of_record, to_record
from ft_launcher.decide.attribution.ras_answer import view_in
from rank_monitor.contract.errors import ProtocolError

ANSWERS = Path(__file__).parents[3] / "data" / "nccl_ras"
EVERY_ANSWER = sorted(path.name for path in ANSWERS.iterdir())
LAST = "10.0.0.2"


def read(name: str) -> bytes:
    return (ANSWERS / name).read_bytes()


def misses(*peers: NcclProcess) -> NcclView:
    return NcclView(4, peers, len(peers))


def late(operation: str, *numbers: int) -> NcclView:
    behind = (Late(NcclProcess(LAST, 98 + number, number, 4), operation, 17, 18) for number in numbers)
    return NcclView(4, late=tuple(behind))


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("all_well.json", NcclView(4)),
        ("all_well.txt", NcclView(4)),
        ("uneven_nodes.txt", NcclView(4)),
        ("one_rank.json", NcclView(1)),
        # It answers, and has left one communicator.
        ("left.json", NcclView(4)),
        ("unresponsive.json", misses(NcclProcess(LAST, 101, 3, 4))),
        # Release 2.24 does not say which process has which rank.
        ("unresponsive.txt", misses(NcclProcess(LAST, 101))),
        ("dead.json", misses(NcclProcess(LAST, 101, 3, 4, True))),
        ("dead.txt", misses(NcclProcess(LAST, 101, 3, 4, True))),
        ("counts.json", late("AllReduce", 3)),
        ("counts.txt", late("AllReduce", 3)),
        # Release 2.24 counts all operations together.
        ("counts_of_many.txt", late("", 2, 3)),
    ],
)
def test_what_an_answer_says(name: str, view: NcclView) -> None:
    assert view_in(read(name)) == view


def test_one_that_reaches_few_is_cut_off_itself() -> None:
    view = view_in(read("cut_off.json"))
    assert (view.processes, view.missing_count, view.is_cut_off) == (4, 3, True)
    assert not view_in(read("dead.json")).is_cut_off
    assert not view_in(read("one_rank.json")).is_cut_off


@pytest.mark.parametrize("name", EVERY_ANSWER)
def test_a_record_is_read_again(name: str) -> None:
    view = view_in(read(name))
    assert of_record(to_record(view)) == view


@pytest.mark.parametrize("name", EVERY_ANSWER)
def test_a_torn_answer_is_none(name: str) -> None:
    """Of a text all is there once its last heading is; what follows says who is late."""
    answer = read(name)
    end = len(answer.rstrip())
    if name.endswith(".txt"):
        end = answer.index(b"Warnings")
    for cut in range(0, end, 7):
        with pytest.raises(ValueError, match=r"."):
            view_in(answer[:cut])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SERVER PROTOCOL 2\nOK\nOK\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"[" * 100_000,
        b'{"communicators": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"communicators": {}}',
        b"OK\n" * 100_000,
        b"Errors\nWarnings\n",
        b"Job summary\n1 2 3\nErrors\nINCOMPLETE\n  9 job processes\nWarnings\n",
        b"Job summary\n1 " + b"9" * 100_000 + b" 3\nErrors\nWarnings\n",
    ],
    ids=range(10),
)
def test_what_is_no_answer(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        view_in(answer)


def test_what_is_not_known_is_left_out() -> None:
    answer = read("dead.json").replace(b'"considered_dead"', b'"considered_gone"').replace(b'"size": 2', b'"size": "2"')
    assert view_in(answer) == misses(NcclProcess(LAST, 101, 3, 4))
    assert view_in(b'{"communicators": [3, {"ranks": 4, "missing_ranks": [5, {"pid": 1}]}]}') == NcclView(0)
    text = read("dead.txt").replace(b"DEAD\n", b"GONE\n  a new section\n\nDEAD\n")
    assert view_in(text) == misses(NcclProcess(LAST, 101, 3, 4, True))


def test_of_thousands_of_missing_ranks_some_are_kept() -> None:
    lines = "".join(f"  Process {pid} on node 10.0.0.9 managing GPU 0\n" for pid in range(1, 2001))
    count = "DEAD\n  2000 job processes are considered dead (unreachable via the RAS network)\n"
    view = view_in(read("dead.txt").replace(b"      4        4\n", b"   2048     2048\n").replace(
        b"DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n", (count + lines).encode()
    ))  # fmt: skip
    assert (view.processes, len(view.missing), view.missing_count) == (2048, 64, 2001)


@given(name=st.sampled_from(EVERY_ANSWER), seed=st.integers(0, 1 << 32))
def test_a_spoiled_answer_is_an_answer_or_an_error(name: str, seed: int) -> None:
    chosen = random.Random(seed)
    answer = bytearray(read(name))
    for _ in range(chosen.randint(1, 40)):
        at = chosen.randrange(len(answer))
        answer[at : at + chosen.randint(0, 3)] = chosen.choice([b"", b"9", b'"', b"\n", b"}", b"\xff", b"Rank 3 "])
    try:
        view = view_in(bytes(answer))
    except ValueError:
        return
    assert len(view.missing) <= 64 and of_record(to_record(view)) == view


def test_the_longest_answer_that_is_taken_holds_2048_ranks() -> None:
    per_rank = len(read("all_well.json")) / 8  # four ranks in the world, and in one more communicator
    assert 6 * 2048 * per_rank < ras_answer.most_bytes(2048)


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {},
        {"processes": 4, "missing": [], "late": [{"peer": {}}]},
        {"processes": "4", "missing": [], "late": []},
        {"processes": 4, "missing": [{"host": 3, "pid": 1}], "late": []},
        {"processes": 4, "missing": 5, "late": []},
    ],
)
def test_a_record_that_does_not_fit(record: object) -> None:
    with pytest.raises(ProtocolError):
        of_record(record)
