"""The checksum is the same with and without isal: a file may be read where the library is not installed."""

from __future__ import annotations

from ft_client.memory import checksum
from tests.program import python

CHECK_VALUE = 0xCBF43926
"""Of CRC-32: the checksum of `123456789`."""


def test_the_checksum_is_crc_32() -> None:
    assert checksum.crc32(b"123456789") == CHECK_VALUE
    assert checksum.crc32(b"6789", checksum.crc32(b"12345")) == CHECK_VALUE


def test_without_isal_zlib_computes_the_same() -> None:
    code = (
        "import sys; sys.modules['isal'] = None; from ft_client.memory import checksum\n"
        "print(checksum.LIBRARY.split()[0], checksum.crc32(b'123456789'))"
    )
    assert python(code).stdout.split() == ["zlib", str(CHECK_VALUE)]
