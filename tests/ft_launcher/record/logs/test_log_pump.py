"""Lines reach the console whole, in order, with their prefix, the last one too."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from ft_launcher.record.logs.log_pump import LogPump, Stream, streams_of
from tests.patience import until
from tests.program import ended, run, started


def every(line: str) -> bool:
    return True


def test_lines_are_carried_while_they_are_written(tmp_path: Path) -> None:
    out = io.StringIO()
    pump = LogPump([Stream(str(tmp_path / name), f"[{name}]: ", out, every) for name in ("a", "b")])
    pump.start()
    with (tmp_path / "a").open("w") as a, (tmp_path / "b").open("w") as b:
        a.write("one\nhal")
        a.flush()
        until(lambda: "[a]: one\n" in out.getvalue(), out.getvalue)
        b.write("two\n")
        b.flush()
        until(lambda: "[b]: two\n" in out.getvalue(), out.getvalue)
        a.write("f\nno end")
    pump.stop()
    pump.stop()
    assert out.getvalue() == "[a]: one\n[b]: two\n[a]: half\n[a]: no end\n"


WITHOUT_INOTIFY = """
import sys
from pathlib import Path
from ft_launcher.record.logs.log_pump import LogPump, Stream
pump = LogPump([Stream(sys.argv[1], "", sys.stdout, lambda line: True)])
pump.start()
Path(sys.argv[1]).write_text("carried\\n")
sys.stdin.read()
pump.stop()
"""
NAMESPACE = ["unshare", "--user", "--map-root-user", "sh", "-ec"]
USED_UP = 'echo 0 > /proc/sys/user/max_inotify_instances; exec "$@"'


def test_lines_are_carried_where_inotify_is_used_up(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or run([*NAMESPACE, USED_UP, "sh", "true"]).returncode:
        pytest.skip("needs unshare and user namespaces")
    words = [sys.executable, "-c", WITHOUT_INOTIFY, str(tmp_path / "a")]
    with started([*NAMESPACE, USED_UP, "sh", *words]) as process:
        assert process.stdout is not None and process.stdout.readline() == "carried\n"
        assert ended(process) == (0, "", "")


def test_a_file_written_before_the_start_and_one_never_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("early\n")
    out = io.StringIO()
    pump = LogPump([Stream(str(tmp_path / name), "", out, every) for name in ("a", "b")])
    pump.start()
    pump.stop()
    assert out.getvalue() == "early\n"


def test_a_console_that_is_gone_is_survived(tmp_path: Path) -> None:
    """The other streams of its thread are shown, to the end."""
    gone, out = io.StringIO(), io.StringIO()
    gone.close()
    pump = LogPump([Stream(str(tmp_path / name), "", to, every) for name, to in (("a", gone), ("b", out))])
    pump.start()
    (tmp_path / "a").write_text("lost\n")
    (tmp_path / "b").write_text("shown\n")
    until(lambda: "shown\n" in out.getvalue(), out.getvalue)
    with (tmp_path / "b").open("a") as file:
        file.write("the last one")
    pump.stop()
    assert out.getvalue() == "shown\nthe last one\n"


def test_what_torchs_tails_would_carry(tmp_path: Path) -> None:
    out = io.StringIO()
    files = {0: str(tmp_path / "0"), 3: str(tmp_path / "3")}
    tails = [
        TailLog("role", files, out, {3: "(3) "}),
        TailLog("role", {0: files[0]}, out),
    ]
    tails[1]._log_line_filter = lambda line: "keep" in line  # an argument from torch 2.10 on
    streams = streams_of("role", tails)
    assert [(stream.prefix, stream.path) for stream in streams] == [
        ("[role0]:", files[0]),
        ("(3) ", files[3]),
        ("[role0]:", files[0]),
    ]
    assert streams[0].wanted("any") and not streams[2].wanted("any") and streams[2].wanted("keep this")
