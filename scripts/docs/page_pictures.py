"""Takes the pictures of the status page in docs/pictures: `python -m scripts.docs.page_pictures`, `make pictures`.

One job of real ranks is on all of them: a rank hangs in a checkpoint, the job restarts, and a rank is stopped. Needs
Chromium with its driver, and `unshare` of util-linux, which gives the job the name of a host of its own.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from tests.browser import Browser, chromium
from tests.ports import free_port

from . import pictured_training

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
RANKS = 16
STOPPED = 2
"""The rank that is stopped in the second cycle."""
_HOST = "node-17"
_LIMIT_S = 6
"""Of a checkpoint, which takes a tenth of a second."""
_STEPS = 150
"""The second cycle has made so many steps before it is stopped: a picture shows the time of both cycles."""
_WAIT_S = 180.0
_FLAGS = (
    *("--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3", "--ft-job-name=digits"),
    *(f"--ft-rank-section-timeouts=checkpointing:{_LIMIT_S}", "--ft-rank-termination-signal=SIGTERM"),
    # The rank that hangs is on the page for so long; it is killed once its picture is taken.
    *(f"--ft-termination-grace-time={_WAIT_S:g}", "--workers-stop-timeout=1", "--ft-preemption-grace=1"),
)


def main() -> int:
    """Writes the pictures; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser, job(Path(folder)) as port:
        address = f"http://127.0.0.1:{port}/"
        until(lambda: status(port)["state"] == "hung", "the rank that hangs")
        show(browser, address, "light", 900)
        browser.until(lambda: browser.text("h1").startswith("hung"), "the rank that hangs")
        browser.press("TAB", "HOME", *["ARROW_RIGHT"] * pictured_training.HANGS)
        browser.until(lambda: f"rank {pictured_training.HANGS}" in browser.text("#rank"), "the rank that is pointed at")
        take(browser, "page_hung.png", "header", "section[aria-labelledby=of_faults]")

        os.kill(pid_of(port, pictured_training.HANGS), signal.SIGKILL)
        until(lambda: min(steps(port)) >= _STEPS, "steps of the second cycle")
        show(browser, address, "dark", 900)
        browser.find("#faults details summary").click()
        browser.until(lambda: "entered" in browser.text("#faults"), "the collectives of the fault")
        take(browser, "page_fault.png", "section[aria-labelledby=of_faults]", "section[aria-labelledby=of_cycles]")

        # Not in a checkpoint, whose limit would end it. What the job says of its steps is a second old.
        until(lambda: 5 < min(steps(port)) % pictured_training.SAVED < 20, "steps after a checkpoint")
        os.kill(pid_of(port, STOPPED), signal.SIGSTOP)
        until(lambda: status(port)["state"] == "stalled", "the stall")
        show(browser, address, "light", 500)
        browser.until(lambda: f"rank {STOPPED} is stopped" in browser.text("h1"), "the stall with its cause")
        take(browser, "page_narrow.png", "header", "section[aria-labelledby=of_time]")
    return 0


@contextlib.contextmanager
def job(folder: Path) -> Iterator[int]:
    """Runs the job; returns the port of its page."""
    port = free_port()
    words = ["unshare", "--uts"]
    if os.geteuid() != 0:
        words.append("--map-root-user")
    words += ["sh", "-c", f'hostname {_HOST} && exec "$@"', "sh", sys.executable, "-m", "ft_launcher"]
    words += [*_FLAGS, f"--ft-status-port={port}", f"--log-dir={folder / 'logs'}", pictured_training.__file__]
    # No resolver knows the name.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=sys.stderr) as launcher:
        try:
            yield port
        finally:
            launcher.send_signal(signal.SIGTERM)


def status(port: int) -> dict[str, Any]:
    """Returns what the job says of itself; its state is empty before it can be asked."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT_S)
    with contextlib.suppress(OSError), contextlib.closing(connection):
        connection.request("GET", "/status.json")
        found: dict[str, Any] = json.load(connection.getresponse())
        return found
    return {"state": "", "ranks": []}


def steps(port: int) -> list[int]:
    """Returns the step of each rank, -1 for one that has reported none; [-1] without ranks."""
    return [-1 if rank["iteration"] is None else rank["iteration"] for rank in status(port)["ranks"]] or [-1]


def pid_of(port: int, number: int) -> int:
    """Returns the process of a rank."""
    return next(int(rank["pid"]) for rank in status(port)["ranks"] if rank["rank"] == number)


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_WAIT_S:g} s: {what}")
        time.sleep(0.2)


def show(browser: Browser, address: str, theme: str, width: int) -> None:
    """Opens the page, in a window that is higher than all of it."""
    browser.resize(width, 2000)
    browser.theme(theme)
    browser.open(address)
    browser.until(lambda: "live" in browser.text("#connection"), "the first event")


def take(browser: Browser, name: str, first: str, last: str) -> None:
    """Writes a picture of the page, from one element to another one below it."""
    margin = 16
    top = browser.find(first).rect["y"]
    bottom = browser.find(last).rect["y"] + browser.find(last).rect["height"]
    width = browser.script("return document.documentElement.clientWidth")
    clip = {"x": 0, "y": max(0, top - margin), "width": width, "height": bottom - top + margin, "scale": 1}
    wanted = {"format": "png", "clip": clip, "captureBeyondViewport": True}
    taken = browser.driver.execute_cdp_cmd("Page.captureScreenshot", wanted)
    with Image.open(io.BytesIO(base64.b64decode(taken["data"]))) as picture:
        # A page has few colours, and a third of the bytes this way.
        picture.convert("RGB").quantize(256).save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
