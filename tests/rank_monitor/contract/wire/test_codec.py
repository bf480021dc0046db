"""Every message there and back; anything else is a protocol error and nothing worse."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.memory_files import StateTier
from rank_monitor.contract.wire import codec, messages
from rank_monitor.contract.wire.launcher_messages import (
    Bye,
    Connected,
    CycleStart,
    Fenced,
    Forked,
    ForkMonitor,
    HangOverdue,
    LogOverdue,
    LogStep,
    MonitorChanged,
    Ready,
    Snapshot,
    SnapshotRequest,
    StandsStill,
    StopJudging,
    Suspected,
    Times,
    TimesRequest,
    Verdict,
)
from rank_monitor.contract.wire.messages import (
    MAX_REASON,
    MAX_REFUSED,
    Attach,
    ControlRequest,
    Detach,
    GroupMade,
    Heartbeat,
    Hello,
    InterruptAsked,
    InterruptedAgain,
    IterationReached,
    LastOutput,
    LimitsSet,
    LogTo,
    Message,
    ModulesImported,
    Ping,
    ProgramFailed,
    Progress,
    RankException,
    Refused,
    ResultInDoubt,
    Returned,
    Sections,
    SectionTimes,
    StacksAsked,
    StateLoaded,
    StateRefused,
    Welcome,
)
from tests.restart_reports import report

U64 = 2**64 - 1
MESSAGES: list[Message] = [
    Heartbeat(),
    Sections(()),
    Sections((("step", 1), ("Ünïcode \N{SNOWMAN}", U64), ("", 0)), -1),
    Sections(tuple((f"{'x' * 250}{number:05}", number) for number in range(codec.MAX_OPEN_SECTIONS)), 2**62),
    IterationReached(-1),
    IterationReached(2**62),
    Progress(2**62),
    Hello(1),
    GroupMade("cpu:gloo,cuda:nccl"),
    ModulesImported(["sympy", "torch._dynamo"], {"HF_HOME": "/a", "CI": None}),
    Hello(1, True, 2**62, True, 0, report("running", began_ns=2**62)),
    Attach(),
    Attach(7),
    LimitsSet(1, 2.5, {"a": None, "b": 1}, None, ["initial"], {"x": {"y": []}}),
    Detach(),
    ProgramFailed("E", "a.py", 1, 1.5),
    RankException("E", "\udcff", 'a "quoted"\nline', 1.5),
    ControlRequest("restart", ""),
    InterruptedAgain(7, 15.02, "__exit__ runs", "in close"),
    LogTo("/logs/monitor-7.log"),
    LastOutput("Error: no such file\n"),
    Returned(),
    report("gave_up", 60, 90.0, 0.5, round=7, reason="again"),
    Ping(),
    InterruptAsked("soft_timeout", "no progress"),
    SectionTimes({"work": {"med_ms": 1.5, "num": 3, "relative": 0.5, "individual": None}}, {"relative": None}),
    ResultInDoubt("reproducible", 3, 7, "a", "cpu"),
    StateLoaded("0a1b2c3d", StateTier.NONE, 0, "", 0, 0),
    StateLoaded(
        "0a1b2c3d",
        StateTier.MEMORY,
        2**62,
        "aaaaaaaa",
        3,
        2**62,
        [StateRefused(9, -1, "\udcff"), StateRefused(8, 1, "")],
        2,
        4,
    ),
    StateLoaded("0", StateTier.BUDDY, 1, "", 0, 1, [StateRefused(9, 1, "\0" * MAX_REASON)] * MAX_REFUSED),
    Welcome({"any": [1, "x"]}, 3),
    StacksAsked(),
    Refused("no"),
    CycleStart(1, 2, 3, 4, "/tmp/x"),
    CycleStart(1, 2, 3, 4, "/tmp/x", True, True, {"initial": 1.0}),
    StopJudging(),
    CycleStart(1, 2, 3, 4, "/tmp/x", True, True, None, {"at_ns": 2**62}),
    SnapshotRequest(1, False, True, True),
    TimesRequest(),
    LogStep(7, 3, 500_000_000, 123456789),
    LogOverdue(123456789),
    HangOverdue(40.0, 41.5, "2 ranks wait for it"),
    Bye(),
    Ready(1),
    Connected(1, False),
    Snapshot(1, True, True, 5, {"s": 1.5}, None, True),
    Verdict(1, 2, 3, "initial", 1.0, 2, True, 4, {}, "r", "l", ["a.py:1 in f"], {"state": "S"}, True),
    Fenced(1, 2),
    Suspected(1, 2, True),
    StandsStill(1, 2),
    Times(1, 2, {"points": [1, 2**62]}),
    ForkMonitor(1, {}),
    Forked(1),
    MonitorChanged(1, "ended", -9),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_there_and_back(message: Message) -> None:
    data = codec.encode(message, 2**32 - 1, U64)
    assert codec.decode(data) == codec.Received(message, 2**32 - 1, U64)


def test_every_message_is_in_the_table_above() -> None:
    assert {type(message) for message in MESSAGES} == set(messages.KINDS.values()) == set(Message.__subclasses__())


def test_a_heartbeat_is_sixteen_bytes_and_known_without_decoding() -> None:
    data = codec.heartbeat(2**40 + 5, 77)
    assert len(data) == 16
    assert codec.decode(data) == codec.Received(Heartbeat(), 5, 77)
    assert codec.heartbeat_sent_ns(data, 16) == 77
    for other in (codec.encode(Progress(1), 1, 1), codec.encode(Bye(), 1, 1), b"", bytes(16), b"\1\1" + data[2:]):
        assert codec.heartbeat_sent_ns(other, len(other)) is None


def test_too_much_is_refused_by_the_sender() -> None:
    with pytest.raises(ValueError, match="at most 64"):
        codec.sections(1, 1, 1, {str(number): 1 for number in range(65)})
    with pytest.raises(ValueError, match="at most 255"):
        codec.sections(1, 1, 1, {"x" * 256: 1})
    with pytest.raises(ValueError, match="at most 60000"):
        codec.encode(Refused("x" * codec.MAX_MESSAGE), 1, 1)


def _header(kind: int, version: int = codec.VERSION) -> bytes:
    return struct.pack("<BBHIQ", version, kind, 0, 1, 1)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "shorter than a header"),
        (bytes(15), "shorter than a header"),
        (_header(1, version=1), "protocol version 1; this process speaks 2"),
        (_header(200), "unknown kind 200"),
        (_header(1) + bytes(codec.MAX_MESSAGE), "above 60000"),
        (_header(3), "kind 3 with 16 bytes"),
        (_header(2), "malformed sections"),
        (_header(2) + struct.pack("<qB", 0, 1), "malformed sections"),
        (_header(2) + struct.pack("<qBQB", 0, 1, 0, 9), "past the end"),
        (_header(2) + struct.pack("<qB", 0, 0) + b"x", "left over"),
        (_header(2) + struct.pack("<qB", 0, 65) + struct.pack("<QB", 0, 0) * 65, "65 entries"),
        (_header(17) + b"\xff", "no JSON"),
        (_header(17) + b"null", "not an object"),
        (_header(17) + b'{"x": 1}', "unknown field 'x'"),
        (_header(16) + b"{}", "Hello: "),
        (_header(16) + b'{"pid": true}', "field 'pid' does not fit"),
        (_header(16) + b'{"pid": 1.0}', "field 'pid' does not fit"),
        (_header(16) + b'{"pid": null}', "field 'pid' does not fit"),
        (_header(65) + b'{"pid": 1, "attached": 1}', "field 'attached' does not fit"),
        (_header(33) + b'{"reason": ["x"]}', "field 'reason' does not fit"),
        (_header(18) + b'{"initial": 1e999}', "field 'initial' does not fit"),
        (_header(18) + b'{"initial": NaN}', "field 'initial' does not fit"),
        (_header(18) + b'{"initial": 1' + b"0" * 400 + b"}", "field 'initial' does not fit"),
        (_header(18) + b'{"learned": [1]}', "field 'learned' does not fit"),
        (_header(18) + b'{"sections": []}', "field 'sections' does not fit"),
        (_header(25) + b'{"sections": ' + b'{"a": ' * 16 + b"1" + b"}" * 16 + b"}", "nested more than 16 deep"),
        (_header(25) + b'{"sections": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", "nested more than 16 deep"),
        (_header(25) + json.dumps({"sections": dict.fromkeys(map(str, range(257)), 1)}).encode(), "more than 256 keys"),
        (
            _header(25) + json.dumps({"gpu": {"a": [dict.fromkeys(map(str, range(257)))]}}).encode(),
            "more than 256 keys",
        ),
    ],
)
def test_what_is_no_message(data: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        codec.decode(data)


KINDS = st.sampled_from([1, 2, 3, 4, *range(14, 24), *range(30, 36), *range(46, 54), *range(62, 70), *range(78, 86)])
TEXT = st.text('ab"\\\0\N{SNOWMAN}\udcff', max_size=10)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=5,
)
NAMES = st.sampled_from(
    sorted({field.name for message in Message.__subclasses__() for field in dataclasses.fields(message)})
)


def _decodes_or_says_why(data: bytes) -> None:
    try:
        received = codec.decode(data)
    except ProtocolError:
        return
    assert codec.decode(codec.encode(received.message, received.sequence, received.sent_ns)) == received


@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    _decodes_or_says_why(data)


@settings(max_examples=500, derandomize=True)
@given(KINDS, st.binary(max_size=200))
def test_any_bytes_after_a_good_header(kind: int, body: bytes) -> None:
    _decodes_or_says_why(_header(kind) + body)


@settings(max_examples=100, derandomize=True)
@given(KINDS, st.dictionaries(NAMES, JSON, max_size=4))
def test_any_json_with_known_names(kind: int, values: dict[str, object]) -> None:
    _decodes_or_says_why(_header(kind) + json.dumps(values).encode())


@settings(max_examples=300, derandomize=True)
@given(st.sampled_from(MESSAGES), st.integers(0, 400), st.binary(min_size=1, max_size=4), st.integers(0, 400))
def test_a_message_that_was_changed_or_cut(message: Message, at: int, what: bytes, length: int) -> None:
    data = codec.encode(message, 1, 1)
    _decodes_or_says_why(data[:at] + what + data[at + len(what) :])
    _decodes_or_says_why(data[:length])
