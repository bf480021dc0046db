"""The rank as a process: how it hangs, what is seen of it, and how it dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_monitor import rank_process, stacks
from rank_monitor.contract.processes import proc
from rank_monitor.contract.wire.launcher_messages import Verdict
from rank_monitor.contract.wire.messages import Hello, Progress, Sections
from rank_monitor.rank_process import RankProcess
from tests.patience import patient, until
from tests.rank_monitor.node import STACK_SIGNAL, Node, Puppet, ended
from tests.rank_monitor.timeline import limited

SECTIONS = limited(rank_section_timeouts={"step": 0.3}, termination_grace_time=0.3)


def is_lost() -> bool:
    """Stands for a message that is sent and never answered."""
    return True


def enters_step(rank: Puppet) -> None:
    rank.say(Sections((("step", time.monotonic_ns()),), 7))


@pytest.mark.parametrize("how", ["hang_in_sleep", "hang_with_the_interpreter_locked", "hang_in_a_loop"])
def test_a_hang_is_seen_with_its_stacks_and_ended(node: Node, how: str) -> None:
    node.monitor(SECTIONS)
    rank = node.watched()
    enters_step(rank)
    rank.order(how)
    verdict = node.hear(Verdict)
    assert (verdict.limit, verdict.condemned, verdict.iteration, verdict.pid) == ("section:step", True, 7, rank.pid)
    assert verdict.frames[0].startswith("puppet.py:")
    assert verdict.frames[0].endswith(f" in {how}")
    assert verdict.frames[-1].endswith(" in <module>")
    assert verdict.process["stopped"] is False
    assert verdict.process["stacks"] == str(node.stack_file)
    assert verdict.process["threads"] == 1
    assert rank.wait() == -signal.SIGKILL
    assert how in node.stack_file.read_text()


def test_a_stopped_rank_gives_no_stacks_and_dies_of_the_signal(node: Node) -> None:
    """SIGCONT lets it die of the chosen signal, not only of the SIGKILL after the grace."""
    node.monitor(limited(SECTIONS, rank_termination_signal=signal.SIGTERM, termination_grace_time=60.0))
    rank = node.watched()
    enters_step(rank)
    os.kill(rank.pid, signal.SIGSTOP)
    verdict = node.hear(Verdict)
    assert verdict.frames == []
    assert verdict.process["state"].startswith("T")
    assert verdict.process["stopped"] is True
    assert verdict.process["stacks"] == "none: the process is stopped"
    assert rank.wait() == -signal.SIGTERM


_BLOCKED = f"""
import signal, threading
def answers(number, frame):
    print("answers", flush=True)
    signal.pause()
signal.signal({STACK_SIGNAL}, answers)
lock = threading.Lock()
lock.acquire()
print("waits", flush=True)
lock.acquire()
"""


def test_where_it_waits_is_read_before_it_is_asked_for_its_stacks(tmp_path: Path) -> None:
    """While it writes them it waits in something else, or computes."""
    with subprocess.Popen([sys.executable, "-c", _BLOCKED], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waits\n"
        process = RankProcess(child.pid)
        try:
            until(lambda: "futex" in str(process.facts().get("wchan")), "the child to wait for its lock")
            process.ask_stacks(STACK_SIGNAL, str(tmp_path / "stacks"), is_lost)
            until(lambda: process.look() or not process.awaits_stacks, "the signal")
            assert child.stdout.readline() == "answers\n"
            facts = process.facts()
            assert facts["wchan"].startswith("futex") and facts["state"].startswith("S")
            os.kill(child.pid, signal.SIGSTOP)
            until(process.is_stopped, "the child to be stopped")
            assert process.facts()["stopped"] is True
        finally:
            process.close()
            child.kill()


_LIVES = """
import time
print("runs", flush=True)
while True:
    sum(range(300))
    time.sleep(0.001)
