"""The page of a job in a real Chromium, fed by the events of a simulated one of 1,024 ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ft_launcher.record import events
from ft_launcher.record.journal.journal import Journal
from ft_launcher.record.ledger.account import Account, CycleTimes
from ft_launcher.record.ledger.job_ledger import JobTime
from ft_launcher.record.ledger.palette import DARK, LIGHT, LOOKS, WEAK
from ft_launcher.record.ledger.stall import Stall
from ft_launcher.tools.status.asking import NodeSeen, OthersSeen, OtherStacks
from ft_launcher.tools.status.listening import answering
from ft_launcher.tools.status.node_status import NodeStatus, RankReading
from ft_launcher.tools.status.summary import ranks_as_json
from rank_monitor.contract.settings.config import MonitorSettings, RecordSettings, Settings
from rank_monitor.contract.wire.rank_times import Durations
from tests.browser import Browser, chromium, needs_chromium
from tests.ft_launcher.tools.status.test_node_status import START, decision, fault
from tests.ports import free_port

RANKS = 1024
HUNG, LATE = 700, 33
TOKEN = "0123456789abcdef"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x00\x1b[2J\u202e"


class Simulation:
    """A job that a test plays: what it writes to `journal`, and what it says of its ranks, is on the page."""

    def __init__(self, folder: Path, port: int, token: str = "") -> None:
        self.folder, self.port = folder, port
        self.journal = Journal()
        self.status = NodeStatus()
        self.step = 18_231
        self.readings: list[RankReading] = []
        record = RecordSettings(status_port=port)
        if token:
            (folder / "token").write_text(token)
            (folder / "token").chmod(0o600)
            record = replace(record, status_token_file=str(folder / "token"))
        self.settings = Settings(monitor=MonitorSettings(rank_heartbeat_timeout=60.0), record=record)
        self.others: OthersSeen | None = None
        self.stall: Stall | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        sources = {"rank_heartbeat_timeout": "--ft-rank-heartbeat-timeout", "status_port": HOSTILE}
        with answering(self.settings, sources, self.folder, self.journal, self.times, "1.2") as (self.status, asking):
            asking.other_nodes = self
            yield

    def seen(self) -> OthersSeen | None:
        """As the coordinator's launcher says; None: it is not the coordinator."""
        return self.others

    def counts(self) -> dict[str, int]:
        return {}

    def ask_stacks(self) -> Callable[[], OtherStacks]:
        """The page does not ask for them."""
        raise AssertionError

    def times(self) -> JobTime:
        seconds = {"step": 34_500.0, "launch": 21.0, "checkpoint_save": 412.0, "data": 300.0, "lost_progress": 260.0}
        seconds |= {"detection": 62.0, "warmup": 90.0, "custom:tokenizer": 31.0, "unknown": 9.0}
        wall_s = sum(seconds.values())
        durations = Durations()
        for _ in range(10):
            durations.add(1_920_000_000)
        past = CycleTimes(0, 1e9, 1e9 + 9_000, {"launch": 21.0, "step": 8_900.0, "detection": 62.0, "stop": 17.0}, 4690)
        present = CycleTimes(
            *(1, 1e9 + 9_000, 1e9 + wall_s, {"health": 1.1, "rendezvous": 0.8, "launch": 0.3, "step": 26_000.0}),
            *(13_541, self.step),
            saved=18_000,
            recovery={
                "detection": 62.0,
                "stop": 0.4,
                "health": 1.1,
                "rendezvous": 0.8,
                "start": 0.3,
                "first_step": 3.1,
            },
        )
        account = Account(seconds, wall_s, 34_500 / wall_s, 34_000 / wall_s, self.step)
        return JobTime("", present, account, {"step": durations}, (past,), stall=self.stall)

    def starts(self, ranks: int = RANKS, run_id: str = "llama-70b", **more: Any) -> None:
        self.journal.write(replace(START, run_id=run_id, node="gpu-node-17", **more))
        self.begins(0, ranks)

    def begins(self, cycle: int, ranks: int = RANKS) -> None:
        listed = [{"rank": rank, "local_rank": rank, "pid": 10_000 + rank} for rank in range(ranks)]
        self.journal.write(events.CycleStartEvent(cycle, 0, 1, "gpu-node-17:29500", listed))
        now = time.monotonic()
        self.reads(
            [RankReading(n, n, 10_000 + n, now, True, True, self.step, {"step": 0.7}, 0.2) for n in range(ranks)]
        )

    def reads(self, readings: list[RankReading]) -> None:
        self.readings = readings
        self.status.read(readings)

    def changes(self, rank: int, **more: Any) -> None:
        self.reads([replace(one, **more) if one.rank == rank else one for one in self.readings])

    def hangs(self, what: str = "hangs: section 'step' open for 62 s; the limit is 60 s", ranks: int = RANKS) -> None:
        """Rank `HUNG` never enters a collective that all others wait in."""
        frames = ["torch/distributed/distributed_c10d.py:2943 in all_reduce", "train.py:57 in main"]
        state = {"operation": "all_reduce", "shape": "[[4096, 4096]] ['Float']", "description": "data parallel"}
        seen = [
            {
                "rank": rank,
                "place": "outside" if rank == HUNG else "collective",
                "frames": ["loader.py:88 in fetch", "train.py:41 in main"] if rank == HUNG else frames,
                "process": {},
                "groups": {"0": {**state, "entered": 36_461 - (rank == HUNG), "finished": 36_460}},
            }
            for rank in range(ranks)
        ]
        self.journal.write(events.StacksEvent(0, seen))
        more = {"rank": HUNG, "what": what, "where": "in section step (62.0 s) at iteration 18231"}
        more |= {"hint": "a data loader waits for storage", "detail": ["loader.py:88 in fetch", "train.py:41 in main"]}
        self.journal.write(fault(0, **more, others=["rank 0 waits in a collective at train.py:57 in main"]))
        self.journal.write(decision(0))
        self.journal.write(events.CycleEndEvent(0, "failed"))


