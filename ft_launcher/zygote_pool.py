"""Whether there is a zygote: makes it where that may be, replaces it when it is lost, and says why ranks exec.

A restart never waits for a zygote: while there is none, ranks start by exec, unless the user insists on a warm start.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Sequence

from ft_launcher import warm_start, zygote
from ft_launcher.forked_rank import ForkedRank
from ft_launcher.process_tree import is_stopped
from ft_launcher.zygote_process import NoRanks, RankOrder, ZygoteLost, ZygoteProcess, ZygoteUnfit
from rank_monitor.contract.config import StartSettings
from rank_monitor.contract.errors import ConfigError, FtError

logger = logging.getLogger(__name__)

_READY_S = 300.0
_RESPAWNS = 3
_SLOW_PRELOAD_S = 10.0


class NoWarmStart(FtError):
    """The user insists on a warm start, and there can be none."""


class ZygotePool:
    """Make it before torch is imported, `begin` before anything else is imported or starts a thread, then `prepare`.

    Args:
        apart: this process is a user's program: it is not forked, and nothing of it is changed; see `prepare_apart`.
    """

    def __init__(self, apart: bool = False) -> None:
        self._zygote: ZygoteProcess | None = None
        self._settings = StartSettings()
        self._tag = ""
        self._why_not = "no warm start was prepared"
        self._said = ""
        self._look: warm_start.FolderLook | None = None
        self._respawns = 0
        self._apart, self._first = apart, False
        self._told: tuple[int, int] | None = None
        self._source = ""
        self.held = zygote.open_descriptors()
        self._first_path: str | None = None
        if not apart and not zygote.is_safe_path():
            self._first_path = sys.path.pop(0)
        self._path = list(sys.path)
        if not apart:
            gc.disable()

    def begin(self, why_not: str) -> ForkedRank | None:
        """Imports torch and forks the zygote, before the launcher's own modules are loaded: ranks have none of them.

        Args:
            why_not: why there is to be no zygote; empty when there may be one.

        Returns:
            In each rank of the zygote: that rank. In the launcher: None.
        """
        self._why_not = why_not
        if not why_not:
            zygote.load_torch()
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            gc.freeze()
            try:
                made = ZygoteProcess.fork(self._path, self.held)
            except OSError as error:
                self._why_not = f"no zygote can be forked ({error.strerror})"
                return None
            if isinstance(made, ForkedRank):
                return made
            self._zygote = made
            # Counted after the fork: libraries with a handler for forks (OpenBLAS) have ended their threads for it.
            self._why_not = warm_start.against_process(zygote.threads_here(), cuda=False, device_files=())
        return None

    def prepare(self, words: Sequence[str], settings: StartSettings, source: str, tag: str) -> None:
        """Has the zygote import what the user preloads, where ranks may be forks; ends it where they may not.

        Args:
            words: `[-m] SCRIPT ARGS` as given; empty when Python does not run them.
            source: where the setting `warm_start` came from.
            tag: the job's mark.

        Raises:
            ConfigError: a module to preload cannot be imported, or the warm start that the user insists on cannot be.
        """
        self._settings, self._tag = settings, tag
        try:
            self._why_not = self._against_command(words) or self._why_not or self._preload()
        finally:
            gc.freeze()
            self._restore()
        if self._why_not and self._zygote is not None:
            self._zygote.bury()
            self._zygote = None
        self._insist(source)

    def _preload(self) -> str:
        """Tells the zygote what to import, and waits for that if there is anything; returns why it cannot be used."""
        modules = self._settings.preload
        self._first = True
        if self._zygote is None:
            return "no zygote was forked"
        began = time.monotonic()
        try:
            self._zygote.prepare(self._tag, modules)
            if modules or self._settings.warm_start == "on":
                self._zygote.await_ready(None)
        except zygote.PreloadError as error:
            raise _not_preloaded(error.module, error.problem) from None
        except ZygoteUnfit as unfit:
            return str(unfit)
        except ZygoteLost as lost:
            if modules:
                code = self._zygote.bury()
                self._zygote = None
                how = f"signal {-code}" if code < 0 else f"code {code}"
                problem = f"the process that imported it ended ({how})"
                raise _not_preloaded(",".join(modules), problem) from None
            return f"the zygote was lost: {lost}"
        took_s = time.monotonic() - began
        if modules and took_s > _SLOW_PRELOAD_S:
            print(f"ft_launcher: --ft-preload {','.join(modules)} took {took_s:.0f} s", file=sys.stderr)
        return self._against_loaded()

    def prepare_apart(self, words: Sequence[str], function: bool, settings: StartSettings, tag: str) -> None:
        """Starts a zygote as a program of its own, where ranks may be forks; the first ranks wait for it.

        Args:
            words: `[-m] SCRIPT ARGS`; empty when Python does not run them. Of a `function` any.

        Raises:
            ConfigError: the warm start that the user insists on cannot be.
        """
        self._settings, self._tag = settings, tag
        self._why_not = self._against_command(words, function)
        if not self._why_not:
            self._first = True
            self._respawn()
        self._insist("settings")

    def _against_command(self, words: Sequence[str], function: bool = False) -> str:
        """Why ranks of this command cannot be forks; empty when they can, as long as their script does not change."""
        if self._settings.warm_start == "off":
            return "--ft-warm-start=off"
        if (why := warm_start.against_command(words, os.environ, sys.orig_argv)) or function:
            return why
        self._look = warm_start.FolderLook(words)
        return ""

    def _against_loaded(self) -> str:
        """Why the script cannot be run where the zygote's modules are loaded; empty when it can, or is a function."""
        if self._look is None or self._zygote is None:
            return ""
        return self._look.against(self._zygote.loaded)

    def _insist(self, source: str) -> None:
        self._source = source
        if self._why_not and self._settings.warm_start == "on":
            raise self._refused()

    def _refused(self) -> ConfigError:
        return ConfigError("warm_start", "on", self._source, self._why_not, "Use auto: ranks start by exec then")

    def _restore(self) -> None:
        """Gives this process back what was changed while it loaded what ranks share."""
        if not self._apart:
            gc.enable()
        if self._first_path is not None:
            sys.path.insert(0, self._first_path)
            self._first_path = None

    def start_ranks(self, orders: Sequence[RankOrder], numa: bool) -> list[int] | None:
        """Pids of new ranks, children of this process; None: they must start by exec, and a line in the log says why.

        Args:
            numa: whether ranks are bound to processors by numactl.

        Raises:
            NoWarmStart: the user does not want that.
        """
        why = self._why_not or self._against(orders, numa)
        if not why and self._zygote is not None:
            try:
                pids = self._zygote.start_ranks(orders, self._way_to_tell())
                self._respawns, self._said = 0, ""
                return pids
            except ZygoteLost as lost:
                self._lose(self._zygote, str(lost))
                why = "the zygote was lost while it was asked for ranks"
            except NoRanks as refusal:
                why = str(refusal)
        if self._settings.warm_start == "on":
            raise NoWarmStart(f"no warm start: {why}. --ft-warm-start=auto starts the ranks by exec instead")
        if why != self._said:
            self._said = why
            logger.info("Ranks start by exec: %s.", why)
        return None

    def pids(self) -> set[int]:
        """The zygote's pid, while there is one."""
        return {self._zygote.pid} if self._zygote else set()

    def descriptors(self) -> set[int]:
        """Readable when something is to be handled."""
        found = set()
        if self._told is not None:
            found.add(self._told[0])
        if self._zygote is not None:
            found |= self._zygote.descriptors()
        return found

    def handle(self, timeout_s: float = 0.0) -> None:
        """Takes note of a zygote that ended, or that is ready now; waits so long for one that is not ready yet.

        Raises:
            ConfigError: a rank starts again by exec, and the user insists on a warm start.
        """
        self._hear_ranks()
        current = self._zygote
        if current is None:
            return
        if current.ended():
            self._lose(current, "it ended")
        elif not current.ready:
            try:
                if current.await_ready(timeout_s) and self._respawns:
                    logger.info("The zygote is there again: ranks start warm.")
            except ZygoteLost as lost:
                self._lose(current, str(lost))
            except (ZygoteUnfit, zygote.PreloadError) as unfit:
                self._why_not = str(unfit)
                self._zygote = None
                current.bury()

    def close(self) -> None:
        """Ends the zygote; ranks that run go on."""
        self._restore()
        current, self._zygote = self._zygote, None
        self._why_not = self._why_not or "the launcher is ending"
        if current is not None:
            current.bury()
        for descriptor in self._told or ():
            os.close(descriptor)
        self._told = None

    # Losing one.

    def _lose(self, lost: ZygoteProcess, why: str) -> None:
        """Buries a zygote, and starts another in the background unless several were lost in a row."""
        self._zygote = None
        code = lost.bury()
        how = why
        if why == "it ended":
            how = f"it ended (signal {-code})" if code < 0 else f"it ended (code {code})"
        if self._respawns >= _RESPAWNS:
            self._why_not = f"{_RESPAWNS + 1} zygotes were lost in a row; the last: {how}"
            logger.warning("No more zygotes: %s. Ranks start by exec.", self._why_not)
            return
        self._respawns += 1
        logger.warning("The zygote was lost: %s. Another is started; ranks start by exec until it is ready.", how)
        self._respawn()

    def _respawn(self) -> None:
        path = self._path if self._apart else None
        try:
            self._zygote = ZygoteProcess.spawn(self._tag, path)
            self._zygote.prepare(self._tag, self._settings.preload)
        except ZygoteLost:
            pass  # `handle` takes note of its end
        except OSError as error:
            self._why_not = f"no zygote can be started ({error})"
            logger.warning("No zygote can be started (%s): ranks start by exec.", error)

    # What ranks find out.

    def _way_to_tell(self) -> int:
        if self._told is None:
            self._told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return self._told[1]

    def _hear_ranks(self) -> None:
        """From the first rank on that was no fresh interpreter to its script, all are started by exec."""
        if self._told is None:
            return
        try:
            lines = os.read(self._told[0], 1 << 16).decode(errors="replace").splitlines()
        except BlockingIOError:
            return
        if not lines or self._why_not:
            return
        self._why_not = self._said = lines[0]
        if self._settings.warm_start == "on":
            raise self._refused()
        logger.info("Ranks start by exec from now on: %s.", lines[0])
        current, self._zygote = self._zygote, None
        if current is not None:
            current.bury()

    # Asking one.

    def _against(self, orders: Sequence[RankOrder], numa: bool) -> str:
        if numa:
            return "numactl binds the ranks to processors"
        current = self._await_zygote()
        if current is None:
            return self._why_not or "the zygote was lost, and another is not ready yet"
        if is_stopped(current.pid):
            self._lose(current, "it was stopped")
            return "the zygote was stopped"
        if why := self._against_loaded():
            return why
        for order in orders:
            if why := warm_start.against_environment(order.environ, current.environ):
                return why
        return ""

    def _await_zygote(self) -> ZygoteProcess | None:
        """The zygote, once it is ready; waits for that only if the user insists, or for the first ranks."""
        self.handle()
        insists, self._first = self._settings.warm_start == "on" or self._first, False
        deadline = time.monotonic() + _READY_S
        while insists and self._zygote and not self._zygote.ready:
            if (left := deadline - time.monotonic()) <= 0:
                break
            self.handle(left)
        return self._zygote if self._zygote and self._zygote.ready else None


def _not_preloaded(module: str, problem: str) -> ConfigError:
    hint = "Name installed modules; files beside the script are not preloaded"
    return ConfigError("preload", module, "--ft-preload", problem, hint)
