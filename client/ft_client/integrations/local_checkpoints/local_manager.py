"""`LocalCheckpointManager`: the manager whose parts are files of this node."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ft_client.integrations.local_checkpoints import part_files, part_format
from ft_client.integrations.local_checkpoints.agreement import Bid, Save, SeenSaves
from ft_client.integrations.local_checkpoints.base_manager import (
    BaseCheckpointManager,
    CheckpointingException,
    CkptID,
)
from ft_client.integrations.local_checkpoints.part_files import TornPart
from ft_client.integrations.local_checkpoints.part_format import SavedPart
from ft_client.integrations.local_checkpoints.parts_folder import PartsFolder
from ft_client.integrations.local_checkpoints.state_dicts import TensorAwareStateDict
from ft_client.rank.agreement import group


class LocalCheckpointManager(BaseCheckpointManager):
    """Keeps the newest complete checkpoint on each node: in the launcher's folder in memory, else in the given one.

    Args:
        root_local_ckpt_dir: the folder for the parts where the launcher has none.
        session_id: tells the checkpoints of one program from those of others in the same folder.
        repl_strategy: refused with one line: nothing is replicated.
    """

    def __init__(
        self, root_local_ckpt_dir: str | Path, session_id: str = "", repl_strategy: object | None = None
    ) -> None:
        super().__init__(session_id, repl_strategy)
        self.root_local_ckpt_dir = root_local_ckpt_dir
        self._folder: PartsFolder | None = None

    @property
    def _parts(self) -> PartsFolder:
        """The folder of this rank, which is known once there is a process group."""
        if self._folder is None:
            self._folder = PartsFolder(self.root_local_ckpt_dir, str(self.session_id))
        return self._folder

    @property
    def local_ckpt_dir(self) -> Path:
        """The folder of this rank's parts."""
        return self._parts.path

    def _prepare(self) -> None:
        self._parts.names()

    def _place(self) -> tuple[str, int]:
        return self._parts.node, self._parts.last_noted()

    def _forget_bad(self, seen: SeenSaves) -> None:
        self._parts.remove_set_aside()
        group.min_over_ranks([1.0])
        self._parts.remove_marks(seen.node_ranks)

    def _on_look(self, found: Save | None, seen: SeenSaves) -> None:
        self._parts.tell(found, seen)

    def _on_save(self, iteration: int, cost_s: float) -> None:
        self._parts.notes().reached(iteration)
        self._parts.notes().cost(cost_s)

    def _on_saved(self, is_whole: bool) -> None:
        if is_whole:
            self._parts.notes().saved(self._parts.largest())
        else:
            self._parts.notes().failed()

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        if self._parts.refused:
            return []
        return [(part.iteration, part.rank, self.session_id) for part in self._parts.parts()]

    def _token_of(self, ckpt_id: CkptID) -> str:
        part = part_files.part_of(self._local_ckpt_path_from_id(ckpt_id))
        if part is None:
            return ""
        return part.token

    def _make_room(self, kept: Collection[int] | None) -> str:
        parts = self._parts
        refused = parts.refused
        if refused:
            return refused
        try:
            parts.make()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if kept is None:
            parts.remove_dirty()
        else:
            parts.keep_only(kept)
        return ""

    def _on_node(self, node_ranks: Collection[int]) -> None:
        if self.rank == min(node_ranks):
            self._parts.remove_dirty_of_strangers(node_ranks)

    def _bid(self, state_dict: TensorAwareStateDict) -> Bid:
        parts = self._parts
        need = left = in_memory = for_copies = 0
        refused = parts.refused
        if not refused:
            try:
                need = max(_bytes_of(state_dict), 1)
                if need == 1:
                    need = max(need, parts.largest())
                left, in_memory, for_copies = parts.left()
            except Exception as error:
                refused = f"{type(error).__name__}: {error}"
        token = os.urandom(part_format.TOKEN_BYTES).hex()
        return Bid(parts.node, token, need, left, in_memory, for_copies, refused)

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Reads and verifies a part.

        Raises:
            CheckpointingException: it is not there, or torn, or of another save than was agreed upon.
            Exception: whatever its objects raise as they are made. The file stays.
        """
        path = self._local_ckpt_path_from_id(ckpt_id)
        try:
            state, part = part_files.read(path)
        except FileNotFoundError:
            raise CheckpointingException(f"{path} is not there") from None
        except TornPart as problem:
            self._parts.set_aside(path.name, ckpt_id[0])
            raise CheckpointingException(f"{problem}; it is set aside") from None
        if (part.iteration, part.rank, part.token) != (ckpt_id[0], ckpt_id[1], self._agreed_token):
            raise CheckpointingException(f"{path.name} is of another save now")
        found: TensorAwareStateDict = state
        return found

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        iteration, rank, _ = ckpt_id
        dirty = self._parts.path / part_format.dirty_name(iteration, rank, self._token)
        part = SavedPart(iteration, rank, self._size, self._token, 0, 0)
        part_files.write(state_dict, dirty, self._local_ckpt_path_from_id(ckpt_id), part, self._replaced)

    def _cleanup(self, iteration: int) -> None:
        self._parts.mark(iteration)
        self._parts.keep_only({iteration})
        if self.rank == min(self._node_ranks):
            self._parts.remove_strangers(self._node_ranks)

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._parts.remove_iteration(iteration)

    def _filename_from_template(self, iteration: int | str, rank: int | str, extra_suffix: str = "") -> str:
        """Returns the name of a part's file, by the peer's pattern."""
        return part_format.file_name(iteration, rank, extra_suffix)

    def _filename_to_id(self, filename: str) -> CkptID:
        """Returns what the name of a part's file says, by the peer's pattern."""
        _, iteration, rank, _ = filename.split("_", 3)
        return int(iteration), int(rank), self.session_id

    def _local_ckpt_path_from_id(self, ckpt_id: CkptID, is_dirty: bool = False) -> Path:
        """Returns where the file of a part lies once it is whole; `is_dirty`: while it is written."""
        if is_dirty:
            return self._parts.path / part_format.dirty_name(ckpt_id[0], ckpt_id[1], self._token)
        return self._parts.path / part_format.file_name(ckpt_id[0], ckpt_id[1])


def _bytes_of(state_dict: TensorAwareStateDict) -> int:
    """Returns how many bytes the tensors of a state have; 0: it does not say."""
    try:
        tensors: Any = state_dict.tensors
        return sum(tensor.nbytes for tensor in tensors)
    except Exception:
        return 0
