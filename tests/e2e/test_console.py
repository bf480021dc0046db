"""What a user finds on the console and on disk after a job, beside torchrun where that says what to expect."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120


@dataclass(frozen=True)
class Ran:
    """A program that ended."""

    exit_code: int
    stdout: str
    stderr: str


def run(folder: Path, *words: str, launcher: str = "ft_launcher", **variables: str) -> Ran:
    """Runs a launcher in `folder`."""
    return python(folder, "-m", launcher, *words, variables=variables)


def python(folder: Path, *words: str, variables: Mapping[str, str]) -> Ran:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FT_", "TORCHELASTIC_"))}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**clean, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_without_a_log_folder_records_go_to_the_temporary_folder(tmp_path: Path) -> None:
    """Also where the current folder cannot be written, as nobody can write /proc; a quiet run leaves nothing."""
    script, nowhere = tmp_path / "script.py", Path("/proc")
    script.write_text("import sys; print('printed'); sys.exit(int(sys.argv[1]))")
    own = tmp_path / f"ft_launcher-{os.geteuid()}"
    places = {"XDG_STATE_HOME": "", "TMPDIR": str(tmp_path)}
    quiet = run(nowhere, str(script), "0", **places)
    assert (quiet.exit_code, quiet.stdout) == (0, "printed\n")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    redirected = run(nowhere, "--redirects", "3", str(script), "0", **places)
    assert redirected.exit_code == 0 and str(own) not in redirected.stderr
    assert [log.read_text() for log in own.glob("*/cycle_0/0/stdout.log")] == ["printed\n"]
    failed = run(nowhere, str(script), "3", **places)
    assert failed.exit_code == 3
    record = re.search(r"record: (.*)", failed.stderr)
    assert record is not None and Path(record[1]).parent == own
    assert list(Path(record[1]).glob("journal.*.jsonl"))
