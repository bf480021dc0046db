"""A slow line: a TCP proxy that passes everything on later, and some of it much later.

Run as a program, it takes one connection after the other and does what lines of its input say; it ends with its input.
`SlowProxy` is the test's end of it. A lost packet is a stall of what follows, as it is for who uses TCP. Knows no
protocol.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType

_PIECE = 65536


@dataclass(frozen=True)
class Line:
    """How bad a line is: seconds on the way, the share of pieces that get lost, what such a loss costs, a seed."""

    delay_s: float = 0.0
    loss: float = 0.0
    stall_s: float = 0.3
    seed: int = 0


class SlowProxy:
    """A proxy at `port` of 127.0.0.1 of wherever `start` starts processes; a context manager.

    Args:
        start: as `subprocess.Popen`.
        host, port: where it passes things on to.
        line: how bad it is.
    """

    def __init__(self, start: Callable[..., subprocess.Popen[bytes]], host: str, port: int, line: Line) -> None:
        words = [sys.executable, "-S", str(Path(__file__)), host, str(port), *map(str, astuple(line))]
        self._process = start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stall(self) -> None:
        """From now on nothing is passed on; connections stay, and new ones are taken."""
        self._tell("stall")

    def go(self) -> None:
        """Takes `stall` back: what waited is passed on."""
        self._tell("go")

    def drop(self) -> None:
        """Breaks every connection there is."""
        self._tell("drop")

    def close(self) -> None:
        """Ends the proxy."""
        self._process.communicate()

    def __enter__(self) -> SlowProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()
        assert self._process.stdout.readline().decode().strip() == word


class _Lines:
    """The program: everything that is open, and whether anything passes."""

    def __init__(self, host: str, port: int, line: Line) -> None:
        self._target = host, port
        self._line = line
        self._random = random.Random(line.seed)
        self._passes = asyncio.Event()
        self._passes.set()
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
            match word:
                case "stall":
                    self._passes.clear()
                case "go":
                    self._passes.set()
                case "drop":
                    for writer in list(self._open):
                        writer.transport.abort()
            print(word, flush=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._open |= ends
        try:
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        except (OSError, asyncio.CancelledError):  # either end broke its connection, or the program ends
            pass
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: pieces keep their order, and each has its own time of arrival."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def arrive() -> None:
            piece = b"first"
            while piece:
                due, piece = await under_way.get()
                await asyncio.sleep(due - loop.time())
                await self._passes.wait()
                if piece:
                    writer.write(piece)
                    await writer.drain()
            writer.write_eof()

        loop = asyncio.get_running_loop()
        arrivals = asyncio.create_task(arrive())
        try:
            piece = b"first"
            while piece:
                piece = await reader.read(_PIECE)
                lost = self._random.random() < self._line.loss
                due = loop.time() + self._line.delay_s + lost * self._line.stall_s
                under_way.put_nowait((due, piece))
            await arrivals
        finally:
            arrivals.cancel()


if __name__ == "__main__":
    to_host, to_port, delay, loss, stall, seed = sys.argv[1:]
    asyncio.run(_Lines(to_host, int(to_port), Line(float(delay), float(loss), float(stall), int(seed))).serve())
