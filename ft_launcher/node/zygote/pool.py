"""Holds the zygote of this node: makes it where ranks may be forks of it, replaces it when it is lost, and logs why
ranks are started as new interpreters (by exec) instead.

Made by `cli.py` before torch is imported, and by `python_api.py`; asked by `node/ranks/` for each cycle. No restart
waits for a zygote: while there is none, ranks are started by exec, or, with `--ft-warm-start on`, the launcher ends.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence

from ft_launcher.node.processes.process_tree import is_stopped
from ft_launcher.node.zygote import fork_server
from ft_launcher.node.zygote.client import NoRanks, RankOrder, ZygoteLost, ZygoteProcess, ZygoteUnfit
from ft_launcher.node.zygote.forked_rank import ForkedRank
from ft_launcher.node.zygote.next_zygote import Learned, NextZygote
from ft_launcher.settings import warm_start
from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.errors import ConfigError, FtError
from rank_monitor.contract.settings.config import StartSettings

logger = logging.getLogger(__name__)

# Seconds that the first ranks wait for all imports of the zygote before they start by exec.
_READY_S = 300.0
# A zygote that dies at each start, for lack of memory for example, would be started without end.
_RESPAWNS = 3
# Seconds; the documentation of --ft-preload promises the line from here on.
_SLOW_PRELOAD_S = 10.0


class NoWarmStart(FtError):
    """The user requires a warm start (`--ft-warm-start=on`), and ranks cannot be forks."""


class ZygotePool:
    """The zygote of this node, or why there is none.

    Create it before torch is imported; call `begin` before anything else is imported or starts a thread, then
    `prepare`.

    Args:
        apart: this process is a user's program: it is neither forked nor changed; see `prepare_apart`.
    """

    def __init__(self, apart: bool = False) -> None:
        self._zygote: ZygoteProcess | None = None
        self._settings = StartSettings()
        self._tag = ""
        self._why_not = "no warm start was prepared"
        self._logged = ""
        self._arguments: Sequence[str] = ()
        """Of the script; empty for a function."""
        self._respawns = 0
        self._next = NextZygote()
        self._have_learned = False
        """Whether the ranks that were started last have learned modules."""
        self._apart, self._first = apart, False
        self._reports: tuple[int, int] | None = None
        self._source = ""
        self.held = fork_server.open_descriptors()
        self._first_path: str | None = None
        if not apart and not fork_server.is_safe_path():
            # The folder that Python put first: torch and its imports must not come from there.
            self._first_path = sys.path.pop(0)
        self._path = list(sys.path)
        if not apart:
            # A collection writes to the header of every object, and so to the pages that forks are to share.
            gc.disable()

    def begin(self, why_not: str) -> ForkedRank | None:
        """Imports torch and forks the zygote before the launcher's own modules are loaded: ranks then have none.

        Args:
            why_not: why there is to be no zygote; empty when there may be one.

        Returns:
            In each rank of the zygote: that rank. In the launcher: None.
        """
        self._why_not = why_not
        if not why_not:
            fork_server.load_torch()
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    # A fork copies what is buffered, and each rank would print it again.
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
            self._why_not = warm_start.against_process(fork_server.threads_here(), cuda=False, device_files=())
        return None

    def prepare(self, arguments: Sequence[str], settings: StartSettings, source: str, tag: str) -> None:
        """Has the zygote import the user's preloaded modules; ends it where ranks cannot be forks.

        Args:
            arguments: `[-m] SCRIPT ARGS` of the user; empty when Python does not run them.
            source: where the setting `warm_start` came from.
            tag: the job's mark.

        Raises:
            ConfigError: a module to preload cannot be imported, or a required warm start is impossible.
        """
        self._settings, self._tag = settings, tag
        self._next.wanted = settings.learns_modules
        try:
            self._why_not = self._against_command(arguments) or self._why_not or self._preload()
        finally:
            gc.freeze()
            self._restore()
        if self._why_not and self._zygote is not None:
            self._zygote.reap()
            self._zygote = None
        self._insist(source)

    def _preload(self) -> str:
        """Has the zygote import the preloaded modules and waits for them; returns why it cannot be used, or empty."""
        modules = self._settings.preloaded
        self._first = True
        if self._zygote is None:
            return "no zygote was forked"
        began = time.monotonic()
        try:
            self._zygote.prepare(self._tag, modules)
            if modules or self._settings.warm_start == "on":
                self._zygote.await_ready(None)
        except fork_server.PreloadError as error:
            raise _not_preloaded(error.module, error.problem) from None
        except ZygoteUnfit as unfit:
            return str(unfit)
        except ZygoteLost as lost:
            if modules:
                problem = f"the process that imported it ended ({_how_ended(self._zygote.reap())})"
                self._zygote = None
                raise _not_preloaded(",".join(modules), problem) from None
            return f"the zygote was lost: {lost}"
        took_s = time.monotonic() - began
        if modules and took_s > _SLOW_PRELOAD_S:
            text = f"--ft-preload {','.join(modules)} took {took_s:.0f} s"
            print(console_line(text, time.time()), file=sys.stderr)
        return self._against_loaded(self._zygote)

    def prepare_apart(self, arguments: Sequence[str], function: bool, settings: StartSettings, tag: str) -> None:
        """Starts a zygote as a program of its own if ranks may be forks. Returns at once; the first ranks wait for it.

        Args:
            arguments: `[-m] SCRIPT ARGS`; empty when Python does not run them. Of a `function` any.

        Raises:
            ConfigError: a required warm start is impossible.
        """
        self._settings, self._tag = settings, tag
        self._next.wanted = settings.learns_modules
        self._why_not = self._against_command(arguments, function)
        if not self._why_not:
            self._first = True
            self._respawn()
        self._insist("settings")

    def _against_command(self, arguments: Sequence[str], function: bool = False) -> str:
        """Returns why ranks of this command cannot be forks; empty: they can, by the present state of their script."""
        if self._settings.warm_start == "off":
            return "--ft-warm-start=off"
        why = warm_start.against_command(arguments, os.environ, sys.orig_argv)
        if why or function:
            return why
        self._arguments = arguments
        return ""

    def _against_loaded(self, zygote: ZygoteProcess | None) -> str:
        """Returns why the script cannot run with a zygote's modules loaded; empty: it can, or it is a function."""
        if not self._arguments or zygote is None:
            return ""
        return warm_start.against_folder(self._arguments, zygote.loaded)

    def _insist(self, source: str) -> None:
        self._source = source
        if self._why_not and self._settings.warm_start == "on":
            raise self._refused()

    def _refused(self) -> ConfigError:
        return ConfigError("warm_start", "on", self._source, self._why_not, "Use auto: ranks start by exec then")

    def _restore(self) -> None:
        """Undoes what was changed in this process for the import: `sys.path` and garbage collection."""
        if not self._apart:
            gc.enable()
        if self._first_path is not None:
            sys.path.insert(0, self._first_path)
            self._first_path = None

    def start_ranks(self, orders: Sequence[RankOrder], numa: bool) -> list[int] | None:
        """Starts ranks; returns their pids, children of this process. None: they must start by exec; the log says why.

        Args:
            numa: whether ranks are bound to processors by numactl.

        Raises:
            NoWarmStart: they would have to, and the user requires a warm start.
        """
        why = self._why_not or self._against(orders, numa)
        if not why and self._zygote is not None:
            try:
                orders = self._next.ask(orders)
                pids = self._zygote.start_ranks(orders, self._report_to())
                self._have_learned = bool(self._zygote.learned)
                self._next.note_ranks(orders, self._zygote.environ)
                # A zygote that has forked ranks works: losses before it no longer count.
                self._respawns, self._logged = 0, ""
                return pids
            except ZygoteLost as lost:
                self._lose(self._zygote, str(lost))
                why = "the zygote was lost while it was asked for ranks"
            except NoRanks as refusal:
                why = str(refusal)
        if self._settings.warm_start == "on":
            raise NoWarmStart(f"no warm start: {why}. --ft-warm-start=auto starts the ranks by exec instead")
        # Each cycle asks again; the same reason is logged once.
        if why != self._logged:
            self._logged = why
            logger.info("Ranks start by exec: %s.", why)
        return None

    def pids(self) -> set[int]:
        """Those of the zygote and of the next one, while there are some."""
        return {one.pid for one in (self._zygote, self._next.process) if one is not None}

    def descriptors(self) -> set[int]:
        """Readable when `handle` has something to do."""
        found = set()
        if self._reports is not None:
            found.add(self._reports[0])
        for one in (self._zygote, self._next.process):
            if one is not None:
                found |= one.descriptors()
        return found

    def handle(self, timeout_s: float = 0.0) -> None:
        """Handles a zygote that ended or became ready, and lines of ranks; waits `timeout_s` for one that is not ready.

        Raises:
            ConfigError: a rank starts again by exec, and the user requires a warm start.
        """
        self._hear_ranks()
        self._replace_if_ready()
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
            except (ZygoteUnfit, fork_server.PreloadError) as unfit:
                self._why_not = str(unfit)
                self._zygote = None
                current.reap()

    def close(self) -> None:
        """Ends the zygote; ranks that run go on."""
        self._restore()
        self._why_not = self._why_not or "the launcher is ending"
        self._end_all()
        for descriptor in self._reports or ():
            os.close(descriptor)
        self._reports = None

    def _end_all(self) -> None:
        if self._zygote is not None:
            self._zygote.reap()
            self._zygote = None
        self._next.close()

    # Learning.

    def learn(self, names: Sequence[str], changed: Mapping[str, str | None]) -> None:
        """Has the zygote prepare another one that has imported these modules, once. Does not wait for that.

        Args:
            names: what a rank has imported.
            changed: variables that have changed in it, with their values (None: removed).
        """
        if self._zygote is None or not self._zygote.ready or not self._next.wanted:
            return
        try:
            self._next.begin(self._zygote, names, changed)
        except ZygoteLost as lost:
            self._lose(self._zygote, str(lost))

    def pop_learned(self) -> Learned | None:
        """Returns what the next ranks find imported, once."""
        return self._next.pop_learned()

    def _replace_if_ready(self) -> None:
        """Puts the next zygote in the place of the present one when it is ready."""
        following = self._next.take_if_ready()
        if following is None:
            return
        why = self._against_loaded(following)
        if why:
            self._next.refuse(following, why)
            return
        before, self._zygote = self._zygote, following
        self._next.note_taken(following)
        if before is not None:
            before.reap()

    # Losing one.

    def _lose(self, lost: ZygoteProcess, why: str) -> None:
        """Ends a zygote and starts another in the background, unless several were lost in a row."""
        self._zygote = None
        reason, code = why, lost.reap()
        if why == "it ended":
            reason = f"it ended ({_how_ended(code)})"
        if self._respawns >= _RESPAWNS:
            self._why_not = f"{_RESPAWNS + 1} zygotes were lost in a row; the last: {reason}"
            logger.warning("No more zygotes: %s. Ranks start by exec.", self._why_not)
            return
        self._respawns += 1
        logger.warning("The zygote was lost: %s. Another is started; ranks start by exec until it is ready.", reason)
        self._respawn()

    def _respawn(self) -> None:
        if self._apart:
            path = self._path
        else:
            path = None
        try:
            self._zygote = ZygoteProcess.spawn(self._tag, path)
            self._zygote.prepare(self._tag, self._settings.preloaded)
        except ZygoteLost:
            pass  # `handle` takes note of its end
        except OSError as error:
            self._why_not = f"no zygote can be started ({error})"
            logger.warning("No zygote can be started (%s): ranks start by exec.", error)

    # What ranks find out.

    def _report_to(self) -> int:
        if self._reports is None:
            self._reports = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return self._reports[1]

    def _hear_ranks(self) -> None:
        """Takes the ranks' lines: after the first rank that had to start again by exec, all ranks start by exec."""
        if self._reports is None:
            return
        try:
            # One line is enough to decide; the rest of them says the same.
            lines = os.read(self._reports[0], 1 << 16).decode(errors="replace").splitlines()
        except BlockingIOError:
            return
        if not lines or self._why_not:
            return
        if self._have_learned:
            # It may be for a module that was learned: without these the ranks of the first cycle were forks.
            if self._zygote is not None and self._zygote.learned:
                self._lose(self._zygote, f"it has modules that are not what a rank needs: {lines[0]}")
            return
        self._why_not = self._logged = lines[0]
        if self._settings.warm_start == "on":
            raise self._refused()
        logger.info("Ranks start by exec from now on: %s.", lines[0])
        self._end_all()

    # Asking one.

    def _against(self, orders: Sequence[RankOrder], numa: bool) -> str:
        if numa:
            return "numactl binds the ranks to processors"
        current = self._await_zygote()
        if current is None:
            return self._why_not or "the zygote was lost, and another is not ready yet"
        # It would not answer, and each restart would wait for `client.py`'s limit.
        if is_stopped(current.pid):
            self._lose(current, "it was stopped")
            return "the zygote was stopped"
        why = self._against_loaded(self._zygote)
        if why:
            return why
        for order in orders:
            why = warm_start.against_environment(order.environ, current.environ)
            if why:
                return why
        return ""

    def _await_zygote(self) -> ZygoteProcess | None:
        """Returns the zygote if it is ready; waits for it only for the first ranks, or if a warm start is required."""
        self.handle()
        insists, self._first = self._settings.warm_start == "on" or self._first, False
        deadline = time.monotonic() + _READY_S
        while insists and self._zygote and not self._zygote.ready:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self.handle(left)
        if self._zygote and self._zygote.ready:
            return self._zygote
        return None


def _how_ended(code: int) -> str:
    if code < 0:
        return f"signal {-code}"
    return f"code {code}"


def _not_preloaded(module: str, problem: str) -> ConfigError:
    hint = "Name installed modules; files beside the script are not preloaded"
    return ConfigError("preload", module, "--ft-preload", problem, hint)
