"""Opens the places at which a job can be asked: a socket in the runtime folder, and the ports that the user chose.

`composition.py` enters `answering` for each job, and `tracing` where traces are wanted. What cannot be opened is a
warning, not an error: the training must not fail because nobody can look at it. Settings that would let strangers read
a job are an error, though.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ft_launcher.record.journal.journal import Journal
from ft_launcher.record.ledger.job_ledger import JobTime
from ft_launcher.tools.status import summary
from ft_launcher.tools.status.answers import OPEN_PATHS, Answers
from ft_launcher.tools.status.asking import Asking
from ft_launcher.tools.status.node_status import NodeStatus
from ft_launcher.tools.status.status_server import Handler, StatusServer, as_file, at_port
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.processes.local_address import host_and_port, loopback
from rank_monitor.contract.settings.config import RecordSettings, Settings
from rank_monitor.contract.wire.foreign import open_regular

logger = logging.getLogger("ft_launcher")

SOCKET = "status"
"""The name of the socket in the runtime folder. `tools/commands/status.py` looks for it there."""
_LEAST_TOKEN = 16
"""Characters of the shortest token: shorter ones can be guessed."""
_MAX_TOKEN = 4096
"""Bytes of the token's file that are read."""


@contextlib.contextmanager
def answering(
    settings: Settings,
    sources: Mapping[str, str],
    folder: Path,
    journal: Journal,
    times: Callable[[], JobTime | None],
    version: str,
) -> Iterator[tuple[NodeStatus, Asking]]:
    """Context in which the job can be asked. Gives the status to fill, and the requests to answer.

    A port that cannot be opened is a warning. At the end, followers of `/events` get the last state, and all servers
    and descriptors are closed.

    Args:
        settings: of the job.
        sources: the source of each setting.
        folder: the runtime folder, where the socket is made.
        journal: its events are the status; a listener is added until the end.
        times: returns the job's time until now.
        version: the version of the launcher.

    Raises:
        ConfigError: other hosts can reach the address and there is no token, or the token cannot be read.
    """
    record = settings.record
    token = _token(record, sources)
    status, asking = NodeStatus(), Asking()
    settings_found = summary.settings_as_json(settings, sources)
    answers = Answers(status, asking, times, settings_found, version, lambda: journal.path)
    journal.listeners.append(status.on_event)
    servers = []
    try:
        with _warned("ft_launcher status"):
            servers.append(StatusServer(as_file(str(folder / SOCKET)), answers.of_user))
        ports: dict[int, tuple[str, Handler]] = {}
        if record.metrics_port is not None:
            ports[record.metrics_port] = ("metrics", answers.of_metrics)
        if record.status_port is not None:
            ports[record.status_port] = ("status", answers.of_everything)
        for port, (what, handler) in ports.items():
            address = _here(record.status_address)
            with _warned(f"{what} at {host_and_port(address, port)}"):
                server = StatusServer(at_port(address, port), handler, token, OPEN_PATHS)
                servers.append(server)
                logger.info("%s: http://%s/", what, host_and_port(address, server.port))
        yield status, asking
    finally:
        journal.listeners.remove(status.on_event)
        answers.end()
        for server in servers:
            server.close()
        asking.close()


@contextlib.contextmanager
def tracing(journal: Journal, version: str) -> Iterator[None]:
    """Context in which the job's cycles are sent as traces. Without OpenTelemetry's packages it warns, and nothing is
    sent."""
    try:
        from ft_launcher.tools.status.trace_export import sending
    except ImportError as error:
        logger.warning("no traces are sent (%s): pip install 'ft-launcher[otel]'", error)
        yield
        return
    with sending(version) as on_event:
        journal.listeners.append(on_event)
        try:
            yield
        finally:
            journal.listeners.remove(on_event)


@contextlib.contextmanager
def _warned(what: str) -> Iterator[None]:
    """Context that turns an OSError into a warning that names `what` cannot be asked."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: nobody can ask there (%s); the training goes on", what, error.strerror or error)


def _token(settings: RecordSettings, sources: Mapping[str, str]) -> str | None:
    """Returns the token that requests must have. None: no token is needed, since only this host can ask.

    A token file that every user of the host can read is a warning.

    Raises:
        ConfigError: there is no token where one is needed, or it cannot be read, or is too short.
    """
    file = settings.status_token_file
    if settings.metrics_port is None and settings.status_port is None:
        return None
    if file is None:
        if _is_loopback(settings.status_address):
            return None
        raise ConfigError(
            "status_address",
            settings.status_address,
            sources.get("status_address", "settings"),
            "other hosts can ask there, and no token is set",
            "Write one into a file and name it with --ft-status-token-file, or listen at 127.0.0.1",
        )
    source = sources.get("status_token_file", "settings")
    try:
        with open_regular(file, follow_link=True) as opened:
            token = opened.read(_MAX_TOKEN).decode().strip()
            mode = os.fstat(opened.fileno()).st_mode
    except (OSError, UnicodeError) as error:
        raise ConfigError("status_token_file", file, source, str(error), "Name a file with the token") from None
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        problem = f"the token must have {_LEAST_TOKEN} letters or digits at least"
        raise ConfigError("status_token_file", file, source, problem, "Make one: openssl rand -hex 32")
    if mode & 0o004:
        logger.warning("every user of this host can read the token in %s", file)
    return token


def _here(address: str) -> str:
    """Returns the address to listen at. For the default, 127.0.0.1, it returns `::1` on a host whose loopback has no
    IPv4."""
    if address == RecordSettings.status_address:
        return loopback()
    return address


def _is_loopback(address: str) -> bool:
    """Returns whether only this host can reach `address`. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
