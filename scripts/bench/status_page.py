"""P14: what it takes to ask a launcher, with a simulated node of many ranks: a scrape of the metrics, an update of the
page in Chromium, and the memory that the launcher needs for it.

Without Chromium or selenium the page is a failure in the table, and the rest is measured.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from .job import JobFailed
from .launchers import COMMON_ENVIRONMENT, OURS, ROOT, Launcher
from .scenario import Outcome

SCRAPES = 50
UPDATES = 10
LIMIT_S = 60.0
_LAST_UPDATE = "const [last] = performance.getEntriesByName('update'); return last && [last.startTime, last.duration]"
_CHROMIUM = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server")


def asked(_launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """Everything that one node's launcher is asked for."""
    words = [sys.executable, "-m", "scripts.bench.simulated_status", str(ranks)]
    environment = {**os.environ, **COMMON_ENVIRONMENT, **OURS.environment}
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True, cwd=ROOT, env=environment) as child:
        try:
            assert child.stdin is not None and child.stdout is not None
            began = _read(child.stdout.readline())
            port = began["port"]
            for path in ("metrics", "status.json"):
                name = path.partition(".")[0]
                _get(port, f"/{path}")  # what is needed for it is imported
                spent_s = _cpu_s(child.pid)
                took_s = [_get(port, f"/{path}") for _ in range(SCRAPES)]
                outcome.add(f"{name}_cpu_ms", 1000 * (_cpu_s(child.pid) - spent_s) / SCRAPES)
                outcome.add(f"{name}_ms", 1000 * statistics.median(took_s))
            try:
                _page(port, outcome)
            finally:
                child.stdin.write("memory\n")
                child.stdin.flush()
                now = _read(child.stdout.readline())
                outcome.add("added_memory_mib", now["memory_mib"] - began["memory_mib"])
        finally:
            child.kill()


def _read(line: str) -> dict[str, Any]:
    if not line:
        raise JobFailed("the simulated launcher ended before its time")
    found: dict[str, Any] = json.loads(line)
    return found


def _cpu_s(pid: int) -> float:
    spent = psutil.Process(pid).cpu_times()
    return float(spent.user + spent.system)


def _get(port: int, path: str) -> float:
    """Seconds from the connect to the end of the answer."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    connection.close()
    if response.status != 200:
        raise JobFailed(f"{path} was answered with {response.status}")
    return time.monotonic() - began


def _page(port: int, outcome: Outcome) -> None:
    """Some updates: `page_update_ms` is the page's own work from an event's text to the last mark drawn,
    `page_busy_ms` all that Chromium's main thread did for it, layout and painting included."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError as error:
        raise JobFailed(f"no page: {error}") from None
    options = webdriver.ChromeOptions()
    options.binary_location = _program("chromium")
    for word in _CHROMIUM:
        options.add_argument(word)
    driver = webdriver.Chrome(options, Service(_program("chromedriver")))
    try:
        driver.set_window_size(1280, 1000)
        driver.execute_cdp_cmd("Performance.enable", {})
        driver.get(f"http://127.0.0.1:{port}/")
        took_ms: dict[float, float] = {}

        def next_one() -> None:
            known = len(took_ms)
            deadline = time.monotonic() + LIMIT_S
            while len(took_ms) == known:
                last = driver.execute_script(_LAST_UPDATE)
                if last is not None:
                    took_ms[last[0]] = last[1]
                if time.monotonic() > deadline:
                    raise JobFailed("the page shows nothing new")
                time.sleep(0.1)

        next_one()  # the first one draws all of it
        before_s = _busy_s(driver.execute_cdp_cmd)
        for _ in range(UPDATES):
            next_one()
        busy_s = _busy_s(driver.execute_cdp_cmd) - before_s
        first, *others = took_ms.values()
        outcome.add("page_first_ms", first)
        outcome.add("page_update_ms", statistics.median(others))
        outcome.add("page_update_max_ms", max(others))
        outcome.add("page_busy_ms", 1000 * busy_s / UPDATES)
    finally:
        driver.quit()


def _busy_s(command: Callable[[str, dict[str, Any]], dict[str, Any]]) -> float:
    found = command("Performance.getMetrics", {})["metrics"]
    return next(float(one["value"]) for one in found if one["name"] == "TaskDuration")


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise JobFailed(f"no page: {name} is not installed")
    return path
