"""How a launcher's socket is asked: what counts as no answer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_launcher.tools.commands.running_jobs import NoAnswerError, RunningJob, running_job
from rank_monitor.contract.processes import runtime_folder

BODY = json.dumps({"v": 1, "job_name": "ours", "run_id": "exp42"}).encode()
ANSWER = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@contextlib.contextmanager
def listening(path: Path, answer: bytes, pause_s: float = 0.0) -> Iterator[Path]:
    """A launcher that gives its answers byte by byte, with a pause after each. Gives its socket."""
    done = threading.Event()
    path.parent.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError), connection:
                    connection.recv(1000)
                    for byte in answer:
                        connection.send(bytes([byte]))
                        done.wait(pause_s)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield path
    finally:
        done.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


@pytest.fixture
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only launchers of this test are looked for."""
    monkeypatch.setattr(runtime_folder, "parents", lambda environ: [str(tmp_path)])


def test_a_limit_is_for_the_whole_answer(tmp_path: Path) -> None:
    """Of a launcher that gives a byte now and then, each single read has its byte in time."""
    with listening(tmp_path / "ft-a" / "status", ANSWER, pause_s=0.02) as path:
        with pytest.raises(NoAnswerError, match=rf"^the launcher with pid {os.getpid()} has not answered within 0.5 s"):
            RunningJob(path, {}).ask("/status.json", 0.5)
        assert RunningJob(path, {}).ask("/status.json", 600) == json.loads(BODY)


@pytest.mark.usefixtures("_own_folders")
def test_a_job_beside_launchers_that_do_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = socket.socket(socket.AF_UNIX)
    (tmp_path / "ft-gone").mkdir()
    gone.bind(str(tmp_path / "ft-gone" / "status"))
    gone.close()
    failing = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    with listening(tmp_path / "ft-b" / "status", failing) as path:
        problem = f"ft_launcher: no status comes from {path}: 503 Service Unavailable\n"
        for run in (None, "ours"):
            with pytest.raises(SystemExit) as ended:
                running_job(run)
            assert (ended.value.code, capsys.readouterr().err) == (5, problem)
        with listening(tmp_path / "ft-a" / "status", ANSWER):
            assert running_job(None).status["job_name"] == "ours"
            assert capsys.readouterr().err == problem
            assert running_job("exp").status["job_name"] == "ours"
            assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as ended:
        running_job(None)
    assert ended.value.code == 4
