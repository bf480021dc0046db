"""The flight recorder of a rank: what is read of torch's answer, and what a rank that answers otherwise cannot do."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.flight_recorder import FlightRecorder, groups_of, usual_gap_s
from rank_monitor.loop import Loop
from tests.patience import patient

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


def entry(group: int, number: int, name: str = "gloo:all_reduce", **more: Any) -> dict[str, Any]:
    """A collective as torch 2.13 records it; fields that are not read are left out."""
    names = {0: ["0", "default_pg"], 1: ["3", "dp0"]}[group]
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
        "is_p2p": False,
        "pg_id": group,
        "process_group": names,
        "profiling_name": name,
    } | more


def state(entered: int, finished: int) -> dict[str, str]:
    """The recorder has numbers as texts, and -1 for none."""
    return {"last_completed_collective": str(finished), "last_enqueued_collective": str(entered)}


TRACE: dict[str, Any] = {
    "entries": [entry(0, 1), entry(1, 1), entry(1, 2, "gloo:broadcast"), entry(0, 2)],
    "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}, "3": {"desc": "dp0", "name": "3", "ranks": "[0, 2]"}},
    "pg_status": {"0": state(2, 2), "1": state(2, 1)},
}


def answer(trace: object) -> bytes:
    """As torch's worker server answers."""
    return OK + json.dumps(trace).encode()


def test_what_is_read_of_an_answer() -> None:
    found = groups_of(answer(TRACE))
    assert list(found) == ["3", "0"], "a group that the rank waits in comes first"
    waits = {"entered": 2, "started": 0, "finished": 1, "operation": "broadcast", "shape": "[[4]] ['Float']"}
    assert found["3"] == waits | {"description": "dp0", "members": [0, 2]}
    assert (found["0"]["entered"], found["0"]["finished"], found["0"]["operation"]) == (2, 2, "all_reduce")


def test_the_first_collective_of_a_group() -> None:
    trace = TRACE | {"entries": [entry(0, 1)], "pg_status": {"0": state(1, -1)}}
    assert (groups_of(answer(trace))["0"]["entered"], groups_of(answer(trace))["0"]["finished"]) == (1, 0)


@pytest.mark.parametrize(
    ("retired", "status", "progress", "operation"),
    [
        ([True, True, True], state(3, 3), (3, 3), "all_reduce"),
        ([True, True, True], state(9, 4), (3, 3), "all_reduce"),
        ([True, True, False], state(9, 9), (3, 2), "all_reduce"),
        ([True, False, True], state(9, 8), (3, 1), "broadcast"),
        ([False, False, False], state(9, -1), (3, 0), "all_gather"),
    ],
)
def test_with_gloo_the_entries_count(
    retired: list[bool], status: dict[str, str], progress: tuple[int, int], operation: str
) -> None:
    """Its other numbers count sends and receives, and may be those of an earlier collective that ended later."""
    names = ["gloo:all_gather", "gloo:broadcast", "gloo:all_reduce"]
    entries = [
        entry(0, at, name, retired=ended) for at, (name, ended) in enumerate(zip(names, retired, strict=True), 1)
    ]
    found = groups_of(answer({"entries": entries, "pg_status": {"0": status}}))["0"]
    assert ((found["entered"], found["finished"]), found["operation"]) == (progress, operation)


@pytest.mark.parametrize(
    ("moments_s", "gap_s"),
    [
        ([], None),
        ([5], None),
        ([5, 7], 2.0),
        ([0, 1, 2, 3, 4, 104], 100.0),
        ([*range(400), 499], 1.0),
        ([moment + part / 1000 for moment in range(0, 600, 30) for part in range(8)], 29.993),
        ([3, 1, 2], 1.0),
        (["no number", None], None),
    ],
    ids=["none", "one", "two", "long ago", "a checkpoint", "steps of eight buckets", "out of order", "nonsense"],
)
def test_the_usual_time_between_two_collectives(moments_s: list[Any], gap_s: float | None) -> None:
    moments = [round(moment * 1e9) if isinstance(moment, (int, float)) else moment for moment in moments_s]
    entries = [entry(0, number, time_created_ns=moment) for number, moment in enumerate(moments, 1)]
    found = usual_gap_s(answer({"entries": entries}))
    assert found == (None if gap_s is None else pytest.approx(gap_s))


def test_an_answer_without_collectives_tells_no_usual_time() -> None:
    for wrong in (b"", OK, OK + b"[]", answer({"entries": 3}), b"HTTP/1.1 404 Not Found\r\n\r\n{}"):
        with pytest.raises(ValueError):
            usual_gap_s(wrong)


