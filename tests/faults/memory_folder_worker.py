"""What the ranks of `test_memory_folder.py` run: each makes its file of a step, says what it found, and waits.

The script's argument is the test's folder. A file `step` in it has the step that the ranks save; without it they save
nothing; a file `bytes` has the size of a rank's file. A file `go` ends the wait.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rank_monitor.contract import env
from rank_monitor.contract.memory_files import MemoryFiles, StateFile
from rank_monitor.contract.wire.json_record import read_record

folder = Path(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
told = None
names: list[str] = []
if env.MEMORY_FILES in os.environ:
    told = read_record(MemoryFiles, os.environ[env.MEMORY_FILES])
    if told.folder:
        names = sorted(path.name for path in Path(told.folder).iterdir() if path.name.startswith("step"))
        if (folder / "step").exists():
            step = int((folder / "step").read_text())
            file = Path(told.folder, StateFile(step, rank, world, world, "0a1b2c3d").name)
            size = 1 << 16
            if (folder / "bytes").exists():
                size = int((folder / "bytes").read_text())
            file.write_bytes(bytes(size))
found = {
    "folder": told.folder if told else None,
    "refused": told.refused if told else None,
    "names": names,
    "pid": os.getpid(),
}
(folder / f".{rank}").write_text(json.dumps(found))
(folder / f".{rank}").rename(folder / f"found-{rank}")
while not (folder / "go").exists():
    time.sleep(0.01)
sys.exit(int((folder / "go").read_text() or 0))
