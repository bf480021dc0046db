"""Calls an etcd (3.4 or later) through its JSON gateway, at one of several endpoints, each call bounded in time.

The only file that uses the library `etcd3gw` (extra `etcd`), which is imported when a gateway is made. `etcd.py` uses
the gateway. Must not know what is stored in etcd.

The library alone would not do: it knows one endpoint, and where a member of the cluster dies a job must go on with
another. A member may also accept a connection and never answer. So each try has a limit, and each call tries every
endpoint twice, within `read_timeout_s` together.
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
# Seconds between the rounds, an eighth of `read_timeout` at most: without it both would meet the same short outage.
_PAUSE_S = 0.5
# Seconds. Where a watch ends at once, its caller polls; this bounds how often.
_POLL_S = 0.05


Json = dict[str, Any]


class EtcdRefusal(RendezvousConnectionError):  # type: ignore[misc]
    """etcd answered with an error of the request. Another try would not help.

    Attributes:
        code: gRPC's number of the error.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Gateway:
    """The endpoints of one etcd, tried in order from the one that answered last. Several threads may use it.

    Args:
        addresses: host and port of each endpoint, at least one.
        read_timeout_s: bound of a call, over all its tries (seconds).
        protocol: `http` or `https`.
        cert: the file of the client's certificate with its key, or the two files; None: none is sent.
        ca_cert: the file by which the server's certificate is checked; None: by the system's.
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

        A call whose answer was lost may have had its effect, and then is made twice: `Records.swap` allows for that.

        Args:
            path: of the API, without `/v3/`.
            body: the request, as etcd's JSON.

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

        Does not report which of them: the caller reads the key. Where etcd gives no stream this returns after 50 ms, so
        that the caller polls. Uses the endpoint that answered last, and tries no other: the caller's read does.
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