def test_with_nccl_its_own_numbers_count() -> None:
    """Its watchdog retires entries a while after their end."""
    trace = TRACE | {"entries": [entry(0, number, "nccl:all_reduce", retired=False) for number in (1, 2)]}
    found = groups_of(answer(trace))["0"]
    assert (found["entered"], found["finished"]) == (2, 2)


def message(number: int, name: str, state: str = "completed", after: int = 2, **more: Any) -> dict[str, Any]:
    """A send or a receive in group dp0 as NCCL records it, after the collective `after` of the group."""
    return entry(1, after, f"nccl:{name}", is_p2p=True, p2p_seq_id=number, state=state, retired=False) | more


def all_reduce(number: int, state: str = "completed") -> dict[str, Any]:
    """A collective of group dp0 with NCCL."""
    return entry(1, number, "nccl:all_reduce", p2p_seq_id=0, state=state, retired=False)


@pytest.mark.parametrize(
    ("messages", "sends", "receives"),
    [
        ([message(1, "send 0->1")], [], []),
        ([message(1, "send 0->1", "scheduled")], [2], []),
        ([message(1, "recv 0<-1", "started")], [], [2]),
        ([message(1, "recv 0<-1", "scheduled", retired=True)], [], []),
        ([message(1, "send 0->1", "scheduled"), message(2, "send 0->1")], [], []),
        ([message(1, "send 0->1"), message(2, "send 0->1", "scheduled")], [2], []),
        ([message(1, "send 0->1", "scheduled"), message(1, "recv 0<-1", "scheduled")], [2], [2]),
        (
            [
                message(1, "send 0->1", "scheduled"),
                message(1, "recv 0<-1", "scheduled"),
                message(1, "coalesced", "started"),
            ],
            [2],
            [2],
        ),
        ([message(1, "send 0->1", "scheduled"), message(1, "coalesced")], [], []),
        ([message(1, "send 0->1", "scheduled"), message(1, "coalesced", is_p2p=False)], [], []),
        ([message(1, "send 0->1", "scheduled"), message(1, "coalesced", "started", is_p2p=False)], [2], []),
        ([message(1, "send 0->7", "scheduled")], None, []),
        ([message(1, "nonsense", "scheduled")], [], []),
    ],
    ids=[
        "done",
        "sends",
        "receives",
        "retired",
        "an old one",
        "again",
        "begun",
        "batch",
        "batch done",
        "batch unmarked",
        "batch unmarked runs",
        "odd",
        "other",
    ],
)
def test_sends_and_receives_of_nccl(
    messages: list[dict[str, Any]], sends: list[int] | None, receives: list[int] | None
) -> None:
    """The peers are given as ranks of the job; the group has ranks 0 and 2."""
    found = groups_of(answer(TRACE | {"entries": messages, "pg_status": {"1": state(7, 7)}}))["3"]
    assert (found["sends"], found["receives"]) == (sends, receives)
    assert (found["entered"], found["finished"], found["operation"]) == (2, 2, "")


def test_where_ranks_of_a_group_are_not_known_peers_are_not() -> None:
    entries = [message(1, "send 0->1", "scheduled")]
    found = groups_of(answer({"entries": entries, "pg_status": {"1": state(7, 7)}}))["3"]
    assert (found["sends"], found["receives"]) == (None, [])


def test_the_number_of_peers_is_bounded() -> None:
    config = {"3": {"desc": "dp0", "name": "3", "ranks": json.dumps(list(range(99)))}}
    entries = [message(number, f"send 0->{number}", "scheduled") for number in range(1, 99)]
    found = groups_of(answer({"entries": entries, "pg_status": {"1": state(7, 7)}, "pg_config": config}))["3"]
    assert (found["sends"], found["receives"]) == (None, [])


@pytest.mark.parametrize(
    ("entries", "progress"),
    [
        ([all_reduce(1), all_reduce(2), message(9, "send 0->1")], (2, 2)),
        ([all_reduce(1), all_reduce(2, "scheduled"), message(9, "send 0->1")], (2, 1)),
        ([message(8, "send 0->1"), all_reduce(3, "started")], (3, 2)),
        ([message(8, "send 0->1", after=5)], (5, 5)),
        (
            [all_reduce(2), message(8, "send 0->1", "scheduled"), message(8, "coalesced", "started", is_p2p=False)],
            (2, 2),
        ),
        (
            [message(8, "send 0->1"), all_reduce(3), entry(1, 3, "nccl:coalesced", p2p_seq_id=8, state="started")],
            (3, 2),
        ),
    ],
)
def test_sends_and_receives_do_not_count_as_collectives(
    entries: list[dict[str, Any]], progress: tuple[int, int]
) -> None:
    """NCCL's last number of a group is that of its last send or receive, if that came last."""
    found = groups_of(answer(TRACE | {"entries": entries, "pg_status": {"1": state(9, 9)}}))["3"]
    assert (found["entered"], found["finished"]) == progress