class Gate:
    """Passes connections on to a port, unless it is shut.

    Args:
        refuses: beginning of requests that get no answer.
    """

    def __init__(self, target: int, refuses: bytes = b"none") -> None:
        self._target, self._refuses = target, refuses
        self._is_open = True
        self._held: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def shut(self) -> None:
        """Cuts all connections; new ones get no answer."""
        self._is_open = False
        for held in self._held:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        """Passes connections on again."""
        self._is_open = True

    def close(self) -> None:
        """Ends it with all its threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.shut()
        for thread in self._threads:
            thread.join()
        for held in [self._listener, *self._held]:
            held.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._held.append(client)
                if not self._is_open:
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self._threads.append(threading.Thread(target=self._pass_on, args=(client,)))
                self._threads[-1].start()

    def _pass_on(self, client: socket.socket) -> None:
        """Takes one request and passes on its answer: the server ends each connection after it."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            self._held.append(server)
            request = client.recv(65536)
            if not request.startswith(self._refuses):
                server.sendall(request)
            while data := server.recv(65536):
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    needs_chromium()
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    window.resize(1000, 900)
    window.theme("light")
    yield window
    window.driver.get("about:blank")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Simulation]:
    simulation = Simulation(tmp_path, free_port())
    with simulation.running():
        yield simulation


def show(browser: Browser, job: Simulation) -> None:
    browser.open(f"http://127.0.0.1:{job.port}/")
    browser.until(lambda: "live" in browser.text("#connection"), "the first event")


