"""An agreed stop: after a signal to any rank, all ranks save and end after the same step.

The training calls it at the end of each step. Who sends the signal and how a checkpoint is written is not known here.
The handler only sets a flag. The log line is written at the end of the step, since a handler that logs can deadlock
when it interrupts a log call (a `logging` handler's lock).

Example:

    with PreemptionGuard(save=lambda: save_checkpoint(step)) as guard:
        for step in range(steps):
            train(step)
            guard.check()

Threads: signals and `with` need the main thread. A worker of a data loader gets a thread `ft-signal` that waits for the
signal (`ignore_but_from_parent`).
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import process, util
from types import FrameType, TracebackType
from typing import Any, TypeVar

from ft_client.rank.agreement import group
from ft_client.rank.argument_checks import check_exit_code, check_save

logger = logging.getLogger(__name__)

_H = TypeVar("_H", bound="DistributedSignalHandler")
_LOADER = "torch.utils.data"
"""The package of what runs in a data loader's worker."""
_NEVER = {signal.SIGKILL, signal.SIGSTOP}
"""Signals that no process can catch."""


class DistributedSignalHandler:
    """Notes a signal while its `with` block runs; the ranks of the default process group agree on it. The names are
    Megatron-LM's.

    A scheduler sends the signal to every process of a job, workers of data loaders too, whose end would fail the step
    that runs.

    Args:
        sig: any signal that a process can catch.
        exit_signal_handler_for_dataloader: True: a data loader's workers are left as torch has them, and SIGTERM ends
            them. False: workers that are forked in the block ignore the signal, unless this process sends it.

    Raises:
        ValueError: `sig` cannot be caught.
    """

    def __init__(self, sig: int = signal.SIGTERM, exit_signal_handler_for_dataloader: bool = False) -> None:
        self.sig = _catchable(sig)
        self.exit_signal_handler_for_dataloader = exit_signal_handler_for_dataloader
        self._before: Any = None
        self._in_force = self._received = self._logged = False

    def __enter__(self: _H) -> _H:
        """Installs the handler.

        Raises:
            RuntimeError: called in a thread other than the main one, or the handler is installed already.
        """
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            raise RuntimeError(
                f"the handler of sig={_name(self.sig)} can be installed in the main thread only, not in {thread.name!r}"
            )
        if self._in_force:
            raise RuntimeError(f"the handler of sig={_name(self.sig)} is installed already; release() it first")
        self._received = self._logged = False
        self._before = signal.getsignal(self.sig)
        signal.signal(self.sig, self._on_signal)
        self._in_force = True
        if not self.exit_signal_handler_for_dataloader:
            util.register_after_fork(self, _in_fork)
        logger.info("Signal handler installed for %d", self.sig)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Gives the signal its previous handler back."""
        self.release()

    def release(self) -> bool:
        """Gives the signal its previous handler back. Returns whether this call did; a second one does nothing.

        Raises:
            ValueError: called in a thread other than the main one (Python's own error).
        """
        if not self._in_force:
            return False
        if self._before is None:  # the previous handler was not installed from Python, and cannot be set from Python
            signal.signal(self.sig, signal.SIG_DFL)
        else:
            signal.signal(self.sig, self._before)
        self._in_force = False
        return True

    def should_stop(self) -> bool:
        """Returns whether any rank got the signal; the same on all ranks. Collective: one all-reduce of one number."""
        self._log_signal()
        return group.max_over_ranks([float(self._received)])[0] > 0

    def signals_received(self) -> list[bool]:
        """Returns for each rank whether it got the signal; the same on all ranks. Collective: one all-reduce."""
        self._log_signal()
        own = group.rank()
        flags = [float(self._received and rank == own) for rank in range(group.size())]
        return [flag > 0 for flag in group.max_over_ranks(flags)]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler. Only sets a flag; see the top of this file."""
        self._received = True

    def _log_signal(self) -> None:
        """Logs once that this rank got the signal."""
        if self._received and not self._logged:
            self._logged = True
            logger.warning("Received signal %d, initiating graceful stop", self.sig)

    def worker_init_fn(self) -> Callable[..., None]:
        """Returns what makes a worker ignore the signal, for workers that are not forked:
        `DataLoader(worker_init_fn=guard.worker_init_fn())`."""
        return functools.partial(ignore_but_from_parent, self.sig)


class PreemptionGuard(DistributedSignalHandler):
    """Agrees, saves and exits, by one call of `check()` at the end of each step.

    Args:
        save: writes the checkpoint; called on every rank after the same step. None: the caller saved before.
        sig, exit_signal_handler_for_dataloader: as for `DistributedSignalHandler`.
        exit_code: what the ranks exit with then. Under `ft_launcher` the launcher exits with a code of its own.

    Raises:
        ValueError: `sig` cannot be caught, or `exit_code` is not from 0 to 255.
    """

    def __init__(
        self,
        save: Callable[[], object] | None = None,
        sig: int = signal.SIGTERM,
        exit_code: int = 0,
        exit_signal_handler_for_dataloader: bool = False,
    ) -> None:
        super().__init__(sig, exit_signal_handler_for_dataloader)
        check_save(save)
        check_exit_code(exit_code)
        self._save, self._exit_code = save, exit_code

    def check(self) -> None:
        """To be called at the end of each step on all ranks. Returns if no rank got the signal. Collective.

        Raises:
            SystemExit: a rank got the signal, and the checkpoint is saved. What `save` raises is raised instead.
        """
        if not self.should_stop():
            return
        if self._save is not None:
            self._save()
        if group.rank() == 0:
            logger.warning("exiting program after receiving %s.", _name(self.sig))
        sys.exit(self._exit_code)


def ignore_but_from_parent(sig: int, worker: int = 0) -> None:
    """Makes this process, a data loader's worker, ignore a signal unless its parent sends it: then it exits with 0.

    The signal is blocked, and a thread waits for it: a handler would not do, since torch installs its own handler of
    SIGTERM in workers after the fork. Programs that this process starts inherit the blocked signal. The kernel holds
    one pending signal of a number only: the parent's signal is lost if it comes before the thread has received that of
    another sender, a millisecond before.

    Args:
        sig: the signal.
        worker: the number of the worker, which torch passes; not used.
    """
    number = _catchable(sig)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def wait_for_parent() -> None:
        while signal.sigwaitinfo({number}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait_for_parent, name="ft-signal", daemon=True).start()


def _in_fork(handler: DistributedSignalHandler) -> None:
    """Called in each process that multiprocessing forks. Acts in workers of a data loader only, not in those of
    pools."""
    target = getattr(process.current_process(), "_target", None)
    if handler._in_force and str(getattr(target, "__module__", "")).startswith(_LOADER):
        ignore_but_from_parent(handler.sig)


def _catchable(sig: int) -> int:
    """Returns the signal. Raises ValueError: it is none that a process can catch."""
    if isinstance(sig, bool) or not isinstance(sig, int) or sig not in signal.valid_signals():
        raise ValueError(f"sig={sig!r} is not a signal; give one of the module signal, as signal.SIGUSR1")
    if sig in _NEVER:
        raise ValueError(f"sig={_name(sig)} cannot be caught by a process; SIGTERM, SIGUSR1 and SIGUSR2 can")
    return sig


def _name(sig: int) -> str:
    """Returns `SIGTERM` for 15, and `signal 36` for a real-time signal: most of these have no name."""
    try:
        return signal.Signals(sig).name
    except ValueError:
        return f"signal {sig}"
