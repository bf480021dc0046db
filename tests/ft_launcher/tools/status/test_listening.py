"""Where a job can be asked: ports, tokens, and what happens when they cannot be had."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.record import events
from ft_launcher.record.journal.journal import Journal
from ft_launcher.tools.status.listening import SOCKET, answering
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings.config import RecordSettings, Settings
from tests.patience import patient
from tests.ports import free_port

TOKEN = "0123456789abcdef"
START = events.JobStartEvent("train-7", "host-a", ["train.py"], 3, 2, {})


def opened(folder: Path, journal: Journal | None = None, **settings: Any) -> Any:
    asked = Settings(record=RecordSettings(**settings))
    return answering(asked, {"status_port": "--ft-status-port"}, folder, journal or Journal(), lambda: None, "1.2")


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(30))
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def test_what_the_journal_is_given_is_told(tmp_path: Path) -> None:
    journal, port = Journal(), free_port()
    with opened(tmp_path, journal, status_port=port):
        assert (tmp_path / SOCKET).is_socket()
        journal.write(START)
        assert json.loads(get(port, "/status.json")[1])["run_id"] == "train-7"
        assert get(port, "/")[1].startswith("<!DOCTYPE html>")
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/readyz") == (503, "starting\n")
        journal.write(events.CycleStartEvent(0, 0, 1, "host-a:1", []))
        assert get(port, "/readyz") == (200, "ok\n")
        (known,) = (
            one for one in json.loads(get(port, "/settings.json")[1])["settings"] if one["key"] == "status_port"
        )
        assert known == {"key": "status_port", "value": port, "source": "--ft-status-port"}
        assert get(port, "/fault.json?number=1")[0] == get(port, "/page/page.js")[0] == 404
        assert get(port, "/nothing")[0] == get(port, "/stacks")[0] == 404
    journal.write(START)  # nobody listens any more


def test_the_port_of_the_metrics_says_nothing_else(tmp_path: Path) -> None:
    port = free_port()
    with opened(tmp_path, metrics_port=port):
        assert "ft_launcher_build_info" in get(port, "/metrics")[1]
        assert [get(port, path)[0] for path in ("/status.json", "/events", "/")] == [404, 404, 404]


def test_a_port_that_is_taken_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ft_launcher")
    logging.getLogger("ft_launcher").propagate = True
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with opened(tmp_path, status_port=port):
            assert f"status at 127.0.0.1:{port}: nobody can ask there" in caplog.text


@pytest.mark.parametrize(
    ("address", "token", "problem"),
    [
        ("0.0.0.0", None, "other hosts can ask there, and no token is set"),
        ("0.0.0.0", "short", "the token must have 16 letters or digits at least"),
        ("127.0.0.1", "with spaces in it all over", "the token must have"),
        ("127.0.0.1", "", "the token must have"),
    ],
)
def test_tokens_that_will_not_do(tmp_path: Path, address: str, token: str | None, problem: str) -> None:
    file = tmp_path / "token"
    if token is not None:
        file.write_text(token)
    settings: dict[str, Any] = {"status_address": address, "status_port": 0}
    if token is not None:
        settings["status_token_file"] = str(file)
    with pytest.raises(ConfigError, match=problem), opened(tmp_path, **settings):
        pass


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_a_token(tmp_path: Path, address: str) -> None:
    file, port = tmp_path / "token", free_port()
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    with opened(tmp_path, status_port=port, status_address=address, status_token_file=str(file)):
        assert get(port, "/status.json")[0] == 401
        assert get(port, "/status.json", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert [get(port, path)[0] for path in ("/fault.json", "/settings.json", "/events", "/metrics")] == [401] * 4
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/page.js")[0] == 200, "the page asks for the token"


def test_what_needs_no_token_has_no_words_of_ranks(tmp_path: Path) -> None:
    file, port, journal = tmp_path / "token", free_port(), Journal()
    file.write_text(TOKEN)
    with opened(tmp_path, journal, metrics_port=port, status_token_file=str(file)):
        journal.write(START)
        assert get(port, "/readyz") == (503, "starting\n")
        journal.write(events.JobEndEvent(1, "raised ValueError: hunter2", 0, 0, 0))
        assert get(port, "/readyz") == (503, "ended\n")


def test_who_follows_hears_of_the_end(tmp_path: Path) -> None:
    journal, port = Journal(), free_port()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(30))
    with opened(tmp_path, journal, status_port=port):
        journal.write(START)
        connection.request("GET", "/events")
        response = connection.getresponse()
        assert response.readline().startswith(b'data: {"v": 1,')
        journal.write(events.JobEndEvent(1, "ranks failed", 0, 0, 0))
    *_, name, data = response.read().strip().split(b"\n")
    connection.close()
    assert name == b"event: end"
    found = json.loads(data.removeprefix(b"data: "))
    assert (found["state"], found["exit_code"]) == ("ended", 1)
    assert found["sentence"] == "ended with exit code 1 (ranks failed)"


def test_a_pipe_is_no_file_with_a_token(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    settings = {"status_port": 0, "status_token_file": str(tmp_path / "token")}
    with pytest.raises(ConfigError, match="is not a regular file"), opened(tmp_path, **settings):
        pass


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    settings = {"status_port": 0, "status_token_file": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="No such file"), opened(tmp_path, **settings):
        pass