def test_a_job_of_many_ranks_and_what_changes(browser: Browser, job: Simulation) -> None:
    job.starts()
    show(browser, job)
    sentence = "running, cycle 0, step 18,231, 1.92 s a step, saved at step 18,000, goodput 96.7%"
    assert browser.text("h1") == sentence
    assert browser.text("#states") == "1,024 ranks on this node: 1,024 training"
    assert browser.driver.title == "running: llama-70b"
    assert "96.7 % of it were steps that count, 95.3 % until the last checkpoint" in browser.text("#goodput")
    assert "cycle 0, 2 h 30 min" in browser.text(
        "#cycles"
    ) and "after a recovery of 68 s (detection 62 s" in browser.text("#cycles")
    job.step += 5
    job.changes(LATE, iteration=job.step)
    browser.until(lambda: "step 18,236" in browser.text("h1"), "the next step")
    assert browser.text("#states") == "1,024 ranks on this node: 1,024 training, 1,023 behind"
    assert browser.complaints() == []


def test_cycles_and_their_pieces_are_in_the_order_of_time(browser: Browser, job: Simulation) -> None:
    job.starts(ranks=8)
    show(browser, job)
    rows = browser.find("#cycles").find_elements("css selector", "li")
    assert [row.text[:8] for row in rows] == ["cycle 0,", "cycle 1,"]
    titles = "return [...document.querySelectorAll('#cycles li:first-child .bar span')].map(one => one.title)"
    assert [title.partition(":")[0] for title in browser.script(titles)] == ["launch", "step", "detection", "stop"]


def test_the_page_has_the_palette_of_the_report(browser: Browser, job: Simulation) -> None:
    job.starts(ranks=8)
    show(browser, job)
    assert browser.script("return KINDS") == {category: look.classes for category, look in LOOKS.items()}
    assert browser.script("return ORDER") == list(LOOKS)
    for theme, colours in (("light", LIGHT), ("dark", DARK)):
        browser.theme(theme)
        own = "return getComputedStyle(document.documentElement).getPropertyValue(`--${arguments[0]}`)"
        assert {hue: browser.script(own, hue) for hue in colours} == colours
    weak = "return getComputedStyle(Object.assign(document.body.appendChild(element('b')), {className: 'weak'})).filter"
    assert browser.script(weak) == f"opacity({WEAK})"


def test_a_training_that_makes_no_steps(browser: Browser, job: Simulation) -> None:
    """Neither green nor red, in both themes; the sentence says why."""
    job.starts(ranks=8)
    show(browser, job)
    job.status.read(job.readings, "rank 2 is stopped, 7 ranks wait for it")
    job.stall = Stall(steps=18_231, waited_s=262.0, usual_s=1.92, since_ns=0)
    browser.until(lambda: browser.text("h1").startswith("stalled in cycle 0"), "the stall")
    assert browser.text("h1").endswith(
        ": no step for 262 s, 136 times the usual one; rank 2 is stopped, 7 ranks wait for it"
    )
    assert browser.text("#states") == "8 ranks on this node: 8 stalled"
    assert browser.driver.title == "stalled: llama-70b"
    colour = "return getComputedStyle(byId('sentence')).color"
    amber = {browser.script(colour)}
    browser.theme("dark")
    amber.add(browser.script(colour))
    assert amber == {"rgb(183, 121, 31)", "rgb(221, 166, 58)"}
    pixel = (
        # From a copy: Chromium complains of a picture that is read again and again.
        "const scale = devicePixelRatio; const copy = document.createElement('canvas').getContext('2d');"
        "copy.drawImage(byId('grid'), -6 * scale, -cell / 2 * scale);"
        "return `rgb(${copy.getImageData(0, 0, 1, 1).data.slice(0, 3).join(', ')})`"
    )
    browser.until(lambda: browser.script(pixel) == "rgb(221, 166, 58)", "the marks in the other theme")
    job.stall = None
    browser.until(lambda: browser.text("h1").startswith("running"), "the end of the stall")
    assert browser.complaints() == []


