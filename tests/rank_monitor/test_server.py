"""The monitor's process against real ranks: what it answers, forwards and refuses, and that the watch goes on."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time

import pytest

from rank_monitor.contract.settings.declaration import to_json
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.launcher_messages import (
    Connected,
    Snapshot,
    SnapshotRequest,
    StopJudging,
    Times,
    TimesRequest,
    Verdict,
)
from rank_monitor.contract.wire.messages import (
    Attach,
    ControlRequest,
    Detach,
    Heartbeat,
    Hello,
    InterruptAsked,
    InterruptedAgain,
    LimitsSet,
    Message,
    Ping,
    RankException,
    Refused,
    Sections,
    Welcome,
)
from rank_monitor.contract.wire.rank_times import RankTimes, rank_times
from tests.program import suspend
from tests.rank_monitor.node import STACK_SIGNAL, Node, Puppet, bytes_of, playing
from tests.rank_monitor.timeline import limited
from tests.restart_reports import report

SECTIONS = limited(rank_section_timeouts={"step": 0.3}, stall_warning=600.0)
# A rank that is cut off is not ended while another process of a busy machine takes its time.
RECONNECTS = limited(SECTIONS, connect_timeout=600.0)
FREE = limited()
NOBODY = 65534


def hangs(node: Node, rank: Puppet) -> Verdict:
    """The rank hangs in a step; returns what its monitor finds."""
    rank.say(Sections((("step", time.monotonic_ns()),), 7))
    rank.order("hang_in_sleep")
    return node.hear(Verdict)


def snapshot(node: Node) -> Snapshot:
    node.say(SnapshotRequest(99))
    return node.hear(Snapshot)


def test_a_rank_that_attaches_is_welcomed_and_the_agent_is_told(node: Node) -> None:
    node.monitor(SECTIONS)
    rank = node.start()
    rank.do("connect", node.path)
    rank.say(Hello(rank.pid))
    assert node.hear(Connected) == Connected(rank.pid, attached=False)
    rank.say(Attach(3))
    assert rank.hear() == Welcome(to_json(SECTIONS), 1)
    assert node.hear(Connected) == Connected(rank.pid, attached=True)
    rank.say(Detach())
    assert node.hear(Connected) == Connected(rank.pid, attached=False)


@pytest.mark.parametrize(
    "message",
    [
        RankException("ValueError", "bad \udcff \N{SNOWMAN}", "Traceback ...", 1.5),
        ControlRequest("restart", "I said so"),
        LimitsSet(None, 9.5, {"step": 3}, None, ["section:step"], {"any": [1, {"thing": None}]}),
        report("running", 60.0, 90.0, 5.0),
        report("recovering", entry_rank=5, round=1, reason="again"),
        InterruptedAgain(1, 15.0, "__exit__ runs", "in close"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_for_the_agent_reaches_it_as_it_was(node: Node, message: Message) -> None:
    node.monitor(FREE)
    rank = node.watched()
    rank.say(message)
    assert node.hear(type(message)) == message


def test_limits_set_by_the_training_are_in_force(node: Node) -> None:
    node.monitor(FREE)
    rank = node.watched()
    rank.say(LimitsSet(None, None, {"step": 0.2}, None, ["section:step"]))
    rank.say(Attach(0))
    verdict = hangs(node, rank)
    assert (verdict.limit, verdict.limit_s, verdict.learned) == ("section:step", 0.2, True)


def test_a_guarded_rank_is_asked_to_restart_then_killed(node: Node) -> None:
    node.monitor(FREE)
    rank = node.start()
    rank.do("connect", node.path)
    rank.say(Hello(rank.pid, restart=report("running", 0.2, 0.6, 0.2)))
    rank.say(report("running", 0.2, 0.6, 0.2))
    rank.say(Ping())
    assert rank.hear() == Welcome(to_json(FREE), 1), "which wakes the watchdog of a client"
    asked = node.hear(Verdict)
    assert (asked.limit, asked.condemned) == ("soft_timeout", False)
    assert rank.hear() == InterruptAsked("soft_timeout", asked.reason)
    condemned = node.hear(Verdict)
    assert (condemned.limit, condemned.condemned) == ("hard_timeout", True)
    assert rank.wait() == -signal.SIGTERM


def test_a_guard_with_silly_numbers_is_refused_and_the_watch_goes_on(node: Node) -> None:
    node.monitor(SECTIONS)
    rank = node.watched()
    rank.say(report("running", 9.0, 3.0, 5.0))
    refused = rank.hear()
    assert isinstance(refused, Refused)
    assert "soft 9.0 s, hard 3.0 s" in refused.reason
    assert hangs(node, rank).condemned


def test_a_rank_that_takes_no_question_is_killed_all_the_same(node: Node) -> None:
    """Its connection is full, and it ignores SIGTERM."""
    node.monitor(FREE)
    rank = node.watched()
    rank.do("on_signal", signal.SIGTERM, "ignore")
    for _ in range(400):
        rank.say(report("closing", 0.2, 0.4, 0.2))
    rank.say(report("running", 0.2, 0.4, 0.2))
    rank.say(Ping())
    assert [node.hear(Verdict).limit for _ in range(2)] == ["soft_timeout", "hard_timeout"]
    assert rank.wait() == -signal.SIGKILL


def test_limits_that_the_agent_hands_on_are_in_force(node: Node) -> None:
    node.monitor(FREE)
    rank = node.watched()
    node.say(LimitsSet(None, None, {"step": 0.2}, None))
    assert snapshot(node).attached
    assert hangs(node, rank).limit_s == 0.2


def test_a_snapshot_says_where_the_rank_is(node: Node) -> None:
    node.monitor(FREE)
    assert snapshot(node) == Snapshot(99, False, False, -1, {}, None)
    rank = node.watched()
    rank.say(Sections((("setup", time.monotonic_ns() - 10**9),), 41))
    found = snapshot(node)
    assert (found.connected, found.attached, found.iteration, list(found.sections)) == (True, True, 41, ["setup"])
    assert found.sections["setup"] > 0
    assert found.last_sign_age_s is not None
    rank.order("leave", 3)
    rank.wait()
    found = snapshot(node)
    assert (found.iteration, list(found.sections)) == (41, ["setup"]), "where it was when it ended"


def test_last_words_reach_the_agent_before_the_answer_to_a_snapshot(node: Node) -> None:
    node.monitor(FREE)
    rank = node.watched()
    for number in range(20):
        rank.say(RankException("E", str(number), "", 0.0))
    rank.order("leave", 1)
    rank.wait()
    node.say(SnapshotRequest(1))
    heard = []
    while not isinstance(last := node.hear(object), Snapshot):
        heard += [last.message] if isinstance(last, RankException) else []
    assert heard == [str(number) for number in range(20)]


@pytest.mark.parametrize("reaped", [False, True])
def test_last_words_of_a_rank_that_ended_before_its_connection_was_accepted(node: Node, reaped: bool) -> None:
    node.monitor(FREE)
    began_ns = time.monotonic_ns()
    rank = node.puppet()
    rank.do("connect", node.path)
    rank.say(Hello(rank.pid))
    rank.say(RankException("E", "at once", "", 0.0))
    rank.order("leave", 3)
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        rank.wait()
    node.start(rank, started_ns=began_ns)
    assert node.hear(RankException).message == "at once"


# Nonsense and strangers.


def header(kind: int, version: int = codec.VERSION) -> bytes:
    return struct.pack("<BBHIQ", version, kind, 0, 1, time.monotonic_ns())


NONSENSE = {
    "empty": b"",
    "short": b"\1\1",
    "version": header(1, version=9),
    "kind": header(255),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "oversized": bytes(65_000),
    "oversized with a good start": header(1) + bytes(65_000),
    "no JSON": header(16) + b"{nope",
    "deep JSON": header(17) + b"[" * 30_000,
    "not an object": header(17) + b"[1]",
    "unknown field": header(17) + b'{"what": 1}',
    "wrong type": header(17) + b'{"num_warmup_iterations": "5"}',
    "missing field": header(16) + b"{}",
    "not finite": header(18) + b'{"initial": NaN, "subsequent": Infinity, "sections": {}, "out_of_section": 1e999}',
    "limit that is none": header(18) + b'{"initial": 0, "subsequent": null, "sections": {}, "out_of_section": null}',
    "limits of another shape": header(18) + b'{"initial": null, "subsequent": null, "sections": {"a": []}, '
    b'"out_of_section": null}',
    "sections cut off": header(2) + struct.pack("<qB", 0, 3) + struct.pack("<QB", 1, 200),
    "sections left over": header(2) + struct.pack("<qB", 0, 0) + b"xx",
    "sections not UTF-8": header(2) + struct.pack("<qB", 0, 1) + struct.pack("<QB", 1, 1) + b"\xff",
    "for a monitor to send": bytes_of(Welcome({}, 0)),
    "for an agent to send": bytes_of(StopJudging()),
}


def test_nonsense_is_answered_said_once_and_ends_no_watch(capfd: pytest.CaptureFixture[str]) -> None:
    with playing() as node:  # not by the fixture: what is captured is the standard error of now
        node.monitor(SECTIONS)
        rank = node.watched()
        for data in NONSENSE.values():
            for _ in range(2):
                rank.say(data)
                assert isinstance(rank.hear(), Refused), data[:40]
        assert snapshot(node).attached
        assert hangs(node, rank).limit == "section:step"
    said = capfd.readouterr().err
    assert said.count("[WARNING] [RankMonitorServer:5] Refused: protocol version 9; this process speaks 2") == 1
    assert said.count("unknown kind 255") == 1


def test_a_burst_of_nonsense_that_is_never_read_holds_nothing_up(node: Node) -> None:
    """The rank does not take the answers: they are lost, and nothing waits for it."""
    node.monitor(SECTIONS)
    rank = node.watched()
    for _ in range(600):
        rank.say(b"nonsense")
    assert hangs(node, rank).limit == "section:step"


@pytest.mark.parametrize("greets", [True, False], ids=["says hello", "is silent"])
def test_a_stray_connection_is_refused_and_replaces_nobody(node: Node, greets: bool) -> None:
    node.monitor(SECTIONS)
    rank = node.watched()
    stray = node.puppet()
    stray.do("connect", node.path)
    if greets:
        stray.say(Hello(stray.pid))
    heard = stray.hear()
    assert heard in ("ConnectionResetError", "closed") or isinstance(heard, Refused)
    rank.say(Heartbeat())
    assert snapshot(node).connected
    verdict = hangs(node, rank)
    assert verdict.pid == rank.pid
    assert rank.wait() == -9
    assert stray.do("close") == "closed", "it lives"


def test_silent_strangers_do_not_take_the_place_of_the_rank(node: Node) -> None:
    node.monitor(SECTIONS)
    rank = node.start()
    strangers = [channel.connect(node.path) for _ in range(12)]
    rank.do("connect", node.path)
    rank.say(Hello(rank.pid))
    assert node.hear(Connected).pid == rank.pid
    rank.say(Attach())
    assert isinstance(rank.hear(), Welcome)
    for stranger in strangers:
        stranger.close()
    assert snapshot(node).connected


def test_the_first_message_must_be_a_hello(node: Node) -> None:
    node.monitor(FREE)
    rank = node.start()
    rank.do("connect", node.path)
    rank.say(Attach())
    assert rank.hear() == Refused("the first message must be a hello")
    assert rank.hear() in ("closed", "ConnectionResetError")


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_another_user_is_refused(node: Node) -> None:
    node.monitor(FREE)
    rank = node.watched()
    node.folder.chmod(0o755)
    node.path.chmod(0o666)
    pid = os.fork()
    if pid == 0:
        answer = b""
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(30)
                stranger.connect(str(node.path))
                answer = stranger.recv(1000)
        finally:
            os._exit(0 if b"uid 65534" in answer else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    rank.say(Heartbeat())
    assert snapshot(node).connected


# Connections and cycles.


def test_a_lost_connection_comes_back(node: Node) -> None:
    node.monitor(RECONNECTS)
    rank = node.watched()
    rank.do("close")
    rank.do("connect", node.path)
    rank.say(Hello(rank.pid, attached=True, last_sign_ns=time.monotonic_ns(), got_first_sign=True))
    assert node.hear(Connected) == Connected(rank.pid, attached=True)
    assert hangs(node, rank).limit == "section:step"


def test_no_other_process_takes_the_place_of_a_rank_that_lives(node: Node) -> None:
    node.monitor(RECONNECTS)
    rank, stray = node.watched(), node.puppet()
    rank.do("close")
    stray.do("connect", node.path)
    stray.say(Hello(stray.pid))
    assert stray.hear() == Refused(f"process {rank.pid} is the rank, and lives")
    rank.do("connect", node.path)
    rank.say(Hello(rank.pid, attached=True, last_sign_ns=time.monotonic_ns(), got_first_sign=True))
    assert hangs(node, rank).pid == rank.pid


def test_a_second_program_of_a_script_is_the_rank_when_the_first_has_ended(node: Node) -> None:
    node.monitor(RECONNECTS)
    script, first, second = node.puppet(), node.puppet(), node.puppet()
    node.start(script)
    for program in (first, second):
        program.do("connect", node.path)
        program.say(Hello(program.pid))
        program.say(Attach())
        assert isinstance(program.hear(), Welcome)
        if program is first:
            program.order("leave", 0)
            program.wait()
    assert hangs(node, second).pid == second.pid


def test_a_lost_connection_does_not_switch_the_watch_off(node: Node) -> None:
    node.monitor(SECTIONS)
    rank = node.watched()
    rank.say(Sections((("step", time.monotonic_ns()),), 7))
    rank.do("close")
    assert node.hear(Verdict).limit in ("section:step", "reconnect")
    assert rank.wait() == -9


def test_a_rank_that_connects_before_its_cycle_is_told_loses_nothing(node: Node) -> None:
    node.monitor(FREE)
    rank = node.puppet()
    began = time.monotonic_ns()
    rank.do("connect", node.path)
    rank.say(Hello(rank.pid))
    rank.say(Attach())
    rank.say(Sections((("setup", time.monotonic_ns()),), 5))
    node.start(rank, started_ns=began)
    assert isinstance(rank.hear(), Welcome)
    assert list(snapshot(node).sections) == ["setup"]


def test_a_rank_of_an_earlier_cycle_is_refused(node: Node) -> None:
    node.monitor(FREE)
    late = node.puppet()
    late.do("connect", node.path)
    late.say(Hello(late.pid))
    rank = node.watched()
    assert late.hear() == Refused("this hello is of an earlier cycle")
    assert snapshot(node).connected
    assert rank.say(Heartbeat()) == "sent"


def test_cycle_after_cycle(node: Node) -> None:
    """Between two nothing is judged; each begins with nothing of the one before."""
    node.monitor(SECTIONS)
    for _ in range(3):
        rank = node.watched()
        rank.say(Sections((("step", time.monotonic_ns()),), 7))
        assert list(snapshot(node).sections) == ["step"]
        node.say(StopJudging())
        node.say(StopJudging())
        assert not node.comes(Verdict, 0.4), "longer than the limit: a wrong one would come by then"
        assert rank.say(Heartbeat()) == "sent"
    assert rank.process.poll() is None
    verdict = hangs(node, node.watched())
    assert verdict.cycle == 4
    assert verdict.sections.keys() == {"step"}


def test_a_child_that_inherited_the_connection_is_no_sign_of_life(node: Node) -> None:
    node.monitor(SECTIONS)
    rank = node.watched()
    child = int(rank.do("fork"))
    rank.order("leave", 0)
    rank.wait()
    assert not snapshot(node).connected
    os.kill(child, 9)
    assert node.watched().say(Heartbeat()) == "sent"


def test_a_rank_that_is_a_child_of_what_was_started(node: Node) -> None:
    """A shell script around python: who connects is watched, by the kernel's word."""
    node.monitor(SECTIONS)
    script = node.puppet()
    rank = node.puppet()
    node.start(script)
    rank.do("connect", node.path)
    rank.say(Hello(script.pid))
    rank.say(Attach())
    rank.hear()
    assert hangs(node, rank).pid == rank.pid
    assert rank.wait() == -9
    assert script.process.poll() is None


