"""A node's folder for one rank, and a training that uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ft_client.memory.background_work import BACKGROUND
from rank_monitor.contract import env
from rank_monitor.contract.memory_files import MemoryFiles
from rank_monitor.contract.wire.json_record import write_record

Tell = Callable[..., Path]


class Loader:
    """What a user's own object may have as its state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Makes a folder and says so in the environment, as the launcher does. Takes fields of `MemoryFiles`."""
    folder = tmp_path / "ft_memory_test"

    def told(keep: int = 2, limit: int = 1 << 30, interval: int = 1, refused: str = "") -> Path:
        folder.mkdir(mode=0o700, exist_ok=True)
        name = "" if refused else str(folder)
        monkeypatch.setenv(env.MEMORY_FILES, write_record(MemoryFiles(name, keep, limit, interval, refused)))
        return folder

    for name in ("WORLD_SIZE", env.RANK_MONITOR_SOCKET):
        monkeypatch.delenv(name, raising=False)
    return told


@pytest.fixture(autouse=True)
def no_work_is_left() -> None:
    """What the test before has started in the background has ended."""
    BACKGROUND.wait()
    BACKGROUND.pop_problem()
