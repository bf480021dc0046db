"""The processes for copies of nodes, each with a folder in memory, that know each other over loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from ft_launcher.node.memory_files.copies import CopyProcess
from rank_monitor.contract.copy_records import (
    COPIED,
    NOT_COPIED,
    CopyFetch,
    CopyNews,
    CopyPeer,
    CopyPlan,
    CopySettings,
    HeldState,
    copies_name,
)
from rank_monitor.contract.memory_files import StateFile, complete_steps, copied_name, set_aside_name
from rank_monitor.contract.processes import tmpfs
from rank_monitor.contract.processes.wait import readable
from tests.nodes.slow_proxy import Line, SlowProxy
from tests.patience import patient, until

SHM = "/dev/shm"
SERIES = "0a1b2c3d"
MIB = 1 << 20
OF_FIRST = copies_name(3, [0])


class Node:
    """A node of one rank, of a job of three."""

    def __init__(self, folder: Path, rank: int, limit: int = 64 * MIB) -> None:
        self.folder, self.rank = folder, rank
        settings = CopySettings(str(folder), limit, 2, 100 * MIB, "job")
        self.copies = CopyProcess(settings, buddies=1)
        self.copies.start()
        self.news: list[CopyNews] = []
        self.interrupt, self._interrupts = os.pipe()

    def peer(self) -> CopyPeer:
        offer = self.copies.offer()
        assert offer is not None
        return CopyPeer(f"node{self.rank}", "127.0.0.1", offer.port)

    def held(self) -> list[HeldState]:
        offer = self.copies.offer()
        assert offer is not None
        return offer.states

    def save(self, step: int, size: int = 1000, rank: int | None = None, series: str = SERIES) -> bytes:
        """The rank's save, as a rank makes it; what is in it."""
        rank = self.rank if rank is None else rank
        content = os.urandom(size)
        path = self.folder / StateFile(step, rank, 3, 1, series).name
        (self.folder / "unfinished").write_bytes(content)
        (self.folder / "unfinished").rename(path)
        return content

    def unsave(self, step: int) -> None:
        (self.folder / StateFile(step, self.rank, 3, 1, SERIES).name).unlink()

    def begin(
        self, *targets: Node, receives: tuple[list[int], ...] = (), fetch: CopyFetch | None = None
    ) -> CopyNews | None:
        plan = CopyPlan(3, [node.peer() for node in targets], list(receives), fetch)
        return self.start(plan)

    def start(self, plan: CopyPlan) -> CopyNews | None:
        return self.copies.begin(plan, {self.interrupt}, lambda: "a signal" if readable({self.interrupt}, 0.0) else "")

    def fetch(self, step: int, *nodes: Node, rank: int | None = None) -> CopyNews:
        ranks = [self.rank if rank is None else rank]
        found = self.begin(fetch=CopyFetch(step, 3, SERIES, ranks, [node.peer() for node in nodes]))
        assert found is not None
        return found

    def steps(self, name: str = "") -> set[int]:
        """Of the node's own folder, or of one with copies."""
        folder = self.folder / name
        return complete_steps(path.name for path in folder.iterdir()) if folder.is_dir() else set()

    def until(self, kind: str, step: int) -> CopyNews:
        """Waits for the news of a step."""

        def look() -> CopyNews | None:
            self.news += self.copies.news()
            return next((news for news in self.news if (news.kind, news.step) == (kind, step)), None)

        until(look, f"{kind} {step}: {self.news}")
        found = look()
        assert found is not None
        return found

    def signal(self) -> None:
        os.write(self._interrupts, b"x")

    def close(self) -> None:
        self.copies.close()
        os.close(self.interrupt)
        os.close(self._interrupts)


@pytest.fixture
def top() -> Iterator[Path]:
    if not Path(SHM).is_dir() or tmpfs.kind_of(SHM) != tmpfs.KIND:
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHM) as made:
        yield Path(made)


@pytest.fixture
def nodes(top: Path) -> Iterator[list[Node]]:
    """Three nodes."""
    with ExitStack() as stack:
        made = []
        for rank in range(3):
            (top / str(rank)).mkdir()
            made.append(Node(top / str(rank), rank))
            stack.callback(made[-1].close)
        yield made


