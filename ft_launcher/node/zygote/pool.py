"""The zygote of this node: made where ranks may be forks, replaced when it is lost or has learned modules.

A zygote is a process that has imported torch. A rank that is a fork of it starts in milliseconds; a rank that is a new
interpreter (started by exec) imports torch for seconds. Whether the difference is visible to the script decides
everything here: where it might be, ranks start by exec, and the log says why.

    none -> preparing           the zygote imports torch and the preloaded modules
    preparing -> ready          ranks are forks of it
    preparing -> refused        a module cannot be imported, or the process is unfit: ranks start by exec for good
    ready -> ready              replaced by the next zygote, which has imported more modules (`next_zygote.py`)
    any -> lost -> preparing    it died or was stopped: another one is started, `_RESPAWNS` times in a row at most

Made by `cli.py` before torch is imported, and by `python_api.py`; asked by `node/ranks/` in each cycle. All methods are
called on the main thread of the launcher, or on that of `launch()`. No restart waits for a zygote: while there is none,
ranks start by exec. With `--ft-warm-start on` the launcher ends instead.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence

from ft_launcher.node.zygote import fork_server
from ft_launcher.node.zygote.client import NoRanks, RankOrder, ZygoteLost, ZygoteProcess, ZygoteUnfit
from ft_launcher.node.zygote.forked_rank import ForkedRank
from ft_launcher.node.zygote.next_zygote import Learned, NextZygote
from ft_launcher.settings import warm_start
from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.errors import ConfigError, FtError
from rank_monitor.contract.processes.proc import is_stopped
from rank_monitor.contract.settings.config import StartSettings

logger = logging.getLogger(__name__)

_READY_S = 300.0
"""Seconds that the first ranks wait for all imports of the zygote before they start by exec. They would need as long
for the same imports themselves."""
_RESPAWNS = 3
"""Zygotes that are started after losses in a row. One that dies at each start, for example for lack of memory, would be
started without end."""
_SLOW_PRELOAD_S = 10.0
"""Seconds from which on a line says how long `--ft-preload` took, as the documentation of the option promises."""


class NoWarmStart(FtError):
    """The user requires a warm start (`--ft-warm-start=on`), and ranks cannot be forks. Ends the launcher."""


class ZygotePool:
    """The zygote of this node, or the reason why there is none.

    In the launcher: create the object before torch is imported, call `begin` before anything else is imported or starts
    a thread, then `prepare` once the options are known. In a user's program: create it, then call `prepare_apart`.

    Args:
        apart: whether this process is a user's program, which is neither forked nor changed.

    Attributes:
        held: the descriptors that this process had open when the object was made. Ranks that are forks of this process
            keep these, and close all others.
    """

    def __init__(self, apart: bool = False) -> None:
        self._zygote: ZygoteProcess | None = None
        self._settings = StartSettings()
        self._tag = ""
        self._reason_against = "no warm start was prepared"
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

    def begin(self, reason_against: str) -> ForkedRank | None:
        """Imports torch and forks the zygote, before the launcher's own modules are loaded: ranks then have none of
        them.

        Args:
            reason_against: the reason why there is to be no zygote; empty: there may be one.

        Returns:
            In the launcher: None. In each rank that the zygote forks later: that rank, which the caller runs.
        """
        self._reason_against = reason_against
        if not reason_against:
            fork_server.load_torch()
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    # A fork copies what is buffered, and each rank would print it again.
                    stream.flush()
            gc.freeze()
            try:
                made = ZygoteProcess.fork(self._path, self.held)
            except OSError as error:
                self._reason_against = f"no zygote can be forked ({error.strerror})"
                return None
            if isinstance(made, ForkedRank):
                return made
            self._zygote = made
            # Counted after the fork: libraries with a handler for forks (OpenBLAS) have ended their threads for it.
            self._reason_against = warm_start.against_process(fork_server.threads_here(), cuda=False, device_files=())
        return None

    def prepare(self, arguments: Sequence[str], settings: StartSettings, source: str, tag: str) -> None:
        """Has the zygote import the user's preloaded modules, and ends the zygote where ranks cannot be forks.

        Waits for these modules, so that an error in the user's list is an error at the start of the job.

        Args:
            arguments: `[-m] SCRIPT ARGS` of the user; empty when Python does not run them.
            settings: of this launcher.
            source: where the setting `warm_start` came from, for an error's text.
            tag: the job's tag.

        Raises:
            ConfigError: a module to preload cannot be imported, or a required warm start is impossible.
        """
        self._settings, self._tag = settings, tag
        self._next.wanted = settings.learns_modules
        try:
            self._reason_against = self._against_command(arguments) or self._reason_against or self._preload()
        finally:
            gc.freeze()
            self._restore()
        if self._reason_against and self._zygote is not None:
            self._zygote.reap()
            self._zygote = None
        self._insist(source)

    def _preload(self) -> str:
        """Has the zygote import the preloaded modules, and waits for them.

        Returns:
            Why the zygote cannot be used; empty: it can.

        Raises:
            ConfigError: a module cannot be imported, or the zygote died while it imported the modules.
        """
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
            arguments: `[-m] SCRIPT ARGS`; empty when Python does not run them. Not used for a function.
            function: whether the ranks call a function.
            settings: of this launcher.
            tag: the job's tag.

        Raises:
            ConfigError: a required warm start is impossible.
        """
        self._settings, self._tag = settings, tag
        self._next.wanted = settings.learns_modules
        self._reason_against = self._against_command(arguments, function)
        if not self._reason_against:
            self._first = True
            self._respawn()
        self._insist("settings")

    def _against_command(self, arguments: Sequence[str], function: bool = False) -> str:
        """Returns why ranks of this command cannot be forks; empty: they can, by the present state of their script."""
        if self._settings.warm_start == "off":
            return "--ft-warm-start=off"
        reason = warm_start.against_command(arguments, os.environ, sys.orig_argv)
        if reason or function:
            return reason
        self._arguments = arguments
        return ""

    def _against_loaded(self, zygote: ZygoteProcess | None) -> str:
        """Returns why the script cannot run with a zygote's modules loaded; empty: it can, or it is a function."""
        if not self._arguments or zygote is None:
            return ""
        return warm_start.against_folder(self._arguments, zygote.loaded)

    def _insist(self, source: str) -> None:
        """Raises ConfigError where the user requires a warm start and there is a reason against it."""
        self._source = source
        if self._reason_against and self._settings.warm_start == "on":
            raise self._refused()

    def _refused(self) -> ConfigError:
        """Returns the error of a required warm start that is impossible."""
        return ConfigError("warm_start", "on", self._source, self._reason_against, "Use auto: ranks start by exec then")

    def _restore(self) -> None:
        """Undoes what was changed in this process for the import: `sys.path` and garbage collection."""
        if not self._apart:
            gc.enable()
        if self._first_path is not None:
            sys.path.insert(0, self._first_path)
            self._first_path = None

    def start_ranks(self, orders: Sequence[RankOrder], numa: bool) -> list[int] | None:
        """Starts ranks as forks; returns their pids, which are children of this process.

        Waits for the zygote's imports only for the first ranks of the job, or if a warm start is required.

        Args:
            orders: one for each rank.
            numa: whether ranks are bound to processors by numactl, which is a program around an interpreter.

        Returns:
            None: the caller must start the ranks by exec. The log says why.

        Raises:
            NoWarmStart: the ranks would have to start by exec, and the user requires a warm start.
        """
        reason = self._reason_against or self._against(orders, numa)
        if not reason and self._zygote is not None:
            try:
                pids = self._zygote.start_ranks(orders, self._report_to(), reports_modules=self._next.wanted)
                self._have_learned = bool(self._zygote.learned)
                self._next.note_ranks(orders, self._zygote.environ)
                # A zygote that has forked ranks works: losses before it no longer count.
                self._respawns, self._logged = 0, ""
                return pids
            except ZygoteLost as lost:
                self._lose(self._zygote, str(lost))
                reason = "the zygote was lost while it was asked for ranks"
            except NoRanks as refusal:
                reason = str(refusal)
        if self._settings.warm_start == "on":
            raise NoWarmStart(f"no warm start: {reason}. --ft-warm-start=auto starts the ranks by exec instead")
        # Each cycle asks again; the same reason is logged once.
        if reason != self._logged:
            self._logged = reason
            logger.info("Ranks start by exec: %s.", reason)
        return None

    def pids(self) -> set[int]:
        """Returns the pids of the zygote and of the next one, while there are such processes."""
        return {one.pid for one in (self._zygote, self._next.process) if one is not None}

    def descriptors(self) -> set[int]:
        """Returns descriptors of which one is readable when `handle` has something to do: a rank has reported that it
        starts again, or a zygote has ended or answered."""
        found = set()
        if self._reports is not None:
            found.add(self._reports[0])
        for one in (self._zygote, self._next.process):
            if one is not None:
                found |= one.descriptors()
        return found

    def handle(self, timeout_s: float = 0.0) -> None:
        """Handles what has happened since the last call: reports of ranks, a zygote that has ended or become ready.

        Args:
            timeout_s: how long to wait for a zygote that is not ready (seconds). By default nothing is waited for.

        Raises:
            ConfigError: a rank starts again by exec, and the user requires a warm start.
        """
        self._read_reports()
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
                self._reason_against = str(unfit)
                self._zygote = None
                current.reap()

    def close(self) -> None:
        """Ends the zygotes, for good. Running ranks go on."""
        self._restore()
        self._reason_against = self._reason_against or "the launcher is ending"
        self._end_all()
        for descriptor in self._reports or ():
            os.close(descriptor)
        self._reports = None

    def _end_all(self) -> None:
        """Ends the zygote and the next one, and takes their exit codes."""
        if self._zygote is not None:
            self._zygote.reap()
            self._zygote = None
        self._next.close()

    # Learning.

    def learn(self, names: Sequence[str], changed: Mapping[str, str | None]) -> None:
        """Has the zygote fork the next zygote, which imports these modules. Does not wait for it. Once in a job.

        Called when the first rank has reported what its program imported.

        Args:
            names: the modules that the rank has imported.
            changed: variables of the environment that have changed in the rank -> their values (None: removed).
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
        """Replaces the present zygote by the next one when that is ready, and if the script can run with its
        modules."""
        following = self._next.pop_if_ready()
        if following is None:
            return
        reason = self._against_loaded(following)
        if reason:
            self._next.refuse(following, reason)
            return
        before, self._zygote = self._zygote, following
        self._next.note_taken(following)
        if before is not None:
            before.reap()

    # Losing one.

    def _lose(self, lost: ZygoteProcess, reason: str) -> None:
        """Ends a zygote, and starts another one in the background unless several were lost in a row.

        Args:
            lost: the zygote, which has ended, gives no answer or must not be used any more.
            reason: why, for the log.
        """
        self._zygote = None
        code = lost.reap()
        if reason == "it ended":
            reason = f"it ended ({_how_ended(code)})"
        if self._respawns >= _RESPAWNS:
            self._reason_against = f"{_RESPAWNS + 1} zygotes were lost in a row; the last: {reason}"
            logger.warning("No more zygotes: %s. Ranks start by exec.", self._reason_against)
            return
        self._respawns += 1
        logger.warning("The zygote was lost: %s. Another is started; ranks start by exec until it is ready.", reason)
        self._respawn()

    def _respawn(self) -> None:
        """Starts a zygote as a program; the launcher's own modules are loaded by now, so it cannot be forked again."""
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
            self._reason_against = f"no zygote can be started ({error})"
            logger.warning("No zygote can be started (%s): ranks start by exec.", error)

    # What ranks find out.

    def _report_to(self) -> int:
        """Returns the descriptor to which ranks report that they start again by exec."""
        if self._reports is None:
            self._reports = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return self._reports[1]

    def _read_reports(self) -> None:
        """Reads the reports of ranks that had to start again by exec: after the first one, all ranks start by exec.

        Such a rank was forked, and its script then changed something that its import of torch reads
        (`start_again.py`). The next rank of the same script would do so too.
        """
        if self._reports is None:
            return
        try:
            # One line is enough to decide; the rest of them says the same.
            lines = os.read(self._reports[0], 1 << 16).decode(errors="replace").splitlines()
        except BlockingIOError:
            return
        if not lines or self._reason_against:
            return
        if self._have_learned:
            # It may be for a module that was learned: without these the ranks of the first cycle were forks.
            if self._zygote is not None and self._zygote.learned:
                self._lose(self._zygote, f"it has modules that are not what a rank needs: {lines[0]}")
            return
        self._reason_against = self._logged = lines[0]
        if self._settings.warm_start == "on":
            raise self._refused()
        logger.info("Ranks start by exec from now on: %s.", lines[0])
        self._end_all()

    # Asking one.

    def _against(self, orders: Sequence[RankOrder], numa: bool) -> str:
        """Returns why these ranks cannot be forks of the present zygote; empty: they can.

        Waits until the zygote is ready, for `_READY_S` at most, only for the first ranks of the job, or if a warm start
        is required.
        """
        if numa:
            return "numactl binds the ranks to processors"
        self.handle()
        insists, self._first = self._settings.warm_start == "on" or self._first, False
        deadline = time.monotonic() + _READY_S
        while insists and self._zygote and not self._zygote.ready:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self.handle(left)
        current = self._zygote
        if current is None or not current.ready:
            return self._reason_against or "the zygote was lost, and another is not ready yet"
        # A stopped zygote gives no answer, and each restart would wait for the limit of `client.py`.
        if is_stopped(current.pid):
            self._lose(current, "it was stopped")
            return "the zygote was stopped"
        reason = self._against_loaded(current)
        if reason:
            return reason
        for order in orders:
            reason = warm_start.against_environment(order.environ, current.environ)
            if reason:
                return reason
        return ""


def _how_ended(code: int) -> str:
    """Returns an exit code in words."""
    if code < 0:
        return f"signal {-code}"
    return f"code {code}"


def _not_preloaded(module: str, problem: str) -> ConfigError:
    """Returns the error of a module of `--ft-preload` that cannot be imported."""
    hint = "Name installed modules; files beside the script are not preloaded"
    return ConfigError("preload", module, "--ft-preload", problem, hint)
