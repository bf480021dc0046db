"""Gives the state in memory its time after a launcher's death, and then removes it.

`lost_launcher.py` calls `after_death` in each process that has outlived the launcher (monitors, template, sweeper),
after the job's processes were killed. One of them does the work: the first that gets the folder's lock. It removes the
folder at once where no step is complete in it. Else it notes in the record that the launcher is dead, and since when,
and forks a process, `ft_memory`, that waits for `Owner.linger_s` seconds and then removes the folder. The process ends
sooner, within a second, once another launcher has taken the folder over.

`ft_memory` is nobody's child, keeps no pipe open and has no working directory, so that nothing waits for it: neither
`ft_launcher ... | tee`, nor a batch script, nor an unmount. SIGTERM ends it; the folder then stays until the next start
of any job of this user on this machine, which removes it (`ft_launcher/node/memory_files/job_folder.py`). The same
happens where every process of a job was killed at once.

Where a signal ends the launcher, it only renames a large folder. Its goodbye names that to the sweeper, which calls
`after_goodbye` to free the memory.

Threads: none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from rank_monitor.contract.memory_files import complete_steps
from rank_monitor.contract.processes import memory_folder, proc
from rank_monitor.contract.processes.fork import fork
from rank_monitor.contract.processes.memory_folder import OwnedFolder, now_s

_NAME = "ft_memory"
_LOOK_S = 1.0
"""From one look whether another launcher has taken the folder to the next."""


def after_death(folder: Path, tag: str) -> None:
    """Removes the folder of a dead launcher, now or after its time, by a process that is left behind. Blocks for as
    long as the removal takes, where it is removed now.

    Args:
        folder: of the job's state in memory.
        tag: of the dead launcher's job. A folder that another launcher has taken is left alone.
    """
    # The launcher may have been killed while it removed the folder: all survivors go on with that.
    for aside in memory_folder.aside_of(folder):
        memory_folder.remove_aside(aside)
    with contextlib.suppress(OSError):  # the folder is gone, or the system refuses a process
        owned = memory_folder.take(folder)
        if owned is not None:
            until_s = _note_death(owned, tag)
            if until_s is not None and fork() == 0:
                _become_waiter(folder, tag, until_s)


def after_goodbye(renamed: Path) -> None:
    """Removes the folder that the launcher has renamed at its end, in a fork: a second for each 5 to 10 GiB.

    Called by the sweeper, after which it ends, in both processes: the template waits for the sweeper, and the launcher
    for the template. Nobody waits for the pipes of the fork.

    Args:
        renamed: the folder.
    """
    with contextlib.suppress(OSError):  # the system refuses a process: then this one does it
        if fork() != 0:
            return
    with contextlib.suppress(OSError):
        _leave_standard_files()
    memory_folder.remove_aside(renamed)


def _leave_standard_files() -> None:
    """Connects stdin, stdout and stderr to nothing."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if null > 2:
        os.close(null)


def _note_death(owned: OwnedFolder, tag: str) -> float | None:
    """Notes in the record that the launcher is dead, or removes the folder at once. Releases the lock.

    Returns:
        When the folder is to be removed (CLOCK_BOOTTIME); None: it is not this process that does it.

    Raises:
        OSError: the folder is gone.
    """
    try:
        owner = owned.read()
        if owner is None or owner.tag != tag or owner.is_dead:
            return None
        if complete_steps(owned.names()) and owner.linger_s > 0:
            owned.write(dataclasses.replace(owner, seen_s=now_s(), is_dead=True))
            return now_s() + owner.linger_s
        memory_folder.remove_aside(owned.set_aside())
        return None
    finally:
        owned.release()


def _become_waiter(folder: Path, tag: str, until_s: float) -> NoReturn:
    """Runs the process `ft_memory`, a fork of a monitor, and ends it. Never returns to the monitor's frames."""
    try:
        os.setsid()
        os.chdir("/")
        _leave_standard_files()
        for descriptor in proc.own_descriptors():
            if descriptor > 2:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        proc.name_this_process(_NAME)
        _wait(folder, tag, until_s)
    except BaseException:  # the edge of the process
        with contextlib.suppress(OSError):
            traceback.print_exc(file=sys.stderr)
    os._exit(0)


def _wait(folder: Path, tag: str, until_s: float) -> None:
    """Waits until `until_s` (CLOCK_BOOTTIME), then removes the folder. Returns sooner where another launcher has
    taken it."""
    while now_s() < until_s:
        owner = memory_folder.read_owner(folder)
        if owner is None or owner.tag != tag:
            return
        time.sleep(max(0.0, min(_LOOK_S, until_s - now_s())))
    owned = memory_folder.take(folder)
    if owned is None:
        return
    owner = owned.read()
    if owner is not None and owner.tag == tag:
        memory_folder.remove_aside(owned.set_aside())
    owned.release()
