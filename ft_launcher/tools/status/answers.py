"""Which path is answered with what. Nothing here acts on a job; `/stacks` has the ranks write down where they are."""

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
"""How long an answer waits for the monitors (seconds); then it has what is known. The agent's thread gives up on them
after 0.2 s, or 1 s where a training that has just stalled has its ranks asked where they are."""
_STACKS_S = 2.0
_TURN_S = 5.0
"""How long `/healthz` waits for the agent's thread, which is never busy for long while ranks run (seconds). Kubernetes
waits one second by default; docs/operations.md says what to set."""
_NOT_OURS = "the job's rendezvous is not one over which nodes can be asked (docs/nodes.md)"
_EVENTS_S = 1.0
_LAST_S = 0.3
"""How long the end of the launcher waits until those who follow `/events` have the last state (seconds)."""
_JSON = "application/json"
_PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
OPEN_PATHS = frozenset({"/healthz", "/readyz", *_PAGE})
"""Paths that need no token: the probes of Kubernetes have none, and the answer has no words of ranks. The page
itself has nothing of the job: it asks its reader for the token, and sends it with what it asks."""


class Answers:
    """The answers of one launcher.

    Args:
        times: returns the job's time until now; None: it is not kept.
        settings: the object of `/settings.json`.
        version: of the launcher.
        journal: returns the file of the journal; None: it is not kept yet.
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
        """Answers at the port of the status."""
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
        """Answers at the port of the metrics: these, and probes."""
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
                # The word only: anyone may ask, and the sentence quotes exceptions.
                return _text(f"{summary.job_state(facts, self._times()).value}\n", 503)
        return _text("there is nothing here\n", 404)

    def of_user(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answers at the socket in the file system, which only this user can reach."""
        if path == "/stacks":
            return self._stacks("all" in query)
        if path == "/journal":
            file = self._journal()
            return Answer(summary.encoded({"v": summary.VERSION, "path": file and str(file)}), _JSON)
        return self.of_everything(path, query)

    def _stacks(self, of_all_nodes: bool) -> Answer:
        """Where the ranks of this node are, or those of all nodes."""
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
        for fault in self._status.facts().faults:
            if str(fault.number) == number:
                return Answer(summary.encoded(summary.fault_as_json(fault)), _JSON)
        return _text("there is no such fault, or it is not among the last ones\n", 404)

    def _events(self) -> Iterator[bytes]:
        """The status again and again, as server-sent events; the last one is named `end`."""
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
        """Sends those who follow `/events` the last state. Waits for them, for a fraction of a second at most."""
        with self._ending:
            self._is_over = True
            self._ending.notify_all()
            self._ending.wait_for(lambda: not self._followers, _LAST_S)


def _text(text: str, code: int = 200) -> Answer:
    return Answer(text.encode(errors="backslashreplace"), code=code)
