"""Calls an etcd (3.4 or later) through its JSON gateway, at one of several endpoints, each call bounded in time.

The only file that uses the library `etcd3gw` (extra `etcd`), which is imported when a gateway is made. Must not know
what is stored in etcd.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

# Each endpoint is tried twice, so that one lost connection is not an error of the job.
_ROUNDS = 2
# Between the rounds, and an eighth of `read_timeout` at most: without a pause both would meet the same short outage.
_PAUSE_S = 0.5
# Where a watch ends at once, its caller polls; this bounds how often.
_POLL_S = 0.05


Json = dict[str, Any]


class EtcdRefusal(RendezvousConnectionError):  # type: ignore[misc]
    """etcd answered with an error of the request; `code` is gRPC's. Another try would not help."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Gateway:
    """The endpoints of one etcd, tried in order from the one that answered last. Several threads may use it.

    Args:
        addresses: host and port of each endpoint, at least one.
        read_timeout_s: bound of a call, over all its tries.
        protocol: `http` or `https`. `cert`: file, or files of certificate and key. `ca_cert`: file.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        read_timeout_s: float,
        protocol: str,
        cert: str | tuple[str, str] | None,
        ca_cert: str | None,
    ) -> None:
        import etcd3gw

        self.read_timeout_s = read_timeout_s
        self._pause_s = min(_PAUSE_S, read_timeout_s / 8)
        try_s = (read_timeout_s - self._pause_s) / (_ROUNDS * len(addresses))
        self._connect_s = try_s / 4
        limits: Any = (self._connect_s, try_s - self._connect_s)  # requests bounds the two steps apart
        self._clients = [
            etcd3gw.Etcd3Client(*at, protocol=protocol, timeout=limits, api_path="/v3/") for at in addresses
        ]
        for client in self._clients:
            client.session.trust_env = False  # no proxies, no .netrc: torch's own backends use none
            client.session.cert = cert
            client.session.verify = ca_cert or True
        self._failures = (etcd3gw.exceptions.Etcd3Exception, OSError, ValueError)
        self._current = 0

    def call(self, path: str, body: Json) -> Json:
        """Returns etcd's answer. If no endpoint gives one, each is tried once more; blocks up to `read_timeout_s`.

        Raises:
            EtcdRefusal: etcd answered with an error of the request.
            RendezvousConnectionError: no endpoint answered as an etcd does.
        """
        count, first = len(self._clients), self._current
        problems: dict[str, str] = {}
        for turn in range(_ROUNDS * count):
            if turn == count:
                time.sleep(self._pause_s)
            at = (first + turn) % count
            client = self._clients[at]
            try:
                answer = client.post(client.get_url(path), json=body)
            except self._failures as error:
                problems[client.base_url] = _refusal_or_problem(client.base_url, error)
                continue
            if isinstance(answer, dict):
                answer = answer.get("result", answer)
            if isinstance(answer, dict) and "header" in answer:
                self._current = at
                return answer
            problems[client.base_url] = "answers, but not as etcd does"
        details = "; ".join(f"{url}: {problem}" for url, problem in problems.items())
        raise RendezvousConnectionError(
            f"no etcd (3.4 or later) can be reached ({details}); see --rdzv-endpoint, and --rdzv-conf for TLS"
        )

    def watch(self, key: str, revision: int, limit_s: float) -> None:
        """Waits until a key was written after a revision, the stream ends, or `limit_s` seconds have passed.

        Does not report which: the caller reads the key. Without a stream it returns after 50 ms, so that the caller
        polls.
        """
        client = self._clients[self._current]
        request = {"key": key, "start_revision": str(revision + 1), "filters": ["NODELETE"]}
        limits = (self._connect_s, limit_s)
        url, body = client.get_url("watch"), {"create_request": request}
        try:
            with client.session.post(url, json=body, stream=True, timeout=limits) as answer:
                for line in answer.iter_lines(chunk_size=1 << 16):
                    event = json.loads(line)["result"]
                    if event.get("canceled") or not event.get("created"):
                        return
        except (*self._failures, LookupError, TypeError, AttributeError):
            pass
        time.sleep(min(_POLL_S, limit_s))


def _refusal_or_problem(url: str, error: Exception) -> str:
    """Describes what is wrong with an endpoint. Raises EtcdRefusal where etcd itself answered with an error."""
    text = str(getattr(error, "detail_text", None) or error)
    kind = type(error).__name__
    try:
        refusal = json.loads(text)
        message, code = str(refusal["message"]), int(refusal["code"])
    except (ValueError, KeyError, TypeError):
        if "Timeout" in kind or "timed out" in text:
            return "no answer in time"
        if kind == "ConnectionFailedError":  # the cause stands deep in requests' own words
            causes = re.findall(r"\[[^]]+\] ([^'\"()]+)|'([^']+)'", text)
            if causes:
                return "".join(causes[-1])
            return text
        return f"answers, but not as etcd does ({kind}: {' '.join(text.split())[:80]})"
    if kind in ("Etcd3Exception", "PreconditionFailedError"):
        raise EtcdRefusal(f"etcd at {url} refuses: {message}", code) from None
    return message
