"""What the launcher holds on this node from first to last: the job's tag, its runtime folder, the template.

Standard library only: it exists before torch is imported.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract import runtime_folder
from rank_monitor.contract.errors import FtError
from rank_monitor.contract.spawn import Template


@dataclass
class Runtime:
    """The tag marks every process of the job (in its environment); the folder (0700) holds sockets and stack files."""

    tag: str
    folder: Path
    template: Template
    claim: int | None = None
    """What keeps the folder from being taken for one that a dead launcher left."""

    @classmethod
    def start(cls) -> Runtime:
        """Makes the folder and starts the template; returns at once.

        Raises:
            FtError: no folder can be written.
        """
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
    for parent in dict.fromkeys((os.environ.get("TMPDIR") or tempfile.gettempdir(), "/tmp", "/dev/shm")):
        try:
            folder = Path(tempfile.mkdtemp(prefix=runtime_folder.PREFIX, dir=parent))
            return folder.resolve()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
    raise FtError(
        f"no folder for the sockets of the monitors can be made ({'; '.join(tried)}). Set TMPDIR to one that can"
    )