"""


def test_where_one_sleeps_that_always_wakes_up_again_is_known() -> None:
    """One in fifty times it is just on its way and seems to sleep nowhere, as one may that waits for a lock."""
    with subprocess.Popen([sys.executable, "-c", _LIVES], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "runs\n"
        process = RankProcess(child.pid)
        try:
            found = [process.facts() for _ in range(300)]
        finally:
            process.close()
            child.kill()
    if not any("wchan" in facts for facts in found):
        pytest.skip("this kernel names no function that a process waits in")
    assert [facts for facts in found if facts["state"].startswith("S") and "wchan" not in facts] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may read a stack in the kernel")
def test_where_one_sleeps_is_known_by_its_stack_where_the_kernel_names_no_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:  # Python 3.10 sleeps in select
        process = RankProcess(child.pid)
        try:
            until(lambda: "sleep" in str(process.facts().get("wchan")), "the child to sleep")
            monkeypatch.setattr(proc, "waits_in", lambda pid: "")
            facts = process.facts()
        finally:
            process.close()
            child.kill()
    if not facts["kernel_stack"]:
        pytest.skip("this kernel shows no stack")
    assert re.fullmatch(r"\w*sleep\w*", facts["wchan"])


@pytest.mark.parametrize(("what", "code"), [("leave", 7), ("ignore", -signal.SIGKILL)])
def test_signal_then_grace_then_kill(node: Node, what: str, code: int) -> None:
    node.monitor(limited(SECTIONS, rank_termination_signal=signal.SIGUSR1))
    rank = node.watched()
    rank.do("on_signal", int(signal.SIGUSR1), what)
    enters_step(rank)
    rank.order("hang_in_sleep")
    assert node.hear(Verdict).condemned
    assert rank.wait() == code


def test_a_rank_without_a_handler_is_not_killed_by_asking_for_its_stacks(node: Node) -> None:
    """A stall is reported only; the signal's default action would have ended the rank."""
    node.monitor(limited(stall_warning=0.2))
    rank = node.start()
    rank.do("connect", node.path)
    rank.say(Hello(rank.pid))
    rank.say(Progress(time.monotonic_ns()))
    verdict = node.hear(Verdict)
    assert (verdict.limit, verdict.condemned, verdict.frames) == ("stall", False, [])
    assert verdict.process["stacks"] == f"none: the process has no handler for signal {STACK_SIGNAL}"
    assert rank.do("close") == "closed", "it lives"


def test_a_stall_is_reported_with_stacks_again_after_progress(node: Node) -> None:
    node.monitor(limited(stall_warning=0.2))
    rank = node.watched()
    for _ in range(2):
        rank.say(Progress(time.monotonic_ns()))
        verdict = node.hear(Verdict)
        assert (verdict.limit, verdict.condemned) == ("stall", False)
        assert verdict.frames[-1].endswith(" in <module>")
    assert rank.do("close") == "closed", "it lives"


def test_no_stacks_when_not_wanted(node: Node) -> None:
    node.monitor(limited(SECTIONS, dump_stacks=False))
    rank = node.watched()
    enters_step(rank)
    verdict = node.hear(Verdict)
    assert verdict.frames == []
    assert verdict.process["stacks"] == "not asked for"
    assert not Path(node.stack_file).read_text()


_COMPUTES = f"""
import signal, sys
def dump(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write('Current thread 0x2 (most recent call first):\\n  File "train.py", line 3 in load\\n')
signal.signal({STACK_SIGNAL}, dump)
print("runs", flush=True)
while True:
    pass
"""