def test_a_rank_that_ended_before_its_monitor_heard_of_it(node: Node) -> None:
    node.monitor(limited(connect_timeout=1.5))
    rank = node.puppet()
    rank.order("leave", 3)
    rank.wait()
    node.start(rank)
    assert not node.comes(Verdict, 1.8), "longer than the limit: a wrong one would come by then"
    assert not snapshot(node).connected
    node.watched()


def test_a_rank_that_never_connects(node: Node) -> None:
    node.monitor(limited(connect_timeout=0.3))
    rank = node.start()
    rank.do("register", STACK_SIGNAL, node.stack_file)
    verdict = node.hear(Verdict)
    assert (verdict.limit, verdict.pid) == ("connect", rank.pid)
    assert rank.wait() == -9


def test_rank_and_monitor_stopped_together_and_continued(node: Node) -> None:
    monitor = node.monitor(limited(rank_section_timeouts={"step": 1.0}, oversleep_slack=0.2))
    rank = node.watched()
    rank.say(Sections((("step", time.monotonic_ns()),), 7))
    suspend((monitor.pid, rank.pid), 1.5)
    rank.say(Sections((), 7))
    node.say(SnapshotRequest(1))
    assert isinstance(node.hear(object), Snapshot), "and no verdict before"


def test_an_agent_that_does_not_read_holds_nothing_up(node: Node) -> None:
    node.monitor(SECTIONS)
    rank = node.watched()
    for _ in range(1000):
        rank.say(RankException("E", "m" * 500, "t", 0.0))
    rank.say(Sections((("step", time.monotonic_ns()),), 7))
    assert rank.wait() == -9
    assert node.hear(Verdict).limit == "section:step", "what was found is told when the agent reads again"


