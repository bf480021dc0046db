"""Messages between nodes: round trips, and what is not a message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind
from ft_launcher.decide.policy.case import FaultReport, PolicyJudgement, RankRequest
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.restart_policy import Action, Decision
from ft_launcher.job.coordinator.node_messages import (
    MAX_BYTES,
    VERSION,
    CycleEnd,
    Ended,
    EndReason,
    Formed,
    JobOver,
    JoinRequest,
    Left,
    Members,
    NodeMessage,
    RankAssigned,
    decode,
    encode,
)
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.messages import ControlRequest

words, numbers = st.text(max_size=20), st.integers(-(2**60), 2**60)
scalars = st.none() | st.booleans() | numbers | words
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(words, inner), max_leaves=8)
objects = st.dictionaries(words, json_values, max_size=4)

faults = st.builds(
    Fault,
    *(st.sampled_from(FaultKind), numbers, numbers, numbers, numbers, words, words, words),
    fault_class=st.sampled_from(FaultClass),
    blamed=st.lists(numbers).map(tuple),
)
lives = st.builds(CycleLife, st.floats(0, 1e6), st.none() | numbers)
reports = st.none() | st.builds(FaultReport, faults, lives, words)
decisions = st.builds(Decision, st.sampled_from(Action), words, st.booleans(), numbers)
judgements = st.none() | st.builds(PolicyJudgement, decisions, words, words, objects, reports)
joins = st.builds(JoinRequest, words, numbers, words, words, numbers, words, numbers, words, numbers, reports, objects)
overs = st.builds(JobOver, numbers, words, judgements)
arrivals = st.dictionaries(words, joins, max_size=2)
reasons = st.sampled_from(EndReason)
requests = st.builds(RankRequest, numbers, st.builds(ControlRequest, words, words))

messages: st.SearchStrategy[NodeMessage] = st.one_of(
    joins,
    st.builds(Ended, words, numbers, reasons, words, st.none() | requests, numbers),
    st.builds(Left, words, words),
    st.builds(Members, numbers, st.lists(words), st.lists(words), st.lists(numbers)),
    st.builds(RankAssigned, numbers, numbers, numbers, words, *[numbers] * 4, st.booleans(), judgements),
    overs,
    st.builds(CycleEnd, numbers, reasons, words, st.none() | numbers),
    st.builds(Formed, numbers, words, numbers, numbers, st.just([]), words, arrivals, objects, st.none() | overs),
)


@given(messages)
def test_what_was_encoded_is_decoded(message: NodeMessage) -> None:
    assert decode(encode(message).encode()) == message


@given(st.binary())
def test_any_bytes_are_a_message_or_a_protocol_error(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(text)


kinds = st.sampled_from(
    ["JoinRequest", "Ended", "Left", "RankAssigned", "JobOver", "CycleEnd", "Formed", "Members", "Other", None]
)


@given(kinds, st.sampled_from([VERSION, VERSION + 1, None]), objects, messages, st.data())
def test_any_object_is_a_message_or_a_protocol_error(
    kind: str | None, version: int | None, values: dict[str, Any], message: NodeMessage, data: st.DataObject
) -> None:
    fields = json.loads(encode(message))
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)))):
        fields[name] = data.draw(json_values)
    for record in (values | {"v": version, "kind": kind}, fields):
        try:
            decode(json.dumps(record).encode())
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "not an object"),
        (b"{}", "version None"),
        (b'{"v":2,"kind":"Left"}', "version 2"),
        (b'{"v":%d,"kind":"Gon"}' % VERSION, "unknown kind"),
        (b'{"v":%d,"kind":"Left","node":"a"}' % VERSION, "reason"),
        (b'{"v":%d,"kind":"Left","node":"a","reason":1}' % VERSION, "reason"),
        (b'{"v":%d,"kind":"Left","node":"a","reason":"","more":1}' % VERSION, "more"),
        (b" " * (MAX_BYTES + 1), "bytes is above"),
    ],
)
def test_what_is_no_message_says_why(text: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(text)


def test_a_record_without_the_arrival_of_a_member_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no arrival of"):
        decode(encode(Formed(0, "a", 1, 0, ["a"])).encode())
