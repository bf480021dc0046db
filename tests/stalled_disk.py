"""A file system in memory that stops answering when it is told to: a small FUSE server, as a process of its own.

    python -m tests.stalled_disk FOLDER   mounts it at FOLDER, prints "mounted", and serves until it is unmounted

SIGUSR1 makes it hold the next request, and all later ones, after it has read the first: that request is being served,
and SIGKILL does not end who waits for it. SIGTSTP has it stop once it has answered what it has read: later requests are
queued, and SIGKILL ends who waits. SIGSTOP could come between a request and its answer. SIGUSR2 and SIGCONT have it go
on. Needs root and /dev/fuse. Speaks FUSE by itself, from <linux/fuse.h>
(protocol 7.19 and what of 7.31 is the same): a file system of one user with regular files, folders and sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import stat
import struct
import sys
import time
from dataclasses import dataclass, field

_IN = struct.Struct("<IIQQIIII")
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _MKNOD, _MKDIR, _UNLINK, _RMDIR, _RENAME = 1, 2, 3, 4, 8, 9, 10, 11, 12
_OPEN, _READ, _WRITE, _STATFS, _RELEASE, _INIT = 14, 15, 16, 17, 18, 26
_OPENDIR, _READDIR, _RELEASEDIR, _ACCESS, _CREATE, _INTERRUPT, _BATCH_FORGET, _RENAME2 = 27, 28, 29, 34, 35, 36, 42, 45
_NO_ANSWER = (_FORGET, _BATCH_FORGET, _INTERRUPT)
_MOST = 1 << 17
_ROOT = 1
_SHOWN_UID = int(os.environ.get("SHOWN_UID", "0"))
"""The owner of all that is made here, as a file server that maps users shows it."""


@dataclass
class Node:
    """A file or folder."""

    mode: int
    data: bytearray = field(default_factory=bytearray)
    children: dict[str, int] = field(default_factory=dict)


class Server:
    """Answers requests, one after the other."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.nodes = {_ROOT: Node(stat.S_IFDIR | 0o777)}
        self.holds = self.stops = False

    def serve(self, signals: int) -> None:
        """Serves until the file system is unmounted. `signals`: readable once a signal has come."""
        waits = select.poll()
        waits.register(self.device, select.POLLIN)
        waits.register(signals, select.POLLIN)
        while True:
            ready = dict(waits.poll())
            if signals in ready:
                os.read(signals, 64)
            if self.stops:
                self.stops = False
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.device not in ready:
                continue
            try:
                request = os.read(self.device, _MOST + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            while self.holds:
                time.sleep(0.01)
            _, operation, unique, node, *_ = _IN.unpack_from(request)
            body = request[_IN.size :]
            if operation in _NO_ANSWER:
                continue
            try:
                answer, code = self._answer(operation, node, body), 0
            except KeyError:
                answer, code = b"", errno.ENOENT
            except OSError as error:
                answer, code = b"", error.errno or errno.EIO
            with contextlib.suppress(OSError):  # who asked has gone
                os.write(self.device, struct.pack("<IiQ", 16 + len(answer), -code, unique) + answer)

    def _answer(self, operation: int, number: int, body: bytes) -> bytes:  # noqa: C901 (one case for each operation)
        if operation == _INIT:
            _, minor = struct.unpack_from("<II", body)
            return struct.pack("<IIIIHHIII28x", 7, min(minor, 31), 65536, 0, 12, 10, _MOST // 2, 1, 0)
        node = self.nodes[number]
        match operation:
            case 1:
                return self._entry(node.children[_name(body)])
            case 3:
                return self._attributes(number)
            case 4:
                return self._set(number, body)
            case 9:
                return self._entry(self._make(node, _name(body[8:]), stat.S_IFDIR | 0o777))
            case 8:  # a socket of the launcher
                (mode,) = struct.unpack_from("<I", body)
                return self._entry(self._make(node, _name(body[16:]), mode))
            case 35:
                (mode,) = struct.unpack_from("<4xI", body)
                return self._entry(self._make(node, _name(body[16:]), mode)) + bytes(16)
            case 10 | 11:
                del node.children[_name(body)]
                return b""
            case 12 | 45:
                (target,) = struct.unpack_from("<Q", body)
                old, new = body[8 if operation == 12 else 16 :].split(b"\0")[:2]
                self.nodes[target].children[new.decode()] = node.children.pop(old.decode())
                return b""
            case 14 | 27:
                return bytes(16)
            case 15:
                _, offset, size = struct.unpack_from("<QQI", body)
                return bytes(node.data[offset : offset + size])
            case 16:
                _, offset, size = struct.unpack_from("<QQI", body)
                node.data[offset : offset + size] = body[40 : 40 + size]
                return struct.pack("<II", size, 0)
            case 17:
                return struct.pack("<QQQQQIII28x", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096)
            case 28:
                return self._list(node, body)
            case 18 | 29 | 34:
                return b""
        raise OSError(errno.ENOSYS, "not here")

    def _make(self, parent: Node, name: str, mode: int) -> int:
        number = max(self.nodes) + 1
        self.nodes[number] = Node(mode)
        parent.children[name] = number
        return number

    def _set(self, number: int, body: bytes) -> bytes:
        (valid,) = struct.unpack_from("<I", body)
        node = self.nodes[number]
        if valid & 8:
            (size,) = struct.unpack_from("<Q", body, 16)
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
        if valid & 1:
            (mode,) = struct.unpack_from("<I", body, 68)
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
        return self._attributes(number)

    def _attributes(self, number: int) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._stat(number)

    def _entry(self, number: int) -> bytes:
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + self._stat(number)

    def _stat(self, number: int) -> bytes:
        node = self.nodes[number]
        times = (0, 0, 0, 0, 0, 0)
        return struct.pack(
            "<QQQQQQIIIIIIIIII",
            *(number, len(node.data), 8, *times[:3], *times[3:], node.mode, 1, _SHOWN_UID, 0, 0, 4096, 0),
        )

    def _list(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        found = b""
        for place, (name, number) in enumerate(list(node.children.items())[offset:], offset + 1):
            raw = name.encode()
            entry = struct.pack("<QQII", number, place, len(raw), self.nodes[number].mode >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found


def _name(body: bytes) -> str:
    return body.split(b"\0")[0].decode()


def mount(folder: str) -> int:
    """Mounts the file system; returns the descriptor of its device."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40777,user_id=0,group_id=0,allow_other".encode()
    if ctypes.CDLL(None, use_errno=True).mount(b"stalled", folder.encode(), b"fuse.stalled", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    return device


def main() -> None:
    """Mounts and serves."""
    server = Server(mount(sys.argv[1]))
    signal.signal(signal.SIGUSR1, lambda *_: setattr(server, "holds", True))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(server, "holds", False))
    signal.signal(signal.SIGTSTP, lambda *_: setattr(server, "stops", True))
    signals, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    print("mounted", flush=True)
    server.serve(signals)


if __name__ == "__main__":
    main()