def test_the_number_of_groups_and_the_length_of_names_are_bounded() -> None:
    entries = [entry(0, 1) | {"pg_id": number, "process_group": [f"{number}" + 5000 * "x", ""]} for number in range(99)]
    trace = {"entries": entries, "pg_status": {str(number): state(1, int(number != 98)) for number in range(99)}}
    found = groups_of(answer(trace))
    assert len(found) == 32
    assert next(iter(found)).startswith("98x")
    assert max(map(len, found)) == 120


BROKEN = [
    b"",
    b"HTTP/1.1 404 Not Found\r\n\r\nHandler not found",
    OK + b"{",
    OK + b"[]",
    OK + b"{}",
    OK + b"[" * 100_000,
    answer({"entries": 1, "pg_status": {}}),
]
ODD = [
    {"entries": [1, None, {}], "pg_status": {}},
    {"entries": [entry(0, 1) | {"collective_seq_id": "x" * 9000}], "pg_status": {"0": 5}},
    {"entries": [entry(0, 1) | {"process_group": [1]}], "pg_status": {"0": {"last_enqueued_collective": 1e300}}},
    {"entries": [entry(0, 1)], "pg_status": {"0": {}}, "pg_config": {"3": {"name": "3", "ranks": "[1" * 99}}},
]


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_no_answer_of_the_kind(data: bytes) -> None:
    with pytest.raises(ValueError):
        groups_of(data)


@pytest.mark.parametrize("trace", ODD, ids=range(len(ODD)))
def test_odd_values_are_passed_over(trace: dict[str, Any]) -> None:
    assert all(group["entered"] in (0, 1) for group in groups_of(answer(trace)).values())


class Server:
    """A rank's socket that answers with `data`; never, with None."""

    def __init__(self, path: Path, data: bytes | None) -> None:
        self.path, self.data, self.requests = str(path), data, 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.requests += 1
            self._open.append(connection)
            if self.data is not None:
                connection.recv(4096)
                connection.sendall(self.data)
                connection.close()

    def close(self) -> None:
        """Closes all."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in (self._listener, *self._open):
            connection.close()


@pytest.fixture
def recorder() -> Iterator[FlightRecorder]:
    """One with a loop of its own."""
    loop = Loop()
    asked = FlightRecorder(loop)
    yield asked
    asked.reset()
    loop.close()


def test_an_answer_is_awaited_and_used_again(recorder: FlightRecorder, tmp_path: Path) -> None:
    server = Server(tmp_path / "f0", answer(TRACE))
    began = time.monotonic()
    recorder.ask(server.path, began)
    assert recorder.groups(patient(30.0))["3"]["entered"] == 2
    recorder.ask(server.path, began)
    assert recorder.groups()["3"]["entered"] == 2
    server.close()
    assert server.requests == 1
    recorder.reset()
    assert recorder.groups() == {}


@pytest.mark.parametrize("data", [b"nonsense", OK + b"\xff" * 100_000])
def test_a_wrong_answer_is_none(recorder: FlightRecorder, tmp_path: Path, data: bytes) -> None:
    server = Server(tmp_path / "f0", data)
    recorder.ask(server.path, time.monotonic())
    assert recorder.groups(patient(30.0)) == {}
    server.close()


def test_a_rank_that_never_answers_is_not_waited_for(recorder: FlightRecorder, tmp_path: Path) -> None:
    server = Server(tmp_path / "f0", None)
    recorder.ask(server.path, time.monotonic())
    assert recorder.groups(0.01) == {}
    server.close()


def test_an_answer_of_before_is_none_of_now(recorder: FlightRecorder, tmp_path: Path) -> None:
    server = Server(tmp_path / "f0", answer(TRACE))
    recorder.ask(server.path, time.monotonic())
    assert recorder.groups(patient(30.0))
    server.close()
    since = time.monotonic()
    recorder.ask(server.path, since)
    assert recorder.groups(0.0, since) == {}
    assert recorder.groups(), "of a rank that is gone it is the last word"


@pytest.mark.parametrize("path", ["", "/nowhere/f0"])
def test_nobody_there(recorder: FlightRecorder, path: str) -> None:
    recorder.ask(path, time.monotonic())
    assert recorder.groups(1.0) == {}
