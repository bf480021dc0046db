"""Where the parts of this rank lie, what is there, and how much room is left. Asks no other rank.

Under the launcher this is a folder in the launcher's own, in memory: it outlives the ranks, and the launcher removes it
at the job's end. Where the launcher has none, and without the launcher, it is the folder that the user's program names,
as with the peer's package. Nobody removes that.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import zlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ft_client.integrations.local_checkpoints import part_files, part_format
from ft_client.integrations.local_checkpoints.agreement import Save, SeenSaves
from ft_client.integrations.local_checkpoints.part_format import SavedPart
from ft_client.memory import progress, step_folders
from ft_client.memory.load_report import line_of_step
from ft_client.memory.node_folder import claim, names_in, node_of, read_settings_in_group, say, why_not
from ft_client.memory.progress import StepNotes
from ft_client.memory.room import Room
from ft_client.memory.step_folders import remove_set_aside, size_of
from ft_client.memory.to_launcher import tell
from ft_client.rank.agreement import group
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import MemoryFiles, PartsMark, StateTier
from rank_monitor.contract.memory_room import MemoryRoom
from rank_monitor.contract.processes import tmpfs
from rank_monitor.contract.processes.cgroup import memory_room
from rank_monitor.contract.wire.messages import StateLoaded

SHARED_MEMORY = "/dev/shm"
"""Where torch puts tensors that it sends to another process."""
_FOREIGN = "layer_wise_optimizer_"
"""So begin the names of files that Megatron Bridge writes beside the parts."""


class PartsFolder:
    """The folder of this rank's parts. Must be made after `init_process_group`.

    Args:
        root: the folder that the user's program names.
        session: tells the checkpoints of one program from others in that folder.

    Raises:
        RuntimeError: the job has several ranks and no process group yet.

    Attributes:
        path: the folder of this rank. It may not be there yet.
        claim_refused: why this rank can keep no part; empty: it can, as far as is known.
    """

    def __init__(self, root: str | Path, session: str) -> None:
        self.claim_refused = ""
        self._settings: MemoryFiles | None = None
        self._key = f"{zlib.crc32(repr((os.path.abspath(root), session)).encode()):08x}"  # noqa: PTH100 - no link is read
        top = Path(root) / session
        settings = read_settings_in_group("LocalCheckpointManager")
        if settings is not None:
            reason = why_not(settings)
            if not reason:
                self._settings = settings
                self.claim_refused = claim(settings.folder)
                top = Path(settings.folder) / memory_files.parts_name(self._key)
            elif os.environ.get("LOCAL_RANK", "0") == "0":
                say(f"local checkpoints lie in {top}, as their program says: {reason}")
        self.path = top / str(group.rank())
        self._top = top

    @property
    def node(self) -> str:
        """What tells the node of this folder from others."""
        return node_of(str(self._top), group.rank())

    @property
    def refused(self) -> str:
        """Why this rank can keep no part and load none; empty: it can, as far as is known.

        Megatron Bridge writes the state of a layer-wise distributed optimizer (Muon) to one file beside the parts,
        before each save, and loads it beside whatever iteration there is. Nothing says of which iteration it is.
        """
        if self.claim_refused:
            return self.claim_refused
        for name in self.names():
            if name.startswith(_FOREIGN):
                return (
                    f"the program keeps its optimizer's state in a file of its own ({name}), which may be of another"
                    " iteration than the part"
                )
        return ""

    def make(self) -> None:
        """Makes the folder.

        Raises:
            NotReadable, OSError: it cannot be made.
        """
        if self._settings is not None and not Path(self._settings.folder).is_dir():
            raise FileNotFoundError(f"{self._settings.folder} is gone")
        part_files.make_folder(self.path)

    def names(self) -> list[str]:
        """Returns the names of the files that are there."""
        return names_in(str(self.path))

    def parts(self) -> list[SavedPart]:
        """Returns what is whole, as far as its name and record say, of this rank in a job of as many ranks as now. What
        the launcher has set aside is left out."""
        found = []
        below = self._set_aside_from()
        for name in self.names():
            numbers = part_format.whole(name)
            part = part_files.part_of(self.path / name) if numbers is not None else None
            if part is None or numbers != (part.iteration, part.rank):
                continue
            if (part.rank, part.world) == (group.rank(), group.size()) and part.iteration < below:
                found.append(part)
        return found

    def remove_set_aside(self) -> None:
        """Removes what the launcher has set aside after faults that a bad state may have caused."""
        below = self._set_aside_from()
        self._remove(name for name in self.names() if (part_format.whole(name) or (-1,))[0] >= below)

    def remove_marks(self, node_ranks: Sequence[int]) -> None:
        """Removes the launcher's marks of that, on the first rank of the node. Called once all ranks have removed their
        parts: later saves of these iterations are good ones."""
        if self._settings is not None and group.rank() == node_ranks[0]:
            step_folders.remove_set_aside(Path(self._settings.folder))

    def _set_aside_from(self) -> float:
        """Returns from which iteration on parts are not used; infinity: all may be used."""
        below = None
        if self._settings is not None:
            below = memory_files.set_aside_from(names_in(self._settings.folder))
        if below is None:
            return math.inf
        return below

    def remove_dirty(self) -> None:
        """Removes files whose writer has died, or will give them no name any more."""
        self._remove(name for name in self.names() if part_format.is_dirty(name))

    def keep_only(self, iterations: Collection[int]) -> None:
        """Removes all parts but those of some iterations. Where none is given, the newest whole part stays."""
        names = self.names()
        whole = {}
        for name in names:
            numbers = part_format.whole(name)
            if numbers is not None:
                whole[name] = numbers[0]
        kept = set(iterations)
        if not kept and whole:
            kept = {max(whole.values())}
        self._remove(
            name for name in names if part_format.is_leftover(name) or (name in whole and whole[name] not in kept)
        )

    def remove_strangers(self, node_ranks: Collection[int]) -> None:
        """Removes the parts of ranks that are not on this node any more: ranks have moved, or there are fewer. No rank
        of the job looks for them here, and they would count against the limit until the job's end."""
        for path in self._strangers(node_ranks):
            shutil.rmtree(path, ignore_errors=True)

    def remove_dirty_of_strangers(self, node_ranks: Collection[int]) -> None:
        """Removes what writers of ranks that are not on this node any more have left."""
        for path in self._strangers(node_ranks):
            for name in names_in(str(path)):
                if part_format.is_dirty(name):
                    with suppress(OSError):
                        (path / name).unlink()

    def _strangers(self, node_ranks: Collection[int]) -> list[Path]:
        """Returns the folders of other ranks than these. None in the user's folder, which nodes may share."""
        if self._settings is None:
            return []
        own = {str(rank) for rank in node_ranks}
        return [self._top / name for name in names_in(str(self._top)) if name.isdecimal() and name not in own]

    def remove_iteration(self, iteration: int) -> None:
        """Removes the part of an iteration, and files that are not whole."""
        self._remove(
            name
            for name in self.names()
            if part_format.is_dirty(name) or (part_format.whole(name) or (None,))[0] == iteration
        )

    def mark(self, iteration: int) -> None:
        """Notes for the launcher that an iteration is complete in its folder: a launcher that starts after the death of
        this one takes over a folder in which a step is complete."""
        if self._settings is None:
            return
        folder = Path(self._settings.folder)
        own = PartsMark(iteration, self._key)
        # What was set aside is removed by `keep_only`, and this iteration may have a later number.
        remove_set_aside(folder)
        with suppress(OSError):
            (folder / own.name).touch(mode=0o600)
            for mark in memory_files.parts_marks(names_in(str(folder))):
                if mark.key == self._key and mark != own:
                    (folder / mark.name).unlink(missing_ok=True)

    def last_noted(self) -> int:
        """Returns the last iteration that a rank of this node has noted, also in an earlier start; 0: none has."""
        if self._settings is None:
            return 0
        return progress.last_step(self._settings.folder)

    def notes(self) -> StepNotes:
        """Returns where this rank notes its saves for the launcher; nowhere before `tell`, and without its folder."""
        if self._settings is None or self.claim_refused:
            return StepNotes()
        return progress.current(self._settings.folder, group.rank())

    def tell(self, found: Save | None, seen: SeenSaves) -> None:
        """Tells the launcher what a look for the newest local checkpoint came to, and begins the notes of this rank.

        Which checkpoint the program has on disk is not known here.

        Args:
            found: what is loaded; None: nothing.
            seen: what the ranks have said; all of them tell the same.
        """
        if self._settings is None or self.claim_refused:
            return
        tier, step, token = StateTier.NONE, 0, ""
        if found is not None:
            tier, step, token = StateTier.MEMORY, found.iteration, found.token
        reached = seen.reached
        if reached <= step:  # iterations are noted at saves only: how many came after the last one is not known
            reached = 0
        is_told = tell(StateLoaded(seen.number, tier, step, token, 0, reached))
        progress.begin(self._settings.folder, group.rank(), seen.node_ranks, step)
        if not is_told and found is not None and group.rank() == 0:
            say(line_of_step(step, 0))

    def set_aside(self, part: str, iteration: int) -> None:
        """Renames a part that was found torn, so that no load tries it again."""
        torn = self.path / part_format.torn_name(iteration, group.rank())
        try:
            (self.path / part).rename(torn)
        except OSError as problem:
            say(f"{self.path / part} cannot be set aside: {problem}")

    def largest(self) -> int:
        """Returns the bytes of this rank's largest file."""
        return max((size_of(self.path / name) for name in self.names()), default=0)

    def left(self) -> tuple[int, int, int]:
        """Returns how many bytes new parts of this node may have together: by the limit and the mount; by the memory,
        in which the copies on the host lie, too; and by the shared memory, where a persistent worker gets copies.

        Called once all ranks of the node have removed what they do not need any more.

        Raises:
            OSError: the folder cannot be looked at.
        """
        mount = os.statvfs(self.path)
        size, free = mount.f_blocks * mount.f_frsize, mount.f_bavail * mount.f_frsize
        is_in_memory = tmpfs.kind_of(str(self.path)) == tmpfs.KIND
        memory = memory_room()
        if self._settings is None:
            if not is_in_memory:
                # No process dies of a disk that is full: nothing need stay free.
                return Room(sys.maxsize, 0, 0, 0, free).left(), sys.maxsize, self._left_for_copies(0)
            files = Room(sys.maxsize, 0, 0, size, free).left()
            return files, _left_in_memory(memory, 0), self._left_for_copies(0)
        promised = allocated = 0
        for top, _, names in os.walk(self._settings.folder):
            for name in names:
                with suppress(OSError):
                    status = (Path(top) / name).lstat()
                    promised += status.st_size
                    allocated += status.st_blocks * 512
        unwritten = max(0, promised - allocated)
        if not is_in_memory:
            size = 0
        files = Room(self._settings.limit, promised, unwritten, size, free).left()
        return files, _left_in_memory(memory, unwritten), self._left_for_copies(unwritten)

    def _left_for_copies(self, unwritten: int) -> int:
        """Returns how many bytes the copies of this node's new parts may have in shared memory, beside the parts where
        these lie on the same mount."""
        try:
            mount = os.statvfs(SHARED_MEMORY)
            is_shared = os.stat(self.path).st_dev == os.stat(SHARED_MEMORY).st_dev
        except OSError:
            return 0
        size, free = mount.f_blocks * mount.f_frsize, mount.f_bavail * mount.f_frsize
        if is_shared:
            return Room(sys.maxsize, 0, unwritten, size, free).left() // 2
        return Room(sys.maxsize, 0, 0, size, free).left()

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):
                (self.path / name).unlink()


def _left_in_memory(memory: MemoryRoom | None, unwritten: int) -> int:
    """Returns what the memory alone allows."""
    return Room(sys.maxsize, 0, unwritten, 0, sys.maxsize // 2, 0, memory).left()
