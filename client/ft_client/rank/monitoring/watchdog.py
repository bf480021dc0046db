"""The watchdog of this process: a thread that reports whether the main thread executes Python, and serves the link.

`process.py` starts it, one for each rank process.

**A stamp** is the moment at which the main thread last executed bytecode. The stamp is taken by a call that the
interpreter makes in the main thread between two bytecodes (`Py_AddPendingCall`). That call only posts a semaphore, so
it runs no Python in the main thread. While the main thread is stuck in a call, or holds the GIL in one, there is no new
stamp; the old one is sent again, and by that the monitor knows how long the main thread stands still.

**The link.** This thread receives what the monitor sends, and restores a lost connection. So a replaced monitor gets
the whole state also while the main thread hangs. The state itself is not interpreted here.

**The stacks.** Where the monitor asks for the stacks of this process, this thread writes them (`stack_writer.py`).

With each stamp the watchdog also looks for what a program does that reports nothing itself: its first process group,
the iteration of a Megatron training, and, where the launcher asked for it, the modules that were imported.

Threads: all but `__init__` and `start` runs in the watchdog's hidden thread (`hidden_thread.py`). That thread needs the
GIL for each turn, so it stands still, too, while the main thread holds the GIL in a call.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from ft_client.rank.monitoring import hidden_thread, imported_modules
from ft_client.rank.monitoring.link import Link
from ft_client.rank.monitoring.stack_writer import StackWriter
from rank_monitor.contract.wire import codec
from rank_monitor.contract.wire.messages import (
    FIRST_PERIOD_S,
    NO_ITERATION,
    GroupMade,
    IterationReached,
    ModulesImported,
    Progress,
)

_PERIOD_S = 30.0
"""Seconds from one stamp to the next where nothing asks for a shorter period: each stamp wakes this process and its
monitor."""
_AFTER_ERROR_S = 1.0
"""The pause after an error: one that returns at each turn must not make this thread compete with the training for the
GIL."""
_SEMAPHORE_BYTES = 128
"""Room for a `sem_t`, which has 32 bytes with glibc on 64-bit Linux."""
_IMPORTED_S = 30.0
"""Seconds after a rank's first process group. By then a training that does not report its steps has taken some: what
its first step imports is imported."""


class Stamp:
    """Asks the main thread to post a semaphore, and knows by that when the main thread last ran.

    Raises:
        OSError, AttributeError: the C library has no semaphores.
    """

    def __init__(self, now_ns: int) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        # Never freed: a call that is still pending when this object goes would write to it.
        self._semaphore = ctypes.c_void_p(self._libc.malloc(ctypes.c_size_t(_SEMAPHORE_BYTES)))
        if self._libc.sem_init(self._semaphore, 0, 0) != 0:
            raise OSError("no semaphore")
        self._post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        self._add = ctypes.pythonapi.Py_AddPendingCall
        self._add.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._asked_ns: int | None = None
        self.stamp_ns = now_ns

    def renew(self, now_ns: int) -> int:
        """Asks for the next stamp, if the last one was answered. Does not block.

        Returns when the last stamp that the main thread has answered was asked for: at that moment or later the main
        thread executed bytecode.
        """
        if self._asked_ns is not None and self._libc.sem_trywait(self._semaphore) == 0:
            self.stamp_ns, self._asked_ns = self._asked_ns, None
        if self._asked_ns is None and self._add(self._post, self._semaphore) == 0:
            self._asked_ns = now_ns
        return self.stamp_ns


class Watchdog:
    """The watchdog's thread and its state.

    Args:
        link: the link that it serves.
        reports_modules: whether it is to send which modules the program has imported; see `ModulesImported`.
        stacks: writes the stacks of this process; None: nobody gets any.
    """

    def __init__(self, link: Link, reports_modules: bool = False, stacks: StackWriter | None = None) -> None:
        self.errors = 0
        self._link, self._stacks = link, stacks
        self._stamp = Stamp(time.monotonic_ns())
        self._iteration: int | None = None
        self._backends = ""
        self._environ: dict[str, str] | None = None
        """The environment at the start, until the modules were reported; None: they are not to be reported."""
        if reports_modules:
            self._environ = dict(os.environ)
        self._group_seen_ns: int | None = None
        self._ticked_ns = self._due_ns = time.monotonic_ns()

    def start(self) -> None:
        """Starts the thread, which ends with the process. It blocks all signals but the one for the stacks.

        So a dump by that signal is also possible while the main thread blocks it.

        Raises:
            RuntimeError: no thread can be started.
        """
        takes = None
        if self._stacks is not None:
            takes = self._stacks.signal
        hidden_thread.start(self._run, takes)

    def _run(self) -> None:
        """The thread: turn after turn. An error is counted, and ends nothing: without this thread nobody reconnects."""
        while not self._link.closed:
            try:
                self._turn()
            except Exception:
                self.errors += 1
                time.sleep(_AFTER_ERROR_S)

    def _turn(self) -> None:
        """Stamps if that is due, sends again what was lost, and receives until the next stamp is due."""
        now_ns = time.monotonic_ns()
        period_ns = int(self.period_s() * 1e9)
        if now_ns >= min(self._due_ns, self._ticked_ns + period_ns):
            self._tick(now_ns)
            self._due_ns = now_ns + period_ns
        if self._link.dirty or self._link.stale:
            self._link.resend_state()
        self._write_stacks()
        self._link.poll(min(self._due_ns - now_ns, period_ns) / 1e9, after_each=self._write_stacks)

    def _write_stacks(self) -> None:
        """Writes the stacks if they were asked for.

        Called right after the message: where many threads compute, each further system call costs this thread tens of
        milliseconds, in which it waits for the GIL again.
        """
        if self._link.stacks_asked:
            self._link.stacks_asked = False
            if self._stacks is not None:
                self._stacks.write()

    def period_s(self) -> float:
        """Returns the seconds from one stamp to the next: the shortest that the settings or a wrapper ask for.

        The period is short until the settings are known, and as long as something is sought that is to be noticed soon:
        the first process group, and the modules.
        """
        settings, wrapper_link = self._link.settings, self._link.wrapper_link
        unseen = not (self._backends or self._link.source)
        if settings is None or unseen or self._environ is not None:
            period_s = FIRST_PERIOD_S
        else:
            period_s = _PERIOD_S
        if settings is not None:
            period_s = min(period_s, settings.stamp_period)
        if wrapper_link is not None:
            period_s = min(period_s, wrapper_link.period_s)
        return period_s

    def _tick(self, now_ns: int) -> None:
        """Sends a stamp, and what else has come up since the last one."""
        link, before_ns, self._ticked_ns = self._link, self._ticked_ns, now_ns
        link.stamp_ns = self._stamp.renew(now_ns)
        link.send(codec.encode(Progress(link.stamp_ns), next(link.sequence), now_ns))
        if link.wrapper_link is not None:
            link.wrapper_link.tick()
        backends = group_backends()
        if backends != self._backends:
            sent = not backends or link.post(GroupMade(backends), now_ns)
            if sent:
                self._backends = backends
            else:
                self._backends = ""
        if backends and self._group_seen_ns is None:
            self._group_seen_ns = now_ns
        iteration = megatron_iteration()
        if iteration is not None and iteration != self._iteration:
            self._iteration = iteration
            if link.source is not None:
                link.source.iteration = iteration
            # The training reached the iteration after the last tick, and nobody knows when. A sign of life must not
            # seem later than it was.
            link.send(codec.encode(IterationReached(iteration), next(link.sequence), before_ns))
        if self._environ is not None and self._has_trained(now_ns):
            # Sent once, whether it arrives or not: without it the next cycle imports as this one did.
            before, self._environ = self._environ, None
            names = imported_modules.after_torch(dict(sys.modules))
            changed = imported_modules.changed(before, dict(os.environ))
            link.post(ModulesImported(names, changed), now_ns)

    def _has_trained(self, now_ns: int) -> bool:
        """Whether the program has reported a step, or has had a process group for so long that it has taken some."""
        if self._link.source is not None and self._link.source.iteration != NO_ITERATION:
            return True
        return self._group_seen_ns is not None and now_ns - self._group_seen_ns >= _IMPORTED_S * 1e9


def group_backends() -> str:
    """Returns the backends of this process's default process group, as torch has them; empty while there is none."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if module is not None and module.is_initialized():
            return str(module.get_backend_config())
        return ""
    except (AttributeError, RuntimeError, TypeError, ValueError):  # the group is being made or destroyed just now
        return ""


def has_made_no_group() -> bool:
    """Whether this process has certainly never made a default process group: neither a present one nor a former one.

    torch keeps the backend of the last default group in `_backend`, also when that group is destroyed. With a release
    that has no such name, nothing is certain, and the result is False.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is None or getattr(module, "_backend", "") is None


def megatron_iteration() -> int | None:
    """Returns the iteration of a Megatron training in this process, from its global arguments; None without
    Megatron."""
    module = sys.modules.get("megatron.training.global_vars")
    if module is None:
        return None
    iteration = getattr(getattr(module, "_GLOBAL_ARGS", None), "curr_iteration", None)
    if isinstance(iteration, int):
        return iteration
    return None
