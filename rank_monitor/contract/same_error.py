"""What makes two errors of a program the same one: type, location, and the text where no iteration is reported. Pure.

`restart_history.py` compares errors by it: those of cycles for the launcher, of rounds for the in-process wrapper.
"""

from __future__ import annotations

import re

_DIGITS = re.compile(r"\d+")
_DIGEST = 16
"""Hexadecimal digits, 64 bits: enough to tell some hundred texts of one job apart, each from the one before."""


def comparable(error: str) -> str:
    """Returns `TYPE at PATH:LINE` with each number in the names of folders replaced by `#`.

    A job may unpack its program into a folder with the number of the attempt or of a process in its name. The same
    error would then be another one after each restart. The name of the file and the line stay as they are.
    """
    folders, slash, file_and_line = error.rpartition("/")
    return _DIGITS.sub("#", folders) + slash + file_and_line


def digest(text: str) -> str:
    """Returns a digest of an error's text: equal texts have equal digests, and nobody can read the text in a digest.

    The digest goes into stores, journals and bundles, and the text may hold what is nobody's business.
    """
    # Imported here: `hashlib` loads OpenSSL, a tenth of a monitor's memory, and monitors compare no errors.
    import hashlib

    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_DIGEST]