def test_a_fault_opens_its_stacks(browser: Browser, job: Simulation) -> None:
    job.starts()
    show(browser, job)
    assert browser.text("#no_faults") == "None so far."
    job.hangs()
    browser.until(lambda: browser.text("#of_faults") == "Faults (1)", "the fault")
    assert "restarting after cycle 0" in browser.text("h1")
    browser.find("#faults summary").click()
    browser.until(lambda: browser.text(".scene"), "the stacks")
    block = browser.text("#faults details")
    assert "rank 700 hangs: section 'step' open for 62 s" in block
    assert "likely: a data loader waits for storage" in block and "next: restart: restart 1 of 3" in block
    behind, ahead = (row.text for row in browser.find(".scene tbody").find_elements("css selector", "tr"))
    assert behind == "data parallel rank 700 36,460 36,460 all_reduce [[4096, 4096]] ['Float']"
    assert ahead.startswith("data parallel ranks 0-699, 701-1023 36,461 36,460 all_reduce")
    assert browser.text(".scene h3:nth-of-type(2)") == "rank 700: in no call of torch.distributed"
    job.begins(1)
    browser.until(lambda: browser.text("h1").startswith("running, cycle 1"), "the next cycle")
    assert browser.find("#faults details").get_attribute("open"), "what its reader has open stays open"


def test_collectives_are_asked_for(browser: Browser, job: Simulation) -> None:
    job.starts(ranks=8)
    state = {"operation": "all_reduce", "shape": "[[4]]", "description": "data parallel", "entered": 5, "finished": 4}
    groups = [{"0": {**state, "entered": 4}} if rank == 3 else {"0": state} for rank in range(7)]
    now = time.monotonic()
    asked = [replace(one, groups=groups[one.rank], groups_at=now) for one in job.readings[:7]]
    job.reads([*asked, replace(job.readings[7], process={"stopped": True})])
    show(browser, job)
    browser.find("#collectives summary").click()
    browser.until(lambda: browser.text("#collected").startswith("As of "), "the answer")
    behind, ahead, silent = (row.text for row in browser.find("#groups tbody").find_elements("css selector", "tr"))
    assert (behind, ahead, silent.strip()) == (
        "data parallel rank 3 4 4 all_reduce [[4]]",
        "data parallel ranks 0-2, 4-6 5 4 all_reduce [[4]]",
        "rank 7 no answer, stopped",
    )
    marked = browser.find("#groups").find_elements("css selector", "tr.behind")
    assert [row.text for row in marked] == [behind, silent]
    job.reads([replace(one, groups_at=None) for one in job.readings])
    browser.find("#collect").click()
    browser.until(lambda: "No rank has said anything" in browser.text("#collected"), "the answer")


