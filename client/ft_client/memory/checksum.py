"""CRC-32, by the faster library where it is installed (extra `memory`). Neither library holds the GIL."""

from __future__ import annotations

import zlib

try:
    from isal import isal_zlib
except ImportError:
    LIBRARY = "zlib (isal is four times as fast: pip install 'ft-launcher[memory]')"
    crc32 = zlib.crc32
else:
    LIBRARY = "isal"
    crc32 = isal_zlib.crc32
