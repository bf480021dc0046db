"""A real browser: Chromium without a window, driven by selenium. No name but 127.0.0.1 leads anywhere in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.patience import patient

LIMIT_S = 30
_PROGRAMS = ("chromium", "chromedriver")
_T = TypeVar("_T")


def needs_chromium() -> None:
    """Skips the test where there is no Chromium; fails it in CI."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        if os.environ.get("CI"):
            pytest.fail(f"{', '.join(missing)} is not installed: apt install chromium chromium-driver")
        pytest.skip(f"{', '.join(missing)} is not installed")


class Browser:
    """One window of Chromium, driven by a test."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self._requested: list[str] = []

    def open(self, address: str) -> None:
        """Goes to an address; what was requested before is forgotten."""
        self.driver.get("about:blank")
        self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        self._requested = []
        self.driver.get(address)

    def resize(self, width: int, height: int) -> None:
        """Makes the page as large as this, in pixels of the style sheet."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def theme(self, name: str) -> None:
        """Prefers `dark` or `light`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def find(self, selector: str) -> WebElement:
        """The first element of a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return self.find(selector).text

    def press(self, *keys: str) -> None:
        """Presses keys, which go to the element that has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(getattr(Keys, key, key))

    def script(self, code: str, *arguments: Any) -> Any:
        """Returns what JavaScript returns."""
        return self.driver.execute_script(code, *arguments)  # type: ignore[no-untyped-call]

    def until(self, condition: Callable[[], _T], what: str) -> _T:
        """Waits until a condition is true; returns its value."""
        ignored = (StaleElementReferenceException,)
        waiting = WebDriverWait(self.driver, patient(LIMIT_S), poll_frequency=0.05, ignored_exceptions=ignored)
        return waiting.until(lambda _: condition(), what)

    def requested(self) -> list[str]:
        """The addresses that the page has requested since it was opened."""
        for entry in self.driver.get_log("performance"):  # type: ignore[no-untyped-call]
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._requested.append(message["params"]["request"]["url"])
        return self._requested

    def complaints(self) -> list[str]:
        """What the browser has written to its console since the page was opened: errors, what its policy forbade."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in a folder; ended with all its processes."""
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for word in (
        "--headless=new",
        "--no-sandbox",  # tests may run as root, as which Chromium has no sandbox
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder / 'profile'}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    service = Service(shutil.which("chromedriver"), log_output=str(folder / "chromedriver.log"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Browser(driver)
        finally:
            driver.quit()
