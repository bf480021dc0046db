"""Where a run's files lie: `<log_dir>/<run_id>-<start>/cycle_N/<local_rank>/`, and torch's `LogsSpecs` over that.

Without a log folder nothing is made until there is something to keep. Files of earlier cycles are never touched.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std

from rank_monitor.contract.errors import ConfigError

StdMap: TypeAlias = Std | Mapping[int, Std]
DEFAULT_LOG_DIR = "ft_logs"
_CONSOLE = ""


class RunFolder:
    """The folder of one run of the launcher; `path` is where it is or will be."""

    def __init__(self, log_dir: str | None, run_id: str) -> None:
        self.asked_for = log_dir is not None
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', run_id) or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.path = Path(log_dir if log_dir is not None else DEFAULT_LOG_DIR).absolute() / name
        self.exists = False
        if self.asked_for:
            self.make()

    def make(self) -> Path:
        """Makes the folder.

        Raises:
            ConfigError: it cannot be made.
        """
        if not self.exists:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                hint = "Name a folder that can be written"
                raise ConfigError("log_dir", str(self.path.parent), "--log-dir", str(error.strerror), hint) from None
            self.exists = True
        return self.path

    def of_rank(self, cycle: int, local_rank: int) -> Path:
        """The folder of a rank in a cycle, made when needed."""
        folder = self.make() / f"cycle_{cycle}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class CycleLogs(LogsSpecs):  # type: ignore[misc]
    """torch's log destinations, per cycle. Error files lie in the runtime folder while no log folder is asked for."""

    def __init__(
        self, run: RunFolder, runtime: Path, redirects: StdMap, tee: StdMap, local_ranks_filter: set[int] | None
    ) -> None:
        super().__init__(str(run.path), redirects, tee, local_ranks_filter)
        self._run = run
        self._runtime = runtime

    @property
    def root_log_dir(self) -> str:
        """Where the run's folders are made."""
        return str(self._run.path.parent)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """torch asks for the destinations of a cycle; sets TORCHELASTIC_ERROR_FILE of each rank."""
        dest = LogsDest()
        cycle = int(next(iter(envs.values())).get("TORCHELASTIC_RESTART_COUNT", "0"))
        folder = self._folder(cycle)
        for local_rank, rank_env in envs.items():
            self._reify_rank(dest, folder / str(local_rank), local_rank, rank_env)
        dest.filtered_stdout = str(folder / "filtered_stdout.log")
        dest.filtered_stderr = str(folder / "filtered_stderr.log")
        return dest

    def _folder(self, cycle: int) -> Path:
        stds = (self._redirects, self._tee)
        to_files = any(any(std.values()) if isinstance(std, Mapping) else std for std in stds)
        parent = self._run.make() if to_files or self._run.asked_for else self._runtime
        return parent / f"cycle_{cycle}"

    def _reify_rank(self, dest: LogsDest, folder: Path, local_rank: int, rank_env: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tee = _of(self._tee, local_rank)
        to_file = _of(self._redirects, local_rank) | tee
        shown = not self._local_ranks_filter or local_rank in self._local_ranks_filter
        for std, files, tees, name in (
            (Std.OUT, dest.stdouts, dest.tee_stdouts, "stdout.log"),
            (Std.ERR, dest.stderrs, dest.tee_stderrs, "stderr.log"),
        ):
            files[local_rank] = str(folder / name) if to_file & std else (_CONSOLE if shown else os.devnull)
            if tee & std and shown:
                tees[local_rank] = files[local_rank]
        dest.error_files[local_rank] = rank_env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")


def _of(stds: StdMap, local_rank: int) -> Std:
    return stds.get(local_rank, Std.NONE) if isinstance(stds, Mapping) else stds
