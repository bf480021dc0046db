"""CRC-32, by the faster library where it is installed (extra `memory`)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any


def _fastest() -> Callable[[Any], int]:
    """Returns what computes the checksum of bytes: four times as fast with isal. Neither holds the GIL."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return isal_zlib.crc32


crc32 = _fastest()
