"""Answers the requests that arrive at a launcher's ports and socket: which path gets which body.

`listening.py` makes one `Answers` and gives each `StatusServer` one of its three methods as handler: `of_everything` at
the status port, `of_metrics` at the metrics port, `of_user` at the socket. No path has an effect on the job; `/stacks`
has the ranks write down where they are, and they go on.

Threads: a thread of a server calls a handler for each connection, so every method here may run several times at once. A
handler blocks for the agent's answer, at most as long as the constants below say. `end` is called once, by the main
thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from ft_launcher.record.ledger.job_ledger import JobTime
from ft_launcher.tools.status import summary
from ft_launcher.tools.status.asking import Asking, OtherStacks
from ft_launcher.tools.status.fault_scene import merged_stacks
from ft_launcher.tools.status.node_status import NodeStatus, RankReading
from ft_launcher.tools.status.status_server import Answer

_ASK_S = 1.5
"""How long an answer waits for fresh readings of the monitors (seconds). After that it has what is known. The agent's
thread gives up on monitors after 0.2 s, or 1 s where a training has just stalled and its ranks are asked for stacks."""
_STACKS_S = 2.0
"""The same for stacks and collectives (seconds), for which the agent's thread waits 1 s."""
_TURN_S = 5.0
"""How long `/healthz` waits for the agent's loop (seconds), which is never busy for long while ranks run. Kubernetes
itself waits one second by default; docs/status.md says what to set."""
_NOT_OURS = "the job's rendezvous is not one over which nodes can be asked (docs/nodes.md)"
_EVENTS_S = 1.0
"""Seconds between two states that `/events` sends."""
_LAST_S = 0.3
"""How long the end of the launcher waits until followers of `/events` have the last state (seconds)."""
_JSON = "application/json"
_PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
OPEN_PATHS = frozenset({"/healthz", "/readyz", *_PAGE})
"""Paths that need no token. The probes of Kubernetes have none, and their answers contain no words of ranks. The page
itself knows nothing of the job: it asks its reader for the token, and sends it with its own requests."""


