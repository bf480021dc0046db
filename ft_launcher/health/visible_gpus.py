"""Which GPUs CUDA shows to the ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def visible(asked: str | None, uuids: Sequence[str | None]) -> tuple[list[int], str]:
    """Indices of the GPUs that CUDA will show, and the first word that names none: CUDA stops reading there.

    Args:
        asked: CUDA_VISIBLE_DEVICES: indices, or beginnings of UUIDs; None: all.
        uuids: of every GPU of the node, in the driver's order; None: not known.
    """
    if asked is None:
        return list(range(len(uuids))), ""
    found: list[int] = []
    for word in (part.strip() for part in asked.split(",")):
        if word.isdigit():
            named = [int(word)] if int(word) < len(uuids) else []
        else:
            named = [index for index, uuid in enumerate(uuids) if word and uuid and uuid.startswith(word)]
        if len(named) != 1:
            return found, word if word not in ("", "-1") else ""
        found += named
    return found, ""
