"""What the launcher has on this node from start to end: the job's tag, its runtime folder, the template.

Made by `cli.py` before torch is imported, and by `python_api.py`. Uses the standard library only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract.errors import FtError
from rank_monitor.contract.processes import runtime_folder
from rank_monitor.contract.processes.spawn import Template

_REMOVE_S = 5.0
"""Seconds to remove the runtime folder, which has a few files for each rank."""


@dataclass
class Runtime:
    """The tag is in the environment of every process of the job; the folder (0700) has sockets and stack files."""

    tag: str
    folder: Path
    template: Template
    claim: int | None = None
    """Descriptor of a lock. Other launchers remove folders whose lock is free, as those of dead launchers."""
    refused: tuple[str, ...] = ()
    """Folders that come before the one of `folder`, each with the reason why it could not be used."""

    @classmethod
    def start(cls) -> Runtime:
        """Makes the folder and starts the template. Does not wait for the template.

        Raises:
            FtError: no folder can be written.
        """
        # Random: two launchers of one user must never find each other's processes.
        tag = secrets.token_hex(8)
        try:
            folder, refused = runtime_folder.make()
        except OSError as error:
            raise FtError(
                f"{error}; the sockets of the monitors need one. Set TMPDIR to a folder that can be written"
            ) from None
        claim = runtime_folder.claim(folder)
        return cls(tag, folder, Template.start(tag, folder, sweeper=True), claim, tuple(refused))

    def close(self) -> None:
        """Ends the template and removes the folder."""
        self.template.close()
        # In a thread: the launcher must be able to end while the file system of TMPDIR does not answer.
        removal = threading.Thread(
            target=shutil.rmtree, args=(self.folder, True), daemon=True, name="ft_remove_runtime"
        )
        try:
            removal.start()
        except RuntimeError:  # a limit of processes is reached
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            removal.join(_REMOVE_S)
        if self.claim is not None:
            os.close(self.claim)
            self.claim = None