def test_what_ranks_have_written_is_shown_as_text(browser: Browser, job: Simulation) -> None:
    long = HOSTILE + "x" * 100_000
    job.starts(ranks=8, run_id=long)
    show(browser, job)
    job.hangs(long, ranks=8)
    job.begins(1, 8)
    job.journal.write(events.HealthChangeEvent(1, HOSTILE, "ok", HOSTILE, "no"))
    job.changes(3, sections={long: 2.0}, frames=[HOSTILE])
    browser.until(lambda: browser.text("#faults summary"), "the fault")
    browser.find("#grid").click()
    browser.press("HOME", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT")
    browser.until(lambda: "rank 3: training" in browser.text("#rank"), "the rank")
    browser.find("#faults summary").click()
    browser.find("#settings summary").click()
    browser.until(lambda: "--ft-rank-heartbeat-timeout" in browser.text("#values"), "the settings")
    for place in ("#job", "#faults summary", "#rank", "#node", "#values"):
        text = browser.script("return document.querySelector(arguments[0]).textContent", place)
        assert "<img src=x onerror=" in text and "\\u0000\\u001b[2J\\u202e" in text, place
        assert len(text) < 5000, place
    assert browser.script("return document.querySelectorAll('img, body script').length") == 0
    assert browser.driver.title.startswith("running: <img src=x")
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []


def test_no_other_host_is_asked(browser: Browser, job: Simulation) -> None:
    job.starts(ranks=8)
    job.hangs(ranks=8)
    show(browser, job)
    browser.find("#faults summary").click()
    browser.find("#settings summary").click()
    browser.until(lambda: browser.text(".scene") and browser.text("#values"), "all that is asked for")
    paths = [urlsplit(address).path for address in browser.requested()]
    assert {"/", "/page.js", "/page.css", "/events", "/fault.json", "/settings.json"} <= set(paths)
    assert {urlsplit(address).netloc for address in browser.requested()} == {f"127.0.0.1:{job.port}"}
    policy = browser.script("return fetch('/').then(answer => answer.headers.get('Content-Security-Policy'))")
    assert "default-src 'none'; script-src 'self'" in policy and "unsafe" not in policy


def test_by_keyboard(browser: Browser, job: Simulation) -> None:
    job.starts()
    job.changes(LATE, iteration=job.step - 3)
    job.changes(HUNG, condemned=True, sections={"step": 62.0}, frames=["loader.py:88 in fetch", "train.py:41 in main"])
    job.hangs()
    job.begins(1)
    job.changes(LATE, iteration=job.step - 3)
    job.changes(HUNG, condemned=True, sections={"step": 62.0}, frames=["loader.py:88 in fetch", "train.py:41 in main"])
    show(browser, job)
    browser.press("TAB")
    assert browser.driver.switch_to.active_element.get_attribute("id") == "grid"
    assert "rank 0: training" in browser.text("#rank")
    browser.press("n")
    assert f"rank {LATE}: training step 18,228, 3 behind" in browser.text("#rank")
    browser.press("n")
    assert f"rank {HUNG}: hung step 18,231; in step for " in browser.text(
        "#rank"
    ) and "loader.py:88 in fetch" in browser.text("#rank")
    browser.press("END")
    assert "rank 1023: training" in browser.text("#rank")
    browser.press("ARROW_UP", "HOME", "ARROW_DOWN")
    columns = browser.script("return Math.floor(byId('grid').clientWidth / cell)")
    assert f"rank {columns}: training" in browser.text("#rank")
    browser.press("TAB", "TAB", "ENTER")
    browser.until(lambda: browser.text(".scene"), "the stacks")
    assert browser.script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_coordinator_shows_all_nodes_apart(browser: Browser, job: Simulation) -> None:
    """Of 40 nodes with 8 ranks: one hangs, one is silent, one never reported, and a spare waits."""
    job.starts(ranks=8)
    now = time.monotonic()

    def node(rank: int, age_s: float | None = 4.0, **more: Any) -> NodeSeen:
        readings = [
            RankReading(8 * rank + n, n, 20_000 + n, now, True, True, 18_230, {"step": 0.7}, 0.2) for n in range(8)
        ]
        readings[3] = replace(readings[3], **more)
        ranks = ranks_as_json(job.status.facts(), readings, None, now) if age_s is not None else []
        return NodeSeen(rank, f"gpu-node-{17 + rank}", age_s, ranks)

    nodes = [node(rank) for rank in range(1, 40)]
    nodes[4] = node(5, condemned=True, frames=("loader.py:88 in fetch",))
    nodes[10], nodes[20] = node(11, 61.0), node(21, None)
    job.others = OthersSeen(nodes, ["gpu-node-99"])
    show(browser, job)
    assert browser.text("#states") == (
        "312 ranks on 40 nodes: 311 training, 1 hung; no report yet: gpu-node-38; no report any more: "
        "gpu-node-28 (61 s); 1 node waiting for a place: gpu-node-99"
    )
    browser.press("TAB", "n")
    assert "rank 43: hung" in browser.text("#rank")
    assert "on gpu-node-22 (node 5, as of 4.0 s ago)" in browser.text("#rank")
    assert browser.text("#rank").endswith("loader.py:88 in fetch")
    # Nodes do not touch: the last rank of one and the first of the next are further apart, or in different lines.
    assert browser.script(
        "return ranks.every((rank, at) => at === 0 || rank.on === ranks[at - 1].on"
        " || places[at][1] > places[at - 1][1] || places[at][0] > places[at - 1][0] + cell)"
    )
    browser.press("ARROW_DOWN", "ARROW_UP")
    assert "rank 43: hung" in browser.text("#rank")
    nodes[20] = node(21)
    job.others = OthersSeen(nodes, [])
    browser.until(
        lambda: (
            browser.text("#states") == "320 ranks on 40 nodes: 319 training, 1 hung; no report any "
            "more: gpu-node-28 (61 s)"
        ),
        "the last node",
    )
    assert "rank 43: hung" in browser.text("#rank"), "the same rank stays selected"
    assert browser.complaints() == []


def test_dark_and_light_and_narrow(browser: Browser, job: Simulation) -> None:
    job.starts()
    colours = set()
    for theme in ("light", "dark"):
        browser.theme(theme)
        show(browser, job)
        back = browser.script("return getComputedStyle(document.body).backgroundColor")
        pixel = browser.script(
            "const brush = byId('grid').getContext('2d'); const middle = cell / 2 * devicePixelRatio;"
            "return `rgb(${brush.getImageData(middle, middle, 1, 1).data.slice(0, 3).join(', ')})`"
        )
        colours |= {back, pixel}
    assert len(colours) == 4
    browser.resize(500, 900)
    browser.until(
        lambda: browser.script("return byId('grid').clientWidth < 500 && places.every(([left]) => left + cell <= 500)"),
        "the grid",
    )
    assert browser.script("return document.documentElement.scrollWidth") <= 500


def test_a_launcher_that_ends(browser: Browser, tmp_path: Path) -> None:
    job = Simulation(tmp_path, free_port())
    with job.running():
        job.starts(ranks=8)
        show(browser, job)
        job.journal.write(events.JobEndEvent(1, "ranks failed", 0, 0, 0))
    browser.until(lambda: browser.text("#connection").startswith("The launcher ended at "), "the end")
    assert browser.text("h1").startswith("ended with exit code 1 (ranks failed), step 18,231")
    assert browser.find("#connection").get_attribute("class") == "ended"


def test_a_launcher_that_does_not_answer_any_more(browser: Browser, job: Simulation, tmp_path: Path) -> None:
    """The page goes on when one answers again, with another job."""
    proxy = Gate(job.port)
    try:
        job.starts(ranks=8)
        browser.open(f"http://127.0.0.1:{proxy.port}/")
        browser.until(lambda: browser.text("#connection") == "live", "the first event")
        proxy.shut()
        browser.until(lambda: browser.text("#connection").startswith("No answer since "), "the loss")
        assert browser.find("#connection").get_attribute("class") == "lost"
        assert browser.text("h1").startswith("running, cycle 0"), "what was known stays"
        job.starts(ranks=4, run_id="another")
        proxy.open()
        browser.until(lambda: browser.text("#job") == "another on gpu-node-17", "the other job")
        assert browser.text("#states") == "4 ranks on this node: 4 training"
    finally:
        proxy.close()


def test_a_proxy_that_keeps_events_back(browser: Browser, job: Simulation) -> None:
    """The page asks again and again instead."""
    proxy = Gate(job.port, refuses=b"GET /events")
    try:
        job.starts(ranks=8)
        browser.open(f"http://127.0.0.1:{proxy.port}/")
        browser.until(lambda: browser.text("#connection") == "live, asked every 2 s", "the first answer")
        job.step += 1
        browser.until(lambda: "step 18,232" in browser.text("h1"), "the next step")
    finally:
        proxy.close()


def test_a_token_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    job = Simulation(tmp_path, free_port(), TOKEN)
    with job.running():
        job.starts(ranks=8)
        browser.open(f"http://127.0.0.1:{job.port}/")
        browser.until(lambda: "A token is needed." in browser.text("#connection"), "the question")
        assert browser.script("return byId('all').hidden")
        browser.press("wrong", "ENTER")
        browser.until(lambda: "That is not the token." in browser.text("#connection"), "the answer")
        browser.press(TOKEN, "ENTER")
        browser.until(lambda: browser.text("h1").startswith("running, cycle 0"), "the status")
        assert TOKEN not in browser.driver.page_source
