"""What the launcher has on this node from start to end: the job's tag, its runtime folder, the template.

Made by `cli.py` before torch is imported, and by `python_api.py`. Uses the standard library only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract.errors import FtError
from rank_monitor.contract.processes import runtime_folder
from rank_monitor.contract.processes.spawn import Template


@dataclass
class Runtime:
    """The tag is in the environment of every process of the job; the folder (0700) has sockets and stack files."""

    tag: str
    folder: Path
    template: Template
    claim: int | None = None
    """Descriptor of a lock. Other launchers remove folders whose lock is free, as those of dead launchers."""

    @classmethod
    def start(cls) -> Runtime:
        """Makes the folder and starts the template. Does not wait for the template.

        Raises:
            FtError: no folder can be written.
        """
        # Random: two launchers of one user must never find each other's processes.
        tag = secrets.token_hex(8)
        folder = _make_folder()
        claim = runtime_folder.claim(folder)
        return cls(tag, folder, Template.start(tag, folder, sweeper=True), claim)

    def close(self) -> None:
        """Ends the template and removes the folder."""
        self.template.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.claim is not None:
            os.close(self.claim)
            self.claim = None


def _make_folder() -> Path:
    tried = []
    # /dev/shm serves containers whose other folders are read-only or full.
    for parent in dict.fromkeys((os.environ.get("TMPDIR") or tempfile.gettempdir(), "/tmp", "/dev/shm")):
        try:
            folder = Path(tempfile.mkdtemp(prefix=runtime_folder.PREFIX, dir=parent))
            return folder.resolve()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
    raise FtError(
        f"no folder for the sockets of the monitors can be made ({'; '.join(tried)}). Set TMPDIR to one that can"
    )