@pytest.fixture
def tight(top: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes, of which the second has room for 10 MiB."""
    for rank in range(2):
        (top / f"tight{rank}").mkdir()
    first, second = Node(top / "tight0", 0), Node(top / "tight1", 1, limit=10 * MIB)
    yield first, second
    first.close()
    second.close()


def test_each_new_state_goes_to_the_other_node_and_the_last_ones_stay(nodes: list[Node]) -> None:
    first, second, _ = nodes
    first.begin(second)
    contents = {}
    for step in (5, 10, 15):
        contents[step] = first.save(step)
        news = first.until(COPIED, step)
        assert (news.size, news.peer, news.reason) == (1000, "node1", "")
    assert second.steps(OF_FIRST) == {10, 15}
    (path,) = (second.folder / OF_FIRST).glob("step-15_*")
    assert path.read_bytes() == contents[15]
    assert second.steps() == set(), "they are no states of its own"
    assert second.held() == [HeldState(step, 3, SERIES, [0], is_own=False) for step in (15, 10)]


def test_a_node_that_has_lost_its_memory_fetches_what_another_has(nodes: list[Node]) -> None:
    first, second, spare = nodes
    first.begin(second)
    content = first.save(5, 20 * MIB)
    first.until(COPIED, 5)
    first.copies.close()
    found = spare.fetch(5, second, rank=0)
    assert (found.step, found.peer, found.size, found.reason) == (5, "node1", 20 * MIB, "")
    assert spare.held() == [HeldState(5, 3, SERIES, [0], is_own=True)]
    assert (spare.folder / StateFile(5, 0, 3, 1, SERIES).name).read_bytes() == content
    assert (spare.folder / copied_name(5, SERIES)).exists()


def test_it_fetches_from_the_next_where_the_first_has_died_or_has_it_no_more(nodes: list[Node]) -> None:
    first, second, spare = nodes
    second.save(5, rank=0)
    dead = first.peer()
    first.copies.close()
    fetch = CopyFetch(5, 3, SERIES, [0], [dead, spare.peer(), second.peer()])
    found = spare.begin(fetch=fetch)
    assert found is not None
    assert (found.step, found.peer) == (5, "node1")


def test_where_nobody_has_it_the_first_reason_is_told(nodes: list[Node]) -> None:
    first, second, spare = nodes
    found = spare.fetch(5, first, second)
    assert found.step is None
    assert found.reason.startswith("node0: ") and found.reason.endswith(" has it no more")
    assert spare.steps() == set()


def test_nodes_that_exchange_their_places_exchange_their_states(nodes: list[Node]) -> None:
    """One has the copy of the other, which has none and asks for it. What each had before is a copy then."""
    first, second, _ = nodes
    first.begin(second)
    first.save(5)
    first.until(COPIED, 5)
    second.save(5)
    found = second.fetch(5, rank=0)
    assert (found.step, found.peer, found.size) == (5, "", 1000)
    assert second.held() == [HeldState(5, 3, SERIES, [0], True), HeldState(5, 3, SERIES, [1], False)]
    found = first.fetch(5, second, rank=1)
    assert (found.step, found.peer) == (5, "node1")
    assert first.held() == [HeldState(5, 3, SERIES, [1], True), HeldState(5, 3, SERIES, [0], False)]


def test_what_has_no_room_is_refused_with_numbers_and_the_own_states_go_first(top: Path) -> None:
    (top / "small").mkdir()
    (top / "large").mkdir()
    with ExitStack() as stack:
        small, large = Node(top / "small", 1, limit=10 * MIB), Node(top / "large", 0)
        stack.callback(small.close)
        stack.callback(large.close)
        small.save(5, 2 * MIB)  # with the two that are kept, and the one in writing: 6 MiB
        large.begin(small)
        large.save(5, 3 * MIB)
        large.until(COPIED, 5)
        large.save(10, 5 * MIB)
        news = large.until(NOT_COPIED, 10)
        assert "step 10 has 5.0 MiB" in news.reason
        assert "has room for 1.0 MiB (its --ft-memory-limit is 10.0 MiB)" in news.reason
        assert small.steps(OF_FIRST) == {5}
        large.unsave(10)
        large.save(11, MIB // 2)
        large.until(COPIED, 11)
        large.save(12, 3 * MIB)
        large.until(COPIED, 12)
        assert small.steps(OF_FIRST) == {11, 12}, "rather fewer steps of a node than none that is new"


def test_the_own_states_that_grow_push_out_the_oldest_copies(tight: tuple[Node, Node]) -> None:
    first, second = tight
    first.begin(second)
    for step in (5, 10):
        first.save(step, 4 * MIB)
        first.until(COPIED, step)
    second.save(5, 5 * MIB)
    until(lambda: second.steps(OF_FIRST) == {10}, "the room")


def test_what_lies_in_the_way_of_a_fetch_is_removed(tight: tuple[Node, Node]) -> None:
    """No rank lives then, and the job goes on from what is fetched."""
    first, second = tight
    for step in (5, 10):
        second.save(step, 4 * MIB)
    (second.folder / "rank-1_slot-0.unfinished").write_bytes(bytes(2 * MIB))
    first.save(20, 5 * MIB, rank=1)
    assert second.fetch(20, first).step == 20
    assert second.steps() == {10, 20}
    first.save(30, 11 * MIB, rank=1)
    found = second.fetch(30, first)
    assert found.step is None
    assert "step 30 has 11.0 MiB, and the memory of this node has room for 10.0 MiB" in found.reason


def test_a_clock_that_steps_back_makes_no_copy_an_old_one(nodes: list[Node]) -> None:
    first, second, _ = nodes
    first.begin(second)
    for step in (5, 10):
        first.save(step)
        first.until(COPIED, step)
        (path,) = (second.folder / OF_FIRST).glob(f"step-{step}_*")
        os.utime(path, (4e9 + step, 4e9 + step))
    first.save(15)
    first.until(COPIED, 15)
    until(lambda: second.steps(OF_FIRST) == {10, 15}, "the oldest goes")


def test_copies_of_another_number_of_ranks_go_when_a_cycle_begins(nodes: list[Node]) -> None:
    first, second, _ = nodes
    first.begin(second)
    first.save(5)
    first.until(COPIED, 5)
    second.start(CopyPlan(2))
    until(lambda: not (second.folder / OF_FIRST).exists(), "the removal")


def test_after_a_cycle_nothing_is_sent_until_the_next_plan(nodes: list[Node]) -> None:
    first, second, third = nodes
    first.begin(second)
    first.save(5)
    first.until(COPIED, 5)
    assert first.copies.offer() is not None
    first.save(10)
    first.begin(third)
    first.until(COPIED, 10)
    assert second.steps(OF_FIRST) == {5}
    assert third.steps(OF_FIRST) == {10}


def test_a_process_that_died_while_its_node_waited_fetches_all_the_same(nodes: list[Node]) -> None:
    first, _, spare = nodes
    first.save(5, rank=2)
    peer = first.peer()
    spare.peer()
    (pid,) = spare.copies.pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not spare.copies.pids(), "its end")
    found = spare.start(CopyPlan(3, fetch=CopyFetch(5, 3, SERIES, [2], [peer])))
    assert found is not None and found.step == 5


@pytest.mark.parametrize("series", ["../../x", "0A1B2C3D"])
def test_a_plan_that_names_no_state_is_refused(nodes: list[Node], series: str) -> None:
    found = nodes[0].start(CopyPlan(3, fetch=CopyFetch(5, 3, series, [0])))
    assert found is not None
    assert found.reason == "the coordinator has named no state of a node"


def test_bad_states_do_not_come_back(nodes: list[Node]) -> None:
    first, second, _ = nodes
    first.begin(second)
    for step in (5, 10):
        first.save(step)
        first.until(COPIED, step)
    second.copies.set_aside(10)
    until(lambda: second.steps(OF_FIRST) == {5}, "the removal")
    first.save(15)  # of the same series: it was on its way
    assert "set aside" in first.until(NOT_COPIED, 15).reason
    first.unsave(15)
    first.save(12, series="ffffffff")  # computed again
    first.until(COPIED, 12)
    assert second.steps(OF_FIRST) == {5, 12}


def test_own_bad_states_are_not_sent(nodes: list[Node]) -> None:
    first, second, _ = nodes
    first.save(5)
    first.save(10)
    (first.folder / set_aside_name(10)).touch()
    first.begin(second)
    first.until(COPIED, 5)
    assert second.steps(OF_FIRST) == {5}


def test_copies_of_ranks_that_have_another_buddy_now_are_removed(nodes: list[Node]) -> None:
    first, second, third = nodes
    first.begin(second)
    first.save(5)
    first.until(COPIED, 5)
    third.begin(second)
    second.begin(receives=([2],))
    third.save(10)
    third.until(COPIED, 10)
    assert second.steps(OF_FIRST) == {5}, "the other buddy may not have its own yet"
    third.save(15)
    third.until(COPIED, 15)
    until(lambda: not (second.folder / OF_FIRST).exists(), "the removal")


def test_a_process_that_dies_is_started_again_and_then_given_up(nodes: list[Node]) -> None:
    first = nodes[0]
    for _ in range(3):
        assert first.copies.offer() is not None
        (pid,) = first.copies.pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not first.copies.pids(), "its end")
    assert first.copies.offer() is None
    assert "has died" in first.copies.refused
    assert first.copies.news() == []
    assert first.copies.descriptors() == set()


def test_what_a_process_that_died_had_received_in_part_is_removed(nodes: list[Node]) -> None:
    first, second, _ = nodes
    first.begin(second)
    first.save(5)
    first.until(COPIED, 5)
    (pid,) = second.copies.pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not second.copies.pids(), "its end")
    part = StateFile(9, 1, 3, 2, SERIES).name
    for name in (part, StateFile(10, 0, 3, 1, SERIES).name + ".unfinished"):
        (second.folder / OF_FIRST / name).write_bytes(b"part")
    half = second.folder / f"{part}.unfinished"
    half.write_bytes(b"part")
    assert second.held() == [HeldState(5, 3, SERIES, [0], is_own=False)]
    assert [path.name for path in (second.folder / OF_FIRST).iterdir()] == [StateFile(5, 0, 3, 1, SERIES).name]
    assert not half.exists()


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100_000)], ids=["nothing", "HTTP", "zeros"])
def test_who_is_no_node_holds_up_no_copy(nodes: list[Node], words: bytes) -> None:
    first, second, _ = nodes
    with socket.create_connection(("127.0.0.1", second.peer().port)) as stranger:
        with suppress(OSError):  # the node may have closed the connection by then
            stranger.sendall(words)
        first.begin(second)
        first.save(5)
        first.until(COPIED, 5)
        stranger.settimeout(patient(30))
        with suppress(OSError):
            while stranger.recv(1 << 16):
                pass
    assert second.steps(OF_FIRST) == {5}
    assert second.copies.pids(), "the process lives"


@pytest.mark.parametrize("line", [Line(delay_s=0.05), Line(delay_s=0.01, loss=0.1, stall_s=0.2)], ids=["late", "lossy"])
def test_a_slow_line_makes_a_copy_late_and_not_wrong(nodes: list[Node], line: Line) -> None:
    first, second, spare = nodes
    with SlowProxy(subprocess.Popen, "127.0.0.1", second.peer().port, line) as there:
        first.copies.offer()
        peer = CopyPeer("node1", "127.0.0.1", there.port)
        first.start(CopyPlan(3, [peer]))
        content = first.save(5, 3 * MIB)
        first.until(COPIED, 5)
        found = spare.begin(fetch=CopyFetch(5, 3, SERIES, [0], [peer]))
    assert found is not None and found.step == 5
    assert (spare.folder / StateFile(5, 0, 3, 1, SERIES).name).read_bytes() == content


def test_a_line_that_breaks_while_a_state_is_copied_costs_that_try(nodes: list[Node]) -> None:
    first, second, _ = nodes
    with SlowProxy(subprocess.Popen, "127.0.0.1", second.peer().port, Line(delay_s=0.02)) as there:
        there.stall()
        first.start(CopyPlan(3, [CopyPeer("node1", "127.0.0.1", there.port)]))
        first.save(5, 3 * MIB)
        until(lambda: there.drop() or any(news.kind == NOT_COPIED for news in first.copies.news()), "the break")
        assert second.steps(OF_FIRST) == set()
        there.go()
        first.until(COPIED, 5)
    assert second.steps(OF_FIRST) == {5}


@pytest.mark.parametrize("how", ["a signal", "silence", "its process dies"])
def test_a_node_that_does_not_answer_holds_up_nobody(top: Path, nodes: list[Node], how: str) -> None:
    silent, _, spare = nodes
    peer = silent.peer()
    (pid,) = silent.copies.pids()
    os.kill(pid, signal.SIGSTOP)
    spare.peer()
    if how == "a signal":
        spare.signal()
    elif how == "silence":
        spare.copies.still_s = 0.2
    else:
        (own,) = spare.copies.pids()
        os.kill(own, signal.SIGKILL)
    found = spare.begin(fetch=CopyFetch(5, 3, SERIES, [2], [peer]))
    os.kill(pid, signal.SIGCONT)
    assert found is not None and found.step is None
    said = {"a signal": "a signal", "silence": "have not answered for 0.2 s", "its process dies": "has died"}
    assert said[how] in found.reason
    assert spare.copies.offer() is not None, "another one is there for the next cycle"


def test_the_process_ends_with_its_launcher(nodes: list[Node]) -> None:
    first = nodes[0]
    (pid,) = first.copies.pids()
    first.copies.close()
    assert not Path(f"/proc/{pid}").exists()
    assert first.copies.pids() == set()


def test_a_system_that_refuses_a_process_is_no_fault(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", Mock(side_effect=OSError(11, "Resource temporarily unavailable")))
    copies = CopyProcess(CopySettings(str(top), MIB, 2, MIB, "job"), 1)
    assert copies.offer() is None
    assert "refuses a process" in copies.refused
