"""Which path is answered with what. Nothing here acts on a job; `/stacks` has the ranks write down where they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ft_launcher.status import summary
from ft_launcher.status.asking import Asking
from ft_launcher.status.node_status import NodeStatus, Times
from ft_launcher.status.server import Answer

_ASK_S = 0.3
"""How long an answer waits for the monitors (seconds); then it has what is known."""
_STACKS_S = 2.0
_TURN_S = 5.0
"""How long `/healthz` waits for the agent's thread, which is never busy for long while ranks run (seconds). Kubernetes
waits one second by default; docs/operations.md says what to set."""
_EVENTS_S = 1.0
_JSON = "application/json"
PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that need no token: the probes of Kubernetes have none, and the answer says only `ok` or why not."""


class Answers:
    """The answers of one launcher.

    Args:
        times: returns the job's time until now; None: it is not kept.
        version: of the launcher.
    """

    def __init__(self, status: NodeStatus, asking: Asking, times: Callable[[], Times | None], version: str) -> None:
        self._status, self._asking, self._times, self._version = status, asking, times, version

    def of_everything(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answers at the port of the status."""
        match path:
            case "/":
                return _text(f"{self._sentence()}\n\n/status.json /events /metrics /healthz /readyz\n")
            case "/status.json":
                return Answer(summary.encoded(self._found()), _JSON)
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
                if self._status.facts().runs:
                    return _text("ok\n")
                return _text(f"{self._sentence()}\n", 503)
        return _text("there is nothing here\n", 404)

    def of_user(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answers at the socket in the file system, which only this user can reach."""
        if path == "/stacks":
            if self._asking.ask(_STACKS_S, stacks=True) is None:
                return _text(f"{self._sentence()}: no rank runs\n", 409)
            groups = [
                {"ranks": ranks, "frames": list(one.frames), "process": dict(one.process)}
                for ranks, one in summary.merged_stacks(self._status.readings)
            ]
            return Answer(summary.encoded({"v": summary.VERSION, "groups": groups}), _JSON)
        return self.of_everything(path, query)

    def _sentence(self) -> str:
        return summary.sentence(self._status.facts(), self._times())

    def _found(self) -> dict[str, Any]:
        self._asking.ask(_ASK_S)
        now, wall = time.monotonic(), time.time()
        facts, readings = self._status.facts(), self._status.readings
        return summary.as_json(facts, readings, self._times(), now, wall, self._version)

    def _metrics(self) -> Answer:
        try:
            from ft_launcher.status import metrics
        except ImportError:
            return _text("metrics need prometheus-client: pip install 'ft-launcher[observe]'\n", 501)
        self._asking.ask(_ASK_S)
        facts, readings = self._status.facts(), self._status.readings
        body = metrics.as_metrics(facts, readings, self._times(), time.monotonic(), self._version)
        return Answer(body, metrics.KIND)

    def _events(self) -> Iterator[bytes]:
        """The status again and again, as server-sent events."""
        while True:
            yield b"data: " + summary.encoded(self._found()) + b"\n\n"
            time.sleep(_EVENTS_S)


def _text(text: str, code: int = 200) -> Answer:
    return Answer(text.encode(errors="backslashreplace"), code=code)