def test_a_rank_that_computes_gets_the_signal_only_where_it_is_ended(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _COMPUTES, tmp_path / "stacks"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        process = RankProcess(child.pid)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "runs\n"
            process.ask_stacks(STACK_SIGNAL, str(tmp_path / "stacks"), is_lost)
            assert process.frames() == []
            assert process.facts()["stacks"] == "none: the process did not answer"
            assert not (tmp_path / "stacks").exists()
            process.ask_stacks(STACK_SIGNAL, str(tmp_path / "stacks"), is_lost)
            until(lambda: process.frames(is_ending=True), "the stacks")
        finally:
            process.close()
            child.kill()


@pytest.fixture
def computes(tmp_path: Path) -> Iterator[RankProcess]:
    """A rank that computes, and was asked for its stacks by a message that it does not answer."""
    words = [sys.executable, "-c", _COMPUTES, tmp_path / "stacks"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        process = RankProcess(child.pid)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "runs\n"
            until(lambda: str(process.facts()["state"]).startswith("R"), "the child to compute")
            process.ask_stacks(STACK_SIGNAL, str(tmp_path / "stacks"), is_lost)
            yield process
        finally:
            process.close()
            child.kill()


def test_a_rank_that_computes_and_does_not_answer_is_silent(computes: RankProcess) -> None:
    """A thread holds the GIL in C code, so the rank waits in no collective."""
    assert "silent" not in computes.facts(), "it was asked just now"
    assert computes.frames() == []
    assert (computes.facts()["silent"], "signalled" in computes.facts()) == (True, False)


def test_a_rank_that_got_the_signal_for_its_stacks_is_marked(computes: RankProcess) -> None:
    assert until(lambda: computes.frames(is_ending=True), "the stacks")
    assert (computes.facts()["signalled"], "silent" in computes.facts()) == (True, False)


def test_a_rank_that_is_not_connected_is_not_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = node.puppet()
    rank.do("register", STACK_SIGNAL, node.stack_file)
    process = RankProcess(rank.pid)
    process.ask_stacks(STACK_SIGNAL, str(node.stack_file), lambda: False)
    with monkeypatch.context() as patched:
        patched.delattr(time, "sleep")
        assert process.frames() == []
    assert "silent" not in process.facts()
    process.close()


def test_a_rank_that_is_not_connected_gets_the_signal_only_where_it_is_ended(node: Node) -> None:
    rank = node.puppet()
    rank.do("register", STACK_SIGNAL, node.stack_file)
    process = RankProcess(rank.pid)
    process.ask_stacks(STACK_SIGNAL, str(node.stack_file), lambda: False)
    assert process.frames() == []
    assert process.facts()["stacks"] == "none: the process is not connected"
    process.ask_stacks(STACK_SIGNAL, str(node.stack_file), lambda: False)
    assert until(lambda: process.frames(is_ending=True), "no stacks came")[-1].endswith(" in <module>")
    process.close()


def test_a_rank_that_dies_of_the_signal_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "ANSWERS_S", 600.0)
    dies = _COMPUTES.replace("with open", "import os; os._exit(7)\n    with open")
    with subprocess.Popen([sys.executable, "-c", dies], stdout=subprocess.PIPE, text=True) as child:
        process = RankProcess(child.pid)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "runs\n"
            process.ask_stacks(STACK_SIGNAL, str(tmp_path / "stacks"), is_lost)
            assert process.frames(is_ending=True) == []
            assert child.wait(patient(60)) == 7
        finally:
            process.close()
            child.kill()


def test_only_the_last_dump_is_read(node: Node) -> None:
    rank = node.puppet()
    rank.do("register", STACK_SIGNAL, node.stack_file)
    process = RankProcess(rank.pid)
    for _ in range(3):
        process.ask_stacks(STACK_SIGNAL, str(node.stack_file), is_lost)
        until(process.frames, "no stacks came")
    assert node.stack_file.read_text().count(" in <module>") == 3
    assert sum(frame.endswith(" in <module>") for frame in process.frames()) == 1
    process.close()


def test_stacks_that_were_written_a_while_ago_are_read_once_and_without_a_wait(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = node.puppet()
    rank.do("register", STACK_SIGNAL, node.stack_file)
    process = RankProcess(rank.pid)
    process.ask_stacks(STACK_SIGNAL, str(node.stack_file), is_lost)
    frames = until(process.frames, "no stacks came")
    written = node.stack_file.stat()
    os.utime(node.stack_file, (written.st_atime, written.st_mtime - 1.0))
    read = stacks.read
    texts: list[str] = []

    def counted(text: str) -> stacks.StackDump:
        texts.append(text)
        return read(text)

    with monkeypatch.context() as patched:
        patched.delattr(time, "sleep")
        patched.setattr(stacks, "read", counted)
        assert process.frames() == frames
    assert len(texts) == 1
    process.close()


_LOSES_THE_CPU = f"""
import signal, sys, time
OTHER = 'Thread 0x1 (most recent call first):\\n  File "watchdog.py", line 7 in run\\n\\n'
MAIN = 'Current thread 0x2 (most recent call first):\\n  File "train.py", line 3 in load\\n'
def dump(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write(OTHER)
        file.flush()
        time.sleep(float(sys.argv[2]))
        file.write(MAIN)
signal.signal({STACK_SIGNAL}, dump)
print("runs", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("pause_s", "frames"), [(0.05, ["train.py:3 in load"]), (60.0, [])])
def test_stacks_of_another_thread_are_never_taken_for_the_main_threads(
    tmp_path: Path, pause_s: float, frames: list[str]
) -> None:
    """A rank that computes on a busy machine loses the CPU between two threads of its dump."""
    words = [sys.executable, "-c", _LOSES_THE_CPU, tmp_path / "stacks", str(pause_s)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        process = RankProcess(child.pid)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "runs\n"
            process.ask_stacks(STACK_SIGNAL, str(tmp_path / "stacks"), is_lost)
            if frames:  # on a busy machine the wait for them may end first, and they come a little later
                until(process.frames, "no stacks of the main thread came")
            assert process.frames() == frames
            assert process.facts()["stacks"].startswith("none: ") is not bool(frames)
        finally:
            process.close()
            child.kill()


def test_a_process_that_is_gone_is_only_that(node: Node) -> None:
    rank = node.puppet()
    process = RankProcess(rank.pid)
    assert process.signal(signal.SIGKILL)
    rank.wait()
    assert ended(process.pidfd)
    assert not process.signal(signal.SIGTERM)
    process.ask_stacks(STACK_SIGNAL, str(node.stack_file), is_lost)
    assert process.frames() == []
    assert process.facts()["state"] == "gone"
    process.close()
    with pytest.raises(ProcessLookupError):
        RankProcess(rank.pid)
