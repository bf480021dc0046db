"""What the launcher has on this node from start to end: the job's tag, its runtime folder, the template.

`cli.py` makes it before torch is imported, so that the template process starts while the launcher still imports;
`python_api.py` makes it for `launch()`. Uses the standard library only, since torch is not there yet.
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
"""Seconds that the launcher's end waits for the removal of the runtime folder, which has a few files for each rank. On
a local file system the removal takes milliseconds."""


@dataclass
class Runtime:
    """The launcher's belongings on this node.

    Attributes:
        tag: random text in the environment of every process of the job, by which a stop finds them all.
        folder: has the sockets of the monitors and the ranks' stack files. Only this user can enter it (mode 0700).
        template: the process that forks the monitors, and that ends the ranks when the launcher is gone.
        claim: descriptor of a lock on the folder; None after `close`. Each launcher removes folders whose lock is free:
            their launchers were killed.
        refused: the folders that come before the parent of `folder` in the order of preference, each with the reason
            why it could not be used.
    """

    tag: str
    folder: Path
    template: Template
    claim: int | None = None
    refused: tuple[str, ...] = ()

    @classmethod
    def start(cls) -> Runtime:
        """Makes the folder and starts the template; does not wait for the template.

        Raises:
            FtError: no folder can be written, so the monitors could have no sockets.
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
        """Ends the template and removes the folder. Blocks for `_REMOVE_S` at most, beside the end of the template."""
        self.template.close()
        # In a thread: the launcher must be able to end while the file system of TMPDIR does not answer.
        removal = threading.Thread(
            target=shutil.rmtree, args=(self.folder, True), daemon=True, name="ft_remove_runtime"
        )
        try:
            removal.start()
        except RuntimeError:  # A limit of processes is reached, so no thread can start.
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            removal.join(_REMOVE_S)
        if self.claim is not None:
            os.close(self.claim)
            self.claim = None
