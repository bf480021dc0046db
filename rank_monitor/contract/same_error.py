"""What makes two errors of a program the same one: type and place, and the text where no iteration is reported. Pure.

The launcher compares the errors of cycles by it, and the in-process wrapper those of its iterations.
"""

from __future__ import annotations

import re

_DIGITS = re.compile(r"\d+")
_DIGEST = 16
"""Hexadecimal digits, 64 bits: some hundred texts of one job are compared with the one before."""


def comparable(error: str) -> str:
    """Returns `TYPE at PATH:LINE` with each number in the names of folders replaced by `#`.

    A job may unpack its program into a folder with the number of the attempt or a process in its name. The name of the
    file and the line stay as they are.
    """
    folders, slash, file_and_line = error.rpartition("/")
    return _DIGITS.sub("#", folders) + slash + file_and_line


def digest(text: str) -> str:
    """Returns a digest of an error's text: equal texts have equal ones, and nobody can read the text in it.

    It goes into stores, journals and bundles, and the text may hold what is nobody's business.
    """
    # Imported here: it loads OpenSSL, a tenth of a monitor's memory, and monitors compare no errors.
    import hashlib

    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_DIGEST]