class Answers:
    """The answers of one launcher.

    Args:
        status: the state of the job on this node.
        asking: by which the agent's thread is asked for fresh readings.
        times: returns the job's time until now; None: no time is kept.
        settings: the object of `/settings.json`.
        version: the version of the launcher.
        journal: returns the file of the journal; None: the journal has no file yet.
    """

    def __init__(
        self,
        status: NodeStatus,
        asking: Asking,
        times: Callable[[], JobTime | None],
        settings: Mapping[str, Any],
        version: str,
        journal: Callable[[], Path | None],
    ) -> None:
        self._status, self._asking, self._times, self._version = status, asking, times, version
        self._settings = settings
        self._journal = journal
        self._ending = threading.Condition()
        self._is_over = False
        self._followers = 0

    def of_everything(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answers a request at the status port.

        Args:
            path: the path of the request.
            query: its parameters, each with its last value.
        """
        if path in _PAGE:
            name, kind = _PAGE[path]
            file = resources.files("ft_launcher.tools.status") / "page" / name
            return Answer(file.read_bytes(), kind)
        match path:
            case "/status.json":
                return Answer(summary.encoded(self._found("collectives" in query)), _JSON)
            case "/fault.json":
                return self._fault(query.get("number", ""))
            case "/settings.json":
                return Answer(summary.encoded(self._settings), _JSON)
            case "/events":
                return Answer(kind="text/event-stream", stream=self._events())
        return self.of_metrics(path, query)

    def of_metrics(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answers a request at the metrics port: `/metrics`, and the probes `/healthz` and `/readyz`."""
        match path:
            case "/metrics":
                return self._metrics()
            case "/healthz":
                if self._asking.ask(_TURN_S) is False:
                    return _text(f"the launcher's loop has not turned for {_TURN_S:g} s\n", 503)
                return _text("ok\n")
            case "/readyz":
                facts = self._status.facts()
                if facts.runs or facts.waits:
                    return _text("ok\n")
                # Only the word: anyone may ask, and the whole sentence may quote an exception.
                return _text(f"{summary.job_state(facts, self._times()).value}\n", 503)
        return _text("there is nothing here\n", 404)

    def of_user(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answers a request at the socket in the file system, which only this user can reach. Adds `/stacks` and
        `/journal`."""
        if path == "/stacks":
            return self._stacks("all" in query)
        if path == "/journal":
            file = self._journal()
            return Answer(summary.encoded({"v": summary.VERSION, "path": file and str(file)}), _JSON)
        return self.of_everything(path, query)

    def _stacks(self, of_all_nodes: bool) -> Answer:
        """Returns where the ranks of this node are, or those of all nodes; code 409 where no rank runs.

        The other nodes are asked first, and awaited last: they look for questions seldom, and meanwhile this node asks
        its own ranks. A rank that answers here is left out of the other nodes' answer.
        """
        # First the other nodes are asked, which takes them longest; then this node's ranks; then the other nodes are
        # awaited.
        others = None
        if of_all_nodes and self._asking.other_nodes is not None:
            others = self._asking.other_nodes.ask_stacks()
        has_ranks = self._asking.ask(_STACKS_S, stacks=True) is not None
        found = OtherStacks()
        if others is not None:
            found = others()
        elif of_all_nodes and self._status.facts().nodes > 1:
            found = OtherStacks(problem=_NOT_OURS)
        readings: Sequence[RankReading] = ()
        if has_ranks:
            readings = self._status.readings
        # No rank is listed twice: this node's own answer about its ranks counts.
        here = {reading.rank for reading in readings}
        readings = [*readings, *(reading for reading in found.readings if reading.rank not in here)]
        if not readings and not found.silent:
            return _text(f"{summary.sentence(self._status.facts(), self._times())}: no rank runs\n", 409)
        groups = merged_stacks(
            {"rank": reading.rank, "frames": reading.frames, "process": reading.process} for reading in readings
        )
        table = summary.collectives(readings, time.monotonic())
        answer: dict[str, Any] = {"v": summary.VERSION, "groups": groups, "collectives": table}
        if of_all_nodes:
            answer["silent"] = [asdict(node) for node in found.silent]
            answer["problem"] = found.problem
        return Answer(summary.encoded(answer), _JSON)

    def _found(self, with_collectives: bool = False) -> dict[str, Any]:
        """Returns the object of `/status.json`, with readings that are at most a moment old where the agent answers in
        time."""
        if with_collectives:
            self._asking.ask(_STACKS_S, collectives=True)
        else:
            self._asking.ask(_ASK_S)
        now, wall = time.monotonic(), time.time()
        facts, readings = self._status.facts(), self._status.readings
        seen = None
        if self._asking.other_nodes is not None and not self._is_over:
            seen = self._asking.other_nodes.seen()
        found = summary.as_json(facts, readings, self._times(), now, wall, self._version)
        return found | summary.others_as_json(seen)

    def _metrics(self) -> Answer:
        """Returns the metrics; code 501 where `prometheus-client` is not installed. It is imported at the first request
        only."""
        try:
            from ft_launcher.tools.status import metrics
        except ImportError:
            return _text("metrics need prometheus-client: pip install 'ft-launcher[observe]'\n", 501)
        self._asking.ask(_ASK_S)
        facts, readings = self._status.facts(), self._status.readings
        nodes: Mapping[str, int] = {}
        if self._asking.other_nodes is not None:
            nodes = self._asking.other_nodes.counts()
        elif facts.cycle is not None:
            nodes = {"active": facts.nodes}
        body = metrics.as_metrics(facts, readings, self._times(), nodes, time.monotonic(), self._version)
        return Answer(body, metrics.KIND)

    def _fault(self, number: str) -> Answer:
        """Returns where the ranks were at the fault `number`; code 404 where it is not one of the last ones."""
        for fault in self._status.facts().faults:
            if str(fault.number) == number:
                return Answer(summary.encoded(summary.fault_as_json(fault)), _JSON)
        return _text("there is no such fault, or it is not among the last ones\n", 404)

    def _events(self) -> Iterator[bytes]:
        """Yields the status once a second as server-sent events. The last one is named `end`, and follows when `end` is
        called."""
        with self._ending:
            self._followers += 1
        try:
            while not self._is_over:
                yield b"data: " + summary.encoded(self._found()) + b"\n\n"
                with self._ending:
                    self._ending.wait_for(lambda: self._is_over, _EVENTS_S)
            yield b"event: end\ndata: " + summary.encoded(self._found()) + b"\n\n"
        finally:
            with self._ending:
                self._followers -= 1
                self._ending.notify_all()

    def end(self) -> None:
        """Sends followers of `/events` the last state. Blocks until they have it, at most `_LAST_S`."""
        with self._ending:
            self._is_over = True
            self._ending.notify_all()
            self._ending.wait_for(lambda: not self._followers, _LAST_S)


def _text(text: str, code: int = 200) -> Answer:
    """Returns an answer of plain text."""
    return Answer(text.encode(errors="backslashreplace"), code=code)
