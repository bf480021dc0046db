"""The secret by which the nodes of a job know each other: a file that the user gives to each of them.

A secret in the job's store would be readable by whoever reaches that store. A file of one user is not.
"""

from __future__ import annotations

import os
import stat

from rank_monitor.contract.wire.foreign import open_regular

MIN_SECRET = 16
"""Bytes. A shorter one could be guessed by who has seen a proof made with it."""
MAX_SECRET = 4096
"""Bytes. A larger file was probably named by mistake."""


_CLOSED = {True: 0o077, False: 0o037}
"""Whether the file is this user's own -> the permissions that nobody else may have. A secret that Kubernetes mounts is
a file of root, which this user reads by its group (`fsGroup`, and `defaultMode: 0440`)."""


def read_job_secret(path: str | os.PathLike[str]) -> bytes:
    """Returns the secret in a file, without the end of its last line, which editors add. Does not block.

    Args:
        path: of the file; may be a symbolic link, as the files of a mounted secret are.

    Raises:
        ValueError: there is no such file, or it is not fit: the text says why, in words for the user, and never holds
            a part of the secret.
    """
    try:
        with open_regular(path, follow_link=True) as file:
            found = os.fstat(file.fileno())
            content = file.read(MAX_SECRET + 3)
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror or problem}") from None
    if found.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{path} is a file of another user (uid {found.st_uid}, and this is {os.geteuid()})")
    if found.st_mode & _CLOSED[found.st_uid == os.geteuid()]:
        raise ValueError(f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600 {path}")
    secret = content.removesuffix(b"\n").removesuffix(b"\r")
    if len(secret) < MIN_SECRET:
        raise ValueError(f"{path} has {len(secret)} bytes, and a secret needs {MIN_SECRET}")
    if len(secret) > MAX_SECRET:
        raise ValueError(f"{path} has more than {MAX_SECRET} bytes")
    return secret