# The time ledger.


def ledger_of(node: Node, rank: Puppet) -> RankTimes:
    """The next ledger that the monitor sends, which is about this rank."""
    message = node.hear(Times)
    assert (message.cycle, message.pid) == (node.cycle, rank.pid)
    found = rank_times(message.times)
    assert found.known_ns == found.at_ns - found.since_ns
    return found


def test_the_ledger_comes_when_asked_for_at_the_end_of_the_cycle_and_of_the_rank(node: Node) -> None:
    node.monitor(FREE)
    rank = node.watched()
    opened = time.monotonic_ns()
    rank.say(Sections((("data", opened),), 7))
    node.say(TimesRequest())
    found = ledger_of(node, rank)
    assert (found.tail, found.tail_is_section, found.open, found.iteration) == ("data", True, {"data": opened}, 7)
    rank.say(Sections(()))
    node.say(StopJudging())
    assert ledger_of(node, rank).sections["data"].count == 1
    rank.end()
    assert ledger_of(node, rank).sections["data"].count == 1


def test_the_next_monitor_goes_on_with_the_ledger(node: Node) -> None:
    node.monitor(FREE)
    rank = node.watched()
    rank.say(Sections((("data", time.monotonic_ns()),)))
    rank.say(Sections(()))
    node.say(TimesRequest())
    before = ledger_of(node, rank)
    node.monitors.pop().close(goodbye_s=0)
    node.monitor(FREE)
    node.cycle -= 1
    node.start(rank, reconnect=True, times=before.json())
    node.say(TimesRequest())
    after = ledger_of(node, rank)
    assert (after.since_ns, after.sections["data"]) == (before.since_ns, before.sections["data"])
